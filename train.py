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
    lag, lag_max               trainer version minus a token's version
    ess, truncated             of the importance weights: effective sample size, share at the cap
    k1_sampler, k3_sampler     divergence of trainer and sampler, per token
    mismatch_p50, mismatch_p99 |Δ log-prob| of tokens that are not stale
    entropy                    nats per sampled token
    dead_groups, dropped       groups without any difference in shaped reward; groups too stale to use
    turns, calls_per_turn, broken_calls, summaries, cut        per rollout; cut: share that ended at a limit
    wait_s                     seconds that the trainer waited for groups
    weight_bytes, weight_ratio, weight_changed                 of the published delta
    mean, best_of_8            of an evaluation: over tasks, 8 samples each

Differences from the report: every number of the toy; one machine; the MTP loss is taken on every
`mtp_every`-th step. Not here yet: torch.distributed inside a service, `--plan`, an evaluator process beside
the run, Figure 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Iterator

import torch
from tqdm import tqdm

import bench
import grpo
import moe
import mtp
import pretrain
import sandbox
from length_penalty import Penalty
from pretrain import Phase
from summarize import Protocol, Rollout, WindowConfig

STAGES = ("pretrain", "mtp", "long", "sft", "rl", "eval")


# ------------------------------------------------------------------------------------------------------ sizes


@dataclass(frozen=True)
class Config:
    """A run. Sections are the dataclasses of the files that they belong to."""

    seed: int = 0
    device: str = "cpu"
    threads: int = 2  # of this process; RL uses one here and one in the sampler
    data: str = ""  # a folder of source code; empty: the installed standard library
    heldout: str = "asyncio"  # packages held out, by comma
    heldout_bytes: int = 60_000  # how much of them is scored
    window_bpb: int = 256  # context of that score, tokens
    n_mtp: int = 1
    sft_accuracy: float = 0.3  # share of right choices in the last demonstrations
    sft_careful: float = 0.72  # share of the phase in which every demonstration is right
    sft_code: int = 12  # every n-th sample is a piece of code, so that it is not forgotten; 0: none
    weight_decay: float = 0.05
    eval_tasks: int = 24  # per family
    eval_samples: int = 8
    control_tasks: int = 16  # of the summary family, for blanked and scrambled summaries
    checkpoint_s: float = 30.0  # seconds between checkpoints inside a stage
    model: moe.Config = field(default_factory=moe.Config)
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
        sft=dict(length=224, rows=10, steps=700, lr=4e-3, warmup=20, decay=0.5, lr_end=2e-4, mtp_every=4)),
    "full": dict(device="cuda"),
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


class Run:
    """A run's folder and everything that stages share: configuration, model, protocol, log, checkpoints."""

    def __init__(self, config: Config, out: Path, size: str):
        self.config, self.out, self.size, self.began = config, out, size, time.perf_counter()
        self.state: dict = dict(size=size, config=dataclasses.asdict(config), done=[], results={}, wall_s=0.0)
        self.protocol = Protocol(pretrain.Bytes())
        self.model = moe.Transformer(config.model)
        self.layers = mtp.MTP(config.model, config.n_mtp)
        self.memory = Memory()

    @property
    def results(self) -> dict:
        return self.state["results"]

    def save(self) -> None:
        """run.json, whole or not at all."""
        part = self.out / "run.json.part"
        part.write_text(json.dumps(self.state, indent=1))
        os.replace(part, self.out / "run.json")

    def log(self, stage: str, step: int, **values: object) -> None:
        keep = {k: v for k, v in values.items() if k != "sample_ids"}
        wall_s = round(time.perf_counter() - self.began, 2)
        line = json.dumps(dict(stage=stage, step=step, wall_s=wall_s, **keep))
        with open(self.out / "metrics.jsonl", "a") as f:
            f.write(line + "\n")

    def checkpoint(self, name: str, **extra: object) -> None:
        """Weights of model and MTP layers and what a stage needs to go on; replaces the one of that name."""
        (self.out / "checkpoints").mkdir(exist_ok=True)
        grpo.write_file(self.out / "checkpoints" / f"{name}.pt",
                        dict(model=self.model.state_dict(), mtp=self.layers.state_dict(), **extra))

    def load(self, name: str) -> dict | None:
        """Load a checkpoint's weights; None where there is none or it is damaged (said in one line)."""
        path = self.out / "checkpoints" / f"{name}.pt"
        if not path.exists():
            return None
        try:
            file = grpo.read_file(path)
        except ValueError as error:
            print(f"checkpoints: {error}")
            return None
        self.model.load_state_dict(file["model"])
        self.layers.load_state_dict(file["mtp"])
        return file


