"""The record of running requests: lease, epoch and committed tokens, written to the session store off the hot path.

A generation only marks what is to be written; one loop writes it, all requests together and several tokens at a time. When the store does
not answer, running requests go on and are written when it answers again. Rules of epochs: `redis_schema.py`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from gateway.names import as_chosen, of_tenant
from gateway.prefixes import BLOCK, TTL_S, Prefixes, block_keys, tokens_held
from gateway.quotas import Buckets, Rate, refusal
from gateway.sessions import KEPT_AFTER_END_S, Record, Run, Store, StoreUnavailable, Write, stale
from rootward.core.requests import TokenLogprob, VerifierRequest
from rootward.errors import DuplicateRequest, Unavailable
from rootward.ports import Lease

log = structlog.get_logger()

SESSION_TTL_S = 3600.0
DOWN_PAUSE_S = 1.0  # between questions to a store that did not answer
WRITING_SHARE = 0.1  # of the time at most
LONGEST_PAUSE_S = 1.0
QUOTA_S = 0.25  # longest wait for a tenant's bucket
HINT_S = 0.05  # longest wait for hints on who holds a prompt


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
        self._own_buckets = Buckets(now)
        self._lease_s, self._flush_s = lease_s, flush_s
        self._entries: set[Entry] = set()
        self._sessions: dict[str, dict[str, str]] = {}
        self._dirty = asyncio.Event()
        self._writing = asyncio.Lock()
        self._down = False

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
            wait_s = self._own_buckets.take(tenant, cost, rate)
        if wait_s:
            raise refusal(tenant, cost, wait_s)

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

    def computed(self, request: VerifierRequest, output: Sequence[int], verifier: str, session_id: str = "") -> None:
        """A verifier holds the KV of this prompt and output, or does so soon."""
        text = (*request.prompt, *output)
        self.prefixes.sent(block_keys(self._model(), request.tenant, text), verifier)
        if session_id:
            self._sessions[of_tenant(request.tenant, session_id)] = {"verifier": verifier, "tokens": str(len(text))}
        self._dirty.set()

    async def held(self, request: VerifierRequest, session_id: str = "") -> dict[str, int]:
        """Tokens of a prompt that each verifier is thought to hold. Hints only: what the store knows is not waited for long."""
        keys = block_keys(self._model(), request.tenant, request.prompt)
        found = tokens_held(self.prefixes.holders(keys))
        session_id = of_tenant(request.tenant, session_id) if session_id else ""
        session = self._sessions.get(session_id, {})
        if max(found.values(), default=0) < len(keys) * BLOCK or (session_id and not session):
            with suppress(StoreUnavailable, TimeoutError):
                self._must_be_up()
                async with asyncio.timeout(HINT_S):
                    holders, session = await self._store.hints(self._model(), keys, session_id)
                for name, tokens in tokens_held(holders).items():
                    found[name] = max(tokens, found.get(name, 0))
        if session:
            own = min(int(session["tokens"]), len(request.prompt))
            found[session["verifier"]] = max(own, found.get(session["verifier"], 0))
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
                    await self._store.record("")  # there may be nothing to write that would show whether it is back
                await self._write([entry for entry in self._entries if self._is_due(entry)])
                await self._store.put_hints(self._model(), self.prefixes.take_unpublished(), TTL_S)
                while self._sessions:
                    session_id, fields = next(iter(self._sessions.items()))
                    await self._store.put_session(session_id, fields, SESSION_TTL_S)
                    if self._sessions.get(session_id) is fields:
                        del self._sessions[session_id]
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
                await self._written(entry, write, length, asked)

    def _due(self, entry: Entry) -> Write:
        fields = {name: entry.fields[name] for name in entry.due}
        run = entry.output(entry.recorded)
        return Write(entry.lease, entry.recorded, run, fields, entry.ended, total=len(entry.tokens))

    async def _written(self, entry: Entry, write: Write, length: int, asked: float) -> None:
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
        # The store lost what it had, or has more than was confirmed: go on from there.
        entry.due |= set(entry.fields)
        stored = (await self._store.record(entry.lease.request_id)).output.tokens
        entry.recorded = len(stored)
        if tuple(entry.tokens[: len(stored)]) != stored:
            await self._store.restart(entry.lease)
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
