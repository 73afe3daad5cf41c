"""The circuit breaker of one drafter: pure, the time is an argument.

closed      sessions as it has room
open        none, for a rest that doubles each time
half-open   one session, to see: growth closes it, another failure opens it again
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
MAX_MISSES = 5  # rounds in a row that waited in vain
MAX_OFFENCES = 3  # malformed frames


class State(str, Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(slots=True)
class Breaker:
    """Whoever opens it takes the sessions off the drafter."""

    opened: bool = False
    until_s: float = 0.0  # of the rest, while opened
    rest_s: float = FIRST_REST_S
    misses: int = 0
    offences: int = 0

    def state(self, now_s: float) -> State:
        if not self.opened:
            return State.CLOSED
        return State.OPEN if now_s < self.until_s else State.HALF_OPEN

    def admits(self, room: int, num_held: int, now_s: float) -> int:
        """Sessions that may go there, of those there is room for."""
        state = self.state(now_s)
        if state is State.HALF_OPEN:
            return min(room, max(0, 1 - num_held))
        return room if state is State.CLOSED else 0

    def grew(self) -> None:
        """Good growth came: it works, however late."""
        if self.opened:
            self.opened, self.misses = False, 0

    def served(self) -> None:
        """A round had nodes of it: it is fast enough, too."""
        self.misses, self.rest_s = 0, FIRST_REST_S

    def missed(self, now_s: float, *, silent: bool) -> bool:
        """A round waited in vain. True: it opens now. Who is merely slower than patience is not broken: it must be silent as well."""
        self.misses += 1
        if self.misses < (1 if self.opened else MAX_MISSES) or not silent:
            return False
        self._open(now_s)
        return True

    def offended(self, now_s: float) -> bool:
        """It sent a malformed frame. True: it opens now, for as long as it can."""
        self.offences += 1
        if self.offences < MAX_OFFENCES:
            return False
        self.rest_s = LONGEST_REST_S
        self._open(now_s)
        return True

    def _open(self, now_s: float) -> None:
        self.opened, self.until_s = True, now_s + self.rest_s
        self.rest_s, self.misses, self.offences = min(2 * self.rest_s, LONGEST_REST_S), 0, 0
