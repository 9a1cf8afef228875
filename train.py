"""From raw source code to a scored agent: the whole of Composer 2's recipe in one program.

    python train.py --size toy           the whole pipeline on two CPU cores
    python train.py --size toy --smoke   the same stages with numbers shrunk to seconds
    python train.py --size toy --resume  go on where a stopped run was

Stages, in order (report §3 to §6):

    pretrain   continued pretraining on code, short context            (P1; a checkpoint is cut in the middle)
    mtp        MTP layer on the mid-run checkpoint, self-distilled     (T1, T2; the model is frozen)
    long       longer context, MTP trained jointly                     (P1, T2)
    sft        demonstrations of tool use                              (P1)
    rl         asynchronous RL: a sampler process and this one         (R1–R9, I1–I3)
    eval       held-out tasks before and after RL                      (R7, V4)

A size is a row of differences from the dataclasses' defaults (SIZES); nothing branches on its name. Any field
can be set: `--set grpo.group_size=16`. The run's folder (default runs/<size>) holds run.json (configuration,
finished stages), metrics.jsonl, checkpoints/, groups/ (finished rollouts on their way to the trainer),
weights/ (on their way to the sampler) and eval/.

Glossary of metrics.jsonl: every line has `stage`, `step`, `wall_s` since the start of its process.
    bits, loss                 loss of a training batch, per target token (bits, nats)
    lr, grad_norm, tokens      of the step (in RL: tokens that the model wrote, per rollout)
    mtp_overlap                Σ min(p, q): the expected acceptance of a drafted token
    mtp_kl, mtp_agreement      distance to the main head; share of equal most likely tokens
    heldout_bpb                bits per byte of the held-out package
    reward, shaped_reward      means over the step's rollouts, before and after penalties
    length_cost, kl            what the length penalty takes; Σ k1 to the model before RL, per rollout
    lag, lag_max               trainer version minus a token's version, in steps
    lag_flight, lag_queue      its parts: until the rollout was finished, and from then on
    ess, chain_ess, truncated  of the importance weights: effective sample size of tokens, of whole rollouts;
                               share at the cap
    k1_sampler, k3_sampler     divergence of trainer and sampler, per token
    mismatch_p50, mismatch_p99 |Δ log-prob| of trainer and sampler, on tokens that are not stale; now and then
                               also mismatch_none (without router replay) and mismatch_filter (with its filter)
    entropy                    nats per sampled token
    dead_groups, dropped       groups without any difference in shaped reward; groups too stale to use
    turns, calls_per_turn, broken_calls, summaries, cut        per rollout; cut: share that ended at a limit
    wait_s                     seconds that the trainer waited for groups
    weight_bytes, weight_ratio, weight_changed                 of the weight file uploaded before
    weight_wait_s              seconds that publishing kept the trainer
    families, mix              reward by family; groups of each in the step
    mean, best_of_8            of an evaluation: over tasks, 8 samples each

On several processes (S1–S3) the trainer is one program under torchrun; `ranks.*` says how it is cut:

    torchrun --nproc-per-node 4 train.py --size toy --out runs/four --set ranks.ep=2 --set ranks.cp_long=2
    python train.py --size full --plan --gpus 512 --gpu b300     the real model, sharded on paper: what fits
    python train.py --role evaluator --out runs/toy              scores the weights that RL publishes
    python train.py --role sampler --name 7 --out runs/toy       one more sampler, as long as it lives

Differences from the report: every number of the toy; the MTP loss is taken on every `mtp_every`-th step.
Checkpoints are written while the trainer waits; evaluation inside the trainer uses one rank. Nothing here has
run on GPUs or over NCCL.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
import typing
import warnings
import zlib
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import bench
import grpo
import moe
import mtp
import pretrain
import sandbox
from length_penalty import Penalty
from pretrain import Phase
from summarize import METHODS, Protocol, Rollout, WindowConfig, usage

STAGES = ("pretrain", "mtp", "long", "sft", "rl", "eval")


# ------------------------------------------------------------------------------------------------------ sizes


@dataclass(frozen=True)
class Ranks:
    """How the training service spreads over its processes. 1: not split that way."""

    ep: int = 1  # ranks over which the experts are spread
    cp: int = 1  # ranks over which a row's tokens are spread: pretrain, mtp, sft
    cp_long: int = 1  # the same for long and rl
    param_dtype: str = "fp32"  # of gathered weights, or bf16; masters, gradients and moments are fp32
    recompute: bool = False  # keep the layers' inputs only (activation checkpointing)
    timeout_s: float = 600.0  # a collective that waits longer ends the run

    def __post_init__(self) -> None:
        for name in ("ep", "cp", "cp_long"):
            if getattr(self, name) < 1:
                raise ValueError(f"ranks.{name} = {getattr(self, name)} must be at least 1")
        if self.param_dtype not in ("fp32", "bf16"):
            raise ValueError(f"ranks.param_dtype = {self.param_dtype!r}: choose fp32 or bf16")

    def fits(self, n: int, model: moe.Config) -> bool:
        """Can `n` processes hold this model? The n / ep ranks of an expert cut it along its widths."""
        if n % self.ep or n % self.cp or n % self.cp_long or model.n_experts % self.ep:
            return False
        return model.dim % (n // self.ep) == 0 and 2 * model.expert_dim % (n // self.ep) == 0


@dataclass(frozen=True)
class Config:
    """A run. Sections are the dataclasses of the files that they belong to."""

    seed: int = 0
    device: str = "cpu"
    threads: int = 2  # of this process; in RL it and each sampler use one
    samplers: int = 2  # sampling processes that the trainer starts; others may join with --role sampler
    data: str = ""  # a folder of source code; empty: the installed standard library
    heldout: str = "asyncio"  # packages held out, by comma
    heldout_bytes: int = 60_000  # how much of them is scored
    window_bpb: int = 256  # context of that score, tokens
    n_mtp: int = 1
    sft_accuracy: float = 0.3  # share of right choices in the last demonstrations
    sft_careful: float = 0.72  # share of the phase in which every demonstration is right
    sft_code: int = 12  # every n-th task is joined by a piece of code, so that it is not forgotten; 0: none
    sft_recall: int = 8  # and every n-th by a file whose lines are asked for by name (pretrain.py); 0: none
    weight_decay: float = 0.05
    eval_tasks: int = 24  # per family
    eval_samples: int = 8
    control_tasks: int = 16  # of the summary family, for blanked and scrambled summaries
    checkpoint_s: float = 30.0  # seconds between checkpoints inside a stage
    model: moe.Config = field(default_factory=moe.Config)
    ranks: Ranks = field(default_factory=Ranks)
    window: WindowConfig = field(default_factory=WindowConfig)
    grpo: grpo.GRPOConfig = field(default_factory=grpo.GRPOConfig)
    penalty: Penalty = field(default_factory=Penalty)
    pretrain: Phase = field(default_factory=lambda: Phase("pretrain", 32_768, 8, 1000, 1e-4))
    mtp: Phase = field(default_factory=lambda: Phase("mtp", 32_768, 8, 200, 1e-4, mtp="only"))
    long: Phase = field(default_factory=lambda: Phase("long", 262_144, 8, 200, 1e-4, mtp="joint"))
    sft: Phase = field(default_factory=lambda: Phase("sft", 32_768, 8, 200, 1e-5, mtp="joint"))


SIZES: dict[str, dict] = {
    "toy": dict(
        model=dict(vocab_size=272, dim=128, n_layers=4, n_heads=4, q_lora_rank=64, kv_lora_rank=64,
                   qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, ffn_dim=256, expert_dim=64,
                   n_experts=8, n_experts_per_tok=2, route_scale=1.0, rope_theta=10_000.0, rope_factor=4.0,
                   rope_original_len=256, init_std=0.0, positional_heads=3),
        pretrain=dict(length=256, rows=10, steps=160, lr=3e-3, warmup=20),
        mtp=dict(length=256, rows=10, steps=50, lr=3e-3, warmup=5),
        long=dict(length=1024, rows=3, steps=60, lr=2e-3, lr_start=3e-3, warmup=5, mtp_every=4,
                  mix={"code": 0.5, "track": 0.5}),
        sft=dict(length=224, rows=10, steps=760, lr=4e-3, warmup=20, decay=0.5, lr_end=2e-4, mtp_every=4)),
    "full": dict(
        device="cuda",
        model=dict(precision="mxfp8", dispatch="mxfp8"),
        ranks=dict(ep=8, cp=2, cp_long=8, param_dtype="bf16", recompute=True),
        pretrain=dict(rows=1024), mtp=dict(rows=1024), sft=dict(rows=256), long=dict(rows=256)),
}

SMOKE = ("pretrain.steps=6", "mtp.steps=4", "long.steps=3", "sft.steps=8", "grpo.steps=2", "grpo.groups=2",
         "grpo.group_size=4", "grpo.slots=16", "eval_tasks=1", "eval_samples=2", "control_tasks=1",
         "heldout_bytes=3000", "pretrain.warmup=2", "sft.warmup=2", "mtp.warmup=1", "long.warmup=1")


class Refused(Exception):
    """Bad input: printed as one line, exit code 2."""


def nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.0)
    return f"did you mean {close[0]}?" if close else ""


def parse_value(key: str, text: str, kind: object) -> object:
    """`text` as a value of the field's type; dictionaries and tuples are JSON."""
    origin = typing.get_origin(kind) or kind
    try:
        if origin is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if origin in (int, float, str):
            return origin(text)
        value = json.loads(text)
        if not isinstance(value, (list, dict)):
            raise ValueError
        return tuple(value) if origin is tuple else value
    except (ValueError, KeyError):
        name = getattr(origin, "__name__", str(origin))
        raise Refused(f"--set {key}={text}: {key} takes a value of type {name}") from None