def bar(iterable: Iterator | None = None, **options: object) -> tqdm:
    """A progress bar on a terminal; in a log file one line every 30 seconds."""
    quiet = not sys.stderr.isatty()
    return tqdm(iterable, mininterval=30 if quiet else 0.5, maxinterval=30 if quiet else 10,
                dynamic_ncols=True, ascii=quiet, leave=True, **options)


# -------------------------------------------------------------------------------------------- training phases


def train(run: Run, stage: str, phase: Phase, batches: Callable[[pretrain.Cursor], Iterator], modules: list,
          at: Callable[[int], None] = lambda step: None) -> None:
    """Run one phase with bar, log and checkpoints; goes on from its own checkpoint when there is one."""
    optimizer = pretrain.make_optimizer(modules, phase.lr, run.config.weight_decay)
    cursor, saved = pretrain.Cursor(), run.load(f"{stage}-part")
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        cursor = pretrain.Cursor(**saved["cursor"])
    last = time.perf_counter()
    with bar(total=phase.steps, initial=cursor.step, desc=stage, unit="step") as progress:
        for m in pretrain.train_phase(run.model, run.layers, optimizer, phase, batches(cursor), cursor.step):
            cursor = cursor.after(m)
            run.log(stage, **m)
            at(cursor.step)
            shown = {k: f"{m[k]:.3f}" for k in ("bits", "mtp_overlap") if k in m}
            progress.set_postfix(refresh=False, **shown, tok_s=f"{m['tokens'] / m['seconds']:.0f}")
            progress.update()
            if time.perf_counter() - last > run.config.checkpoint_s:
                run.checkpoint(f"{stage}-part", optimizer=optimizer.state_dict(),
                               cursor=dataclasses.asdict(cursor))
                last = time.perf_counter()


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
    return bpb


def stage_pretrain(run: Run) -> None:
    c, corpus = run.config, corpus_of(run)
    if not (run.out / "checkpoints" / "pretrain-part.pt").exists():
        run.model.reset_parameters(c.seed)
        run.layers.reset_parameters(c.seed + 1)
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
    final = {k: v.clone() for k, v in run.model.state_dict().items()}
    if not (run.out / "checkpoints" / "mtp-part.pt").exists() and run.load("mid") is None:
        print("mtp: no mid-run checkpoint, the layers learn on the final model")
    train(run, "mtp", c.mtp,
          lambda cursor: pretrain.code_batches(corpus, c.mtp, cursor, c.seed + 1), [run.layers])
    run.model.load_state_dict(final)


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
        if c.sft_code and index % c.sft_code == 0:
            if sample >= first:
                (ids, _), *_ = corpus.row(index // c.sft_code, c.sft.length, c.seed + 3)
                yield ids[:48].tolist(), [1] * len(ids[:48])  # short: code must not outweigh the turns
            sample += 1
        careful = sample < c.sft_careful * c.sft.steps * per_step
        task = bench.task(families[index % len(families)], "train", index, c.seed)
        for s in bench.demonstrate(task, run.protocol, c.window, 1.0 if careful else c.sft_accuracy, c.seed):
            if sample >= first:
                yield s.ids, s.mask
            sample += 1
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
             summariser: Callable[[str], str] | None = None) -> list[Rollout]:
    """Sampled rollouts of the run's model on held-out tasks."""
    c = run.config
    run.model.eval()
    sampler = grpo.Sampler(run.model, run.protocol, c.window, world_of(), c.grpo.slots, c.grpo.temperature,
                           c.seed, summariser)
    jobs = ((t, g) for t in tasks for g in range(samples))
    done, solved = [], 0.0
    with torch.no_grad(), bar(total=len(tasks) * samples, desc=name, unit="rollout") as progress:
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
    rollouts = evaluate(run, bench.suite("heldout", c.eval_tasks, c.seed), c.eval_samples, name)
    result = bench.score(rollouts, min(8, c.eval_samples))
    run.results[name] = result
    (run.out / "eval").mkdir(exist_ok=True)
    (run.out / "eval" / f"{version}.json").write_text(json.dumps(dict(version=version, **result), indent=1))
    run.log("eval", version, when=name, **{k: v for k, v in result.items() if k != "families"})
    shown: dict[str, Rollout] = {}
    for r in rollouts:
        if r.family not in shown or r.reward > shown[r.family].reward:
            shown[r.family] = r
    text = "\n\n".join(bench.transcript(r, run.protocol) for r in shown.values()) + "\n"
    (run.out / "eval" / f"{version}.txt").write_text(text, errors="backslashreplace")


def start_sampler(run: Run) -> subprocess.Popen:
    """The sampling service as a process of its own, with a thread of its own."""
    command = [sys.executable, os.path.abspath(__file__), "--role", "sampler", "--out", str(run.out),
               "--size", run.size]
    return subprocess.Popen(command, stdout=open(run.out / "sampler.log", "a"), stderr=subprocess.STDOUT,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})


