"""How many requests run and how many may wait. Beyond that a request is refused at once, so that queues stay short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rootward.errors import Overloaded, Unavailable

RETRY_AFTER_S = 1.0


class Admission:
    """Conservation: `num_running` <= max_num_seqs and `num_waiting` <= max_num_queued_reqs; both are 0 at rest."""

    def __init__(self, *, max_num_seqs: int, max_num_queued_reqs: int):
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._max_queued = max_num_queued_reqs
        self._rest = asyncio.Event()
        self._rest.set()
        self.max_num_seqs = max_num_seqs
        self.num_running = 0
        self.num_waiting = 0
        self.draining = False

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the running places, after waiting for it. Overloaded when the queue is full."""
        if self.draining:
            raise Unavailable("the gateway is draining; send the request to another one", retry_after_s=RETRY_AFTER_S)
        if self._slots.locked() and self.num_waiting >= self._max_queued:
            raise Overloaded(f"the queue holds {self.num_waiting} requests, its limit", retry_after_s=RETRY_AFTER_S)
        self._rest.clear()
        await self._place()
        try:
            yield
        finally:
            self.num_running -= 1
            self._slots.release()
            self._note_rest()

    async def _place(self) -> None:
        """Wait for a place and take it; between waiting and running a request must not look like none."""
        self.num_waiting += 1
        try:
            await self._slots.acquire()
            self.num_running += 1
        finally:
            self.num_waiting -= 1
            self._note_rest()

    async def at_rest(self) -> None:
        """Return when nothing runs or waits."""
        await self._rest.wait()

    def _note_rest(self) -> None:
        if not self.num_running and not self.num_waiting:
            self._rest.set()
