"""The session store: leases, epochs and the committed log of every request, quotas, stored answers and hints on cached prefixes.

`MemoryStore` is the store of one process and the reference for the semantics; `redis_store.py` has the same rules as scripts, so that any
gateway can continue a request of another one. The store is never on the path of a token: `ledger.py` writes it behind the streams.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from gateway.requests import as_chosen
from gateway.router import Holders
from rootward.core.requests import TokenLogprob
from rootward.errors import DuplicateRequest, StaleEpoch, Unavailable
from rootward.ports import Lease

RETENTION_S = 660.0  # the longest request (600 s) + 60 s
KEPT_AFTER_END_S = 60.0
FORGET_EVERY_S = 1.0
MAX_POISON = 1024  # requests that a MemoryStore remembers

RUNNING, FINISHED, INTERRUPTED = "running", "finished", "interrupted"
# Of a record, written by the store itself; `before` and `length` by Redis alone.
FIELDS_OF_STORE = frozenset({"state", "epoch", "holder", "before", "length"})


class StoreUnavailable(Unavailable):
    """The session store does not answer. Running requests go on without it."""


class StoreRefused(StoreUnavailable):
    """The session store answers calls about this request with an error. It serves others."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive committed tokens. `accepted` and `logprobs` are as in `Committed`: one per token, or no logprobs at all."""

    tokens: tuple[int, ...] = ()
    accepted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def __add__(self, more: Run) -> Run:
        return Run(self.tokens + more.tokens, self.accepted + more.accepted, self.logprobs + more.logprobs)

    def since(self, begin: int) -> Run:
        return Run(self.tokens[begin:], self.accepted[begin:], self.logprobs[begin:])

    def to_json(self) -> str:
        item: dict[str, object] = {"t": self.tokens, "a": [int(flag) for flag in self.accepted]}
        if self.logprobs:
            item["l"] = [[of.logprob, of.top] for of in self.logprobs]
        return json.dumps(item, separators=(",", ":"))

    @staticmethod
    def joined(items: Iterable[str]) -> Run:
        """All items of a log, each a run as JSON, as one run."""
        read = [json.loads(item) for item in items]
        logprobs = [TokenLogprob(own, tuple((t, p) for t, p in top)) for item in read for own, top in item.get("l", ())]
        tokens, accepted = ([value for item in read for value in item[name]] for name in ("t", "a"))
        return Run(tuple(tokens), tuple(map(bool, accepted)), tuple(logprobs))


@dataclass(frozen=True, slots=True)
class Record:
    """The fields and the output that the store has of a request; no fields: it does not know the request."""

    fields: Mapping[str, str] = field(default_factory=dict)
    output: Run = field(default_factory=Run)

    @property
    def finished(self) -> bool:
        return self.fields.get("state") == FINISHED

    @property
    def running(self) -> bool:
        """A gateway drives the request, or died while it did."""
        return self.fields.get("state") == RUNNING


@dataclass(frozen=True, slots=True)
class Write:
    """An update of one running request. It renews the lease, sets `fields` and appends `run` if the log is `offset` long (at 0 it replaces
    the log). With a `state` the request ends if the log then has the whole output, which is as long as `end`."""

    lease: Lease
    offset: int = 0
    run: Run = field(default_factory=Run)
    fields: Mapping[str, str] = field(default_factory=dict)
    state: str = ""

    @property
    def end(self) -> int:
        return self.offset + len(self.run)


@dataclass(frozen=True, slots=True)
class Rate:
    """`tokens_per_s` into a bucket of `size` tokens."""

    tokens_per_s: float
    size: float


@dataclass(slots=True)
class _StoredRequest:
    fields: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    holder: str = ""
    lease_until: float = 0.0
    log: Run = field(default_factory=Run)
    expires: float = 0.0


@dataclass(slots=True)
class _StoredResponse:
    text: str
    expires: float


