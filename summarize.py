"""A rollout as a chain of context windows, joined by the model's own summaries.

Self-summarization (report §4.1, claim R8): when a window has used up its token budget, the harness appends a short request, the
model writes a summary on top of the cache it already has, and work goes on in a fresh window that holds the task, the
summary and a little carried state. A rollout is then a chain of segments. Every token that the model wrote, summaries
included, is trained with the chain's one final reward, in exactly the context in which it was sampled.

What a window is made of, in structural ids that no file and no tool output can contain (⟨·⟩), so that nothing a tool prints
can forge a turn:

    ⟨user⟩ task ⟨end⟩  [⟨summary⟩ n text ⟨end⟩]                        how a window opens; n counts the summaries so far
    ⟨assistant⟩ thinking ⟨call⟩ tool ⟨arg⟩ a ⟨arg⟩ b ⟨call⟩ … ⟨end⟩    a turn; one result per call, in order:
    ⟨obs⟩ text ⟨end⟩
    ⟨summary⟩ text ⟨end⟩                                               request (the id) and summary
    ⟨assistant⟩ text ⟨end⟩                                             a turn without calls is the answer and ends it

The trained tokens are those that the model sampled: thinking, calls, summaries, answers and their ⟨end⟩. They are stored as
sampled and never decoded and encoded again.

Differences from the report: 1. The trigger is checked between turns only, so a turn is never cut by a summary. 2. Carried
state is the task and the number of summaries; plans and to-dos are what the model puts into the summary.

    python summarize.py        a task that does not fit one window: solved with a summary, unsolved without
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, NamedTuple, Sequence
from typing import Protocol as Interface

STRUCTURE = ("pad", "document", "user", "assistant", "call", "arg", "end", "obs", "summary")


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
        """The ids that a model would have sampled for this turn (without the leading ⟨assistant⟩, with ⟨end⟩)."""
        out = self.tokenizer.encode(turn.text)
        for call in turn.calls:
            out += [self.ids["call"], *self.tokenizer.encode(call.tool)]
            for arg in call.args:
                out += [self.ids["arg"], *self.tokenizer.encode(arg)]
        return out + [self.end]

    def parse(self, ids: Sequence[int]) -> Turn:
        """Read a turn; structural ids in the wrong place are kept as the calls they garble, so strict tools refuse them."""
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


# ----------------------------------------------------------------------------------------------------- segments, rollouts


@dataclass
class Segment:
    """One window, token by token. Lists of equal length; `routes[i]` are the expert ids with which token i was computed."""
    ids: list[int]
    mask: list[int]                       # 1 where the model sampled the token
    logprobs: list[float] = field(default_factory=list)    # the sampler's, 0 where mask is 0
    versions: list[int] = field(default_factory=list)      # policy version that sampled (or first read) the token
    routes: object = None                 # int16 tensor [len(ids), L_moe, K], −1: not recorded

    def __post_init__(self) -> None:
        lengths = {"ids": len(self.ids), "mask": len(self.mask), "logprobs": len(self.logprobs) or len(self.ids),
                   "versions": len(self.versions) or len(self.ids)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a segment's lists differ in length: {lengths}; record every token once")


@dataclass
class Rollout:
    """A chain of segments with what came of it. `reward` is what the checks gave, in [0, 1]."""
    task: str
    family: str
    segments: list[Segment]
    answer: str
    finish: str                           # answered, turns, window, summaries
    counters: dict[str, int]              # the six counters of the length penalty
    reward: float = 0.0
    shaped_reward: float = 0.0
    advantage: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that the model wrote."""
        return sum(sum(s.mask) for s in self.segments)


# -------------------------------------------------------------------------------------------------------------- the chain


@dataclass(frozen=True)
class WindowConfig:
    """Budgets of a chain, in tokens and counts. The report gives the method, not the numbers: all ours."""
    window: int = 224                     # hard limit of one window
    trigger: int = 104                    # a summary is requested when a window holds this many tokens between turns
    turn: int = 48                        # longest turn
    observation: int = 112                # a tool result is cut to this
    turns: int = 8                        # longest rollout, in turns
    summaries: int = 3

    def __post_init__(self) -> None:
        if self.trigger + self.turn > self.window:
            raise ValueError(f"trigger {self.trigger} + turn {self.turn} exceed the window of {self.window} tokens: "
                             "a summary must fit behind the trigger")


