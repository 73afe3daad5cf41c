"""How many requests run, how many may wait and in which order. Beyond that a request is refused at once, so that queues stay short.

What a tenant may use: a bucket of tokens that fills at a steady rate, shared by all gateways through the session store.

A request takes prompt + max_tokens before it runs and gets back what it did not use. While the store does not answer each gateway counts by
itself, with the whole rate: an outage must not refuse anybody.

What a request costs its tenant: prompt + max_tokens, paid once, however often it is resumed; what was not used is given back.

Who drives the request holds what was paid for it: who takes it over from a driver that may still run, or has died, inherits that; who takes
it up after it was interrupted, and its rest given back, pays for this rest again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rootward.errors import Overloaded, RateLimited, Unavailable

if TYPE_CHECKING:  # the ledger charges the buckets of this module
    from gateway.planning import Plan
    from gateway.session_store import Entry, Ledger, Record

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


LONGEST_RETRY_AFTER_S = 60.0
FORGET_AT = 4096  # tenants


@dataclass(frozen=True, slots=True)
class Rate:
    """`tokens_per_s` into a bucket of `size` tokens."""

    tokens_per_s: float
    size: float


class Buckets:
    """Buckets of one process; the rule is that of `redis_schema.TAKE_TOKENS`. `now` is in seconds."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._levels: dict[str, tuple[float, float]] = {}  # tenant → (level, when)

    def take(self, tenant: str, cost: int, rate: Rate) -> float:
        """0 if taken; else seconds until it could be. A full bucket may be overdrawn by one request. Negative costs are given back."""
        now = self._now()
        level, at = self._levels.get(tenant, (rate.size, now))
        level = min(rate.size, level + (now - at) * rate.tokens_per_s)
        needed = min(cost, rate.size)
        if cost > 0 and level < needed:
            return (needed - level) / rate.tokens_per_s
        self._levels[tenant] = min(rate.size, level - cost), now
        if len(self._levels) > FORGET_AT:
            self._levels = {name: known for name, known in self._levels.items() if not self._full(known, rate)}
        return 0.0

    def _full(self, known: tuple[float, float], rate: Rate) -> bool:
        return known[0] + (self._now() - known[1]) * rate.tokens_per_s >= rate.size


def refusal(tenant: str, cost: int, wait_s: float) -> RateLimited:
    """What a tenant is told whose bucket is empty."""
    retry_after_s = float(math.ceil(min(wait_s, LONGEST_RETRY_AFTER_S)))
    return RateLimited(f"tenant: {tenant!r} has used up its tokens; {cost} are asked for", retry_after_s=retry_after_s)


class Account:
    """Of one drive of one request; a context manager around it. No rate: nothing costs anything."""

    def __init__(self, ledger: Ledger, plan: Plan, rate: Rate | None):
        self._ledger, self._plan, self._rate = ledger, plan, rate
        self._price = len(plan.first.prompt) + plan.first.stopping.max_tokens
        self._held = 0  # paid, and not given back so far
        self._entry: Entry | None = None

    async def __aenter__(self) -> Self:
        """RateLimited when the tenant has used up its tokens. What is resumed is looked up first, see `resumed`."""
        if self._plan.request.resume is None:
            await self._pay(self._price)
        return self

    async def resumed(self, record: Record) -> None:
        """Pay what is left to pay of a request that is known, or not. RateLimited."""
        if not record.finished:
            await self._pay(owed(self._price, len(self._plan.first.prompt), record))

    def driven(self, entry: Entry) -> None:
        """It runs; from now on its prompt is used."""
        self._entry = entry

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        used = len(self._plan.first.prompt) + len(self._entry.tokens) if self._entry else 0
        if self._rate is None or used >= self._held:
            return
        if self._entry is None or await self._ledger.confirmed(self._entry):
            await self._ledger.charge(self._plan.first.tenant, used - self._held, self._rate)

    async def _pay(self, cost: int) -> None:
        if self._rate is not None and cost:
            await self._ledger.charge(self._plan.first.tenant, cost, self._rate)
        self._held = self._price


def owed(price: int, num_prompt: int, record: Record) -> int:
    """Tokens to pay for an unfinished request: all of an unknown one, nothing where the last driver gave nothing back."""
    if not record.fields:
        return price
    return 0 if record.running else max(0, price - num_prompt - len(record.output))
