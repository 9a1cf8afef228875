"""A length penalty that presses on easy tasks and leaves hard ones room, and the behaviours that are watched beside it.

Report §4.2, Fig. 6 (claims B1–B3). From the reward of every rollout a concave function of its effort is subtracted:

    x = Σ weight · counter          thinking, call, output, final: tokens; calls, turns: how many
    C(x) = ((1 + k x)^(1 − q) − 1) / (k (1 − q))          C(0) = 0, C′(0) = 1, C′(x) = (1 + k x)^(−q), concave for k, q > 0
    reward − λ C(x)                 the same λ for all rollouts of a group: only differences inside it matter

Limits: q → 0 or k → 0: C = x. q → 1: log(1 + k x)/k. q > 1: bounded by 1/(k (q − 1)), so long runs feel nothing.

The report gives the formula and the six counters; k, q, λ and the weights are ours, in units of thousand tokens: output tokens cost
a fifth because they are read, not written. Choose λ so that λ times the spread of C inside a group (95th minus 5th percentile)
stays below about a quarter of the gap between solved and failed; a long solution must beat a short failure.

    python length_penalty.py      the curves, the margin, why parallel calls pay, what a standard deviation would do
"""
from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Iterable, Mapping, Sequence

COUNTERS = ("thinking", "call", "output", "final", "calls", "turns")


@dataclass(frozen=True)
class Penalty:
    """λ, the shape (k, q) and the weight of each counter."""
    lam: float = 0.05
    k: float = 0.1
    q: float = 0.8
    thinking: float = 1e-3             # per token
    call: float = 1e-3                 # per token of tool calls
    output: float = 2e-4               # per token of tool results
    final: float = 1e-3                # per token of the answer
    calls: float = 0.1                 # per tool call
    turns: float = 0.2                 # per turn

    def __post_init__(self) -> None:
        for name in ("lam", "k", *COUNTERS):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 or positive, a penalty never pays for effort")
        if self.q < 0:
            warnings.warn(f"q = {self.q} is negative: the penalty is convex and presses hardest on hard tasks", stacklevel=2)


def effort(counters: Mapping[str, float], p: Penalty) -> float:
    """x = Σ weight · counter for the six counters; a missing or negative counter is an error."""
    for name in COUNTERS:
        if counters[name] < 0:
            raise ValueError(f"counter {name} = {counters[name]} is negative")
    return sum(getattr(p, name) * counters[name] for name in COUNTERS)


def penalty(x: float, k: float, q: float) -> float:
    """C(x) in a form that is exact near every limit: with L = log1p(k x), expm1((1 − q) L) / (k (1 − q)).

    The textbook form divides by zero at q = 1 and loses all digits near q = 1, near k = 0 and for small x.
    """
    if x < 0 or k < 0:
        raise ValueError(f"x = {x}, k = {k}: effort and k must not be negative")
    if k == 0 or q == 0:
        return float(x)
    log = math.log1p(k * x)
    return log / k if q == 1 else math.expm1((1 - q) * log) / (k * (1 - q))


def slope(x: float, k: float, q: float) -> float:
    """C′(x) = (1 + k x)^(−q): what one more unit of effort costs."""
    return math.exp(-q * math.log1p(k * x))


def cost(counters: Mapping[str, float], p: Penalty) -> float:
    """λ C(x): what is subtracted from the reward."""
    return p.lam * penalty(effort(counters, p), p.k, p.q)


# ------------------------------------------------------------------------------------------------- behaviour (claim B1)


@dataclass
class Record:
    """What the behaviour rewards look at. `turns`: per turn the calls as (tool, accepted by the tool's argument check)."""
    turns: list[list[tuple[str, bool]]] = field(default_factory=list)
    todos_opened: int = 0
    todos_closed: int = 0
    added: list[str] = field(default_factory=list)           # lines of code that the rollout added
    final: str = ""

    @property
    def calls(self) -> list[tuple[str, bool]]:
        return [c for turn in self.turns for c in turn]


def open_todos(r: Record) -> int:
    """To-do items that were created and left."""
    return max(r.todos_opened - r.todos_closed, 0)


