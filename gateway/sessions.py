"""Leases, epochs, the committed log and session metadata: what a store of them must do, and one in memory.

The rules are those of `redis_schema.py`; `redis_store.py` keeps them in Redis, so that any gateway can go on where another stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.names import as_chosen
from gateway.quotas import Buckets, Rate
from rootward.core.requests import TokenLogprob
from rootward.errors import DuplicateRequest, StaleEpoch, Unavailable
from rootward.ports import Lease

RETENTION_S = 660.0  # the longest request (600 s) + 60 s
KEPT_AFTER_END_S = 60.0
FORGET_EVERY_S = 1.0

RUNNING, FINISHED, INTERRUPTED = "running", "finished", "interrupted"


class StoreUnavailable(Unavailable):
    """The session store does not answer. Running requests go on without it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Committed output. `accepted` and `logprobs` are as in `Committed`, one per token; no logprobs where none are asked for."""

    tokens: tuple[int, ...] = ()
    accepted: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def since(self, begin: int) -> Run:
        return Run(self.tokens[begin:], self.accepted[begin:], self.logprobs[begin:])

    def to_json(self) -> str:
        item: dict[str, object] = {"t": self.tokens, "a": [int(flag) for flag in self.accepted]}
        if self.logprobs:
            item["l"] = [[of.logprob, of.top] for of in self.logprobs]
        return json.dumps(item, separators=(",", ":"))

    @staticmethod
    def joined(items: Iterable[str]) -> Run:
        """All items of a log together."""
        read = [json.loads(item) for item in items]
        logprobs = [TokenLogprob(own, tuple((t, p) for t, p in top)) for item in read for own, top in item.get("l", ())]
        tokens, accepted = ([value for item in read for value in item[name]] for name in ("t", "a"))
        return Run(tuple(tokens), tuple(map(bool, accepted)), tuple(logprobs))


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a request."""

    fields: Mapping[str, str] = field(default_factory=dict)
    output: Run = field(default_factory=Run)

    @property
    def finished(self) -> bool:
        return self.fields.get("state") == FINISHED


@dataclass(frozen=True, slots=True)
class Write:
    """What is due of one running request: its lease is renewed, `run` appended at `offset`, and, where `state` is not empty, the request
    is over as soon as the log holds all `total` tokens."""

    lease: Lease
    offset: int = 0
    run: Run = field(default_factory=Run)
    fields: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    total: int = 0


