"""The worker model of the simulation: fitted exactly where it holds, and predictions that agree with what can be worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import sizing
from benchmarks.generations import Outcome
from benchmarks.rounds import point_of, table
from benchmarks.rounds_fit import Fit, Point, fitted, predicted

TRUE = Fit(
    draft_s=0.02,
    draft_crowd=0.1,
    verify_s=0.06,
    shared=1.5,
    verify_crowd=0.05,
    width=1.9,
    together=0.6,
    rows=8,
    fixed=1.0,
)

FIRST = 1e-3  # the very first round has no crowd yet


def point(sessions: int, fit: Fit = TRUE, stall_s: float = 0.0) -> Point:
    draft_s = fit.draft_s * (1 + fit.draft_crowd * (sessions - 1))
    rest_s = fit.work(sessions).verify_s
    row_s = max(1.0, min(fit.width, fit.rows / (fit.together * sessions))) * draft_s
    return Point(1, sessions, draft_s + rest_s + stall_s, draft_s, row_s, stall_s, 20.0, 2.0, 0.0)


def test_what_a_fit_says_comes_back():
    found = fitted([point(n, stall_s=0.001 * n) for n in (1, 2, 4, 8)], rows=8)
    for name in ("draft_s", "draft_crowd", "verify_s", "shared", "verify_crowd", "width", "together", "fixed"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name)), name


def test_times_that_vary_are_told_by_their_spread():
    some = [replace(p := point(n), spread=0.5 * (p.draft_s**2 + p.rest_s**2) ** 0.5 / p.round_s) for n in (1, 2, 4)]
    assert fitted(some, rows=8).fixed == pytest.approx(0.5)


@pytest.mark.parametrize("sessions", [1, 2, 4])
def test_a_round_without_queue_is_drafting_and_the_rest(sessions):
    outcome = predicted(TRUE, 1, sessions)
    assert outcome.round_s == pytest.approx(point(sessions).round_s, rel=FIRST)
    assert outcome.stall_s == pytest.approx(0.0, abs=1e-9)
    assert outcome.demand == pytest.approx(point(sessions).demand, rel=FIRST)


def test_a_second_drafter_takes_half_of_the_crowd():
    own = TRUE.draft_s * (1 + TRUE.draft_crowd)
    rest = TRUE.verify_s * TRUE.shared * (1 + 2 * TRUE.verify_crowd)
    assert predicted(TRUE, 2, 4).round_s == pytest.approx(own + rest, rel=FIRST)


def test_a_full_drafter_makes_rounds_as_fast_as_it_drafts():
    """Eight sessions draft at once, a row each; with eighty the drafter never rests: a round lasts as long as ten turns of it."""
    fit = replace(TRUE, draft_crowd=0.0, verify_crowd=0.0)
    outcome = predicted(fit, 1, 80)
    assert outcome.round_s == pytest.approx(80 / 8 * fit.draft_s, rel=0.02)
    assert outcome.stall_s == pytest.approx(outcome.round_s - fit.draft_s - fit.work(80).verify_s, rel=0.05)


def test_a_point_is_what_was_counted_between_two_looks():
    changes = {
        "rootward_round_seconds_sum": 8.0,
        "rootward_round_seconds_count": 100.0,
        "rootward_draft_stall_seconds_sum": 1.0,
        "rootward_draft_compute_seconds_sum": 2.0,
        "rootward_draft_compute_seconds_count": 100.0,
        "rootward_draft_row_seconds_total:wanted": 3.0,
    }
    found = point_of(1, 4, Outcome(20.0, 100, 100, 150, (0.07, 0.09)), changes)
    assert (found.round_s, found.draft_s, found.row_s, found.stall_s) == (0.08, 0.02, 0.03, 0.01)
    assert (found.rest_s, found.tokens) == (pytest.approx(0.05), 2.5)
    assert found.spread == pytest.approx(0.1414 / 0.8, rel=0.01)


def test_the_table_has_a_line_for_each_point_and_tells_how_far_off_unseen_ones_are():
    slower = replace(point(4), round_s=2 * point(4).round_s)
    lines = table(TRUE, [point(1), point(2)], [slower]).splitlines()
    assert "(1.00)" in lines[2]
    assert "not in the fit" in lines[4]
    assert "not in the fit" not in lines[3]
    assert "R of what the fit has not seen is off by 50%" in lines[6]
    assert "D of what the fit has not seen is off by 100%" in lines[8]


FITTED = Path(__file__).parents[3] / "benchmarks" / "results" / "2026-11-21-scaling" / "fitted" / "rounds-tables.json"


def test_a_level_reads_the_weights_and_a_full_one_computes_as_long():
    card, size = sizing.Card("round", 100e9, 50e12), 1e9
    assert sizing.level_s(card, size) == pytest.approx(0.025)
    assert sizing.rows(card, size) == pytest.approx(0.025 * 25e12 / 2e9)
    tree = sizing.Tree(levels=4, width=2.0)
    drafting = 0.1 / 0.2  # S of S + step; two rows of each session then
    assert sizing.sessions(card, size, tree, 0.1) == pytest.approx(0.7 * 312.5 / (2 * drafting))


def test_the_page_has_what_is_computed():
    page = (Path(__file__).parents[3] / "docs" / "operations" / "sizing.md").read_text(encoding="utf-8")
    assert sizing.table(sizing.measured(FITTED)) in page
