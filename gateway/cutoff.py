"""The moment at which a request stops waiting: its deadline, or earlier when somebody aborts it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rootward.errors import DeadlineExceeded, ServiceError

T = TypeVar("T")


class Aborted(Exception):
    """The request was aborted while it waited."""


class Cutoff:
    """One per request. `deadline` is in seconds of the loop's clock; None = never."""

    def __init__(self, deadline: float | None):
        self.deadline = deadline
        self.aborted = False
        self.error: ServiceError | None = None  # what the client is told; None = a normal end with reason ABORTED
        self._timer: asyncio.Timeout | None = None

    def abort(self, error: ServiceError | None = None) -> None:
        """May be called from another task at any time. The first call counts."""
        if self.aborted:
            return
        self.aborted, self.error = True, error
        if self._timer is not None:
            self._timer.reschedule(asyncio.get_running_loop().time())

    async def wait(self, work: Coroutine[Any, Any, T], phase: str) -> T:
        """The result of `work`. Raises Aborted, or DeadlineExceeded naming the phase."""
        if self.aborted:
            work.close()
            raise Aborted
        try:
            async with asyncio.timeout_at(self.deadline) as self._timer:
                return await work
        except TimeoutError:
            if self.aborted:
                raise Aborted from None
            message = f"the deadline of the request passed (phase: {phase})"
            raise DeadlineExceeded(message, metadata={"phase": phase}) from None
        finally:
            self._timer = None