class MemoryStore:
    """The store of one process; its contents end with the process. `now` is a monotonic clock in seconds.

    Calls of any store are bounded in time and may raise StoreUnavailable; those of this one do not.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._requests: dict[str, _StoredRequest] = {}
        self._responses: dict[tuple[str, str], _StoredResponse] = {}  # by space and name, the oldest first
        self._poison: dict[str, float] = {}  # content → when it expires
        self._suspicion = asyncio.Lock()
        self._full_at: dict[str, float] = {}  # tenant → when its bucket is full, as that of an unknown tenant is
        self._next_forget = 0.0

    async def ping(self) -> None:
        """StoreUnavailable if the store does not answer."""

    async def begin(
        self, request_id: str, holder: str, ttl_s: float, about: Mapping[str, str], *, least_epoch: int = 1
    ) -> Lease:
        """The lease of a new run, with the next epoch, at least `least_epoch`, and an empty log. DuplicateRequest while another holder's
        lease is valid; while the same holder's is, nothing changes."""
        self._forget_expired()
        stored = self._requests.setdefault(request_id, _StoredRequest())
        if self._is_leased(stored):
            if stored.holder != holder:
                raise duplicate(request_id)
            return Lease(request_id, stored.epoch, holder)
        stored.fields, stored.log = dict(about), Run()
        return self._grant(request_id, stored, max(stored.epoch + 1, least_epoch), holder, ttl_s)

    async def take_over(self, request_id: str, holder: str, ttl_s: float, digest: str) -> tuple[Lease | None, Record]:
        """Continue a run, whoever drives it now. No lease if the id is unknown (empty record) or the run is finished. A holder that has
        taken it over has the same lease again.

        DuplicateRequest if the run answers a request of another digest."""
        self._forget_expired()
        stored = self._requests.get(request_id)
        if stored is None or "digest" not in stored.fields:
            return None, Record()
        if stored.fields["digest"] != digest:
            raise another_request(request_id)
        record = Record(dict(stored.fields), stored.log)
        if record.finished:
            return None, record
        if stored.holder == holder:
            return Lease(request_id, stored.epoch, holder), record
        return self._grant(request_id, stored, stored.epoch + 1, holder, ttl_s), record

    async def next_epoch(self, lease: Lease, ttl_s: float, above: int = 0) -> Lease:
        """The lease of the same holder's next attempt, with an epoch above this one, too; of the same lease twice, the same. StaleEpoch if
        another holder drives the request now."""
        stored = self._requests.setdefault(lease.request_id, _StoredRequest())
        # The holder may not know its last epoch: the reply to an earlier call may have been lost.
        is_own = self._is_leased(stored) and stored.holder == lease.holder
        if not is_own and not self._may_drive(stored, lease):
            raise stale(lease.request_id)
        epoch = max(stored.epoch, max(lease.epoch, above) + 1)
        return self._grant(lease.request_id, stored, epoch, lease.holder, ttl_s)

    async def write(self, writes: Sequence[Write], ttl_s: float) -> list[int]:
        """The length of each log afterwards; -1 if another holder drives that request now. (`RedisStore`: StoreRefused for one refused.)"""
        return [self._write(write, ttl_s) for write in writes]

    def _write(self, write: Write, ttl_s: float) -> int:
        lease = write.lease
        stored = self._requests.setdefault(lease.request_id, _StoredRequest())
        if not self._may_drive(stored, lease):
            return -1
        stored.fields.update(write.fields)
        self._grant(lease.request_id, stored, lease.epoch, lease.holder, ttl_s)
        if not write.offset:
            stored.log = Run()
        if len(stored.log) == write.offset:
            stored.log += write.run
        if write.state and len(stored.log) == write.end:
            stored.fields["state"], stored.lease_until = write.state, 0.0
            stored.expires = self._now() + KEPT_AFTER_END_S
        return len(stored.log)

    async def put_hints(self, model: str, held: Mapping[str, Sequence[str]], ttl_s: float) -> None:
        """Publish keys of held prefixes, by process of a verifier. In memory no other gateway would read them."""

    async def hints(self, model: str, keys: Sequence[str]) -> Sequence[Holders]:
        """The holders of each of these prefixes, in one round trip."""
        return [{} for _ in keys]

    async def take_tokens(self, tenant: str, cost: int, rate: Rate) -> float:
        """Take `cost` tokens from the tenant's bucket; a negative cost gives them back.

        Returns 0 if they were taken, else the seconds until there are so many. One request may overdraw a full bucket, so that none is
        too large for ever."""
        self._forget_expired()
        now = self._now()
        full_at = max(now, self._full_at.get(tenant, now))
        level = rate.size - (full_at - now) * rate.tokens_per_s
        needed = min(cost, rate.size)
        if cost > 0 and level < needed:
            return (needed - level) / rate.tokens_per_s
        self._full_at[tenant] = full_at + cost / rate.tokens_per_s
        return 0.0

    async def add_poison(self, content: str, ttl_s: float) -> None:
        """Remember the hash of a request that verifiers died of."""
        self._poison[content] = self._now() + ttl_s
        if len(self._poison) > MAX_POISON:
            del self._poison[next(iter(self._poison))]

    async def is_poison(self, content: str) -> bool:
        self._forget_expired()
        return content in self._poison

    async def put_response(self, space: str, name: str, text: str, *, ttl_s: float, max_responses: int) -> None:
        """Store a response for `ttl_s`; the space keeps its newest `max_responses`."""
        self._responses.pop((space, name), None)
        self._responses[space, name] = _StoredResponse(text, self._now() + ttl_s)
        for key in [key for key in self._responses if key[0] == space][:-max_responses]:
            del self._responses[key]

    async def response(self, space: str, name: str) -> str | None:
        """The stored text; None if there is none."""
        self._forget_expired()
        stored = self._responses.get((space, name))
        return stored.text if stored is not None and stored.expires > self._now() else None

    async def delete_response(self, space: str, name: str) -> bool:
        """Whether there was one."""
        known = await self.response(space, name) is not None
        self._responses.pop((space, name), None)
        return known

    def suspicion(self) -> AbstractAsyncContextManager[None]:
        """A lock that one request at a time holds, in all gateways."""
        return self._suspicion

    async def close(self) -> None:
        """Close the connections."""

    def _is_leased(self, stored: _StoredRequest) -> bool:
        return self._now() < stored.lease_until

    def _may_drive(self, stored: _StoredRequest, lease: Lease) -> bool:
        return not (self._is_leased(stored) and stored.holder != lease.holder) and stored.epoch <= lease.epoch

    def _grant(self, request_id: str, stored: _StoredRequest, epoch: int, holder: str, ttl_s: float) -> Lease:
        now = self._now()
        stored.epoch, stored.holder, stored.lease_until = epoch, holder, now + ttl_s
        stored.fields |= {"state": RUNNING, "epoch": str(epoch), "holder": holder}
        stored.expires = now + RETENTION_S
        return Lease(request_id, epoch, holder)

    def _forget_expired(self) -> None:
        """Once a second at most: the store holds the last minutes, so a scan is cheap."""
        now = self._now()
        if now < self._next_forget:
            return
        self._next_forget = now + FORGET_EVERY_S
        self._requests = {name: one for name, one in self._requests.items() if one.expires > now}
        self._responses = {key: one for key, one in self._responses.items() if one.expires > now}
        self._full_at = {tenant: at for tenant, at in self._full_at.items() if at > now}
        self._poison = {content: until for content, until in self._poison.items() if until > now}


def duplicate(request_id: str) -> DuplicateRequest:
    """The error of the second of two running requests with one id."""
    fix = "is running already; choose another id or wait for its end"
    return DuplicateRequest(f"request_id: {as_chosen(request_id)!r} {fix}", metadata={"field": "request_id"})


def another_request(request_id: str) -> DuplicateRequest:
    """The error of a resumed request whose prompt or parameters are not those of the first request."""
    fix = "asks something else than what is resumed; resume with the same prompt and parameters, or choose another id"
    return DuplicateRequest(f"request_id: {as_chosen(request_id)!r} {fix}", metadata={"field": "request_id"})


def stale(request_id: str) -> StaleEpoch:
    return StaleEpoch(f"request {as_chosen(request_id)!r} is driven by another gateway now")
