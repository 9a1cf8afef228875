"""A rollout as a chain of context windows, joined by the model's own summaries.

Self-summarization (report §4.1, claim R8): when a window has used up its token budget, the harness appends a
short request, the model thinks and writes a summary on top of the cache it already has, and work goes on in a
fresh window that holds the task, the summary and a little carried state. A rollout is a chain of segments.
Every token that the model wrote, summaries included, is trained with the chain's one final reward.

A window in structural ids that no file and no tool output can contain (⟨·⟩), so nothing printed can forge a
turn:

    ⟨user⟩ task ⟨end⟩ [⟨summary⟩ n text ⟨end⟩] [⟨obs⟩ state ⟨end⟩]     how it opens; n summaries so far
    ⟨assistant⟩ thinking ⟨call⟩ tool ⟨arg⟩ a ⟨arg⟩ b ⟨call⟩ … ⟨end⟩    a turn; one result per call, in order:
    ⟨obs⟩ text ⟨end⟩
    ⟨summary⟩ [thinking ⟨summary⟩] text ⟨end⟩                          the request (one id), then the summary
    ⟨assistant⟩ text ⟨end⟩                                             a turn without calls is the answer

The trained tokens are those that the model sampled: thinking, calls, summaries, answers and their ⟨end⟩. They
are stored as sampled, never decoded and encoded again. P(chain) is the product over them, each given its own
window, so the policy gradient is the plain one summed over segments; one segment is the plain rollout.

Baselines in the same interface (`WindowConfig.method`), with the same trigger and budgets:
    prompted     a separate call with a fixed prompt compacts the history: none of the cache can be reused
    sliding      the oldest turns are dropped until the window is below the trigger again
    truncation   everything but the task and the newest turn is dropped

Differences from the report, which gives the method and no numbers:
1. Budgets are ours. The trigger is checked between turns only: no call is open when a summary is asked for.
2. The request is one structural id, learnt in SFT, where a large model takes a sentence.
3. `carried` hands over plan and to-dos as the harness keeps them. The toy has none: its summary says it all.
4. Rollouts that end at a limit are graded as they are and stay in training (R4), where SUPO, the nearest
   published method (arXiv 2510.06727), masks them out.

    python summarize.py        tasks that fit no window, by all four methods: solved, tokens, cache reused
"""
from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from typing import Callable, NamedTuple, Sequence
from typing import Protocol as Interface

STRUCTURE = ("pad", "document", "user", "assistant", "call", "arg", "end", "obs", "summary")
METHODS = ("summary", "prompted", "sliding", "truncation")
COMPACTION = "summarise: goal, done, facts, next"    # the fixed prompt; real ones run to thousands of tokens


class Tokenizer(Interface):
    """What the protocol needs of a tokenizer: ids 0 … size − 1 for text, structural ids follow."""
    size: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """The simplest tokenizer: one id per byte of UTF-8; undecodable bytes survive as surrogates."""
    size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "surrogateescape")


class Call(NamedTuple):
    """One tool call as the model wrote it."""
    tool: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    """A parsed turn: `calls` to run, or, without calls, `text` is the final answer."""
    text: str
    calls: tuple[Call, ...] = ()


