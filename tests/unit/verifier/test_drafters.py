"""Links: queues that hold one entry per slot, keys that give nothing away, placement by room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from structlog.testing import capture_logs
from support.services import until

from rootward.core.frames import (
    MAX_FEATURES,
    DraftHead,
    FromDrafter,
    Grow,
    Hello,
    HelloAck,
    Load,
    NeedSync,
    Open,
    Reject,
    ToDrafter,
    extend_hash,
)
from rootward.core.living_tree import MalformedFrame
from rootward.core.requests import DraftMode, Rule, Speculation, Stopping, VerifierRequest
from rootward.core.rng import Key, Role
from rootward.errors import Unavailable
from rootward.ports import Peer
from rootward.wire import drafter_codec
from verifier_service.circuit_breaker import FIRST_REST_S, MAX_MISSES, MAX_OFFENCES, CircuitState
from verifier_service.drafter_link import ANSWERS_A_FRAME, MAX_TEXT, USELESS_PER_S, Link
from verifier_service.drafter_pool import FIRST_PAUSE, LONGEST_PAUSE, MAX_MOVES, MAX_URGENT_MOVES, DrafterPool
from verifier_service.head_drafts import TextFeatures
from verifier_service.session import Draft, Session, number_of
from verifier_service.settings import Shape

SHAPE = Shape(atoms=8, node_cap=8, max_depth=4, topk=2)


def session(number: int = 1, draft_mode: DraftMode = DraftMode.SAMPLED, **wish) -> Session:
    wanted = VerifierRequest(f"r{number}", (1, 2), stopping=Stopping(50), speculation=Speculation(**wish), seed=77)
    return Session(number, wanted, Rule.TRAVERSAL, draft_mode, frozenset())


def hello() -> Hello:
    return Hello("v", 1, "", 5, 64)


def up(link: Link, capacity: int = 4) -> Link:
    link.ack = HelloAck("d", 2, "", 5, 64, tuple(DraftMode), capacity, 16)
    return link


def every_node(session: Session, draft: Draft) -> None:
    """The next round may verify all that the tree was opened for."""


def extended(tokens: Iterable[int]) -> int:
    return reduce(extend_hash, tokens, 0)


def link(name: str = "d") -> Link:
    return Link(name, hello, lambda: None)


def opened(link: Link, one: Session) -> Draft:
    one.draft = link.open(one, SHAPE)
    return one.draft


@pytest.mark.parametrize(("address", "ahead"), [("10.0.0.7:50051", 8), ("127.0.0.1:50051", 2), ("[::1]:50051", 2)])
async def test_growth_ahead_depends_on_whose_processors_it_takes(address: str, ahead: int) -> None:
    one, busy = session(), up(link(address))
    one.draft = busy.open(one, replace(SHAPE, ahead=8, ahead_on_loopback=2))
    busy.flush()
    (message,) = (await busy.send_buffer.take()).opens
    assert message.ahead_cap == ahead


async def test_commits_of_a_slot_merge_into_one() -> None:
    """I5: however slow the link, it holds at most one commit per slot, and that one covers all of them."""
    one, busy = session(), up(link())
    opened(busy, one)
    busy.flush()
    await busy.send_buffer.take()
    for token in (3, 4, 0):  # three steps in which the link could not write
        busy.commit(one, one.draft, (token,), every_node)
        busy.flush()
    assert len(busy.send_buffer) == 1
    frame = await busy.send_buffer.take()
    assert len(frame.commits) == 1
    assert (frame.commits[0].base_len, frame.commits[0].tokens) == (2, (3, 4, 0))
    assert frame.commits[0].runs == (1, 1, 1)
    assert frame.commits[0].hash_after == one.draft.tree.hash


async def test_a_tree_begins_with_the_nodes_that_rounds_of_its_kind_have() -> None:
    one, busy = session(), up(link())
    opened(busy, one)
    assert next(iter(busy.send_buffer._opens.values())).node_budget is None  # nothing is known yet
    one.statistics.usual_nodes = 4
    draft = opened(busy, one)
    assert busy.send_buffer._opens[draft.slot].node_budget == 4
    busy.commit(one, draft, (3,), lambda session, draft: 6)
    assert busy.send_buffer._opens[draft.slot].node_budget == 6


async def test_a_tree_that_was_not_sent_yet_begins_where_the_truth_is_by_then() -> None:
    one, busy = session(), up(link())
    opened(busy, one)
    busy.flush()
    busy.commit(one, one.draft, (3, 4), every_node)
    busy.flush()
    frame = await busy.send_buffer.take()
    assert [o.prefix for o in frame.opens] == [(1, 2, 3, 4)]
    assert frame.commits == ()
    assert extended(frame.opens[0].prefix) == one.draft.tree.hash


async def test_a_tree_that_was_not_sent_yet_has_no_more_features_than_a_drafter_reads() -> None:
    """Refused for good, the session would never ask this drafter again."""
    one, busy, window = session(), up(link()), np.ones((MAX_FEATURES, 2), np.float32)
    one.tokens = [1] * (MAX_FEATURES + 1)
    one.features = TextFeatures(MAX_FEATURES)
    one.features.add(0, window)
    busy.ack = replace(busy.ack, head=DraftHead("h", 2))
    opened(busy, one)
    one.features.add(MAX_FEATURES, window[:2])
    one.tokens += [3, 4]
    busy.commit(one, one.draft, (3, 4), every_node)
    busy.flush()
    frame = await busy.send_buffer.take()
    assert frame.opens[0].num_features == MAX_FEATURES
    assert sum(len(part.features.rows) for part in frame.features) == MAX_FEATURES
    assert frame.features[0].first == len(one.tokens) - MAX_FEATURES


def test_a_slot_closed_before_it_was_sent_leaves_no_trace() -> None:
    one, busy = session(), up(link())
    opened(busy, one)
    busy.close(one.draft, "ended")
    busy.flush()
    assert len(busy.send_buffer) == 0
    assert one.draft.closed


def test_slots_are_never_reused() -> None:
    busy = up(link())
    slots = []
    for number in range(3):
        one = session(number)
        opened(busy, one)
        slots.append(one.draft.slot)
        busy.close(one.draft, "ended")
    assert slots == [1, 2, 3]


def test_only_coupled_drafting_learns_the_seed() -> None:
    """Under ratio tests a drafter that could compute the coins could bias the text."""
    for law in (DraftMode.COUPLED, DraftMode.SAMPLED, DraftMode.GREEDY):
        busy, one = up(link()), session(draft_mode=law)
        opened(busy, one)
        assert next(iter(busy.send_buffer._opens.values())).seed == (
            77 if law is DraftMode.COUPLED else one.key.derive(Role.DRAW, number_of("d"))
        )


def test_a_drafter_cannot_tell_the_name_of_a_tenant() -> None:
    """Others may operate it. It can try likely names, and compare what two drafters are told. It still shares rows and caches by them."""
    told: dict[str, list[Open]] = {}
    for address in ("a", "b"):
        busy = up(link(address))
        for number, tenant, salt in ((1, "acme", "blue"), (2, "acme", ""), (3, "other", "blue"), (4, "", "")):
            one = session(number)
            one.request = replace(one.request, request_id=f"{tenant} request-{number}", tenant=tenant, cache_salt=salt)
            opened(busy, one)
        told[address] = list(busy.send_buffer._opens.values())
    for messages in told.values():
        first, same, other, nobody = messages
        assert first.tenant == same.tenant != other.tenant
        assert first.cache_salt == other.cache_salt != 0
        assert (same.cache_salt, nobody.tenant, nobody.cache_salt) == (0, 0, 0)
    assert not {m.tenant for m in told["a"][:3]} & {m.tenant for m in told["b"][:3]}
    numbers = {number for messages in told.values() for m in messages for number in (m.tenant, m.cache_salt)}
    assert not numbers & {number_of(name) for name in ("acme", "other", "blue")}
    frame = drafter_codec.to_drafter_to_pb(ToDrafter(opens=tuple(told["a"]))).SerializeToString()
    assert not any(name in frame for name in (b"acme", b"other", b"blue", b"request"))


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.GREEDY])
def test_no_drafter_can_compute_what_another_draws(law: DraftMode) -> None:
    """A session that moves has a tree at both, and the new one decides, by when it sends growth, at which commit the old tree is dropped.
    If it knew the draws of the old one, it could choose by them (`keep_if_likely` in test_moves_exact). Incarnations are no secrets."""
    one, seeds = session(draft_mode=law), set()
    for name in ("a", "b"):
        opened(busy := up(link(name)), one)
        seeds |= {message.seed for message in busy.send_buffer._opens.values()}
    assert len(seeds) == 2
    assert not seeds & {one.key.derive(Role.DRAW), one.request.seed}


def test_two_attempts_at_one_request_never_share_coins() -> None:
    """Drafters of the first know verdicts and noise of it, and its epoch may be forgotten (`MAX_EPOCHS_REMEMBERED`)."""
    first = session(1)
    second = Session(2, first.request, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset())
    assert first.key != second.key
    assert first.key.bonus(2) != second.key.bonus(2)


def test_ratio_tests_of_two_requests_never_share_coins() -> None:
    """What the rounds of one teach (how many nodes pay) shapes the rounds of the other."""
    ratio, match = [session(1), session(2)], [session(1), session(2)]
    for one in match:
        one.rule = Rule.MATCH
    assert ratio[0].key != ratio[1].key
    assert match[0].key == match[1].key == Key(77)


def test_placement_takes_the_emptiest_drafter_and_respects_wishes() -> None:
    pool = DrafterPool(hello, lambda: None, shape=SHAPE)
    pool.links = [up(link("small"), 1), up(link("large"), 3), link("down")]
    names = []
    for number in range(6):
        one = session(number, num_draft_tokens=2, max_depth=1, topk=1)
        pool.place([one])
        names.append(one.draft.link.name if one.draft is not None else "")
    assert sorted(names) == ["", "", "large", "large", "large", "small"]
    opened = next(iter(pool.links[1].send_buffer._opens.values()))
    assert (opened.node_cap, opened.max_depth, opened.topk) == (2, 1, 1)


def test_repeated_malformed_frames_open_the_circuit_of_a_drafter() -> None:
    busy = up(link())
    for number in range(3):
        one = session(number)
        opened(busy, one)
        busy._on_malformed(one.draft.slot, "nonsense")
    assert busy.room == 0


def long_ago(unanswered_since_s: float) -> float:
    return unanswered_since_s - 60


def test_no_session_is_placed_on_a_drafter_without_its_draft_mode() -> None:
    chosen = up(link("chosen"))
    chosen.ack = replace(chosen.ack, laws=(DraftMode.TOP_K, DraftMode.GREEDY))
    pool, sampled, greedy = pool_of(chosen), session(1, DraftMode.SAMPLED), session(2, DraftMode.GREEDY)
    pool.place([sampled, greedy])
    assert sampled.draft is None
    assert greedy.draft.link.name == "chosen"
    assert (pool.has("", DraftMode.SAMPLED), pool.has("", DraftMode.GREEDY)) == (False, True)
    old = up(link("old"))
    pool.links.append(old)
    pool.place([sampled])
    heard_load(old, 1, draining=True)
    heard_load(chosen, 1)
    pool.balance([sampled])
    assert (sampled.draft.link.name, sampled.next_draft) == ("old", None)  # nor moved there


def test_the_last_load_report_of_a_drafter_counts() -> None:
    busy = up(link())
    heard_load(busy, 1, draining=True)
    assert busy.room == 0
    heard_load(busy, 1)
    assert busy.room == 3


def test_a_lost_link_leaves_its_sessions_to_others() -> None:
    async def run() -> None:
        one, busy = session(), up(link())
        opened(busy, one)
        tree = one.draft.tree
        busy._on_stream_end()
        assert one.draft.closed  # what has arrived is verified once more
        assert one.draft.tree is tree
        assert one.draft.at_rest
        assert busy.room == 0

    asyncio.run(run())


def pool_of(*links: Link) -> DrafterPool:
    pool = DrafterPool(hello, lambda: None, shape=SHAPE)
    pool.links = list(links)
    pool._known = {"old", "new", *(link.name for link in links)}
    return pool


def heard_load(
    link: Link, sessions: int, capacity: int = 4, *, draining: bool = False, own_sessions: int | None = None
) -> None:
    link._receive(FromDrafter(load=Load(sessions, capacity, 0, 2, draining, own_sessions)))


def grown(link: Link, draft: Draft, token: int = 1) -> None:
    """The drafter draws one child of the root."""
    column = np.array([0]), np.array([token]), np.array([False])
    link._receive(
        FromDrafter(grows=(Grow(draft.slot, draft.tree.length, draft.tree.hash, draft.tree.next_id, *column),))
    )


def moving() -> tuple[DrafterPool, Link, Link, Session]:
    """A session that moves off a drafter that drains."""
    old, new, one = up(link("old")), up(link("new")), session(draft_mode=DraftMode.TOP_K)
    pool = pool_of(old)
    pool.place([one])
    pool.links.append(new)
    grown(old, one.draft)
    heard_load(old, 1, draining=True)
    heard_load(new, 0)
    pool.balance([one])
    return pool, old, new, one


def test_a_move_makes_before_it_breaks() -> None:
    pool, old, new, one = moving()
    first, coming = one.draft, one.next_draft
    assert (first.link.name, coming.link.name) == ("old", "new")
    pool.commit(one, (1,), every_node)
    assert (one.draft, one.next_draft) == (first, coming)  # nothing was heard from there: both follow
    assert first.tree.hash == coming.tree.hash
    grown(new, coming)
    assert one.draft is first  # a tree that waits for its round is not replaced in it
    pool.commit(one, (2,), every_node)
    assert (one.draft, one.next_draft) == (coming, None)
    assert first.closed
    assert not old.drafts
    assert list(new.drafts) == [coming.slot]


def test_a_move_whose_target_dies_is_forgotten_and_one_whose_source_dies_is_done() -> None:
    pool, old, new, one = moving()
    first = one.draft
    new._on_stream_end()
    pool.commit(one, (1,), every_node)
    assert (one.draft, one.next_draft) == (first, None)
    pool, old, new, one = moving()
    coming = one.next_draft
    old._on_stream_end()
    assert one.draft.at_rest  # an orphan: what has arrived is verified once more
    pool.commit(one, (1,), every_node)
    assert (one.draft, one.next_draft) == (coming, None)


def test_a_move_to_a_silent_drafter_is_abandoned() -> None:
    """Its rounds have the old tree, so none of them waits in vain: without an end of its own the move would never end."""
    pool, _, new, one = moving()
    first = one.draft
    new.flush()
    one.next_draft.unanswered_since_s = new.unanswered_since_s = long_ago(new.unanswered_since_s)
    for _ in range(MAX_MISSES):
        assert one.next_draft.link.name == "new"
        due(pool, one)
        pool.commit(one, (1,), every_node)
        assert one.draft is first
    assert one.next_draft is None  # it is left alone
    third = up(link("third"))
    pool.links.append(third)
    pool._known.add("third")
    due(pool, one)
    assert one.next_draft.link.name == "third"


def due(pool: DrafterPool, one: Session) -> None:
    pool._next_balance_s = 0.0
    pool.balance([one])


def test_demand_counts_the_first_session_at_once_and_the_end_of_the_last() -> None:
    """Nobody runs for an instant between them; the count must not be that of the instant until the next look."""
    pool, one = pool_of(up(link("a"))), session(1, draft_mode=DraftMode.TOP_K)
    (demand,) = pool.demand.values()
    for _ in range(3):
        pool.balance([one])
        assert demand.sessions == 1
        pool.balance([])
        assert demand.sessions == 0


class Virtual:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def until(self, condition: Callable[[], object], step: Callable[[], object]) -> float:
        """Seconds until it holds; something is done every 10 ms."""
        begun_s = self.now_s
        while not condition():
            assert self.now_s < begun_s + 60
            self.now_s += 0.01
            step()
        return self.now_s - begun_s


def test_a_drafter_that_comes_is_used_by_running_sessions_within_a_second_and_one_that_drains_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, old, new = Virtual(monkeypatch), up(link("old"), 16), up(link("new"), 16)
    pool, running = pool_of(old), [session(number, draft_mode=DraftMode.TOP_K) for number in range(12)]
    pool.place(running)
    clock.now_s += 10

    def step() -> None:
        for drafter in pool.links:
            heard_load(drafter, len(drafter.drafts), 16, draining=drafter is old and leaving)
        pool.balance(running)
        for one in running:
            for draft in (one.draft, one.next_draft):
                grown(draft.link, draft, 1) if draft is not None else None
            pool.commit(one, (1,), every_node)

    def at(name: str) -> int:
        return sum(one.draft.link.name == name for one in running)

    leaving = False
    pool.links.append(new)
    assert clock.until(lambda: at("new"), step) < 1.0
    assert clock.until(lambda: at("new") == 5, step) < 1.0  # as even as hysteresis lets them be
    leaving = True
    assert clock.until(lambda: at("new") == 12, step) < 1.0
    assert not old.drafts


def in_pool(name: str, address: str) -> Link:
    one = up(link(address), 16)
    one.pool = name
    heard_load(one, 0, 16)
    return one


def placed(at: Link, numbers: Iterable[int], **wish) -> list[Session]:
    """Sessions that have a tree there."""
    running = [session(number, DraftMode.TOP_K, **wish) for number in numbers]
    for one in running:
        opened(at, one)
    return running


def round_of_each(pool: DrafterPool, running: list[Session], *draining: Link) -> Callable[[], None]:
    """A step in which all drafters report their load and send growth, and each session commits a token."""

    def step() -> None:
        for drafter in pool.links:
            heard_load(drafter, len(drafter.drafts), 16, draining=drafter in draining)
        pool.balance(running)
        for one in running:
            for draft in (one.draft, one.next_draft):
                grown(draft.link, draft, 1) if draft is not None else None
            pool.commit(one, (1,), every_node)

    return step


def without_pool(other: Link, running: list[Session]) -> None:
    other.pool = "b"


def without_draft_mode(other: Link, running: list[Session]) -> None:
    other.ack = replace(other.ack, laws=(DraftMode.SAMPLED,))


def without_features(other: Link, running: list[Session]) -> None:
    other.ack = replace(other.ack, head=DraftHead("h", 2))


def refused_for_good(other: Link, running: list[Session]) -> None:
    for one in running:
        one.unfit = {other.name}


MISFITS = [without_pool, without_draft_mode, without_features, refused_for_good]


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_drain_ends_though_the_emptiest_drafter_fits_none_of_its_sessions(misfit, monkeypatch) -> None:
    clock, d1, d2, d3 = Virtual(monkeypatch), *(in_pool("a", f"d{i}") for i in (1, 2, 3))
    pool = pool_of(d1, d2, d3)
    leaving, staying = placed(d1, range(3), drafter="a"), placed(d2, range(3, 6), drafter="a")
    misfit(d3, leaving + staying)
    assert clock.until(lambda: not d1.drafts, round_of_each(pool, leaving + staying, d1)) < 1.0
    assert (len(d2.drafts), len(d3.drafts), pool.num_moves) == (6, 0, 3)


@pytest.mark.parametrize("misfit", MISFITS)
def test_load_is_balanced_though_the_emptiest_drafter_fits_none_of_the_sessions(misfit, monkeypatch) -> None:
    clock, d1, d2, d3 = Virtual(monkeypatch), *(in_pool("a", f"d{i}") for i in (1, 2, 3))
    pool = pool_of(d1, d2, d3)
    running = placed(d1, range(12), drafter="a") + placed(d2, [12], drafter="a")
    misfit(d3, running)
    clock.now_s += 10
    assert clock.until(lambda: len(d1.drafts) == 7, round_of_each(pool, running)) < 2.0
    assert (len(d2.drafts), len(d3.drafts)) == (6, 0)


def test_load_is_balanced_though_the_sessions_of_the_fullest_drafter_fit_no_other(monkeypatch) -> None:
    clock, only, d1, d2 = Virtual(monkeypatch), in_pool("b", "only"), in_pool("a", "d1"), in_pool("a", "d2")
    pool = pool_of(only, d1, d2)
    running = placed(only, range(16), drafter="b") + placed(d1, range(16, 28), drafter="a")
    clock.now_s += 10
    assert clock.until(lambda: len(d1.drafts) == 7, round_of_each(pool, running)) < 2.0
    assert (len(only.drafts), len(d2.drafts)) == (16, 5)


def test_in_one_look_each_session_of_a_drafter_that_drains_gets_one_that_it_fits() -> None:
    d1, d2, d3 = in_pool("a", "d1"), in_pool("a", "d2"), in_pool("b", "d3")
    pool = pool_of(d1, d2, d3)
    bound, free = placed(d1, range(3), drafter="a"), placed(d1, range(3, 6))
    others = placed(d2, range(6, 14), drafter="a")  # d3 is emptier, even with all that may go there
    heard_load(d1, 6, 16, draining=True)
    pool.balance(bound + free + others)
    assert [one.next_draft.link.name for one in bound + free] == ["d2"] * 3 + ["d3"] * 3


def test_moves_of_one_look_are_limited_over_all_drafters(monkeypatch) -> None:
    """Drafters that nobody fits are tried first, and are not counted."""
    clock = Virtual(monkeypatch)
    leaving, full = [in_pool("a", f"leaving{i}") for i in range(3)], [in_pool("a", f"full{i}") for i in range(3)]
    roomy, misfits = [in_pool("a", f"roomy{i}") for i in range(2)], [in_pool("b", f"misfit{i}") for i in range(3)]
    pool = pool_of(*misfits, *leaving, *full, *roomy)
    running = [
        one
        for i, drafter in enumerate(leaving + full)
        for one in placed(drafter, range(12 * i, 12 * i + 12), drafter="a")
    ]
    clock.now_s += 10
    for drafter in pool.links:
        heard_load(drafter, len(drafter.drafts), 16, draining=drafter in leaving)
    pool.balance(running)
    moved = [one.draft.link for one in running if one.next_draft is not None]
    assert pool.num_moves == len(moved) == MAX_URGENT_MOVES + MAX_MOVES
    assert sum(drafter in leaving for drafter in moved) == MAX_URGENT_MOVES
    assert all(one.next_draft.link in roomy for one in running if one.next_draft is not None)
    pool.balance(running)
    assert pool.num_moves == len(moved)  # the next look is later


def test_a_session_that_ends_while_it_moves_leaves_neither_tree() -> None:
    pool, old, new, one = moving()
    pool.close(one, "ended")
    assert not old.drafts
    assert not new.drafts
    assert one.draft is one.next_draft is None


def test_a_full_drafter_is_not_asked_by_all_at_once() -> None:
    """Each verifier stays away for its own time, at least what was asked for, and longer each time it is refused again."""
    until = []
    for incarnation in range(8):
        one, busy = session(), up(Link("d", lambda i=incarnation: Hello("v", i, "", 5, 64), lambda: None))
        now_s = time.monotonic()
        for _ in range(2):
            draft = opened(busy, one)
            busy._receive(FromDrafter(rejects=(Reject(draft.slot, "capacity", 1000),)))
            assert busy.room == 0
            until.append(busy._full_until_s - now_s)
            busy._full_until_s = 0.0
    first, second = until[::2], until[1::2]
    assert all(1.25 <= seconds < 2 for seconds in first)
    assert all(2.5 <= seconds < 4 for seconds in second)
    assert len({round(seconds, 3) for seconds in first}) == 8


def test_a_drafter_that_can_never_take_a_session_is_not_asked_again_and_others_are() -> None:
    short, long, one = up(link("short")), up(link("long"), 3), session()
    pool = pool_of(short, long)
    pool.place([one])
    assert one.draft.link.name == "short"
    short._receive(FromDrafter(rejects=(Reject(one.draft.slot, "context"),)))
    pool.commit(one, (1,), every_node)
    assert (one.draft, one.unfit) == (None, {"short"})
    pool.place([one])
    assert one.draft.link.name == "long"
    last = session(2)
    last.unfit = {"short", "long"}
    pool.place([last])
    assert last.draft is None


def test_room_counts_the_sessions_of_other_verifiers() -> None:
    busy = up(link(), 4)
    opened(busy, session(1))
    heard_load(busy, 3)  # two of them are not ours
    assert (busy.used, busy.room) == (3, 1)
    opened(busy, session(2))
    assert (busy.used, busy.room) == (4, 0)


def test_trees_that_were_just_closed_are_not_taken_for_those_of_other_verifiers() -> None:
    """A report of load may be older than the end of a burst. The drafter says itself how many of its sessions are of this verifier."""
    busy = up(link(), 4)
    burst = [session(number) for number in range(4)]
    for one in burst:
        opened(busy, one)
    for one in burst:
        busy.close(one.draft, "ended")
    heard_load(busy, 4, own_sessions=4)  # sent before the drafter read of the end
    assert (busy.used, busy.room) == (0, 4)
    opened(busy, session(5))
    assert (busy.used, busy.room) == (1, 3)
    heard_load(busy, 3, own_sessions=0)  # three of others, and this verifier's has not arrived there yet
    assert (busy.used, busy.room) == (4, 0)


async def test_a_drafter_that_was_dropped_is_hung_up_before_the_pool_ends() -> None:
    gone, hung_up = asyncio.Event(), asyncio.Event()

    class Leaving:
        async def watch(self):
            yield (Peer("d:1"),)
            await gone.wait()
            yield ()
            await asyncio.Event().wait()

    class Quiet:
        async def session(self, inbound):
            await asyncio.Event().wait()
            yield FromDrafter()

    @asynccontextmanager
    async def dial(address: str):
        try:
            yield Quiet()
        finally:
            await asyncio.sleep(0.01)  # a channel takes some time to close
            hung_up.set()

    async with DrafterPool(hello, lambda: None, shape=SHAPE, sources=[("p", Leaving())], dial=dial) as pool:
        await until(lambda: pool.links)
        await asyncio.sleep(0)
        gone.set()
        await until(lambda: not pool.links)
    assert hung_up.is_set()


class Flooding:
    """A drafter that sends one frame again and again, once it has one."""

    def __init__(self) -> None:
        self.frame: FromDrafter | None = None
        self.num_sent = 0

    async def session(self, inbound) -> AsyncGenerator[FromDrafter, None]:
        yield FromDrafter(up(link()).ack)
        while True:
            await asyncio.sleep(0)
            if self.frame is not None:
                self.num_sent += 1
                yield self.frame


@pytest.mark.parametrize("frame", [FromDrafter(), FromDrafter(load=Load())])
async def test_a_flood_of_frames_without_answers_is_read_slowly(frame: FromDrafter) -> None:
    """Each wakes the engine."""
    drafter, woken = Flooding(), []
    busy = Link("d", hello, lambda: woken.append(1))
    reading = asyncio.create_task(busy.run(drafter))
    await until(lambda: busy.ack is not None)
    drafter.frame, start_s = frame, time.monotonic()
    await until(lambda: len(woken) >= USELESS_PER_S / ANSWERS_A_FRAME)  # of the first second
    await asyncio.sleep(0.5)
    # The handshake, frames before start_s, and the one that exceeds the limit come on top.
    assert len(woken) <= USELESS_PER_S / ANSWERS_A_FRAME * (time.monotonic() - start_s + 1) + 8
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("kind", ["closed", "nodes", "empty", "need_sync", "reject"])
async def test_a_flood_of_answers_without_use_is_read_slowly(kind: str) -> None:
    """Each frame is below the limits of a frame, and none of them is an offence: answers may be late."""
    drafter, busy, one = Flooding(), link(), session()
    reading = asyncio.create_task(busy.run(drafter))
    await until(lambda: busy.ack is not None)
    draft = opened(busy, one)
    # An answer of 32 nodes counts as two.
    none, num = np.zeros(32 if kind == "nodes" else 0, dtype=np.int64), 2048 if kind == "nodes" else 4096
    grow = Grow(draft.slot if kind == "empty" else 999, 2, draft.tree.hash, 1, none, none, none.astype(bool))
    answers = {
        "need_sync": {"need_syncs": (NeedSync(999, 0, 0),) * num},
        "reject": {"rejects": (Reject(999, "x"),) * num},
    }
    drafter.frame, start_s = FromDrafter(**answers.get(kind, {"grows": (grow,) * num})), time.monotonic()
    await asyncio.sleep(0.5)
    num_read = (drafter.num_sent - 1) * 4096  # the last one may be read only in part
    assert num_read <= USELESS_PER_S * (time.monotonic() - start_s + 1) + 4096
    assert not draft.closed
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


def test_late_answers_of_an_honest_drafter_are_read_at_once() -> None:
    one, busy = session(), up(link())
    draft, none = opened(busy, one), np.zeros(0, dtype=np.int64)
    for _ in range(100):  # it says once after each commit that its tree rests
        rests = Grow(draft.slot, draft.tree.length, draft.tree.hash, 1, none, none, none.astype(bool), at_rest=True)
        busy._receive(FromDrafter(grows=(rests,)))
        busy.commit(one, draft, (1,), every_node)
    assert busy._useless == 0
    busy.close(draft, "ended")
    busy._receive(FromDrafter(grows=(replace(rests, slot=draft.slot),) * 4000))
    assert busy._pause_s() == 0


# -- texts that outgrow a drafter ----------------------------------------------------------------------------------------


def committed(pool: DrafterPool, one: Session, *tokens: int) -> None:
    """A round of the session commits these tokens."""
    one.tokens += tokens
    pool.commit(one, tokens, every_node)


def test_a_session_leaves_a_drafter_whose_context_its_text_fills() -> None:
    """Its tree would be at rest without a node in each further round, and keep local drafts and other drafters away."""
    short, long, one = up(link("short")), up(link("long"), 3), session()
    short.ack = replace(short.ack, max_positions=8)
    pool = pool_of(short, long)
    pool.place([one])
    committed(pool, one, 1, 2, 3, 4)
    assert one.draft.link is short  # 6 tokens: a node would be the seventh, whose successor is within the context
    committed(pool, one, 1)
    assert (one.draft, short.drafts) == (None, {})
    pool.place([one])
    assert one.draft.link is long
    later = session(2)
    later.tokens = [1] * 7
    long.ack = None
    pool.place([later])
    assert later.draft is None  # nor is its text sent where it cannot grow


def test_a_session_whose_text_outgrows_its_drafter_takes_the_tree_that_it_moves_to() -> None:
    pool, old, _, one = moving()
    coming = one.next_draft
    old.ack = replace(old.ack, max_positions=4)
    committed(pool, one, 1)
    assert (one.draft, one.next_draft, old.drafts) == (coming, None, {})


def test_no_session_moves_to_a_drafter_whose_context_its_text_fills() -> None:
    old, new, one = up(link("old")), up(link("new")), session(draft_mode=DraftMode.TOP_K)
    pool = pool_of(old)
    pool.place([one])
    new.ack = replace(new.ack, max_positions=3)
    pool.links.append(new)
    heard_load(old, 1, draining=True)
    heard_load(new, 0)
    pool.balance([one])
    assert one.next_draft is None


def test_a_session_leaves_a_drafter_whose_vocabulary_lacks_a_token_of_its_text() -> None:
    """Vocabularies of one tokenizer may be padded to different sizes. The drafter could only ask to resynchronise."""
    busy, one = up(link()), session()
    pool = pool_of(busy)
    pool.place([one])
    committed(pool, one, 1, 5)
    assert (one.draft, busy.drafts) == (None, {})


# -- drafters that answer without nodes ------------------------------------------------------------------------------------


def useless_answer(draft: Draft, kind: str) -> FromDrafter:
    """An answer that breaks the tree, though it is not malformed."""
    if kind == "need sync":
        return FromDrafter(need_syncs=(NeedSync(draft.slot, 0, 0),))
    base_hash, first = (draft.tree.hash, draft.tree.next_id + 4) if kind == "gap" else (1, draft.tree.next_id)
    column = np.array([0]), np.array([1]), np.array([False])
    return FromDrafter(grows=(Grow(draft.slot, draft.tree.length, base_hash, first, *column),))


def state(link: Link) -> CircuitState:
    return link.breaker.state(time.monotonic())


@pytest.mark.parametrize("kind", ["need sync", "gap", "foreign hash"])
def test_a_drafter_that_breaks_each_tree_is_left_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session would send its whole text again in each step."""
    clock, busy, rests = Virtual(monkeypatch), up(link(), 64), []
    other = opened(busy, session(99))
    for number in range(MAX_OFFENCES):
        assert busy.room > 0
        draft = opened(busy, session(number))
        busy._receive(useless_answer(draft, kind))
        assert draft.closed
    assert other.closed
    for number in range(3):
        rests.append(busy.breaker.until_s - clock.now_s)
        assert busy.room == 0
        clock.now_s = busy.breaker.until_s
        assert busy.room == 1  # one session, to see
        busy._receive(useless_answer(opened(busy, session(number)), kind))
    assert rests == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]


