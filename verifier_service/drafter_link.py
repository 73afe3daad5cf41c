"""The stream to one drafter: trees opened on it, growth received, its load, and its circuit breaker.

A drafter is soft state. A failure of one (no connection, refusal, gap, malformed frame, lost step, silence) costs its sessions further
growth only: their drafts become orphans, and the nodes that have arrived are verified once more (docs/decisions/0005).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog

from rootward.addresses import is_loopback
from rootward.clock import backoff_s, jittered
from rootward.core.frames import (
    Commit,
    Features,
    FromDrafter,
    Grow,
    Hello,
    HelloAck,
    Launch,
    Load,
    Open,
    Reject,
    ToDrafter,
)
from rootward.core.growth import BestFirst, strategy_of
from rootward.core.living_tree import LivingTree, MalformedFrame
from rootward.core.requests import DraftMode
from rootward.core.rng import Role
from rootward.errors import ServiceError
from rootward.ports import Drafter
from rootward.tracing import traceparent_of
from verifier_service.circuit_breaker import MAX_MISSES, Breaker, StallClock
from verifier_service.draft_pace import DraftPace
from verifier_service.link_metrics import LinkMetrics
from verifier_service.placement import DrafterView
from verifier_service.send_buffer import SendBuffer
from verifier_service.session import Draft, Session, number_of
from verifier_service.settings import Shape

log = structlog.get_logger("verifier.drafters")

FIRST_RETRY_S, MAX_RETRY_S = 0.1, 2.0  # between attempts to reach a drafter
STABLE_STREAM_S = 5.0  # a stream that lasts as long resets the backoff
REFUSED_S = 30.0  # before a refused pairing is tried again: the drafter may have been replaced
SILENT_S = 1.0  # a drafter that sends no answer for longer is considered failed; to this limit is added
READ_S = 2e-3  # for each token that it may have to read first
FRESH_S = 1.0  # age up to which a report of load is used to balance
LONGEST_FULL_S = 30.0  # between two Opens to a drafter that is full
MEMORY = 0.2  # weight of the newest gain
# Answers without use that are read in a second: an honest drafter sends a few for each tree that is closed.
USELESS_PER_S = 8192
NODES_AN_ANSWER = 32  # nodes or rows that take as long to read as the rest of an answer
ANSWERS_A_FRAME = 16  # that take as long to read as a frame without any, which wakes the engine as well
MAX_TEXT = 300  # characters that are kept or logged of a text of the drafter

Budget = Callable[[Session, Draft], int | None]


class Link:
    """Outbound messages collect in `send_buffer` and are sent as one frame by `flush`. `name` is the address of the drafter."""

    def __init__(
        self,
        name: str,
        hello: Callable[[], Hello],
        on_growth: Callable[[], None],
        metrics: LinkMetrics | None = None,
        stall_clock: StallClock | None = None,
    ) -> None:
        self.name, self._hello, self._on_growth = name, hello, on_growth
        self._metrics, self.stall_clock = metrics or LinkMetrics(), stall_clock or StallClock()
        self.pool = ""
        self.ack: HelloAck | None = None  # not None: up
        self.refusal = ""
        self.draining = False  # reported by the drafter
        self.leaving = False  # reported by discovery
        self.near = True  # in this verifier's zone, as far as is known
        self.drafts: dict[int, Draft] = {}  # by slot
        self.breaker = Breaker()
        self.unanswered_since_s: float | None = None  # time on `stall_clock` of the oldest message without an answer
        self.gain = 0.0  # tokens per round with its trees
        self.pace = DraftPace()
        self.send_buffer = SendBuffer()
        self._names_key = secrets.token_bytes(16)  # the drafter learns no name of a tenant, nor of a salt
        self._load, self._load_s, self._num_others = Load(), 0.0, 0
        self._full_until_s, self._num_refusals = 0.0, 0
        self._next_slot = 1
        self._useless, self._useless_s = 0.0, 0.0  # answers without use, less those that were allowed until this time

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Its sessions of all verifiers: those of others by its last report, those of this verifier now."""
        return self._num_others + len(self.drafts)

    def supports(self, mode: DraftMode) -> bool:
        """Whether its stream is open and it grows trees of this draft mode."""
        return self.ack is not None and mode in self.ack.laws

    @property
    def takes_features(self) -> bool:
        """It drafts with a head, so its trees start anew with every commit."""
        return self.ack is not None and self.ack.head is not None

    @property
    def room(self) -> int:
        """Sessions it would take now."""
        now_s = time.monotonic()
        if self.ack is None or self.draining or self.leaving or now_s < self._full_until_s:
            return 0
        return self.breaker.admits(max(0, self.ack.capacity - self.used), len(self.drafts), now_s)

    def overdue(self, unanswered_since_s: float | None) -> bool:
        """Whether an answer that is due since `unanswered_since_s` is late, even if the drafter has to read all its texts first."""
        if unanswered_since_s is None:
            return False
        unread = sum(draft.tree.length for draft in self.drafts.values() if not draft.has_growth)
        return self.stall_clock.now() - unanswered_since_s > SILENT_S + READ_S * unread

    def view(self) -> DrafterView:
        return DrafterView(
            name=self.name,
            room=self.room,
            capacity=self.ack.capacity if self.ack is not None else 0,
            used=self.used,
            own=len(self.drafts),
            latency_s=self.pace.first_s,
            queue_s=self._load.queue_us / 1e6,
            gain=self.gain,
            leaving=self.draining or self.leaving,
            fresh=time.monotonic() - self._load_s <= FRESH_S,
            near=self.near,
        )

    # -- outbound -----------------------------------------------------------------------------------------------------

    def open(self, session: Session, shape: Shape) -> Draft:
        """Start a tree for the session on this drafter."""
        assert self.ack is not None
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        message = self._open_message(slot, session, shape)
        node_cap, ahead_cap = message.caps
        tree = LivingTree(
            len(session.tokens),
            session.hash,
            vocab_size=min(self.ack.vocab_size, self._hello().vocab_size),
            node_cap=node_cap,
            max_atoms=shape.atoms,
            eos_ids=message.eos_ids,
            ahead_cap=ahead_cap,
            restarts=self.takes_features or strategy_of(message.strategy, message.law, BestFirst()).restarts,
            copies=message.law is DraftMode.IID,
            chain=message.strategy.name == "chain",
        )
        draft = Draft(self, slot, tree, tree.ahead_cap > 0, pool=self.pool, opened_s=time.monotonic())
        draft.unanswered_since_s, draft.wanted = self.stall_clock.now(), message.node_budget or node_cap
        self.drafts[slot] = draft
        self.send_buffer.open(message, self._features(session, len(message.prefix)))
        return draft

    def _features(self, session: Session, num_tokens: int) -> Features | None:
        """Of the last tokens of its text, at most so many, as the drafter wants them."""
        if self.ack is None or self.ack.head is None or session.features is None:
            return None
        rows = session.features.before(len(session.tokens), num_tokens)
        return None if rows is None else Features(rows, self.ack.head.int8)

    def _open_message(self, slot: int, session: Session, shape: Shape) -> Open:
        assert self.ack is not None
        request, opening = session.request, session.opening(shape)
        ahead = shape.ahead_on_loopback if is_loopback(self.name) else shape.ahead
        ahead = 0 if self.takes_features else ahead
        return replace(
            opening,
            slot=slot,
            seed=self._draw_seed(session, opening),
            prefix=tuple(session.tokens),
            num_atoms=min(opening.num_atoms, self.ack.max_atoms),
            eos_ids=() if request.stopping.ignore_eos else tuple(session.eos_ids),
            ahead_cap=ahead,
            prediction=request.prediction,
            tenant=self._pseudonym(request.tenant),
            cache_salt=self._pseudonym(request.cache_salt),
            traceparent=traceparent_of(session.span),
            node_budget=None if session.required else session.statistics.usual_nodes or None,
        )

    def _pseudonym(self, name: str) -> int:
        """The number that stands for the name of a tenant or a salt on this link, 0 for none."""
        return number_of(name, self._names_key) if name else 0

    def _draw_seed(self, session: Session, opening: Open) -> int:
        """The key of the drafter's draws. Each drafter has its own: one that knew what another draws for the session could choose by it
        when the session moves."""
        return session.key.derive(Role.DRAW, number_of(self.name)) if opening.law.ratio else opening.seed

    def commit(self, session: Session, draft: Draft, tokens: Sequence[int], budget: Budget) -> None:
        """Re-root both replicas of a tree of the session at the committed tokens.

        budget: most nodes of the next round, given the tree after the commit."""
        base = draft.tree.length
        walked = draft.tree.commit(tokens)
        draft.rerooted_s, draft.has_current_growth = time.monotonic(), False
        node_budget = budget(session, draft)
        draft.wanted = draft.tree.node_cap if node_budget is None else node_budget
        self._metrics.commits.labels("grown" if walked and walked[-1] is not None else "new").inc()
        self._metrics.carried.inc(len(draft.tree))
        draft.at_rest, draft.queued_s = False, 0.0
        if draft.unanswered_since_s is None:
            draft.unanswered_since_s = self.stall_clock.now()
        features = self._features(session, len(tokens))
        message = Commit(draft.slot, base, tuple(tokens), draft.tree.hash, node_budget=node_budget, features=features)
        self.send_buffer.commit(message)

    def launch(self, session: Session, draft: Draft) -> None:
        """Tell the noise of the bonus token of the round that runs now, if the drafter predicts it."""
        if draft.shared:
            length = draft.tree.length
            self.send_buffer.launch(Launch(draft.slot, length, session.key.bonus(length)))

    def close(self, draft: Draft, reason: str) -> None:
        """Close a tree at the drafter."""
        if self.drafts.pop(draft.slot, None) is not None:
            self.send_buffer.close(draft.slot, reason)
            if not self.drafts:  # without trees it sends no answers
                self.unanswered_since_s = None
        draft.closed = True

    def orphan(self, slot: int, reason: str) -> Draft | None:
        """Close a tree; its nodes are verified once more. Returns its draft, None if the slot is closed already."""
        draft = self.drafts.get(slot)
        if draft is not None:
            self.close(draft, reason)
            self._metrics.orphaned(reason)
            draft.at_rest = True
        return draft

    def record_round(self, draft: Draft, *, missed: bool, tokens: int = 0) -> None:
        """Record a round that ran without this tree (missed), or with it and committed `tokens`."""
        if not missed:
            self.breaker.served()
            draft.empty_rounds = 0
            if tokens:
                self._learn_gain(tokens)
            return
        draft.misses += 1
        if self.breaker.missed(time.monotonic(), silent=self.overdue(self.unanswered_since_s)):
            self._open_circuit("late")
        elif draft.misses >= MAX_MISSES and self.overdue(draft.unanswered_since_s):  # even if it serves other sessions
            self.orphan(draft.slot, "forgotten")

    def record_empty(self, draft: Draft) -> bool:
        """Record a round that found this tree at rest without a node. True if the tree is given up now.

        Such a tree is of no use and does harm: rounds wait for it, and no local draft stands in. The decision reads only whether there were
        any nodes at the roots of rounds that are over. At those roots nothing was drawn, so no draw decides it, and a drafter that sends
        nothing could do so before. It takes effect between two rounds: what the coming commit may keep (below a predicted bonus token) is
        dropped whole, on a ground that does not look below the new root (algorithms.md 6.1, L2 and L5)."""
        self._learn_gain(1)
        draft.empty_rounds += 1
        if draft.empty_rounds < MAX_MISSES:
            return False
        self.orphan(draft.slot, "empty")
        return True

    def _learn_gain(self, tokens: int) -> None:
        self.gain += (MEMORY if self.gain else 1.0) * (tokens - self.gain)

    def _open_circuit(self, reason: str) -> None:
        log.warning("drafter_circuit_open", drafter=self.name, reason=reason, until_s=self.breaker.until_s)
        for slot in list(self.drafts):
            self.orphan(slot, reason)

    def flush(self) -> None:
        """Send what has collected, as one frame."""
        if self.ack is not None and self.send_buffer.flush() and self.unanswered_since_s is None:
            self.unanswered_since_s = self.stall_clock.now()

    # -- inbound ------------------------------------------------------------------------------------------------------

    async def run(self, drafter: Drafter) -> None:
        """Keep a stream to the drafter; reconnect for ever."""
        attempt = 0
        while True:
            start_s = time.monotonic()
            try:
                async with aclosing(drafter.session(self._outbound())) as frames:
                    async for frame in frames:
                        self._receive(frame)
                        if frame.ack is not None and frame.ack.refusal:
                            break  # whatever follows is not read, such as more refusals
                        if pause_s := self._pause_s():
                            await asyncio.sleep(pause_s)
            except asyncio.CancelledError:
                self.ack = None  # this end closes the stream: the drafter is not down
                raise
            except ServiceError as error:
                log.debug("drafter_stream_ended", drafter=self.name, error=str(error)[:MAX_TEXT])
            except MalformedFrame as error:  # of the stream, not of one tree
                self._on_malformed(None, str(error))
            except Exception:  # no failure of a drafter may end the verifier
                log.exception("drafter_link_failed", drafter=self.name)
            finally:
                self._on_stream_end()
            attempt = 0 if time.monotonic() - start_s > STABLE_STREAM_S else attempt
            retry_s = backoff_s(attempt, FIRST_RETRY_S, MAX_RETRY_S, self.name, self._hello().incarnation)
            await asyncio.sleep(REFUSED_S if self.refusal else retry_s)
            attempt += 1

    async def _outbound(self) -> AsyncGenerator[ToDrafter, None]:
        yield ToDrafter(hello=self._hello())
        while True:
            frame = await self.send_buffer.take()
            self._metrics.sent_features(frame)
            yield frame

    def _pause_s(self) -> float:
        """Time for which nothing is read from a drafter that sends more answers without use than USELESS_PER_S, a second's worth of them
        aside. To rounds its later frames are as if it had sent them later; what has arrived stays."""
        now_s = time.monotonic()
        self._useless = max(0.0, self._useless - USELESS_PER_S * (now_s - self._useless_s))
        self._useless_s = now_s
        return max(0.0, self._useless / USELESS_PER_S - 1.0)

    def _receive(self, frame: FromDrafter) -> None:
        is_answer = bool(frame.grows or frame.need_syncs or frame.rejects)  # a heartbeat answers nothing
        if is_answer:
            self.unanswered_since_s = None
        useless = self._useless
        if frame.ack is not None:
            self._on_ack(frame.ack)
        if frame.load is not None:
            self._on_load(frame.load)
        # Rejects first: a drafter that has given a tree up asks to resynchronise it when the next commit arrives.
        for reject in frame.rejects:
            self._on_reject(reject)
        for need in frame.need_syncs:
            self._useless += self._on_broken(need.slot, "lost step") is None
        for grow in frame.grows:
            self._on_grow(grow)
        if not is_answer or self._useless > useless:
            self._useless += ANSWERS_A_FRAME
        self._on_growth()

    def _on_ack(self, ack: HelloAck) -> None:
        if self.ack is not None:
            raise MalformedFrame("ack: a second one on this stream")
        self.refusal = ack.refusal[:MAX_TEXT]
        if self.refusal:
            log.error("pairing_refused", drafter=self.name, reason=self.refusal)
            return
        self.ack, self.draining, self._full_until_s, self._num_refusals = ack, False, 0.0, 0
        log.info("drafter_up", drafter=self.name, incarnation=ack.incarnation)

    def _on_load(self, load: Load) -> None:
        # A drafter of an older release does not say how many of its sessions are of this verifier: those of now are taken for them.
        own = len(self.drafts) if load.own_sessions is None else load.own_sessions
        self._load, self._load_s, self._num_others = load, time.monotonic(), max(0, load.sessions - own)
        self.draining = load.draining

    def _on_reject(self, reject: Reject) -> None:
        """A tree was refused: with a time, until then, jittered so that refused verifiers do not all retry at once; without one for good,
        because context or vocabulary do not fit."""
        draft = self.orphan(reject.slot, reject.reason[:MAX_TEXT])
        self._useless += draft is None
        if not reject.retry_after_ms:
            if draft is not None:
                draft.refused = True
            return
        rest_s = min(reject.retry_after_ms / 1e3 * 2.0 ** min(self._num_refusals, 16), LONGEST_FULL_S)
        who = self.name, self._hello().incarnation, self._next_slot
        until_s = time.monotonic() + rest_s + jittered(rest_s, *who) / 2
        if time.monotonic() >= self._full_until_s:  # several of one frame count once
            self._num_refusals += 1
        self._full_until_s = max(self._full_until_s, until_s)

    def _on_grow(self, grow: Grow) -> None:
        draft, size = self.drafts.get(grow.slot), 1 + (len(grow.token) + len(grow.rows)) / NODES_AN_ANSWER
        if draft is None:
            self._useless += size
            self._metrics.discarded.labels("closed").inc()
            return
        before = len(draft.tree)
        try:
            received = draft.tree.receive(grow)
        except MalformedFrame as error:
            self._on_malformed(grow.slot, str(error))
            return
        self._metrics.grew(received, grow.draft_us)
        current = grow.base_len == draft.tree.length
        if not (received.kept or received.stale or (grow.at_rest and current and not draft.at_rest)):
            self._useless += size  # nodes are bounded by the tree
        if draft.tree.broken:
            self._on_broken(grow.slot, received.reason)
            return
        if received.kept or received.stale:
            self.breaker.grew()
        if more := len(draft.tree) - before:
            self._record_growth(draft, grow, more, current=current)
        if not draft.has_growth:  # the last tree that it was sent was accepted
            self._num_refusals = 0
        draft.has_growth, draft.unanswered_since_s, draft.misses = True, None, 0
        draft.at_rest = grow.at_rest and current

    def _record_growth(self, draft: Draft, grow: Grow, more: int, *, current: bool) -> None:
        """Record the times of growth that a round may verify. Only nodes that a round waits for count for the pace: later ones are drawn
        several at a time. more: number of new nodes; current: they were drawn below the present root."""
        now_s = time.monotonic()
        if current and draft.has_current_growth:
            if len(draft.tree) - more < draft.wanted:
                self.pace.on_more_growth(now_s - draft.last_growth_s, more, draft.wanted)
        elif current and draft.rerooted_s:
            draft.queued_s, latency_s = grow.queue_us / 1e6, now_s - draft.rerooted_s
            drafter_s = draft.queued_s + grow.draft_us / 1e6
            self._metrics.transport.observe(max(0.0, latency_s - drafter_s))
            self._metrics.wait.observe(drafter_s)
            if draft.has_growth:  # otherwise it has read the prompt first
                self.pace.on_first_growth(latency_s)
        draft.last_growth_s, draft.has_current_growth = now_s, draft.has_current_growth or current

    def _on_malformed(self, slot: int | None, why: str) -> None:
        """A malformed frame: orphan its tree, if it names one; repeated ones open the circuit."""
        log.warning("malformed_frame", drafter=self.name, error=why[:MAX_TEXT])
        self._metrics.discarded.labels("malformed").inc()
        if slot is not None:
            self.orphan(slot, "malformed")
        if self.breaker.offended(time.monotonic()):
            self._open_circuit("quarantine")

    def _on_broken(self, slot: int, reason: str) -> Draft | None:
        """Drafter and verifier do not agree about the text or the nodes of a tree: orphan it. Repeated ones open the circuit, because each
        session would send its whole text again. Returns its draft, None if the slot is closed already.

        No correct drafter is the cause: a stream loses and reorders nothing, its end closes all its slots, and slots are not reused."""
        draft = self.orphan(slot, reason)
        if draft is not None and self.breaker.lost(time.monotonic()):
            self._open_circuit("quarantine")
        return draft

    def _on_stream_end(self) -> None:
        if self.ack is not None:
            log.warning("drafter_down", drafter=self.name, sessions=len(self.drafts))
        self.ack, self.unanswered_since_s, self._load, self._num_others = None, None, Load(), 0
        for slot in list(self.drafts):
            self.orphan(slot, "stream lost")
        self.send_buffer.clear()
        self._on_growth()
