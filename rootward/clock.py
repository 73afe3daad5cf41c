"""The one source of time. Decisions take the time as a value; code that waits asks a `Clock`: tests have one that does not wait."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


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
