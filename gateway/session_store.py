"""The session store: leases, epochs and the committed log of requests, metadata of sessions, and the ledger that writes them.

`MemoryStore` is that of a single process and says what a store does; `redis_store.py` has the same rules as scripts, so that any
gateway can continue a request of another. The `Ledger` owns the entries of running requests. A generation only marks what is to be
written; one loop writes it, all requests together and several tokens at a time, never on the path of a token. While the store does not
answer, requests run on and are written when it answers again.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

import structlog
from pydantic import TypeAdapter

from gateway.admission import Buckets, Rate, out_of_tokens
from gateway.planning import Plan
from gateway.requests import Resume, as_chosen
from gateway.router import TTL_S, Holders, IsHeld, Prefixes, prefix_keys, prefix_lengths, tokens_held
from rootward.core.requests import Finish, Rule, TokenLogprob, VerifierRequest
from rootward.errors import DuplicateRequest, InvalidRequest, StaleEpoch, Unavailable
from rootward.ports import Lease

if TYPE_CHECKING:
    from gateway.redis_store import RedisStore

log = structlog.get_logger()

Store: TypeAlias = "MemoryStore | RedisStore"

RETENTION_S = 660.0  # the longest request (600 s) + 60 s
KEPT_AFTER_END_S = 60.0
FORGET_EVERY_S = 1.0

POISON_TTL_S = 600.0
MAX_POISON = 1024  # requests that a MemoryStore remembers

RUNNING, FINISHED, INTERRUPTED = "running", "finished", "interrupted"
DOWN_PAUSE_S = 1.0  # between questions to a store that did not answer
WRITING_SHARE = 0.1  # of the time at most
LONGEST_PAUSE_S = 1.0
QUOTA_S = 0.25  # longest wait for a tenant's bucket
HINT_S = 0.05  # longest wait for hints on who holds a prompt


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

    @property
    def running(self) -> bool:
        """Somebody drives it, or died while driving it."""
        return self.fields.get("state") == RUNNING


@dataclass(frozen=True, slots=True)
class Write:
    """What is due of one running request: its lease is renewed, `run` appended if the log is `offset` long (at 0 it replaces the log), and,
    where `state` is not empty, the request is over as soon as the log holds all `total` tokens."""

    lease: Lease
    offset: int = 0
    run: Run = field(default_factory=Run)
    fields: Mapping[str, str] = field(default_factory=dict)
    state: str = ""
    total: int = 0


@dataclass(slots=True)
class _KeptResponse:
    text: str
    expires: float


@dataclass(slots=True)
class _Kept:
    fields: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    holder: str = ""
    lease_until: float = 0.0
    log: Run = field(default_factory=Run)
    expires: float = 0.0


class MemoryStore:
    """A store of one process; nothing survives it. `now` is a monotonic clock in seconds.

    Control plane only: never on the round path. Every call is bounded in time and may raise StoreUnavailable; here none does.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic, retention_s: float = RETENTION_S):
        self._now, self._retention_s = now, retention_s
        self._requests: dict[str, _Kept] = {}
        self._responses: dict[str, dict[str, _KeptResponse]] = {}  # by space and name, the oldest first
        self._poison: dict[str, float] = {}
        self._suspicion = asyncio.Lock()
        self._buckets = Buckets(now)
        self._look_again = 0.0

    async def ping(self) -> None:
        """Whether it answers."""

    async def begin(
        self, request_id: str, holder: str, ttl_s: float, about: Mapping[str, str], *, least_epoch: int = 1
    ) -> Lease:
        """A new run, with the next epoch, at least `least_epoch`, and an empty log. DuplicateRequest if another holder's lease is alive."""
        self._forget_expired()
        kept = self._requests.setdefault(request_id, _Kept())
        if self._alive(kept) and kept.holder != holder:
            raise duplicate(request_id)
        kept.fields, kept.log = dict(about), Run()
        return self._grant(request_id, kept, max(kept.epoch + 1, least_epoch), holder, ttl_s)

    async def take_over(self, request_id: str, holder: str, ttl_s: float, digest: str) -> tuple[Lease | None, Record]:
        """Go on with a run, whoever drives it now. No lease: the id is unknown (empty record) or the run is finished.

        DuplicateRequest if the run answers a request of another digest."""
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
        """For another attempt of the same holder. StaleEpoch if somebody else drives the request now."""
        kept = self._requests.setdefault(lease.request_id, _Kept())
        if not self._may_drive(kept, lease):
            raise stale(lease.request_id)
        return self._grant(lease.request_id, kept, lease.epoch + 1, lease.holder, ttl_s)

    async def write(self, writes: Sequence[Write], ttl_s: float) -> list[int]:
        """Length of each log afterwards; -1: somebody else drives that request now."""
        return [self._write(write, ttl_s) for write in writes]

    def _write(self, write: Write, ttl_s: float) -> int:
        kept = self._requests.setdefault(write.lease.request_id, _Kept())
        if not self._may_drive(kept, write.lease):
            return -1
        self._grant(write.lease.request_id, kept, write.lease.epoch, write.lease.holder, ttl_s)
        if not write.offset:
            kept.log = Run()
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

    async def record(self, request_id: str) -> Record:
        self._forget_expired()
        kept = self._requests.get(request_id)
        return Record(dict(kept.fields), kept.log) if kept else Record()

    async def put_hints(
        self, model: str, held: Mapping[str, Sequence[str]], gone: Mapping[str, Sequence[str]], ttl_s: float
    ) -> None:
        """Process of a verifier → keys of prefixes whose KV it holds, and of those that it holds no more. Here nobody else would ask."""

    async def hints(self, model: str, keys: Sequence[str]) -> Sequence[Holders]:
        """Who holds each of these prefixes, in one round trip."""
        return [{} for _ in keys]

    async def take_tokens(self, tenant: str, cost: int, rate: Rate) -> float:
        """From the tenant's bucket, see `Buckets.take`."""
        return self._buckets.take(tenant, cost, rate)

    async def add_poison(self, content: str, ttl_s: float) -> None:
        """Remember the hash of a request that verifiers died of."""
        self._poison[content] = self._now() + ttl_s
        if len(self._poison) > MAX_POISON:
            del self._poison[next(iter(self._poison))]

    async def is_poison(self, content: str) -> bool:
        self._forget_expired()
        return content in self._poison

    async def put_response(self, space: str, name: str, text: str, *, ttl_s: float, max_responses: int) -> None:
        """Store one, for `ttl_s`; of more than `max_responses` of the space the oldest go."""
        stored = self._responses.setdefault(space, {})
        stored.pop(name, None)
        stored[name] = _KeptResponse(text, self._now() + ttl_s)
        while len(stored) > max_responses:
            del stored[next(iter(stored))]

    async def response(self, space: str, name: str) -> str | None:
        """The text that was stored, if it is still there."""
        self._forget_expired()
        kept = self._responses.get(space, {}).get(name)
        return kept.text if kept is not None and kept.expires > self._now() else None

    async def delete_response(self, space: str, name: str) -> bool:
        """Whether it was there."""
        known = await self.response(space, name) is not None
        if known:
            del self._responses[space][name]
        return known

    def suspicion(self) -> AbstractAsyncContextManager[None]:
        """One holder at a time in all gateways."""
        return self._suspicion

    async def close(self) -> None:
        """Let go of its connections."""

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
        self._poison = {content: until for content, until in self._poison.items() if until > now}
        for space, stored in list(self._responses.items()):
            self._responses[space] = {name: kept for name, kept in stored.items() if kept.expires > now}
            if not self._responses[space]:
                del self._responses[space]