class Protocol:
    """Renders prompts, results and turns into ids and reads turns out of sampled ids."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.ids = {name: tokenizer.size + i for i, name in enumerate(STRUCTURE)}
        self.vocab_size = tokenizer.size + len(STRUCTURE)
        self.end = self.ids["end"]

    def span(self, kind: str, text: str, limit: int | None = None) -> list[int]:
        """⟨kind⟩ text ⟨end⟩, the text cut to `limit` tokens."""
        return [self.ids[kind], *self.tokenizer.encode(text)[:limit], self.end]

    def render(self, turn: Turn) -> list[int]:
        """The ids that a model would have sampled for this turn: without ⟨assistant⟩, with ⟨end⟩."""
        out = self.tokenizer.encode(turn.text)
        for call in turn.calls:
            out += [self.ids["call"], *self.tokenizer.encode(call.tool)]
            for arg in call.args:
                out += [self.ids["arg"], *self.tokenizer.encode(arg)]
        return out + [self.end]

    def render_summary(self, text: str, thinking: str = "") -> list[int]:
        """The ids that a model would have sampled when asked for a summary."""
        scratch = [*self.tokenizer.encode(thinking), self.ids["summary"]] if thinking else []
        return [*scratch, *self.tokenizer.encode(text), self.end]

    def parse(self, ids: Sequence[int]) -> Turn:
        """Read a turn; misplaced structural ids stay in the calls they garble: strict tools refuse them."""
        groups: list[tuple[int, list[int]]] = [(-1, [])]
        for token in ids:
            if token == self.end:
                break
            if token in (self.ids["call"], self.ids["arg"]):
                groups.append((token, []))
            else:
                groups[-1][1].append(token)
        text, calls = self.text(groups[0][1]), []
        for kind, body in groups[1:]:
            if kind == self.ids["call"] or not calls:
                calls.append([self.text(body)])
            else:
                calls[-1].append(self.text(body))
        return Turn(text, tuple(Call(c[0], tuple(c[1:])) for c in calls))

    def parse_summary(self, ids: Sequence[int]) -> str:
        """What a summary turn hands on: the text behind the last ⟨summary⟩ that the model itself wrote."""
        start = max((i + 1 for i, token in enumerate(ids) if token == self.ids["summary"]), default=0)
        return self.text([token for token in ids[start:] if token != self.end])

    def text(self, ids: Sequence[int]) -> str:
        """Decode; a structural id shows as ⟨name⟩."""
        out, plain = [], []
        for token in ids:
            if token < self.tokenizer.size:
                plain.append(token)
                continue
            out += [self.tokenizer.decode(plain), f"⟨{STRUCTURE[token - self.tokenizer.size]}⟩"
                    if token < self.vocab_size else f"⟨{token}⟩"]
            plain = []
        return "".join(out) + self.tokenizer.decode(plain)


# ----------------------------------------------------------------------------------------- segments, rollouts


@dataclass
class Segment:
    """One window, token by token: lists of equal length. ValueError where one of them has another length."""
    ids: list[int]
    mask: list[int]                       # 1 where the model sampled the token
    logprobs: list[float] = field(default_factory=list)    # the sampler's, 0 where mask is 0
    versions: list[int] = field(default_factory=list)      # policy that sampled (or first read) a token
    routes: object = None                 # int16 tensor [len(ids), L_moe, K], experts used; −1: not recorded

    def __post_init__(self) -> None:
        # Never pad a missing log-prob with 0 or shift routes by one: that trains on what has not happened.
        n = len(self.ids)
        lengths = {"ids": n, "mask": len(self.mask), "logprobs": len(self.logprobs) or n,
                   "versions": len(self.versions) or n,
                   "routes": n if self.routes is None else len(self.routes)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a segment's lists differ in length: {lengths}; record every token once")


@dataclass
class Rollout:
    """A chain of segments with what came of it. `reward` is what the checks gave, in [0, 1]."""
    task: str
    family: str
    segments: list[Segment]
    answer: str
    finish: str                           # answered, turns, window, loop, died
    counters: dict[str, int]              # the six counters of the length penalty
    reward: float = 0.0
    shaped_reward: float = 0.0
    advantage: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that the model wrote."""
        return sum(sum(s.mask) for s in self.segments)


def training_rows(group: Sequence[Rollout]) -> tuple[list[tuple[Segment, float]], int]:
    """All segments of a group, each with its chain's advantage, and how many chains the loss is divided by.

    A_c = shaped_c − mean over chains. Counting segments would let a chain vote once per summary: rewards 1
    (three segments) and 0 (one) give ±½, not ¼ and −¾. ValueError for a group of one.
    """
    if len(group) < 2:
        raise ValueError(f"a group of {len(group)} has no mean to beat: take 2 rollouts or more")
    mean = sum(r.shaped_reward for r in group) / len(group)
    return [(s, r.shaped_reward - mean) for r in group for s in r.segments], len(group)


