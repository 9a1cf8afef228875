"""train.py: configuration, refusals, resume; and the whole program with numbers shrunk."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import bench
import train
from summarize import Rollout, Segment

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"wall_s", "peak_rss_gb", "heldout_bpb", "mtp_acceptance", "before_rl", "after_rl", "families"}


def run(*args: str, timeout: float = 240) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "train.py", *args], cwd=ROOT, capture_output=True, text=True,
                          timeout=timeout)


def test_set_is_nested_typed_and_survives_json() -> None:
    c = train.build_config("toy",
                           ["grpo.group_size=4", "model.init_std=0.5", 'long.mix={"code": 1.0}', "data=x",
                            "grpo.betas=[0.8, 0.9]"], seed=3)
    assert (c.grpo.group_size, c.model.init_std, c.long.mix, c.data, c.seed, c.grpo.betas) == (4, 0.5,
                                                                                               {"code": 1.0},
                                                                                               "x", 3,
                                                                                               (0.8, 0.9))
    assert train.config_from(json.loads(json.dumps(train.dataclasses.asdict(c)))) == c


@pytest.mark.parametrize("bad, hint",
                         [("grpo.group_sise=4", "grpo.group_size"), ("grop.steps=4", "grpo.steps"),
                          ("sead=1", "seed"), ("grpo=3", "grpo."), ("grpo.steps=many", "int"),
                          ("grpo.steps=1.5", "int"), ("grpo.group_size=1", "group of one"),
                          ("long.mix=[", "dict"), ("grpo.steps", "key=value")])
def test_a_bad_setting_is_refused_with_the_way_out(bad: str, hint: str) -> None:
    with pytest.raises(train.Refused, match=hint):
        train.build_config("toy", [bad])


def test_every_size_builds_and_toy_and_full_differ_in_numbers_only() -> None:
    toy, full = (train.build_config(s, []) for s in ("toy", "full"))
    assert type(toy) is type(full) and full.model.n_experts == 384 and toy.model.n_experts == 8
    source = (ROOT / "train.py").read_text()
    assert source.count('== "toy"') == 0, "no code may branch on the toy's name"


@pytest.mark.parametrize("args, hint",
                         [(["--size", "tiny"], "toy or full"), (["--stages", "pretrain,rel"], "rl"),
                          (["--set", "grpo.stepps=1"], "grpo.steps"), (["--device", "tpu"], "cpu or cuda"),
                          (["--size", "full"], "GPUs")])
def test_bad_input_is_one_line_and_makes_nothing(args: list[str], hint: str, tmp_path) -> None:
    done = run(*args, "--out", str(tmp_path / "run"))
    assert done.returncode != 0 and hint in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_out_that_is_a_file_or_foreign_or_another_run_is_refused(tmp_path) -> None:
    args = train.parser().parse_args(["--out", str(tmp_path / "run")])
    config = train.build_config("toy", [])
    (tmp_path / "run").write_text("mine")
    with pytest.raises(train.Refused, match="is a file"):
        train.open_run(args, config)
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(train.Refused, match="no run"):
        train.open_run(args, config)
    (tmp_path / "run" / "thesis.txt").unlink()
    train.open_run(args, config)
    with pytest.raises(train.Refused, match="--resume"):
        train.open_run(args, config)
    args.resume = True
    assert train.open_run(args, config).state["done"] == []
    with pytest.raises(train.Refused, match="another configuration"):
        train.open_run(args, train.build_config("toy", ["grpo.steps=3"]))
    args.resume = False
    run_ = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps({**run_, "done": list(train.STAGES)}))
    with pytest.raises(train.Refused, match="finished"):
        train.open_run(args, config)


def test_demonstrations_resume_where_they_stopped_and_get_careless(tmp_path) -> None:
    args = train.parser().parse_args(["--out", str(tmp_path / "run")])
    r = train.open_run(args, train.build_config("toy", ["sft.steps=60"]))
    corpus = train.corpus_of(r)
    stream = train.demonstrations(r, corpus, 0)
    rows = [next(stream) for _ in range(200)]
    again = train.demonstrations(r, corpus, 150)
    assert [next(again) for _ in range(50)] == rows[150:]
    assert all(len(ids) <= r.config.sft.length for ids, _ in rows)


def test_nothing_is_reported_without_its_stage(tmp_path, capsys) -> None:
    args = train.parser().parse_args(["--out", str(tmp_path / "run")])
    line = train.report(train.open_run(args, train.build_config("toy", [])))
    assert "after_rl" not in line and "families" not in line


@pytest.mark.slow
def test_the_whole_program_shrunk(tmp_path) -> None:
    out = tmp_path / "run"
    first = run("--smoke", "--out", str(out), "--stages", "pretrain,mtp,long,sft")
    assert first.returncode == 0, first.stderr
    rest = run("--smoke", "--out", str(out), "--resume")
    assert rest.returncode == 0, rest.stderr
    line = json.loads(rest.stdout.strip().splitlines()[-1])
    assert KEYS <= set(line) and set(line["families"]) == set(bench.FAMILIES)
    assert {"start", "pretrain", "long", "sft"} <= set(line["heldout_bpb"]) and line["heldout_bpb"][
        "pretrain"
    ] < line["heldout_bpb"]["start"]
    logged = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [m["step"] for m in logged if m["stage"] == "rl"]
    assert steps == [1, 2] and {m["stage"] for m in logged} >= set(train.STAGES)
    glossary = train.__doc__
    for m in logged:
        if m["stage"] == "rl":
            missing = [k for k in m if k.split("_p")[0] not in glossary and k not in ("stage", "step",
                                                                                      "families",
                                                                                      "length_cost")]
            assert not missing, missing
    used = json.loads((out / "groups" / "used.json").read_text())
    assert len(used) == len(set(used)) == 4
    assert (out / "eval" / "0.json").exists() and (out / "eval" / "2.txt").exists()
    assert [p["version"] for p in line["curve"]] == [0, 2] and all(0 < p["entropy"] < 6 for p in line["curve"])
    watched = run("--role", "evaluator", "--out", str(out))  # RL is over: it scores the last version and ends
    assert watched.returncode == 0 and watched.stdout.strip().splitlines()[-1].startswith("version 2: mean")
    again = run("--smoke", "--out", str(out))
    assert again.returncode != 0 and "finished" in again.stderr


# ---------------------------------------------------------------------------------------------------------------- ranks

SHRUNK = """model.vocab_size=272 model.dim=64 model.n_layers=3 model.n_heads=2 model.ffn_dim=96 model.expert_dim=32
model.n_experts=8 model.n_experts_per_tok=2 model.q_lora_rank=32 model.kv_lora_rank=32 model.route_scale=1.0
model.init_std=0 model.precision=native model.dispatch=native model.rope_original_len=64 ranks.param_dtype=fp32 threads=1
heldout_bytes=400 pretrain.length=37 pretrain.rows=5 pretrain.steps=3 pretrain.lr=1e-3 mtp.length=40 mtp.rows=3
mtp.steps=2 mtp.lr=1e-3 long.length=90 long.rows=2 long.steps=3 long.lr=1e-3 sft.length=150 sft.rows=3 sft.steps=2
sft.lr=1e-3""".split()
LAYOUTS = {1: dict(ep=1, cp=1, cp_long=1), 2: dict(ep=2, cp=1, cp_long=2), 4: dict(ep=2, cp=2, cp_long=4)}


class Job(NamedTuple):
    """A run in its own folder under one launch's process group."""

    name: str
    start: str = ""  # a folder to go on from
    stop: int = -1  # step of the phase `long` after which the run dies; -1: never
    ranks: dict = {}  # another layout than LAYOUTS'


