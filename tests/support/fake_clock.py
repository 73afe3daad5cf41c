"""A `rootward.clock.Clock` that a test moves."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """Stands still until `advance`. Sleepers wake in the order of their times, and each sees its own time."""

    def __init__(self, now: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall_at_zero = wall - now
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall_at_zero + self._now

    async def sleep(self, seconds: float) -> None:
        wakes: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(0.0, seconds), next(self._order), wakes))
        await wakes

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass, and let every task that they wake run until it waits again."""
        end = self._now + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, wakes = heapq.heappop(self._sleepers)
            if not wakes.done():
                wakes.set_result(None)
                await _settle()
        self._now = end


async def _settle() -> None:
    """Run ready tasks; ten iterations of the loop are enough for chains of plain awaits."""
    for _ in range(10):
        await asyncio.sleep(0)
