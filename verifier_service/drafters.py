"""The drafters of this verifier: one stream each, sessions placed on them, trees received from them.

A drafter is soft state. Whatever goes wrong with one (no connection, refusal, gap, malformed frame, lost step, silence) costs its sessions
further growth and nothing else: their drafts become orphans. What has arrived is verified once more, then the next `place` opens a new
tree on whoever can take it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

import structlog

from rootward.core.frames import Commit, FromDrafter, Grow, Hello, HelloAck, Open, ToDrafter
from rootward.core.living_tree import LivingTree, MalformedFrame
from rootward.core.requests import Law
from rootward.core.rng import Role
from rootward.errors import ServiceError
from rootward.ports import Drafter
from verifier_service.outbox import Outbox
from verifier_service.sessions import Draft, Session

log = structlog.get_logger("verifier.drafters")

RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # between attempts to reach a drafter
STEADY_S = (
    5.0  # a stream that lasted so long was a good one; one that breaks at once must not be tried ten times a second
)
REFUSED_S = 30.0  # a refused pairing is asked about again: the other side may have been replaced
QUARANTINE_S = 30.0  # how long a drafter that sends malformed frames again and again gets no sessions
MAX_OFFENCES = 3
MAX_MISSES = 5  # rounds in a row that waited in vain before a drafter is left alone for a while
SILENT_S = 1.0  # and nothing was heard from it for so long
FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0  # how long; doubles each time


class Link:
    """The stream to one drafter. Outbound messages collect in `outbox` and leave as one frame per engine step (`flush`)."""

    def __init__(self, name: str, drafter: Drafter, hello: Callable[[], Hello], on_growth: Callable[[], None]) -> None:
        self.name, self._drafter, self._hello, self._on_growth = name, drafter, hello, on_growth
        self.ack: HelloAck | None = None  # not None: up
        self.refusal = ""
        self.draining = False
        self.sessions: dict[int, Session] = {}  # by slot
        self.avoid_until_s = 0.0
        self.asked_s: float | None = None  # since when something it must answer has been waiting for any answer
        self._offences = self._misses = 0
        self._rest_s = FIRST_REST_S
        self._next_slot = 1
        self.outbox = Outbox()

    @property
    def room(self) -> int:
        """Sessions it would take now."""
        if self.ack is None or self.draining or time.monotonic() < self.avoid_until_s:
            return 0
        return self.ack.capacity - len(self.sessions)

    # -- outbound -----------------------------------------------------------------------------------------------------

    def open(self, session: Session, *, atoms: int, node_cap: int, max_depth: int, topk: int) -> None:
        """Start a tree for the session on this drafter."""
        assert self.ack is not None
        assert session.law is not None
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        request = session.request
        eos = () if request.stopping.ignore_eos else tuple(session.eos_ids)
        tree = LivingTree(
            len(session.tokens),
            session.hash,
            vocab_size=min(self.ack.vocab_size, self._hello().vocab_size),
            node_cap=node_cap,
            max_atoms=atoms,
            eos_ids=eos,
        )
        session.draft = Draft(self, slot, tree)
        session.drafter_name = self.name
        self.sessions[slot] = session
        self.outbox.open(
            Open(
                slot,
                request.request_id,
                request.epoch,
                tuple(session.tokens),
                request.sampling,
                session.law,
                # Only shared noise needs the seed itself; anything else gets a key from which no coin can be computed.
                request.seed if session.law is Law.COUPLED else session.key.derive(Role.DRAW),
                request.choice,
                min(atoms, self.ack.max_atoms),
                node_cap,
                max_depth,
                topk,
                eos,
            )
        )

    def commit(self, session: Session, tokens: Sequence[int]) -> None:
        """The truth advanced; both replicas re-root."""
        draft = session.draft
        assert draft is not None
        base = draft.tree.length
        draft.tree.commit(tokens)
        draft.at_rest = False
        self.outbox.commit(Commit(draft.slot, base, tuple(tokens), draft.tree.hash))

    def close(self, session: Session, reason: str) -> None:
        """The session has ended."""
        if session.draft is not None and self._forget(session.draft.slot, reason) is not None:
            session.draft = None

    def orphan(self, slot: int, reason: str) -> None:
        """Nothing more will come for this tree; what has arrived is still verified."""
        session = self._forget(slot, reason)
        if session is not None and session.draft is not None:
            session.draft.link, session.draft.at_rest = None, True

    def judge(self, *, missed: bool) -> None:
        """The breaker. A session waited for this drafter, in vain or not; too many misses in a row and it is left alone for a while."""
        if not missed:
            self._misses, self._rest_s = 0, FIRST_REST_S
            return
        self._misses += 1
        # One that is merely slower than patience is not broken.
        silent = self.asked_s is not None and time.monotonic() - self.asked_s > SILENT_S
        if self._misses >= MAX_MISSES and silent:
            log.info("drafter_late", drafter=self.name, rest_s=self._rest_s)
            self._leave_alone(self._rest_s, "late")
            self._misses, self._rest_s = 0, min(2 * self._rest_s, LONGEST_REST_S)

    def _leave_alone(self, seconds: float, reason: str) -> None:
        self.avoid_until_s = time.monotonic() + seconds
        for slot in list(self.sessions):
            self.orphan(slot, reason)

    def _forget(self, slot: int, reason: str) -> Session | None:
        session = self.sessions.pop(slot, None)
        if session is not None:
            self.outbox.close(slot, reason)
        return session

    def flush(self) -> None:
        """Send what has collected, as one frame."""
        if self.ack is not None and self.outbox.flush() and self.asked_s is None:
            self.asked_s = time.monotonic()

    # -- inbound ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a stream to the drafter; reconnect for ever."""
        attempt = 0
        while True:
            start_s = time.monotonic()
            try:
                async with aclosing(self._drafter.session(self._outbound())) as frames:
                    async for frame in frames:
                        self._receive(frame)
            except ServiceError as error:
                log.debug("drafter_stream_ended", drafter=self.name, error=str(error))
            except Exception:  # whatever a drafter makes us stumble over, the verifier goes on without it
                log.exception("drafter_link_failed", drafter=self.name)
            finally:
                self._lost()
            if time.monotonic() - start_s > STEADY_S:
                attempt = 0
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)] if not self.refusal else REFUSED_S)
            attempt += 1

    async def _outbound(self) -> AsyncGenerator[ToDrafter, None]:
        yield ToDrafter(hello=self._hello())
        while True:
            yield await self.outbox.take()

    def _receive(self, frame: FromDrafter) -> None:
        self.asked_s = None
        if frame.ack is not None:
            self._greet(frame.ack)
        if frame.load is not None and frame.load.draining and not self.draining:
            self._leave_alone(0.0, "drafter is draining")
            self.draining = True
        for need in frame.need_syncs:
            self.orphan(need.slot, "lost step")
        for reject in frame.rejects:
            if reject.retry_after_ms:
                self.avoid_until_s = time.monotonic() + reject.retry_after_ms / 1e3
            refused = self.sessions.get(reject.slot)
            self.orphan(reject.slot, reject.reason)
            if refused is not None and not reject.retry_after_ms:
                refused.law = None  # this drafter never can: context or vocabulary
        for grow in frame.grows:
            self._grow(grow)
        self._on_growth()

    def _greet(self, ack: HelloAck) -> None:
        self.refusal = ack.refusal
        if ack.refusal:
            log.error("pairing_refused", drafter=self.name, reason=ack.refusal)
            return
        self.ack, self.draining = ack, False
        log.info("drafter_up", drafter=self.name, incarnation=ack.incarnation)

    def _grow(self, grow: Grow) -> None:
        session = self.sessions.get(grow.slot)
        if session is None or session.draft is None:
            return  # closed meanwhile
        tree = session.draft.tree
        try:
            received = tree.receive(grow)
        except MalformedFrame as error:
            self._offend(grow.slot, str(error))
            return
        if tree.broken:
            self.orphan(grow.slot, received.reason)
            return
        session.draft.at_rest = grow.at_rest and grow.base_len == tree.length

    def _offend(self, slot: int, why: str) -> None:
        """Quarantine the slot; repeated offences quarantine the drafter."""
        log.warning("malformed_frame", drafter=self.name, error=why)
        self.orphan(slot, "malformed")
        self._offences += 1
        if self._offences >= MAX_OFFENCES:
            self._offences = 0
            self._leave_alone(QUARANTINE_S, "quarantine")

    def _lost(self) -> None:
        if self.ack is not None:
            log.warning("drafter_down", drafter=self.name, sessions=len(self.sessions))
        self.ack, self.asked_s = None, None
        for slot in list(self.sessions):
            self.orphan(slot, "stream lost")
        self.outbox.clear()
        self._on_growth()


