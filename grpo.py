"""Asynchronous reinforcement learning: groups of rollouts, one mean, no standard deviation.

For every task the policy makes a group of G rollouts in real workspaces. What a rollout earned above its group's mean is the
advantage of every token that the model wrote in it (report §4, claims R1–R5, R7, R9). Sampling and training are separate
processes that meet in two folders: groups of finished rollouts go one way, weights the other (§6.2, claims I1, I2).

    shaped_c = reward_c − λ C(effort_c) − β Σ_t (log μ_t − log π_ref,t)        detached, one number per rollout
    A_c      = shaped_c − mean over the group                                  no division by the standard deviation
    w_t      = min(exp(sg log π_θ,t − log μ_t), cap)                           μ: the sampler's log-probs, as recorded
    loss     = −(1 / (N · norm_const)) Σ_c A_c Σ_t w_t log π_θ,t               N rollouts; no division by any length

Legend: N rollouts of a step, G of a group, T tokens of a packed row, K experts per token, μ the sampling policy, π_θ the
trained one, π_ref the policy before RL, sg stop-gradient.

Differences from the report, which fixes the ideas and leaves the formulas open:
1. The truncated weight w is PipelineRL's and CISPO's (arXiv 2509.19128, 2506.13585): the report only says that samples are
   kept nearly on-policy. There is one update per sample, so PPO's clip would have nothing to do.
2. The KL penalty enters as k1 in the reward: differentiated in the loss, k1 has zero expected gradient (see kl.py).
3. A group may start when it will be at most `max_staleness` steps old at its turn; 0 makes sampling and training alternate.
4. Rollouts that end at a limit keep their reward (R4). Only a workspace that died twice removes a rollout.

    python grpo.py       on problems with a known answer: what the mean, the deviation and a stale sampler do

Left out so far: sharded deltas and their background upload (files are written by the trainer in line).
"""

from __future__ import annotations

import io
import json
import math
import os
import time
import zlib
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

import kl
import length_penalty
import moe
import mtp
import sandbox
from summarize import Chain, Protocol, Rollout, Segment, WindowConfig


@dataclass(frozen=True)
class GRPOConfig:
    """Reinforcement learning. The report gives no numbers: all ours, for the toy."""

    steps: int = 40  # optimizer steps
    groups: int = 16  # groups of a step
    group_size: int = 8  # G
    lr: float = 5e-4  # at the peak; falls linearly to a tenth
    warmup: int = 3
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # largest gradient norm
    norm_const: float = 32.0  # the loss's constant, about the tokens that a rollout writes
    ratio_cap: float = 2.0  # upper bound of the importance weight
    kl_beta: float = 3e-3  # per nat, against the policy before RL
    temperature: float = 1.0
    slots: int = 128  # rollouts in flight
    max_staleness: int = 1  # steps; 0: synchronous
    drop_staleness: int = 6  # groups whose oldest token is older are dropped and counted
    plausibility: float = 0.0  # router replay's filter (M4); 0: plain replay
    row: int = 224  # tokens of a packed row
    micro_rows: int = 24  # rows of one backward pass
    curriculum: float = 0.5  # after this share of the steps harder families are drawn more often (R9)
    full_every: int = 10  # every n-th weight file is a full snapshot

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"group_size = {self.group_size}: a group of one has no mean to beat, take 2 or more"
            )
        if self.drop_staleness < self.max_staleness:
            raise ValueError(
                f"drop_staleness = {self.drop_staleness} is below max_staleness = {self.max_staleness}"
            )
        if self.ratio_cap < 1 or self.norm_const <= 0 or self.temperature <= 0:
            raise ValueError("ratio_cap must be at least 1, norm_const and temperature positive")


# ------------------------------------------------------------------------------------------------- advantages and loss


def advantages(shaped: Tensor) -> Tensor:
    """A = shaped − group mean, for shaped rewards [N / G, G] of whole chains; constant groups give exact zeros."""
    if shaped.dim() != 2 or shaped.shape[1] < 2:
        raise ValueError(
            f"shaped rewards of shape {list(shaped.shape)}: need [groups, G] with G of 2 or more"
        )
    centred = shaped - shaped.mean(dim=1, keepdim=True)
    spread = shaped.max(dim=1, keepdim=True).values - shaped.min(dim=1, keepdim=True).values
    return torch.where(spread < 1e-9, torch.zeros_like(centred), centred)


