"""length_penalty.py: worked values, limits, refusals, the choice of λ, behaviours on small transcripts."""

import math
import random
from statistics import quantiles

import pytest

import length_penalty as lp
from length_penalty import EASY, HARD, Penalty, Record

# ------------------------------------------------------------------------------------------------------- C(x)


@pytest.mark.parametrize("x, k, q, value", [
    (3, 1, 0.5, 2),
    (30, 0.1, 0.5, 20),
    (math.e - 1, 1, 1, 1),
    (1, 1, 2, 0.5),
    (1e9, 1, 2, 0.999999999),
    (10, 1, 0, 10),
    (10, 1e-12, 0.5, 9.999999999975),    # the textbook form gives 10.0000008
    (10, 1, 1 + 1e-12, 2.39789527280),   # 2.39786856
    (1e-9, 1, 0.5, 9.9999999975e-10),    # 1.00000008e-9
    (7, 0, 0.5, 7),
    (10, 1, 1, math.log(11)),            # ZeroDivisionError
])
def test_worked_values(x: float, k: float, q: float, value: float) -> None:
    assert lp.penalty(x, k, q) == pytest.approx(value, rel=1e-11)


@pytest.mark.parametrize("k, q", [(0.1, 0.8), (1, 0.3), (0.5, 1), (0.2, 2.5), (3, 1 - 1e-7)])
def test_shape(k: float, q: float) -> None:
    """Increasing, concave, through 0 with slope 1; the slope is the derivative."""
    c = [lp.penalty(0.1 * i, k, q) for i in range(400)]
    steps = [b - a for a, b in zip(c, c[1:])]
    assert c[0] == 0 and all(s > 0 for s in steps) and all(b < a for a, b in zip(steps, steps[1:]))
    assert lp.slope(0, k, q) == 1
    for x in (0.5, 7.0):
        measured = (lp.penalty(x + 1e-6, k, q) - lp.penalty(x - 1e-6, k, q)) / 2e-6
        assert measured == pytest.approx(lp.slope(x, k, q), rel=1e-6)


def test_limits() -> None:
    assert lp.slope(7, 0.3, 0.6) == pytest.approx(0.5072043664855)
    assert lp.penalty(1e12, 0.1, 2) == pytest.approx(1 / (0.1 * (2 - 1)))  # q > 1: bounded
    for x in (1e-4, 0.7, 50.0):
        at_one = lp.penalty(x, 0.1, 1)
        for eps in (1e-3, 1e-6, 1e-9, 1e-12, -1e-9):
            assert lp.penalty(x, 0.1, 1 + eps) == pytest.approx(at_one, rel=3 * abs(eps) + 1e-12)
        for eps in (1e-3, 1e-6, 1e-12, 1e-300):
            assert lp.penalty(x, 0.1, eps) == pytest.approx(x, rel=10 * eps + 1e-12)
            assert lp.penalty(x, eps, 0.5) == pytest.approx(x, rel=50 * eps + 1e-12)


def test_penalty_keeps_the_order_of_efforts() -> None:
    rng = random.Random(0)
    xs = sorted(rng.uniform(0, 1000) for _ in range(200))
    for q in (0.0, 0.8, 1.0, 3.0):
        c = [lp.penalty(x, 0.1, q) for x in xs]
        assert c == sorted(c)


# ----------------------------------------------------------------------------------------------------- effort


def test_effort_and_why_parallel_calls_pay() -> None:
    p = Penalty(lam=1.0)
    assert lp.effort(EASY, p) == pytest.approx(2.30) and lp.cost(EASY, p) == pytest.approx(2.114, abs=1e-3)
    together = {**EASY, "turns": 1}
    assert lp.effort(together, p) == pytest.approx(1.90)
    assert lp.cost(together, p) == pytest.approx(1.770, abs=1e-3)
    assert lp.cost(EASY, p) - lp.cost(together, p) == pytest.approx(0.344, abs=1e-3)


def test_easy_against_hard_at_the_margin() -> None:
    p = Penalty(lam=1.0)
    x = lp.effort(HARD, p)
    assert x == pytest.approx(137.8) and lp.cost(HARD, p) == pytest.approx(35.69, abs=0.01)
    assert lp.slope(x, p.k, p.q) == pytest.approx(0.116, abs=1e-3)
    assert lp.slope(lp.effort(EASY, p), p.k, p.q) == pytest.approx(0.847, abs=1e-3)


def test_every_counter_counts_with_its_weight() -> None:
    p, nothing = Penalty(), dict.fromkeys(lp.COUNTERS, 0)
    assert lp.effort(nothing, p) == 0 == lp.cost(nothing, p)
    for name in lp.COUNTERS:
        assert getattr(p, name) > 0
        assert lp.effort({**nothing, name: 10}, p) == pytest.approx(10 * getattr(p, name))


@pytest.mark.parametrize("bad", [dict(lam=-1), dict(turns=-0.1), dict(k=-1), dict(final=math.nan),
                                 dict(q=math.nan), dict(calls=math.inf)])
