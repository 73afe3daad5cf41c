"""Circuit breaker of one drafter, and the clock by which a drafter is silent.

closed     sessions are placed as the drafter has room
open       none is placed, for a pause that doubles each time
half-open  one session is placed as a test
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from rootward.clock import Clock, SystemClock

FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
MAX_MISSES = 5  # rounds in a row whose tree did not arrive in time
MAX_OFFENCES = 3  # malformed frames, or trees in a row that broke before a round verified a node
READING_INTERVAL_S = 0.05  # of the `StallClock`
MAX_READING_INTERVAL_S = 2 * READING_INTERVAL_S


class CircuitState(IntEnum):
    """Values of the metric `drafter_circuit_state`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(slots=True)
class Breaker:
    """Circuit breaker of one drafter. The caller that opens it closes the trees of the drafter."""

    opened: bool = False
    until_s: float = 0.0  # of the rest, while opened
    rest_s: float = FIRST_REST_S
    misses: int = 0
    offences: int = 0
    losses: int = 0  # trees that broke since a round verified nodes

    def state(self, now_s: float) -> CircuitState:
        if not self.opened:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now_s < self.until_s else CircuitState.HALF_OPEN

    def admits(self, room: int, num_held: int, now_s: float) -> int:
        """Number of sessions that may be placed, at most `room`."""
        state = self.state(now_s)
        if state is CircuitState.HALF_OPEN:
            return min(room, max(0, 1 - num_held))
        return room if state is CircuitState.CLOSED else 0

    def grew(self) -> None:
        """Valid growth arrived, late or not."""
        if self.opened:
            self.opened, self.misses = False, 0

    def served(self) -> None:
        """A round verified nodes of it, so it is fast enough."""
        self.misses, self.losses, self.rest_s = 0, 0, FIRST_REST_S

    def missed(self, now_s: float, *, silent: bool) -> bool:
        """A round ran without its tree. True if the breaker opens now: only if the drafter is silent, not if it is merely slow."""
        self.misses += 1
        if self.misses < (1 if self.opened else MAX_MISSES) or not silent:
            return False
        self._open(now_s)
        return True

    def offended(self, now_s: float) -> bool:
        """It sent a malformed frame. True if the breaker opens now, for the longest pause."""
        self.offences += 1
        if self.offences < MAX_OFFENCES:
            return False
        self.rest_s = LONGEST_REST_S
        self._open(now_s)
        return True

    def lost(self, now_s: float) -> bool:
        """One of its trees broke: a step was lost, or its frames do not continue the tree. True if the breaker opens now."""
        self.losses += 1
        if self.losses < (1 if self.opened else MAX_OFFENCES):
            return False
        self._open(now_s)
        return True

    def _open(self, now_s: float) -> None:
        self.opened, self.until_s = True, now_s + self.rest_s
        self.rest_s = min(2 * self.rest_s, LONGEST_REST_S)
        self.misses = self.offences = self.losses = 0


class StallClock:
    """A clock that excludes times in which this process itself was stopped: it stops while it is not read, and `run` reads it often.

    After a pause of the process or its event loop every answer seems overdue, although answers wait in the sockets. So the time between
    two readings counts for at most MAX_READING_INTERVAL_S.
    """

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
