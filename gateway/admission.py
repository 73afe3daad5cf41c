"""Admission: numbers of running and waiting requests, their order, and the tokens that a tenant may use.

A request that finds neither a slot nor room in the queue is refused at once, so that queues stay short. A free slot goes to the request
with the lowest priority value, then of the tenant with the fewest running requests, then to the first one. A full queue makes room for a
tenant with fewer waiting requests by refusing the newest request of the tenant with the most.

A tenant's tokens are a bucket that fills at a steady rate, shared by all gateways through the session store. A request pays prompt +
max_tokens once, however often it is resumed, and gets back the tokens that it did not use. While the store does not answer, each gateway
counts by itself with the whole rate, so that an outage refuses no request.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from rootward.errors import Overloaded, RateLimited, Unavailable

if TYPE_CHECKING:  # the ledger charges the buckets of this module
    from gateway.ledger import Entry, Ledger
    from gateway.planning import Plan
    from gateway.session_store import Record

RETRY_AFTER_S = 1.0
LONGEST_RETRY_AFTER_S = 60.0
NEWEST = 0.1  # weight of the newest observation in the mean time between two ends
MAX_BUCKETS = 4096  # after which full ones are forgotten


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
        while (full := self._full(waiting.tokens)) is not None:
            refused = self._newest_of_largest(waiting.tenant)
            error = Overloaded(full, retry_after_s=self._retry_after_s())
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
        self._queue = [waiting for waiting in self._queue if not waiting.slot.done()]  # cancelled ones
        if self._queue and self.num_running < self.max_num_seqs:
            following = min(self._queue, key=lambda w: (w.priority, self._running[w.tenant], w.arrival))
            self._queue.remove(following)
            self._start(following.tenant)
            following.slot.set_result(None)
        if not self.num_running:
            self._rest.set()

    def _note_end(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._last_end > -math.inf:
            self._between_ends_s += NEWEST * (min(now - self._last_end, LONGEST_RETRY_AFTER_S) - self._between_ends_s)
        self._last_end = now

    def _retry_after_s(self) -> float:
        """Time until the present queue is served, at the recent rate."""
        wait_s = self.num_waiting * self._between_ends_s
        return float(math.ceil(min(max(wait_s, RETRY_AFTER_S), LONGEST_RETRY_AFTER_S)))


@dataclass(frozen=True, slots=True)
class Rate:
    """`tokens_per_s` into a bucket of `size` tokens."""

    tokens_per_s: float
    size: float


class Buckets:
    """Buckets of one process; the rule is that of `redis_store.TAKE_TOKENS`. `now` is in seconds."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._levels: dict[str, tuple[float, float]] = {}  # tenant → (level, when)

    def take(self, tenant: str, cost: int, rate: Rate) -> float:
        """Take `cost` tokens; a negative cost gives them back. Returns 0 if taken, else the seconds until the tokens are there. One request
        may overdraw a full bucket."""
        now = self._now()
        level, at = self._levels.get(tenant, (rate.size, now))
        level = min(rate.size, level + (now - at) * rate.tokens_per_s)
        needed = min(cost, rate.size)
        if cost > 0 and level < needed:
            return (needed - level) / rate.tokens_per_s
        self._levels[tenant] = min(rate.size, level - cost), now
        if len(self._levels) > MAX_BUCKETS:
            self._levels = {name: known for name, known in self._levels.items() if not self._full(known, rate)}
        return 0.0

    def _full(self, known: tuple[float, float], rate: Rate) -> bool:
        return known[0] + (self._now() - known[1]) * rate.tokens_per_s >= rate.size


def out_of_tokens(tenant: str, cost: int, wait_s: float) -> RateLimited:
    retry_after_s = float(math.ceil(min(wait_s, LONGEST_RETRY_AFTER_S)))
    return RateLimited(f"tenant: {tenant!r} has used up its tokens; {cost} are asked for", retry_after_s=retry_after_s)


class Account:
    """Charges one request to its tenant; a context manager around the request on this gateway. Without a rate nothing is charged.

    A gateway that takes a request over from one that may still run, or has died, inherits the payment; one that resumes an interrupted
    request, whose rest was given back, pays for this rest again."""

    def __init__(self, ledger: Ledger, plan: Plan, rate: Rate | None):
        self._ledger, self._plan, self._rate = ledger, plan, rate
        self._price = len(plan.first.prompt) + plan.first.stopping.max_tokens
        self._paid = 0  # and not given back
        self._entry: Entry | None = None

    async def __aenter__(self) -> Self:
        """RateLimited when the tenant has used up its tokens. A request that is resumed is looked up first, see `resumed`."""
        if self._plan.request.resume is None:
            await self._pay(self._price)
        return self

    async def resumed(self, record: Record) -> None:
        """Pay the unpaid part of a resumed request. RateLimited."""
        if not record.finished:
            await self._pay(owed(self._price, len(self._plan.first.prompt), record))

    def started(self, entry: Entry) -> None:
        """The request runs; from now on its prompt counts as used."""
        self._entry = entry

    async def __aexit__(self, *_: object) -> None:
        used = len(self._plan.first.prompt) + len(self._entry.tokens) if self._entry else 0
        if self._rate is None or used >= self._paid:
            return
        if self._entry is None or await self._ledger.confirmed(self._entry):
            await self._ledger.charge(self._plan.first.tenant, used - self._paid, self._rate)

    async def _pay(self, cost: int) -> None:
        if self._rate is not None and cost:
            await self._ledger.charge(self._plan.first.tenant, cost, self._rate)
        self._paid = self._price


def owed(price: int, num_prompt: int, record: Record) -> int:
    """Tokens to pay for an unfinished request: all of an unknown one, none if the last gateway gave nothing back."""
    if not record.fields:
        return price
    return 0 if record.running else max(0, price - num_prompt - len(record.output))