def test_bad_weights_are_refused_by_name(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Penalty(**bad)


def test_refusals() -> None:
    with pytest.warns(UserWarning, match="convex"):
        Penalty(q=-1)
    for x, k in ((-1, 1), (1, -1), (math.nan, 1), (math.inf, 1), (1, math.nan)):
        with pytest.raises(ValueError, match="0 or positive"):
            lp.penalty(x, k, 0.5)
    with pytest.raises(ValueError, match="turns = -2"):
        lp.effort({**EASY, "turns": -2}, Penalty())
    with pytest.raises(KeyError, match="thinking is missing"):
        lp.effort({}, Penalty())


# ---------------------------------------------------------------------------------------------------------- λ


def test_lambda_from_the_spread_inside_groups() -> None:
    """The bound holds in every group, with equality in the widest, whatever the groups' levels are."""
    rng, k, q = random.Random(1), 0.1, 0.8
    groups = [[base * rng.uniform(0.5, 2) for _ in range(8)] for base in (2.0, 20.0, 200.0)]
    lam = lp.largest_lam(groups, k, q, gap=1.0, share=0.25)

    def spread(group: list[float]) -> float:
        cuts = quantiles([lam * lp.penalty(x, k, q) for x in group], n=20, method="inclusive")
        return cuts[-1] - cuts[0]

    assert max(map(spread, groups)) == pytest.approx(0.25) and sum(spread(g) < 0.24 for g in groups) == 2
    assert lp.largest_lam(groups, k, q, gap=2.0) == pytest.approx(2 * lam)
    assert lp.largest_lam([[0.0, 10.0]], 0, 0) == pytest.approx(0.25 / 9)  # linear: 5 % to 95 % of 10


def test_a_long_solution_beats_a_short_failure_at_that_lambda() -> None:
    efforts = [1.0, 2.0, 4.0, 8.0]
    lam = lp.largest_lam([efforts], 0.1, 0.8)
    assert 1 - lam * lp.penalty(8.0, 0.1, 0.8) > 0 - lam * lp.penalty(1.0, 0.1, 0.8)


@pytest.mark.parametrize("groups", [[], [[2.0, 2.0, 2.0]]])
def test_no_spread_no_lambda(groups: list) -> None:
    with pytest.raises(ValueError, match="nothing to choose"):
        lp.largest_lam(groups, 0.1, 0.8)


def test_a_deviation_would_blow_small_differences_up() -> None:
    """All correct, penalties of cents: divided by σ they weigh like a solved task among failures."""
    assert lp.standardised([0.98, 0.97, 0.98, 0.95]) == pytest.approx([0.702, 0, 0.702, -1.404], abs=1e-3)
    assert lp.standardised([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3)
    assert lp.standardised([1, 1, 1]) == [0, 0, 0]


# -------------------------------------------------------------------------------------------------- behaviour

GOOD = Record([[("read", True), ("read", True)], [("edit", True)]], 1, 1, ["x = 1"], "done")
BAD = Record([[("run", True)], [("run", False)]], 3, 1, ["# think " * 20, "y = 1"], " ")


def test_each_behaviour_on_a_small_transcript() -> None:
    assert all(f(GOOD) == 0 for f in lp.WATCHED.values()) and all(f(BAD) > 0 for f in lp.WATCHED.values())
    assert lp.open_todos(BAD) == 2 and lp.terminal_share(BAD) == 1 and lp.broken_share(BAD) == 0.5
    assert lp.comment_share(BAD) > 0.9 and lp.long_lines(BAD) == 0.5 and lp.silent(BAD) == 1
    for name, f in lp.WATCHED.items():
        assert f(Record()) == (name == "silent")  # nothing was done: nothing to read, no division by 0


@pytest.mark.parametrize("line, share", [("x = 1  # why", 5 / 12), ("    # all", 1), ("a#b", 0), ("", 0)])
def test_comments_beside_code_count_too(line: str, share: float) -> None:
    assert lp.comment_share(Record(added=[line])) == pytest.approx(share)


def test_more_closed_than_opened_to_dos_earn_nothing() -> None:
    assert lp.open_todos(Record(todos_opened=1, todos_closed=5)) == 0


def test_behaviour_reward() -> None:
    weights = dict.fromkeys(lp.WATCHED, 0.1)
    assert lp.behaviour(GOOD, weights) == 0 > lp.behaviour(BAD, weights)
    assert lp.behaviour(BAD, {"open_todos": 0.25}) == -0.5 and lp.behaviour(BAD, {}) == 0
    with pytest.raises(ValueError, match="unknown behaviours .'charm'.: there are open_todos"):
        lp.behaviour(Record(), {"charm": 1.0})
    with pytest.raises(ValueError, match="silent"):
        lp.behaviour(Record(), {"silent": -1.0})


def test_monitor() -> None:
    seen = lp.monitor([GOOD, BAD])
    assert seen["calls_per_turn"] == 5 / 4 and seen["broken_share"] == 0.25 and seen["editing"] == 0.5
    line = lp.monitor_line(7, seen)
    assert all(f"{name} {value:.2f}" in line for name, value in seen.items()) and "\n" not in line
    with pytest.raises(ValueError, match="no rollout"):
        lp.monitor([])


def test_broken_calls_are_unlearnt_only_if_they_stay_in_training() -> None:
    """Dropped: with no baseline the policy is pushed to break, with a group mean nothing discourages it."""
    assert lp.broken_gradient(dropped=True, baseline=False) == pytest.approx(0.5 * 0.5 * -0.4)
    assert lp.broken_gradient(dropped=True, baseline=True) == pytest.approx(0, abs=1e-12)
    # kept: (G − 1)/G · π (1 − π) · (E[r | try] − r(break)), as for any group mean
    assert lp.broken_gradient(dropped=False, baseline=True) == pytest.approx(3 / 4 * 0.25 * (-0.4 + 1))