JOBS = {4: [Job("four"), Job("cut", stop=1), Job("again", "cut")],
        2: [Job("two"), Job("two_on", "cut", ranks=dict(ep=1))], 1: [Job("one"), Job("one_on", "cut")]}


def do(job: Job, n: int, folder: Path) -> None:
    out = folder / job.name
    if job.start and (not train.dist.is_initialized() or train.dist.get_rank() == 0):
        shutil.copytree(folder / job.start, out)
    layout = {**LAYOUTS[n], **job.ranks}
    c = train.build_config("full", [*SHRUNK, *(f"ranks.{k}={v}" for k, v in layout.items()), "ranks.recompute=true",
                                    "checkpoint_s=0"], device="cpu")
    args = train.parser().parse_args(["--out", str(out), "--resume"])
    run = train.open_together(args, c, train.join(c, "cpu"))
    write = run.log

    def log(stage: str, step: int, **values: object) -> None:
        write(stage, step, **values)
        if stage == "long" and step == job.stop + 1:
            raise KeyboardInterrupt  # after the checkpoint of step `stop`, before that of this one

    run.log = log if job.stop >= 0 else write
    try:
        train.execute(run, ["pretrain", "mtp", "long", "sft"], False)
    except KeyboardInterrupt:
        run.settle()
        return
    weights = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in run.modules().state_dict().items()}
    if run.chief:
        torch.save(weights, folder / f"{job.name}.pt")