def stage_rl(run: Run) -> None:
    """The trainer's side of RL: collect, step, publish, save. A sampler that dies is started anew (I3)."""
    c = run.config
    if not (run.out / "checkpoints" / "rl-part.pt").exists():
        run.checkpoint("reference")  # π_ref: the model before RL
    torch.set_num_threads(1)

    def optimizer_of(parameters: list) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, c.grpo.lr, c.grpo.betas, weight_decay=0.0, fused=True)

    trainer = grpo.Trainer(run.model, optimizer_of, c.grpo, run.out)
    if saved := run.load("rl-part"):
        trainer.load(saved["trainer"])
    elif list((run.out / "weights").glob("*.*")):
        for path in (run.out / "weights").glob("*.*"):
            path.unlink()  # of an attempt that never reached a checkpoint
    trainer.publish()
    process = [start_sampler(run)]

    def alive() -> None:
        if process[0].poll() is not None:
            print(f"rl: the sampler ended with code {process[0].returncode} (see {run.out / 'sampler.log'}); "
                  "starting another")
            process[0] = start_sampler(run)
            time.sleep(1.0)

    try:
        rl_steps(run, trainer, alive)
    finally:
        process[0].terminate()
        process[0].wait()
        torch.set_num_threads(c.threads)


def rl_steps(run: Run, trainer: grpo.Trainer, alive: Callable[[], None]) -> None:
    c, last = run.config, time.perf_counter()
    with bar(total=c.grpo.steps, initial=trainer.version, desc="rl", unit="step") as progress:
        while trainer.version < c.grpo.steps:
            groups, waited = trainer.collect(600.0, alive)
            metrics = trainer.step(groups)
            metrics |= trainer.publish()
            families: dict[str, list[float]] = {}
            for g in groups:
                families.setdefault(g[0].family, []).extend(r.reward for r in g)
            run.log("rl", trainer.version, wait_s=round(waited, 3), **metrics,
                    families={f: sum(r) / len(r) for f, r in families.items()})
            progress.set_postfix(refresh=False, reward=f"{metrics['reward']:.3f}", kl=f"{metrics['kl']:.1f}",
                                 lag=f"{metrics['lag']:.1f}", entropy=f"{metrics['entropy']:.3f}",
                                 wait=f"{waited:.1f}s")
            progress.update()
            if time.perf_counter() - last > c.checkpoint_s or trainer.version == c.grpo.steps:
                run.checkpoint("rl-part", trainer=trainer.state())
                trainer.forget_used()
                last = time.perf_counter()


def sampler_role(out: Path) -> None:
    """Entry of the sampler process: everything it needs is in the run's folder."""
    torch.set_num_threads(1)
    state = json.loads((out / "run.json").read_text())
    run = Run(config_from(state["config"]), out, state["size"])
    c = run.config
    run.load("reference")
    reference = moe.Transformer(c.model)
    reference.load_state_dict(run.model.state_dict())
    parent = os.getppid()

    def task(family: str, index: int) -> bench.Task:
        return bench.task(family, "train", 10_000_000 + index, c.seed)

    with torch.no_grad():
        grpo.sampler_loop(run.model.eval(), reference.eval(), run.protocol, c.window, world_of(), c.grpo,
                          c.penalty, out, task, list(bench.FAMILIES), c.seed,
                          lambda: os.getppid() == parent)


def acceptance(run: Run) -> dict[str, float]:
    """Speculative decoding on demonstrations' prompts: share of drafts accepted, tokens per forward."""
    accepted, per_forward = [], []
    for t in bench.suite("heldout", 1, run.config.seed):
        prompt = bench.demonstrate(t, run.protocol, run.config.window, 1.0)[0]
        first = prompt.mask.index(1)
        _, stats = mtp.speculative(run.model.eval(), run.layers.eval(), prompt.ids[:first], 24,
                                   stop=run.protocol.end)
        accepted.append(stats["acceptance"])
        per_forward.append(stats["tokens_per_forward"])
    n = len(accepted)
    return dict(mtp_acceptance=round(sum(accepted) / n, 4), tokens_per_forward=round(sum(per_forward) / n, 4))


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


def before_rl(run: Run) -> None:
    if "before_rl" not in run.results:
        scored(run, "before_rl", 0)


RUNNERS: dict[str, Callable[[Run], None]] = dict(
    pretrain=stage_pretrain, mtp=stage_mtp, long=stage_long, sft=stage_sft,
    rl=lambda run: (before_rl(run), stage_rl(run)), eval=stage_eval)


# ------------------------------------------------------------------------------------------------ the program