def test_a_tree_that_breaks_now_and_then_is_forgiven_where_rounds_verify_nodes() -> None:
    busy = up(link(), 64)
    for number in range(5 * MAX_OFFENCES):
        served, draft = opened(busy, session(number)), opened(busy, session(number + 100))
        grown(busy, served)
        busy.record_round(served, missed=False, tokens=2)
        busy._receive(useless_answer(draft, "need sync"))
    assert state(busy) is CircuitState.CLOSED


def test_late_requests_to_resynchronise_are_no_offence() -> None:
    """Of trees that the verifier has closed, and of streams that have ended."""
    busy = up(link(), 64)
    for number in range(5 * MAX_OFFENCES):
        draft = opened(busy, session(number))
        if number % 2:
            busy.close(draft, "ended")
        else:
            busy._on_stream_end()
            up(busy)
        busy._receive(useless_answer(draft, "need sync"))
        busy._receive(useless_answer(draft, "gap"))
    assert state(busy) is CircuitState.CLOSED


@pytest.mark.parametrize("retry_after_ms", [0, 1000])
def test_a_tree_that_the_drafter_gave_up_while_its_commit_was_on_the_way_is_no_offence(retry_after_ms: int) -> None:
    """Both answers may come in one frame."""
    busy = up(link(), 64)
    for number in range(MAX_OFFENCES):
        draft = opened(busy, session(number))
        reject = Reject(draft.slot, "fair share", retry_after_ms)
        busy._receive(FromDrafter(need_syncs=(NeedSync(draft.slot, 0, 0),), rejects=(reject,)))
        assert draft.closed
        assert draft.refused is (retry_after_ms == 0)
    assert state(busy) is CircuitState.CLOSED
    assert (busy.room == 0) is (retry_after_ms > 0)


