"""The one source of time, the time until the next attempt, and a watchdog. Decisions take the time as a value; code that waits asks a
`Clock`: tests have one that does not wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Protocol

STUCK_S = 120.0  # the first forward of a large model may compile


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic clock; for durations and deadlines."""

    def wall(self) -> float:
        """Seconds since 1970 UTC; for times that people and other machines read."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def jittered(seconds: float, *names: object) -> float:
    """Between 0.5 and 1.5 times `seconds`, as a pure function of `names` (of worker, peer, attempt), so that many clients of one server
    do not retry at the same moment."""
    digest = blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest()
    return seconds * (0.5 + int.from_bytes(digest, "little") / 2**64)


def backoff_s(attempt: int, first_s: float, longest_s: float, *names: object) -> float:
    """Doubles with each attempt (0, 1, …) up to longest_s, jittered."""
    return jittered(min(first_s * 2.0 ** min(attempt, 62), longest_s), *names, attempt)


class Watchdog:
    """Detects a loop whose current step does not end; liveness probes read it. Unhealthy while one step has been running for longer than
    `limit_s` seconds. An idle loop is healthy."""

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