def comment_share(r: Record) -> float:
    """Characters of comments among those of the added lines: long thoughts hidden in comments were seen in training."""
    text = [line.strip() for line in r.added if line.strip()]
    return sum(len(line) for line in text if line.startswith("#")) / max(sum(map(len, text)), 1)


def terminal_share(r: Record, terminal: str = "run") -> float:
    """Share of calls that go to the shell: a collapse to the terminal was seen in training."""
    return sum(tool == terminal for tool, _ in r.calls) / max(len(r.calls), 1)


def broken_share(r: Record) -> float:
    """Share of calls whose arguments a tool refused. Such rollouts stay in training: dropped, they would never be discouraged."""
    return sum(not ok for _, ok in r.calls) / max(len(r.calls), 1)


def long_lines(r: Record, limit: int = 100) -> float:
    """Style: share of added lines beyond `limit` characters."""
    return sum(len(line) > limit for line in r.added) / max(len(r.added), 1)


def silent(r: Record) -> float:
    """Communication: 1 if the rollout ends without a word."""
    return float(not r.final.strip())


WATCHED = dict(open_todos=open_todos, comment_share=comment_share, terminal_share=terminal_share, broken_share=broken_share,
               long_lines=long_lines, silent=silent)


def behaviour(r: Record, weights: Mapping[str, float]) -> float:
    """−Σ weight · reading over the watched behaviours: an auxiliary reward, never positive."""
    if unknown := set(weights) - set(WATCHED):
        raise ValueError(f"unknown behaviours {sorted(unknown)}: there are {', '.join(WATCHED)}")
    return -sum(w * WATCHED[name](r) for name, w in weights.items())


def monitor(records: Iterable[Record]) -> dict[str, float]:
    """Mean reading of every watched behaviour, and calls per turn (B3): printed each step to see a collapse coming."""
    records = list(records)
    if not records:
        raise ValueError("no rollout to watch")
    turns = sum(len(r.turns) for r in records)
    return {**{name: mean(f(r) for r in records) for name, f in WATCHED.items()},
            "calls_per_turn": sum(len(r.calls) for r in records) / max(turns, 1)}


# ----------------------------------------------------------------------------------------------------------------- demo


def standardised(rewards: Sequence[float]) -> list[float]:
    """(r − mean)/σ, which the report avoids; here to be looked at."""
    m, s = mean(rewards), stdev(rewards)
    return [(r - m) / s for r in rewards]


def main() -> None:
    p = Penalty()
    print(f"C(x) for k = {p.k} (report, Fig. 6)\n{'x':>6}" + "".join(f"   q={q:<5}" for q in (0, 0.5, 0.8, 1, 2)))
    for x in (0, 1, 3, 10, 30, 100, 300):
        print(f"{x:6}" + "".join(f"{penalty(x, p.k, q):9.3f}" for q in (0, 0.5, 0.8, 1, 2)))
    easy = dict(thinking=400, call=150, output=3000, final=250, calls=3, turns=3)
    hard = dict(thinking=40_000, call=15_000, output=200_000, final=800, calls=180, turns=120)
    print("\nthe margin: what one more call in a turn of its own costs (λ C′ · 0.3)")
    for name, counters in (("easy task", easy), ("hard task", hard)):
        x = effort(counters, p)
        print(f"    {name}: effort {x:6.1f}, C {penalty(x, p.k, p.q):6.2f}, next call {0.3 * p.lam * slope(x, p.k, p.q):.4f}")
    serial, parallel = cost(easy, p), cost({**easy, "turns": 1}, p)
    print(f"\nthree calls in three turns cost {serial:.4f}, in one turn {parallel:.4f}: "
          f"parallel calls save {serial - parallel:.4f}")
    rewards = [1 - cost({**easy, "turns": t}, p) for t in (1, 1, 2, 3)]
    print("\nfour solutions that differ in turns only: " + ", ".join(f"{r:.3f}" for r in rewards))
    print("    advantage        " + "  ".join(f"{r - mean(rewards):+.3f}" for r in rewards))
    print("    divided by σ     " + "  ".join(f"{a:+.3f}" for a in standardised(rewards)) + "   as large as solved against failed")


if __name__ == "__main__":
    main()
