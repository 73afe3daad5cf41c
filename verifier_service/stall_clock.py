"""The clock that measures the silence of drafters: it excludes times in which this process itself was stopped.

After a pause of the process or its event loop every answer seems overdue, although answers wait in the sockets. The clock is therefore read
often, and the time between two readings counts for at most MAX_READING_INTERVAL_S.
"""

from __future__ import annotations

from rootward.clock import Clock, SystemClock

READING_INTERVAL_S = 0.05
MAX_READING_INTERVAL_S = 2 * READING_INTERVAL_S


class StallClock:
    """A clock that stops while it is not read. `run` reads it periodically."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._last_s, self._running_s = self._clock.now(), 0.0

    def now(self) -> float:
        """Seconds, monotonic."""
        now_s = self._clock.now()
        self._running_s += min(now_s - self._last_s, MAX_READING_INTERVAL_S)
        self._last_s = now_s
        return self._running_s

    async def run(self) -> None:
        """Read the clock until cancelled."""
        while True:
            self.now()
            await self._clock.sleep(READING_INTERVAL_S)