def find_key(key: str) -> tuple[str, str, object]:
    """(section, field, type) of a dotted key; the section is "" for a field of the run itself."""
    top = typing.get_type_hints(Config)
    sections = [("", Config), *((n, t) for n, t in top.items() if dataclasses.is_dataclass(t))]
    known = {(f"{section}.{f.name}" if section else f.name):
             (section, f.name, typing.get_type_hints(owner)[f.name])
             for section, owner in sections for f in dataclasses.fields(owner)
             if section or not dataclasses.is_dataclass(top[f.name])}
    if key not in known:
        raise Refused(f"--set {key}: there is no such key; {nearest(key, list(known))}")
    return known[key]


def with_sets(config: Config, items: list[str]) -> Config:
    """The configuration with every key=value of `items` set; a section is checked once, as a whole."""
    new: dict[str, dict[str, object]] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals:
            raise Refused(f"--set {item}: write key=value, as in grpo.group_size=16")
        section, name, kind = find_key(key)
        new.setdefault(section, {})[name] = parse_value(key, text, kind)
    try:
        sections = {s: replace(getattr(config, s), **values) for s, values in new.items() if s}
        return replace(config, **new.get("", {}), **sections)
    except ValueError as error:
        raise Refused(f"--set: {error}") from None


def build_config(size: str, sets: list[str], **top: object) -> Config:
    """Defaults, the size's row, then `--set` in order."""
    if size not in SIZES:
        raise Refused(f"--size {size}: there is no such size; choose {' or '.join(SIZES)}")
    config = Config()
    rows = {k: replace(getattr(config, k), **v) if isinstance(v, dict) else v for k, v in SIZES[size].items()}
    return with_sets(replace(config, **{**rows, **{k: v for k, v in top.items() if v is not None}}), sets)


def config_from(plain: dict) -> Config:
    """A configuration from run.json."""
    kinds = typing.get_type_hints(Config)

    def one(kind: type, value: object) -> object:
        if not dataclasses.is_dataclass(kind):
            return tuple(value) if isinstance(value, list) else value
        hints = typing.get_type_hints(kind)
        return kind(**{k: one(hints[k], v) for k, v in value.items()})

    return Config(**{k: one(kinds[k], v) for k, v in plain.items()})


# ------------------------------------------------------------------------------------------------ ranks (S1)


class World:
    """This process among the training service's: groups, sums and shares. A world of one shards nothing."""

    def __init__(self, c: Config, device: str):
        self.ranks, self.rank, self.size = c.ranks, dist.get_rank(), dist.get_world_size()
        r, n = c.ranks, self.size
        if not r.fits(n, c.model):
            near = [next((m for m in span if r.fits(m, c.model)), None)
                    for span in (range(n - 1, 0, -1), range(n + 1, 64 * n + 64))]
            raise Refused(
                f"{n} processes do not fit ranks.ep = {r.ep}, cp = {r.cp}, cp_long = {r.cp_long} and "
                f"{c.model.n_experts} experts of width {c.model.expert_dim}: the nearest numbers are "
                f"{' and '.join(str(m) for m in near if m) or 'none'}; or choose smaller groups, as in "
                "--set ranks.ep=1")
        local = self.rank % torch.cuda.device_count() if device == "cuda" else None
        self.device = torch.device(device, local)
        if device == "cuda":
            torch.cuda.set_device(self.device)
        self.flat = init_device_mesh(device, (n,), mesh_dim_names=("fsdp",))  # dense weights: dp x cp
        self.sparse = init_device_mesh(device, (n // r.ep, r.ep), mesh_dim_names=("efsdp", "ep"))
        self.patient: dist.ProcessGroup | None = None
        self.saving: dist.ProcessGroup | None = None
        self.rows = {cp: init_device_mesh(device, (n // cp, cp), mesh_dim_names=("dp", "cp"))
                     for cp in {1, r.cp, r.cp_long}}

    def cp(self, stage: str) -> int:
        return self.ranks.cp_long if stage in ("long", "rl") else self.ranks.cp

    def parallel(self, cp: int = 1) -> moe.Parallel | None:
        """The groups that the model works in, with rows split over `cp` ranks."""
        if self.size == 1:
            return None
        return moe.Parallel(dist.group.WORLD, self.sparse.get_group("ep") if self.ranks.ep > 1 else None,
                            self.rows[cp].get_group("cp") if cp > 1 else None)

    def shard(self, module: nn.Module) -> None:
        """FSDP2: every weight cut over the ranks, gathered layer by layer when it is used, gradients summed.

        Dense weights along their first dimension over all ranks; experts over `ep` by number, and each expert
        along its second dimension over `efsdp`: by number again would leave ranks without any where there are
        more ranks than experts. Gradients are sums, for the loss is divided by the token count of all ranks:
        FSDP's mean would make experts' gradients ep times too large.
        """
        if self.size == 1:
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
        from torch.distributed.tensor import Shard

        module.recompute = self.ranks.recompute
        moe.parallelise(module, self.parallel())
        experts = Shard(1)
        if self.ranks.ep > 1:
            moe.shard_experts(module, self.sparse["ep"])
            experts = ShardPlacementResult(Shard(1), FSDPMeshInfo(self.sparse["efsdp"], shard_mesh_dim=0))
        low = torch.bfloat16 if self.ranks.param_dtype == "bf16" else None
        wide = torch.promote_types(next(module.parameters()).dtype, torch.float32)  # in which gradients are summed
        options = dict(mesh=self.flat, mp_policy=MixedPrecisionPolicy(low, wide),
                       shard_placement_fn=lambda p: experts if p.dim() == 3 else None)
        for part in (*module.layers, module):
            fully_shard(part, **options)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor

    def total(self, value: float) -> float:
        """Σ over the ranks."""
        if self.size == 1:
            return float(value)
        x = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(x)
        return float(x)

    @torch.no_grad()
    def clip(self, parameters: list, limit: float) -> float:
        """Scale gradients to a norm of at most `limit`; returns the norm before.

        Own arithmetic, because torch's stops at parameters on two meshes. Every number is on exactly one
        rank, so the square of the norm is the sum of the ranks' squares.
        """
        if self.size == 1:
            return float(nn.utils.clip_grad_norm_(parameters, limit))
        grads = [moe.local_part(p.grad) for p in parameters if p.grad is not None]
        norm = math.sqrt(self.total(float(nn.utils.get_total_norm(grads)) ** 2))
        for g in grads:
            g.mul_(min(1.0, limit / (norm + 1e-6)))
        return norm

    def share(self, batch: pretrain.Batch, cp: int) -> pretrain.Batch:
        """This rank's part of a step's batch, which every rank makes whole: rows in turn to dp, tokens to cp.

        Rows and columns of padding make both divide; a rank beyond the last row gets nothing else.
        """
        if self.size == 1:
            return batch
        cut = partial(self.cut, cp=cp)
        return pretrain.Batch(cut(batch.tokens), cut(batch.targets), cut(batch.doc, fill=-1),
                              cut(batch.positions), batch.sample_ids, cut(batch.labels, fill=-1))

    def cut(self, x: torch.Tensor, cp: int, fill: int = 0) -> torch.Tensor:
        """This rank's part of whole rows [B, T, ·]; `fill` is what padding holds."""
        dp, more_rows, more = self.size // cp, -x.shape[0] % (self.size // cp), -x.shape[1] % (2 * cp)
        x = nn.functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, more, 0, more_rows), value=fill)
        return x[self.rank // cp::dp][:, moe.zigzag(x.shape[1], cp, self.rank % cp)]

    def agree(self, value: object, patient: bool = False) -> object:
        """Rank 0's value, on every rank; `patient`: it may take hours to come."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.patient if patient else None)
        return box[0]

    @staticmethod
    def where(x: torch.Tensor) -> tuple[int, ...]:
        """Where this rank's part of a tensor begins, in every dimension."""
        if not hasattr(x, "to_local"):
            return (0,) * x.dim()
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        return compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1]

    def pieces(self, module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """This rank's part of a module's state as runs of elements that lie together in the whole tensors,
        and where they begin there. What every rank has, such as the routers' biases, is rank 0's."""
        state, offsets = {}, {}
        for name, x in module.state_dict().items():
            if not hasattr(x, "to_local"):
                state |= {name: x} if self.rank == 0 else {}
                continue
            at = self.where(x)
            if x.dim() < 3:  # rows
                state[name], offsets[name] = x.to_local(), at[0] * math.prod(x.shape[1:])
                continue
            for e, expert in enumerate(x.to_local()):
                key = f"{name}#{e}"
                state[key], offsets[key] = expert, ((at[0] + e) * x.shape[1] + at[1]) * x.shape[2]
        return state, offsets


def join(c: Config, device: str) -> World:
    """The process group that torchrun describes, or one of this process alone: the same path from here on."""
    if not dist.is_initialized():
        group = dict(store=dist.HashStore(), rank=0, world_size=1)
        if dist.is_torchelastic_launched():
            store, rank, size = next(dist.rendezvous("env://"))
            # torchrun may start everything anew on the store of the attempt before, with its dead addresses
            group = dict(store=dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store), rank=rank,
                         world_size=size)
        dist.init_process_group("nccl" if device == "cuda" else "gloo",
                                timeout=timedelta(seconds=c.ranks.timeout_s), **group)
    world = World(c, device)
    # of the writer's thread, beside whatever training sends meanwhile
    world.saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=c.ranks.timeout_s))
    if world.size > 1:
        world.patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))  # for waiting on services
    return world