class Chain:
    """The state of one rollout between engine and workspace: which ids come next, what a sampled turn means.

    The driver alternates: `open()` gives the ids of a fresh window; after the model's turn, `turn(ids)` says what it was;
    `observe(results, used)` turns results into ids. `finish` is set when the rollout is over. `summariser` may replace
    the model's summary (a control: blanked or scrambled summaries).
    """

    def __init__(self, protocol: Protocol, prompt: str, config: WindowConfig,
                 summariser: Callable[[str], str] | None = None):
        self.protocol, self.prompt, self.config, self.summariser = protocol, prompt, config, summariser
        opened = len(protocol.span("user", prompt)) + config.turn + 3
        if opened >= config.trigger:
            raise ValueError(f"a task of {len(prompt)} characters opens a window with up to {opened} tokens, the trigger is "
                             f"{config.trigger}: raise trigger and window")
        self.summary: str | None = None
        self.n_summaries = self.n_turns = 0
        self.summarising = False
        self.answer, self.finish = "", ""
        self.counters = dict(thinking=0, call=0, output=0, final=0, calls=0, turns=0)

    def open(self) -> list[int]:
        """Ids that open a window: task, carried summary, ⟨assistant⟩."""
        p = self.protocol
        ids = p.span("user", self.prompt)
        if self.summary is not None:
            ids += p.span("summary", f"{self.n_summaries}{self.summary}", self.config.turn)
        return ids + [p.ids["assistant"]]

    def room(self, used: int) -> int:
        """How many tokens the model may write now, given the tokens already in the window."""
        return max(min(self.config.turn, self.config.window - used), 0)

    def turn(self, ids: Sequence[int]) -> tuple[Call, ...]:
        """Take a sampled turn (up to and including ⟨end⟩, or cut). Returns calls to run; sets `finish` when it was the last.

        A summary returns no calls and leaves `finish` empty: the driver then opens the next window.
        """
        if self.summarising:
            return self._take_summary(ids)
        self.n_turns += 1
        turn = self.protocol.parse(ids)
        self._count(turn, len(ids))
        if not turn.calls:
            self.answer, self.finish = turn.text, "answered" if ids and ids[-1] == self.protocol.end else "window"
        elif self.n_turns >= self.config.turns:
            self.finish = "turns"
        return turn.calls

    def _take_summary(self, ids: Sequence[int]) -> tuple[Call, ...]:
        text = self.protocol.text([i for i in ids if i != self.protocol.end])
        self.summary = self.summariser(text) if self.summariser else text
        self.n_summaries += 1
        self.summarising = False
        self.counters["thinking"] += len(ids)
        return ()

    def _count(self, turn: Turn, n: int) -> None:
        thinking = len(self.protocol.tokenizer.encode(turn.text)) if turn.calls else 0
        self.counters["thinking"] += thinking
        self.counters["call" if turn.calls else "final"] += n - thinking
        self.counters["calls"] += len(turn.calls)
        self.counters["turns"] += 1

    def observe(self, results: Sequence[str], used: int) -> list[int]:
        """Ids of the results of the last turn's calls, then ⟨assistant⟩, or ⟨summary⟩ when the window has passed its trigger."""
        p, ids = self.protocol, []
        for text in results:
            ids += p.span("obs", text, self.config.observation)
        self.counters["output"] += len(ids)
        total = used + len(ids) + 1
        if total >= self.config.window:          # no room for another token: the state as it is will be graded
            self.finish = "window"
            return []
        self.summarising = total >= self.config.trigger and self.n_summaries < self.config.summaries
        return ids + [p.ids["summary" if self.summarising else "assistant"]]


def play(protocol: Protocol, prompt: str, config: WindowConfig, act: Callable[[], Turn], summarise: Callable[[], str],
         call: Callable[[Call], str], summariser: Callable[[str], str] | None = None) -> tuple[Chain, list[Segment]]:
    """Drive a chain with a scripted policy: `act()` gives the next turn, `summarise()` a summary, `call` runs a tool.

    The scripted twin of the sampler: the same chain, the same segments, no model. Demonstrations are made with it.
    """
    chain, segments = Chain(protocol, prompt, config, summariser), []
    while not chain.finish:
        ids = chain.open()
        mask = [0] * len(ids)
        while not chain.finish:
            summarising = chain.summarising
            written = (protocol.tokenizer.encode(summarise()) + [protocol.end]) if summarising else protocol.render(act())
            written = written[:chain.room(len(ids))]
            ids, mask = ids + written, mask + [1] * len(written)
            calls = chain.turn(written)
            if summarising or chain.finish:
                break
            forced = chain.observe([call(c) for c in calls], len(ids))
            ids, mask = ids + forced, mask + [0] * len(forced)
        segments.append(Segment(ids, mask))
    return chain, segments


# ----------------------------------------------------------------------------------------------------------------- demo


def main() -> None:
    """A task that does not fit one window: add up one number from each of four long files."""
    protocol, config = Protocol(Bytes()), WindowConfig(window=200, trigger=100, turn=40, observation=100, turns=12, summaries=8)
    numbers = [17, 4, 23, 8]
    files = {f"f{i}": "filler line\n" * 6 + f"n={n}\n" for i, n in enumerate(numbers)}
    print(f"{len(files)} files of {len(files['f0'])} bytes, windows of {config.window} tokens, a summary from {config.trigger} on; "
          f"right answer {sum(numbers)}\n")
    methods = {"own summary": lambda text: text, "blanked (truncation)": lambda text: "", "last line only": lambda text: text[-2:]}
    print(f"{'method':22} {'answer':>8}  windows  model tokens  read again")
    for name, keep in methods.items():
        state = {"done": 0, "total": 0, "seen": ""}

        def act() -> Turn:
            # The policy knows only what its window shows: the carried summary, and the last observation.
            if state["done"] < len(files):
                return Turn("", (Call("read", (f"f{state['done']}",)),))
            return Turn(str(state["total"]))

        def call(c: Call) -> str:
            state["total"] += int(files[c.args[0]].split("n=")[1])
            state["done"] += 1
            return files[c.args[0]]

        def take(text: str, keep: Callable[[str], str] = keep) -> str:
            text = keep(text)
            done, _, total = text.partition(" files, total ")
            state["done"], state["total"] = (int(done), int(total)) if total.isdigit() and done.isdigit() else (state["done"], 0)
            return text

        def note() -> str:
            return f"{state['done']} files, total {state['total']}"

        chain, segments = play(protocol, "sum of n in f0 to f3", config, act, note, call, take)
        written, read = sum(sum(s.mask) for s in segments), sum(len(s.ids) - sum(s.mask) for s in segments)
        print(f"{name:22} {chain.answer:>8}  {len(segments):7}  {written:12}  {read:10}")


if __name__ == "__main__":
    main()
