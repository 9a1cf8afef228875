"""A length penalty that presses on easy tasks and leaves hard ones room, and behaviours to watch beside it.

Report §4.2, Fig. 6 (claims B1–B3). From the reward of every rollout a concave function of effort is taken:

    x = Σ weight · counter          thinking, call, output, final: tokens; calls, turns: how many
    C(x) = ((1 + k x)^(1 − q) − 1) / (k (1 − q))      C(0) = 0, C′(0) = 1; concave for k, q > 0
    C′(x) = (1 + k x)^(−q)                            the margin: what one more unit of effort costs
    shaped = reward + behaviour − λ C(x)              one λ for all: only differences inside a group matter

Limits: q → 0 or k → 0: C = x. q → 1: log(1 + k x)/k. q > 1: bounded by 1/(k (q − 1)), long runs feel nothing.

Differences from the report, which gives the formula, the six counters and the kinds of behaviour:
1. k, q, λ and the weights are ours; x is in thousand tokens. With raw token counts a slope of 1 per token
   would drown a reward of 0 or 1. Tool results cost a fifth: they are read, not written.
2. The behaviours are readings of text and call lists, without a judge model: comments and line lengths for
   style, a final message for communication. Stricter readings belong to a product's own conventions.
3. As in the report failures pay too, so a group without a success is drawn to giving up early: keep λ small
   (`largest_lam`). A penalty scaled by the group's success rate, off in such groups, is left out.

    python length_penalty.py      curves, margin, parallel calls, λ, deviations, broken calls, the monitor
"""
from __future__ import annotations

import itertools
import math
import re
import warnings
from dataclasses import dataclass, field
from statistics import mean, quantiles, stdev
from typing import Iterable, Mapping, Sequence

COUNTERS = ("thinking", "call", "output", "final", "calls", "turns")


@dataclass(frozen=True)
class Penalty:
    """λ, the shape (k, q) and the weight of each counter, all ours. ValueError for a negative one."""
    lam: float = 0.05                  # reward per unit of C; a solved task is worth 1
    k: float = 0.1                     # per unit of effort: where the curve begins to bend
    q: float = 0.8                     # how much it bends
    thinking: float = 1e-3             # per token
    call: float = 1e-3                 # per token of tool calls
    output: float = 2e-4               # per token of tool results
    final: float = 1e-3                # per token of the answer
    calls: float = 0.1                 # per tool call
    turns: float = 0.2                 # per turn

    def __post_init__(self) -> None:
        for name in ("lam", "k", *COUNTERS):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} = {value}: must be 0 or positive, effort is never rewarded")
        if not math.isfinite(self.q):
            raise ValueError(f"q = {self.q}: must be a number, 0 (linear) to about 1 (logarithmic)")
        if self.q < 0:
            warnings.warn(f"q = {self.q} is negative: the penalty is convex and presses most on hard tasks",
                          stacklevel=3)


def effort(counters: Mapping[str, float], p: Penalty) -> float:
    """x = Σ weight · counter for the six counters of a rollout, in thousand-token units.

    KeyError for a missing counter, ValueError for a negative or infinite one.
    """
    for name in COUNTERS:
        if name not in counters:
            raise KeyError(f"counter {name} is missing: effort is made of {', '.join(COUNTERS)}")
        if not 0 <= counters[name] < math.inf:
            raise ValueError(f"counter {name} = {counters[name]}: a count is 0 or positive")
    return sum(getattr(p, name) * counters[name] for name in COUNTERS)


def penalty(x: float, k: float, q: float) -> float:
    """C(x) for effort x, exact near every limit: with L = log1p(k x), expm1((1 − q) L) / (k (1 − q)).

    The textbook form divides by zero at q = 1 and loses its digits near q = 1, near k = 0 and for small x.
    ValueError for x or k negative or not finite: 1 + k x could be below 0.
    """
    if not (0 <= x < math.inf and 0 <= k < math.inf):
        raise ValueError(f"x = {x}, k = {k}: effort and k must be 0 or positive numbers")
    if k == 0 or q == 0:
        return float(x)
    L = math.log1p(k * x)
    return L / k if q == 1 else math.expm1((1 - q) * L) / (k * (1 - q))


def slope(x: float, k: float, q: float) -> float:
    """C′(x) = (1 + k x)^(−q): what one more unit of effort costs."""
    return math.exp(-q * math.log1p(k * x))


def cost(counters: Mapping[str, float], p: Penalty) -> float:
    """λ C(x): what is subtracted from the reward of a rollout with these counters."""
    return p.lam * penalty(effort(counters, p), p.k, p.q)