# ------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Chip:
    """A GPU as its vendor describes it: bytes, dense FLOP/s, bytes/s of one direction."""

    memory: float
    fp8: float
    bf16: float
    inside: float  # NVLink
    network: float  # its network card

    # NVIDIA's data sheets: HGX B300 (ConnectX-8, 800 Gb/s) and H200 (ConnectX-7, 400 Gb/s)
    # What of it is reached. Matrix products: DeepSeek-V3 on GB300 in MXFP8 runs at 1,088 TFLOP/s, 24 % of the
    # peak (Megatron-Bridge, docs/performance-summary.md, NeMo 25.11); attention in bf16: 0.5, ours.
    linear: float = 0.22
    attention: float = 0.5
    usable: float = 0.94  # of the memory; the rest is the driver's, NCCL's and fragmentation's (ours)


CHIPS = {"b300": Chip(288e9, 4.5e15, 2.25e15, 900e9, 100e9),
         "h200": Chip(141e9, 1.98e15, 0.99e15, 450e9, 50e9)}


def imagine(c: Config, n: int) -> tuple[int, int, float]:
    """Build and shard the real model for `n` ranks, as rank 0 would, on the meta device under a fake group.

    Returns parameters, those of rank 0 (it has the most: chunks are handed out from rank 0 on) and seconds.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    began = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        with torch.device("meta"):
            model = moe.Transformer(c.model)
        World(c, "cpu").shard(model)
        whole = sum(p.numel() for p in model.parameters())
        mine = sum(moe.local_part(p).numel() for p in model.parameters())
    finally:
        dist.destroy_process_group()
    return whole, mine, time.perf_counter() - began


def memory_of(c: Config, phase: Phase, cp: int, rows: int, mine: int) -> dict[str, float]:
    """Bytes of one rank by kind when a backward pass has `rows` rows: an estimate, formulas in sight."""
    m, n = c.model, moe.count(c.model)
    tokens = rows * phase.length / cp
    expert = n["experts"] / max(m.n_moe_layers, 1)
    block = (n["shared"] + n["router"] + n["attention"]) / m.n_layers + expert / c.ranks.ep  # parameters
    width = 2 if c.ranks.param_dtype == "bf16" else 4
    heads = m.n_heads * (m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim)
    routed = tokens * m.n_experts_per_tok * (2 * m.dim + 3 * m.expert_dim) * width
    logits = 2 * 4 * min(4096, tokens) * m.vocab_size  # a chunk of logits and its gradient, fp32
    return dict(
        state=16.0 * mine,  # fp32 master, gradient, two moments
        gathered=block * (2 * width + 2 * 4) + (n["embedding"] + n["head"]) * width,  # two, and gradients
        inputs=m.n_layers * tokens * m.dim * width,  # of the layers, kept for recomputation
        live=2 * routed + rows * phase.length * heads * 2 * width + logits)  # one layer forward and backward


def speed_of(c: Config, phase: Phase, cp: int, rows: int, n: int, chip: Chip) -> dict[str, float]:
    """Seconds of one backward pass of `rows` rows per rank by resource, and its tokens per second in all."""
    m, k = c.model, moe.count(c.model)
    tokens = rows * phase.length / cp
    linear, attention = moe.flops_per_token(m, phase.length)
    again = 4 / 3 if c.ranks.recompute else 1.0
    seconds = dict(compute=again * tokens * (linear / (chip.linear * chip.fp8)
                                             + attention / (chip.attention * chip.bf16)))
    # FSDP: weights gathered forward and backward, gradients reduced in fp32; experts only over efsdp.
    width = 2 if c.ranks.param_dtype == "bf16" else 4
    gathered = k["total"] - k["experts"] + k["experts"] / c.ranks.ep
    seconds["weights"] = (2 * width + 4) * gathered / chip.network
    # Rows to their experts and back, forward, again and backward, in a node. And the latents of other ranks.
    wire = moe.expert_traffic(m, int(tokens), c.ranks.ep)["sum" if m.dispatch == "mxfp8" else "bf16"]
    seconds["rows"] = 3 * m.n_moe_layers * wire / chip.inside
    if cp > 1:
        latents = rows * moe.latent_traffic(m, phase.length, cp)["latents"]
        seconds["latents"] = 3 * m.n_layers * latents / (chip.inside if cp <= 8 else chip.network)
    # Gathering runs beside computing; rows and latents are waited for.
    step = max(seconds["compute"] + seconds["rows"] + seconds.get("latents", 0.0), seconds["weights"])
    return dict(**seconds, step=step, tokens_per_s=tokens * n / step,
                flops=tokens * (linear + attention) / step)


def plan(c: Config, gpus: int, gpu: str) -> dict:
    """`--plan`: what fits where and how fast, printed; returns the JSON line. Nothing is trained."""
    chip, n = CHIPS[gpu], moe.count(c.model)
    whole, mine, seconds = imagine(c, gpus)
    if whole != n["total"]:
        raise AssertionError(f"{whole:,} parameters after sharding, {n['total']:,} before")
    share = mine / whole
    print(f"{whole:,} parameters, {n['active']:,} active per token; built and sharded for {gpus} ranks on "
          f"the meta device in {seconds:.1f} s\nexperts over ep {c.ranks.ep} x efsdp {gpus // c.ranks.ep}, "
          f"the rest over all; largest rank {mine:,} parameters, {share * gpus:.4f} of an even share")
    fits, rates = True, {}
    for name, phase in (("pretrain", c.pretrain), ("long", c.long)):
        cp = c.ranks.cp_long if name == "long" else c.ranks.cp
        per_rank = -(-phase.rows * cp // gpus)  # rows of a step that a group of cp ranks computes
        room = chip.usable * chip.memory
        sizes = [r for r in range(per_rank, 0, -1) if per_rank % r == 0]
        rows = next((r for r in sizes if sum(memory_of(c, phase, cp, r, mine).values()) <= room), 1)
        memory, speed = memory_of(c, phase, cp, rows, mine), speed_of(c, phase, cp, rows, gpus, chip)
        good = sum(memory.values()) <= room
        fits, rates[name] = fits and good, speed["tokens_per_s"]
        print(f"\n{name}: {phase.length:,} tokens a row, cp {cp}, {phase.rows} rows a step, {per_rank} per "
              f"group of {cp}, {rows} at a time (--set {name}.micro_rows={rows})")
        print("    memory per GPU, GB      " + "".join(f"{k} {v / 1e9:.1f}  " for k, v in memory.items())
              + f"sum {sum(memory.values()) / 1e9:.0f} of {chip.memory / 1e9:.0f}: "
              + ("fits" if good else "does NOT fit"))
        print("    seconds a pass          " + "".join(f"{k} {speed[k]:.2f}  " for k in
              ("compute", "rows", "latents", "weights") if k in speed)
              + f"limited by {'gathering weights' if speed['step'] == speed['weights'] else 'computing'}")
        tokens = phase.tokens
        print(f"    {speed['tokens_per_s']:,.0f} tokens/s, {speed['tokens_per_s'] / gpus:,.0f} per GPU at "
              f"{speed['flops'] / 1e12:.0f} TFLOP/s ({speed['flops'] / chip.fp8:.0%} of FP8's peak); "
              f"{tokens:,} tokens take {tokens / speed['tokens_per_s'] / 86_400:.1f} days")
    written, published = 12 * whole, 2 * whole
    print(f"\ncheckpoint {written / 1e12:.1f} TB (master and moments), {written / 200e9:.0f} s at 200 GB/s\n"
          f"weights in bf16 {published / 1e12:.2f} TB: a snapshot leaves {gpus} GPUs in "
          f"{published / gpus / chip.network:.2f} s; an RL step's difference, 2 % of it before compression "
          f"(Fireworks' account; report §6.2: a few GB), is {0.02 * published / 1e9:.0f} GB\n"
          f"peaks: NVIDIA's data sheets; reached: {chip.linear:.0%} of FP8 in matrix products (DeepSeek-V3 "
          f"on GB300, Megatron-Bridge's table), {chip.attention:.0%} of bf16 in attention (ours)\n")
    return dict(gpu=gpu, gpus=gpus, parameters=whole, active_parameters=n["active"],
                max_local_share=share, fits=fits, tokens_per_s=round(rates["pretrain"]),
                tokens_per_s_long=round(rates["long"]))


# ---------------------------------------------------------------------------------------------- a run's state


class Memory(threading.Thread):
    """Watches the memory of this process and its children: peak of Σ proportional set sizes, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            time.sleep(1.0)

    @staticmethod
    def now() -> int:
        """Σ PSS over the process tree; shared pages count once. 0 where /proc does not tell."""
        parents, total = {}, 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
        family = {os.getpid()}
        while grown := {p for p, parent in parents.items() if parent in family} - family:
            family |= grown
        for pid in family:
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
            except (OSError, StopIteration):
                continue
        return total


class Damaged(Exception):
    """A checkpoint that must not be used: what is wrong with it, in one line."""


