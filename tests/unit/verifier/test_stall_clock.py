"""The stall clock excludes pauses of the process and counts running time in full."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_clock import FakeClock

from verifier_service.circuit_breaker import MAX_READING_INTERVAL_S, READING_INTERVAL_S, StallClock


async def test_a_pause_counts_for_at_most_the_maximum_reading_interval() -> None:
    clock = FakeClock()
    stall_clock = StallClock(clock)
    start_s = stall_clock.now()
    await clock.advance(3600.0)
    assert stall_clock.now() - start_s == MAX_READING_INTERVAL_S
    assert stall_clock.now() - start_s == MAX_READING_INTERVAL_S  # and only once


async def test_running_time_counts_in_full() -> None:
    clock = FakeClock()
    stall_clock = StallClock(clock)
    start_s, reader = stall_clock.now(), asyncio.create_task(stall_clock.run())
    await clock.advance(100 * READING_INTERVAL_S)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert stall_clock.now() - start_s == pytest.approx(100 * READING_INTERVAL_S)
