"""bench.py: tasks that a reference solves and nothing else does; splits that share nothing; scores by hand."""

import itertools
import random
import re

import pytest

import bench
import sandbox
from summarize import Bytes, Protocol, Turn, WindowConfig

PROTOCOL, WINDOW = Protocol(Bytes()), WindowConfig()


@pytest.mark.parametrize("family", bench.FAMILIES)
@pytest.mark.parametrize("split", ("train", "heldout"))
def test_reference_passes_and_slips_and_hacks_fail(family: str, split: str) -> None:
    for i in range(12):
        t = bench.task(family, split, i)
        assert bench.run_script(t, t.reference, PROTOCOL, WINDOW, sandbox.Memory)[0] == 1.0, t
        for slip in t.slips:
            assert bench.run_script(t, slip, PROTOCOL, WINDOW, sandbox.Memory)[0] == 0.0, (t, slip)
        for name, hack in bench.HACKS.items():
            assert bench.run_script(t, hack(t), PROTOCOL, WINDOW, sandbox.Memory)[0] == 0.0, (t, name)


def test_right_answer_does_not_pay_for_a_damaged_workspace() -> None:
    for family in ("ask", "find", "compare", "pin"):
        t = bench.task(family, "train", 3)
        with bench.open_workspace(sandbox.Memory, t) as w:
            assert bench.grade(t, w, t.answer) == 1.0
            w.call("w", ("extra", "a=1\n"))
            assert bench.grade(t, w, t.answer) == 0.0


def test_sandbox_and_memory_grade_alike() -> None:
    environment = sandbox.auto(announce=lambda text: None)
    if environment is sandbox.Memory:
        pytest.skip("no namespaces here")
    for family in bench.FAMILIES:
        t = bench.task(family, "heldout", 1)
        for s in (t.reference, *t.slips):
            assert (
                bench.run_script(t, s, PROTOCOL, WINDOW, environment)[0]
                == bench.run_script(t, s, PROTOCOL, WINDOW, sandbox.Memory)[0]
            )


def test_splits_share_no_name_no_value_no_task() -> None:
    words: dict[str, set[str]] = {"train": set(), "heldout": set()}
    prompts: dict[str, set] = {"train": set(), "heldout": set()}
    for split in words:
        for t in bench.suite(split, 40):
            text = " ".join([t.prompt, *t.files, *t.files.values(), t.expected])
            words[split] |= set(re.findall(r"\b[a-z]{4}\b|\b[0-9]{2}\b", text)) - {"more", "want"}
            prompts[split].add((t.prompt, tuple(t.files.items())))
    assert len(words["train"]) > 300 and not words["train"] & words["heldout"]
    assert len(prompts["heldout"]) == 40 * len(bench.FAMILIES) and not prompts["train"] & prompts["heldout"]


def test_tasks_are_a_function_of_their_arguments() -> None:
    assert bench.task("pin", "train", 7) == bench.task("pin", "train", 7) != bench.task("pin", "train", 8)
    assert bench.task("pin", "train", 7, seed=1) != bench.task("pin", "train", 7)


def test_start_is_not_the_goal() -> None:
    for t in bench.suite("train", 40) + bench.suite("heldout", 40):
        start = "\n".join(f"{p}:{line}" for p in sorted(t.files) for line in t.files[p].splitlines())
        assert t.answer is not None or start != t.expected, t


def test_demonstrations_are_causally_valid() -> None:
    """A summary and an answer hold only digits that some earlier observation or the prompt showed."""
    for i in range(20):
        t = bench.task("pin", "train", i)
        segments = bench.demonstrate(t, PROTOCOL, WINDOW, 1.0)
        assert len(segments) == 3
        seen = ""
        for s in segments:
            written = [b for b, m in itertools.zip_longest(s.ids, s.mask) if m]
            shown = [b for b, m in zip(s.ids, s.mask) if not m]
            seen += PROTOCOL.text(shown)
            for number in re.findall(r"[0-9]{2}", PROTOCOL.text(written)):
                assert number in seen


def test_accuracy_is_the_share_of_references() -> None:
    tasks = bench.suite("train", 40)
    right = sum(
        bench.demonstrate(t, PROTOCOL, WINDOW, 0.3) == bench.demonstrate(t, PROTOCOL, WINDOW, 1.0)
        for t in tasks
    ) / len(tasks)
    assert abs(right - 0.3) < 0.1
    assert all(
        bench.demonstrate(t, PROTOCOL, WINDOW, 0.0) != bench.demonstrate(t, PROTOCOL, WINDOW, 1.0)
        for t in tasks[:9]
    )


def test_random_policy_never_breaks_the_environment() -> None:
    """Any sampled ids are an observation, never an exception."""
    rng = random.Random(0)
    for t in bench.suite("train", 4):

        def act() -> Turn:
            ids = [
                rng.choice((*range(97, 123), *range(256, 265), 0, 61, 10, 255))
                for _ in range(rng.randrange(30))
            ]
            return PROTOCOL.parse([PROTOCOL.ids["call"], rng.choice(b"rgewxz"), *ids])

        with bench.open_workspace(sandbox.Memory, t) as w:
            chain, segments = bench.play(
                PROTOCOL, t.prompt, WINDOW, act, lambda: "note", lambda c: w.call(c.tool, c.args).text
            )
            assert bench.grade(t, w, chain.answer) == 0.0 and chain.finish
            assert all(len(s.ids) <= WINDOW.window + 1 for s in segments)


def test_best_of_k_by_hand_and_by_brute_force() -> None:
    assert bench.best_of_k([0, 0, 1, 1], 1) == 0.5
    assert bench.best_of_k([0, 0, 1, 1], 2) == pytest.approx(5 / 6)
    assert bench.best_of_k([0.1, 0.4, 0.4, 0.9], 2) == pytest.approx(0.65)
    rewards = [0.3, 0.1, 0.8, 0.8, 0.0]
    for k in range(1, 6):
        brute = [max(c) for c in itertools.combinations(rewards, k)]
        assert bench.best_of_k(rewards, k) == pytest.approx(sum(brute) / len(brute))
    with pytest.raises(ValueError, match="at least 3"):
        bench.best_of_k([1.0, 0.0], 3)


def test_no_rollout_is_an_error_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        bench.score([])
    with pytest.raises(ValueError, match="choose one of ask"):
        bench.task("asks", "train", 0)
    with pytest.raises(ValueError, match="train or heldout"):
        bench.task("ask", "test", 0)