def loss(
    logp: Tensor, logp_sampled: Tensor, advantage: Tensor, mask: Tensor, denominator: float, cap: float = 2.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """−Σ A · w · log π over the masked tokens / denominator; all tensors of one shape.

    The denominator is N · norm_const of the whole optimizer step, so micro-batches, packing and padding cannot change
    the gradient. Masked positions are set to 0 before the exponential: an infinity there would poison the gradient.
    Metrics are sums over tokens, to be added over micro-batches and read by `summary`.
    """
    if not logp.shape == logp_sampled.shape == advantage.shape == mask.shape:
        raise ValueError(
            f"shapes differ: logp {list(logp.shape)}, logp_sampled {list(logp_sampled.shape)}, "
            f"advantage {list(advantage.shape)}, mask {list(mask.shape)}"
        )
    mask = mask.bool()
    logp = torch.where(mask, logp, 0.0)
    log_ratio = torch.where(mask, logp.detach() - logp_sampled, 0.0)
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=cap)
    value = -(torch.where(mask, advantage, 0.0) * weight * logp).sum() / denominator
    m = mask.to(ratio.dtype)
    metrics = dict(
        tokens=m.sum(),
        weight=(ratio * m).sum(),
        weight2=(ratio**2 * m).sum(),
        truncated=((ratio > cap) & mask).sum(),
        k1=kl.k1(log_ratio).mul(m).sum(),
        k3=kl.k3(log_ratio).mul(m).sum(),
    )
    return value, metrics


def summary(sums: dict[str, float]) -> dict[str, float]:
    """Per-token readings of summed loss metrics: effective sample size (Σw)²/(nΣw²), truncated share, k1 and k3 of μ to π."""
    n = max(sums["tokens"], 1.0)
    return dict(
        ess=sums["weight"] ** 2 / max(n * sums["weight2"], 1e-30),
        truncated=sums["truncated"] / n,
        k1_sampler=sums["k1"] / n,
        k3_sampler=sums["k3"] / n,
    )


# ------------------------------------------------------------------------------------------------------------- sampling


class World(NamedTuple):
    """What rollouts happen in: functions that open a task's workspace and grade its final state in [0, 1]."""

    open: Callable[[object], object]
    grade: Callable[[object, object, str], float]


@dataclass
class _Slot:
    task: object
    chain: Chain
    index: int  # of the rollout in its group
    start: int  # where the model's current turn begins in the window
    tries: int = 0  # how often the machine has lost this rollout's workspace
    workspace: object = None
    segments: list[Segment] = field(default_factory=list)
    pending: Future | None = None  # tool calls or grading under way
    counts: dict[str, float] = field(default_factory=lambda: dict(calls=0, broken=0, parallel=0))


class Sampler:
    """Joins engine, chains and workspaces into finished rollouts, many at a time.

    Decoding never waits for a workspace: tool calls and grading run in a thread pool while other slots decode. `poll` is
    called between two engine steps; new weights enter there, in the middle of rollouts (R5).
    """

    def __init__(
        self,
        model: moe.Transformer,
        protocol: Protocol,
        window: WindowConfig,
        world: World,
        slots: int,
        temperature: float = 1.0,
        seed: int = 0,
        summariser: Callable[[str], str] | None = None,
        threads: int = 4,
    ):
        self.engine = mtp.Engine(model, slots, window.window + 8, protocol.end, temperature)
        self.protocol, self.window, self.world, self.seed, self.summariser = (
            protocol,
            window,
            world,
            seed,
            summariser,
        )
        self.pool = ThreadPoolExecutor(threads)
        self.slots: list[_Slot | None] = [None] * slots

    def run(
        self, jobs: Iterator[tuple[object, int]], poll: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[object, Rollout]]:
        """Finished (task, rollout) pairs, in the order in which they end, for jobs of (task, index in its group).

        `jobs` is asked for more whenever a slot is free; it may yield None to say "not now".
        """
        jobs, exhausted = iter(jobs), False
        while True:
            poll()
            for i, slot in enumerate(self.slots):
                if slot is None and not exhausted:
                    job = next(jobs, StopIteration)
                    exhausted = job is StopIteration
                    if exhausted or job is None:
                        break
                    self._begin(i, *job)
            for i in self.engine.step():
                self._turn(i)
            busy = [s for s in self.slots if s and s.pending]
            if busy and not self.engine.live.any():
                wait([s.pending for s in busy], return_when=FIRST_COMPLETED)
            for i, slot in enumerate(self.slots):
                if slot and slot.pending and slot.pending.done() and (rollout := self._continue(i)):
                    yield slot.task, rollout
            if not any(self.slots):
                if exhausted:
                    return
                time.sleep(0.01)  # the producer has nothing for us yet

    def _begin(self, i: int, task: object, index: int) -> None:
        chain = Chain(self.protocol, task.prompt, self.window, self.summariser)
        ids = chain.open()
        self.slots[i] = _Slot(task, chain, index, len(ids))
        key = zlib.crc32(f"{self.seed}/{task.id}/{index}".encode())
        self.engine.force(i, ids, len(ids) + chain.room(len(ids)), reset=True, key=key)

    def _turn(self, i: int) -> None:
        """The model's turn in slot i has ended: start its calls, open the next window, or grade."""
        slot, chain = self.slots[i], self.slots[i].chain
        ids, *_ = self.engine.window(i)
        summarised = chain.summarising
        calls = chain.turn(ids[slot.start :])
        slot.counts["calls"] += len(calls)
        slot.counts["parallel"] += len(calls) > 1
        if summarised and not chain.finish:
            self._close_window(i)
            ids = chain.open()
            slot.start = len(ids)
            self.engine.force(i, ids, slot.start + chain.room(slot.start), reset=True)
        else:
            slot.pending = self.pool.submit(self._work, slot, calls, bool(chain.finish))

    def _work(self, slot: _Slot, calls: Sequence, last: bool) -> tuple[list, float | None]:
        """In a pool thread: run the calls of a turn in order; after the last turn grade the final state."""
        if slot.workspace is None:
            slot.workspace = self.world.open(slot.task)
        try:
            results = [slot.workspace.call(c.tool, c.args) for c in calls]
            return results, self.world.grade(slot.task, slot.workspace, slot.chain.answer) if last else None
        except (sandbox.SandboxDied, sandbox.TooBig) as error:
            if not getattr(error, "policy", True):
                raise
            slot.chain.finish = "died"  # the model's own doing: it keeps its tokens and earns nothing
            return [], 0.0

    def _continue(self, i: int) -> Rollout | None:
        """Feed results back, or return the finished rollout."""
        slot = self.slots[i]
        try:
            (results, reward), slot.pending = slot.pending.result(), None
        except sandbox.SandboxDied:
            return self._again(i)
        slot.counts["broken"] += sum(not r.ok for r in results)
        if reward is None:
            used = int(self.engine.known[i])
            ids = slot.chain.observe([r.text for r in results], used)
            if not slot.chain.finish:
                slot.start = used + len(ids)
                self.engine.force(i, ids, slot.start + slot.chain.room(slot.start))
                return None
            slot.pending = self.pool.submit(self._work, slot, (), True)
            return None
        self._close_window(i)
        slot.workspace.close()
        self.slots[i] = None
        c = slot.chain
        return Rollout(
            slot.task.id,
            slot.task.family,
            slot.segments,
            c.answer,
            c.finish,
            dict(c.counters),
            reward,
            extra=dict(slot.counts, summaries=c.n_summaries),
        )

    def _again(self, i: int) -> None:
        """The machine lost a workspace: that is not the model's failure, so the rollout starts anew, twice at most."""
        slot = self.slots[i]
        slot.workspace.close()
        if slot.tries == 2:
            raise sandbox.SandboxDied(
                f"{slot.task.id}: three workspaces in a row died; is the machine out of memory?"
            )
        self._begin(i, slot.task, slot.index)
        self.slots[i].tries = slot.tries + 1

    def _close_window(self, i: int) -> None:
        ids, mask, logprobs, versions, routes = self.engine.window(i)
        self.slots[i].segments.append(Segment(ids, mask, logprobs, versions, routes))

    def close(self) -> None:
        self.pool.shutdown()
        for slot in self.slots:
            if slot and slot.workspace:
                slot.workspace.close()