def largest_lam(groups: Iterable[Sequence[float]], k: float, q: float, gap: float = 1.0,
                share: float = 0.25) -> float:
    """The largest λ for which λ · (C at the 95th − C at the 5th percentile) ≤ share · gap inside every group.

    groups: efforts x of the rollouts of each task (two or more), measured before the penalty is switched on.
    gap: reward of a solved minus that of a failed rollout: a long solution must still beat a short failure.
    ValueError where no group has a spread.
    """
    spreads = []
    for efforts in groups:
        cuts = quantiles([penalty(x, k, q) for x in efforts], n=20, method="inclusive")  # 5 %, 10 %, …, 95 %
        spreads.append(cuts[-1] - cuts[0])
    if max(spreads, default=0.0) <= 0:
        raise ValueError("no group's rollouts differ in effort: there is nothing to choose λ from")
    return share * gap / max(spreads)


# --------------------------------------------------------------------------------------- behaviour (claim B1)


@dataclass
class Record:
    """What the behaviours are read from. `turns`: per turn its calls as (tool, arguments accepted)."""
    turns: list[list[tuple[str, bool]]] = field(default_factory=list)
    todos_opened: int = 0
    todos_closed: int = 0
    added: list[str] = field(default_factory=list)           # lines of code that the rollout added
    final: str = ""                                          # its last message

    @property
    def calls(self) -> list[tuple[str, bool]]:
        return [call for turn in self.turns for call in turn]


def open_todos(r: Record) -> float:
    """To-do items that were created and left, the report's example of a product's own penalty."""
    return float(max(r.todos_opened - r.todos_closed, 0))


COMMENT = re.compile(r"(?:^|\s)#.*")  # takes a # inside a string for one too: a reading, no parser


def comment_share(r: Record) -> float:
    """Characters of comments among those of the added lines: thoughts in comments were seen in training."""
    lines = [line.strip() for line in r.added]
    comments = [m[0].strip() for line in lines if (m := COMMENT.search(line))]
    return sum(map(len, comments)) / max(sum(map(len, lines)), 1)


def terminal_share(r: Record, terminal: str = "run") -> float:
    """Share of calls that go to the shell: a collapse to the terminal alone was seen in training."""
    return sum(tool == terminal for tool, _ in r.calls) / max(len(r.calls), 1)


def broken_share(r: Record) -> float:
    """Share of calls whose arguments the tool refused. Such rollouts stay in: see `broken_gradient`."""
    return sum(not ok for _, ok in r.calls) / max(len(r.calls), 1)


def long_lines(r: Record, limit: int = 100) -> float:
    """Style: share of added lines beyond `limit` characters."""
    return sum(len(line) > limit for line in r.added) / max(len(r.added), 1)


def silent(r: Record) -> float:
    """Communication: 1 if the rollout ends without a word."""
    return float(not r.final.strip())


WATCHED = {f.__name__: f
           for f in (open_todos, comment_share, terminal_share, broken_share, long_lines, silent)}


def behaviour(r: Record, weights: Mapping[str, float]) -> float:
    """−Σ weight · reading over the behaviours named in `weights`: an auxiliary reward, never positive.

    ValueError for an unknown name or a negative weight.
    """
    if unknown := set(weights) - set(WATCHED):
        raise ValueError(f"unknown behaviours {sorted(unknown)}: there are {', '.join(WATCHED)}")
    if negative := [name for name, w in weights.items() if not w >= 0]:
        raise ValueError(f"negative weight for {negative}: it would pay for what is to be avoided")
    return -sum(w * WATCHED[name](r) for name, w in weights.items())


def monitor(records: Iterable[Record], edits: Sequence[str] = ("edit", "write")) -> dict[str, float]:
    """Mean of every behaviour over a step's rollouts, calls per turn (B3), share of rollouts that edit.

    That share falls when asking back is made to look safer than working. ValueError without a rollout.
    """
    records = list(records)
    if not records:
        raise ValueError("no rollout to watch: a step without rollouts is a fault upstream")
    turns = sum(len(r.turns) for r in records)
    return {**{name: mean(f(r) for r in records) for name, f in WATCHED.items()},
            "calls_per_turn": sum(len(r.calls) for r in records) / max(turns, 1),
            "editing": mean(any(tool in edits for tool, _ in r.calls) for r in records)}


def monitor_line(step: int, seen: Mapping[str, float]) -> str:
    """What is printed at every step of training."""
    return f"step {step:3}  " + "  ".join(f"{name} {value:.2f}" for name, value in seen.items())


