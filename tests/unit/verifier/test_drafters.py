"""Links: queues that hold one entry per slot, keys that give nothing away, placement by room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import reduce

from rootward.core.frames import Hello, HelloAck, extend_hash
from rootward.core.requests import Law, Rule, Speculation, Stopping, VerifierRequest
from rootward.core.rng import Key, Role
from verifier_service.drafters import DrafterPool
from verifier_service.link import Link, Shape
from verifier_service.sessions import Draft, Session

SHAPE = Shape(atoms=8, node_cap=8, max_depth=4, topk=2)


def session(number: int = 1, law: Law = Law.SAMPLED, **wish) -> Session:
    wanted = VerifierRequest(f"r{number}", (1, 2), stopping=Stopping(50), speculation=Speculation(**wish), seed=77)
    return Session(number, wanted, Rule.TRAVERSAL, law, frozenset())


def hello() -> Hello:
    return Hello("v", 1, "", 5, 64)


def up(link: Link, capacity: int = 4) -> Link:
    link.ack = HelloAck("d", 2, "", 5, 64, tuple(Law), capacity, 16)
    return link


def extended(tokens: Iterable[int]) -> int:
    return reduce(extend_hash, tokens, 0)


def link(name: str = "d") -> Link:
    return Link(name, None, hello, lambda: None)  # type: ignore[arg-type]  # never dialled


def opened(link: Link, one: Session) -> Draft:
    one.draft = link.open(one, SHAPE)
    return one.draft


async def test_commits_of_a_slot_merge_into_one() -> None:
    """I5: however slow the link, it holds at most one commit per slot, and that one covers all of them."""
    one, busy = session(), up(link())
    opened(busy, one)
    busy.flush()
    await busy.outbox.take()
    for token in (3, 4, 0):  # three steps in which the link could not write
        busy.commit(one.draft, (token,))
        busy.flush()
    assert len(busy.outbox) == 1
    frame = await busy.outbox.take()
    assert len(frame.commits) == 1
    assert (frame.commits[0].base_len, frame.commits[0].tokens) == (2, (3, 4, 0))
    assert frame.commits[0].runs == (1, 1, 1)
    assert frame.commits[0].hash_after == one.draft.tree.hash


async def test_a_tree_that_was_not_sent_yet_begins_where_the_truth_is_by_then() -> None:
    one, busy = session(), up(link())
    opened(busy, one)
    busy.flush()
    busy.commit(one.draft, (3, 4))
    busy.flush()
    frame = await busy.outbox.take()
    assert [o.prefix for o in frame.opens] == [(1, 2, 3, 4)]
    assert frame.commits == ()
    assert extended(frame.opens[0].prefix) == one.draft.tree.hash


def test_a_slot_closed_before_it_was_sent_leaves_no_trace() -> None:
    one, busy = session(), up(link())
    opened(busy, one)
    busy.close(one.draft, "ended")
    busy.flush()
    assert len(busy.outbox) == 0
    assert one.draft.link is None


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
    for law in (Law.COUPLED, Law.SAMPLED, Law.GREEDY):
        busy, one = up(link()), session(law=law)
        opened(busy, one)
        assert next(iter(busy.outbox._opens.values())).seed == (77 if law is Law.COUPLED else one.key.derive(Role.DRAW))


def test_ratio_tests_of_two_requests_never_share_coins() -> None:
    """What the rounds of one teach (how many nodes pay) shapes the rounds of the other."""
    ratio, match = [session(1), session(2)], [session(1), session(2)]
    for one in match:
        one.rule = Rule.MATCH
    assert ratio[0].key != ratio[1].key
    assert match[0].key == match[1].key == Key(77)


def test_placement_takes_the_emptiest_drafter_and_respects_wishes() -> None:
    pool = DrafterPool({}, hello, lambda: None, shape=SHAPE)
    pool.links = [up(link("small"), 1), up(link("large"), 3), link("down")]
    names = []
    for number in range(6):
        one = session(number, num_draft_tokens=2, max_depth=1, topk=1)
        pool.place(one)
        names.append(one.drafter_name)
    assert sorted(names) == ["", "", "large", "large", "large", "small"]
    opened = next(iter(pool.links[1].outbox._opens.values()))
    assert (opened.node_cap, opened.max_depth, opened.topk) == (2, 1, 1)


def test_a_drafter_that_keeps_offending_is_left_alone() -> None:
    busy = up(link())
    for number in range(3):
        one = session(number)
        opened(busy, one)
        busy._offend(one.draft.slot, "nonsense")
    assert busy.room == 0


def test_a_drafter_that_is_silent_is_left_alone_and_then_tried_again() -> None:
    busy, one = up(link()), session()
    opened(busy, one)
    for _ in range(20):
        busy.judge(missed=True)
    assert busy.room > 0  # slower than patience, but alive
    busy.judge(missed=False)
    busy.asked_s = time.monotonic() - 60
    for _ in range(4):
        busy.judge(missed=True)
    busy.judge(missed=False)
    for _ in range(5):
        assert busy.room > 0
        busy.judge(missed=True)
    assert busy.room == 0
    assert one.draft.link is None
    busy.breaker.until_s = 0.0
    assert busy.room == 1  # one session, to see


def test_a_lost_link_leaves_its_sessions_to_others() -> None:
    async def run() -> None:
        one, busy = session(), up(link())
        opened(busy, one)
        tree = one.draft.tree
        busy._lost()
        assert one.draft.link is None  # what has arrived is verified once more
        assert one.draft.tree is tree
        assert one.draft.at_rest
        assert busy.room == 0

    asyncio.run(run())