class DrafterPool:
    """All links; places sessions and sends one frame per drafter and engine step."""

    def __init__(
        self,
        drafters: dict[str, Drafter],
        hello: Callable[[], Hello],
        on_growth: Callable[[], None],
        *,
        atoms: int,
        node_cap: int,
        max_depth: int,
        topk: int,
    ) -> None:
        self.links = [Link(name, drafter, hello, on_growth) for name, drafter in drafters.items()]
        self._shape = {"atoms": atoms, "node_cap": node_cap, "max_depth": max_depth, "topk": topk}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> DrafterPool:
        self._tasks = [asyncio.create_task(link.run(), name=f"drafter {link.name}") for link in self.links]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def up(self) -> tuple[str, ...]:
        return tuple(link.name for link in self.links if link.ack is not None)

    def place(self, session: Session) -> None:
        """Open a tree for a session that has none, on the drafter with the most room."""
        if session.draft is not None or session.law is None or session.done:
            return
        link = max(self.links, key=lambda x: x.room, default=None)
        if link is None or link.room <= 0:
            return
        wish = session.request.speculation
        shape = dict(self._shape)
        shape["node_cap"] = min(wish.num_draft_tokens or shape["node_cap"], shape["node_cap"])
        shape["max_depth"] = min(wish.max_depth or shape["max_depth"], shape["max_depth"])
        shape["topk"] = min(wish.topk or shape["topk"], shape["topk"])
        link.open(session, **shape)

    def commit(self, session: Session, tokens: Sequence[int]) -> None:
        link = self._link(session)
        if link is None:
            session.draft = None  # an orphan has had its round
        else:
            link.commit(session, tokens)

    def close(self, session: Session, reason: str) -> None:
        if (link := self._link(session)) is not None:
            link.close(session, reason)
        session.draft = None

    def judge(self, session: Session, *, missed: bool) -> None:
        if (link := self._link(session)) is not None:
            link.judge(missed=missed)

    @staticmethod
    def _link(session: Session) -> Link | None:
        link = session.draft.link if session.draft is not None else None
        assert link is None or isinstance(link, Link)
        return link

    def flush(self) -> None:
        for link in self.links:
            link.flush()