def report(run: Run) -> dict:
    """Print the table that a newcomer reads; return the JSON summary."""
    r, times = run.results, run.results.get("stage_s", {})
    print(f"\n{'stage':10} {'time':>7}  held-out bits/byte")
    for stage in (s for s in STAGES if s in times):
        bpb = r.get("heldout_bpb", {}).get(stage)
        print(f"{stage:10} {times[stage]:6.0f}s  {f'{bpb:.3f}' if bpb else ''}")
    before, after = r.get("before_rl"), r.get("after_rl")
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
        print(f"MTP: {r['mtp_acceptance']:.3f} of drafts accepted, "
              f"{r['tokens_per_forward']:.2f} tokens per forward pass")
    keep = ("heldout_bpb", "mtp_acceptance", "tokens_per_forward", "before_rl", "after_rl", "summary_control")
    line = dict(wall_s=round(run.state["wall_s"], 1), peak_rss_gb=round(r.get("peak_rss", 0) / 2**30, 3),
                **{k: r[k] for k in keep if k in r})
    if before and after:
        line["families"] = {f: dict(before=before["families"][f], after=after["families"][f])
                            for f in after["families"]}
    return line


def open_run(args: argparse.Namespace, config: Config) -> Run:
    """The run's folder: new, or an unfinished one of the same configuration with --resume."""
    out = Path(args.out or f"runs/{args.size}")
    if out.exists() and not out.is_dir():
        raise Refused(f"--out {out} is a file: name a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise Refused(f"--out {out} is not writable ({error.strerror}): name another folder") from None
    run = Run(config, out, args.size)
    path = out / "run.json"
    if path.exists():
        found = json.loads(path.read_text())
        if found["config"] != json.loads(json.dumps(run.state["config"])):
            raise Refused(f"--out {out} holds a run of another configuration: name another folder, "
                          "or repeat that run's options")
        if not args.resume:
            finished = set(STAGES) <= set(found["done"])
            raise Refused(f"--out {out} holds a finished run: see its metrics.jsonl, or name another folder"
                          if finished else f"--out {out} holds an unfinished run: add --resume")
        run.state = found
    elif any(out.iterdir()):
        raise Refused(f"--out {out} is not empty and holds no run: name another folder")
    run.save()
    return run


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
        print(f"── {stage}", flush=True)
        RUNNERS[stage](run)
        spent = time.perf_counter() - began
        times = run.results.setdefault("stage_s", {})
        times[stage] = round(times.get(stage, 0) + spent, 1)
        run.results["peak_rss"] = max(run.results.get("peak_rss", 0), run.memory.peak)
        run.state["wall_s"] += spent
        run.checkpoint(stage)
        run.state["done"] = [*dict.fromkeys([*run.state["done"], stage])]
        run.save()
        part = run.out / "checkpoints" / f"{stage}-part.pt"
        part.unlink(missing_ok=True)


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
    p.add_argument("--smoke", action="store_true",
                   help="shrink every stage to seconds: a check that everything runs")
    p.add_argument("--role", default="trainer", choices=("trainer", "sampler"),
                   help="which service this process is")
    return p


def main() -> None:
    args = parser().parse_args()
    if args.role == "sampler":
        return sampler_role(Path(args.out))
    try:
        stages = args.stages.split(",")
        for s in stages:
            if s not in STAGES:
                raise Refused(f"--stages {s}: there is no such stage; {nearest(s, list(STAGES))}")
        config = build_config(args.size, [*(SMOKE if args.smoke else ()), *args.set], seed=args.seed,
                              device=args.device)
        if config.device not in ("cpu", "cuda"):
            raise Refused(f"--device {config.device}: choose cpu or cuda")
        if config.device == "cuda":
            raise Refused("--size full needs a cluster of GPUs with torchrun (about 512 of them for 1.0264T "
                          "parameters); --plan, which will show what fits where, is not there yet"
                          if args.size == "full" else
                          "--device cuda: the stages run on the CPU so far; leave --device out")
        run = open_run(args, config)
    except Refused as error:
        sys.exit(f"train.py: error: {error}")
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (run.model, run.layers)]
    print(f"size {args.size}, seed {config.seed}, device cpu, {config.threads} threads, "
          f"{sizes[0]:,} parameters + {sizes[1]:,} in {config.n_mtp} MTP layer(s), folder {run.out}",
          flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        execute(run, stages, args.resume)
    except (KeyboardInterrupt, SystemExit):
        print(f"\nstopped; what is finished is in {run.out}, go on with: "
              f"python train.py --size {args.size} --out {run.out} --resume")
        raise SystemExit(130) from None
    print(json.dumps(report(run)))


if __name__ == "__main__":
    main()