def groups(c: train.Config, seed: int) -> list[list[Rollout]]:
    """Finished rollouts of random tokens, odd lengths, one or two windows each, with routes to replay."""
    rng, m = random.Random(seed), c.model

    def segment() -> Segment:
        n = rng.randint(5, 40)
        mask = [0] * 3 + [rng.randint(0, 1) for _ in range(n - 3)]
        routes = [[rng.sample(range(m.n_experts), m.n_experts_per_tok) for _ in range(m.n_moe_layers)] for _ in range(n)]
        return Segment([rng.randrange(m.vocab_size) for _ in range(n)], mask,
                       [-5.0 - rng.random() if x else 0.0 for x in mask], [0] * n, torch.tensor(routes, dtype=torch.int16))

    def rollout(task: int) -> Rollout:
        out = Rollout(f"t{task}", "new", [segment() for _ in range(rng.randint(1, 2))], "", "answered",
                      dict(turns=1, calls=0, thinking=0), rng.random())
        out.shaped_reward = out.reward
        out.extra.update(broken=0, summaries=0, kl=0.0, length_cost=0.0)
        return out

    return [[rollout(g) for _ in range(c.grpo.group_size)] for g in range(c.grpo.groups)]


def reinforce(n: int, folder: Path) -> None:
    """Three RL steps on the same groups; what was published is rebuilt from the parts of all ranks."""
    sets = ["grpo.groups=3", "grpo.group_size=2", "grpo.row=50", "grpo.micro_rows=3"]
    c = train.build_config("full", [*SHRUNK, *(f"ranks.{k}={v}" for k, v in LAYOUTS[n].items()), *sets], device="cpu")
    args = train.parser().parse_args(["--out", str(folder / f"rl{n}"), "--resume"])
    run = train.open_together(args, c, train.join(c, "cpu"))
    trainer, steps = train.trainer_of(run), []
    trainer.publish()
    for seed in range(3):
        steps.append(trainer.step(groups(c, seed)))
        trainer.publish()
    trainer.publisher.flush()
    state = run.modules().model.state_dict()
    weights = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}
    run.world.total(0.0)  # everybody has published
    if run.chief:
        reader = train.grpo.Subscriber(folder / f"rl{n}" / "weights", weights)
        rebuilt = reader.poll()
        assert reader.version == 3 and all(torch.equal(rebuilt[k].double(), v.double()) for k, v in weights.items())
        torch.save((steps, weights), folder / f"rl{n}.pt")


def in_int4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """An expert's weight as Kimi K2.5 stores it, in groups of 8 columns; the weight becomes what the file holds."""
    groups = weight.view(len(weight), -1, 8)
    scale = (groups.abs().amax(-1) / 7).log2().ceil().exp2()
    q = (groups / scale.unsqueeze(-1)).round()
    weight.copy_((q * scale.unsqueeze(-1)).flatten(1))
    words = (q.long() + 8 << torch.arange(0, 32, 4)).sum(-1).to(torch.uint32).view(torch.int32)
    return {name + "_packed": words, name + "_scale": scale.bfloat16(), name + "_shape": torch.tensor(weight.shape)}


