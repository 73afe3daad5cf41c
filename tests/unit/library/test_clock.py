"""The fake clock wakes sleepers in order, each at its own time."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_clock import FakeClock

from rootward.clock import SystemClock, Watchdog


async def test_sleepers_wake_in_order_and_only_when_time_passes():
    clock, woken = FakeClock(now=100.0), []

    async def sleeper(name, *naps):
        for nap in naps:
            await clock.sleep(nap)
            woken.append((name, clock.now()))

    async with asyncio.TaskGroup() as group:
        group.create_task(sleeper("a", 3.0, 1.0))
        group.create_task(sleeper("b", 2.0, 1.5))
        await clock.advance(1.9)
        assert woken == []
        await clock.advance(1.2)
        assert woken == [("b", 102.0), ("a", 103.0)]
        await clock.advance(10)
    assert woken[2:] == [("b", 103.5), ("a", 104.0)]
    assert clock.now() == pytest.approx(113.1)
    assert clock.wall() == pytest.approx(1_700_000_013.1)


async def test_a_cancelled_sleeper_is_forgotten():
    clock = FakeClock()
    task = asyncio.create_task(clock.sleep(1))
    await asyncio.sleep(0)
    task.cancel()
    await clock.advance(2)
    assert task.cancelled()


async def test_the_system_clock_moves():
    clock = SystemClock()
    before, wall = clock.now(), clock.wall()
    await clock.sleep(0.01)
    assert 0.005 < clock.now() - before < 60
    assert wall > 1_700_000_000


async def test_a_step_that_never_ends_fails_the_watchdog():
    clock = FakeClock()
    watchdog = Watchdog(10.0, clock)
    assert watchdog.healthy
    with watchdog.step():
        await clock.advance(9.0)
        assert watchdog.healthy
        await clock.advance(2.0)
        assert not watchdog.healthy
    assert watchdog.healthy