def duplicate(request_id: str) -> DuplicateRequest:
    """What the second of two live requests with one id is told."""
    fix = "is running already; choose another id or wait for its end"
    return DuplicateRequest(f"request_id: {as_chosen(request_id)!r} {fix}", metadata={"field": "request_id"})


def another_request(request_id: str) -> DuplicateRequest:
    fix = "asks something else than what is resumed; resume with the same prompt and parameters, or choose another id"
    return DuplicateRequest(f"request_id: {as_chosen(request_id)!r} {fix}", metadata={"field": "request_id"})


def stale(request_id: str) -> StaleEpoch:
    return StaleEpoch(f"request {as_chosen(request_id)!r} is driven by another gateway now")


class PoisonRequest(InvalidRequest):
    """Verifiers died while they worked on a request like this one."""

    reason = "POISON_REQUEST"


class StreamInterrupted(Unavailable):
    """Tokens had been sent, and nobody can continue."""

    reason = "STREAM_INTERRUPTED"


def about(plan: Plan, model: str = "") -> dict[str, str]:
    """What the record of a request says from its beginning. The digest tells requests apart that share an id; few things enter it,
    so that gateways of two versions agree. model: its name on a gateway of several."""
    request, first = plan.request, plan.first
    asked = [
        request.tenant,
        first.prompt,
        first.stopping.max_tokens,
        request.seed,
        request.stop,
        *([model] if model else []),
    ]
    digest = blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()
    return {"digest": digest, "seed": str(first.seed)}