# -------------------------------------------------------------------------------------------------- packing and replay


class Row(NamedTuple):
    """One packed row: segments one after another, each a document."""

    segments: list[Segment]
    advantages: list[float]


def pack(segments: Sequence[tuple[Segment, float]], length: int) -> list[Row]:
    """Segments with their advantages into as few rows of `length` tokens as first-fit, longest first, finds (S5)."""
    rows: list[Row] = []
    space: list[int] = []
    for segment, advantage in sorted(segments, key=lambda s: -len(s[0].ids)):
        n = len(segment.ids)
        if n > length:
            raise ValueError(f"a segment of {n} tokens does not fit a row of {length}: raise grpo.row")
        i = next((i for i, free in enumerate(space) if free >= n), len(rows))
        if i == len(rows):
            rows.append(Row([], []))
            space.append(length)
        rows[i].segments.append(segment)
        rows[i].advantages.append(advantage)
        space[i] -= n
    return rows


def cost(length: int, s0: float = 51_200.0) -> float:
    """Relative compute of a sequence, s + s²/s₀: attention overtakes the linear part at s₀ tokens (K2.5's shapes)."""
    return length + length * length / s0


def balance(lengths: Sequence[int], n_ranks: int, s0: float = 51_200.0) -> list[list[int]]:
    """Deal sequences to ranks, costliest first to the least loaded (S5). Returns indices per rank."""
    ranks: list[list[int]] = [[] for _ in range(n_ranks)]
    load = [0.0] * n_ranks
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        r = load.index(min(load))
        ranks[r].append(i)
        load[r] += cost(lengths[i], s0)
    return ranks


