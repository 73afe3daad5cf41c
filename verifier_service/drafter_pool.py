"""The drafters of this verifier: found by discovery, one link each; which session is placed on which, and moved between them.

Sessions are changed in the engine loop only, between steps. A session whose drafter is lost verifies once more what has arrived; the next
`place` opens a new tree at a drafter that has room. A session that moves opens a tree at the new drafter first: both follow its commits,
and at the first commit after growth has come from the new one the old tree is dropped whole (docs/decisions/0008). Placement looks at load,
clocks and what past rounds gave, never at a tree (algorithms.md 6, L1 and L5).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace

import structlog

from rootward.backoff import jittered
from rootward.core.frames import Hello
from rootward.core.requests import BEST_FIRST, DraftMode, DraftStrategy
from rootward.demand import VerifierDemand
from rootward.ports import DEFAULT_POOL, Discovery, Drafter, Peer
from verifier_service.drafter_link import DrafterView, Link, LinkMetrics, Shape, State
from verifier_service.session import Draft, Session
from verifier_service.stall_clock import StallClock

log = structlog.get_logger("verifier.drafters")

TICK_S = 0.25  # between two looks at the balance; jittered, so that verifiers do not all move at once
MOVES, URGENT_MOVES = 2, 8  # most of a tick: for balance, and in all while a drafter leaves
SETTLED_S = 1.0  # a tree so young is not moved for balance
WORTH_MOVING = 8  # nor a session with fewer tokens to come: it would pay a prefill for nothing
AGAIN_S = 1.0  # before a source of addresses that failed is tried again

Dial = Callable[[str], AbstractAsyncContextManager[Drafter]]
Budget = Callable[[Session, Draft], int | None]


class DrafterPool:
    """All links. drafters: fixed ones, by name; sources: (pool, where its drafters are), dialled by address.

    `demand`: what is counted for the autoscaler, by pool. A session counts for the pool its tree is in, else for the first.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
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
        self._fixed, self._zone = dict(drafters), zone
        self._stall_clock = StallClock()
        self.links = [self._link(name, drafter) for name, drafter in drafters.items()]
        pools = [pool for pool, _ in sources] or [DEFAULT_POOL]
        self.demand = {pool: VerifierDemand(prior_row_s=prior_row_s) for pool in pools}
        for link in self.links:
            link.pool = pools[0]
        self.num_moves = 0
        self._found: dict[int, tuple[Peer, ...]] = {}  # by source
        self._known = set(self._fixed)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of links, by name
        self._following: list[asyncio.Task[None]] = []
        self._next_tick_s, self._num_ticks = 0.0, 0

    async def __aenter__(self) -> DrafterPool:
        for link in self.links:
            self._tasks[link.name] = asyncio.create_task(link.run(), name=f"drafter {link.name}")
        self._following = [asyncio.create_task(self._stall_clock.run(), name="awake")]
        self._following += [
            asyncio.create_task(self._follow(number, discovery), name=f"drafters of {pool}")
            for number, (pool, discovery) in enumerate(self._sources)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._following, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def up(self) -> tuple[str, ...]:
        return tuple(link.name for link in self.links if link.ack is not None)

    def gauges(self) -> dict[str, float]:
        """What is worth watching."""
        now_s = time.monotonic()
        return {
            "drafters_up": len(self.up),
            "drafters_draining": sum(link.draining or link.leaving for link in self.links),
            "drafters_left_alone": sum(link.breaker.state(now_s) is not State.CLOSED for link in self.links),
            "drafter_moves_total": self.num_moves,
        }

    def possible(self, pool: str = "") -> bool:
        """There is a drafter (of this pool, if it is named), or one may be found."""
        return bool(self.links or self._sources) and (not pool or pool in self.demand)

    def has(self, pool: str, law: DraftMode) -> bool:
        """A drafter (of this pool, if it is named) has a stream and makes such trees."""
        return any(link.makes(law) and pool in ("", link.pool) for link in self.links)

    def strategy(self, pool: str) -> DraftStrategy:
        """By which the drafters (of this pool, if it is named) were started to grow."""
        acks = [link.ack for link in self.links if link.ack is not None and pool in ("", link.pool)]
        return acks[0].strategy if acks else BEST_FIRST

    # -- which drafters there are ----------------------------------------------------------------------------------------

    async def _follow(self, number: int, discovery: Discovery) -> None:
        while True:
            try:
                async with aclosing(discovery.watch()) as changes:
                    async for peers in changes:
                        self._found[number] = peers
                        self._reconcile()
            except Exception:  # a source that breaks costs news of drafters, not the verifier
                log.exception("discovery_failed", source=number)
            await asyncio.sleep(AGAIN_S)

    def _reconcile(self) -> None:
        """Links to all that are found. One that is found no more gets nothing new, and goes when it holds nothing."""
        found: dict[str, tuple[str, Peer]] = {}
        for number in sorted(self._found, reverse=True):  # an address in several pools belongs to the first
            for peer in self._found[number]:
                found[peer.address] = (self._sources[number][0], peer)
        known = {link.name: link for link in self.links}
        for address, (pool, peer) in found.items():
            link = known.get(address) or self._add(address)
            link.pool, link.leaving = pool, peer.leaving
            link.near = not (self._zone and peer.zone) or self._zone == peer.zone
        self._known = {*found, *self._fixed}
        for link in self.links:
            link.leaving = link.leaving or link.name not in self._known
        self._drop()
        self._on_growth()

    def _add(self, address: str) -> Link:
        assert self._dial is not None, "sources of addresses need a way to dial them"
        dialled = self._dial(address)
        link = self._link(address, dialled)  # type: ignore[arg-type]  # a remote drafter is its own context
        self.links.append(link)
        self._tasks[address] = asyncio.create_task(_run(link, dialled), name=f"drafter {address}")
        return link

    def _link(self, name: str, drafter: Drafter) -> Link:
        return Link(name, drafter, self._hello, self._on_growth, self._metrics, self._stall_clock)

    def _drop(self) -> None:
        """Forget those that are found no more and hold nothing."""
        for link in [link for link in self.links if link.name not in self._known and not link.drafts]:
            self.links.remove(link)
            self._tasks.pop(link.name).cancel()

    # -- which session is where ------------------------------------------------------------------------------------------

    def place(self, sessions: Iterable[Session]) -> None:
        """Open a tree for those that have none, each on the best drafter with room."""
        for session in sessions:
            if session.draft is not None or session.law is None or session.done:
                continue
            if not any(link.room for link in self.links):
                return
            name = place([link.view() for link in self.links if _wanted(session, link)], unfit=session.unfit)
            if name is not None:
                session.draft = self._open(name, session)
                session.drafter_name = name

    def balance(self, sessions: Iterable[Session]) -> None:
        """If it is time to look, or nobody is left: count those that take drafts, and begin the moves that are due."""
        now_s, sessions = time.monotonic(), list(sessions)
        if sessions and now_s < self._next_tick_s:
            return
        numbers = Counter(self._pool_of(session) for session in sessions if session.drafts)
        for pool, demand in self.demand.items():
            demand.sessions = numbers[pool]
        self._drop()
        self._num_ticks += 1
        pause_s = jittered(TICK_S, self._hello().incarnation, self._num_ticks)
        self._next_tick_s = now_s + pause_s if sessions else now_s  # the first one that comes counts at once
        self._give_up(sessions)
        waiting = [s for s in sessions if not s.done and s.next_draft is None and s.draft is not None]
        for move in moves([link.view() for link in self.links], most=MOVES, most_urgent=URGENT_MOVES):
            young_s = 0.0 if move.urgent else SETTLED_S
            fitting = [
                s
                for s in waiting
                if s.draft is not None
                and s.draft.drafter == move.source
                and s.draft.link is not None
                and s.tokens_left >= WORTH_MOVING
                and now_s - s.draft.opened_s >= young_s
                and move.target not in s.unfit
                and _wanted(s, self._named(move.target))
            ]
            if fitting:
                session = max(fitting, key=lambda s: s.tokens_left)
                waiting.remove(session)
                session.next_draft = self._open(move.target, session)
                self.num_moves += 1
                log.debug("session_moves", source=move.source, target=move.target)

    def _give_up(self, sessions: Iterable[Session]) -> None:
        """Moves that lead nowhere: the new drafter says nothing. No round waits for its tree, so none would find out."""
        for session in sessions:
            coming = session.next_draft
            if coming is not None and (link := _link(coming)) is not None and link.overdue(coming.asked_s):
                link.judge(coming, missed=True)

    def _open(self, name: str, session: Session) -> Draft:
        link = self._named(name)
        wish, shape = session.request.speculation, self._shape
        limits = {
            "node_cap": wish.num_draft_tokens or shape.node_cap,
            "max_depth": wish.max_depth or shape.max_depth,
            "topk": wish.topk or shape.topk,
        }
        limits = {limit: min(value, getattr(shape, limit)) for limit, value in limits.items()}
        return link.open(session, replace(shape, **limits))

    def _named(self, name: str) -> Link:
        return next(link for link in self.links if link.name == name)

    def commit(
        self, session: Session, tokens: Sequence[int], budget: Budget = lambda session, _: session.target_nodes
    ) -> None:
        """The truth advanced: tell the drafters, also how many nodes the next round may have below what was kept; take up the new tree
        of a session that moves."""
        draft, coming = session.draft, session.next_draft
        if coming is not None:
            if (link := _link(coming)) is None:
                self._failed(session, coming)
                coming = None
            else:
                link.commit(coming, tokens, lambda kept: budget(session, kept))
        if draft is not None:
            if (link := _link(draft)) is None:  # an orphan has had its round
                self._failed(session, draft)
                draft = None
            elif coming is not None and coming.has_growth:
                link.close(draft, "moved")
                draft = None
            else:
                link.commit(draft, tokens, lambda kept: budget(session, kept))
        if draft is None and coming is not None:
            draft, coming = coming, None
            session.drafter_name = draft.drafter
        session.draft, session.next_draft = draft, coming

    @staticmethod
    def _failed(session: Session, draft: Draft) -> None:
        if draft.refused:
            session.unfit.add(draft.drafter)

    def close(self, session: Session, reason: str) -> None:
        """The session has ended, or wants no trees for now."""
        for draft in (session.draft, session.next_draft):
            if draft is not None and (link := _link(draft)) is not None:
                link.close(draft, reason)
        session.draft = session.next_draft = None

    def judge(self, session: Session, *, missed: bool, tokens: int = 0) -> None:
        """A round ended for which a tree was wanted; with a tree it gave so many tokens."""
        if session.draft is not None and (link := _link(session.draft)) is not None:
            link.judge(session.draft, missed=missed, tokens=tokens)

    def flush(self) -> None:
        for link in self.links:
            link.flush()

    # -- what is counted ---------------------------------------------------------------------------------------------------

    def round(self, session: Session, now_s: float) -> None:
        """A round has ended. What its launch waited for counts as stall as far as it was queueing at the drafter."""
        if not session.drafts:
            return
        account, draft = self.demand[self._pool_of(session)], session.draft
        if draft is None or not draft.has_growth:
            account.add_plain(now_s - session.committed_s)
        else:
            stall_s = min(draft.queued_s, session.launched_s - session.committed_s)
            account.add(now_s - session.committed_s, max(0.0, stall_s))

    def _pool_of(self, session: Session) -> str:
        link = _link(session.draft) if session.draft is not None else None
        wish = session.request.speculation.drafter
        return link.pool if link is not None else wish if wish in self.demand else next(iter(self.demand))


async def _run(link: Link, drafter: AbstractAsyncContextManager[Drafter]) -> None:
    async with drafter:
        await link.run()


def _wanted(session: Session, link: Link) -> bool:
    """The request names no pool, or this one's, and the drafter makes the trees that it takes."""
    return (
        session.request.speculation.drafter in ("", link.pool) and session.law is not None and link.makes(session.law)
    )


def _link(draft: Draft) -> Link | None:
    assert draft.link is None or isinstance(draft.link, Link)
    return draft.link


CROWDED = 0.5  # share of its capacity from which a drafter is worth leaving for balance
QUEUEING_S = 0.02  # or how long a commit waits there for its turn
FAR = 2.0  # how many times slower a drafter of another zone is taken to be
MORE, AND = 1.25, 1  # hysteresis: it must hold MORE times what the other holds AND one


@dataclass(frozen=True, slots=True)
class Move:
    """One session of this verifier, from a drafter to another."""

    source: str
    target: str
    urgent: bool = False  # the source leaves


def place(views: Sequence[DrafterView], *, unfit: Collection[str] = ()) -> str | None:
    """The best drafter with room for one more session; None if there is none. unfit: those that can never take it.

    The best by free share × tokens per round ÷ latency. What is not known of a drafter is as good as the best known: so it is tried.
    """
    candidates = [v for v in views if v.room > 0 and v.name not in unfit]
    gain = max((v.gain for v in candidates), default=0.0) or 1.0
    quickest_s = min((v.latency_s for v in candidates if v.latency_s > 0), default=1.0)

    def score(view: DrafterView) -> float:
        guess = 1.0 if view.near else FAR
        slower = max(1.0, view.latency_s / quickest_s) if view.latency_s > 0 else guess
        free = max(view.room, view.capacity - view.used) / max(1, view.capacity)
        return free * (view.gain or gain) / slower

    best = max(candidates, key=lambda v: (score(v), v.room), default=None)
    return None if best is None else best.name


def moves(views: Sequence[DrafterView], *, most: int, most_urgent: int) -> list[Move]:
    """Sessions to be moved now: off drafters that leave first, then from crowded ones to emptier ones."""
    found: list[Move] = []
    state = {v.name: v for v in views}
    for name in [v.name for v in views if v.leaving]:
        while len(found) < most_urgent and state[name].own > 0:
            target = place([v for v in state.values() if not v.leaving])
            if target is None:
                break
            found.append(_moved(state, name, target, urgent=True))
    for _ in range(most):
        pair = _worst_pair(list(state.values()))
        if pair is None:
            break
        found.append(_moved(state, *pair))
    return found


def _worst_pair(views: Sequence[DrafterView]) -> tuple[str, str] | None:
    """The fullest drafter that is crowded, and the emptiest one, if they differ by enough."""
    sources = [v for v in views if v.own > 0 and v.fresh and not v.leaving and _crowded(v)]
    targets = [v for v in views if v.room > 0 and v.fresh and not v.leaving]
    if not sources or not targets:
        return None
    source, target = max(sources, key=lambda v: v.share), min(targets, key=lambda v: v.share)
    there = target.share * source.capacity  # what the target holds, were it as large as the source
    return (source.name, target.name) if source.used > MORE * there + AND else None


def _crowded(view: DrafterView) -> bool:
    return view.share >= CROWDED or view.queue_s > QUEUEING_S


def _moved(state: dict[str, DrafterView], source: str, target: str, *, urgent: bool = False) -> Move:
    a, b = state[source], state[target]
    state[source] = replace(a, used=a.used - 1, own=a.own - 1)
    state[target] = replace(b, used=b.used + 1, own=b.own + 1, room=b.room - 1)
    return Move(source, target, urgent)