# ------------------------------------------------------------------------------------------------------- demo


def standardised(rewards: Sequence[float], eps: float = 1e-4) -> list[float]:
    """(r − mean)/(σ + eps), which the report avoids (R3); here to be looked at."""
    m, s = mean(rewards), stdev(rewards)
    return [(r - m) / (s + eps) for r in rewards]


def broken_gradient(dropped: bool, baseline: bool, G: int = 4) -> float:
    """E[policy gradient] on the logit of "try" per rollout, for a policy that tries or breaks, half and half.

    Trying solves 30 % (reward 1, else −1). Breaking is a call that no tool accepts, −1. `dropped`: such
    rollouts are thrown away; `baseline`: the mean of what is left of the group is subtracted. Enumerated.
    """
    outcomes = (("try", 1.0, 0.15), ("try", -1.0, 0.35), ("break", -1.0, 0.5))
    total = 0.0
    for group in itertools.product(outcomes, repeat=G):
        kept = [(action, r) for action, r, _ in group if not (dropped and action == "break")]
        b = mean(r for _, r in kept) if baseline and kept else 0.0
        # ∇ log π = 1 − π = ½ for "try", −π = −½ for "break"
        gradient = sum((r - b) * (0.5 if action == "try" else -0.5) for action, r in kept)
        total += math.prod(p for *_, p in group) * gradient
    return total / G


EASY = dict(thinking=400, call=150, output=3000, final=250, calls=3, turns=3)
HARD = dict(thinking=40_000, call=15_000, output=200_000, final=800, calls=180, turns=120)


def show_curves(p: Penalty) -> None:
    qs = (0, 0.5, 0.8, 1, 2)
    print(f"C(x) for k = {p.k} (report, Fig. 6)\n{'x':>6}" + "".join(f"{f'q = {q}':>9}" for q in qs))
    for x in (0, 1, 3, 10, 30, 100, 300):
        print(f"{x:6}" + "".join(f"{penalty(x, p.k, q):9.3f}" for q in qs))
    print(f"\nthe margin at q = {p.q}, λ = {p.lam}: what one more call in a turn of its own costs")
    for name, counters in (("easy task", EASY), ("hard task", HARD)):
        x, step = effort(counters, p), p.calls + p.turns
        print(f"    {name}: effort {x:6.1f}, C {penalty(x, p.k, p.q):6.2f}, next call "
              f"{p.lam * step * slope(x, p.k, p.q):.4f}")
    serial, parallel = cost(EASY, p), cost({**EASY, "turns": 1}, p)
    print(f"    three calls in three turns {serial:.4f}, in one turn {parallel:.4f}: parallel calls save "
          f"{serial - parallel:.4f}")


def show_groups(p: Penalty) -> None:
    groups = [[effort({n: c * s for n, c in counters.items()}, p) for s in (0.5, 0.8, 1, 1.2, 1.5, 2, 2.5, 3)]
              for counters in (EASY, HARD)]
    print("\nlargest λ for groups whose efforts differ up to sixfold: easy task "
          f"{largest_lam(groups[:1], p.k, p.q):.3f}, hard task {largest_lam(groups[1:], p.k, p.q):.4f}, both "
          f"{largest_lam(groups, p.k, p.q):.4f}")
    rewards = [1 - cost({**EASY, "turns": t}, p) for t in (1, 1, 2, 3)]
    rows = {"rewards": rewards, "minus their mean": [r - mean(rewards) for r in rewards],
            "divided by σ": standardised(rewards)}
    print("\nfour solutions that differ in turns only")
    for name, row in rows.items():
        print(f"    {name:18}" + "".join(f"{v:+8.3f}" for v in row))
    print("    divided, two cents weigh as much as solved against failed")
    print("\nexpected gradient towards trying, for a policy that may break its call instead")
    ways = {"broken dropped, no baseline": (True, False), "broken dropped, group mean": (True, True),
            "broken kept, group mean": (False, True)}
    for name, way in ways.items():
        print(f"    {name:28} {round(broken_gradient(*way), 6) + 0.0:+.3f}")


def main() -> None:
    p = Penalty()
    show_curves(p)
    show_groups(p)
    print("\nthe monitor on made-up rollouts that collapse to the terminal and think in comments:")
    for step, n in ((0, 0), (50, 2), (100, 4)):
        tools = ["run"] * n + ["edit"] * (4 - n)
        record = Record([[(tool, True)] for tool in tools], n, 0, ["x = 1"] + ["# so, next"] * n, "done")
        print("    " + monitor_line(step, monitor([record])))


if __name__ == "__main__":
    main()