@torch.no_grad()
def begin(n: int, folder: Path) -> None:
    """A run that starts from a checkpoint with public names has its weights, INT4 experts too, and predicts with them."""
    c = train.build_config("full", [*SHRUNK, *(f"ranks.{k}={v}" for k, v in LAYOUTS[n].items())], device="cpu")
    whole, world = train.moe.Transformer(c.model), train.join(c, "cpu")
    whole.reset_parameters(7)
    stored = {}
    for name, t in train.moe.public_views(whole):
        stored |= in_int4(name, t) if ".experts." in name else {name: t}
    assert sum(name.endswith("_packed") for name in stored) == 2 * 8 * 3  # MoE layers, experts, matrices
    if world.rank == 0:
        train.moe.save(folder / f"public{n}", stored)
    world.total(0.0)  # it is written
    args = train.parser().parse_args(["--out", str(folder / f"init{n}"), "--init", str(folder / f"public{n}")])
    run = train.open_together(args, c, world)
    want = whole.state_dict()
    for key, value in run.modules().model.state_dict().items():
        assert torch.equal(value.full_tensor() if hasattr(value, "full_tensor") else value, want[key]), key
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(run.model(tokens), whole(tokens))
    other = train.build_config("full", [*SHRUNK, "model.dim=128", *(f"ranks.{k}={v}" for k, v in LAYOUTS[n].items())],
                               device="cpu")
    args = train.parser().parse_args(["--out", str(folder / f"other{n}"), "--init", str(folder / f"public{n}")])
    with pytest.raises(train.Refused, match="another shape"):
        train.open_together(args, other, world)


def launch(rank: int, n: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if n > 1:
        train.dist.init_process_group("gloo", init_method=f"file://{folder}/store{n}", rank=rank,
                                      world_size=n, timeout=timedelta(seconds=120))
    for job in JOBS[n]:
        do(job, n, Path(folder))
    reinforce(n, Path(folder))
    begin(n, Path(folder))
    train.dist.destroy_process_group()


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Path:
    """Every run of every number of ranks, one launch each."""
    folder = tmp_path_factory.mktemp("ranks")
    for n in (4, 2, 1):
        torch.multiprocessing.spawn(launch, (n, str(folder)), n)
    return folder


def logged(folder: Path, name: str) -> dict[tuple[str, int], dict]:
    """The last line of each step."""
    lines = [json.loads(text) for text in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return {(m["stage"] + m.get("when", ""), m["step"]): m for m in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "four", "two_on", "one_on"])
def test_every_stage_on_ranks_equals_one_process(launched, name: str) -> None:
    """Odd lengths, a rank without rows, CP and EP of all sizes; and runs that change their layout on the way."""
    one, many = logged(launched, "one"), logged(launched, name)
    assert one.keys() == many.keys() and len(one) == 14
    for at, want in one.items():
        for key in {"loss", "grad_norm", "tokens", "targets", "lr", "heldout_bpb"} & want.keys():
            assert many[at][key] == pytest.approx(want[key], rel=1e-12), (at, key)
    a, b = torch.load(launched / "one.pt"), torch.load(launched / f"{name}.pt")
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert (b[key] - value).abs().max() < 1e-10, key


@pytest.mark.slow
def test_the_same_layout_resumes_exactly(launched) -> None:
    a, b = torch.load(launched / "four.pt"), torch.load(launched / "again.pt")
    assert all(torch.equal(v, b[k]) for k, v in a.items())


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_rl_on_ranks_equals_one_process(launched, n: int) -> None:
    (one, a), (many, b) = (torch.load(launched / f"rl{k}.pt") for k in (1, n))
    for want, got in zip(one, many, strict=True):
        assert got == pytest.approx(want, rel=1e-6, abs=1e-9)
    for key, value in a.items():  # rounded to bf16: a last bit may differ
        assert (b[key] - value).abs().max() <= 0.01 * value.abs().max(), key


def small_run(tmp_path: Path) -> train.Run:
    args = train.parser().parse_args(["--out", str(tmp_path / "run"), "--resume"])
    c = train.build_config("full", [*SHRUNK, *(f"ranks.{k}=1" for k in ("ep", "cp", "cp_long"))], device="cpu")
    return train.open_run(args, c, None)


def test_a_checkpoint_gives_back_weights_moments_and_plain_values_or_says_why_not(tmp_path, capsys) -> None:
    run = small_run(tmp_path)
    optimizer = train.pretrain.make_optimizer([run.model], 1e-3)
    for p in run.model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    run.checkpoint("x", optimizer, cursor=dict(step=3))
    run.settle()
    want = [p.detach().clone() for p in run.model.parameters()]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in run.model.parameters()]
    fresh = small_run(tmp_path)
    other = train.pretrain.make_optimizer([fresh.model], 1e-3)
    assert fresh.load("x", other) == dict(cursor=dict(step=3))
    assert all(map(torch.equal, fresh.model.parameters(), want))
    assert all(torch.equal(other.state[p]["exp_avg"], m) for p, m in zip(fresh.model.parameters(), moments))
    assert all(other.state[p]["step"] == 1 for p in fresh.model.parameters())
    fresh.model.double()
    assert fresh.load("x") is None and "another model" in capsys.readouterr().out
    (shard,) = (tmp_path / "run" / "checkpoints" / "x").glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert run.load("x") is None and "damaged" in capsys.readouterr().out
    run.checkpoint("y")
    run.settle()
    (tmp_path / "run" / "checkpoints" / "y" / "COMPLETE").unlink()  # a writer that died
    assert not run.has("y") and run.load("y") is None
    folder = tmp_path / "run" / "checkpoints"
    run.checkpoint("z")
    run.settle()
    (folder / "z").rename(folder / "z.old")  # one that died between its two renames
    assert small_run(tmp_path).load("z") == {}


