"""Whether work that must not stop goes on: what liveness probes ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rootward.clock import Clock, SystemClock

STUCK_S = 120.0  # the first forward of a large model may compile


class Heart:
    """A piece of work that began and has not ended for `limit_s` is stuck; no work at all is healthy."""

    def __init__(self, limit_s: float = STUCK_S, clock: Clock | None = None) -> None:
        self._limit_s, self._clock = limit_s, clock or SystemClock()
        self._began_s: float | None = None

    @contextmanager
    def beat(self) -> Iterator[None]:
        """Around every step."""
        self._began_s = self._clock.now()
        try:
            yield
        finally:
            self._began_s = None

    @property
    def beats(self) -> bool:
        return self._began_s is None or self._clock.now() - self._began_s < self._limit_s