def rests(link: Link, draft: Draft) -> None:
    """The drafter says that no node comes."""
    none = np.zeros(0, dtype=np.int64)
    tree = draft.tree
    grow = Grow(draft.slot, tree.length, tree.hash, tree.next_id, none, none, none.astype(bool), at_rest=True)
    link._receive(FromDrafter(grows=(grow,)))


def test_only_nodes_close_the_circuit_of_a_drafter_that_is_tested() -> None:
    busy = up(link())
    for number in range(MAX_OFFENCES):
        busy._receive(useless_answer(opened(busy, session(number)), "gap"))
    busy.breaker.until_s = 0.0
    draft = opened(busy, session())
    rests(busy, draft)
    assert state(busy) is CircuitState.HALF_OPEN
    grown(busy, draft)
    assert state(busy) is CircuitState.CLOSED


def empty_rounds(pool: DrafterPool, one: Session, num: int) -> None:
    """Rounds whose trees are at rest without a node."""
    for _ in range(num):
        rests(one.draft.link, one.draft)
        one.draft.link.pool, one.round.empty = next(iter(pool.demand)), True
        pool.record_round(one, missed=False, num_nodes=0, tokens=1)
        committed(pool, one, 1)


def test_a_session_leaves_a_drafter_that_has_no_nodes_for_it_for_ever_longer_times() -> None:
    """Its rounds would wait, and have no local draft."""
    busy, one = up(link()), session()
    busy.ack = replace(busy.ack, max_positions=4096)
    pool, pauses = pool_of(busy), []
    for _ in range(6):
        pool.place([one])
        assert one.draft is not None
        empty_rounds(pool, one, MAX_MISSES - 1)
        assert one.draft is not None
        begun = len(one.tokens)
        empty_rounds(pool, one, 1)
        assert (one.draft, busy.drafts) == (None, {})
        while one.draft is None:
            committed(pool, one, 1)
            pool.place([one])
        pauses.append(len(one.tokens) - begun)
    assert pauses == [min(FIRST_PAUSE * 2**i, LONGEST_PAUSE) for i in range(6)]