class Usage(NamedTuple):
    """Tokens of a chain by what they cost."""
    written: int                          # sampled one by one
    read: int                             # not written and not in the cache: computed in parallel
    cached: int                           # found in the cache, summed over turns


def usage(segments: Sequence[Segment]) -> Usage:
    """Token counts of a chain under a prefix cache that holds the window before, as an engine's slot does."""
    written = read = cached = 0
    before: list[int] = []
    for s in segments:
        first = s.mask.index(1) if 1 in s.mask else len(s.ids)
        pairs = enumerate(zip(s.ids[:first], before))
        ready = next((i for i, (a, b) in pairs if a != b), min(first, len(before)))  # common prefix
        for i, sampled in enumerate(s.mask):
            if sampled and not (i and s.mask[i - 1]):      # a turn begins: what it sees is cached or read now
                read, cached, ready = read + i - ready, cached + ready, i
            if sampled:
                written, ready = written + 1, i + 1
        read, before = read + len(s.ids) - ready, s.ids    # results behind the last turn
    return Usage(written, read, cached)


# -------------------------------------------------------------------------------------------------- the chain


@dataclass(frozen=True)
class WindowConfig:
    """Budgets of a chain, in tokens and counts. The report gives the method, not the numbers: all ours.

    There is headroom for one turn, one result and the summary if trigger + 2 turn + observation + 3 ≤ window:
    no turn of one call can then end at the window. Tighter budgets are allowed; a model can learn to keep
    them. ValueError for an unknown method, or where a summary would not fit behind the trigger.
    """
    window: int = 224                     # hard limit of one window
    trigger: int = 104                    # so many tokens in a window between turns call for a summary
    turn: int = 48                        # longest turn, longest summary
    observation: int = 112                # a tool result is cut to this
    turns: int = 8                        # longest rollout, in turns
    summaries: int = 3                    # of a rollout, own or prompted
    repeats: int = 2                      # so many windows in a row like the one before are a loop
    method: str = "summary"               # or a baseline: prompted, sliding, truncation

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method {self.method!r}: choose {', '.join(METHODS)}")
        if self.trigger + self.turn > self.window:
            raise ValueError(f"trigger {self.trigger} + turn {self.turn} exceed the window of {self.window} "
                             "tokens: a summary must fit behind the trigger")


