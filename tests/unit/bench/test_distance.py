"""What distance must cost, in closed form; the benchmark that measures it, in small."""

from __future__ import annotations

import json

import pytest

from benchmarks.distance import LAWS, Point, claims, fit_of, main
from benchmarks.distance_model import Fit, fitted
from benchmarks.drafters import point_of
from benchmarks.generations import Outcome

FAR_S = (0.0, 0.01, 0.02, 0.04, 0.08)


def fit(hit: float, kept_tokens: float = 3.0) -> Fit:
    return Fit(0.06, 0.06, 0.02, 3.0, hit, kept_tokens)


def test_every_root_guessed_makes_distance_free_and_none_makes_it_waiting() -> None:
    assert len({fit(1.0).living(rtt_s) for rtt_s in FAR_S}) == 1
    assert [fit(0.0).living(rtt_s) for rtt_s in FAR_S] == [fit(0.0).waiting(rtt_s) for rtt_s in FAR_S]
    assert fit(1.0).living(0.0) == pytest.approx(3.0 / 0.06)


def test_more_distance_never_helps_and_more_hits_never_hurt() -> None:
    for hit in (0.0, 0.5, 0.9):
        rates = [fit(hit).living(rtt_s) for rtt_s in FAR_S]
        assert rates == sorted(rates, reverse=True)
    assert fit(0.5).living(0.02) < fit(0.9).living(0.02)


def test_a_kept_tree_is_launched_where_that_promises_more_than_waiting_for_the_rest() -> None:
    small = fit(0.5, kept_tokens=2.0)  # 2 in 60 ms against 3 in 80 and the way: worth its wait below 10 ms
    assert small.living(0.0) == small.waiting(0.0)
    assert small.living(0.04) > small.waiting(0.04)
    assert small.living(0.04) == pytest.approx((0.5 * 2.0 + 0.5 * 3.0) / (0.5 * 0.06 + 0.5 * 0.12))


@pytest.mark.parametrize("hit", [0.0, 0.3, 1.0])
def test_the_constants_come_back_from_what_they_predict(hit: float) -> None:
    true = Fit(0.061, 0.06, 0.005, 3.2, hit, 3.2 if not hit else 3.0)
    found = fitted(
        plain_rate=true.plain(),
        verify_s=true.verify_s,
        waiting_rate=true.waiting(0.0),
        waiting_tokens=true.tokens,
        living_tokens=hit * true.kept_tokens + (1.0 - hit) * true.tokens,
        hit=hit,
    )
    assert found.tree_s == pytest.approx(true.tree_s)
    assert found.kept_tokens == pytest.approx(true.kept_tokens)
    assert found.living(0.02) == pytest.approx(true.living(0.02))


def points() -> list[Point]:
    """Three turns of a machine that gets slower and slower."""
    true = fit(0.8)
    ways = {"plain": lambda _: true.plain()}
    for name in LAWS:
        ways |= {f"{name} waiting": true.waiting, name: true.living}
    return [
        Point(name, ms, turn, rate(ms / 1e3) / (1 + turn), 3.0, 1.0, 0.8, 500.0)
        for turn in range(3)
        for ms in (0.0, 20.0)
        for name, rate in ways.items()
    ]


def test_claims_are_ratios_to_zero_distance_and_to_waiting_within_a_turn() -> None:
    told = claims(points(), 20.0)
    assert told["traversal of zero"].median == pytest.approx(64.0 / 68.0)
    assert told["coupled of waiting"].median == pytest.approx(100.0 / 68.0)
    assert all(value.low == pytest.approx(value.high) for value in told.values())
    assert fit_of(points(), 120.0).hit == pytest.approx(0.8)


def test_distances_without_zero_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rtts", "10"]) == 2
    assert "--rtts" in capsys.readouterr().err


def test_counts_of_a_verifier_become_shares() -> None:
    run = Outcome(10.0, 40, 40, 60)
    now = {
        "rootward_draft_wait_seconds_sum": 0.4,
        "rootward_draft_wait_seconds_count": 40.0,
        "rootward_draft_transport_seconds_sum": 0.08,
        "rootward_draft_transport_seconds_count": 40.0,
        "rootward_draft_nodes_received_total": 900.0,
        "rootward_draft_nodes_stale_total": 100.0,
        "rootward_spec_decode_num_draft_tokens_total": 500.0,
        "rootward_draft_commits_total:grown": 30.0,
        "rootward_draft_commits_total:new": 10.0,
        "rootward_draft_bytes_total": 8000.0,
    }
    point = point_of("sampled", 8, run, 4, {}, now)
    assert (point.drafter_ms, point.link_ms) == (pytest.approx(10.0), pytest.approx(2.0))
    assert (point.used, point.kept, point.wire_bytes) == (0.5, 0.75, 200.0)


@pytest.mark.long
def test_a_small_run_measures_and_draws(tmp_path) -> None:
    flags = [
        "--rtts",
        "0",
        "30",
        "--verify-ms",
        "20",
        "--draft-ms",
        "1",
        "--max-tokens",
        "30",
        "--turns",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert main(flags) == 0
    report = json.loads((tmp_path / "distance.json").read_text())
    assert len(report["points"]) == 10
    assert (tmp_path / "distance.png").stat().st_size > 10_000