def tensors(rows: Sequence[Row], length: int) -> dict[str, Tensor]:
    """Packed rows as tensors [B, T]: ids, mask, doc, positions, logp_sampled, advantage, version, routes [B, T, L_moe, K]."""
    B, first = len(rows), rows[0].segments[0]
    out = dict(
        ids=torch.zeros(B, length, dtype=torch.long),
        mask=torch.zeros(B, length, dtype=torch.bool),
        doc=torch.full((B, length), -1),
        positions=torch.zeros(B, length, dtype=torch.long),
        logp_sampled=torch.zeros(B, length),
        advantage=torch.zeros(B, length),
        version=torch.zeros(B, length, dtype=torch.long),
    )
    if first.routes is not None:
        out["routes"] = torch.full((B, length, *first.routes.shape[1:]), -1, dtype=torch.int16)
    for b, row in enumerate(rows):
        at = 0
        for n, (s, advantage) in enumerate(zip(row.segments, row.advantages)):
            end = at + len(s.ids)
            for key, value in dict(
                ids=s.ids, mask=s.mask, logp_sampled=s.logprobs, version=s.versions
            ).items():
                out[key][b, at:end] = torch.as_tensor(value, dtype=out[key].dtype)
            out["doc"][b, at:end], out["advantage"][b, at:end] = n, advantage
            out["positions"][b, at:end] = torch.arange(end - at)
            if "routes" in out:
                out["routes"][b, at:end] = s.routes
            at = end
    return out


def logprobs(
    model: moe.Transformer,
    batch: dict[str, Tensor],
    temperature: float = 1.0,
    replay: bool = True,
    plausibility: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """log π of every sampled token under its own context; returns (logp [n], entropy [n], index of those tokens [B, T]).

    The token at t is predicted from t − 1. Routes are those recorded when the sampler computed each token (M3).
    """
    routes = batch.get("routes") if replay else None
    ctx = model.context(
        batch["positions"], doc=batch["doc"], replay=routes, plausibility=plausibility, real=batch["doc"] >= 0
    )
    hidden = model(batch["ids"], ctx)[:, :-1]  # [B, T − 1, D]
    keep = batch["mask"][:, 1:]
    logits = model.lm_head(hidden[keep]).float() / temperature  # [n, V]
    logp = logits.log_softmax(-1)
    entropy = -(logp.detach().exp() * logp.detach()).sum(-1)
    index = torch.cat((torch.zeros_like(keep[:, :1]), keep), dim=1)
    return logp.gather(1, batch["ids"][index].unsqueeze(1)).squeeze(1), entropy, index


def reference_kl(model: moe.Transformer, rollouts: Sequence[Rollout], c: GRPOConfig) -> list[float]:
    """Σ_t (log μ_t − log π_ref,t) of each rollout: k1 summed over the whole chain, detached (R6)."""
    flat = [
        (s, float(i)) for i, r in enumerate(rollouts) for s in r.segments
    ]  # the "advantage" carries the owner
    sums = torch.zeros(len(rollouts), dtype=torch.float64)
    rows = pack(flat, c.row)
    with torch.no_grad():
        for at in range(0, len(rows), c.micro_rows):
            batch = tensors(rows[at : at + c.micro_rows], c.row)
            logp, _, index = logprobs(model, batch, c.temperature, replay=False)
            sums.index_add_(
                0, batch["advantage"][index].long(), kl.k1(logp - batch["logp_sampled"][index]).double()
            )
    return sums.tolist()


def shape_rewards(
    rollouts: Sequence[Rollout], nats: Sequence[float], beta: float, penalty: length_penalty.Penalty
) -> None:
    """shaped_reward = reward − λ C(effort) − β Σ k1; the reward itself stays what the checks gave."""
    for r, k in zip(rollouts, nats):
        r.extra["kl"], r.extra["length_cost"] = k, length_penalty.cost(r.counters, penalty)
        r.shaped_reward = r.reward - r.extra["length_cost"] - beta * k


# ------------------------------------------------------------------------------------------------------ the two folders


MAGIC = b"C2RL1\n"


def write_file(path: Path, value: dict) -> int:
    """Write tensors and plain values so that the file appears whole or not at all: checksum inside, rename last."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = buffer.getvalue()
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        f.write(MAGIC + zlib.crc32(data).to_bytes(4, "little") + data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)
    return len(data)


def read_file(path: Path) -> dict:
    """Read such a file; no code in it can run. Raises ValueError naming the file when it is damaged."""
    raw = path.read_bytes()
    data = raw[len(MAGIC) + 4 :]
    if (
        not raw.startswith(MAGIC)
        or zlib.crc32(data).to_bytes(4, "little") != raw[len(MAGIC) : len(MAGIC) + 4]
    ):
        raise ValueError(f"{path} is damaged (checksum): it is not used; delete it or restore it")
    return torch.load(io.BytesIO(data), weights_only=True)


def group_state(rollouts: Sequence[Rollout], index: int) -> dict:
    """A group as tensors and plain values."""

    def segment(s: Segment) -> dict:
        return dict(
            ids=torch.tensor(s.ids),
            mask=torch.tensor(s.mask),
            logprobs=torch.tensor(s.logprobs),
            versions=torch.tensor(s.versions),
            routes=s.routes,
        )

    return dict(
        index=index,
        rollouts=[
            {
                **{k: v for k, v in vars(r).items() if k != "segments"},
                "segments": [segment(s) for s in r.segments],
            }
            for r in rollouts
        ],
    )


def group_of(state: dict) -> list[Rollout]:
    """The rollouts of a stored group."""

    def segment(s: dict) -> Segment:
        return Segment(
            s["ids"].tolist(), s["mask"].tolist(), s["logprobs"].tolist(), s["versions"].tolist(), s["routes"]
        )

    return [Rollout(**{**r, "segments": [segment(s) for s in r["segments"]]}) for r in state["rollouts"]]


def bits(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they are published: the bit patterns of their bf16 roundings (int16)."""
    return {
        k: v.detach().to(torch.bfloat16).contiguous().view(torch.int16).cpu().clone()
        for k, v in state.items()
    }


class Publisher:
    """The trainer's end of weights/: a chain of compressed bit differences with a full snapshot every few versions (I1).

    A delta is the exclusive or of two bf16 bit patterns: applied to its base it gives the next version exactly, where
    adding a rounded difference would not. Every file names its base; a reader that missed one waits for a snapshot.
    """

    def __init__(self, folder: Path, full_every: int):
        self.folder, self.full_every, self.last, self.version = folder, full_every, None, -1
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, state: dict[str, Tensor], version: int) -> dict[str, float]:
        """Write one version; returns bytes, ratio to uncompressed bf16 and the share of weights that changed."""
        now = bits(state)
        full = self.last is None or version % self.full_every == 0 or version != self.version + 1
        flat = torch.cat([v.flatten() if full else (v ^ self.last[k]).flatten() for k, v in now.items()])
        data = zlib.compress(flat.numpy().tobytes(), 1)
        name = f"{version:06d}.{'full' if full else 'delta'}"
        size = write_file(
            self.folder / name,
            dict(
                version=version,
                base=-1 if full else self.version,
                data=torch.frombuffer(bytearray(data), dtype=torch.uint8),
            ),
        )
        changed = 1.0 if full else float((flat != 0).float().mean())
        self.last, self.version = now, version
        if full:  # keep the previous snapshot and its deltas for readers under way
            for path in self.folder.glob("*.*"):
                if path.suffix in (".full", ".delta") and int(path.stem) < version - self.full_every:
                    path.unlink()
        return dict(weight_bytes=size, weight_ratio=2 * flat.numel() / size, weight_changed=changed)


