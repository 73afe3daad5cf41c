"""How many requests run, how many may wait and in which order. Beyond that a request is refused at once, so that queues stay short."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rootward.errors import Overloaded, Unavailable

RETRY_AFTER_S = 1.0
LONGEST_RETRY_AFTER_S = 60.0
MOST_GONE = 64  # places in the heap whose clients have gone
NEWEST = 0.1  # weight of the newest observation in the mean time between two ends


class Admission:
    """Conservation: `num_running` <= max_num_seqs, `num_waiting` <= max_num_queued_reqs and, one request alone excepted,
    `num_waiting_tokens` <= max_num_queued_tokens; all are 0 at rest. Nobody waits while a place is free."""

    def __init__(self, *, max_num_seqs: int, max_num_queued_reqs: int, max_num_queued_tokens: int = 1 << 62):
        self.max_num_seqs, self._max_queued = max_num_seqs, max_num_queued_reqs
        self._max_queued_tokens = max_num_queued_tokens
        self._line: list[tuple[int, int, asyncio.Future[None]]] = []  # heap of (priority, arrival, place)
        self._arrivals = itertools.count()
        self._between_ends_s, self._last_end = 0.0, -math.inf
        self._rest = asyncio.Event()
        self._rest.set()
        self.num_running = self.num_waiting = self.num_waiting_tokens = 0
        self.draining = False

    @asynccontextmanager
    async def slot(self, tokens: int = 0, priority: int = 0) -> AsyncIterator[None]:
        """Hold one of the running places, after waiting for it; lower priorities first, then who came first. `tokens`: of the prompt.

        Overloaded when the queue is full in requests or tokens, and says when to try again."""
        self._check(tokens)
        self._rest.clear()
        await self._place(tokens, priority)
        try:
            yield
        finally:
            self._note_end()
            self._leave()

    async def at_rest(self) -> None:
        """Return when nothing runs or waits."""
        await self._rest.wait()

    def _check(self, tokens: int) -> None:
        if self.draining:
            raise Unavailable("the gateway is draining; send the request to another one", retry_after_s=RETRY_AFTER_S)
        if self.num_running < self.max_num_seqs:
            return
        if self.num_waiting >= self._max_queued:
            message = f"the queue holds {self.num_waiting} requests, its limit"
        elif self.num_waiting and self.num_waiting_tokens + tokens > self._max_queued_tokens:
            message = (
                f"the queue holds prompts of {self.num_waiting_tokens} tokens; its limit is {self._max_queued_tokens}"
            )
        else:
            return
        raise Overloaded(message, retry_after_s=self._retry_after_s())

    async def _place(self, tokens: int, priority: int) -> None:
        """Wait for a place and take it; between waiting and running a request must not look like none."""
        if self.num_running < self.max_num_seqs:
            self.num_running += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (priority, next(self._arrivals), place))
        self.num_waiting += 1
        self.num_waiting_tokens += tokens
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled():  # it was given the place and leaves before it knew
                self._leave()
            raise
        finally:
            self.num_waiting -= 1
            self.num_waiting_tokens -= tokens
            place.cancel()
            self._forget_gone()
            self._note_rest()

    def _leave(self) -> None:
        """Give the place back, or to the next in line."""
        self.num_running -= 1
        while self._line and self.num_running < self.max_num_seqs:
            *_, place = heapq.heappop(self._line)
            if not place.done():
                self.num_running += 1
                place.set_result(None)
        self._note_rest()

    def _forget_gone(self) -> None:
        """Who left the line stays in the heap until it is large: it must not grow with clients that come and go."""
        if len(self._line) > 2 * self.num_waiting + MOST_GONE:
            self._line = [waiting for waiting in self._line if not waiting[2].done()]
            heapq.heapify(self._line)

    def _note_end(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._last_end > -math.inf:
            self._between_ends_s += NEWEST * (min(now - self._last_end, LONGEST_RETRY_AFTER_S) - self._between_ends_s)
        self._last_end = now

    def _retry_after_s(self) -> float:
        """When the queue of now will have been served, at the pace of late."""
        wait_s = self.num_waiting * self._between_ends_s
        return float(math.ceil(min(max(wait_s, RETRY_AFTER_S), LONGEST_RETRY_AFTER_S)))

    def _note_rest(self) -> None:
        if not self.num_running and not self.num_waiting:
            self._rest.set()
