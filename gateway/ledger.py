"""The ledger: entries of the running requests of a gateway, and their writing into the session store.

A generation only marks what is to be written. One loop writes it, for all requests together and several tokens at a time, never on the path
of a token. While the store does not answer, requests run on, this gateway counts quotas and poison by itself, and the entries are written
when the store answers again.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from weakref import WeakValueDictionary

import structlog

from gateway.admission import retry_after_s
from gateway.redis_store import Store
from gateway.requests import as_chosen
from gateway.router import TTL_S, IsHeld, Prefixes, PrefixKeys, prefix_lengths, tokens_held
from gateway.session_store import (
    FIELDS_OF_STORE,
    INTERRUPTED,
    KEPT_AFTER_END_S,
    MemoryStore,
    Rate,
    Record,
    Run,
    StoreRefused,
    StoreUnavailable,
    Write,
    stale,
)
from gateway.uncancelled import uncancelled
from rootward.core.requests import TokenLogprob, VerifierRequest
from rootward.errors import InvalidRequest, RateLimited, Unavailable
from rootward.ports import Lease

log = structlog.get_logger()

POISON_TTL_S = 600.0
DOWN_PAUSE_S = 1.0  # between two attempts to reach a store that did not answer
# Tokens of all requests in one write, each with the likely ones beside it: the store has a few seconds for it.
MOST_WRITTEN = 1 << 16
WRITING_SHARE = 0.1  # largest share of the time that the loop writes
LONGEST_PAUSE_S = 1.0
QUOTA_S = 0.25  # longest wait for a tenant's bucket
HINT_S = 0.05  # longest wait for hints on cached prefixes


class PoisonRequest(InvalidRequest):
    """Verifiers died while they worked on a request like this one."""

    reason = "POISON_REQUEST"


@dataclass(slots=True, eq=False)
class Entry:
    """One running request. It is lost when another gateway drives the request; the generation must then stop."""

    lease: Lease
    held_until: float  # when the lease expires in the store, unless renewed
    next_epoch_pending: bool = False  # the store may have granted a later epoch than the lease has
    tokens: list[int] = field(default_factory=list)  # committed so far
    accepted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, or none at all
    recorded: int = 0  # number of these tokens that are in the store's log
    fields: dict[str, str] = field(default_factory=dict)  # of the record, without FIELDS_OF_STORE
    due: set[str] = field(default_factory=set)  # names of fields that are not yet in the store
    lost: bool = False
    ended: str = ""  # the final state of a request that is over
    ended_at: float = 0.0

    @property
    def epoch(self) -> int:
        return self.lease.epoch

    def output(self, begin: int = 0, most: int | None = None) -> Run:
        """The tokens from this one on, at most so many."""
        part = slice(begin, None if most is None else begin + most)
        return Run(tuple(self.tokens[part]), tuple(self.accepted[part]), tuple(self.logprobs[part]))


class Ledger:
    """Owns the entries; `run` writes them.

    now: the loop's clock in seconds. model: fingerprint of the served model; "" = unknown. is_held: as in `router.Prefixes`. lease_s:
    duration of a lease. flush_s: least pause between two writes.
    """

    def __init__(
        self,
        store: Store,
        *,
        now: Callable[[], float],
        model: Callable[[], str] = lambda: "",
        is_held: IsHeld = lambda process, age_s: True,
        lease_s: float = 5.0,
        flush_s: float = 0.05,
    ):
        self._store, self._now, self._model, self._is_held = store, now, model, is_held
        self.prefixes = Prefixes(now, is_held)
        # By the identity of the prompt, which they hold.
        self._keys: WeakValueDictionary[int, PrefixKeys] = WeakValueDictionary()
        self._stand_in = MemoryStore(now=now)  # for quotas and poison while the store does not answer
        self._lease_s, self._flush_s = lease_s, flush_s
        self._entries: set[Entry] = set()
        self._dirty = asyncio.Event()
        self._writing = asyncio.Lock()
        self.down = False  # the store did not answer lately

    async def probe(self) -> None:
        """Ask the store once, so that a gateway that starts without it does not make its first requests wait."""
        try:
            await self._store.ping()
        except StoreUnavailable as error:
            self._mark_down(error)

    # -- Leases ---------------------------------------------------------------------------------------------------------

    async def begin(self, request_id: str, fields: Mapping[str, str] | None = None, *, least_epoch: int = 1) -> Entry:
        """Take the lease of a new run, with these fields in its record. DuplicateRequest when the request is running somewhere.

        While the store does not answer the request runs under epoch 1 unrecorded: a verifier that knows a higher epoch refuses it, and the
        lease is taken in the store as soon as that answers. The lease of a request that is cancelled meanwhile is given back.
        """
        return await uncancelled(self._begin(request_id, fields, least_epoch), self._abandon)

    async def _begin(self, request_id: str, fields: Mapping[str, str] | None, least_epoch: int) -> Entry:
        if any(entry.ended and entry.lease.request_id == request_id for entry in self._entries):
            await self.flush()  # the store does not know yet that the last request of this id has ended here
        holder, asked, fields = _holder(), self._now(), dict(fields or {})
        due: set[str] = set()
        try:
            async with self._answering():
                lease = await self._store.begin(request_id, holder, self._lease_s, fields, least_epoch=least_epoch)
        except StoreUnavailable as error:
            self._mark_down(error)
            lease, due = Lease(request_id, least_epoch, holder), set(fields)
            if isinstance(error, StoreRefused):  # nor would it take writes
                return Entry(lease, asked + self._lease_s, fields=fields)
        return self._entered(Entry(lease, asked + self._lease_s, fields=fields, due=due))

    async def take_over(self, request_id: str, digest: str) -> tuple[Entry | None, Record]:
        """Continue a run, whoever drives it now. No entry if it is unknown (empty record) or finished.

        DuplicateRequest when the id belongs to another request. Unavailable while the store does not answer, since another gateway may be
        driving the request. The lease of a request that is cancelled meanwhile is given back."""

        async def undo(taken: tuple[Entry | None, Record]) -> None:
            self.leave(*taken)

        return await uncancelled(self._take_over(request_id, digest), undo)

    async def _take_over(self, request_id: str, digest: str) -> tuple[Entry | None, Record]:
        if any(entry.lease.request_id == request_id for entry in self._entries):
            await self.flush()  # the store does not know all of what has run here
        asked = self._now()
        try:
            async with self._answering():
                lease, record = await self._store.take_over(request_id, _holder(), self._lease_s, digest)
        except StoreUnavailable as error:
            self._mark_down(error)
            message = f"request {as_chosen(request_id)!r} cannot be resumed while the session store is gone"
            raise Unavailable(message, retry_after_s=DOWN_PAUSE_S) from None
        if lease is None:
            return None, record
        # Without `finish` of an earlier holder, too: this run has its own end.
        kept = {name: value for name, value in record.fields.items() if name not in FIELDS_OF_STORE | {"finish"}}
        entry = Entry(lease, asked + self._lease_s, recorded=len(record.output), fields=kept)
        self.extend(entry, record.output)
        return self._entered(entry), record

    async def next_epoch(self, entry: Entry, *, above: int = 0) -> None:
        """Call before a new attempt: results of the lost one have an older epoch. StaleEpoch when another gateway took over.

        above: an epoch that a verifier remembers of this id, and the store has forgotten; only a store that answers can say that no other
        gateway was given it. Without the store only the holder of a valid lease may increment the epoch by itself. Otherwise Unavailable:
        the client may resume when the store answers. The entry of a request that is cancelled meanwhile still gets the new epoch, so that
        the store accepts its end.
        """
        await uncancelled(self._next_epoch(entry, above))

    async def _next_epoch(self, entry: Entry, above: int) -> None:
        asked = self._now()
        entry.next_epoch_pending = True
        try:
            entry.lease = await self._store.next_epoch(entry.lease, self._lease_s, above)
            entry.held_until = asked + self._lease_s
        except StoreUnavailable as error:
            self._mark_down(error)
            if above or self._now() >= entry.held_until:
                cause = "a verifier remembers a later epoch" if above else "its lease has run out"
                message = f"the session store is gone, and this request needs it: {cause}"
                raise Unavailable(message, retry_after_s=DOWN_PAUSE_S) from None
            entry.lease = Lease(entry.lease.request_id, entry.lease.epoch + 1, entry.lease.holder)
        finally:
            entry.next_epoch_pending = False
        self._dirty.set()

    # -- Entries --------------------------------------------------------------------------------------------------------

    def extend(self, entry: Entry, run: Run) -> None:
        """Append committed tokens. StaleEpoch when another gateway has taken over."""
        if entry.lost:
            raise stale(entry.lease.request_id)
        entry.tokens += run.tokens
        entry.accepted += run.accepted
        entry.logprobs += run.logprobs
        self._dirty.set()

    def note(self, entry: Entry, **fields: str) -> None:
        """Set fields in the record of a request."""
        entry.fields |= fields
        entry.due |= set(fields)
        self._dirty.set()

    def end(self, entry: Entry, state: str) -> None:
        """The request is over: FINISHED or INTERRUPTED."""
        entry.ended, entry.ended_at = state, self._now()
        self._dirty.set()

    def leave(self, entry: Entry | None, record: Record) -> None:
        """A request that was taken over does not run here after all: end it with the state of its record, which says what is paid."""
        if entry is not None:
            self.end(entry, record.fields.get("state", INTERRUPTED))

    async def _abandon(self, entry: Entry) -> None:
        self.end(entry, INTERRUPTED)

    async def confirmed(self, entry: Entry) -> bool:
        """Whether no other gateway has taken the request over, as far as a store that answers can say."""
        if not self.down:
            await self.flush()
        return not entry.lost

    # -- Quotas, poison and hints ---------------------------------------------------------------------------------------

    async def charge(self, tenant: str, cost: int, rate: Rate) -> None:
        """Take tokens from a tenant's bucket; RateLimited when it has too few. A negative cost gives tokens back.

        If the store takes longer than QUOTA_S, this gateway counts by itself."""
        try:
            async with self._answering(QUOTA_S):
                wait_s = await self._store.take_tokens(tenant, cost, rate)
        except StoreUnavailable:
            wait_s = await self._stand_in.take_tokens(tenant, cost, rate)
        if wait_s:
            message = f"tenant: {tenant!r} has used up its tokens; {cost} are asked for"
            raise RateLimited(message, retry_after_s=retry_after_s(wait_s))

    async def add_poison(self, request: VerifierRequest) -> None:
        """Refuse requests of this content for POISON_TTL_S, here and, if the store answers, at all gateways."""
        content = self._content(request)
        log.error("poison_request", content=content, request_id=request.request_id, tenant=request.tenant)
        await self._stand_in.add_poison(content, POISON_TTL_S)
        with suppress(StoreUnavailable):
            async with self._answering():
                await self._store.add_poison(content, POISON_TTL_S)

    async def refuse_poison(self, request: VerifierRequest) -> None:
        """PoisonRequest if this or another gateway has remembered its content. Waits for the store for at most HINT_S."""
        content = self._content(request)
        known = await self._stand_in.is_poison(content)
        if not known:
            with suppress(StoreUnavailable):
                async with self._answering(HINT_S):
                    known = await self._store.is_poison(content)
        if known:
            fix = "verifiers died while they worked on it; change the prompt or the parameters, or report it to the operator"
            raise PoisonRequest("request", request.request_id, f"is refused: {fix}")

    def _content(self, request: VerifierRequest) -> str:
        """The model and a hash of the values that it computes with, without those that a client can vary at no cost (ids, seed, deadline,
        salt)."""
        asked = (request.prompt, request.sampling, request.stopping, request.structure, request.prediction)
        text = repr((asked, (request.logprobs, request.prompt_logprobs)))
        return f"{self._model()}:{blake2b(text.encode(errors='replace'), digest_size=16).hexdigest()}"

    @asynccontextmanager
    async def suspicion(self) -> AsyncGenerator[None]:
        """Held by one request at a time in all gateways; in this gateway only while the store does not answer."""
        async with AsyncExitStack() as held:
            await held.enter_async_context(self._stand_in.suspicion())
            with suppress(StoreUnavailable):
                async with self._answering():
                    await held.enter_async_context(self._store.suspicion())
            yield

    def keys(self, request: VerifierRequest) -> PrefixKeys:
        """Keys of the prefixes of its prompt. Choices of one request have one tuple as their prompt, and share its keys while they run."""
        keys = self._keys.get(id(request.prompt))
        if keys is None or keys.about != PrefixKeys.of(self._model(), request):
            keys = self._keys[id(request.prompt)] = PrefixKeys(self._model(), request)
        return keys

    def computed(self, keys: PrefixKeys, output: Sequence[int], process: str) -> None:
        """This process of a verifier holds the KV of the prompt of these keys and of this output, or will soon."""
        self.prefixes.sent(keys.with_output(output), process)
        self._dirty.set()

    async def held(self, keys: PrefixKeys) -> dict[str, int]:
        """The number of tokens of a prompt that each verifier is thought to hold. Waits for the store for at most HINT_S."""
        held = tokens_held(self.prefixes.holders(keys.keys), self._is_held)
        if keys.keys and max(held.values(), default=0) < prefix_lengths(len(keys.prompt))[-1]:
            with suppress(StoreUnavailable):
                async with self._answering(HINT_S):
                    shared = await self._store.hints(self._model(), keys.keys)
                for name, tokens in tokens_held(shared, self._is_held).items():
                    held[name] = max(tokens, held.get(name, 0))
        return held

    # -- Writing --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write until cancelled. Call `flush` once more afterwards, so that no lease is left behind."""
        while True:
            timeout = self._lease_s / 3 if self._entries else None
            with suppress(TimeoutError):
                async with asyncio.timeout(DOWN_PAUSE_S if self.down else timeout):
                    await self._dirty.wait()
            began = self._now()
            await self.flush()
            pause_s = max(self._flush_s, (self._now() - began) * (1 / WRITING_SHARE - 1))
            await asyncio.sleep(DOWN_PAUSE_S if self.down else min(pause_s, LONGEST_PAUSE_S, self._lease_s / 6))

    async def flush(self) -> None:
        """Write everything that is due, or note that the store does not answer."""
        async with self._writing:
            self._dirty.clear()
            try:
                if self.down:
                    await self._store.ping()  # there may be no write, which would show whether the store is back
                due = {entry for entry in self._entries if self._is_due(entry)}
                while due:
                    left = await self._write(list(due))
                    due = left and left | {entry for entry in self._entries if self._is_late(entry)}
                await self._store.put_hints(self._model(), self.prefixes.take_unpublished(), TTL_S)
            except StoreUnavailable as error:
                self._mark_down(error)
                self.prefixes.take_unpublished()  # they would pile up, and later be published as if they were new
                too_old = self._now() - KEPT_AFTER_END_S
                self._entries = {e for e in self._entries if not e.ended or e.ended_at > too_old}
            else:
                if self.down:
                    log.info("session_store_back")
                self.down = False

    def _is_due(self, entry: Entry) -> bool:
        return bool(self._is_late(entry) or entry.ended or entry.due or len(entry.tokens) > entry.recorded)

    def _is_late(self, entry: Entry) -> bool:
        return self._now() > entry.held_until - self._lease_s * 2 / 3

    async def _write(self, entries: Sequence[Entry]) -> set[Entry]:
        """Renew, append and end, in one call for all. Returns those of which a part is left, after MOST_WRITTEN."""
        self._entries -= {entry for entry in entries if entry.lost and entry.ended}
        held = [entry for entry in entries if not entry.lost]
        if not held:
            return set()
        asked = self._now()
        writes = _due(held)
        left = {entry for entry, write in zip(held, writes, strict=True) if write.end < len(entry.tokens)}
        lengths = await self._store.write(writes, self._lease_s)
        for entry, write, length in zip(held, writes, lengths, strict=True):
            if isinstance(length, StoreRefused):  # and will again: the request runs on unrecorded
                log.error("request_unrecorded", error=str(length))
                self._entries.discard(entry)
            # Not while another attempt begins, nor after: the store may have refused this write for the new epoch of this very holder.
            elif entry.lease == write.lease and not entry.next_epoch_pending:
                self._written(entry, write, length, asked)
        return {
            entry for entry, length in zip(held, lengths, strict=True) if entry in left and entry.recorded == length
        }

    def _written(self, entry: Entry, write: Write, length: int, asked: float) -> None:
        if length < 0:
            entry.lost = True
            self._dirty.set()
            return
        entry.held_until = asked + self._lease_s
        entry.due -= {name for name, value in write.fields.items() if entry.fields[name] == value}
        if length == write.end:
            entry.recorded = length
            if write.state:
                self._entries.discard(entry)
            return
        # The store lost its log, or has more than was confirmed: write all of it again.
        entry.due |= set(entry.fields)
        entry.recorded = 0
        self._dirty.set()

    def _entered(self, entry: Entry) -> Entry:
        self._entries.add(entry)
        self._dirty.set()
        return entry

    @asynccontextmanager
    async def _answering(self, timeout_s: float | None = None) -> AsyncGenerator[None]:
        """Bounds calls of the store for a request: StoreUnavailable after `timeout_s`, and at once while the store is down."""
        if self.down:
            raise StoreUnavailable("the session store did not answer lately")
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise StoreUnavailable("the session store is slow") from None

    def _mark_down(self, error: StoreUnavailable) -> None:
        """The store has failed, unless it refuses one request alone."""
        if isinstance(error, StoreRefused):
            log.error("request_unrecorded", error=str(error))
            return
        if not self.down:
            log.warning("session_store_down", running=len(self._entries))
        self.down = True
        self._dirty.set()


def _due(entries: Sequence[Entry]) -> list[Write]:
    """What each entry has to be written, up to MOST_WRITTEN in all. An entry ends with its last part.

    Until a part of the log is in the store, no write shows whether the store has lost the record: so all fields are written each time."""
    writes, left = [], MOST_WRITTEN
    for entry in entries:
        width = 1 + len(entry.logprobs[0].top) if entry.logprobs else 1
        run = entry.output(entry.recorded, left // width)
        left -= width * len(run)
        whole = entry.recorded + len(run) == len(entry.tokens)
        fields = {name: entry.fields[name] for name in (entry.due if entry.recorded else entry.fields)}
        writes.append(Write(entry.lease, entry.recorded, run, fields, entry.ended if whole else ""))
    return writes


def _holder() -> str:
    """A new name for each run of a request: a second run of the same id on this gateway is a duplicate, too."""
    return uuid.uuid4().hex
