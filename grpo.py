"""Asynchronous reinforcement learning: groups of rollouts, one mean, no standard deviation.

For every task the policy makes a group of G rollouts in real workspaces. What a rollout earned above its group's
mean is the advantage of every token that the model wrote in it (report §4, claims R1–R5, R7, R9). Sampling and
training are separate processes that meet in two folders: groups of finished rollouts go one way, weights the
other (§6.2, claims I1, I2).

    shaped_c = reward_c − λ C(effort_c) − β Σ_t (log μ_t − log π_ref,t)        detached, one number per rollout
    A_c      = shaped_c − mean over the group                                  no division by the deviation
    w_t      = min(exp(sg log π_θ,t − log μ_t), cap)                           μ: the sampler's log-probs, recorded
    loss     = −(1 / (N · norm_const)) Σ_c A_c Σ_t w_t log π_θ,t               N rollouts; no division by a length

Legend: N rollouts of a step, G of a group, B rows, T tokens of a packed row, K experts per token, V vocabulary;
μ the sampling policy, π_θ the trained one, π_ref the policy before RL, sg stop-gradient.

Differences from the report, which fixes the ideas and leaves the formulas open:
1. The truncated weight w is PipelineRL's and CISPO's (arXiv 2509.19128, 2506.13585): the report only says that
   samples are kept nearly on-policy. There is one update per sample, so PPO's clip would have nothing to do.
2. The KL penalty enters as k1 in the reward: differentiated in the loss, k1 has zero expected gradient (kl.py).
3. A group may start when it will be at most `max_staleness` steps old at its turn; 0 makes sampling and
   training alternate.
4. Rollouts that end at a limit keep their reward (R4). Only a workspace that the machine lost three times stops
   the run.

    python grpo.py              the loss learns a problem with a known answer; packing, weight files
    python grpo.py --ablate     the same with one idea taken out at a time, and what breaks
"""
from __future__ import annotations

import fcntl
import io
import itertools
import json
import math
import os
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
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
    drop_staleness: int = 6  # groups whose oldest token is older are set aside and counted
    plausibility: float = 0.0  # router replay's filter (M4); 0: plain replay
    row: int = 224  # tokens of a packed row
    micro_rows: int = 24  # rows of one backward pass
    curriculum: float = 0.5  # after this share of the steps harder tasks are drawn more often (R9)
    pool: float = 2.0  # tasks to draw from, as a multiple of those that training needs
    full_every: int = 10  # every n-th weight file is a full snapshot
    mismatch_every: int = 5  # every n-th step measures the mismatch without replay and with the filter too

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"group_size = {self.group_size}: a group of one has no mean, take 2 or more")
        if self.drop_staleness < self.max_staleness:
            raise ValueError(f"drop_staleness = {self.drop_staleness} is below max_staleness = "
                             f"{self.max_staleness}: groups would be made only to be dropped")
        if self.ratio_cap < 1 or self.norm_const <= 0 or self.temperature <= 0 or self.pool < 1:
            raise ValueError("ratio_cap and pool must be at least 1, norm_const and temperature positive")


# ---------------------------------------------------------------------------------------- advantages and loss


def advantages(shaped: Tensor) -> Tensor:
    """A = shaped − group mean, for shaped rewards [N / G, G] of chains; constant groups give exact zeros."""
    if shaped.dim() != 2 or shaped.shape[1] < 2:
        raise ValueError(f"shaped rewards of shape {list(shaped.shape)}: need [groups, G] with G of 2 or more")
    centred = shaped - shaped.mean(dim=1, keepdim=True)
    spread = shaped.max(dim=1, keepdim=True).values - shaped.min(dim=1, keepdim=True).values
    return torch.where(spread < 1e-9, torch.zeros_like(centred), centred)