def test_wrong_numbers_of_processes_are_refused_with_the_nearest() -> None:
    c = train.build_config("full", [], device="cpu")
    assert c.ranks.fits(512, c.model) and not c.ranks.fits(500, c.model) and not c.ranks.fits(20, c.model)
    with pytest.raises(train.Refused, match="1 processes do not fit .* 8"):
        train.join(c, "cpu")
    with pytest.raises(train.Refused, match="ranks.ep = 0"):
        train.build_config("full", ["ranks.ep=0"])
    train.dist.destroy_process_group()


def test_the_plan_counts_the_real_model(capsys) -> None:
    done = run("--size", "full", "--plan", "--gpus", "256")
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["parameters"] == 1_026_408_209_408 and line["active_parameters"] == 32_861_477_888
    assert 1 / 256 <= line["max_local_share"] <= 1.003 / 256 and line["fits"] and line["tokens_per_s"] > 0
    assert "500 processes" in run("--size", "full", "--plan", "--gpus", "500").stderr


# ------------------------------------------------------------------------------------------------ what dies comes back


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    """Until the log of `out` has an RL step of this number."""
    for _ in range(1200):
        path = out / "metrics.jsonl"
        logged = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
        if any(m["stage"] == "rl" and m["step"] >= step for m in logged):
            return
        assert process.poll() is None, "the run ended before that step"
        time.sleep(0.1)
    raise AssertionError(f"no RL step {step} within two minutes")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the sampler through /proc")
