"""Admission: numbers of running and waiting requests, and their order; the log-probabilities that answers in progress hold.

A request that finds neither a slot nor room in the queue is refused at once, so that queues stay short. A free slot goes to the request
with the lowest priority value, then of the tenant with the fewest running requests, then to the first one. A full queue makes room for a
tenant with fewer waiting requests by refusing the newest request of the tenant with the most.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rootward.errors import Overloaded, ServiceError, Unavailable

MAX_HELD_LOGPROBS = 1 << 21  # those of likely tokens included: each takes about 130 bytes until the answer is written
RETRY_AFTER_S = 1.0
LONGEST_RETRY_AFTER_S = 60.0
NEWEST = 0.1  # weight of the newest observation in the mean time between two ends


@dataclass(slots=True, eq=False)
class _Waiting:
    tenant: str
    priority: int
    tokens: int
    arrival: int
    slot: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """Invariants: `num_running` <= max_num_seqs, `num_waiting` <= max_num_queued_reqs and, except for a single request,
    `num_waiting_tokens` <= max_num_queued_tokens; all are 0 at rest. No request waits while a slot is free."""

    def __init__(self, *, max_num_seqs: int, max_num_queued_reqs: int, max_num_queued_tokens: int = 1 << 62):
        self.max_num_seqs, self._max_queued = max_num_seqs, max_num_queued_reqs
        self._max_queued_tokens = max_num_queued_tokens
        self._running: Counter[str] = Counter()  # by tenant
        self._queue: list[_Waiting] = []  # by arrival
        self._arrivals = itertools.count()
        self._between_ends_s, self._last_end = 0.0, -math.inf
        self._rest = asyncio.Event()
        self._rest.set()
        self.num_running = 0  # with slots that were given to waiting requests
        self.draining = False

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(waiting.tokens for waiting in self._queue)

    @asynccontextmanager
    async def slot(self, tokens: int = 0, priority: int = 0, tenant: str = "") -> AsyncIterator[None]:
        """Hold one of the running slots, after waiting for it. `tokens`: of the prompt.

        Overloaded when the queue is full in requests or tokens, with the time after which to try again. Unavailable while draining."""
        if self.draining:
            raise Unavailable("the gateway is draining; send the request to another one", retry_after_s=RETRY_AFTER_S)
        if self.num_running < self.max_num_seqs:
            self._start(tenant)
        else:
            await self._wait(_Waiting(tenant, priority, tokens, next(self._arrivals)))
        try:
            yield
        finally:
            self._note_end()
            self._leave(tenant)

    async def at_rest(self, timeout_s: float) -> bool:
        """Wait until no request runs or waits; False if some do after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._rest.wait()
        except TimeoutError:
            return False

    async def _wait(self, waiting: _Waiting) -> None:
        self._make_room(waiting)
        self._queue.append(waiting)
        try:
            await waiting.slot
        except BaseException:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif waiting.slot.done() and not waiting.slot.cancelled() and not waiting.slot.exception():
                self._leave(waiting.tenant)  # it got the slot and was cancelled before it ran
            raise

    def _make_room(self, waiting: _Waiting) -> None:
        """Overloaded unless the queue has room for the request, or gets it by refusing a request of the tenant with the most."""
        self._forget_cancelled()
        while (full := self._full(waiting.tokens)) is not None:
            refused = self._newest_of_largest(waiting.tenant)
            queue_s = self.num_waiting * self._between_ends_s  # until the present queue is served, at the recent rate
            error = Overloaded(full, retry_after_s=retry_after_s(queue_s))
            if refused is None:
                raise error
            self._queue.remove(refused)
            refused.slot.set_exception(error)

    def _full(self, tokens: int) -> str | None:
        if self.num_waiting >= self._max_queued:
            return f"the queue holds {self.num_waiting} requests, its limit"
        held = self.num_waiting_tokens
        if self._queue and held + tokens > self._max_queued_tokens:
            return f"the queue holds prompts of {held} tokens; its limit is {self._max_queued_tokens}"
        return None

    def _newest_of_largest(self, tenant: str) -> _Waiting | None:
        """None unless a tenant has at least two more waiting requests than this one, so that afterwards it has no fewer."""
        counts = Counter(waiting.tenant for waiting in self._queue)
        largest, most = max(counts.items(), key=lambda of: of[1], default=("", 0))
        if most < counts[tenant] + 2:
            return None
        return next(waiting for waiting in reversed(self._queue) if waiting.tenant == largest)

    def _start(self, tenant: str) -> None:
        self._rest.clear()
        self.num_running += 1
        self._running[tenant] += 1

    def _leave(self, tenant: str) -> None:
        """Free a slot, and give it to the next in the queue."""
        self.num_running -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._forget_cancelled()
        if self._queue and self.num_running < self.max_num_seqs:
            following = min(self._queue, key=lambda w: (w.priority, self._running[w.tenant], w.arrival))
            self._queue.remove(following)
            self._start(following.tenant)
            following.slot.set_result(None)
        if not self.num_running:
            self._rest.set()

    def _forget_cancelled(self) -> None:
        """A task that was cancelled leaves the queue when it runs next; until then its slot can be neither given nor refused."""
        self._queue = [waiting for waiting in self._queue if not waiting.slot.done()]

    def _note_end(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._last_end > -math.inf:
            self._between_ends_s += NEWEST * (min(now - self._last_end, LONGEST_RETRY_AFTER_S) - self._between_ends_s)
        self._last_end = now


@dataclass(slots=True, eq=False)
class LogprobShare:
    """Log-probabilities that one answer holds, those of likely tokens included. `end` ends its generation with an error."""

    limit: LogprobLimit
    end: Callable[[ServiceError], object]
    number: int = 0
    growing: bool = True  # it can still be ended; otherwise it is written and sent

    def add(self, number: int) -> None:
        """Hold so many more. Beyond the limit of all answers together, the answers with the most are ended, perhaps this one."""
        self.limit.hold(self, number)


class LogprobLimit:
    """Bounds what all answers in progress hold. An answer's own log-probabilities are bounded, but clients ask for many at a time, and how
    many an output will have is not known before it ends."""

    def __init__(self, most: int = MAX_HELD_LOGPROBS):
        self._most, self._held = most, 0
        self._shares: set[LogprobShare] = set()  # of answers in progress, without those that were ended

    @asynccontextmanager
    async def share(self, end: Callable[[ServiceError], object]) -> AsyncIterator[LogprobShare]:
        """The share of an answer, which is given back on leaving."""
        share = LogprobShare(self, end)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._remove(share)

    def hold(self, share: LogprobShare, number: int) -> None:
        """Count them, and end answers until those that go on hold no more than the limit. Complete ones count and are not ended."""
        share.number += number
        if share in self._shares:
            self._held += number
        while self._held > self._most:
            growing = [other for other in self._shares if other.growing and other.number]
            if not growing:
                return
            largest = max(growing, key=lambda other: other.number)
            self._remove(largest)
            fix = f"of all answers in progress are more than {self._most}, and this one has the most; ask for fewer, or for fewer at once"
            largest.end(Overloaded(f"log-probabilities {fix}", retry_after_s=RETRY_AFTER_S))

    def _remove(self, share: LogprobShare) -> None:
        if share in self._shares:
            self._shares.remove(share)
            self._held -= share.number


def retry_after_s(wait_s: float) -> float:
    """The time that a client should wait, in whole seconds within bounds."""
    return float(math.ceil(min(max(wait_s, RETRY_AFTER_S), LONGEST_RETRY_AFTER_S)))
