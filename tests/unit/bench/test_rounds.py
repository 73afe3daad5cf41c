"""`rootward bench rounds` and the sizing that uses its figures."""

from pathlib import Path

import pytest

from benchmarks import sizing
from benchmarks.rounds import point_of, table
from benchmarks.services import Outcome


def test_a_point_has_the_means_of_the_counted_rounds():
    changes = {
        "rootward_round_seconds_sum": 8.0,
        "rootward_round_seconds_count": 100.0,
        "rootward_draft_stall_seconds_sum": 1.0,
        "rootward_draft_compute_seconds_sum": 2.0,
        "rootward_draft_compute_seconds_count": 100.0,
        "rootward_draft_row_seconds_total:wanted": 3.0,
    }
    found = point_of(1, 4, Outcome(20.0, 100, 100, 150), changes)
    assert (found.round_s, found.draft_s, found.row_s, found.stall_s) == (0.08, 0.02, 0.03, 0.01)
    assert (found.rest_s, found.tokens) == (pytest.approx(0.05), 2.5)
    assert found.demand == pytest.approx(4 * 0.03 / 0.07)
    assert table([found]).splitlines()[2] == "| 1 | 4 | 20.0 | 20.0 | 30.0 | 50.0 | 80.0 | 10.0 | 1.7 |"


def test_a_level_takes_as_long_as_reading_the_weights():
    card, size = sizing.Card("round", 100e9, 50e12), 1e9
    assert sizing.level_s(card, size) == pytest.approx(0.025)
    assert sizing.rows(card, size) == pytest.approx(0.025 * 25e12 / 2e9)
    tree = sizing.Tree(levels=4, width=2.0)
    drafting = 0.1 / 0.2  # S of S + step; two rows of each session then
    assert sizing.sessions(card, size, tree, 0.1) == pytest.approx(0.7 * 312.5 / (2 * drafting))


def test_the_page_for_operators_has_the_computed_table():
    page = (Path(__file__).parents[3] / "docs" / "operations" / "sizing.md").read_text(encoding="utf-8")
    assert sizing.table(sizing.Tree(5.5, 3.1)) in page