class Chain:
    """The state of one rollout between engine and workspace: which ids come next, what a sampled turn means.

    The driver alternates: `open()` gives the ids of a fresh window; after the model's turn, `turn(ids)` says
    what it was; `observe(results, used)` turns results into ids. After either, `reopen` says that the window
    is closed and `open()` must follow; `finish` is set when the rollout is over. `play` is such a driver.

    summariser: may replace the model's summary (a control: blanked or scrambled summaries).
    carried: gives plan and to-dos as the harness knows them, asked when a later window opens ("": none).
    ValueError where the task is too long for the budgets.
    """

    def __init__(self, protocol: Protocol, prompt: str, config: WindowConfig,
                 summariser: Callable[[str], str] | None = None, carried: Callable[[], str] | None = None):
        self.protocol, self.prompt, self.config = protocol, prompt, config
        self.summariser, self.carried = summariser, carried
        # A window opens below the trigger even with the longest summary: none outgrows what it replaces.
        opened = len(protocol.span("user", prompt)) + config.turn + 3 + (config.turn + 2 if carried else 0)
        request = len(protocol.span("user", COMPACTION)) if config.method == "prompted" else 0
        if opened >= config.trigger or opened + request >= config.window:
            raise ValueError(f"a task of {len(prompt)} characters opens a window of up to {opened + request} "
                             f"tokens, the trigger is {config.trigger}: raise trigger and window")
        self.summary: str | None = None
        self.n_summaries = self.n_turns = self.n_windows = self.n_repeats = 0
        self.summarising = self.reopen = False
        self.history: list[list[int]] = []            # this window's turns, each with its results, as sampled
        self.calls: list[Call] = []                   # of this window
        self.previous: tuple = ()                     # summary and calls of the window before
        self.answer, self.finish = "", ""
        self.counters = dict(thinking=0, call=0, output=0, final=0, calls=0, turns=0)

    def open(self) -> list[int]:
        """Ids that open a window: head, turns that a baseline kept, ⟨assistant⟩; or a prompted compaction."""
        self.reopen = False
        past = [token for turn in self.history for token in turn]
        if self.summarising:
            request, head = self.protocol.span("user", COMPACTION), self._head()
            room = self.config.window - self.config.turn - 1 - len(request) - len(head)
            return [*request, *head, *past[max(len(past) - room, 0):], self.protocol.ids["summary"]]
        self.n_windows += 1
        return [*self._head(), *past, self.protocol.ids["assistant"]]

    def _head(self) -> list[int]:
        """Task, carried summary, carried state."""
        p = self.protocol
        ids = p.span("user", self.prompt)
        if self.summary is not None:
            ids += p.span("summary", f"{self.n_summaries}{self.summary}", self.config.turn)
        if self.carried and self.n_windows > 1 and (state := self.carried()):
            ids += p.span("obs", state, self.config.turn)
        return ids

    def room(self, used: int) -> int:
        """How many tokens the model may write now, given the tokens already in the window."""
        return max(min(self.config.turn, self.config.window - used), 0)

    def turn(self, ids: Sequence[int]) -> tuple[Call, ...]:
        """Take a sampled turn, with its ⟨end⟩ or cut. Returns the calls to run; the last turn sets `finish`.

        A summary returns no calls. RuntimeError if the window is closed: `open()` was skipped.
        """
        if self.reopen:
            raise RuntimeError("a turn in a closed window: where Chain.reopen is set, call open() first")
        if self.summarising:
            return self._take_summary(ids)
        self.n_turns += 1
        turn = self.protocol.parse(ids)
        self._count(turn, ids)
        self.history.append([self.protocol.ids["assistant"], *ids])
        self.calls += turn.calls
        if not turn.calls:
            whole = bool(ids) and ids[-1] == self.protocol.end
            self.answer, self.finish = turn.text, "answered" if whole else "window"
        elif self.n_turns >= self.config.turns:
            self.finish = "turns"
        return turn.calls

    def _take_summary(self, ids: Sequence[int]) -> tuple[Call, ...]:
        """Keep a summary, whole or cut at its budget, and close the window."""
        text = self.protocol.parse_summary(ids)
        self.counters["thinking"] += len(ids)
        self.summary = self.summariser(text) if self.summariser else text
        self.n_summaries += 1
        # Loop guard: a window with the calls and the summary of the one before has brought nothing.
        now = (text, *self.calls)
        self.n_repeats = self.n_repeats + 1 if now == self.previous else 0
        self.previous, self.calls, self.history = now, [], []
        self.summarising = False
        self.finish = "loop" if self.n_repeats >= self.config.repeats else ""
        self.reopen = not self.finish
        return ()

    def _count(self, turn: Turn, ids: Sequence[int]) -> None:
        # Sampled ids are counted, not those of the text: bytes that are no UTF-8 decode to more than they were.
        calls = (self.protocol.ids["call"], self.protocol.ids["arg"])
        thinking = next(i for i, token in enumerate(ids) if token in calls) if turn.calls else 0
        self.counters["thinking"] += thinking
        self.counters["call" if turn.calls else "final"] += len(ids) - thinking
        self.counters["calls"] += len(turn.calls)
        self.counters["turns"] += 1

    def observe(self, results: Sequence[str], used: int) -> list[int]:
        """Ids of the results of the last turn's calls, then ⟨assistant⟩, or ⟨summary⟩ past the trigger.

        No ids where the window is closed: a baseline's history goes into the next one (`reopen`), or the
        results leave no room for another token and the state as it is will be graded (`finish` "window").
        """
        p, c, ids = self.protocol, self.config, []
        for text in results:
            ids += p.span("obs", text, c.observation)
        self.counters["output"] += len(ids)
        self.history[-1] += ids
        total = used + len(ids) + 1
        may_write = total >= c.trigger and self.n_summaries < c.summaries
        if c.method == "prompted" and may_write:
            self.summarising = self.reopen = True
        elif c.method in ("sliding", "truncation") and total >= c.trigger and self._drop():
            total = len(self._head()) + sum(map(len, self.history)) + 1
            self.reopen = total < c.window
        if self.reopen:
            return []
        if total >= c.window:
            self.finish = "window"
            return []
        self.summarising = may_write and c.method == "summary"
        return ids + [p.ids["summary" if self.summarising else "assistant"]]

    def _drop(self) -> bool:
        """Truncation, sliding: drop the oldest turns; False where only the newest is left, which stays."""
        before, room = len(self.history), self.config.trigger - len(self._head()) - 1
        keep_one = self.config.method == "truncation"
        while len(self.history) > 1 and (keep_one or sum(map(len, self.history)) >= room):
            self.history.pop(0)
        return len(self.history) < before


