"""The drafters of a verifier: discovery, one link to each, placement of sessions on drafters and moves between them.

Sessions change only in the engine loop, between steps. If a drafter is lost, its sessions verify once more the nodes that have arrived; the
next `place` opens new trees on drafters with room. A session that moves opens a tree on the new drafter first. Both trees follow its
commits, and at the first commit after growth from the new drafter the old tree is dropped (docs/decisions/0008). Placement depends on load,
clocks and results of past rounds, never on a tree (algorithms.md 6, L1 and L5).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import structlog

from rootward.clock import jittered
from rootward.core.frames import Hello
from rootward.core.requests import BEST_FIRST, DraftMode, DraftStrategy
from rootward.demand import VerifierDemand
from rootward.discovery.polling import follow
from rootward.ports import DEFAULT_POOL, Discovery, Drafter, Peer
from verifier_service.circuit_breaker import CircuitState, StallClock
from verifier_service.drafter_link import Budget, Link
from verifier_service.link_metrics import LinkMetrics
from verifier_service.placement import Move, best_drafter, moves
from verifier_service.session import Draft, Session
from verifier_service.settings import Shape

log = structlog.get_logger("verifier.drafters")

BALANCE_INTERVAL_S = 0.25  # jittered, so that verifiers do not all move sessions at once
MAX_MOVES = 2  # per interval, to balance load
MAX_URGENT_MOVES = 8  # per interval, while a drafter leaves
MIN_TREE_AGE_S = 1.0  # younger trees are not moved to balance load
FIRST_PAUSE, LONGEST_PAUSE = 16, 128  # tokens without a drafter that had no nodes; doubled until it has some
MIN_TOKENS_LEFT = 8  # a session with fewer tokens to come is not moved: the prefill would not pay

Dial = Callable[[str], AbstractAsyncContextManager[Drafter]]


class DrafterPool:
    """Links to all drafters. sources: (pool, discovery of its drafters); dial: the drafter at an address; trusts: see
    `DrafterAudit.trusts`.

    `demand`: counters for the autoscaler, by pool. A session counts for the pool of its drafter, without one for the first pool.
    """

    def __init__(
        self,
        hello: Callable[[], Hello],
        on_growth: Callable[[], None],
        *,
        sources: Sequence[tuple[str, Discovery]] = (),
        dial: Dial | None = None,
        prior_row_s: float = 0.0,
        zone: str = "",
        shape: Shape,
        metrics: LinkMetrics | None = None,
    ) -> None:
        self._metrics = metrics or LinkMetrics()
        self._metrics.watch(lambda: self.links)
        self._hello, self._on_growth, self._dial = hello, on_growth, dial
        self._sources, self._shape = sources, shape
        self._zone = zone
        self._stall_clock = StallClock()
        self.links: list[Link] = []
        pools = [pool for pool, _ in sources] or [DEFAULT_POOL]
        self.demand = {pool: VerifierDemand(prior_row_s=prior_row_s) for pool in pools}
        self.num_moves = 0
        self._known: set[str] = set()  # addresses that discovery lists
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of links, by name
        self._ending: set[asyncio.Task[None]] = set()  # those of dropped links, until they have hung up
        self._following: list[asyncio.Task[None]] = []
        self._next_balance_s, self._num_balances = 0.0, 0

    async def __aenter__(self) -> DrafterPool:
        self._following = [
            asyncio.create_task(self._stall_clock.run(), name="stall clock"),
            asyncio.create_task(follow(self._sources, self._reconcile), name="discovery"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._following, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ending, return_exceptions=True)

    @property
    def up(self) -> tuple[str, ...]:
        """Names of the drafters with an open stream."""
        return tuple(link.name for link in self.links if link.ack is not None)

    def gauges(self) -> dict[str, float]:
        """Values of the metrics with these names, and of each drafter the time from a commit to its first growth after it."""
        now_s = time.monotonic()
        return {
            "drafters_up": len(self.up),
            "drafters_draining": sum(link.draining or link.leaving for link in self.links),
            "drafters_left_alone": sum(link.breaker.state(now_s) is not CircuitState.CLOSED for link in self.links),
            "drafter_moves_total": self.num_moves,
            **{
                f"drafter_first_growth_ms/{link.name}": 1e3 * link.pace.first_s
                for link in self.links
                if link.pace.first_s
            },
        }

    def possible(self, pool: str = "") -> bool:
        """Whether discovery has found a drafter (of this pool, unless it is empty) or may find one."""
        return bool(self.links or self._sources) and (not pool or pool in self.demand)

    def has(self, pool: str, mode: DraftMode) -> bool:
        """Whether a connected drafter (of this pool, unless it is empty) supports the draft mode."""
        return any(link.supports(mode) and pool in ("", link.pool) for link in self.links)

    def wants_features(self, session: Session) -> bool:
        """Whether a connected drafter with a head may draft for this session, now or later."""
        return any(link.takes_features and _fits(session, link) for link in self.links)

    def strategy(self, pool: str) -> DraftStrategy:
        """The default strategy of the drafters (of this pool, unless it is empty)."""
        acks = [link.ack for link in self.links if link.ack is not None and pool in ("", link.pool)]
        return acks[0].strategy if acks else BEST_FIRST

    # -- discovery -------------------------------------------------------------------------------------------------------

    def _reconcile(self, found: Mapping[str, tuple[str, Peer]]) -> None:
        """Link all drafters that discovery lists. One that is no longer listed gets no new sessions and is dropped when it is empty."""
        known = {link.name: link for link in self.links}
        for address, (pool, peer) in found.items():
            link = known.get(address) or self._add(address)
            link.pool, link.leaving = pool, peer.leaving
            link.near = not (self._zone and peer.zone) or self._zone == peer.zone
        self._known = set(found)
        for link in self.links:
            link.leaving = link.leaving or link.name not in self._known
        self._drop()
        self._on_growth()

    def _add(self, address: str) -> Link:
        assert self._dial is not None, "sources of addresses need a way to dial them"
        link = Link(address, self._hello, self._on_growth, self._metrics, self._stall_clock)
        self.links.append(link)
        self._tasks[address] = asyncio.create_task(_run(link, self._dial(address)), name=f"drafter {address}")
        return link

    def _drop(self) -> None:
        """Drop drafters that are no longer listed and hold no trees."""
        for link in [link for link in self.links if link.name not in self._known and not link.drafts]:
            self.links.remove(link)
            task = self._tasks.pop(link.name)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    # -- placement -----------------------------------------------------------------------------------------------------

    def place(self, sessions: Iterable[Session]) -> None:
        """Open a tree for each session without one, on the best drafter with room."""
        for session in sessions:
            if session.draft is not None or not session.uses_drafters or session.done:
                continue
            if not any(link.room for link in self.links):
                return
            name = best_drafter([link.view() for link in self.links if _accepts(session, link)])
            if name is not None:
                session.draft = self._open(session, name)

    def balance(self, sessions: Iterable[Session]) -> None:
        """Once per interval, and whenever there are no sessions: update `demand.sessions` and start moves between drafters."""
        now_s, sessions = time.monotonic(), list(sessions)
        if sessions and now_s < self._next_balance_s:
            return
        numbers = Counter(self._pool_of(session) for session in sessions if session.drafts)
        for pool, demand in self.demand.items():
            demand.sessions = numbers[pool]
        self._drop()
        self._num_balances += 1
        pause_s = jittered(BALANCE_INTERVAL_S, self._hello().incarnation, self._num_balances)
        self._next_balance_s = now_s + pause_s if sessions else now_s  # the first session is counted at once
        self._give_up_silent_moves(sessions)
        movable = self._movable(sessions, now_s)

        def start(move: Move) -> bool:
            """Start a move of the session with the most tokens to come; False if none may use the target."""
            target, candidates = self._named(move.target), movable[move.source]
            session = next((s for s in candidates if _accepts(s, target)), None)
            if session is None:
                return False
            candidates.remove(session)
            session.next_draft = target.open(session, self._shape)
            self.num_moves += 1
            log.debug("session_moves", source=move.source, target=move.target)
            return True

        moves([link.view() for link in self.links], most=MAX_MOVES, most_urgent=MAX_URGENT_MOVES, start=start)

    @staticmethod
    def _movable(sessions: Iterable[Session], now_s: float) -> defaultdict[str, list[Session]]:
        """Sessions that may leave their drafter now, by its name, those with the most tokens to come first."""
        movable: defaultdict[str, list[Session]] = defaultdict(list)
        for session in sorted(sessions, key=lambda s: s.tokens_left, reverse=True):
            draft = session.draft
            if session.done or session.next_draft is not None or draft is None or draft.closed:
                continue
            min_age_s = 0.0 if draft.link.draining or draft.link.leaving else MIN_TREE_AGE_S
            if session.tokens_left >= MIN_TOKENS_LEFT and now_s - draft.opened_s >= min_age_s:
                movable[draft.link.name].append(session)
        return movable

    def _give_up_silent_moves(self, sessions: Iterable[Session]) -> None:
        """Count a miss for each new drafter of a move that is overdue. No round waits for its tree, so rounds cannot count it."""
        for session in sessions:
            draft = session.next_draft
            if draft is not None and not draft.closed and draft.link.overdue(draft.unanswered_since_s):
                draft.link.record_round(draft, missed=True)

    def _open(self, session: Session, name: str) -> Draft:
        return self._named(name).open(session, self._shape)

    def _named(self, name: str) -> Link:
        return next(link for link in self.links if link.name == name)

    def launch(self, session: Session) -> None:
        """The session's round runs; its tree is fixed."""
        for draft in (session.draft, session.next_draft):
            if draft is not None and not draft.closed:
                draft.link.launch(session, draft)

    def commit(self, session: Session, tokens: Sequence[int], budget: Budget) -> None:
        """Send committed tokens, which the session's text ends with, to its drafters. The tree of a lost drafter is dropped: its nodes were
        verified once more. A move is completed if the new drafter has sent growth.

        budget: most nodes of the next round, given the tree after the commit."""
        draft, next_draft = (self._usable(session, one, tokens) for one in (session.draft, session.next_draft))
        if draft is not None and next_draft is not None and next_draft.has_growth:
            draft.link.close(draft, "moved")
            draft = None
        if draft is None:
            draft, next_draft = next_draft, None
        for one in (draft, next_draft):
            if one is not None:
                one.link.commit(session, one, tokens, budget)
        session.draft, session.next_draft = draft, next_draft

    @staticmethod
    def _usable(session: Session, draft: Draft | None, tokens: Sequence[int]) -> Draft | None:
        """The draft unless its drafter is gone, or cannot draft behind these committed tokens: a tree that does not grow would keep all
        other drafts away. Nothing but the text decides this, so the tree may be dropped whole (algorithms.md 6.1, L5). A drafter that has
        refused the session for good is not asked again."""
        if draft is not None and not draft.closed and not _can_read(session, draft.link, tokens):
            draft.link.close(draft, "text does not fit")
            return None
        if draft is None or not draft.closed:
            return draft
        if draft.refused:
            session.unfit.add(draft.link.name)
        return None

    def close(self, session: Session, reason: str) -> None:
        """Close the trees of a session that has ended or takes no drafts for now."""
        for draft in (session.draft, session.next_draft):
            if draft is not None:
                draft.link.close(draft, reason)
        session.draft = session.next_draft = None

    def record_round(self, session: Session, *, missed: bool, num_nodes: int, tokens: int) -> None:
        """Record a round for the drafter, and for the demand of its pool.

        missed: it ran without the tree that it wanted; num_nodes: nodes of the drafter that it verified; tokens: that it committed."""
        draft, current = session.draft, session.round
        if draft is not None and not draft.closed and (missed or num_nodes):
            draft.link.record_round(draft, missed=missed, tokens=tokens)
            if num_nodes:
                session.pauses.pop(draft.link.name, None)
        elif draft is not None and not draft.closed and current.empty and draft.link.record_empty(draft):
            # Not for ever: a look-up that finds nothing in new text may find much once the text repeats itself.
            last, _ = session.pauses.get(draft.link.name, (0, 0))
            pause = min(2 * last, LONGEST_PAUSE) or FIRST_PAUSE
            session.pauses[draft.link.name] = pause, len(session.tokens) + pause
        if not session.drafts:
            return
        demand, seconds = self.demand[self._pool_of(session)], time.monotonic() - current.committed_s
        if draft is None or not draft.has_growth:
            demand.add_plain(seconds)
        else:  # the wait for a tree is a stall for as long as the drafter had it queued
            demand.add(seconds, max(0.0, min(draft.queued_s, current.launched_s - current.committed_s)))

    def flush(self) -> None:
        for link in self.links:
            link.flush()

    def _pool_of(self, session: Session) -> str:
        draft, wish = session.draft, session.request.speculation.drafter
        if draft is not None and not draft.closed:
            return draft.link.pool
        return wish if wish in self.demand else next(iter(self.demand))


async def _run(link: Link, dialled: AbstractAsyncContextManager[Drafter]) -> None:
    async with dialled as drafter:
        await link.run(drafter)


def _accepts(session: Session, link: Link) -> bool:
    """Whether the session may be placed there now: a head drafts from features, which the target's next step brings."""
    if link.takes_features and (session.features is None or session.features.before(len(session.tokens), 1) is None):
        return False
    _, pause_end = session.pauses.get(link.name, (0, 0))
    return len(session.tokens) >= pause_end and _fits(session, link)


def _fits(session: Session, link: Link) -> bool:
    """Whether the drafter may serve the session: it has not refused it for good and can read its text, the request does not name another
    pool, and the drafter supports its draft mode."""
    return (
        link.name not in session.unfit
        and session.request.speculation.drafter in ("", link.pool)
        and session.uses_drafters
        and link.supports(session.draft_mode)
        and _can_read(session, link)
    )


def _can_read(session: Session, link: Link, tokens: Sequence[int] = ()) -> bool:
    """Whether a node behind the session's text lies within the drafter's context, and the last tokens of it are in its vocabulary."""
    ack = link.ack
    return ack is not None and len(session.tokens) + 1 < ack.max_positions and max(tokens, default=0) < ack.vocab_size