class Subscriber:
    """A sampler's end: rebuilds the newest version it can reach from snapshots and deltas, bit for bit."""

    def __init__(self, folder: Path, like: dict[str, Tensor]):
        self.folder, self.shapes = folder, {k: v.shape for k, v in like.items()}
        self.flat: Tensor | None = None
        self.version, self.bad = -1, set()

    def poll(self) -> dict[str, Tensor] | None:
        """The newest weights as fp32 tensors when there are newer ones than at the last call, else None."""
        start, found = self.version, {}
        for path in self.folder.glob("*"):
            if path.suffix in (".full", ".delta") and path.name not in self.bad:
                found[int(path.stem), path.suffix] = path
        newest_full = max((v for v, kind in found if kind == ".full"), default=-1)
        if newest_full > self.version and (self.version + 1, ".delta") not in found:
            self._apply(found[newest_full, ".full"])
        while (
            path := found.get((self.version + 1, ".delta")) or found.get((self.version + 1, ".full"))
        ) and self._apply(path):
            pass
        return self._state() if self.version > start else None

    def _apply(self, path: Path) -> bool:
        try:
            file = read_file(path)
        except (ValueError, OSError) as error:
            print(f"weights: {error}", flush=True)
            self.bad.add(path.name)
            return False
        data = torch.frombuffer(bytearray(zlib.decompress(file["data"].numpy().tobytes())), dtype=torch.int16)
        if file["base"] >= 0 and (self.flat is None or file["base"] != self.version):
            return False
        self.flat = data if file["base"] < 0 else self.flat ^ data
        self.version = file["version"]
        return True

    def _state(self) -> dict[str, Tensor]:
        sizes = [math.prod(s) for s in self.shapes.values()]
        parts = self.flat.split(sizes)
        return {k: p.view(s).view(torch.bfloat16).float() for (k, s), p in zip(self.shapes.items(), parts)}


# ------------------------------------------------------------------------------------------------------ the two loops


class Curriculum:
    """Which task comes next (R9): every task once; late in training families that take more effort are drawn more often.

    Effort of a family: mean turns plus thinking tokens / 100 of its finished rollouts, the report's two heuristics. The draw
    is a function of (seed, index), so a restarted sampler goes on where the stored groups end.
    """

    def __init__(self, families: Sequence[str], seed: int):
        self.families, self.seed = list(families), seed
        self.effort: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def note(self, rollout: Rollout) -> None:
        e = self.effort[rollout.family]
        e[0] += rollout.counters["turns"] + rollout.counters["thinking"] / 100
        e[1] += 1

    def pick(self, index: int, late: bool) -> str:
        if not late or len(self.effort) < len(self.families):
            return self.families[index % len(self.families)]
        weights = [self.effort[f][0] / self.effort[f][1] for f in self.families]
        u = zlib.crc32(f"{self.seed}/draw/{index}".encode()) / 2**32 * sum(weights)
        for family, w in zip(self.families, weights):
            u -= w
            if u < 0:
                return family
        return self.families[-1]