def play(protocol: Protocol, prompt: str, config: WindowConfig, act: Callable[[], Turn],
         summarise: Callable[[], str | tuple[str, str]], call: Callable[[Call], str],
         summariser: Callable[[str], str] | None = None, watch: Callable[[list[int]], object] | None = None,
         carried: Callable[[], str] | None = None) -> tuple[Chain, list[Segment]]:
    """Drive a chain with a scripted policy: `act()` gives the next turn, `summarise()` a summary or (summary,
    thinking), `call` runs a tool. `watch` is shown the window's ids before every turn, as a model would be.

    The scripted twin of the sampler: the same chain and segments, no model. Demonstrations are made with it.
    """
    chain, segments = Chain(protocol, prompt, config, summariser, carried), []
    while not chain.finish:
        ids = chain.open()
        mask = [0] * len(ids)
        while not (chain.finish or chain.reopen):
            if watch:
                watch(ids)
            if chain.summarising:
                summary = summarise()
                written = protocol.render_summary(*([summary] if isinstance(summary, str) else summary))
            else:
                written = protocol.render(act())
            written = written[:chain.room(len(ids))]
            ids, mask = ids + written, mask + [1] * len(written)
            results = [call(c) for c in chain.turn(written)]
            if not (chain.finish or chain.reopen):
                forced = chain.observe(results, len(ids))
                ids, mask = ids + forced, mask + [0] * len(forced)
        segments.append(Segment(ids, mask))
    return chain, segments


# ------------------------------------------------------------------------------------------------------- demo


