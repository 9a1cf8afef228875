"""length_penalty.py: worked values, limits, shape, refusals, and behaviours on small transcripts."""

import math

import pytest

import length_penalty as lp


@pytest.mark.parametrize(
    "x, k, q, value",
    [
        (3, 1, 0.5, 2),
        (30, 0.1, 0.5, 20),
        (math.e - 1, 1, 1, 1),
        (1, 1, 2, 0.5),
        (1e9, 1, 2, 0.999999999),
        (10, 1, 0, 10),
        (10, 1e-12, 0.5, 9.999999999975),
        (10, 1, 1 + 1e-12, 2.39789527280),
        (1e-9, 1, 0.5, 9.9999999975e-10),
        (7, 0, 0.5, 7),
    ],
)
def test_worked_values(x, k, q, value) -> None:
    assert lp.penalty(x, k, q) == pytest.approx(value, rel=1e-11)


def test_shape() -> None:
    xs = [0.1 * i for i in range(400)]
    for k, q in ((0.1, 0.8), (1, 0.3), (0.5, 1), (0.2, 2.5)):
        c = [lp.penalty(x, k, q) for x in xs]
        steps = [b - a for a, b in zip(c, c[1:])]
        assert c[0] == 0 and all(s > 0 for s in steps) and all(b < a for a, b in zip(steps, steps[1:]))
        assert lp.slope(0, k, q) == 1
        for x in (0.5, 7.0):
            assert (lp.penalty(x + 1e-6, k, q) - lp.penalty(x - 1e-6, k, q)) / 2e-6 == pytest.approx(
                lp.slope(x, k, q), rel=1e-6
            )
    assert lp.slope(7, 0.3, 0.6) == pytest.approx(0.5072043664855)
    assert lp.penalty(1e12, 0.1, 2) == pytest.approx(1 / 0.1)
    assert lp.penalty(5, 0.1, 1 - 1e-9) == pytest.approx(lp.penalty(5, 0.1, 1), rel=1e-8)


EASY = dict(thinking=400, call=150, output=3000, final=250, calls=3, turns=3)
HARD = dict(thinking=40_000, call=15_000, output=200_000, final=800, calls=180, turns=120)


def test_effort_and_why_parallel_calls_pay() -> None:
    p = lp.Penalty(lam=1.0)
    assert lp.effort(EASY, p) == pytest.approx(2.30) and lp.cost(EASY, p) == pytest.approx(2.114, abs=1e-3)
    together = {**EASY, "turns": 1}
    assert lp.cost(EASY, p) - lp.cost(together, p) == pytest.approx(0.344, abs=1e-3)
    assert lp.cost(HARD, p) == pytest.approx(35.69, abs=0.01)
    assert lp.slope(lp.effort(HARD, p), p.k, p.q) < lp.slope(lp.effort(EASY, p), p.k, p.q) / 7


def test_refusals() -> None:
    for bad in (dict(lam=-1), dict(turns=-0.1), dict(k=-1), dict(final=math.nan)):
        with pytest.raises(ValueError):
            lp.Penalty(**bad)
    with pytest.warns(UserWarning, match="convex"):
        lp.Penalty(q=-1)
    with pytest.raises(ValueError, match="-1"):
        lp.penalty(-1, 1, 0.5)
    with pytest.raises(ValueError, match="turns = -2"):
        lp.effort({**EASY, "turns": -2}, lp.Penalty())
    with pytest.raises(KeyError):
        lp.effort({}, lp.Penalty())
    with pytest.raises(ValueError, match="no rollout"):
        lp.monitor([])
    with pytest.raises(ValueError, match="unknown"):
        lp.behaviour(lp.Record(), {"charm": 1.0})


def test_each_behaviour_on_a_small_transcript() -> None:
    good = lp.Record([[("read", True), ("read", True)], [("edit", True)]], 1, 1, ["x = 1"], "done")
    bad = lp.Record([[("run", True)], [("run", False)]], 3, 1, ["# think " * 20, "y = 1"], " ")
    assert all(f(good) == 0 for f in lp.WATCHED.values())
    assert lp.open_todos(bad) == 2 and lp.terminal_share(bad) == 1 and lp.broken_share(bad) == 0.5
    assert lp.comment_share(bad) > 0.9 and lp.long_lines(bad) == 0.5 and lp.silent(bad) == 1
    weights = dict.fromkeys(lp.WATCHED, 0.1)
    assert lp.behaviour(good, weights) == 0 > lp.behaviour(bad, weights)
    seen = lp.monitor([good, bad])
    assert seen["calls_per_turn"] == 5 / 4 and seen["broken_share"] == 0.25


def test_a_deviation_would_blow_small_differences_up() -> None:
    a = lp.standardised([0.98, 0.97, 0.98, 0.95])
    assert a == pytest.approx([0.5**0.5, 0, 0.5**0.5, -(2**0.5)], abs=1e-9)
