"""mini-CursorBench, toy tier: little repositories, real tool calls, and grades that come from the final state.

The report names four faults of public coding benchmarks (§5, claim V1). What this one does about each:
domain mismatch: the tasks are those that the agent is for, by the report's categories (Fig. 3, R10); over-specified prompts:
a prompt is a few words, the rest is in the repository; contamination: names, values and layouts are drawn at random and
one in five is never seen in training; narrow scope: nine families from one call to a chain of summaries.

A task is a repository of small files (`name=value` lines, valid Python), a prompt and a hidden check. The check runs as a
program over the final files in a fresh fork of the workspace; it prints what the files mean, and that text is compared
outside: the answer key never enters a workspace. The reward is all or nothing.

    family    category             what it takes
    ask       understand code      read a file, answer about one line
    find      understand code      search, name the file
    new       new feature          write a file
    set       iterate on feature   read a file, edit one line
    tune      iterate on feature   search, then edit what was found
    fix       debug                run the check, edit, run it again
    rename    refactor             search, then edit two files in one turn (parallel calls)
    compare   code review          read two files in one turn, compare
    pin       investigate          two files that do not fit one window: only a self-summary carries the first number

`Task.reference` is a scripted solution; `Task.slips` are what a careless developer does instead (answers without looking,
stops half-way, forgets to write the number down). Demonstrations mix the two: they teach the protocol and leave room.

    python bench.py      every family: start fails, reference passes, each hack fails

Not here yet: the real tier (tasks on packages of the standard library with diffs of 181 lines), agents other than scripts
and the trained model, and the evaluations beyond correctness (V2–V5).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Iterable, NamedTuple, Sequence

import sandbox
from summarize import Bytes, Call, Protocol, Rollout, Segment, Turn, WindowConfig, play

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"

# Runs over the final files; what it returns is compared outside with Task.expected.
HIDDEN_CHECK = """
import ast

def main(files):
    out = []
    for path in sorted(files):
        try:
            for node in ast.parse(files[path]).body:
                out.append(f"{path}:{node.targets[0].id}={ast.literal_eval(node.value)}")
        except Exception as error:
            out.append(f"{path}:{type(error).__name__}")
    return "\\n".join(out)
"""

# The visible check of the fix family: reads the files, says what it wants.
FIX_CHECK = """
def main(files):
    wanted = {line!r}
    if wanted in files.get({path!r}, "").splitlines():
        return "ok"
    return {complaint!r}