def with_seed(plan: Plan, record: Record) -> Plan:
    """The plan with the seed that was drawn when the request began."""
    seed = record.fields.get("seed")
    return plan if seed is None else replace(plan, first=replace(plan.first, seed=int(seed)))


def beyond_log(plan: Plan, resume: Resume, record: Record) -> Run:
    """What the client holds and the log does not, because its gateway died before it was written. The plan has the record's seed.

    InvalidRequest when they disagree. StreamInterrupted when more was received than is known and could not be repeated."""
    log = record.output
    if log and bool(log.logprobs) is (plan.first.logprobs is None):
        fix = "is not what this request began with; resume it with the same parameters"
        raise InvalidRequest("logprobs", plan.first.logprobs, fix)
    common = min(len(resume.tokens), len(log))
    if resume.tokens[:common] != log.tokens[:common]:
        raise InvalidRequest("resume_tokens", "given", "are not the output of this request so far")
    more = resume.tokens[common:]
    known = len(log) + len(more)
    if resume.offset > known and not _repeatable(plan, record):
        message = f"{resume.offset} tokens were received and {known} are known; send resume_tokens, or a new request"
        raise StreamInterrupted(message, metadata={"emitted": str(resume.offset)})
    # Neither is ever shown: the client has these tokens.
    logprobs = () if plan.first.logprobs is None else (TokenLogprob(0.0),) * len(more)
    return Run(more, (False,) * len(more), logprobs)


def _repeatable(plan: Plan, record: Record) -> bool:
    """The same tokens come again: the text depends on the target and the seed alone, and the seed is that of the beginning."""
    same_seed = plan.request.seed is not None or "seed" in record.fields
    return plan.first.sampling.greedy or (plan.first.speculation.rule is Rule.MATCH and same_seed)


FINISH = TypeAdapter(Finish)


def finish_of(fields: Mapping[str, str]) -> Finish:
    """How a finished request ended."""
    return FINISH.validate_json(fields["finish"])


@dataclass(slots=True, eq=False)
class Entry:
    """One running request. The lease is lost when another gateway drives the request; the generation must then stop."""

    lease: Lease
    held_until: float  # when the store lets others take the lease, unless renewed
    tokens: list[int] = field(default_factory=list)  # committed so far
    accepted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, or none at all
    recorded: int = 0  # of these, in the store's log
    fields: dict[str, str] = field(default_factory=dict)  # of the record, beside what every write sets
    due: set[str] = field(default_factory=set)  # of these, not yet in the store
    lost: bool = False
    ended: str = ""  # final state, once over
    ended_at: float = 0.0

    @property
    def epoch(self) -> int:
        return self.lease.epoch

    def output(self, begin: int = 0) -> Run:
        return Run(tuple(self.tokens[begin:]), tuple(self.accepted[begin:]), tuple(self.logprobs[begin:]))


