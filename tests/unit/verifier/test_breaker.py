"""Closed, open, half-open: as a table of what happened and what is allowed then."""

from __future__ import annotations

from verifier_service.circuit_breaker import (
    FIRST_REST_S,
    LONGEST_REST_S,
    MAX_MISSES,
    MAX_OFFENCES,
    Breaker,
    CircuitState,
)


def silent(breaker: Breaker, now_s: float, times: int = MAX_MISSES) -> bool:
    return [breaker.missed(now_s, silent=True) for _ in range(times)][-1]


def test_misses_in_a_row_open_the_circuit_of_a_silent_drafter_only() -> None:
    breaker = Breaker()
    assert not any(breaker.missed(0.0, silent=False) for _ in range(10 * MAX_MISSES))
    breaker.served()
    assert not silent(breaker, 0.0, MAX_MISSES - 1)
    breaker.served()
    assert not silent(breaker, 0.0, MAX_MISSES - 1)
    assert breaker.missed(0.0, silent=True)
    assert breaker.state(0.0) is CircuitState.OPEN
    assert breaker.admits(9, 0, 0.0) == 0


def test_after_its_rest_one_session_probes_and_growth_closes_it() -> None:
    breaker = Breaker()
    silent(breaker, 0.0)
    assert breaker.state(FIRST_REST_S) is CircuitState.HALF_OPEN
    assert breaker.admits(9, 0, FIRST_REST_S) == 1
    assert breaker.admits(9, 1, FIRST_REST_S) == 0
    breaker.grew()
    assert breaker.state(FIRST_REST_S) is CircuitState.CLOSED
    assert breaker.admits(9, 1, FIRST_REST_S) == 9


def test_the_rest_doubles_until_it_serves_again() -> None:
    breaker, now_s, rests = Breaker(), 0.0, []
    silent(breaker, now_s, MAX_MISSES - 1)
    for _ in range(8):
        assert not breaker.missed(now_s, silent=False)  # the one that probes is patient while something is heard
        assert breaker.missed(now_s, silent=True)  # and is enough to know
        rests.append(breaker.until_s - now_s)
        now_s = breaker.until_s
    assert rests == [min(FIRST_REST_S * 2**i, LONGEST_REST_S) for i in range(8)]
    breaker.grew()
    breaker.served()
    silent(breaker, now_s)
    assert breaker.until_s - now_s == FIRST_REST_S


def test_malformed_frames_open_the_circuit_for_long() -> None:
    breaker = Breaker()
    assert [breaker.offended(0.0) for _ in range(MAX_OFFENCES)] == [False] * (MAX_OFFENCES - 1) + [True]
    assert breaker.until_s == LONGEST_REST_S


def test_trees_that_break_open_the_circuit_unless_a_round_has_verified_nodes_meanwhile() -> None:
    breaker = Breaker()
    for _ in range(10):
        assert not any(breaker.lost(0.0) for _ in range(MAX_OFFENCES - 1))
        breaker.grew()  # growth alone may never be used
        breaker.served()
    assert [breaker.lost(0.0) for _ in range(MAX_OFFENCES)] == [False] * (MAX_OFFENCES - 1) + [True]
    assert breaker.until_s == FIRST_REST_S
    assert breaker.lost(FIRST_REST_S)  # the one that tests it is enough
    assert breaker.until_s == FIRST_REST_S + 2 * FIRST_REST_S