def contents(modules: nn.Module, optimizer: torch.optim.Optimizer | None, master: nn.Module | None) -> dict:
    """What a checkpoint holds, flat: weights by name; moments by the name of their weight, as DTensors, so
    that any number of ranks can read what any other wrote. Nothing in it belongs to one rank: random numbers
    are functions of (seed, sample), data is a cursor."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    state = dict(modules.state_dict())
    if master is not None:
        state |= {f"master.{k}": v for k, v in master.state_dict().items()}
    if optimizer is not None:
        # Makes the moments of a fresh optimizer first: an empty state would load as nothing, with no error.
        moments = get_optimizer_state_dict(modules if master is None else master, optimizer,
                                           options=StateDictOptions(flatten_optimizer_state_dict=True))
        state |= {f"optimizer.{k}": v for k, v in moments.items()}
    return state


def crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as f:
        while block := f.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def save(folder: Path, state: dict, plain: dict, world: World | None) -> Callable[[], None]:
    """Begin a checkpoint (torch.distributed.checkpoint), whole or not at all, over one of the same name.

    When this returns, the state has been copied and may change. What it returns ends the writing, in a thread of
    the caller's choice: every rank writes its part into a new folder; rank 0 adds COMPLETE with sizes, checksums
    and the plain values, and renames. A crash before that leaves the old one, and a `.part` that the next writer
    removes. The collectives of writing have a group of their own: training goes on beside them.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    alone, part = world is None or world.size == 1, folder.with_name(folder.name + ".part")
    rank, group = (0, None) if world is None else (world.rank, world.saving)
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    if not alone:
        dist.barrier(group)
    writing = dcp.async_save(state, checkpoint_id=part, process_group=group, no_dist=alone)
    plain = json.loads(json.dumps(plain))  # a copy: a list in it may grow from now on

    def finish() -> None:
        try:
            writing.result()
        except CheckpointException as error:  # a BaseException, with all ranks' tracebacks for its text
            at, (cause, _) = next(iter(error.failures.items()))
            raise RuntimeError(f"{folder} could not be written: rank {at}: {cause}; the one before is kept") from cause
        mine = {p.name: (p.stat().st_size, crc(p)) for p in part.glob(f"__{rank}_*")}
        sums = [mine] if alone else [None] * world.size
        if not alone:
            dist.all_gather_object(sums, mine, group)
        if rank == 0:
            note = dict(plain=plain, ranks=len(sums), files={k: v for s in sums for k, v in s.items()})
            (part / "COMPLETE").write_text(json.dumps(note))
            shutil.rmtree(folder.with_name(folder.name + ".old"), ignore_errors=True)
            if folder.exists():
                os.replace(folder, folder.with_name(folder.name + ".old"))
            os.replace(part, folder)
            shutil.rmtree(folder.with_name(folder.name + ".old"), ignore_errors=True)
        if not alone:
            dist.barrier(group)

    return finish


def restore(folder: Path, modules: nn.Module, optimizer: torch.optim.Optimizer | None,
            master: nn.Module | None, world: World | None) -> dict:
    """Read a checkpoint in place, whatever number of ranks wrote it; its plain values. Raises `Damaged`."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    alone = world is None or world.size == 1
    note = json.loads((folder / "COMPLETE").read_text())
    # The library has no checksums: a flipped bit would pass. Ranks share the reading.
    mine = list(note["files"].items())[0 if alone else world.rank::1 if alone else world.size]
    bad = [name for name, (size, check) in mine if not (folder / name).exists()
           or (folder / name).stat().st_size != size or crc(folder / name) != check]
    if (bad if alone else world.total(len(bad))):
        raise Damaged(f"{folder} is damaged ({', '.join(bad) or 'seen by another rank'}): it is not used")
    state = contents(modules, optimizer, master)
    known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    # Nor does it mind entries that nobody asks for, or another dtype, which it casts.
    wrong = [k for k, v in state.items() if k not in known or isinstance(v, torch.Tensor) and
             (known[k].size != v.shape or known[k].properties.dtype != v.dtype)]
    left = [k for k in known if k not in state
            and (optimizer is not None or not k.startswith(("optimizer", "master")))]
    if wrong or left:
        raise Damaged(f"{folder} is of another model: {len(wrong)} entries differ {wrong[:3]}, "
                      f"{len(left)} have no place {left[:3]}")
    dcp.load(state, checkpoint_id=folder, no_dist=alone)
    if optimizer is not None:
        moments = {k.removeprefix("optimizer."): v for k, v in state.items() if k.startswith("optimizer.")}
        set_optimizer_state_dict(modules if master is None else master, optimizer, moments,
                                 options=StateDictOptions(flatten_optimizer_state_dict=True))
    return note["plain"]


class Run:
    """A run's folder and everything that stages share: configuration, model, protocol, log, checkpoints."""

    def __init__(self, config: Config, out: Path, size: str, world: World | None = None, device: str = "cpu"):
        self.config, self.out, self.size, self.began = config, out, size, time.perf_counter()
        self.world, self.chief = world, world is None or world.rank == 0  # the chief writes logs and run.json
        self.state: dict = dict(size=size, config=dataclasses.asdict(config), done=[], results={}, wall_s=0.0)
        self.protocol = Protocol(pretrain.Bytes())
        with torch.device(device):
            self.model = moe.Transformer(config.model)
        self.layers = mtp.MTP(config.model, config.n_mtp)
        self.layers.reset_parameters(config.seed + 1)
        if device != "meta":
            self.model.reset_parameters(config.seed)
        self.memory = Memory()
        self.writer = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future | None = None  # the checkpoint under way

    @property
    def results(self) -> dict:
        return self.state["results"]

    def work_on(self, cp: int) -> None:
        """From now on rows are spread over `cp` ranks."""
        if self.world is not None:
            for module in (self.model, self.layers):
                moe.parallelise(module, self.world.parallel(cp))

    def save(self) -> None:
        """run.json, whole or not at all."""
        if not self.chief:
            return
        part = self.out / "run.json.part"
        part.write_text(json.dumps(self.state, indent=1))
        os.replace(part, self.out / "run.json")

    def log(self, stage: str, step: int, **values: object) -> None:
        if not self.chief:
            return
        keep = {k: v for k, v in values.items() if k != "sample_ids"}
        wall_s = round(time.perf_counter() - self.began, 2)
        line = json.dumps(dict(stage=stage, step=step, wall_s=wall_s, **keep))
        with open(self.out / "metrics.jsonl", "a") as f:
            f.write(line + "\n")

    def say(self, text: str) -> None:
        if self.chief:
            print(text, flush=True)

    def has(self, name: str) -> bool:
        self.settle()
        return (self.out / "checkpoints" / name / "COMPLETE").exists()

    def modules(self) -> nn.ModuleDict:
        """Model and MTP layers under the names that they have in checkpoints, their weights sharded."""
        for module in (self.model, self.layers):
            if hasattr(module, "reshard"):
                module.reshard()  # a forward pass leaves the outermost weights gathered
        return nn.ModuleDict(dict(model=self.model, mtp=self.layers))

    def checkpoint(self, name: str, optimizer: torch.optim.Optimizer | None = None, master: nn.Module | None = None,
                   then: Callable[[], None] = lambda: None, **plain: object) -> None:
        """Weights of model and MTP layers and what a stage needs to go on; replaces the one of that name.

        The state is that of now; it is written while training goes on, one checkpoint at a time, see `settle`.
        optimizer: of these weights, or of `master`'s; then: what may be done once it is on disk, in the writer's
        thread; plain: JSON values, the same on every rank.
        """
        self.settle()
        finish = save(self.out / "checkpoints" / name, contents(self.modules(), optimizer, master), plain, self.world)
        self.writing = self.writer.submit(lambda: (finish(), then()))

    def settle(self, wait: bool = True) -> bool:
        """Is the last checkpoint on disk? wait: until it is. Raises what stopped its writer, once."""
        if self.writing is None or not (wait or self.writing.done()):
            return self.writing is None
        writing, self.writing = self.writing, None
        writing.result()
        return True

    def load(self, name: str, optimizer: torch.optim.Optimizer | None = None,
             master: nn.Module | None = None) -> dict | None:
        """Load weights and what is asked for in place; the plain values, None where there is no good one."""
        folder = self.out / "checkpoints" / name
        if not self.has(name):
            return None
        try:
            return restore(folder, self.modules(), optimizer, master, self.world)
        except Damaged as error:
            self.say(f"checkpoints: {error}")
            return None

    def alone(self, act: Callable[[Run], None]) -> None:
        """`act` on rank 0 with a whole copy of the weights, while the others wait.

        Where the model is too large for that, evaluation is another service's, see `--role evaluator`, and a
        serving engine holds the copy.
        """
        if self.world is None or self.world.size == 1:
            return act(self)
        state = {k: v.full_tensor().cpu() if hasattr(v, "full_tensor") else v.cpu()
                 for k, v in self.modules().state_dict().items()}
        if self.chief:
            copy = Run(self.config, self.out, self.size)
            copy.state = self.state
            copy.modules().load_state_dict(state)
            act(copy)
        self.state = self.world.agree(self.state, patient=True)

    def drop(self, name: str) -> None:
        if self.chief:
            shutil.rmtree(self.out / "checkpoints" / name, ignore_errors=True)


def bar(run: Run, **options: object) -> tqdm:
    """A progress bar on a terminal, of rank 0; in a log file one line every 30 seconds."""
    quiet = not sys.stderr.isatty()
    return tqdm(mininterval=30 if quiet else 0.5, maxinterval=30 if quiet else 10, dynamic_ncols=True,
                ascii=quiet, leave=True, disable=not run.chief, **options)