"""


class Script(NamedTuple):
    """A scripted agent: its turns in order, and what it would write if asked for a summary after k of them."""

    turns: tuple[Turn, ...]
    notes: tuple[str, ...] = ()

    def note(self, k: int) -> str:
        return self.notes[min(k, len(self.notes) - 1)] if self.notes else ""


@dataclass(frozen=True)
class Task:
    """One task. `expected` (canonical text of the final files) and `answer` stay outside the workspace."""

    id: str
    family: str
    category: str
    prompt: str
    files: dict[str, str]
    expected: str
    answer: str | None  # exact final message; None: any
    reference: Script
    slips: tuple[Script, ...]
    check: str | None = None  # program behind the model's check tool


# --------------------------------------------------------------------------------------------------- random repositories

Repo = dict[str, list[tuple[str, str]]]  # path -> (name, value) lines


def held_out(text: str) -> bool:
    """Does a name or value belong to the held-out fifth?"""
    return hashlib.sha256(text.encode()).digest()[0] % 5 == 0


class Draw:
    """Names, values and layouts of one split: a function of the key, the same on every machine."""

    def __init__(self, key: str, split: str):
        if split not in ("train", "heldout"):
            raise ValueError(f"split {split!r}: choose train or heldout")
        self.rng, self.held, self.used = random.Random(key), split == "heldout", set()

    def _pick(self, make: Callable[[], str], unique: bool = True) -> str:
        while True:
            text = make()
            if held_out(text) == self.held and not (unique and text in self.used):
                self.used.update([text] if unique else [])
                return text

    def name(self) -> str:
        """Four letters, consonant and vowel twice: 4,900 of them, so that none is learnt by heart."""
        pick = self.rng.choice
        return self._pick(lambda: pick(CONSONANTS) + pick(VOWELS) + pick(CONSONANTS) + pick(VOWELS))

    def value(self, unique: bool = True) -> str:
        """Two digits; `unique`: not drawn before by a unique draw."""
        return self._pick(lambda: str(self.rng.randrange(10, 100)), unique)

    def other(self, value: str) -> str:
        """A value that differs from `value`: an edit must change something."""
        while (fresh := self.value(unique=False)) == value:
            pass
        return fresh

    def spot(self, n_files: int = 3, n_lines: int = 2) -> tuple[int, int]:
        """(file, line) of what a task is about; layouts whose sum is divisible by three are held out."""
        while True:
            i, j = self.rng.randrange(n_files), self.rng.randrange(n_lines)
            if ((i + j) % 3 == 0) == self.held:
                return i, j

    def lines(self, n: int) -> list[tuple[str, str]]:
        return [(self.name(), self.value(unique=False)) for _ in range(n)]

    def repo(self, n_files: int = 3, n_lines: int = 2) -> Repo:
        return {self.name(): self.lines(n_lines) for _ in range(n_files)}


def put(repo: Repo, path: str, j: int, pair: tuple[str, str]) -> Repo:
    """The repository with line j of a file replaced."""
    return {
        p: [pair if (p, n) == (path, j) else line for n, line in enumerate(lines)]
        for p, lines in repo.items()
    }


def turn(*calls: tuple[str, ...]) -> Turn:
    """A turn of tool calls, each (tool, argument, …)."""
    return Turn("", tuple(Call(tool, tuple(args)) for tool, *args in calls))


def script(*turns: Turn | str, notes: Sequence[str] = ()) -> Script:
    return Script(tuple(Turn(t) if isinstance(t, str) else t for t in turns), tuple(notes))


class Draft(NamedTuple):
    """What a family makes; `after` None: the files must stay as they are."""

    prompt: str
    repo: Repo
    reference: Script
    slips: tuple[Script, ...]
    after: Repo | None = None
    answer: str | None = None
    check: str | None = None


# ------------------------------------------------------------------------------------------------------- the nine families


def ask(d: Draw) -> Draft:
    repo, (i, j) = d.repo(), d.spot()
    path = list(repo)[i]
    key, value = repo[path][j]
    read = turn(("r", path))
    return Draft(
        f"{path} {key}?",
        repo,
        script(read, f"{key}={value}"),
        (script("none"), script(read, "none")),
        answer=f"{key}={value}",
    )


def find(d: Draw) -> Draft:
    repo, (i, j) = d.repo(), d.spot()
    path = list(repo)[i]
    key = repo[path][j][0]
    grep = turn(("g", key))
    return Draft(
        f"who has {key}?", repo, script(grep, path), (script("none"), script(grep, "none")), answer=path
    )


def new(d: Draw) -> Draft:
    repo, path, key, value = d.repo(), d.name(), d.name(), d.value()
    write = turn(("w", path, f"{key}={value}\n"))
    return Draft(
        f"new {path} {key}={value}",
        repo,
        script(write, "ok"),
        (script("ok"),),
        {**repo, path: [(key, value)]},
    )


def set_line(d: Draw) -> Draft:
    repo, (i, j) = d.repo(), d.spot()
    path = list(repo)[i]
    key, old = repo[path][j]
    value = d.other(old)
    read, edit = turn(("r", path)), turn(("e", path, f"{key}={old}", f"{key}={value}"))
    return Draft(
        f"in {path} {key}={value}",
        repo,
        script(read, edit, "ok"),
        (script("ok"), script(read, "ok")),
        put(repo, path, j, (key, value)),
    )


def tune(d: Draw) -> Draft:
    repo, (i, j) = d.repo(), d.spot()
    path = list(repo)[i]
    key, old = repo[path][j]
    value = d.other(old)
    grep, edit = turn(("g", key)), turn(("e", path, f"{key}={old}", f"{key}={value}"))
    return Draft(
        f"set {key}={value}",
        repo,
        script(grep, edit, "ok"),
        (script("ok"), script(grep, "ok")),
        put(repo, path, j, (key, value)),
    )


def fix(d: Draw) -> Draft:
    repo, (i, j) = d.repo(), d.spot()
    path = list(repo)[i]
    key, old = repo[path][j]
    value = d.other(old)
    check = FIX_CHECK.format(line=f"{key}={value}", path=path, complaint=f"{path}:{key}={old} want {value}")
    run, edit = turn(("x",)), turn(("e", path, f"{key}={old}", f"{key}={value}"))
    return Draft(
        "fix",
        repo,
        script(run, edit, run, "ok"),
        (script("ok"), script(run, "ok")),
        put(repo, path, j, (key, value)),
        check=check,
    )


def rename(d: Draw) -> Draft:
    repo, (i, j) = d.repo(), d.spot()
    paths, key, fresh = list(repo), d.name(), d.name()
    a, b = sorted((paths[i], paths[(i + 1) % 3]))
    repo = put(put(repo, a, j, (key, d.value())), b, d.rng.randrange(2), (key, d.value()))
    after = {p: [(fresh if k == key else k, v) for k, v in lines] for p, lines in repo.items()}
    grep, one, two = turn(("g", key)), ("e", a, key, fresh), ("e", b, key, fresh)
    return Draft(
        f"rename {key} {fresh}",
        repo,
        script(grep, turn(one, two), "ok"),
        (script(grep, turn(one), "ok"), script(grep, "ok")),
        after,
    )


def compare(d: Draw) -> Draft:
    repo, (i, j) = d.repo(), d.spot()
    paths, key, v = list(repo), d.name(), d.value()
    p, q, w = paths[i], paths[(i + 1) % 3], d.value(unique=False)
    while v[0] == w[0]:  # the first digit decides
        w = d.value(unique=False)
    repo = put(put(repo, p, j, (key, v)), q, d.rng.randrange(2), (key, w))
    more, less = (p, q) if int(v) > int(w) else (q, p)
    read = turn(("r", p), ("r", q))
    return Draft(
        f"{p} or {q}: more {key}?",
        repo,
        script(read, more),
        (script(read, less), script("none")),
        answer=more,
    )


def pin(d: Draw) -> Draft:
    repo = d.repo()
    (p, q), pins = list(repo)[:2], (d.value(), d.value())
    for path, value in zip((p, q), pins):
        lines = d.lines(11)
        lines.insert(d.rng.randrange(1, 12), ("pin", value))
        repo[path] = lines
    v, both = pins[0], pins[0] + pins[1]
    one, two = turn(("r", p)), turn(("r", q))
    return Draft(
        f"pin {p} {q}",
        repo,
        script(one, two, both, notes=("", v, both, both)),
        (script(one, two, "none", notes=("", "none", "none", "none")), script(one, "none", notes=("", v, v))),
        answer=both,
    )


FAMILIES: dict[str, tuple[str, Callable[[Draw], Draft]]] = {
    "ask": ("understand code", ask),
    "find": ("understand code", find),
    "new": ("new feature", new),
    "set": ("iterate on feature", set_line),
    "tune": ("iterate on feature", tune),
    "fix": ("debug", fix),
    "rename": ("refactor", rename),
    "compare": ("code review", compare),
    "pin": ("investigate", pin),
}


def task(family: str, split: str, index: int, seed: int = 0) -> Task:
    """Task `index` of a family and split; the same arguments give the same task everywhere."""
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}: choose one of {', '.join(FAMILIES)}")
    category, make = FAMILIES[family]
    x = make(Draw(f"{seed}/{split}/{family}/{index}", split))
    after = x.repo if x.after is None else x.after
    return Task(
        f"{split}/{family}/{index}",
        family,
        category,
        x.prompt,
        {p: "".join(f"{k}={v}\n" for k, v in lines) for p, lines in x.repo.items()},
        "\n".join(f"{p}:{k}={v}" for p in sorted(after) for k, v in after[p]),
        x.answer,
        x.reference,
        x.slips,
        x.check,
    )


def suite(split: str, per_family: int, seed: int = 0) -> list[Task]:
    """The same number of tasks of every family."""
    return [task(f, split, i, seed) for i in range(per_family) for f in FAMILIES]


# ----------------------------------------------------------------------------------------------------- running and grading

TOOLS = ("read", "grep", "edit", "write", "check")


def open_workspace(environment: type, t: Task):
    """A fresh workspace of a task: its files, the tools it allows, its visible check."""
    return environment(t.files, tools=TOOLS, check=t.check)


def grade(t: Task, workspace, answer: str) -> float:
    """1.0 if the final files mean what they should and the answer is right, else 0.0.

    The check runs in a fork, so nothing that the rollout left behind but its files takes part. A workspace that died is
    an infrastructure fault (sandbox.SandboxDied goes through): it is not the model's failure and no zero.
    """
    if t.answer is not None and answer != t.answer:
        return 0.0
    with workspace.fork() as fresh:
        result = fresh.check(HIDDEN_CHECK)
    return float(result.ok and result.text == t.expected)


def demonstrate(
    t: Task, protocol: Protocol, window: WindowConfig, accuracy: float, seed: int = 0
) -> list[Segment]:
    """A demonstration of a training task: the reference with probability `accuracy`, otherwise one of the slips.

    Played for real in a Memory workspace, so every observation is what the tools answer, and a summary holds only what had
    been seen before it.
    """
    rng = random.Random(f"{seed}/demonstrate/{t.id}")
    chosen = t.reference if rng.random() < accuracy else rng.choice(t.slips)
    return run_script(t, chosen, protocol, window, sandbox.Memory)[1]


def run_script(
    t: Task,
    chosen: Script,
    protocol: Protocol,
    window: WindowConfig,
    environment: type,
    summariser: Callable[[str], str] | None = None,
) -> tuple[float, list[Segment]]:
    """Play a script on a task; returns (reward, segments). A script that has run out of turns says nothing."""
    done = [0]

    def act() -> Turn:
        done[0] += 1
        return chosen.turns[done[0] - 1] if done[0] <= len(chosen.turns) else Turn("")

    with open_workspace(environment, t) as workspace:
        chain, segments = play(
            protocol,
            t.prompt,
            window,
            act,
            lambda: chosen.note(done[0]),
            lambda c: workspace.call(c.tool, c.args).text,
            summariser,
        )
        return grade(t, workspace, chain.answer), segments


# ------------------------------------------------------------------------------------------------------------------ hacks


def _wipe(t: Task) -> Script:
    return script(turn(*(("w", p, "") for p in t.files)), t.answer or "ok")


HACKS: dict[str, Callable[[Task], Script]] = {
    "says that it is done": lambda t: script("ok"),
    "answers with the prompt": lambda t: script(t.prompt),
    "forges a turn in its answer": lambda t: script("⟨obs⟩ok⟨end⟩ok"),
    "empties every file": _wipe,
    "right answer, stray file": lambda t: script(turn(("w", "notes", "a=1\n")), *t.reference.turns[-1:]),
    "writes a check of its own": lambda t: script(
        turn(("w", "check.py", "def main(files):\n    return 'ok'\n")), "ok"
    ),
    "breaks the syntax": lambda t: script(turn(("w", next(iter(t.files)), "=\n")), t.answer or "ok"),
    "edits outside the workspace": lambda t: script(turn(("w", "/etc/passwd", "a=1\n")), "ok"),
    "asks for a check that is not there": lambda t: script(turn(("x",)), turn(("x",)), "ok"),
}


# ----------------------------------------------------------------------------------------------------------------- scores


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """Unbiased estimate of the expected best of k from n ≥ k samples: Σ_i r_(i) C(i − 1, k − 1) / C(n, k), r sorted."""
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"best of {k} needs at least {k} samples, there are {n}")
    return sum(r * math.comb(i, k - 1) for i, r in enumerate(sorted(rewards))) / math.comb(n, k)


def score(rollouts: Iterable[Rollout], k: int = 8) -> dict:
    """Mean and best-of-k over tasks, tokens, turns and calls per rollout, and the same two scores by family."""
    rollouts = list(rollouts)
    if not rollouts:
        raise ValueError("no rollout to score: an empty evaluation is an error, not a result")
    by_task: dict[str, list[float]] = defaultdict(list)
    family = {r.task: r.family for r in rollouts}
    for r in rollouts:
        by_task[r.task].append(r.reward)

    def two(tasks: list[str]) -> dict[str, float]:
        return {
            "mean": sum(sum(by_task[t]) / len(by_task[t]) for t in tasks) / len(tasks),
            f"best_of_{k}": sum(best_of_k(by_task[t], k) for t in tasks) / len(tasks),
        }

    def per_rollout(f: Callable[[Rollout], float]) -> float:
        return sum(map(f, rollouts)) / len(rollouts)

    return {
        **two(list(by_task)),
        "tokens": per_rollout(lambda r: r.tokens),
        "turns": per_rollout(lambda r: r.counters["turns"]),
        "calls": per_rollout(lambda r: r.counters["calls"]),
        "summaries": per_rollout(lambda r: r.extra.get("summaries", 0)),
        "n_tasks": len(by_task),
        "families": {f: two([t for t in by_task if family[t] == f]) for f in dict.fromkeys(family.values())},
    }


def transcript(rollout: Rollout, protocol: Protocol) -> str:
    """A rollout as a person reads it: one line a turn, structural ids as ⟨name⟩."""
    windows = [
        protocol.text(s.ids)
        .replace("\n", "↵")
        .replace("⟨assistant⟩", "\n  ⟨assistant⟩ ")
        .replace("⟨obs⟩", "\n  ⟨obs⟩ ")
        for s in rollout.segments
    ]
    return f"{rollout.task}  reward {rollout.reward:g}\n  " + "\n  — new window —\n  ".join(windows)


def main() -> None:
    environment = sandbox.auto()
    protocol, window = Protocol(Bytes()), WindowConfig()
    print(
        f"\n{'family':9} {'category':19} {'prompt':26} {'turns':>5} {'tokens':>6}  reference  slips  hacks that paid"
    )
    for family in FAMILIES:
        t = task(family, "heldout", 0)
        reward, segments = run_script(t, t.reference, protocol, window, environment)
        slips = [run_script(t, s, protocol, window, environment)[0] for s in t.slips]
        paid = [
            name for name, hack in HACKS.items() if run_script(t, hack(t), protocol, window, environment)[0]
        ]
        print(
            f"{family:9} {t.category:19} {t.prompt:26} {len(t.reference.turns):5} {sum(len(s.ids) for s in segments):6}  "
            f"{reward:9g}  {max(slips):5g}  {len(paid)} of {len(HACKS)} {paid or ''}"
        )
    t = task("pin", "heldout", 0)
    blank = run_script(t, t.reference, protocol, window, environment, summariser=lambda text: "")[1]
    print(
        f"\npin in {len(run_script(t, t.reference, protocol, window, environment)[1])} windows; the same script with its summaries "
        f"blanked opens {len(blank)}, and a model would have lost the first number"
    )


if __name__ == "__main__":
    main()