def test_killed_services_come_back_and_no_task_is_trained_twice(tmp_path) -> None:
    out = tmp_path / "run"
    options = ("--smoke", "--out", str(out), "--set", "grpo.steps=8", "--set", "checkpoint_s=0.5")
    assert run(*options, "--stages", "pretrain,mtp,long,sft").returncode == 0
    with open(tmp_path / "log", "w") as log:
        first = subprocess.Popen([sys.executable, "train.py", *options, "--resume", "--stages", "rl"],
                                 cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        evaluator = subprocess.Popen([sys.executable, "train.py", "--role", "evaluator", "--out", str(out)],
                                     cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for_step(out, 1, first)
            evaluator.kill()
            samplers = [p for p in children(first.pid) if b"sampler" in Path(f"/proc/{p}/cmdline").read_bytes()]
            os.kill(samplers[0], signal.SIGKILL)  # in the middle of its rollouts
            wait_for_step(out, 4, first)
            first.kill()  # in the middle of a step
        finally:
            evaluator.kill()
            first.kill()
            first.wait()
    assert "ended with code -9" in (tmp_path / "log").read_text()
    last = run(*options, "--resume", "--stages", "rl")
    assert last.returncode == 0, last.stderr
    used = json.loads((out / "groups" / "used.json").read_text())
    assert len(used) == len(set(used)) == 8 * 2  # the steps of the final history, no task twice
    logged = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    assert {m["step"] for m in logged if m["stage"] == "rl"} == set(range(1, 9))
    kept = {int(p.stem.split("-")[1]) for p in (out / "groups").glob("*-*.pt")}
    assert not kept & set(used)  # finished groups that were not used are still there, used ones are gone


def hold(monkeypatch, act: Callable[[], object]) -> None:
    """Call `act` in the writer's thread before anything of a checkpoint is written."""
    writer = torch.distributed.checkpoint.FileSystemWriter
    write = writer.write_data
    monkeypatch.setattr(writer, "write_data", lambda *args: (act(), write(*args))[1])


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(tmp_path, monkeypatch) -> None:
    """Training goes on while it is written: no weight, moment or list of a later step enters it."""
    run, go, done = small_run(tmp_path), threading.Event(), []
    optimizer = train.pretrain.make_optimizer([run.model], 1e-3)

    def step() -> None:
        for p in run.model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()

    step()
    want, used = [p.detach().clone() for p in run.model.parameters()], [1, 2]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in run.model.parameters()]
    hold(monkeypatch, lambda: go.wait(60))
    run.checkpoint("x", optimizer, then=lambda: done.append(True), used=used)
    step()
    used.append(3)
    assert not run.settle(wait=False) and not done and not (tmp_path / "run" / "checkpoints" / "x").exists()
    assert not any(map(torch.equal, run.model.parameters(), want))
    go.set()
    assert run.load("x", optimizer) == dict(used=[1, 2]) and done  # waits for the writer
    assert all(map(torch.equal, run.model.parameters(), want))
    assert all(torch.equal(optimizer.state[p]["exp_avg"], m) for p, m in zip(run.model.parameters(), moments))


def test_a_checkpoint_that_fails_is_said_once_and_leaves_the_last_good_one(tmp_path, monkeypatch) -> None:
    run, done = small_run(tmp_path), []
    run.checkpoint("x", at=1)
    run.settle()

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        hold(patch, full)
        run.checkpoint("x", then=lambda: done.append(True), at=2)
        with pytest.raises(RuntimeError, match="rank 0: .*No space left"):
            run.settle()
    assert not done and run.load("x") == dict(at=1)
    run.checkpoint("x", at=3)  # over what the failed one left
    assert run.load("x") == dict(at=3)


def test_samplers_that_keep_dying_stop_the_run_with_their_last_word(tmp_path, monkeypatch) -> None:
    run = small_run(tmp_path)

    def start(run: train.Run, name: int) -> subprocess.Popen:
        with open(run.out / f"sampler-{name}.log", "a") as log:
            return subprocess.Popen([sys.executable, "-c", "raise SystemExit('no luck')"], stdout=log, stderr=log)

    monkeypatch.setattr(train, "start_sampler", start)
    monkeypatch.setattr(train.time, "sleep", lambda seconds: None)
    with pytest.raises(RuntimeError, match="9 times within one step.*no luck"):
        train.stage_rl(run)


def test_a_full_disk_leaves_the_last_good_state(tmp_path, monkeypatch) -> None:
    import grpo

    path = tmp_path / "x.pt"
    grpo.write_file(path, dict(a=torch.arange(3)))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        grpo.write_file(path, dict(a=torch.arange(9)))
    assert len(grpo.read_file(path)["a"]) == 3 and list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------------------------------------------- comparisons


def test_rank_correlation_knows_order_ties_and_constants() -> None:
    assert train.rank_correlation((1, 2, 3), (10, 30, 900)) == 1 and train.rank_correlation((1, 2, 3), (3, 2, 1)) == -1
    assert train.rank_correlation((1, 2, 3), (0.0, 0.0, 0.0)) is None
    # ranks 0, 1, 2.5, 2.5 against 0, 1, 2, 3: by hand 4.5 / sqrt(4.5 · 5)
    assert train.rank_correlation((1, 2, 3, 3), (1, 2, 3, 4)) == pytest.approx(0.949)


@pytest.mark.slow
def test_asynchronous_and_synchronous_rl_are_compared(tmp_path) -> None:
    out = ("--smoke", "--out", str(tmp_path / "run"))
    refused = run(*out, "--compare-async")
    assert refused.returncode != 0 and "no checkpoint of the sft stage" in refused.stderr
    assert run(*out, "--stages", "pretrain,mtp,long,sft").returncode == 0
    compared = run(*out, "--compare-async")
    assert compared.returncode == 0, compared.stderr
    line = json.loads(compared.stdout.strip().splitlines()[-1])
    assert set(line) == {"wall_ratio", "reward_async", "reward_sync"} and line["wall_ratio"] > 0
