"""Demand in rows: the golden cases of the recording rules, computed from two beats."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rootward.demand import Cost, DemandCollector, DrafterDemand, Reading, Signals, VerifierDemand, signals

BEAT_S = 15.0


def verifier(*, sessions=80, rounds=600, round_s=60.0, stall_s=12.0, prior=0.0, plain_s=0.0) -> Reading:
    """One interval. plain_s: so many seconds in 600 rounds without a tree."""
    base = VerifierDemand(sessions, 6000, 600.0, 120.0, prior)
    later = VerifierDemand(sessions, base.rounds + rounds, base.round_s + round_s, base.stall_s + stall_s, prior)
    later.plain_rounds, later.plain_s = (600, plain_s) if plain_s else (0, 0.0)
    return Reading(base.counters(), later.counters())


def drafter(*, wanted=48.0, ahead=900.0, growths=600) -> Reading:
    base = DrafterDemand(16, 480.0, 9000.0, 6000, 300.0)
    later = DrafterDemand(16, base.wanted_s + wanted, base.ahead_s + ahead, base.growths + growths)
    return Reading(base.counters(), later.counters())


def test_steady() -> None:
    assert signals([verifier()], [drafter()], BEAT_S) == Signals(
        pytest.approx(80), pytest.approx(0.2), 0.15, 80, Cost(pytest.approx(0.08), pytest.approx(0.08))
    )


def test_a_cold_pool_is_wanted_before_its_first_drafter() -> None:
    cold = signals([verifier(sessions=60, rounds=0, round_s=0.0, stall_s=0.0, plain_s=36.0, prior=0.08)], [], BEAT_S)
    assert (cold.demand, cold.rows, cold.stall) == (pytest.approx(80), 0.0, 0.0)


@pytest.mark.parametrize("drafters", [[], [drafter(wanted=0.0, growths=0)]])
def test_idle_is_zero(drafters) -> None:
    assert signals([verifier(sessions=0, rounds=0, round_s=0.0, stall_s=0.0)], drafters, BEAT_S).demand == 0.0


def test_what_a_round_costs_is_remembered_when_all_drafters_are_lost() -> None:
    """Rounds are plain now, and shorter: with a tree they would take what they took."""
    remembered = Cost(0.08, 0.08)
    lost = signals([verifier(rounds=0, round_s=0.0, stall_s=0.0, plain_s=36.0)], [], BEAT_S, remembered)
    assert (lost.demand, lost.cost) == (pytest.approx(80), remembered)
    slower = signals([verifier(rounds=0, round_s=0.0, stall_s=0.0, plain_s=96.0)], [], BEAT_S, remembered)
    assert slower.demand == pytest.approx(40)  # no round with a tree is shorter than a plain one


def test_sessions_without_a_place_do_not_make_rounds_look_short() -> None:
    """Half of them decode plainly, at twice the pace: the others' rounds tell what all would take."""
    assert signals([verifier(plain_s=30.0)], [drafter()], BEAT_S).demand == pytest.approx(80)


def test_unknown_is_not_zero() -> None:
    assert signals([verifier(rounds=0, round_s=0.0, stall_s=0.0)], [], BEAT_S).demand is None
    assert signals([], [], BEAT_S) == Signals()
    assert signals([verifier()], [], BEAT_S).demand is None


def test_two_verifiers_and_two_drafters_add_up() -> None:
    assert signals([verifier(), verifier()], [drafter(), drafter()], BEAT_S).demand == pytest.approx(160)


def test_accounts_are_exported_by_pool() -> None:
    registry, one, other = CollectorRegistry(), VerifierDemand(3), DrafterDemand(16)
    one.add(0.5, 0.75)  # a stall is never longer than its round
    one.add_plain(0.25)
    other.level(2, 1, 0.25)
    other.round(0.25)
    registry.register(DemandCollector(lambda: {"fast": one, "cheap": other}))
    lines = set(generate_latest(registry).decode().splitlines())
    assert {
        'rootward_speculating_sessions{pool="fast"} 3.0',
        'rootward_round_seconds_sum{pool="fast"} 0.5',
        'rootward_round_seconds_count{pool="fast"} 1.0',
        'rootward_plain_round_seconds_sum{pool="fast"} 0.25',
        'rootward_draft_stall_seconds_sum{pool="fast"} 0.5',
        'rootward_draft_prior_row_seconds{pool="fast"} 0.0',
        'rootward_draft_row_seconds_total{kind="wanted",pool="cheap"} 0.5',
        'rootward_draft_row_seconds_total{kind="ahead",pool="cheap"} 0.25',
        'rootward_drafter_rows{pool="cheap"} 16.0',
        'rootward_draft_compute_seconds_count{pool="cheap"} 1.0',
    } <= lines