# -------------------------------------------------------------------------------------------- training phases


def train(run: Run, stage: str, phase: Phase, batches: Callable[[pretrain.Cursor], Iterator], modules: list,
          at: Callable[[int], None] = lambda step: None) -> None:
    """Run one phase with bar, log and checkpoints; goes on from its own checkpoint when there is one."""
    world, cp, cursor = run.world, run.world.cp(stage), pretrain.Cursor()
    run.modules()
    optimizer = pretrain.make_optimizer(modules, phase.lr, run.config.weight_decay)
    if saved := run.load(f"{stage}-part", optimizer):
        cursor = pretrain.Cursor(**saved["cursor"])
    last = time.perf_counter()
    shares = (world.share(batch, cp) for batch in batches(cursor))
    steps = pretrain.train_phase(run.model, run.layers, optimizer, phase, shares, cursor.step, world.total,
                                 world.clip)
    run.work_on(cp)
    with bar(run, total=phase.steps, initial=cursor.step, desc=stage, unit="step") as progress:
        for m in steps:
            cursor = cursor.after(m)
            run.log(stage, **m)
            at(cursor.step)
            shown = {k: f"{m[k]:.3f}" for k in ("bits", "mtp_overlap") if k in m}
            progress.set_postfix(refresh=False, **shown, tok_s=f"{m['tokens'] / m['seconds']:.0f}")
            progress.update()
            run.settle(wait=False)  # a full disk is known at the next step
            if world.total(time.perf_counter() - last > run.config.checkpoint_s):  # ranks' clocks differ
                run.checkpoint(f"{stage}-part", optimizer, cursor=dataclasses.asdict(cursor))
                last = time.perf_counter()
    run.work_on(1)


def corpus_of(run: Run) -> pretrain.Corpus:
    return pretrain.Corpus.load(run.config.data or None, pretrain.Bytes(),
                                tuple(run.config.heldout.split(",")))