def sampler_loop(
    model: moe.Transformer,
    reference: moe.Transformer,
    protocol: Protocol,
    window: WindowConfig,
    world: World,
    c: GRPOConfig,
    penalty: length_penalty.Penalty,
    out: Path,
    task: Callable[[str, int], object],
    families: Sequence[str],
    seed: int,
    alive: Callable[[], bool],
) -> None:
    """A sampling service: takes weights from out/weights, writes finished groups to out/groups, until `alive()` is false.

    Group i may start when the trainer has reached version i // groups − max_staleness (bounded staleness, R5).
    """
    groups = out / "groups"
    groups.mkdir(parents=True, exist_ok=True)
    weights = Subscriber(out / "weights", model.state_dict())
    sampler = Sampler(model, protocol, window, world, c.slots, c.temperature, seed)
    curriculum, open_groups = Curriculum(families, seed), defaultdict(list)
    indices: dict[str, int] = {}

    def poll() -> None:
        if not alive():
            raise SystemExit  # the trainer is gone: unfinished rollouts have no one to read them
        if (state := weights.poll()) is not None:
            sampler.engine.load(state, weights.version)

    def jobs() -> Iterator[tuple[object, int] | None]:
        index = next_index(out)
        while True:
            if index // c.groups > weights.version + c.max_staleness or weights.version < 0:
                yield None
                continue
            family = curriculum.pick(index, weights.version >= c.curriculum * c.steps)
            t = task(family, index)
            indices[t.id] = index
            for g in range(c.group_size):
                yield t, g
            index += 1

    for t, rollout in sampler.run(jobs(), poll):
        curriculum.note(rollout)
        open_groups[t.id].append(rollout)
        if len(open_groups[t.id]) == c.group_size:
            rollouts = open_groups.pop(t.id)
            shape_rewards(rollouts, reference_kl(reference, rollouts, c), c.kl_beta, penalty)
            index = indices.pop(t.id)
            version = min(min(s.versions) for r in rollouts for s in r.segments)
            write_file(groups / f"{version:06d}-{index:07d}.pt", group_state(rollouts, index))
    sampler.close()


def next_index(out: Path) -> int:
    """The first task index that no stored and no used group has: no task is ever drawn twice (R1)."""
    used = [int(p.stem.split("-")[1]) for p in (out / "groups").glob("*-*.pt")]
    ledger = out / "groups" / "used.json"
    used += json.loads(ledger.read_text()) if ledger.exists() else []
    return max(used, default=-1) + 1


def lr_at(c: GRPOConfig, step: int) -> float:
    """Learning rate of a step (from 0): linear warm-up, then linear decay to a tenth. A pure function, nothing to restore."""
    return c.lr * min((step + 1) / max(c.warmup, 1), 1.0) * (1.0 - 0.9 * step / c.steps)


