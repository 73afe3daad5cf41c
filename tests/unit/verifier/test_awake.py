"""A pause of the process itself hardly counts; time that it was awake counts in full."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_clock import FakeClock

from verifier_service.stall_clock import LOOK_S, MOST_S, StallClock


async def test_a_pause_counts_for_no_longer_than_two_looks_are_apart() -> None:
    clock = FakeClock()
    awake = StallClock(clock)
    start_s = awake.now()
    await clock.advance(3600.0)
    assert awake.now() - start_s == MOST_S
    assert awake.now() - start_s == MOST_S  # and only once


async def test_time_in_which_it_looks_counts_in_full() -> None:
    clock = FakeClock()
    awake = StallClock(clock)
    start_s, looking = awake.now(), asyncio.create_task(awake.run())
    await clock.advance(100 * LOOK_S)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert awake.now() - start_s == pytest.approx(100 * LOOK_S)
