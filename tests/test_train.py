"""train.py: configuration, refusals, resume; and the whole program with numbers shrunk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench
import train

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"wall_s", "peak_rss_gb", "heldout_bpb", "mtp_acceptance", "before_rl", "after_rl", "families"}


def run(*args: str, timeout: float = 240) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "train.py", *args], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )


def test_set_is_nested_typed_and_survives_json() -> None:
    c = train.build_config(
        "toy",
        [
            "grpo.group_size=4",
            "model.init_std=0.5",
            'long.mix={"code": 1.0}',
            "data=x",
            "grpo.betas=[0.8, 0.9]",
        ],
        seed=3,
    )
    assert (c.grpo.group_size, c.model.init_std, c.long.mix, c.data, c.seed, c.grpo.betas) == (
        4,
        0.5,
        {"code": 1.0},
        "x",
        3,
        (0.8, 0.9),
    )
    assert train.config_from(json.loads(json.dumps(train.dataclasses.asdict(c)))) == c


@pytest.mark.parametrize(
    "bad, hint",
    [
        ("grpo.group_sise=4", "grpo.group_size"),
        ("grop.steps=4", "grpo.steps"),
        ("sead=1", "seed"),
        ("grpo=3", "grpo."),
        ("grpo.steps=many", "int"),
        ("grpo.steps=1.5", "int"),
        ("grpo.group_size=1", "group of one"),
        ("long.mix=[", "dict"),
        ("grpo.steps", "key=value"),
    ],
)
def test_a_bad_setting_is_refused_with_the_way_out(bad: str, hint: str) -> None:
    with pytest.raises(train.Refused, match=hint):
        train.build_config("toy", [bad])


def test_every_size_builds_and_toy_and_full_differ_in_numbers_only() -> None:
    toy, full = (train.build_config(s, []) for s in ("toy", "full"))
    assert type(toy) is type(full) and full.model.n_experts == 384 and toy.model.n_experts == 8
    source = (ROOT / "train.py").read_text()
    assert source.count('== "toy"') == 0, "no code may branch on the toy's name"


@pytest.mark.parametrize(
    "args, hint",
    [
        (["--size", "tiny"], "toy or full"),
        (["--stages", "pretrain,rel"], "rl"),
        (["--set", "grpo.stepps=1"], "grpo.steps"),
        (["--device", "tpu"], "cpu or cuda"),
        (["--size", "full"], "GPUs"),
    ],
)
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
            missing = [
                k for k in m if k not in glossary and k not in ("stage", "step", "families", "length_cost")
            ]
            assert not missing, missing
    used = json.loads((out / "groups" / "used.json").read_text())
    assert len(used) == len(set(used)) == 4
    assert (out / "eval" / "0.json").exists() and (out / "eval" / "2.txt").exists()
    again = run("--smoke", "--out", str(out))
    assert again.returncode != 0 and "finished" in again.stderr