class Trainer:
    """The training service: takes whole groups from out/groups, steps, publishes to out/weights.

    The optimizer works on fp32 master weights. The model computes with their bf16 roundings, which are what is
    published, so the ratio of trainer and sampler is 1 up to rounding when nothing is stale.
    """

    def __init__(
        self,
        model: moe.Transformer,
        optimizer_of: Callable[[list], torch.optim.Optimizer],
        c: GRPOConfig,
        out: Path,
    ):
        self.model, self.c, self.out = model, c, out
        self.master = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.optimizer = optimizer_of(self.master)
        self.used: list[int] = []  # task indices trained on, in order
        self.version, self.dropped = 0, 0
        self.publisher = Publisher(out / "weights", c.full_every)
        (out / "groups").mkdir(parents=True, exist_ok=True)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        """The model becomes what is published: weights and router biases rounded to bf16."""
        for module in self.model.modules():
            if isinstance(module, moe.Router):
                module.e_score_correction_bias.copy_(module.e_score_correction_bias.to(torch.bfloat16))
        for p, m in zip(self.model.parameters(), self.master):
            p.copy_(m.to(torch.bfloat16))

    def publish(self) -> dict[str, float]:
        return self.publisher.publish(self.model.state_dict(), self.version)

    def collect(self, patience: float, alive: Callable[[], None]) -> tuple[list[list[Rollout]], float]:
        """Wait for the next step's groups, oldest index first; stale and damaged ones are set aside and counted."""
        began, chosen, bad = time.perf_counter(), {}, set()
        while True:
            for path in sorted((self.out / "groups").glob("*-*.pt"), key=lambda p: p.stem.split("-")[1]):
                if path in chosen or path in bad or len(chosen) == self.c.groups:
                    continue
                version, index = map(int, path.stem.split("-"))
                if index in self.used:
                    continue
                if self.version - version > self.c.drop_staleness:
                    self.dropped += 1
                    path.unlink()
                    continue
                try:
                    chosen[path] = group_of(read_file(path))
                except (ValueError, OSError) as error:
                    print(f"groups: {error}", flush=True)
                    bad.add(path)
            if len(chosen) == self.c.groups:
                self.used += [int(p.stem.split("-")[1]) for p in chosen]
                return list(chosen.values()), time.perf_counter() - began
            if time.perf_counter() - began > patience:
                raise TimeoutError(
                    f"no {self.c.groups} groups in {self.out / 'groups'} within {patience:.0f} s: is a sampler running?"
                )
            alive()
            time.sleep(0.02)

    def state(self) -> dict:
        """Everything that resuming needs; the caller writes it and then calls `forget_used`."""
        return dict(
            master=[m.detach() for m in self.master],
            optimizer=self.optimizer.state_dict(),
            version=self.version,
            used=self.used,
            dropped=self.dropped,
        )

    def load(self, state: dict) -> None:
        with torch.no_grad():
            for m, value in zip(self.master, state["master"], strict=True):
                m.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.used, self.dropped = state["version"], list(state["used"]), state["dropped"]
        self._round()

    def forget_used(self) -> None:
        """Delete the files of groups whose use a complete checkpoint records, and keep their indices in the ledger (I2)."""
        folder = self.out / "groups"
        part = folder / "used.json.part"
        part.write_text(json.dumps(self.used))
        os.replace(part, folder / "used.json")
        for path in folder.glob("*-*.pt"):
            if int(path.stem.split("-")[1]) in self.used:
                path.unlink()

    def step(self, groups: list[list[Rollout]]) -> dict[str, float]:
        """One optimizer step on whole groups; dead groups count in the denominator and cost no compute."""
        shaped = torch.tensor([[r.shaped_reward for r in g] for g in groups], dtype=torch.float64)
        A = advantages(shaped)
        for g, row in zip(groups, A.tolist()):
            for r, a in zip(g, row):
                r.advantage = a
        live = [(s, r.advantage) for g in groups for r in g if r.advantage != 0 for s in r.segments]
        rows, denominator = pack(live, self.c.row), shaped.numel() * self.c.norm_const
        sums, entropy, gaps = defaultdict(float), 0.0, []
        for at in range(0, len(rows), self.c.micro_rows):
            batch = tensors(rows[at : at + self.c.micro_rows], self.c.row)
            logp, h, index = logprobs(self.model, batch, self.c.temperature, True, self.c.plausibility)
            sampled = batch["logp_sampled"][index]
            value, metrics = loss(
                logp, sampled, batch["advantage"][index], torch.ones_like(logp), denominator, self.c.ratio_cap
            )
            value.backward()
            sums["loss"] += float(value.detach())
            entropy += float(h.sum())
            fresh = batch["version"][index] == self.version  # the mismatch that is not staleness
            gaps.append((logp.detach() - sampled).abs()[fresh])
            for k, v in metrics.items():
                sums[k] += float(v)
        norm = self._update()
        return {
            **self._metrics(groups, A),
            **summary(sums),
            "loss": sums["loss"],
            "grad_norm": norm,
            "entropy": entropy / max(sums["tokens"], 1),
            **_mismatch(torch.cat(gaps) if gaps else torch.zeros(0)),
        }

    def _update(self) -> float:
        for p, m in zip(self.model.parameters(), self.master):
            m.grad, p.grad = (p.grad if p.grad is not None else torch.zeros_like(m)), None
        norm = float(torch.nn.utils.clip_grad_norm_(self.master, self.c.clip))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"RL step {self.version}: gradient norm {norm}; the weights are those of the step before"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.c, self.version)
        self.optimizer.step()
        self._round()
        self.version += 1
        return norm

    def _metrics(self, groups: list[list[Rollout]], A: Tensor) -> dict[str, float]:
        rollouts = [r for g in groups for r in g]
        lags = [
            self.version - v for r in rollouts for s in r.segments for v, m in zip(s.versions, s.mask) if m
        ]
        n, turns = len(rollouts), sum(r.counters["turns"] for r in rollouts)
        mean = lambda f: sum(f(r) for r in rollouts) / n
        return dict(
            reward=mean(lambda r: r.reward),
            shaped_reward=mean(lambda r: r.shaped_reward),
            dead_groups=int((A.abs().max(dim=1).values == 0).sum()),
            lag=sum(lags) / max(len(lags), 1),
            lag_max=max(lags, default=0),
            tokens=mean(lambda r: r.tokens),
            turns=turns / n,
            calls_per_turn=sum(r.counters["calls"] for r in rollouts) / max(turns, 1),
            broken_calls=mean(lambda r: r.extra["broken"]),
            summaries=mean(lambda r: r.extra["summaries"]),
            cut=mean(lambda r: r.finish != "answered"),
            kl=mean(lambda r: r.extra["kl"]),
            length_cost=mean(lambda r: r.extra["length_cost"]),
            dropped=self.dropped,
        )