def loss(logp: Tensor, logp_sampled: Tensor, advantage: Tensor, mask: Tensor, denominator: float,
         cap: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """−Σ A · w · log π over the masked tokens / denominator; all tensors of one shape.

    The denominator is N · norm_const of the whole optimizer step, so micro-batches, packing and padding cannot
    change the gradient. Masked positions are set to 0 before the exponential: an infinity there would poison
    the gradient. Metrics are sums over tokens, to be added over micro-batches and read by `summary`.
    """
    if not logp.shape == logp_sampled.shape == advantage.shape == mask.shape:
        raise ValueError(f"shapes differ: logp {list(logp.shape)}, logp_sampled {list(logp_sampled.shape)}, "
                         f"advantage {list(advantage.shape)}, mask {list(mask.shape)}")
    mask = mask.bool()
    logp = torch.where(mask, logp, 0.0)
    log_ratio = torch.where(mask, logp.detach() - logp_sampled, 0.0)
    ratio = log_ratio.exp()
    weight = ratio.clamp(max=cap)
    value = -(torch.where(mask, advantage, 0.0) * weight * logp).sum() / denominator
    m = mask.to(ratio.dtype)
    metrics = dict(tokens=m.sum(), weight=(ratio * m).sum(), weight2=(ratio**2 * m).sum(),
                   truncated=((ratio > cap) & mask).sum(), k1=kl.k1(log_ratio).mul(m).sum(),
                   k3=kl.k3(log_ratio).mul(m).sum())
    return value, metrics


def summary(sums: dict[str, float]) -> dict[str, float]:
    """Per-token readings of summed metrics: effective sample size (Σw)²/(nΣw²), truncated share, k1 and k3 of
    μ to π."""
    n = max(sums["tokens"], 1.0)
    return dict(ess=sums["weight"] ** 2 / max(n * sums["weight2"], 1e-30), truncated=sums["truncated"] / n,
                k1_sampler=sums["k1"] / n, k3_sampler=sums["k3"] / n)


def chain_ess(log_weights: Tensor) -> float:
    """Effective sample size of whole chains, from their Σ log-ratios [n]: (Σw)²/(nΣw²).

    Products over a chain drift where single tokens look fine: a token ESS of .999 can hide a chain ESS of .5.
    """
    if not len(log_weights):
        return 1.0
    log_sum, log_squares = log_weights.logsumexp(0), (2 * log_weights).logsumexp(0)
    return float((2 * log_sum - log_squares).exp()) / len(log_weights)


# ---------------------------------------------------------------------------------------------------- sampling


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

    Decoding never waits for a workspace: tool calls and grading run in a thread pool while other slots decode.
    `poll` is called between two engine steps; new weights enter there, in the middle of rollouts (R5).
    """

    def __init__(self, model: moe.Transformer, protocol: Protocol, window: WindowConfig, world: World,
                 slots: int, temperature: float = 1.0, seed: int = 0,
                 summariser: Callable[[str], str] | None = None, threads: int = 4):
        self.engine = mtp.Engine(model, slots, window.window + 8, protocol.end, temperature)
        self.protocol, self.window, self.world = protocol, window, world
        self.seed, self.summariser = seed, summariser
        self.pool = ThreadPoolExecutor(threads)
        self.slots: list[_Slot | None] = [None] * slots

    def run(self, jobs: Iterator[tuple[object, int]],
            poll: Callable[[], None] = lambda: None) -> Iterator[tuple[object, Rollout]]:
        """Finished (task, rollout) pairs, in the order in which they end, for jobs of (task, index in group).

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
        calls = chain.turn(ids[slot.start:])
        slot.counts["calls"] += len(calls)
        slot.counts["parallel"] += len(calls) > 1
        if chain.reopen:
            self._next_window(i)
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
            if slot.chain.finish:
                slot.pending = self.pool.submit(self._work, slot, (), True)
            elif slot.chain.reopen:  # a baseline of summarize.py: its history goes into a fresh window
                self._next_window(i)
            else:
                slot.start = used + len(ids)
                self.engine.force(i, ids, slot.start + slot.chain.room(slot.start))
            return None
        self._close_window(i)
        slot.workspace.close()
        self.slots[i] = None
        c = slot.chain
        return Rollout(slot.task.id, slot.task.family, slot.segments, c.answer, c.finish, dict(c.counters),
                       reward, extra=dict(slot.counts, summaries=c.n_summaries, finished=self.engine.version))

    def _again(self, i: int) -> None:
        """The machine lost a workspace: not the model's failure, so the rollout starts anew, twice at most."""
        slot = self.slots[i]
        slot.workspace.close()
        if slot.tries == 2:
            raise sandbox.SandboxDied(f"{slot.task.id}: three workspaces in a row died; is the machine out of "
                                      "memory?")
        self._begin(i, slot.task, slot.index)
        self.slots[i].tries = slot.tries + 1

    def _next_window(self, i: int) -> None:
        self._close_window(i)
        slot = self.slots[i]
        ids = slot.chain.open()
        slot.start = len(ids)
        self.engine.force(i, ids, slot.start + slot.chain.room(slot.start), reset=True)

    def _close_window(self, i: int) -> None:
        ids, mask, logprobs, versions, routes = self.engine.window(i)
        self.slots[i].segments.append(Segment(ids, mask, logprobs, versions, routes))

    def close(self) -> None:
        self.pool.shutdown()
        for slot in self.slots:
            if slot and slot.workspace:
                slot.workspace.close()


# ----------------------------------------------------------------------------------------- packing and replay


class Item(NamedTuple):
    """A segment on its way into a row, with the advantage of its rollout and the rollout's number."""

    segment: Segment
    advantage: float = 0.0
    owner: int = 0


def pack(items: Sequence[Item], length: int) -> list[list[Item]]:
    """Segments into as few rows of `length` tokens as first-fit, longest first, finds (S5)."""
    rows: list[list[Item]] = []
    space: list[int] = []
    for item in sorted(items, key=lambda item: -len(item.segment.ids)):
        n = len(item.segment.ids)
        if n > length:
            raise ValueError(f"a segment of {n} tokens does not fit a row of {length}: raise grpo.row")
        i = next((i for i, free in enumerate(space) if free >= n), len(rows))
        if i == len(rows):
            rows.append([])
            space.append(length)
        rows[i].append(item)
        space[i] -= n
    return rows


def cost(length: int, s0: float = 51_200.0) -> float:
    """Relative compute of a sequence, s + s²/s₀: attention overtakes the linear part at s₀ tokens (K2.5)."""
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


def tensors(rows: Sequence[Sequence[Item]], length: int) -> dict[str, Tensor]:
    """Rows as tensors [B, T]: ids, mask, doc (−1: padding), positions, logp_sampled, advantage, owner, version,
    and routes [B, T, L_moe, K] (−1: not recorded) where the segments have them."""
    B, routes = len(rows), rows[0][0].segment.routes
    out = dict(ids=torch.zeros(B, length, dtype=torch.long), mask=torch.zeros(B, length, dtype=torch.bool),
               doc=torch.full((B, length), -1), positions=torch.zeros(B, length, dtype=torch.long),
               logp_sampled=torch.zeros(B, length), advantage=torch.zeros(B, length),
               owner=torch.zeros(B, length, dtype=torch.long), version=torch.zeros(B, length, dtype=torch.long))
    if routes is not None:
        out["routes"] = torch.full((B, length, *routes.shape[1:]), -1, dtype=torch.int16)
    for b, row in enumerate(rows):
        at = 0
        for n, (s, advantage, owner) in enumerate(row):
            end = at + len(s.ids)
            values = dict(ids=s.ids, mask=s.mask, logp_sampled=s.logprobs, version=s.versions, doc=n,
                          positions=torch.arange(end - at), advantage=advantage, owner=owner)
            if routes is not None:
                values["routes"] = s.routes
            for key, value in values.items():
                out[key][b, at:end] = torch.as_tensor(value, dtype=out[key].dtype)
            at = end
    return out


def logprobs(model: moe.Transformer, batch: dict[str, Tensor], temperature: float = 1.0, replay: bool = True,
             plausibility: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """log π of every sampled token under its own context: (logp [n], entropy [n], their places [B, T] bool).

    The token at t is predicted from t − 1. Routes are those recorded when the sampler computed each token (M3).
    """
    ctx = model.context(batch["positions"], doc=batch["doc"], replay=batch.get("routes") if replay else None,
                        plausibility=plausibility, real=batch["doc"] >= 0)
    hidden = model(batch["ids"], ctx)[:, :-1]  # [B, T − 1, D]
    keep = batch["mask"][:, 1:]
    logp = (model.lm_head(hidden[keep]).float() / temperature).log_softmax(-1)  # [n, V]
    entropy = -(logp.detach().exp() * logp.detach()).sum(-1)
    index = torch.cat((torch.zeros_like(keep[:, :1]), keep), dim=1)
    return logp.gather(1, batch["ids"][index].unsqueeze(1)).squeeze(1), entropy, index


def reference_kl(model: moe.Transformer, rollouts: Sequence[Rollout], c: GRPOConfig) -> list[float]:
    """Σ_t (log μ_t − log π_ref,t) of each rollout: k1 summed over the whole chain, detached (R6)."""
    sums = torch.zeros(len(rollouts), dtype=torch.float64)
    rows = pack([Item(s, owner=i) for i, r in enumerate(rollouts) for s in r.segments], c.row)
    with torch.no_grad():
        for at in range(0, len(rows), c.micro_rows):
            batch = tensors(rows[at:at + c.micro_rows], c.row)
            logp, _, index = logprobs(model, batch, c.temperature, replay=False)
            k1 = kl.k1(logp - batch["logp_sampled"][index])
            sums.index_add_(0, batch["owner"][index], k1.double())
    return sums.tolist()


def shape_rewards(rollouts: Sequence[Rollout], nats: Sequence[float], beta: float,
                  penalty: length_penalty.Penalty) -> None:
    """shaped_reward = reward − λ C(effort) − β Σ k1; the reward itself stays what the checks gave."""
    for r, k in zip(rollouts, nats):
        r.extra["kl"], r.extra["length_cost"] = k, length_penalty.cost(r.counters, penalty)
        r.shaped_reward = r.reward - r.extra["length_cost"] - beta * k


# --------------------------------------------------------------------------------------------- the two folders


MAGIC = b"C2RL1\n"


def write_file(path: Path, value: dict) -> int:
    """Write tensors and plain values so that the file appears whole or not at all: checksum inside, rename
    last. Returns its size; whatever goes wrong, nothing half-written stays behind."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = buffer.getvalue()
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as f:
            f.write(MAGIC + zlib.crc32(data).to_bytes(4, "little") + data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return len(data)


def read_file(path: Path) -> dict:
    """Read such a file; no code in it can run. Raises ValueError naming the file when it is damaged."""
    raw, head = path.read_bytes(), len(MAGIC) + 4
    if not raw.startswith(MAGIC) or zlib.crc32(raw[head:]).to_bytes(4, "little") != raw[len(MAGIC):head]:
        raise ValueError(f"{path} is damaged (checksum): it is not used; delete it or restore it")
    return torch.load(io.BytesIO(raw[head:]), weights_only=True)


_LISTS = ("ids", "mask", "logprobs", "versions")  # of a segment; stored as tensors


def group_state(rollouts: Sequence[Rollout], index: int) -> dict:
    """A group as tensors and plain values; index: of its task."""
    plain = [{k: v for k, v in vars(r).items() if k != "segments"} for r in rollouts]
    for p, r in zip(plain, rollouts):
        p["segments"] = [{**{k: torch.tensor(getattr(s, k)) for k in _LISTS}, "routes": s.routes}
                         for s in r.segments]
    return dict(index=index, rollouts=plain)


def group_of(state: dict) -> list[Rollout]:
    """The rollouts of a stored group."""
    return [Rollout(**{**r, "segments": [Segment(*(s[k].tolist() for k in _LISTS), s["routes"])
                                         for s in r["segments"]]}) for r in state["rollouts"]]


def group_path(folder: Path, version: int, index: int) -> Path:
    """Where a group lies: version is that of its oldest token, index that of its task."""
    return folder / f"{version:06d}-{index:07d}.pt"


def _index(path: Path) -> int:
    return int(path.stem.split("-")[1])


def encode(new: np.ndarray, old: np.ndarray | None) -> bytes:
    """Bit patterns [n] int16 of bf16 weights, compressed: all of them, or those that differ from `old`.

    A difference is a gap to the previous changed place (in base 255: each byte 255 says "and go on") and the
    step between the two patterns, which for a small update is one or two units in the last place. Exact, where
    the sum of an old weight and a rounded difference is not always the new weight.
    """
    if old is None:
        return zlib.compress(new.view(np.uint8).reshape(-1, 2).T.tobytes(), 6)
    at = np.flatnonzero(new != old)
    gaps = np.diff(at, prepend=-1) - 1
    ends = np.cumsum(gaps // 255 + 1) - 1
    run = np.full(ends[-1] + 1 if len(at) else 0, 255, np.uint8)
    run[ends] = gaps % 255
    step = new[at] - old[at]  # wraps, as it should
    zigzag = ((step << 1) ^ (step >> 15)).view(np.uint8).reshape(-1, 2).T  # low bytes, then high bytes
    return len(run).to_bytes(8, "little") + zlib.compress(run.tobytes() + zigzag.tobytes(), 6)


def decode(data: bytes, old: np.ndarray | None, n: int) -> np.ndarray:
    """The inverse of `encode`: n bit patterns."""
    if old is None:
        planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(2, n)
        return np.ascontiguousarray(planes.T).view(np.int16).reshape(n)
    raw = np.frombuffer(zlib.decompress(data[8:]), np.uint8)
    run, planes = np.split(raw, [int.from_bytes(data[:8], "little")])
    ends = np.flatnonzero(run != 255)
    at = np.cumsum(run, dtype=np.int64)[ends] + np.arange(len(ends))
    zigzag = np.ascontiguousarray(planes.reshape(2, -1).T).view(np.uint16).reshape(-1)
    new = old.copy()
    new[at] += ((zigzag >> 1).astype(np.int16) ^ -(zigzag & 1).astype(np.int16))
    return new


class Publisher:
    """The trainer's end of weights/: a chain of bit-level differences, with a full snapshot every few versions
    (I1). Each rank has one and uploads its part, in the background.

    A file names its version, its base and a checksum of both, so a difference is never applied to anything
    else; a reader that missed one waits for a snapshot.
    """

    def __init__(self, folder: Path, full_every: int, rank: int = 0, n_ranks: int = 1):
        self.folder, self.full_every, self.rank, self.n_ranks = folder, full_every, rank, n_ranks
        self.last: np.ndarray | None = None
        self.version, self.crc = -1, 0
        self.pool, self.upload = ThreadPoolExecutor(1), None
        folder.mkdir(parents=True, exist_ok=True)
        for path in _weight_files(folder):  # of an attempt that may have got further than this one begins
            if path.stem.endswith(f"-{rank}of{n_ranks}"):
                path.unlink()

    def publish(self, state: dict[str, Tensor], version: int,
                offsets: dict[str, int] | None = None) -> dict[str, float]:
        """Take a copy of the bf16 roundings and upload them while training goes on.

        offsets: where a tensor begins in the whole one, in elements, if it is this rank's part of it. Parts of
        one tensor that do not lie together are called name#0, name#1, … Returns
        the metrics of the upload before: bytes, ratio to bf16, share of weights changed; and weight_wait_s, the
        seconds that this call took.
        """
        began, previous = time.perf_counter(), self.flush()
        bits = [v.detach().to(torch.bfloat16).flatten().view(torch.int16).cpu() for v in state.values()]
        layout = [(k.split("#")[0], (offsets or {}).get(k, 0), len(b)) for k, b in zip(state, bits)]
        self.upload = self.pool.submit(self._upload, torch.cat(bits).numpy(), layout, version)
        return {**previous, "weight_wait_s": time.perf_counter() - began}

    def flush(self) -> dict[str, float]:
        """Wait for the upload under way and return its metrics; what went wrong in it is raised here."""
        upload, self.upload = self.upload, None
        return upload.result() if upload else {}

    def _upload(self, now: np.ndarray, layout: list, version: int) -> dict[str, float]:
        full = self.last is None or version % self.full_every == 0 or version != self.version + 1
        base = None if full else self.last
        data, crc = encode(now, base), zlib.crc32(now.tobytes())
        name = f"{version:06d}-{self.rank}of{self.n_ranks}.{'full' if full else 'delta'}"
        size = write_file(self.folder / name, dict(
            version=version, base=-1 if full else self.version, base_crc=self.crc, crc=crc, layout=layout,
            data=torch.frombuffer(bytearray(data), dtype=torch.uint8)))
        changed = 1.0 if full else float(np.mean(now != base))
        self.last, self.version, self.crc = now, version, crc
        if full:  # keep the previous snapshot and its differences for readers under way
            for path in _weight_files(self.folder):
                if int(path.stem.split("-")[0]) < version - self.full_every:
                    path.unlink(missing_ok=True)
        return dict(weight_bytes=size, weight_ratio=2 * len(now) / size, weight_changed=changed)


def _weight_files(folder: Path) -> list[Path]:
    return [p for p in folder.glob("*of*") if p.suffix in (".full", ".delta")]


class Subscriber:
    """A sampler's end: rebuilds the newest version that it can reach from snapshots and differences, bit for bit.

    A damaged file is named and not used. After a gap, damage, or a trainer that went back to an older
    checkpoint, it waits for the next snapshot and goes on from there.
    """

    def __init__(self, folder: Path, like: dict[str, Tensor]):
        self.folder, self.shapes = folder, {k: v.shape for k, v in like.items()}
        self.version, self.parts, self.bad = -1, {}, set()  # parts: rank -> (layout, bits, checksum)

    def poll(self) -> dict[str, Tensor] | None:
        """The newest weights as fp32 tensors when there are others than at the last call, else None."""
        found: dict[tuple[int, str], list[Path]] = defaultdict(list)
        for path in _weight_files(self.folder):
            if path.name not in self.bad:
                found[int(path.stem.split("-")[0]), path.suffix].append(path)
        whole = {k: sorted(v) for k, v in found.items() if len(v) == int(v[0].stem.split("of")[1])}
        start, full = self.version, max((v for v, kind in whole if kind == ".full"), default=-1)
        if max((v for v, _ in whole), default=self.version) < self.version:
            self.version = -1  # the trainer went back
        if full > self.version and (self.version + 1, ".delta") not in whole:
            self._apply(whole[full, ".full"])
        while paths := whole.get((self.version + 1, ".delta")) or whole.get((self.version + 1, ".full")):
            if not self._apply(paths):
                break
        return self._state() if self.version not in (start, -1) else None

    def _apply(self, paths: list[Path]) -> bool:
        """Read the parts of all ranks, and take them together or not at all."""
        parts = {}
        for rank, path in enumerate(paths):
            try:
                file = read_file(path)
            except FileNotFoundError:  # cleared away since it was listed
                return False
            except (ValueError, OSError) as error:
                print(f"weights: {error}", flush=True)
                self.bad.add(path.name)
                return False
            old = None
            if file["base"] >= 0:
                _, old, crc = self.parts.get(rank, (None, None, None))
                if old is None or file["base"] != self.version or file["base_crc"] != crc:
                    self.version = -1  # a difference to something else: go on from a snapshot
                    return False
            n = sum(length for *_, length in file["layout"])
            bits = decode(file["data"].numpy().tobytes(), old, n)
            if zlib.crc32(bits.tobytes()) != file["crc"]:
                raise AssertionError(f"{path}: the rebuilt weights are not those that were published")
            parts[rank] = (file["layout"], bits, file["crc"])
        self.parts, self.version = parts, file["version"]
        return True

    def _state(self) -> dict[str, Tensor]:
        flat = {k: torch.zeros(math.prod(s), dtype=torch.int16) for k, s in self.shapes.items()}
        for layout, bits, _ in self.parts.values():
            at = 0
            for name, offset, n in layout:
                flat[name][offset:offset + n] = torch.from_numpy(bits[at:at + n])
                at += n
        return {k: flat[k].view(torch.bfloat16).float().view(s) for k, s in self.shapes.items()}


# ----------------------------------------------------------------------------------------------- the two loops


class Curriculum:
    """Which task comes next (R1, R9): from a pool, each at most once; late in training rather the hard ones.

    Families take turns in the pool: task i is of family i modulo their number. The effort of a family is the
    mean of turns plus thinking tokens / 100 over its rollouts so far, the report's two heuristics. Late draws are
    weighted by effort, without replacement: of the tasks that are left, the one with the largest
    log(effort) + Gumbel noise. The noise is a function of (seed, task).
    """

    def __init__(self, families: Sequence[str], size: int, seed: int):
        self.families, self.size = list(families), size
        u = [(zlib.crc32(f"{seed}/draw/{i}".encode()) + 0.5) / 2**32 for i in range(size)]
        self.noise = [-math.log(-math.log(x)) for x in u]
        self.sums: dict[str, list[float]] = {f: [0.0, 0.0] for f in self.families}

    def note(self, rollout: Rollout) -> None:
        s = self.sums[rollout.family]
        s[0] += rollout.counters["turns"] + rollout.counters["thinking"] / 100
        s[1] += 1

    def family(self, index: int) -> str:
        return self.families[index % len(self.families)]

    def order(self, taken: set[int], late: bool) -> Iterator[int]:
        """Tasks of the pool that are not taken, the next one first."""
        left = (i for i in range(self.size) if i not in taken)
        if not late or not all(n for _, n in self.sums.values()):
            return left
        log_w = {f: math.log(max(total / n, 1e-6)) for f, (total, n) in self.sums.items()}
        return iter(sorted(left, key=lambda i: -log_w[self.family(i)] - self.noise[i]))


class Claims:
    """Tasks that samplers have taken: a file each with the sampler's name. No task is drawn twice (R1), whoever
    else is sampling. The files outlive the groups; only a claim whose sampler died with it is void."""

    def __init__(self, groups: Path, name: str, patience: float = 600.0):
        self.groups, self.folder, self.name, self.patience = groups, groups / "claims", name, patience
        self.folder.mkdir(parents=True, exist_ok=True)
        self.release(mine=True)

    def taken(self) -> set[int]:
        return {int(p.name) for p in self.folder.iterdir()} | set(used_tasks(self.groups))

    def take(self, limit: int, order: Callable[[set[int]], Iterator[int]]) -> int | None:
        """Claim the first task of order(taken), unless `limit` are taken. Samplers do so one at a time."""
        with open(self.groups / "claims.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            taken = self.taken()
            index = next(order(taken), None) if len(taken) < limit else None
            if index is not None:
                (self.folder / f"{index:07d}").write_text(self.name)
            return index

    def release(self, mine: bool = False) -> None:
        """Give back claims without a group: those of this name (at its start), and those that are too old."""
        # The order matters: a group may be used, recorded and deleted between two looks.
        kept = {_index(p) for p in self.groups.glob("**/*-*.pt")}
        kept |= set(used_tasks(self.groups))
        for path in self.folder.iterdir():
            old = time.time() - path.stat().st_mtime > self.patience
            if int(path.name) not in kept and (old or mine and path.read_text() == self.name):
                path.unlink()


def used_tasks(groups: Path) -> list[int]:
    """Tasks that a checkpoint records as trained on."""
    ledger = groups / "used.json"
    return json.loads(ledger.read_text()) if ledger.exists() else []


def sampler_loop(model: moe.Transformer, reference: moe.Transformer, protocol: Protocol, window: WindowConfig,
                 world: World, c: GRPOConfig, penalty: length_penalty.Penalty, out: Path,
                 task: Callable[[str, int], object], families: Sequence[str], seed: int,
                 alive: Callable[[], bool], name: str = "0") -> None:
    """A sampling service: weights from out/weights, finished groups to out/groups, until `alive()` is false.

    Bounded staleness (R5): at version v at most (v + 1 + max_staleness) · groups have been started, and as many
    more as were set aside. Any number of samplers may share the folders, each under a name of its own.
    """
    groups = out / "groups"
    claims = Claims(groups, name)
    weights = Subscriber(out / "weights", model.state_dict())
    sampler = Sampler(model, protocol, window, world, c.slots, c.temperature, seed)
    curriculum = Curriculum(families, math.ceil(c.pool * c.steps * c.groups), seed)
    unfinished: dict[str, tuple[int, list[Rollout]]] = {}

    def poll() -> None:
        if not alive():
            raise SystemExit  # the trainer is gone: unfinished rollouts have no one to read them
        if (state := weights.poll()) is not None:
            sampler.engine.load(state, weights.version)

    def next_task() -> int | None:
        limit = (weights.version + 1 + c.max_staleness) * c.groups + len(list((groups / "aside").glob("*.pt")))
        late = weights.version >= c.curriculum * c.steps
        return claims.take(limit if weights.version >= 0 else 0, lambda taken: curriculum.order(taken, late))

    def jobs() -> Iterator[tuple[object, int] | None]:
        refused = -1, 0.0  # version and time: between two decode steps little can change, and folders are slow
        while True:
            if refused[0] == weights.version and time.monotonic() < refused[1] + 0.2:
                yield None
                continue
            if (index := next_task()) is None:
                claims.release()
                refused = weights.version, time.monotonic()
                yield None
                continue
            t = task(curriculum.family(index), index)
            unfinished[t.id] = index, []
            yield from ((t, g) for g in range(c.group_size))

    for t, rollout in sampler.run(jobs(), poll):
        curriculum.note(rollout)
        index, rollouts = unfinished[t.id]
        rollouts.append(rollout)
        if len(rollouts) == c.group_size:
            del unfinished[t.id]
            shape_rewards(rollouts, reference_kl(reference, rollouts, c), c.kl_beta, penalty)
            version = min(min(s.versions) for r in rollouts for s in r.segments)
            write_file(group_path(groups, version, index), group_state(rollouts, index))
    sampler.close()


def lr_at(c: GRPOConfig, step: int) -> float:
    """Learning rate of a step (from 0): linear warm-up, then linear decay to a tenth. A pure function."""
    return c.lr * min((step + 1) / max(c.warmup, 1), 1.0) * (1.0 - 0.9 * step / c.steps)


class Trainer:
    """The training service: takes whole groups from out/groups, steps, publishes to out/weights.

    The optimizer works on fp32 master weights. The model computes with their bf16 roundings, which are what is
    published, so the ratio of trainer and sampler is 1 up to rounding when nothing is stale.
    """

    FILTER = 0.5  # plausibility of the filter that is measured beside plain replay; ours

    def __init__(self, model: moe.Transformer, optimizer_of: Callable[[list], torch.optim.Optimizer],
                 c: GRPOConfig, out: Path, rank: int = 0, n_ranks: int = 1):
        self.model, self.c, self.groups = model, c, out / "groups"
        self.master = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.optimizer = optimizer_of(self.master)
        self.used: list[int] = []  # tasks trained on, in order
        self.version, self.dropped = 0, 0
        self.publisher = Publisher(out / "weights", c.full_every, rank, n_ranks)
        (self.groups / "aside").mkdir(parents=True, exist_ok=True)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        """The model becomes what is published: weights and router biases rounded to bf16."""
        for module in self.model.modules():
            if isinstance(module, moe.Router):
                bias = module.e_score_correction_bias
                bias.copy_(bias.to(torch.bfloat16))
        for p, m in zip(self.model.parameters(), self.master):
            p.copy_(m.to(torch.bfloat16))

    def publish(self) -> dict[str, float]:
        return self.publisher.publish(self.model.state_dict(), self.version)

    def collect(self, patience: float, alive: Callable[[], None]) -> tuple[list[list[Rollout]], float]:
        """Wait for the next step's groups, oldest first; stale and damaged ones are set aside and counted."""
        began, chosen = time.perf_counter(), {}
        while len(chosen) < self.c.groups:
            for path in sorted(self.groups.glob("*-*.pt")):
                if path in chosen or _index(path) in self.used or len(chosen) == self.c.groups:
                    continue
                if (group := self._read(path)) is not None:
                    chosen[path] = group
            if len(chosen) < self.c.groups:
                if time.perf_counter() - began > patience:
                    raise TimeoutError(f"no {self.c.groups} groups in {self.groups} within {patience:.0f} s: is "
                                       "a sampler running?")
                alive()
                time.sleep(0.02)
        self.used += [_index(p) for p in chosen]
        return list(chosen.values()), time.perf_counter() - began

    def _read(self, path: Path) -> list[Rollout] | None:
        if self.version - int(path.stem.split("-")[0]) <= self.c.drop_staleness:
            try:
                return group_of(read_file(path))
            except (ValueError, OSError) as error:
                print(f"groups: {error}", flush=True)
        self.dropped += 1
        os.replace(path, self.groups / "aside" / path.name)
        return None

    def state(self) -> dict:
        """Everything that resuming needs; the caller writes it and then calls `forget_used`."""
        return dict(master=[m.detach() for m in self.master], optimizer=self.optimizer.state_dict(),
                    **self.progress())

    def progress(self) -> dict:
        """What of `state` is not weights or moments: plain values, for whoever stores those in place."""
        return dict(version=self.version, used=self.used, dropped=self.dropped)

    def load(self, state: dict) -> None:
        with torch.no_grad():
            for m, value in zip(self.master, state["master"], strict=True):
                m.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.go_on(**{k: state[k] for k in self.progress()})

    def go_on(self, version: int, used: list[int], dropped: int) -> None:
        """Take up stored `progress`; masters and moments have been restored."""
        self.version, self.used, self.dropped = version, list(used), dropped
        self._round()

    def forget_used(self, used: list[int] | None = None) -> None:
        """Delete groups whose use a complete checkpoint records (`used`, default all so far: it may be older than
        the last step), and keep their tasks in the ledger (I2)."""
        used = self.used if used is None else used
        part = self.groups / "used.json.part"
        part.write_text(json.dumps(used))
        os.replace(part, self.groups / "used.json")
        for path in self.groups.glob("*-*.pt"):
            if _index(path) in used:
                path.unlink()

    def step(self, groups: list[list[Rollout]]) -> dict[str, float]:
        """One optimizer step on whole groups; dead groups count in the denominator and cost no compute."""
        rollouts = [r for g in groups for r in g]
        A = self.advantages(torch.tensor([[r.shaped_reward for r in g] for g in groups], dtype=torch.float64))
        for r, a in zip(rollouts, A.flatten().tolist()):
            r.advantage = a
        read = self._metrics(groups)
        sums, chains, gaps = defaultdict(float), torch.zeros(len(rollouts)), defaultdict(list)
        rows = pack([Item(s, r.advantage, i) for i, r in enumerate(rollouts) if r.advantage != 0
                     for s in r.segments], self.c.row)
        for at in range(0, len(rows), self.c.micro_rows):
            batch = self.share(tensors(rows[at:at + self.c.micro_rows], self.c.row))
            logp, entropy, index = self.logprobs(batch)
            value, metrics = self.loss(logp, batch, index, len(rollouts) * self.c.norm_const)
            value.backward()
            log_ratio = logp.detach() - batch["logp_sampled"][index]
            chains.index_add_(0, batch["owner"][index], log_ratio)
            self._mismatch(gaps, batch, index, log_ratio, at == 0)
            for k, v in dict(metrics, loss=value, entropy=entropy.sum()).items():
                sums[k] += float(v.detach())
        sums, chains, gaps = self.merge(sums, chains, gaps)
        read |= summary(sums)
        read["chain_ess"] = chain_ess(chains[A.flatten() != 0])
        read["loss"], read["entropy"] = sums["loss"], sums["entropy"] / max(sums["tokens"], 1)
        for name, x in gaps.items():
            x = torch.cat(x)
            read |= {f"{name}_p50": float(x.quantile(0.5)), f"{name}_p99": float(x.quantile(0.99))}
        read["grad_norm"] = self._update()
        return read

    # What a trainer on several ranks does otherwise: its part of a batch, sums over the ranks, the norm.

    def share(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def merge(self, sums: dict, chains: Tensor, gaps: dict) -> tuple[dict, Tensor, dict]:
        return sums, chains, gaps

    def any(self, flags: Tensor) -> bool:
        return bool(flags.any())

    def clip(self) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.master, self.c.clip))

    # The three pieces of the step that the ablations exchange.

    def advantages(self, shaped: Tensor) -> Tensor:
        return advantages(shaped)

    def logprobs(self, batch: dict[str, Tensor], replay: bool = True,
                 plausibility: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        filtered = self.c.plausibility if plausibility is None else plausibility
        return logprobs(self.model, batch, self.c.temperature, replay, filtered)

    def loss(self, logp: Tensor, batch: dict[str, Tensor], index: Tensor,
             denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(logp, batch["logp_sampled"][index], batch["advantage"][index], torch.ones_like(logp),
                    denominator, self.c.ratio_cap)

    @torch.no_grad()
    def _mismatch(self, gaps: dict[str, list[Tensor]], batch: dict[str, Tensor], index: Tensor,
                  log_ratio: Tensor, first: bool) -> None:
        """Collect |Δ log-prob| of tokens that are not stale: as trained, and now and then without replay and with
        the plausibility filter (M4)."""
        fresh = batch["version"][index] == self.version
        if not self.any(fresh):
            return
        gaps["mismatch"].append(log_ratio.abs()[fresh])
        if first and self.version % self.c.mismatch_every == 0:
            sampled = batch["logp_sampled"][index]
            for name, replay in (("mismatch_none", False), ("mismatch_filter", True)):
                logp, *_ = self.logprobs(batch, replay, self.FILTER)
                gaps[name].append((logp - sampled).abs()[fresh])

    def _update(self) -> float:
        for p, m in zip(self.model.parameters(), self.master):
            m.grad, p.grad = (p.grad if p.grad is not None else torch.zeros_like(m)), None
        norm = self.clip()
        if not math.isfinite(norm):
            raise FloatingPointError(f"RL step {self.version}: gradient norm {norm}; the weights are those of "
                                     "the step before")
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.c, self.version)
        self.optimizer.step()
        self._round()
        self.version += 1
        return norm

    def _metrics(self, groups: list[list[Rollout]]) -> dict[str, float]:
        """Means over rollouts; lags in steps, over sampled tokens: in flight until the rollout was finished, in
        the queue from then until now."""
        rollouts = [r for g in groups for r in g]
        lags = [(self.version - v, r.extra.get("finished", v) - v)
                for r in rollouts for s in r.segments for v, m in zip(s.versions, s.mask) if m] or [(0, 0)]
        n, turns = len(rollouts), sum(r.counters["turns"] for r in rollouts)
        lag, flight = (sum(x) / len(lags) for x in zip(*lags))
        mean = lambda f: sum(f(r) for r in rollouts) / n
        return dict(
            reward=mean(lambda r: r.reward), shaped_reward=mean(lambda r: r.shaped_reward),
            dead_groups=sum(all(r.advantage == 0 for r in g) for g in groups),
            lag=lag, lag_flight=flight, lag_queue=lag - flight, lag_max=max(x for x, _ in lags),
            tokens=mean(lambda r: r.tokens), turns=turns / n,
            calls_per_turn=sum(r.counters["calls"] for r in rollouts) / max(turns, 1),
            broken_calls=mean(lambda r: r.extra.get("broken", 0)),
            summaries=mean(lambda r: r.extra.get("summaries", 0)),
            cut=mean(lambda r: r.finish != "answered"), kl=mean(lambda r: r.extra["kl"]),
            length_cost=mean(lambda r: r.extra["length_cost"]), dropped=self.dropped)


# ------------------------------------------------------------------------------------------------- the lessons


THINK, END = 4, 5
MINI = moe.Config(vocab_size=6, dim=32, n_layers=2, n_heads=2, q_lora_rank=16, kv_lora_rank=16,
                  qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, ffn_dim=64, expert_dim=16, n_experts=4,
                  n_experts_per_tok=2, route_scale=1.0, rope_factor=1.0, rope_original_len=64, init_std=0.0)
MINI_RL = GRPOConfig(steps=80, groups=16, group_size=8, lr=2e-3, warmup=5, norm_const=4.0, kl_beta=0.01,
                     slots=256, row=16, micro_rows=128, drop_staleness=20, mismatch_every=1)
LIMIT = 8  # tokens of a window: room for five thoughts
EFFORT = length_penalty.Penalty(lam=0.02, k=0.1, q=0.5, thinking=1.0, call=0.0, output=0.0, final=0.0,
                                calls=0.0, turns=0.0)


class Question(NamedTuple):
    """A problem with a known answer: question x in 0 … 3 is answered by the digit 3 − x, then END.

    Before it the model may write thoughts, which say nothing and cost a little each. Questions from 2 on are
    hard: the right digit is accepted with probability (2 + thoughts) / 4. So the best policy writes no thought
    for the easy ones and two for the hard ones, and is always right.
    """

    index: int

    @property
    def x(self) -> int:
        return self.index % 4

    def reward(self, written: list[int], g: int) -> float:
        if written[-1] != END or written[-2:-1] != [3 - self.x]:
            return 0.0
        luck = zlib.crc32(f"{self.index}/{g}".encode()) % 4
        return float(self.x < 2 or luck < 2 + written.count(THINK))


def mini_sampler(engine: mtp.Engine) -> Iterator[list[Rollout]]:
    """Finished groups, without end; new weights may be loaded into the engine between two of them."""
    indices, finished = itertools.count(), defaultdict(list)
    jobs = ((Question(i), g) for i in indices for g in range(MINI_RL.group_size))
    slots = {}
    while True:
        for i in set(range(len(engine.live))) - slots.keys():
            slots[i] = q, g = next(jobs)
            engine.force(i, [q.x], LIMIT, reset=True, key=q.index * 64 + g)
        for i in engine.step():
            q, g = slots.pop(i)
            segment = Segment(*engine.window(i))
            written = segment.ids[1:]
            counters = {**dict.fromkeys(length_penalty.COUNTERS, 0), "thinking": written.count(THINK), "turns": 1}
            finish = "answered" if written[-1] == END else "window"
            group = finished[q.index]
            group.append(Rollout(str(q.x), "easy" if q.x < 2 else "hard", [segment], "", finish, counters,
                                 q.reward(written, g), extra=dict(finished=engine.version)))
            if len(group) == MINI_RL.group_size:
                yield finished.pop(q.index)


def demonstrate(model: moe.Transformer, seed: int, steps: int = 80) -> None:
    """Supervised start: up to six thoughts for any question, and the right digit six times in ten."""
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.0)
    for _ in range(steps):
        x = torch.randint(4, (128,), generator=g)
        thoughts = torch.randint(7, (128,), generator=g)
        right = torch.rand(128, generator=g) < 0.6
        digit = torch.where(right, 3 - x, torch.randint(4, (128,), generator=g))
        at = torch.arange(9)  # question, thoughts, digit, END, then nothing that counts
        rows = torch.where(at <= thoughts[:, None], THINK, torch.where(at == thoughts[:, None] + 1, digit[:, None], END))
        rows[:, 0] = x
        logp = model.lm_head(model(rows)[:, :-1]).log_softmax(-1).gather(2, rows[:, 1:, None]).squeeze(2)
        (-logp[at[1:] <= thoughts[:, None] + 2].mean()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def learn(trainer_class: type[Trainer], c: GRPOConfig = MINI_RL, lam: float = EFFORT.lam, seed: int = 0,
          show: int = 0, actor_dtype: torch.dtype = torch.float32) -> list[dict[str, float]]:
    """RL on the questions; sampling goes on in flight while the weights change. Returns the metrics of each step,
    with reward and thoughts of easy and hard questions apart. actor_dtype: what the sampler computes in."""
    model, log = moe.Transformer(MINI), []
    model.reset_parameters(seed)
    demonstrate(model, seed)
    reference = moe.Transformer(MINI)
    reference.load_state_dict(model.state_dict())
    actor = moe.Transformer(MINI).to(actor_dtype).eval()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(model, lambda ps: torch.optim.AdamW(ps, c.lr, c.betas, weight_decay=0.0), c,
                                Path(folder))
        actor.load_state_dict(trainer.model.state_dict())
        engine = mtp.Engine(actor, c.slots, LIMIT, END)
        source = mini_sampler(engine)
        while trainer.version < c.steps:
            with torch.no_grad():
                groups = [next(source) for _ in range(c.groups)]
            rollouts = [r for g in groups for r in g]
            nats = reference_kl(reference, rollouts, c)
            shape_rewards(rollouts, nats, c.kl_beta, replace(EFFORT, lam=lam))
            metrics = trainer.step(groups)
            for family in ("easy", "hard"):
                those = [r for r in rollouts if r.family == family]
                metrics[family] = sum(r.reward for r in those) / len(those)
                wrong = [r for r in rollouts if not r.reward]
                metrics["wrong_tokens"] = sum(r.tokens for r in wrong) / max(len(wrong), 1)
                metrics[f"thoughts_{family}"] = sum(r.counters["thinking"] for r in those) / len(those)
            log.append(metrics)
            if show and trainer.version % show == 0:
                print(f"    {trainer.version:4}" + "".join(f"{metrics[k]:10.2f}" for k in SHOWN), flush=True)
            engine.load(trainer.model.state_dict(), trainer.version)
    return log


SHOWN = dict(easy="easy", hard="hard", thoughts_easy="thoughts", thoughts_hard="thoughts", wrong_tokens="wrong",
             cut="cut", kl="KL", entropy="entropy", lag="lag", chain_ess="ESS")


class StdNormalised(Trainer):
    """Advantages divided by the group's standard deviation, as in the original GRPO."""

    def advantages(self, shaped: Tensor) -> Tensor:
        return advantages(shaped) / (shaped.std(dim=1, keepdim=True) + 1e-6)


class LengthNormalised(Trainer):
    """Each rollout's loss divided by its own number of tokens, as in the original GRPO."""

    def loss(self, logp: Tensor, batch: dict[str, Tensor], index: Tensor, denominator: float):
        owner = batch["owner"][index]
        own = torch.bincount(owner, minlength=int(owner.max()) + 1)[owner]
        batch = {**batch, "advantage": batch["advantage"].clone()}
        batch["advantage"][index] *= self.c.norm_const / own
        return super().loss(logp, batch, index, denominator)


class OverlongMasked(Trainer):
    """Rollouts that ended at the limit take no part in the update."""

    def step(self, groups: list[list[Rollout]]) -> dict[str, float]:
        for g in groups:
            inside = [r.shaped_reward for r in g if r.finish == "answered"]
            for r in g:
                if r.finish != "answered":  # the mean of the others: advantage zero
                    r.shaped_reward = sum(inside) / max(len(inside), 1)
        return super().step(groups)


class KLInLoss(Trainer):
    """The penalty as a term of the loss: k1 differentiated, whose expected gradient is zero."""

    BETA = 0.1

    def loss(self, logp: Tensor, batch: dict[str, Tensor], index: Tensor, denominator: float):
        value, metrics = super().loss(logp, batch, index, denominator)
        return value + self.BETA * logp.sum() / denominator, metrics  # − log r; the reference is a constant


class Unweighted(Trainer):
    """Stale samples as if they were the policy's own: every weight is 1."""

    def loss(self, logp: Tensor, batch: dict[str, Tensor], index: Tensor, denominator: float):
        _, metrics = super().loss(logp.detach(), batch, index, denominator)
        return -(batch["advantage"][index] * logp).sum() / denominator, metrics


def ablate() -> None:
    """One idea of the report taken out at a time: means of two seeds, over the last 20 of 80 steps."""
    late, off = replace(MINI_RL, slots=1024), replace(MINI_RL, kl_beta=0.0)
    rows = (("as it is", Trainer, {}),
            ("divided by the deviation (R3)", StdNormalised, {}),
            ("divided by each length (R2)", LengthNormalised, {}),
            ("cut rollouts masked (R4)", OverlongMasked, {}),
            ("KL in the loss (R6)", KLInLoss, dict(c=off)),
            ("no length penalty (B2)", Trainer, dict(lam=0.0)),
            ("a sampler far behind", Trainer, dict(c=late)),
            ("  and no importance weight (R5)", Unweighted, dict(c=late)),
            ("a sampler in bf16", Trainer, dict(actor_dtype=torch.bfloat16)))
    print(f"{'reward and thoughts of':32}{'easy':>9}{'hard':>9}{'easy':>9}{'hard':>9}\n{'':32}"
          + "".join(f"{v:>9}" for v in SHOWN.values()))
    for name, trainer_class, options in rows:
        logs = [log for seed in (0, 1) for log in learn(trainer_class, seed=seed, **options)[-20:]]
        mean = lambda k: sum(m.get(k, 0.0) for m in logs) / len(logs)
        print(f"{name:32}" + "".join(f"{mean(k):9.2f}" for k in SHOWN), flush=True)
    kinds = {"no replay": "mismatch_none", "replay": "mismatch", "with the filter": "mismatch_filter"}
    print("the last one's |Δ log-prob| of trainer and sampler, 99th percentile: "
          + ", ".join(f"{name} {mean(k + '_p99'):.4f}" for name, k in kinds.items()))
    print("wrong: tokens of a wrong rollout; cut: share that ended at the limit; lag in steps; ESS of whole chains")


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
    (true,) = torch.autograd.grad(((r - (p * r).sum())[:, None] * p[:, None] * logp).sum(), theta,
                                  retain_graph=True)
    A = (q * (r - (q * r).sum()))[:, None].expand(-1, 2)
    if weighting == "token":
        value = loss(logp, sampled, A, torch.ones_like(logp), -1.0)[0]
    else:
        w = (logp.detach() - sampled).sum(1, keepdim=True).exp() if weighting == "sequence" else 1.0
        value = (A * w * logp).sum() + (0.0 if weighting == "none"
                                        else ((q @ r - p @ r) * (q[:, None] * w * logp)).sum())
    (grad,) = torch.autograd.grad(value, theta)
    return float((grad - true).norm() / true.norm())


def weight_table() -> None:
    """The factor of A ∇ log π under rules that others use for samples of another policy, by ratio π/μ and sign."""
    ratios = (0.25, 0.75, 1.0, 1.5, 4.0)
    rules = {"truncated at 2, here": lambda r, a: min(r, 2.0),
             "PPO, clip 0.2": lambda r, a: r * (r < 1.2 if a > 0 else r > 0.8),
             "PPO, dual clip 3": lambda r, a: r * (r < 1.2 if a > 0 else 0.8 < r < 3),
             "IcePop, 0.5 to 2": lambda r, a: r * (0.5 <= r <= 2)}
    print("\nthe weight of a token whose probability has changed since it was sampled, A > 0 / A < 0")
    print(f"    {'ratio':24}" + "".join(f"{r:>14}" for r in ratios))
    for name, rule in rules.items():
        cells = "".join(f"{rule(r, 1):>8.2f} /{rule(r, -1):5.2f}" for r in ratios)
        print(f"    {name:22}{cells}")


def delta_table() -> None:
    """Weight files of a model in training, by learning rate: most steps are too small to change a bf16 weight."""
    c, g = replace(MINI, dim=128, ffn_dim=256, n_layers=4, init_std=0.02), torch.Generator().manual_seed(0)
    print("\nweight files (I1), 20 steps of Adam on fp32 masters: share of bf16 weights that changed, size")
    for lr in (1e-6, 1e-5, 1e-4):
        model = moe.Transformer(c)
        model.reset_parameters(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95), weight_decay=0.0)
        with tempfile.TemporaryDirectory() as folder:
            publisher = Publisher(Path(folder), full_every=1000)
            for version in range(21):
                read = publisher.publish(model.state_dict(), version)
                x, advantage = torch.randint(6, (16, 16), generator=g), torch.randn(16, 1, generator=g)
                logp = model.lm_head(model(x)[:, :-1]).log_softmax(-1).gather(2, x[:, 1:, None]).squeeze(2)
                (-advantage * logp).mean().backward()  # a policy gradient of pure noise: no direction lasts
                optimizer.step()
                optimizer.zero_grad()
            read = publisher.flush()
        print(f"    learning rate {lr:.0e}: {read['weight_changed']:7.2%} changed, "
              f"{read['weight_ratio']:6.1f} times smaller than bf16")


def main() -> None:
    torch.set_num_threads(1)
    print("RL on questions with a known answer: right digit, no thought if easy, two if hard (R1, R5, B2)")
    print(f"{'':20}{'reward':>8}{'':10}{'per rollout':>22}\n    step" + "".join(f"{v:>10}" for v in SHOWN.values()))
    learn(Trainer, show=20)
    r = torch.tensor([[1.0, 1.0, 1.0, 1.001], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    print("\nwhy no standard deviation (R3): a thousandth of difference would weigh like a solved task")
    for rewards, a, z in zip(r.tolist(), advantages(r), advantages(r) / r.std(dim=1, keepdim=True)):
        print(f"    rewards {str(rewards):28} advantage {[round(v, 4) for v in a.tolist()]}, divided by σ "
              f"{[round(v, 2) for v in z.tolist()]}")
    print("\nsamples of another policy (R5): relative error of the expected gradient, by enumeration, 20 problems")
    print("    distance of the sampler      0.0     0.1     0.5     1.0")
    for weighting in ("none", "token", "sequence"):
        errors = [sum(off_policy_bias(e, weighting, s) for s in range(20)) / 20 for e in (0.0, 0.1, 0.5, 1.0)]
        print(f"    weight: {weighting:18}" + "".join(f"{x:8.3f}" for x in errors))
    print("    (the product over a sequence is unbiased, but its variance grows exponentially with the length)")
    weight_table()
    delta_table()
    lengths = [131072, 65536, 65536] + [16384] * 8
    print("\npacking by cost (S5): 131072, 2 x 65536 and 8 x 16384 tokens on two ranks")
    for name, ranks in (("tokens", [[0, 3, 4, 5, 6], [1, 2, 7, 8, 9, 10]]), ("cost", balance(lengths, 2))):
        load = [sum(cost(lengths[i]) for i in r) for r in ranks]
        print(f"    by {name:8} max / mean of the cost {max(load) / (sum(load) / 2):.3f}, tokens "
              f"{[sum(lengths[i] for i in r) for r in ranks]}")


if __name__ == "__main__":
    ablate() if "--ablate" in sys.argv[1:] else main()
