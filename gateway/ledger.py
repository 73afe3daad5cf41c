"""The record of running requests: lease, epoch and committed tokens, written to the session store off the hot path.

A generation only marks what is to be written; one loop writes it, several tokens at a time. When the store does not answer,
running requests go on and are written when it answers again. Rules of epochs: architecture in `protocol.md` 3 and 4.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from gateway.sessions import KEPT_AFTER_RELEASE_S, Store, StoreUnavailable
from rootward.errors import StaleEpoch, Unavailable
from rootward.ports import Lease

log = structlog.get_logger()

SESSION_TTL_S = 3600.0


@dataclass(slots=True, eq=False)
class Entry:
    """One running request. The lease is lost when another gateway drives the request; the generation must then stop."""

    lease: Lease
    held_until: float  # when the store lets others take the lease, unless renewed
    tokens: list[int] = field(default_factory=list)  # committed so far
    recorded: int = 0  # of these, in the store's log
    lost: bool = False
    ended: str = ""  # final state, once over
    ended_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # a write must not see the epoch change halfway

    @property
    def epoch(self) -> int:
        return self.lease.epoch


class Ledger:
    """Owns the entries; `run` writes them. `now` is the loop's clock in seconds."""

    def __init__(self, store: Store, *, now: Callable[[], float], lease_s: float = 5.0, flush_s: float = 0.05):
        self._store, self._now = store, now
        self._lease_s, self._flush_s = lease_s, flush_s
        self._entries: set[Entry] = set()
        self._sessions: dict[str, dict[str, str]] = {}
        self._dirty = asyncio.Event()
        self._down = False

    async def begin(self, request_id: str) -> Entry:
        """Take the lease of a request. DuplicateRequest when it is running somewhere.

        While the store does not answer the request runs under epoch 1 unrecorded: a verifier that knows a higher epoch
        refuses it, and the lease is taken in the store as soon as that answers.
        """
        holder = uuid.uuid4().hex  # one per run: a second run of the same id on this gateway is a duplicate, too
        asked = self._now()
        try:
            if self._down:
                raise StoreUnavailable("the session store did not answer lately")
            lease = await self._store.acquire(request_id, holder, self._lease_s)
            if lease.epoch > 1:
                await self._store.restart(lease)
        except StoreUnavailable:
            self._mark_down()
            lease = Lease(request_id, 1, holder)
        entry = Entry(lease, held_until=asked + self._lease_s)
        self._entries.add(entry)
        self._dirty.set()
        return entry

    def extend(self, entry: Entry, tokens: Sequence[int]) -> None:
        """These tokens became final. StaleEpoch when another gateway has taken over."""
        if entry.lost:
            raise StaleEpoch(f"request {entry.lease.request_id!r} is driven by another gateway now")
        entry.tokens.extend(tokens)
        self._dirty.set()

    async def next_epoch(self, entry: Entry) -> None:
        """Before a new attempt: what the lost one still sends is older than this epoch.

        Without the store only the holder of a lease that has not run out may count on by itself.
        """
        async with entry.lock:
            try:
                entry.lease = await self._granted(entry)
            except StoreUnavailable:
                self._mark_down()
                if self._now() >= entry.held_until:
                    message = "the session store is gone and the lease of this request has run out"
                    raise Unavailable(message, retry_after_s=1.0) from None
                entry.lease = _following(entry.lease)
        self._dirty.set()

    async def _granted(self, entry: Entry) -> Lease:
        asked = self._now()
        lease = await self._store.acquire(entry.lease.request_id, entry.lease.holder, self._lease_s)
        if lease.epoch <= entry.epoch:  # a store that restarted empty counts from 1 again
            lease = _following(entry.lease)
            await self._store.renew(lease, self._lease_s)
        entry.held_until = asked + self._lease_s
        return lease

    def end(self, entry: Entry, state: str) -> None:
        """The request is over: finished, aborted or failed."""
        entry.ended, entry.ended_at = state, self._now()
        self._dirty.set()

    def remember(self, session_id: str, fields: dict[str, str]) -> None:
        """Keep fields of a conversation for its next turn."""
        self._sessions[session_id] = fields
        self._dirty.set()

    async def recall(self, session_id: str) -> dict[str, str]:
        """What is kept of a conversation; nothing when the store does not answer (it is only a hint)."""
        if session_id in self._sessions:
            return self._sessions[session_id]
        if self._down:
            return {}
        try:
            return await self._store.get_session(session_id)
        except StoreUnavailable:
            self._mark_down()
            return {}

    async def run(self) -> None:
        """Write until cancelled. `flush` once more afterwards, so that nothing held for others stays."""
        while True:
            timeout = self._lease_s / 3 if self._entries else None
            try:
                async with asyncio.timeout(1.0 if self._down else timeout):
                    await self._dirty.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(1.0 if self._down else self._flush_s)  # several runs of tokens become one write
            await self.flush()

    async def flush(self) -> None:
        """Write everything that is due, or note that the store does not answer."""
        self._dirty.clear()
        try:
            for entry in list(self._entries):
                async with entry.lock:
                    await self._write(entry)
            while self._sessions:
                session_id, fields = self._sessions.popitem()
                await self._store.put_session(session_id, fields, SESSION_TTL_S)
        except StoreUnavailable:
            self._mark_down()
            too_old = self._now() - KEPT_AFTER_RELEASE_S
            self._entries = {e for e in self._entries if not e.ended or e.ended_at > too_old}
        else:
            if self._down:
                log.info("session_store_back")
            self._down = False

    async def _write(self, entry: Entry) -> None:
        if not entry.lost and self._now() > entry.held_until - self._lease_s * 2 / 3:
            await self._renew(entry)
        if not entry.lost and len(entry.tokens) > entry.recorded:
            await self._append(entry)
        if entry.ended and (entry.lost or entry.recorded == len(entry.tokens)):
            await self._store.release(entry.lease, entry.ended)
            self._entries.discard(entry)

    async def _renew(self, entry: Entry) -> None:
        asked = self._now()
        entry.lost = not await self._store.renew(entry.lease, self._lease_s)
        entry.held_until = asked + self._lease_s

    async def _append(self, entry: Entry) -> None:
        count = len(entry.tokens)
        if await self._store.append(entry.lease, entry.recorded, entry.tokens[entry.recorded : count]):
            entry.recorded = count
            return
        # Lost lease, lost log, or an append whose answer was lost: ask, then go on from what the store has.
        await self._renew(entry)
        stored = await self._store.committed(entry.lease.request_id)
        if not entry.lost and tuple(entry.tokens[: len(stored)]) == stored:
            entry.recorded = len(stored)
        elif not entry.lost:
            await self._store.restart(entry.lease)
            entry.recorded = 0
        self._dirty.set()

    def _mark_down(self) -> None:
        if not self._down:
            log.warning("session_store_down", running=len(self._entries))
        self._down = True


def _following(lease: Lease) -> Lease:
    return Lease(lease.request_id, lease.epoch + 1, lease.holder)
