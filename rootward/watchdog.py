"""Detects a loop whose current step does not end; liveness probes read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rootward.clock import Clock, SystemClock

STUCK_S = 120.0  # the first forward of a large model may compile


class Watchdog:
    """Unhealthy while one step has been running for longer than `limit_s` seconds. An idle loop is healthy."""

    def __init__(self, limit_s: float = STUCK_S, clock: Clock | None = None) -> None:
        self._limit_s = limit_s
        self._clock = clock or SystemClock()
        self._step_started_s: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around one step of the loop."""
        self._step_started_s = self._clock.now()
        try:
            yield
        finally:
            self._step_started_s = None

    @property
    def healthy(self) -> bool:
        return self._step_started_s is None or self._clock.now() - self._step_started_s < self._limit_s
