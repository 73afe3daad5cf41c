"""Time in which this process could have heard something: what a drafter's silence is measured in.

A process that was stopped, or whose event loop hung, finds everything overdue when it goes on, although the answers lie in its sockets.
Such a pause is its own fault and no evidence against anybody. So the clock is looked at often, and what passed between two looks counts
for no longer than it should have been.
"""

from __future__ import annotations

from rootward.clock import Clock, SystemClock

LOOK_S = 0.05  # between two looks
MOST_S = 2 * LOOK_S  # what the time between two looks counts for at most


class StallClock:
    """A clock that stands still while nobody looks. `run` looks."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._last_s, self._awake_s = self._clock.now(), 0.0

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        now_s = self._clock.now()
        self._awake_s += min(now_s - self._last_s, MOST_S)
        self._last_s = now_s
        return self._awake_s

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.now()
            await self._clock.sleep(LOOK_S)