def _mismatch(gaps: Tensor) -> dict[str, float]:
    """Median and 99th percentile of |log π − log μ| on tokens of the current version (M4)."""
    if not len(gaps):
        return {}
    return dict(mismatch_p50=float(gaps.quantile(0.5)), mismatch_p99=float(gaps.quantile(0.99)))


# ----------------------------------------------------------------------------------------------------------------- demo


def off_policy_bias(shift: float, weighting: str, seed: int = 0) -> float:
    """Relative error of the expected gradient when samples come from another policy, by exact enumeration.

    Two tokens from a vocabulary of three, the second conditioned on the first; μ's logits are π's moved by `shift` in a
    random direction; random rewards. weighting: none, token (truncated at 2) or sequence (product of the ratios).
    """
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(
        4, 3, generator=g, dtype=torch.float64
    ).requires_grad_()  # row 0: first token, 1 + a: second
    mu = (theta.detach() + shift * torch.randn(4, 3, generator=g, dtype=torch.float64)).log_softmax(-1)
    reward = torch.rand(3, 3, generator=g, dtype=torch.float64)
    pairs = [(a, b) for a in range(3) for b in range(3)]

    def logps(table: Tensor) -> Tensor:
        return torch.stack([torch.stack((table[0, a], table[1 + a, b])) for a, b in pairs])  # [9, 2]

    logp, sampled, r = logps(theta.log_softmax(-1)), logps(mu), reward.flatten()
    p, q = logp.detach().sum(1).exp(), sampled.sum(1).exp()
    (true,) = torch.autograd.grad(
        ((r - (p * r).sum())[:, None] * p[:, None] * logp).sum(), theta, retain_graph=True
    )
    A = (q * (r - (q * r).sum()))[:, None].expand(-1, 2)
    if weighting == "token":
        value = loss(logp, sampled, A, torch.ones_like(logp), -1.0)[0]
    else:
        w = (logp.detach() - sampled).sum(1, keepdim=True).exp() if weighting == "sequence" else 1.0
        value = (A * w * logp).sum() + (
            0.0 if weighting == "none" else ((q @ r - p @ r) * (q[:, None] * w * logp)).sum()
        )
    (grad,) = torch.autograd.grad(value, theta)
    return float((grad - true).norm() / true.norm())


def main() -> None:
    print("advantages of rewards 1, 0, 0, 1:", advantages(torch.tensor([[1.0, 0, 0, 1]])).tolist()[0])
    print("\nwhy no standard deviation (R3): all four rollouts solve the task, one is a little shorter")
    r = torch.tensor([[1.0, 1.0, 1.0, 1.001]], dtype=torch.float64)
    print(
        "    rewards 1, 1, 1, 1.001    advantage",
        [round(a, 5) for a in advantages(r)[0].tolist()],
        "   divided by σ",
        [round(a, 2) for a in (advantages(r) / r.std(dim=1, keepdim=True))[0].tolist()],
    )
    print(
        "    rewards 1, 0, 0, 0        divided by σ",
        [
            round(x, 2)
            for x in (lambda s: (advantages(s) / s.std(dim=1, keepdim=True))[0].tolist())(
                torch.tensor([[1.0, 0, 0, 0]])
            )
        ],
        " a thousandth weighs like a solved task",
    )
    print(
        "\nwhy no length term (R2): gradient per token of a wrong rollout, −A / (N · norm_const), for 1 and for 100 tokens"
    )
    for n in (1, 100):
        logp = torch.full((n,), -1.0, requires_grad=True)
        value, _ = loss(logp, logp.detach(), torch.full((n,), -0.5), torch.ones(n), 4 * 32.0)
        (grad,) = torch.autograd.grad(value, logp)
        print(
            f"    {n:3} tokens: {grad[0]:.6f} each; with a mean over the rollout's tokens it would be {0.5 / 4 / n:.6f}"
        )
    print(
        "\nsamples of another policy (R5): relative error of the expected gradient, by enumeration, mean of 20 problems"
    )
    print("    distance of the sampler      0.0     0.1     0.5     1.0")
    for weighting in ("none", "token", "sequence"):
        errors = [sum(off_policy_bias(e, weighting, s) for s in range(20)) / 20 for e in (0.0, 0.1, 0.5, 1.0)]
        print(f"    weight: {weighting:18}" + "".join(f"{x:8.3f}" for x in errors))
    print(
        "    (the product over a sequence is unbiased, but its variance grows exponentially with the length)"
    )
    print("\npacking by cost (S5): 131072, 2 x 65536 and 8 x 16384 tokens on two ranks")
    lengths = [131072, 65536, 65536] + [16384] * 8
    for name, ranks in (
        ("by tokens", [[0, 3, 4, 5, 6], [1, 2, 7, 8, 9, 10]]),
        ("by cost", balance(lengths, 2)),
    ):
        load = [sum(cost(lengths[i]) for i in r) for r in ranks]
        print(
            f"    {name:10} max / mean {max(load) / (sum(load) / 2):.3f}   tokens {[sum(lengths[i] for i in r) for r in ranks]}"
        )


if __name__ == "__main__":
    main()