def test_rounds_that_verify_nodes_end_the_count_of_empty_ones_and_shorten_the_next_pause() -> None:
    busy, one = up(link()), session()
    pool = pool_of(busy)
    pool.place([one])
    one.pauses["d"] = LONGEST_PAUSE, 0
    for _ in range(3):
        empty_rounds(pool, one, MAX_MISSES - 1)
        one.round.empty = False
        pool.record_round(one, missed=False, num_nodes=2, tokens=2)
    assert one.draft is not None
    empty_rounds(pool, one, MAX_MISSES)
    assert one.draft is None
    assert one.pauses["d"][0] == FIRST_PAUSE


def test_a_drafter_without_nodes_is_not_taken_for_as_good_as_the_best() -> None:
    """Values that are not known are assumed to be the best known ones."""
    good, empty, one = up(link("good")), up(link("empty"), 64), session(1)
    good.gain = 3.0
    opened(good, session(3))
    pool = pool_of(good, empty)
    pool.place([one])
    assert one.draft.link is empty
    empty_rounds(pool, one, 1)
    other = session(2)
    pool.place([other])
    assert other.draft.link is good


# -- texts of a drafter ----------------------------------------------------------------------------------------------------


class Refusing:
    """A drafter that answers the handshake with many refusals."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.hung_up = asyncio.Event()

    async def session(self, inbound) -> AsyncGenerator[FromDrafter, None]:
        try:
            for _ in range(10):
                self.num_sent += 1
                yield FromDrafter(replace(up(link()).ack, refusal="no" * (1 << 20)))
        finally:
            self.hung_up.set()


async def test_a_refusal_ends_the_stream_and_is_logged_in_part() -> None:
    drafter, busy = Refusing(), link()
    with capture_logs() as lines:
        reading = asyncio.create_task(busy.run(drafter))
        await drafter.hung_up.wait()
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert drafter.num_sent == 1
    assert [line["event"] for line in lines] == ["pairing_refused"]
    assert len(lines[0]["reason"]) == len(busy.refusal) == MAX_TEXT


@pytest.mark.parametrize("error", [Unavailable("x" * 10_000), MalformedFrame("x" * 10_000)])
async def test_an_error_of_a_stream_is_logged_in_part(error: Exception) -> None:
    class Failing:
        async def session(self, inbound) -> AsyncGenerator[FromDrafter, None]:
            yield FromDrafter()
            raise error

    busy = link()
    with capture_logs() as lines:
        reading = asyncio.create_task(busy.run(Failing()))
        await until(lambda: lines)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert [len(line["error"]) for line in lines] == [MAX_TEXT]


async def test_the_reason_of_a_rejection_is_not_sent_back_at_full_size() -> None:
    busy = up(link())
    draft = opened(busy, session())
    busy.flush()
    await busy.send_buffer.take()
    busy._receive(FromDrafter(rejects=(Reject(draft.slot, "x" * 10_000),)))
    busy.flush()
    (close,) = (await busy.send_buffer.take()).closes
    assert len(close.reason) == MAX_TEXT
