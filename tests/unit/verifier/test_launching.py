"""The launch rule as a function of values: it maximises tokens per second of the forecast, and never despairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.draft_pace import DraftPace, launch_time

TOKENS = (1.0, 1.7, 2.2, 2.5, 2.7, 2.8, 2.85, 2.9, 2.95)
seconds = st.floats(0.0, 1.0)


def until(arrived: int, since_s: float = 0.0, **changes: object) -> float:
    about = {"tokens": TOKENS, "verify_s": 0.06, "next_s": 0.024, "node_s": 0.0013}
    return launch_time(arrived, since_s, **(about | changes))  # type: ignore[arg-type]


def test_what_was_kept_is_launched_at_once_where_more_is_far_and_waited_with_where_it_is_near() -> None:
    assert until(4) == 0.0
    assert until(1) > 0.024
    assert until(4, next_s=0.001) > 0.0
    assert until(1, next_s=0.5) == 0.0


def test_a_whole_tree_is_launched_whatever_the_forecast() -> None:
    assert until(8, 0.07, next_s=0.0, node_s=0.0) == 0.07


def test_with_nothing_there_the_wait_is_the_longest_that_can_pay_whatever_the_forecast() -> None:
    assert until(0, next_s=9.0) == until(0, next_s=0.0) == pytest.approx(1.95 * 0.06)


def test_the_last_nodes_of_a_tree_are_not_waited_for_when_they_come_slowly() -> None:
    slow = {"next_s": 0.06, "node_s": 0.02}
    assert until(5, 0.04, **slow) == 0.04
    assert until(1, 0.04, **slow) > 0.04


@given(st.integers(1, 8), seconds, seconds, seconds)
def test_it_waits_exactly_if_some_later_moment_promises_more_a_second(arrived, since_s, next_s, node_s) -> None:
    due = [max(since_s, next_s) + node_s * (n - arrived - 1) for n in range(arrived + 1, 9)]
    rates = [TOKENS[n] / (t + 0.06) for n, t in zip(range(arrived + 1, 9), due, strict=True)]
    waits = max(rates, default=0.0) > TOKENS[arrived] / (since_s + 0.06)
    end_s = until(arrived, since_s, next_s=next_s, node_s=node_s)
    if not waits:
        assert end_s == since_s
    else:  # long enough for what it hopes for, and no longer than that is worth
        best_s = due[rates.index(max(rates))]
        assert best_s - 1e-9 < end_s < (since_s + 0.06) * TOKENS[8] / TOKENS[arrived] - 0.06 + 1e-9


@given(st.integers(0, 7), seconds)
def test_a_better_tree_is_waited_for_no_shorter(arrived, next_s) -> None:
    better = tuple(t + 0.1 * max(0, n - arrived) for n, t in enumerate(TOKENS))
    assert until(arrived, next_s=next_s, tokens=better) >= until(arrived, next_s=next_s)


def test_the_pace_follows_what_is_measured() -> None:
    pace = DraftPace()
    pace.on_first_growth(0.03)
    pace.on_more_growth(0.008, 4, size=16)
    assert (pace.first_s, pace.node_s(16)) == (0.03, 0.002)
    for _ in range(40):
        pace.on_first_growth(0.05)
    assert pace.first_s == pytest.approx(0.05, rel=0.01)


def test_trees_of_each_size_have_their_own_pace() -> None:
    """A level of a small tree has fewer nodes and takes as long."""
    pace = DraftPace()
    assert pace.node_s(16) == 0.0
    for _ in range(9):
        pace.on_more_growth(0.006, 4, size=16)
        pace.on_more_growth(0.006, 1, size=6)
    assert (pace.node_s(16), pace.node_s(6)) == pytest.approx((0.0015, 0.006))
    assert (pace.node_s(12), pace.node_s(7)) == pytest.approx((0.0015, 0.006))  # as trees of the nearest size