class Reader:
    """A scripted policy for "add up n of f0 to fN" that knows what its window shows and nothing else.

    It reads the first file whose number it does not see and answers when it sees all. Asked for a summary it
    writes the numbers, as a model rewarded for the answer would; asked with a fixed prompt, what that lists.
    """

    def __init__(self, protocol: Protocol, files: dict[str, str]):
        self.protocol, self.files, self.known = protocol, files, {}

    def watch(self, ids: list[int]) -> None:
        text = self.protocol.text(ids)
        noted = re.findall(r"(f\d)=(\d+)\b", text)
        self.known = dict(noted + re.findall(r"⟨arg⟩(f\d)⟨end⟩⟨obs⟩[^⟨]*n=(\d+)\n", text))

    def act(self) -> Turn:
        missing = [f for f in self.files if f not in self.known]
        if missing:
            return Turn("", (Call("read", (missing[0],)),))
        return Turn(str(sum(int(self.known[f]) for f in self.files)))

    def own(self) -> str:
        return " ".join(f"{f}={n}" for f, n in self.known.items())

    def listed(self) -> str:
        done, facts = ", ".join(self.known), ", ".join(f"{f}={n}" for f, n in self.known.items())
        left = ", ".join(f for f in self.files if f not in self.known)
        return f"goal: add n of {len(self.files)} files. done: read {done}. facts: {facts}. next: read {left}"

    def run(self, config: WindowConfig) -> tuple[float, list[Segment]]:
        """(reward, segments) under a method."""
        prompt, note = f"add up n of f0 to f{len(self.files) - 1}", self.own
        if config.method == "prompted":
            note = self.listed
        chain, segments = play(self.protocol, prompt, config, self.act, note, lambda c: self.files[c.args[0]],
                               watch=self.watch)
        right = sum(int(text.split("n=")[1].split()[0]) for text in self.files.values())
        return float(chain.answer == str(right)), segments


def number_files(n: int, rng: random.Random) -> dict[str, str]:
    """n files of six lines, one of which holds the number."""
    files = {}
    for i in range(n):
        lines = ["filler line\n"] * 5
        lines.insert(rng.randrange(6), f"n={rng.randrange(1, 100)}\n")
        files[f"f{i}"] = "".join(lines)
    return files


DEMO = WindowConfig(window=440, trigger=220, turn=160, observation=80, turns=24, summaries=16)


def compare(config: WindowConfig, n_tasks: int = 30, seed: int = 0) -> dict[str, tuple[float, float, Usage]]:
    """Share solved, windows per task and usage per task of every method, on equal tasks of 6 to 10 files."""
    rng, protocol, table = random.Random(seed), Protocol(Bytes()), {}
    tasks = [number_files(6 + i % 5, rng) for i in range(n_tasks)]
    configs = {"one window": replace(config, summaries=0), **{m: replace(config, method=m) for m in METHODS}}
    for name, c in configs.items():
        rewards, chains = zip(*(Reader(protocol, files).run(c) for files in tasks))
        used = Usage(*(round(sum(column) / n_tasks) for column in zip(*map(usage, chains))))
        table[name] = sum(rewards) / n_tasks, sum(map(len, chains)) / n_tasks, used
    return table


def main() -> None:
    print(f"add up a number from each of 6 to 10 files of 65 bytes; windows of {DEMO.window} tokens, trigger "
          f"{DEMO.trigger}, {DEMO.turns} turns\na scripted policy that knows what its window shows, no more; "
          "tokens per task, means of 30 tasks\n")
    print(f"{'method':12} {'solved':>6} {'windows':>8} {'written':>8} {'read':>6} {'both':>6} {'cached':>7}")
    for name, (solved, windows, used) in compare(DEMO).items():
        print(f"{name:12} {solved:6.2f} {windows:8.1f} {used.written:8} {used.read:6} "
              f"{used.written + used.read:6} {used.cached:7}")
    protocol, rng = Protocol(Bytes()), random.Random(0)
    reader = Reader(protocol, number_files(8, rng))
    chains = [reader.run(replace(DEMO, method=m)) for m in ("summary", "truncation")]
    print("\none chain, window by window: tokens, tokens written, what was written last")
    for s in chains[0][1]:
        start = len(s.mask) - 1 - next((i for i, m in enumerate(reversed(s.mask)) if not m), 0)
        print(f"    {len(s.ids):4} {sum(s.mask):4}   {protocol.text(s.ids[start:])}")
    group = [Rollout("t", "f", segments, "", "", {}, r, shaped_reward=r) for r, segments in chains]
    rows, n = training_rows(group)
    print(f"beside a chain that failed in {len(chains[1][1])} windows: {len(rows)} segments for the trainer, "
          f"advantages {rows[0][1]:+} and {rows[-1][1]:+}, loss divided by {n} chains")


if __name__ == "__main__":
    main()
