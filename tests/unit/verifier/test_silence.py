"""When a drafter is silent: it owes an answer, and this process was there to hear it."""

from __future__ import annotations

import time

import pytest
from support.fake_clock import FakeClock
from unit.verifier.test_drafters import every_node, grown, hello, link, long_ago, opened, session, up

from rootward.core.requests import DraftMode
from verifier_service.circuit_breaker import MAX_MISSES, CircuitState, StallClock
from verifier_service.drafter_link import SILENT_S, Link


def test_the_circuit_of_a_silent_drafter_opens_and_is_probed_later() -> None:
    busy, one = up(link()), session()
    opened(busy, one)
    for _ in range(20):
        busy.record_round(one.draft, missed=True)
    assert busy.room > 0  # slower than patience, but alive
    busy.record_round(one.draft, missed=False)
    busy.unanswered_since_s = long_ago(busy.stall_clock.now())
    for _ in range(4):
        busy.record_round(one.draft, missed=True)
    busy.record_round(one.draft, missed=False)
    for _ in range(5):
        assert busy.room > 0
        busy.record_round(one.draft, missed=True)
    assert busy.room == 0
    assert one.draft.closed
    busy.breaker.until_s = 0.0
    assert busy.room == 1  # one session, to see


def test_a_tree_that_its_drafter_has_forgotten_is_given_up_whatever_others_get() -> None:
    busy, one, other = up(link()), session(1, draft_mode=DraftMode.TOP_K), session(2, draft_mode=DraftMode.TOP_K)
    opened(busy, one)
    opened(busy, other)
    grown(busy, one.draft)
    busy.commit(one, one.draft, (2,), every_node)
    for _ in range(20):
        busy.record_round(one.draft, missed=True)
    assert not one.draft.closed  # it may still come
    grown(busy, one.draft, 0)
    busy.commit(one, one.draft, (1,), every_node)
    one.draft.unanswered_since_s = long_ago(one.draft.unanswered_since_s)
    for _ in range(MAX_MISSES):
        assert not one.draft.closed  # we may have been away ourselves
        grown(busy, other.draft)
        busy.commit(other, other.draft, (1,), every_node)
        busy.record_round(other.draft, missed=False)
        busy.record_round(one.draft, missed=True)
    assert one.draft.closed
    assert one.draft.at_rest  # what has arrived is verified once more
    assert not other.draft.closed
    assert busy.room > 0


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
async def test_a_pause_of_the_verifier_does_not_open_the_breaker(running: bool) -> None:
    """A process that was stopped finds every session's tree overdue at once: many misses, no evidence."""
    clock = FakeClock()
    busy = up(Link("d", hello, lambda: None, stall_clock=StallClock(clock)), 2 * MAX_MISSES)
    sessions = [session(number) for number in range(2 * MAX_MISSES)]
    for one in sessions:
        opened(busy, one)
    busy.flush()
    for _ in range(100):
        await clock.advance(SILENT_S / 10 if running else 0.0)
        busy.stall_clock.now()
    await clock.advance(0.0 if running else 10 * SILENT_S)
    for one in sessions:
        busy.record_round(one.draft, missed=True)
    assert (busy.breaker.state(time.monotonic()) is CircuitState.CLOSED) is not running
    assert all(one.draft.closed is running for one in sessions)


def test_a_drafter_that_reads_a_long_text_is_not_silent() -> None:
    busy, one = up(link()), session()
    one.tokens = [1] * 10_000
    opened(busy, one)
    busy.flush()
    assert not busy.overdue(busy.unanswered_since_s - SILENT_S)
    assert busy.overdue(long_ago(busy.unanswered_since_s))
    busy.close(one.draft, "ended")
    assert not busy.overdue(busy.unanswered_since_s)  # nothing is owed