def bits_per_byte(run: Run, corpus: pretrain.Corpus, when: str) -> float:
    """Held-out bits per byte now (P3), into results and log."""
    c = run.config
    run.model.eval()
    ids, n_bytes = corpus.joined(limit_bytes=c.heldout_bytes)
    bpb = pretrain.codebase_nll(run.model, ids, n_bytes, window=c.window_bpb, stride=c.window_bpb // 2)["bpb"]
    run.model.train()
    run.results.setdefault("heldout_bpb", {})[when] = round(bpb, 4)
    run.log("heldout", 0, when=when, heldout_bpb=bpb)
    run.save()
    return bpb


def stage_pretrain(run: Run) -> None:
    c, corpus = run.config, corpus_of(run)
    if not run.has("pretrain-part"):
        bits_per_byte(run, corpus, "start")

    def cut(step: int) -> None:
        if step == max(c.pretrain.steps // 2, 1):
            run.checkpoint("mid")  # the mid-run checkpoint on which the MTP layers are trained (T2)

    train(run, "pretrain", c.pretrain,
          lambda cursor: pretrain.code_batches(corpus, c.pretrain, cursor, c.seed), [run.model], cut)
    bits_per_byte(run, corpus, "pretrain")


def stage_mtp(run: Run) -> None:
    """Self-distillation on the mid-run model; then the layers join the model at the end of pretraining."""
    c, corpus = run.config, corpus_of(run)
    final = {k: v.clone() for k, v in run.modules().model.state_dict().items()}
    if not run.has("mtp-part") and run.load("mid") is None:
        run.say("mtp: no mid-run checkpoint, the layers learn on the final model")
    train(run, "mtp", c.mtp,
          lambda cursor: pretrain.code_batches(corpus, c.mtp, cursor, c.seed + 1), [run.layers])
    run.modules().model.load_state_dict(final)


def stage_long(run: Run) -> None:
    c, corpus = run.config, corpus_of(run)
    train(run, "long", c.long,
          lambda cursor: pretrain.code_batches(corpus, c.long, cursor, c.seed + 2), [run.model, run.layers])
    bits_per_byte(run, corpus, "long")


def demonstrations(run: Run, corpus: pretrain.Corpus, first: int) -> Iterator[tuple[list[int], list[int]]]:
    """Samples (ids, mask) of the SFT phase from `first` on: one segment each, families in turn, code between.

    All demonstrations are right in the first `sft_careful` of the phase, then only `sft_accuracy` of them:
    the model first learns how, and then the habits that RL is to change.
    """
    c, families = run.config, list(bench.FAMILIES)
    per_step, sample, index = c.sft.rows * c.sft.length / 95, 0, 0  # about 95 tokens a segment
    while True:
        beside = []
        if c.sft_code and index % c.sft_code == 0:
            (ids, _), *_ = corpus.row(index // c.sft_code, c.sft.length, c.seed + 3)
            beside.append((ids[:48].tolist(), [1] * len(ids[:48])))  # short: code must not outweigh the turns
        if c.sft_recall and index % c.sft_recall == 0:
            lines = 2 + index // 4 % 3
            beside.append(pretrain.recall_document(run.protocol.tokenizer, f"{c.seed}/sft/{index}", lines, 8))
        sample += len(beside)
        careful = sample < c.sft_careful * c.sft.steps * per_step
        task = bench.task(families[index % len(families)], "train", index, c.seed)
        turns = bench.demonstrate(task, run.protocol, c.window, 1.0 if careful else c.sft_accuracy, c.seed)
        rows = [*beside, *((s.ids, s.mask) for s in turns)]
        sample += len(turns)
        yield from rows[max(first - (sample - len(rows)), 0):]
        index += 1


def stage_sft(run: Run) -> None:
    c, corpus = run.config, corpus_of(run)

    def batches(cursor: pretrain.Cursor) -> Iterator:
        stream = demonstrations(run, corpus, cursor.sample)
        return pretrain.pack(stream, c.sft.length, c.sft.rows, cursor.sample)

    train(run, "sft", c.sft, batches, [run.model, run.layers])
    bits_per_byte(run, corpus, "sft")


# ------------------------------------------------------------------------------------------------ RL and eval


def world_of() -> grpo.World:
    environment = sandbox.auto()
    return grpo.World(lambda t: bench.open_workspace(environment, t), bench.grade)


def evaluate(run: Run, tasks: list, samples: int, name: str,
             summariser: Callable[[str], str] | None = None, method: str = "", version: int = 0) -> list[Rollout]:
    """Sampled rollouts of the run's model on held-out tasks; method: of joining windows (default the run's);
    version: of the weights, for the record."""
    c = run.config
    run.model.eval()
    window = replace(c.window, method=method or c.window.method)
    sampler = grpo.Sampler(run.model, run.protocol, window, world_of(), c.grpo.slots, c.grpo.temperature,
                           c.seed, summariser)
    sampler.engine.version = version
    jobs = ((t, g) for t in tasks for g in range(samples))
    done, solved = [], 0.0
    with torch.no_grad(), bar(run, total=len(tasks) * samples, desc=name, unit="rollout") as progress:
        for _, rollout in sampler.run(jobs):
            done.append(rollout)
            solved += rollout.reward
            progress.set_postfix(refresh=False, reward=f"{solved / len(done):.3f}")
            progress.update()
    sampler.close()
    run.model.train()
    return done


def scored(run: Run, name: str, version: int) -> None:
    """Evaluate on the held-out suite, keep scores in results and eval/<version>.json (I4)."""
    c = run.config
    rollouts = evaluate(run, bench.suite("heldout", c.eval_tasks, c.seed), c.eval_samples, name, version=version)
    kept = bench.keep_evaluation(run.out / "eval", version, rollouts, run.protocol, min(8, c.eval_samples))
    result = {k: v for k, v in kept.items() if k not in ("version", "harness")}
    run.results[name] = result
    run.log("eval", version, when=name, **{k: v for k, v in result.items() if k != "families"})


DEATHS = 8  # of samplers within one step: more than this is no accident


def start_sampler(run: Run, name: int) -> subprocess.Popen:
    """A sampling service as a process of its own, with a thread of its own."""
    command = [sys.executable, os.path.abspath(__file__), "--role", "sampler", "--name", str(name),
               "--out", str(run.out), "--size", run.size]
    log = open(run.out / f"sampler-{name}.log", "a")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})


class RankTrainer(grpo.Trainer):
    """`grpo.Trainer` on the ranks of a world. Every rank gets the same groups and packs the same rows, then
    takes its share of each micro-batch; each publishes its part of the weights."""

    def __init__(self, model: moe.Transformer, optimizer_of: Callable, c: grpo.GRPOConfig, out: Path,
                 world: World):
        self.world = world
        super().__init__(model, optimizer_of, c, out, world.rank, world.size)

    def collect(self, patience: float, alive: Callable[[], None]) -> tuple[list[list[Rollout]], float]:
        found = super().collect(patience, alive) if self.world.rank == 0 else None
        groups, waited = self.world.agree(found, patient=True)
        self.used = self.world.agree(self.used)
        return groups, waited

    def forget_used(self, used: list[int] | None = None) -> None:
        if self.world.rank == 0:
            super().forget_used(used)

    def share(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Everything that belongs to a predicted token moves to where it is predicted, one to the left,
        before rows are cut: afterwards the edges of the chunks would be wrong."""
        w, cp = self.world, self.world.cp("rl")
        moved = {k: batch[k].roll(-1, 1) for k in ("mask", "logp_sampled", "advantage", "owner", "version")}
        moved["mask"][:, -1] = False
        batch = {**batch, **moved, "labels": batch["ids"].roll(-1, 1)}
        return {k: w.cut(v, cp, -1 if k in ("doc", "routes") else 0).to(w.device) for k, v in batch.items()}

    def logprobs(self, batch: dict[str, torch.Tensor], replay: bool = True,
                 plausibility: float | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx = self.model.context(
            batch["positions"], doc=batch["doc"], replay=batch.get("routes") if replay else None,
            plausibility=self.c.plausibility if plausibility is None else plausibility,
            real=batch["doc"] >= 0)
        hidden, keep = self.model(batch["ids"], ctx), batch["mask"]
        logp = (self.model.lm_head(hidden[keep]).float() / self.c.temperature).log_softmax(-1)  # [n, V]
        entropy = -(logp.detach().exp() * logp.detach()).sum(-1)
        return logp.gather(1, batch["labels"][keep].unsqueeze(1)).squeeze(1), entropy, keep

    def merge(self, sums: dict, chains: torch.Tensor, gaps: dict) -> tuple[dict, torch.Tensor, dict]:
        """Σ over ranks of what they measured; every rank gets the same."""
        parts: list = [None] * self.world.size
        mine = {k: torch.cat(v).cpu() for k, v in gaps.items()}
        dist.all_gather_object(parts, (Counter(sums), chains.cpu(), mine))
        names = sorted({k for _, _, g in parts for k in g})
        total = {k: sum(s[k] for s, _, _ in parts) for k in {k for s, _, _ in parts for k in s}}
        return (Counter(total), sum(c for _, c, _ in parts),
                {k: [g[k] for _, _, g in parts if k in g] for k in names})

    def any(self, flags: torch.Tensor) -> bool:
        return self.world.total(int(flags.sum())) > 0

    def clip(self) -> float:
        return self.world.clip(self.master, self.c.clip)

    def _round(self) -> None:
        if hasattr(self.model, "reshard"):
            self.model.reshard()  # forward passes without a backward one leave the outermost weights gathered
        super()._round()

    def publish(self) -> dict[str, float]:
        state, offsets = self.world.pieces(self.model)
        return self.publisher.publish(state, self.version, offsets)


def trainer_of(run: Run) -> grpo.Trainer:
    c, world = run.config, run.world

    def optimizer_of(parameters: list) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, c.grpo.lr, c.grpo.betas, weight_decay=0.0, fused=True)

    run.modules()
    ranks = 1 if world is None else world.size
    for path in (run.out / "weights").glob("*of*") if run.chief else ():
        if path.stem.split("of")[1] != str(ranks):
            path.unlink()  # of a run on other ranks, in whose chain these would be holes
    if ranks == 1:
        return grpo.Trainer(run.model, optimizer_of, c.grpo, run.out)
    run.work_on(world.cp("rl"))
    return RankTrainer(run.model, optimizer_of, c.grpo, run.out, world)


def stage_rl(run: Run) -> None:
    """The trainer's side of RL: collect, step, publish, save. A sampler that dies is started anew (I3)."""
    c = run.config
    if not run.has("rl-part"):
        run.checkpoint("reference")  # π_ref: the model before RL
    torch.set_num_threads(1)
    trainer = trainer_of(run)
    master = nn.ParameterList(trainer.master)
    if saved := run.load("rl-part", trainer.optimizer, master):
        trainer.go_on(**saved)
    trainer.publish()
    samplers = [start_sampler(run, name) for name in range(c.samplers if run.chief else 0)]
    deaths = Counter()  # by version

    def alive() -> None:
        for name, process in enumerate(samplers):
            if process.poll() is not None:
                log = run.out / f"sampler-{name}.log"
                deaths[trainer.version] += 1
                if deaths[trainer.version] > DEATHS:
                    *_, last = log.read_text().splitlines() or [""]
                    raise RuntimeError(f"samplers ended {deaths[trainer.version]} times within one step, the last with: "
                                       f"{last} (see {log})")
                print(f"rl: sampler {name} ended with code {process.returncode} (see {log}); starting another")
                samplers[name] = start_sampler(run, name)
                time.sleep(1.0)

    try:
        rl_steps(run, trainer, alive)
    finally:
        for process in samplers:
            process.terminate()
        for process in samplers:
            process.wait()
        run.work_on(1)
        torch.set_num_threads(c.threads)


def rl_steps(run: Run, trainer: grpo.Trainer, alive: Callable[[], None]) -> None:
    c, last = run.config, time.perf_counter()
    with bar(run, total=c.grpo.steps, initial=trainer.version, desc="rl", unit="step") as progress:
        while trainer.version < c.grpo.steps:
            groups, waited = trainer.collect(600.0, alive)
            metrics = trainer.step(groups)
            metrics |= trainer.publish()
            families: dict[str, list[float]] = {}
            for g in groups:
                families.setdefault(g[0].family, []).extend(r.reward for r in g)
            run.log("rl", trainer.version, wait_s=round(waited, 3), **metrics,
                    families={f: sum(r) / len(r) for f, r in families.items()},
                    mix={f: len(r) // c.grpo.group_size for f, r in families.items()})
            progress.set_postfix(refresh=False, reward=f"{metrics['reward']:.3f}", kl=f"{metrics['kl']:.1f}",
                                 lag=f"{metrics['lag']:.1f}", entropy=f"{metrics['entropy']:.3f}",
                                 wait=f"{waited:.1f}s")
            progress.update()
            run.settle(wait=False)
            due = time.perf_counter() - last > c.checkpoint_s or trainer.version == c.grpo.steps
            if run.world.total(due):
                run.checkpoint("rl-part", trainer.optimizer, nn.ParameterList(trainer.master),
                               partial(trainer.forget_used, list(trainer.used)), **trainer.progress())
                last = time.perf_counter()
    trainer.publisher.flush()
    run.settle()


def sampler_role(out: Path, name: str) -> None:
    """Entry of a sampler process: all it needs is in the run's folder. Samplers come and go as they like."""
    run = visit(out)
    c = run.config
    reference = moe.Transformer(c.model)
    reference.load_state_dict(run.model.state_dict())
    parent = os.getppid()

    def task(family: str, index: int) -> bench.Task:
        return bench.task(family, "train", 10_000_000 + index, c.seed)

    with torch.no_grad():
        grpo.sampler_loop(run.model.eval(), reference.eval(), run.protocol, c.window, world_of(), c.grpo,
                          c.penalty, out, task, list(bench.FAMILIES), c.seed,
                          lambda: os.getppid() == parent and not over(out), name)


def visit(out: Path) -> Run:
    """The run in a folder, as a service that started on its own sees it; waits until RL has begun there."""
    torch.set_num_threads(1)
    while not (out / "checkpoints" / "reference" / "COMPLETE").exists():
        time.sleep(1.0)
    state = json.loads((out / "run.json").read_text())
    run = Run(config_from(state["config"]), out, state["size"])
    run.load("reference")
    return run


def over(out: Path) -> bool:
    """Has RL ended in this folder?"""
    return "rl" in json.loads((out / "run.json").read_text())["done"]


def evaluator_role(out: Path) -> None:
    """Entry of an evaluator (I4): the held-out suite on the newest published weights, again and again, until
    RL is over. A score belongs to the version that was loaded: training goes on, these weights stay."""
    run = visit(out)
    weights = grpo.Subscriber(out / "weights", run.model.state_dict())
    while True:
        last = over(out)  # asked before polling, so that the last version is not missed
        if (state := weights.poll()) is not None:
            run.model.load_state_dict(state)
            scored(run, f"version {weights.version}", weights.version)
            result = run.results[f"version {weights.version}"]
            run.say(f"version {weights.version}: mean {result['mean']:.3f}")
        elif last:
            return
        time.sleep(1.0)


def acceptance(run: Run) -> dict[str, float]:
    """Speculative decoding on demonstrations' prompts: share of drafts accepted, tokens per forward."""
    prompts = []
    for t in bench.suite("heldout", 1, run.config.seed):
        first, *_ = bench.demonstrate(t, run.protocol, run.config.window, 1.0)
        prompts.append(first.ids[:first.mask.index(1)])
    _, stats = mtp.speculative(run.model.eval(), run.layers.eval(), prompts, 24, stop=run.protocol.end)
    return dict(mtp_acceptance=round(stats["acceptance"], 4), tokens_per_forward=round(stats["tokens_per_forward"], 4))


def stage_eval(run: Run) -> None:
    """After RL; before_rl ran when that stage began. Controls: the summary family without its summaries."""
    c = run.config
    run.results.update(acceptance(run))
    scored(run, "after_rl", c.grpo.steps)
    pins = [bench.task("pin", "heldout", i, c.seed) for i in range(c.control_tasks)]
    scramble = str.maketrans("0123456789", "7305928164")
    controls = {"own": None, "blanked": lambda text: "", "scrambled": lambda text: text.translate(scramble)}
    control = run.results["summary_control"] = {}
    for name, f in controls.items():
        rollouts = evaluate(run, pins, c.eval_samples, f"pin, {name}", f)
        control[name] = round(bench.score(rollouts, 1)["mean"], 4)
    methods = run.results["summary_methods"] = {}  # R8: summarize.py's baselines on the same tasks
    for name in METHODS:
        rollouts = evaluate(run, pins, c.eval_samples, f"pin, {name}", method=name)
        used = zip(*(usage(r.segments) for r in rollouts))
        tokens = {k: round(sum(v) / len(rollouts), 1) for k, v in zip(("written", "read", "cached"), used)}
        windows = sum(len(r.segments) for r in rollouts) / len(rollouts)
        solved = round(bench.score(rollouts, 1)["mean"], 4)
        methods[name] = dict(solved=solved, windows=round(windows, 2), **tokens)


def before_rl(run: Run) -> None:
    if "before_rl" not in run.results:
        run.alone(lambda run: scored(run, "before_rl", 0))


RUNNERS: dict[str, Callable[[Run], None]] = dict(
    pretrain=stage_pretrain, mtp=stage_mtp, long=stage_long, sft=stage_sft,
    rl=lambda run: (before_rl(run), stage_rl(run)), eval=lambda run: run.alone(stage_eval))


# ------------------------------------------------------------------------------------------------ the program


def curve(out: Path) -> list[dict[str, float]]:
    """Held-out scores through RL (R7): one entry for every version that was evaluated, in order. Before and after RL
    always; between them where an evaluator ran beside it (`--role evaluator`)."""
    found = [json.loads(path.read_text()) for path in (out / "eval").glob("*.json")]
    return [{k: round(v, 4) for k, v in e.items() if k in ("version", "mean", "entropy") or k.startswith("best_of")}
            for e in sorted(found, key=lambda e: e["version"])]


def report(run: Run) -> dict:
    """Print the table that a newcomer reads; return the JSON summary."""
    r, times = run.results, run.results.get("stage_s", {})
    print(f"\n{'stage':10} {'time':>7}  held-out bits/byte")
    for stage in (s for s in STAGES if s in times):
        bpb = r.get("heldout_bpb", {}).get(stage)
        print(f"{stage:10} {times[stage]:6.0f}s  {f'{bpb:.3f}' if bpb else ''}")
    before, after, points = r.get("before_rl"), r.get("after_rl"), curve(run.out)
    if before and after:
        k = next(key for key in after if key.startswith("best_of"))
        print(f"\n{'held-out tasks':15} {'mean before':>11} {'after RL':>9}   "
              f"{k + ' before':>17} {'after RL':>9}")
        for f, b in [*before["families"].items(), ("all", before)]:
            a = after if f == "all" else after["families"][f]
            print(f"{f:15} {b['mean']:11.3f} {a['mean']:9.3f}   {b[k]:17.3f} {a[k]:9.3f}")
        print("".join(f"\n{n} per rollout: {before[n]:.1f} before, {after[n]:.1f} after"
                      for n in ("tokens", "turns", "calls")))
        print("pin with its own summaries {own:.3f}, blanked {blanked:.3f}, scrambled {scrambled:.3f}"
              .format(**r["summary_control"]))
        print(f"{'pin, by method':15} {'solved':>7} {'windows':>8} {'written':>8} {'read':>7} {'both':>7} "
              f"{'cached':>7}")
        for name, t in r.get("summary_methods", {}).items():  # tokens per rollout, see summarize.usage
            print(f"{name:15} {t['solved']:7.3f} {t['windows']:8.2f} {t['written']:8.1f} {t['read']:7.1f} "
                  f"{t['written'] + t['read']:7.1f} {t['cached']:7.1f}")
        if len(points) > 2:
            print(f"\n{'held-out tasks after step':25} {'mean':>7} {k:>10} {'entropy':>8}")
            for p in points:
                print(f"{p['version']:25} {p['mean']:7.3f} {p[k]:10.3f} {p['entropy']:8.3f}")
        print(f"MTP: {r['mtp_acceptance']:.3f} of drafts accepted, "
              f"{r['tokens_per_forward']:.2f} tokens per forward pass")
    keep = ("heldout_bpb", "mtp_acceptance", "tokens_per_forward", "before_rl", "after_rl", "summary_control",
            "summary_methods")
    line = dict(wall_s=round(run.state["wall_s"], 1), peak_rss_gb=round(r.get("peak_rss", 0) / 2**30, 3),
                **{k: r[k] for k in keep if k in r})
    if before and after:
        line["curve"] = points
        line["families"] = {f: dict(before=before["families"][f], after=after["families"][f])
                            for f in after["families"]}
    return line


def open_run(args: argparse.Namespace, config: Config, world: World | None = None) -> Run:
    """The run's folder: new, or an unfinished one of the same configuration with --resume (on any ranks)."""
    out = Path(args.out or f"runs/{args.size}")
    if out.exists() and not out.is_dir():
        raise Refused(f"--out {out} is a file: name a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise Refused(f"--out {out} is not writable ({error.strerror}): name another folder") from None
    run = Run(config, out, args.size, world, "meta" if args.init else "cpu")
    path = out / "run.json"
    if path.exists():
        found, asked = json.loads(path.read_text()), json.loads(json.dumps(run.state["config"]))
        if {**found["config"], "ranks": None} != {**asked, "ranks": None}:
            raise Refused(f"--out {out} holds a run of another configuration: name another folder, "
                          "or repeat that run's options")
        if not args.resume:
            finished = set(STAGES) <= set(found["done"])
            raise Refused(f"--out {out} holds a finished run: see its metrics.jsonl, or name another folder"
                          if finished else f"--out {out} holds an unfinished run: add --resume")
        run.state = {**found, "config": asked}
        for old in (out / "checkpoints").glob("*.old"):  # a writer died between its two renames
            if not old.with_suffix("").exists():
                os.replace(old, old.with_suffix(""))
    elif any(out.iterdir()):
        raise Refused(f"--out {out} is not empty and holds no run: name another folder")
    run.save()
    return run


def open_together(args: argparse.Namespace, config: Config, world: World) -> Run:
    """`open_run` by rank 0, whose word the others take; then the model: made whole from the seed and sharded,
    or sharded while it is only shapes and filled from a checkpoint, each rank reading its part."""
    run, word = None, None
    if world.rank == 0:
        try:
            run = open_run(args, config, world)
            word = run.state
        except Refused as error:
            word = str(error)
    if isinstance(word := world.agree(word), str):
        raise Refused(word)
    out = Path(args.out or f"runs/{args.size}")
    run = run or Run(config, out, args.size, world, "meta" if args.init else "cpu")
    run.state = word
    for module in (run.model, run.layers):
        world.shard(module if next(module.parameters()).is_meta else module.to(world.device))
    if args.init:
        fill(run.model, moe.Checkpoint(args.init), world)
    return run


@torch.no_grad()
def fill(model: moe.Transformer, source: moe.Checkpoint, world: World) -> None:
    """Weights of a checkpoint with public names (DeepSeek-V3, Kimi K2) into a model that is only shapes and is
    sharded already: a rank reads its experts, and of these and all else its rows. MTP starts from scratch."""
    with torch.device("meta"):
        views = dict(moe.public_views(moe.Transformer(model.config)))
    wrong = [name for name, view in views.items()
             if name not in source or tuple(source.spec(name)[0]) != tuple(view.shape)]
    if wrong:
        raise Refused(f"--init: {len(wrong)} tensors of this model are not in the checkpoint or have another "
                      f"shape there, the first are {', '.join(wrong[:3])}")
    model.to_empty(device=world.device)
    model.inverse_frequencies.copy_(moe.yarn_inverse_frequencies(model.config))
    for m in model.modules():
        if isinstance(m, moe.Router):
            m.load.zero_()
    for name, x in model.state_dict().items():
        public = name if name.startswith("lm_head.") else "model." + name
        base, _, last = public.rpartition(".")
        at, local = world.where(x), moe.local_part(x)
        if last not in ("w_gate_up", "w_down"):
            local.copy_(source[public][at[0]:at[0] + len(local)])
            continue
        a, b = at[1], at[1] + local.shape[1]
        for e, part in enumerate(local, at[0]):
            get = lambda kind: source[f"{base}.experts.{e}.{kind}_proj.weight"]
            if last == "w_down":
                part.copy_(get("down")[a:b])
            else:  # the gate's rows, then those of up
                middle = model.config.expert_dim
                part.copy_(torch.cat((get("gate")[a:b], get("up")[max(a - middle, 0):max(b - middle, 0)])))


def layout(run: Run) -> str:
    """What a person wants to know before anything runs: sizes, ranks and who holds what."""
    c, w, r = run.config, run.world, run.config.ranks
    parts = [list(module.parameters()) for module in (run.model, run.layers)]
    sizes = [sum(p.numel() for p in part) for part in parts]
    text = (f"size {run.size}, seed {c.seed}, device {w.device.type}, {c.threads} threads, "
            f"{sizes[0]:,} parameters + {sizes[1]:,} in {c.n_mtp} MTP layer(s), folder {run.out}")
    if w.size > 1:
        mine = sum(moe.local_part(p).numel() for part in parts for p in part)
        text += (f"\n{w.size} ranks ({dist.get_backend()}): dense weights over all of them, experts over ep "
                 f"{r.ep} x efsdp {w.size // r.ep}; rows over dp {w.size // r.cp} x cp {r.cp}, long rows "
                 f"over dp {w.size // r.cp_long} x cp {r.cp_long}; rank 0 holds {mine:,} parameters, "
                 f"{mine * 16 / 1e9:.2f} GB with gradient and moments; computes in {r.param_dtype}")
    return text


def execute(run: Run, stages: list[str], again: bool) -> None:
    """Run the stages that are not done; each ends with a checkpoint of its name."""
    for name in reversed(STAGES):
        if name in run.state["done"] and run.load(name):
            break
    run.memory.start()
    for stage in stages:
        if stage in run.state["done"] and not (again and stage == "eval"):
            continue
        began = time.perf_counter()
        run.say(f"── {stage}")
        RUNNERS[stage](run)
        spent = time.perf_counter() - began
        times = run.results.setdefault("stage_s", {})
        times[stage] = round(times.get(stage, 0) + spent, 1)
        run.results["peak_rss"] = max(run.results.get("peak_rss", 0), run.memory.peak)
        run.state["wall_s"] += spent
        run.checkpoint(stage)
        run.settle()
        run.state["done"] = [*dict.fromkeys([*run.state["done"], stage])]
        run.save()
        run.drop(f"{stage}-part")


def trial(config: Config, out: Path, size: str, world: World) -> Run:
    """A run of a comparison, in a folder that is made anew."""
    run = Run(config, out, size, world)
    shutil.rmtree(out, ignore_errors=True)
    (out / "checkpoints").mkdir(parents=True)
    run.save()
    return run


def heldout_reward(run: Run, n: int) -> float:
    """Mean reward on n held-out tasks of each family."""
    tasks = bench.suite("heldout", n, run.config.seed)
    return bench.score(evaluate(run, tasks, run.config.eval_samples, "held-out"), 1)["mean"]


def compare_async(args: argparse.Namespace, settings: list[str], world: World) -> dict[str, float]:
    """RL from the finished SFT checkpoint of --out, asynchronous and synchronous, three seeds: wall-clock for the
    same number of steps and the reward of held-out tasks after them (§4.1, R5)."""
    source = Path(args.out or f"runs/{args.size}")
    if not (source / "checkpoints" / "sft").exists():
        raise Refused(f"--compare-async: {source} has no checkpoint of the sft stage; run that stage first")
    rows: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for seed in range(3):
        for staleness in rows:
            config = build_config(args.size, [*settings, f"grpo.max_staleness={staleness}"], seed=seed)
            run = trial(config, source / f"async-{staleness}-{seed}", args.size, world)
            shutil.copytree(source / "checkpoints" / "sft", run.out / "checkpoints" / "sft")
            run.load("sft")
            began = time.perf_counter()
            stage_rl(run)
            wall = time.perf_counter() - began
            reward = heldout_reward(run, max(config.eval_tasks // 3, 1))
            rows[staleness].append((wall, reward))
            print(f"seed {seed}, max_staleness {staleness}: {wall:.0f} s, held-out reward {reward:.3f}", flush=True)
    (sync, reward_sync), (wall, reward) = (map(lambda x: sum(x) / 3, zip(*rows[k])) for k in (0, 1))
    return dict(wall_ratio=round(wall / sync, 3), reward_async=round(reward, 4), reward_sync=round(reward_sync, 4))


def figure2(args: argparse.Namespace, settings: list[str], world: World) -> dict:
    """Does a lower pretraining loss become a better agent (P4, Figure 2)? Three budgets n, 4 n and 16 n of phase 1,
    three seeds, then the same SFT and RL. What is finished is kept in <out>/figure2.json and not done again."""
    source = Path(args.out or "runs/figure2")
    source.mkdir(parents=True, exist_ok=True)
    ledger = source / "figure2.json"
    points = json.loads(ledger.read_text()) if ledger.exists() else {}
    for seed, share in itertools.product(range(3), (16, 4, 1)):
        if f"{share}/{seed}" in points:
            continue
        c = build_config(args.size, [*settings, "sft.mtp=off", "grpo.full_every=10"], seed=seed)
        steps = max(c.pretrain.steps // share, 1)
        c = replace(c, pretrain=replace(c.pretrain, steps=steps, warmup=min(c.pretrain.warmup, steps // 2)))
        run = trial(c, source / f"{share}-{seed}", args.size, world)
        for stage in (stage_pretrain, stage_sft, stage_rl):
            stage(run)
        reward = heldout_reward(run, c.eval_tasks)
        points[f"{share}/{seed}"] = run.results["heldout_bpb"]["pretrain"], reward
        ledger.write_text(json.dumps(points))
        print(f"1/{share} of the tokens, seed {seed}: {points[f'{share}/{seed}'][0]:.3f} bits per byte, "
              f"held-out reward {reward:.3f}", flush=True)
    return dict(points=points, rank_correlation=rank_correlation(*zip(*points.values())))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's ρ; equal values share their mean rank. None where one side is constant."""
    ranks = [[sum(b < a for b in side) + (side.count(a) - 1) / 2 for a in side] for side in (tuple(x), tuple(y))]
    if any(len(set(r)) == 1 for r in ranks):
        return None
    return round(statistics.correlation(*ranks), 3)


def blame(error: Exception, world: World) -> str:
    """One line for a crash: when, which rank, what, where in our files, in which collective.

    When a rank dies the others fail too, in the collective in which they wait for it: the first line counts.
    """
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).resolve().parent)
    ours = [f for f in frames if str(Path(f.filename).parent) == here]
    calls = [f.name for f in frames
             if "distributed" in f.filename and not f.name.startswith(("_", "wrapper"))]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}"
    if calls:
        where += (f", in the collective {calls[-1]}; it waits ranks.timeout_s = "
                  f"{world.ranks.timeout_s:g} s at most")
    text = (str(error).strip().splitlines() or [""])[0]
    return (f"{time.strftime('%H:%M:%S')} rank {world.rank} of {world.size}: {type(error).__name__}: {text} "
            f"({where})")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                epilog="Any field of the configuration can be set with --set; "
                                       "an unknown key names the nearest one.")
    p.add_argument("--size", default="toy", help="toy (two CPU cores) or full (Kimi K2.5's numbers)")
    p.add_argument("--out", help="folder of the run (default runs/<size>)")
    p.add_argument("--seed", type=int, help="seed of everything random (default 0)")
    p.add_argument("--device", help="cpu or cuda")
    p.add_argument("--stages", default=",".join(STAGES), help="stages to run, by comma (default: all)")
    p.add_argument("--resume", action="store_true", help="go on with the run in --out")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                   help="set a field, e.g. grpo.group_size=16")
    p.add_argument("--init", metavar="DIR",
                   help="start from a checkpoint with DeepSeek-V3's or Kimi K2's names")
    p.add_argument("--smoke", action="store_true",
                   help="shrink every stage to seconds: a check that everything runs")
    p.add_argument("--plan", action="store_true", help="print what fits where and how fast; trains nothing")
    p.add_argument("--gpus", type=int, default=512, help="of the plan (default 512)")
    p.add_argument("--gpu", default="b300", choices=sorted(CHIPS), help="of the plan (default b300)")
    p.add_argument("--role", default="trainer", choices=("trainer", "sampler", "evaluator"),
                   help="which service this process is; the others find their run in --out")
    p.add_argument("--name", default="0", help="of a sampler, among those of the same run")
    p.add_argument("--compare-async", action="store_true",
                   help="after a run: repeat its RL, asynchronous and synchronous, and compare time and reward")
    p.add_argument("--figure2", action="store_true",
                   help="does a lower loss after phase 1 become a better agent? nine short runs, an hour or more")
    return p


def main() -> None:
    args = parser().parse_args()
    # What torch says of a checkpoint in a single process, each time, is what is meant here.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    try:
        if args.role != "trainer":
            if not args.out:
                raise Refused(f"--role {args.role}: name the run's folder with --out")
            out = Path(args.out)
            return sampler_role(out, args.name) if args.role == "sampler" else evaluator_role(out)
        if dist.is_torchelastic_launched() and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0:
            args.resume = True  # torchrun has started everything anew after a failure
        stages = args.stages.split(",")
        for s in stages:
            if s not in STAGES:
                raise Refused(f"--stages {s}: there is no such stage; {nearest(s, list(STAGES))}")
        settings = [*(SMOKE if args.smoke else ()), *args.set]
        config = build_config(args.size, settings, seed=args.seed, device=args.device)
        if args.plan:
            return print(json.dumps(plan(config, args.gpus, args.gpu)))
        if config.device not in ("cpu", "cuda"):
            raise Refused(f"--device {config.device}: choose cpu or cuda")
        if config.device == "cuda" and not torch.cuda.is_available():
            raise Refused("--device cuda: there is none here; --size full wants hundreds of GPUs (--plan "
                          "shows what fits where), or --device cpu with numbers shrunk by --set")
        world = join(config, config.device)
        if args.compare_async:
            return print(json.dumps(compare_async(args, settings, world)))
        if args.figure2:
            return print(json.dumps(figure2(args, settings, world)))
        run = open_together(args, config, world)
    except Refused as error:
        sys.exit(f"train.py: error: {error}" if not dist.is_initialized() or dist.get_rank() == 0 else 2)
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    run.say(layout(run))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        execute(run, stages, args.resume)
    except (KeyboardInterrupt, SystemExit):
        run.say(f"\nstopped; what is finished is in {run.out}, go on with: "
                f"python train.py --size {args.size} --out {run.out} --resume")
        raise SystemExit(130) from None
    except Exception as error:
        print(blame(error, world), file=sys.stderr, flush=True)
        raise
    if run.chief:
        print(json.dumps(report(run)))
    dist.destroy_process_group()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():  # torchrun's summary then shows the first error, and whose it was
        from torch.distributed.elastic.multiprocessing.errors import record

        main = record(main)
    main()
