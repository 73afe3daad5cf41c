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
from rootward.core.requests import DraftMode, Rule, Speculation, Stopping, VerifierRequest
from rootward.core.rng import Key, Role
from rootward.ports import Peer
from rootward.wire import drafter_codec
from verifier_service.circuit_breaker import MAX_MISSES
from verifier_service.drafter_link import ANSWERS_A_FRAME, USELESS_PER_S, Link
from verifier_service.drafter_pool import DrafterPool
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