class Store(Protocol):
    """Control plane only: never on the round path. Every call is bounded in time and may raise StoreUnavailable."""

    async def begin(
        self, request_id: str, holder: str, ttl_s: float, about: Mapping[str, str], *, least_epoch: int = 1
    ) -> Lease:
        """A new run, with the next epoch, at least `least_epoch`, and an empty log. DuplicateRequest if another holder's lease is alive."""

    async def take_over(self, request_id: str, holder: str, ttl_s: float, digest: str) -> tuple[Lease | None, Record]:
        """Go on with a run, whoever drives it now. No lease: the id is unknown (empty record) or the run is finished.

        DuplicateRequest if the run answers a request of another digest."""

    async def next_epoch(self, lease: Lease, ttl_s: float) -> Lease:
        """For another attempt of the same holder. StaleEpoch if somebody else drives the request now."""

    async def write(self, writes: Sequence[Write], ttl_s: float) -> list[int]:
        """Length of each log afterwards; -1: somebody else drives that request now."""

    async def restart(self, lease: Lease) -> None:
        """Empty the log, if the lease is current."""

    async def record(self, request_id: str) -> Record: ...

    async def put_session(self, session_id: str, fields: Mapping[str, str], ttl_s: float) -> None: ...

    async def put_hints(self, model: str, held: Mapping[str, Sequence[str]], ttl_s: float) -> None:
        """Verifier → keys of prompt blocks whose KV it holds."""

    async def hints(
        self, model: str, keys: Sequence[str], session_id: str
    ) -> tuple[list[Mapping[str, float]], dict[str, str]]:
        """(who holds each of these blocks, what is known of the session), in one round trip."""

    async def take_tokens(self, tenant: str, cost: int, rate: Rate) -> float:
        """From the tenant's bucket, see `Buckets.take`."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Kept:
    fields: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    holder: str = ""
    lease_until: float = 0.0
    log: Run = field(default_factory=Run)
    expires: float = 0.0


class MemoryStore:
    """A store of one process: the same rules, nothing survives it. `now` is a monotonic clock in seconds."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic, retention_s: float = RETENTION_S):
        self._now, self._retention_s = now, retention_s
        self._requests: dict[str, _Kept] = {}
        self._sessions: dict[str, tuple[float, dict[str, str]]] = {}
        self._buckets = Buckets(now)
        self._look_again = 0.0

    async def begin(
        self, request_id: str, holder: str, ttl_s: float, about: Mapping[str, str], *, least_epoch: int = 1
    ) -> Lease:
        self._forget_expired()
        kept = self._requests.setdefault(request_id, _Kept())
        if self._alive(kept) and kept.holder != holder:
            raise duplicate(request_id)
        kept.fields, kept.log = dict(about), Run()
        return self._grant(request_id, kept, max(kept.epoch + 1, least_epoch), holder, ttl_s)

    async def take_over(self, request_id: str, holder: str, ttl_s: float, digest: str) -> tuple[Lease | None, Record]:
        self._forget_expired()
        kept = self._requests.get(request_id)
        if kept is None or "digest" not in kept.fields:
            return None, Record()
        if kept.fields["digest"] != digest:
            raise another_request(request_id)
        record = Record(dict(kept.fields), kept.log)
        if record.finished:
            return None, record
        return self._grant(request_id, kept, kept.epoch + 1, holder, ttl_s), record

    async def next_epoch(self, lease: Lease, ttl_s: float) -> Lease:
        kept = self._requests.setdefault(lease.request_id, _Kept())
        if not self._may_drive(kept, lease):
            raise stale(lease.request_id)
        return self._grant(lease.request_id, kept, lease.epoch + 1, lease.holder, ttl_s)

    async def write(self, writes: Sequence[Write], ttl_s: float) -> list[int]:
        return [self._write(write, ttl_s) for write in writes]

    def _write(self, write: Write, ttl_s: float) -> int:
        kept = self._requests.setdefault(write.lease.request_id, _Kept())
        if not self._may_drive(kept, write.lease):
            return -1
        self._grant(write.lease.request_id, kept, write.lease.epoch, write.lease.holder, ttl_s)
        if write.run and len(kept.log) == write.offset:
            ours = write.run
            kept.log = Run(
                kept.log.tokens + ours.tokens, kept.log.accepted + ours.accepted, kept.log.logprobs + ours.logprobs
            )
        kept.fields.update(write.fields)
        if write.state and len(kept.log) == write.total:
            kept.fields["state"], kept.lease_until = write.state, 0.0
            kept.expires = self._now() + KEPT_AFTER_END_S
        return len(kept.log)

    async def restart(self, lease: Lease) -> None:
        kept = self._requests.get(lease.request_id)
        if kept is not None and self._alive(kept) and (kept.holder, kept.epoch) == (lease.holder, lease.epoch):
            kept.log = Run()

    async def record(self, request_id: str) -> Record:
        self._forget_expired()
        kept = self._requests.get(request_id)
        return Record(dict(kept.fields), kept.log) if kept else Record()

    async def put_session(self, session_id: str, fields: Mapping[str, str], ttl_s: float) -> None:
        _, known = self._sessions.get(session_id, (0.0, {}))
        self._sessions[session_id] = (self._now() + ttl_s, {**known, **fields})

    async def put_hints(self, model: str, held: Mapping[str, Sequence[str]], ttl_s: float) -> None:
        """Whoever asks a store in memory is who would have told it."""

    async def hints(
        self, model: str, keys: Sequence[str], session_id: str
    ) -> tuple[list[Mapping[str, float]], dict[str, str]]:
        self._forget_expired()
        until, fields = self._sessions.get(session_id, (0.0, {}))
        return [], dict(fields) if self._now() < until else {}

    async def take_tokens(self, tenant: str, cost: int, rate: Rate) -> float:
        return self._buckets.take(tenant, cost, rate)

    async def close(self) -> None:
        """Nothing is held outside this process."""

    def _alive(self, kept: _Kept) -> bool:
        return self._now() < kept.lease_until

    def _may_drive(self, kept: _Kept, lease: Lease) -> bool:
        return not (self._alive(kept) and kept.holder != lease.holder) and kept.epoch <= lease.epoch

    def _grant(self, request_id: str, kept: _Kept, epoch: int, holder: str, ttl_s: float) -> Lease:
        now = self._now()
        kept.epoch, kept.holder, kept.lease_until = epoch, holder, now + ttl_s
        kept.fields |= {"state": RUNNING, "epoch": str(epoch), "holder": holder}
        kept.expires = now + self._retention_s
        return Lease(request_id, epoch, holder)

    def _forget_expired(self) -> None:
        """Once a second at most: what is kept is of the last minutes, so a scan is cheap."""
        now = self._now()
        if now < self._look_again:
            return
        self._look_again = now + FORGET_EVERY_S
        for request_id in [i for i, kept in self._requests.items() if kept.expires <= now and kept.epoch]:
            del self._requests[request_id]
        for session_id in [i for i, (until, _) in self._sessions.items() if until <= now]:
            del self._sessions[session_id]


def duplicate(request_id: str) -> DuplicateRequest:
    """What the second of two live requests with one id is told."""
    fix = "is running already; choose another id or wait for its end"
    return DuplicateRequest(f"request_id: {as_chosen(request_id)!r} {fix}", metadata={"field": "request_id"})


def another_request(request_id: str) -> DuplicateRequest:
    fix = "asks something else than what is resumed; resume with the same prompt and parameters, or choose another id"
    return DuplicateRequest(f"request_id: {as_chosen(request_id)!r} {fix}", metadata={"field": "request_id"})


def stale(request_id: str) -> StaleEpoch:
    return StaleEpoch(f"request {as_chosen(request_id)!r} is driven by another gateway now")