class Ledger:
    """Owns the entries; `run` writes them. `now` is the loop's clock in seconds."""

    def __init__(
        self,
        store: Store,
        *,
        now: Callable[[], float],
        model: Callable[[], str] = lambda: "",
        lease_s: float = 5.0,
        flush_s: float = 0.05,
    ):
        """`model`: fingerprint of the served one, once it is known."""
        self._store, self._now, self._model = store, now, model
        self.prefixes = Prefixes(now)
        self._stand_in = MemoryStore(
            now=now
        )  # of this gateway alone, for quotas and poison while the store does not answer
        self._lease_s, self._flush_s = lease_s, flush_s
        self._entries: set[Entry] = set()
        self._dirty = asyncio.Event()
        self._writing = asyncio.Lock()
        self._down = False

    @property
    def down(self) -> bool:
        """The store did not answer lately."""
        return self._down

    async def probe(self) -> None:
        """Ask whether the store answers, so that a gateway that starts without it does not make its first requests wait."""
        try:
            await self._store.ping()
        except StoreUnavailable:
            self._mark_down()

    async def begin(self, request_id: str, about: Mapping[str, str] | None = None, *, least_epoch: int = 1) -> Entry:
        """Take the lease of a new run; `about` goes into its record. DuplicateRequest when it is running somewhere.

        While the store does not answer the request runs under epoch 1 unrecorded: a verifier that knows a higher epoch
        refuses it, and the lease is taken in the store as soon as that answers.
        """
        holder, asked, about = _holder(), self._now(), dict(about or {})
        try:
            self._must_be_up()
            lease = await self._leased(request_id, holder, about, least_epoch)
        except StoreUnavailable:
            self._mark_down()
            entry = Entry(Lease(request_id, least_epoch, holder), asked + self._lease_s, fields=about, due=set(about))
            return self._entered(entry)
        return self._entered(Entry(lease, asked + self._lease_s, fields=about))

    async def _leased(self, request_id: str, holder: str, about: Mapping[str, str], least_epoch: int) -> Lease:
        """Of an id that has just been used here the store may not have heard the end."""
        try:
            return await self._store.begin(request_id, holder, self._lease_s, about, least_epoch=least_epoch)
        except DuplicateRequest:
            if not any(entry.ended and entry.lease.request_id == request_id for entry in self._entries):
                raise
        await self.flush()
        return await self._store.begin(request_id, holder, self._lease_s, about, least_epoch=least_epoch)

    async def take_over(self, request_id: str, digest: str) -> tuple[Entry | None, Record]:
        """Go on with a run, whoever drives it now. No entry: it is unknown (empty record) or finished.

        DuplicateRequest when the id stands for another request. Unavailable while the store does not answer: nobody may then take what
        another gateway may be driving."""
        asked = self._now()
        try:
            self._must_be_up()
            lease, record = await self._store.take_over(request_id, _holder(), self._lease_s, digest)
        except StoreUnavailable:
            self._mark_down()
            message = f"request {as_chosen(request_id)!r} cannot be resumed while the session store is gone"
            raise Unavailable(message, retry_after_s=DOWN_PAUSE_S) from None
        if lease is None:
            return None, record
        known = record.output
        entry = Entry(lease, asked + self._lease_s, recorded=len(known), fields=dict(record.fields))
        self.extend(entry, known)
        return self._entered(entry), record

    async def charge(self, tenant: str, cost: int, rate: Rate) -> None:
        """Take tokens from a tenant's bucket; RateLimited when they are not there. A negative cost gives tokens back.

        A store that is slow is not waited for long: then this gateway counts by itself."""
        try:
            self._must_be_up()
            async with asyncio.timeout(QUOTA_S):
                wait_s = await self._store.take_tokens(tenant, cost, rate)
        except (StoreUnavailable, TimeoutError):
            wait_s = await self._stand_in.take_tokens(tenant, cost, rate)
        if wait_s:
            raise out_of_tokens(tenant, cost, wait_s)

    async def add_poison(self, request: VerifierRequest) -> None:
        """Verifiers died of it: requests of its content are refused for POISON_TTL_S, here and, if the store answers, at all gateways."""
        content = self._content(request)
        log.error("poison_request", content=content, request_id=request.request_id, tenant=request.tenant)
        await self._stand_in.add_poison(content, POISON_TTL_S)
        with suppress(StoreUnavailable):
            self._must_be_up()
            await self._store.add_poison(content, POISON_TTL_S)

    async def refuse_poison(self, request: VerifierRequest) -> None:
        """PoisonRequest if this gateway or another one has remembered its content. Waits for the store for at most HINT_S."""
        content = self._content(request)
        known = await self._stand_in.is_poison(content)
        if not known:
            with suppress(StoreUnavailable, TimeoutError):
                self._must_be_up()
                async with asyncio.timeout(HINT_S):
                    known = await self._store.is_poison(content)
        if known:
            fix = "verifiers died while they worked on it; change the prompt or the parameters, or report it to the operator"
            raise PoisonRequest("request", request.request_id, f"is refused: {fix}")

    def _content(self, request: VerifierRequest) -> str:
        """The model, and a hash of the values that it computes with; without those that a client can vary at no cost (ids, seed, deadline,
        salt)."""
        asked = (request.prompt, request.sampling, request.stopping, request.structure, request.prediction)
        text = repr((asked, (request.logprobs, request.prompt_logprobs)))
        return f"{self._model()}:{blake2b(text.encode(errors='replace'), digest_size=16).hexdigest()}"

    @asynccontextmanager
    async def suspicion(self) -> AsyncGenerator[None]:
        """Held by one request at a time in all gateways; in this gateway alone while the store does not answer."""
        async with AsyncExitStack() as held:
            await held.enter_async_context(self._stand_in.suspicion())
            with suppress(StoreUnavailable):
                self._must_be_up()
                await held.enter_async_context(self._store.suspicion())
            yield

    def extend(self, entry: Entry, run: Run) -> None:
        """These tokens became final. StaleEpoch when another gateway has taken over."""
        if entry.lost:
            raise stale(entry.lease.request_id)
        entry.tokens += run.tokens
        entry.accepted += run.accepted
        entry.logprobs += run.logprobs
        self._dirty.set()

    def note(self, entry: Entry, **fields: str) -> None:
        """Keep fields in the record of a request."""
        entry.fields |= fields
        entry.due |= set(fields)
        self._dirty.set()

    async def next_epoch(self, entry: Entry) -> None:
        """Before a new attempt: what the lost one still sends is older than this epoch. StaleEpoch when another gateway took over.

        Without the store only the holder of a lease that has not run out may count on by itself.
        """
        asked = self._now()
        try:
            entry.lease = await self._store.next_epoch(entry.lease, self._lease_s)
            entry.held_until = asked + self._lease_s
        except StoreUnavailable:
            self._mark_down()
            if self._now() >= entry.held_until:
                message = "the session store is gone and the lease of this request has run out"
                raise Unavailable(message, retry_after_s=1.0) from None
            entry.lease = Lease(entry.lease.request_id, entry.lease.epoch + 1, entry.lease.holder)
        self._dirty.set()

    def end(self, entry: Entry, state: str) -> None:
        """The request is over: finished or interrupted."""
        entry.ended, entry.ended_at = state, self._now()
        self._dirty.set()

    async def confirmed(self, entry: Entry) -> bool:
        """Whether nobody has taken the request over, as far as a store that answers can say."""
        if not self._down:
            await self.flush()
        return not entry.lost

    def computed(self, request: VerifierRequest, output: Sequence[int], process: str) -> None:
        """This process of a verifier holds the KV of this prompt and output, or does so soon."""
        self.prefixes.sent(prefix_keys(self._model(), request, output), process)
        self._dirty.set()

    async def held(self, request: VerifierRequest, is_held: IsHeld) -> dict[str, int]:
        """Tokens of a prompt that each verifier is thought to hold. What the store knows is not waited for long."""
        keys = prefix_keys(self._model(), request)
        own = self.prefixes.holders(keys)
        found = tokens_held(own, is_held)
        self.prefixes.withdraw(keys, own, is_held)
        if keys and max(found.values(), default=0) < prefix_lengths(len(request.prompt))[-1]:
            with suppress(StoreUnavailable, TimeoutError):
                self._must_be_up()
                async with asyncio.timeout(HINT_S):
                    shared = await self._store.hints(self._model(), keys)
                for name, tokens in tokens_held(shared, is_held).items():
                    found[name] = max(tokens, found.get(name, 0))
                self.prefixes.withdraw(keys, shared, is_held)
        return found

    async def run(self) -> None:
        """Write until cancelled. `flush` once more afterwards, so that nothing held for others stays."""
        while True:
            timeout = self._lease_s / 3 if self._entries else None
            try:
                async with asyncio.timeout(DOWN_PAUSE_S if self._down else timeout):
                    await self._dirty.wait()
            except TimeoutError:
                pass
            began = self._now()
            await self.flush()
            pause_s = max(self._flush_s, (self._now() - began) * (1 / WRITING_SHARE - 1))
            await asyncio.sleep(DOWN_PAUSE_S if self._down else min(pause_s, LONGEST_PAUSE_S, self._lease_s / 6))

    async def flush(self) -> None:
        """Write everything that is due, or note that the store does not answer."""
        async with self._writing:
            self._dirty.clear()
            try:
                if self._down:
                    await self._store.ping()  # there may be nothing to write that would show whether it is back
                await self._write([entry for entry in self._entries if self._is_due(entry)])
                await self._store.put_hints(self._model(), *self.prefixes.take_changes(), TTL_S)
            except StoreUnavailable:
                self._mark_down()
                too_old = self._now() - KEPT_AFTER_END_S
                self._entries = {e for e in self._entries if not e.ended or e.ended_at > too_old}
            else:
                if self._down:
                    log.info("session_store_back")
                self._down = False

    def _is_due(self, entry: Entry) -> bool:
        late = self._now() > entry.held_until - self._lease_s * 2 / 3
        return bool(late or entry.ended or entry.due or len(entry.tokens) > entry.recorded)

    async def _write(self, entries: Sequence[Entry]) -> None:
        """Renew, append and end, in one call for all."""
        self._entries -= {entry for entry in entries if entry.lost and entry.ended}
        held = [entry for entry in entries if not entry.lost]
        if not held:
            return
        asked = self._now()
        writes = [self._due(entry) for entry in held]
        for entry, write, length in zip(held, writes, await self._store.write(writes, self._lease_s), strict=True):
            if entry.lease == write.lease:  # otherwise another attempt has begun meanwhile, and this one counts no more
                self._written(entry, write, length, asked)

    def _due(self, entry: Entry) -> Write:
        fields = {name: entry.fields[name] for name in entry.due}
        run = entry.output(entry.recorded)
        return Write(entry.lease, entry.recorded, run, fields, entry.ended, total=len(entry.tokens))

    def _written(self, entry: Entry, write: Write, length: int, asked: float) -> None:
        if length < 0:
            entry.lost = True
            self._dirty.set()
            return
        entry.held_until = asked + self._lease_s
        entry.due -= {name for name, value in write.fields.items() if entry.fields[name] == value}
        if length == write.offset + len(write.run):
            entry.recorded = length
            if write.state:
                self._entries.discard(entry)
            return
        # The store lost what it had, or has more than was confirmed: all of it once more.
        entry.due |= set(entry.fields)
        entry.recorded = 0
        self._dirty.set()

    def _entered(self, entry: Entry) -> Entry:
        self._entries.add(entry)
        self._dirty.set()
        return entry

    def _must_be_up(self) -> None:
        """While the store is down nobody waits for it but the loop that writes."""
        if self._down:
            raise StoreUnavailable("the session store did not answer lately")

    def _mark_down(self) -> None:
        if not self._down:
            log.warning("session_store_down", running=len(self._entries))
        self._down = True
        self._dirty.set()


def _holder() -> str:
    """One per run: a second run of the same id on this gateway is a duplicate, too."""
    return uuid.uuid4().hex
