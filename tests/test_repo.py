"""The repository as a whole: file map, import arrows, imports on a bare machine, commands and demonstrations."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import train

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ARROWS = {"kl": (), "length_penalty": (), "kernels": (), "sandbox": (), "summarize": (), "moe": ("kernels",),
          "mtp": ("moe",), "pretrain": ("moe", "mtp"), "bench": ("sandbox", "summarize", "length_penalty"),
          "grpo": ("kl", "length_penalty", "summarize", "sandbox", "moe", "mtp")}
ARROWS["train"] = tuple(ARROWS)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_file_map_is_the_tree() -> None:
    listed = re.findall(r"^\| `(\w+\.py)` \|", README, re.M)
    assert (sorted(listed) == sorted(p.name for p in ROOT.glob("*.py")) == sorted(f"{name}.py"
                                                                                  for name in ARROWS))


@pytest.mark.parametrize("name", ARROWS)
def test_arrows_point_one_way(name: str) -> None:
    assert (imports(ROOT / f"{name}.py") & set(ARROWS)) - {name} <= set(ARROWS[name])


@pytest.mark.parametrize("name", ARROWS)
def test_packages_are_those_of_requirements(name: str) -> None:
    third = {m for m in imports(ROOT / f"{name}.py") if m not in sys.stdlib_module_names and m not in ARROWS}
    assert third <= {"torch", "triton", "numpy", "tqdm", "matplotlib", "tiktoken", "transformers",
                     "grouped_gemm"}


def test_leaves_run_with_what_they_may_import(tmp_path) -> None:
    """Copied away alone, a file still imports."""
    for name, needs in ARROWS.items():
        if name == "train":
            continue
        folder, closure = tmp_path / name, {name}
        folder.mkdir()
        while more := {m for n in closure for m in ARROWS[n]} - closure:
            closure |= more
        for n in closure:
            (folder / f"{n}.py").write_text((ROOT / f"{n}.py").read_text())
    code = ("import sys; sys.modules['triton'] = None\nfor name in {!r}:\n"
            "    sys.path.insert(0, {!r} + '/' + name)\n    __import__(name)\n"
            "    for m in {!r}: sys.modules.pop(m, None)\n    sys.path.pop(0)")
    names = [n for n in ARROWS if n != "train"]
    done = subprocess.run([sys.executable, "-c", code.format(names, str(tmp_path), names)],
                          capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-800:]


def test_every_command_of_the_readme_parses() -> None:
    commands = re.findall(r"(?:^|&& )python (train\.py[^\n]*?)(?:   .*)?$", README, re.M)
    assert len(commands) >= 5
    for command in commands:
        args = shlex.split(command)[1:]
        if "--help" not in args:
            parsed = train.parser().parse_args(args)
            train.build_config(parsed.size, parsed.set)


def test_no_hidden_state() -> None:
    for name in ARROWS:
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
            assert not isinstance(node, ast.Global), f"{name}.py uses global"


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ARROWS if n != "train"])
def test_demonstration_runs(name: str, tmp_path) -> None:
    done = subprocess.run([sys.executable, f"{name}.py"], cwd=ROOT, capture_output=True, text=True,
                          timeout=180)
    assert done.returncode == 0, done.stderr[-800:]
    assert len(done.stdout.splitlines()) >= 4 and any(c.isdigit() for c in done.stdout)
