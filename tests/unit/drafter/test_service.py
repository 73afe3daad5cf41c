"""What is wrong with one message costs its slot; what is wrong with a level costs the trees, and nobody waits for an answer in vain."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import numpy as np
import pytest
from support.codec import from_pb, to_pb
from support.heads import TabularHead
from support.services import drafter_of, until
from unit.drafter.test_grower import Counting, hash_of, opening

import drafter_service.growth_loop as module
from drafter_service.growth_loop import DrafterService
from rootward.core.frames import MAX_FEATURES, Commit, Features, FromDrafter, Hello, Load, OpenFeatures, ToDrafter
from rootward.engine.tabular import TabularModel


class Peer:
    """A verifier's end of a stream: what it says, and what it was told of each slot."""

    def __init__(self, drafter: DrafterService) -> None:
        self._drafter, self._said = drafter, asyncio.Queue[ToDrafter]()
        self.told: dict[int, list[str]] = {}
        self.load: Load | None = None
        head = "" if drafter.head is None else drafter.head.fingerprint
        self.say(ToDrafter(hello=Hello("v", 1, "", 5, 64, head=head)))

    def say(self, frame: ToDrafter) -> None:
        self._said.put_nowait(frame)

    async def __aenter__(self) -> Peer:
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _inbound(self) -> AsyncIterator[ToDrafter]:
        while True:
            yield await self._said.get()

    async def _listen(self) -> None:
        async with aclosing(self._drafter.session(self._inbound())) as frames:
            async for frame in frames:
                self._note(frame)

    def _note(self, frame: FromDrafter) -> None:
        self.load = frame.load or self.load
        for grow in frame.grows:
            self.told.setdefault(grow.slot, []).append("at rest" if grow.at_rest else "grow")
        for need in frame.need_syncs:
            self.told.setdefault(need.slot, []).append("need sync")
        for reject in frame.rejects:
            self.told.setdefault(reject.slot, []).append(reject.reason)

    async def heard(self, slot: int, what: str) -> None:
        await until(lambda: what in self.told.get(slot, ()))


class Faulty:
    """Stands in for a method: raises for one slot, or the first so many times."""

    def __init__(self, real, slot: int = 0, times: int = 0) -> None:
        self.real, self.slot, self.left, self.calls = real, slot, times, Counter[int]()

    def __call__(self, *args):
        message = args[-1] if args else None
        if message is not None and message.slot == self.slot:
            raise RuntimeError("a bug")
        if self.left:
            self.left -= 1
            raise RuntimeError("a bug")
        return self.real(*args)


def advance(slot: int, token: int = 1) -> Commit:
    return Commit(slot, 3, (token,), hash_of((1, 2, 3, token)))


@pytest.fixture
async def drafter():
    async with drafter_of(Counting(5, seed=3, max_slots=8), capacity=8) as running:
        yield running


@pytest.mark.parametrize("call", ["open", "commit"])
async def test_a_message_that_breaks_something_costs_its_slot_and_nothing_else(drafter, monkeypatch, call) -> None:
    async with Peer(drafter) as one, Peer(drafter) as other:
        other.say(ToDrafter(opens=(opening(9),)))
        one.say(ToDrafter(opens=(opening(1),)))
        await other.heard(9, "at rest")
        await one.heard(1, "at rest")
        monkeypatch.setattr(drafter.grower, call, Faulty(getattr(drafter.grower, call), slot=2))
        one.say(ToDrafter(opens=(opening(2), opening(3)), commits=(advance(1),)))
        if call == "commit":
            await one.heard(2, "at rest")
            one.told.clear()
            one.say(ToDrafter(commits=(advance(2), advance(3))))
        await one.heard(2, "internal error")
        await one.heard(3, "at rest")
        other.say(ToDrafter(commits=(advance(9),)))
        await until(lambda: other.told[9].count("at rest") == 2)
        assert {slot for _, slot in drafter.grower.trees} == {1, 3, 9}
        assert other.told.keys() == {9}


async def test_a_level_that_fails_costs_the_trees_and_all_mail_of_its_turn_is_answered(drafter, monkeypatch) -> None:
    async with Peer(drafter) as peer:
        peer.say(ToDrafter(opens=(opening(1),)))
        await peer.heard(1, "at rest")
        monkeypatch.setattr(drafter.grower, "level", Faulty(drafter.grower.level, times=1))
        peer.say(ToDrafter(opens=(opening(2),), commits=(advance(1), advance(7))))
        await peer.heard(1, "internal error")
        await peer.heard(2, "internal error")
        await peer.heard(7, "need sync")
        assert not drafter.grower.trees
        peer.say(ToDrafter(opens=(opening(3),)))
        await peer.heard(3, "at rest")
        drafter.grower.model.check_idle()


async def test_a_model_that_never_recovers_ends_the_drafter(drafter, monkeypatch) -> None:
    """Mail between two failures, with nothing to grow, is no recovery."""
    async with Peer(drafter) as peer:
        level = drafter.grower.level
        monkeypatch.setattr(drafter.grower, "level", lambda: level() if not drafter.grower.trees else 1 / 0)
        for slot in range(1, module.MAX_FAILURES):
            peer.say(ToDrafter(opens=(opening(slot),)))
            await peer.heard(slot, "internal error")
            peer.say(ToDrafter(commits=(advance(100 + slot),)))
            await peer.heard(100 + slot, "need sync")
        assert drafter.alive
        peer.say(ToDrafter(opens=(opening(99),)))
        await until(lambda: drafter.ended.done())
        assert isinstance(drafter.ended.exception(), ZeroDivisionError)


async def test_a_report_of_load_tells_each_verifier_its_own_sessions(drafter) -> None:
    async with Peer(drafter) as one, Peer(drafter) as other:
        one.say(ToDrafter(opens=(opening(1), opening(2))))
        other.say(ToDrafter(opens=(opening(9),)))
        await one.heard(2, "at rest")
        await other.heard(9, "at rest")
        drafter._report_load()
        await until(lambda: one.load is not None and one.load.sessions == 3)
        await until(lambda: other.load is not None and other.load.sessions == 3)
        assert (one.load.own_sessions, other.load.own_sessions) == (2, 1)
        assert drafter.describe().load.own_sessions is None


async def test_more_atoms_than_the_drafter_offers_are_refused(drafter) -> None:
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(Peer(drafter))
        peer.say(ToDrafter(opens=(replace(opening(1), num_atoms=1 << 31), opening(2))))
        await peer.heard(2, "at rest")
        (reason,) = peer.told[1]
        assert "num_atoms" in reason
        assert str(drafter.max_atoms) in reason


async def test_an_open_that_cannot_be_read_costs_its_slot_and_nothing_else(drafter) -> None:
    async with Peer(drafter) as peer:
        peer.say(ToDrafter(opens=(opening(1),)))
        await peer.heard(1, "at rest")
        message = to_pb(ToDrafter(opens=(opening(2), opening(3)), commits=(advance(1),)))
        message.opens[0].law = 99
        peer.say(from_pb(message))
        await peer.heard(3, "at rest")
        await until(lambda: peer.told[1].count("at rest") == 2)
        (reason,) = peer.told[2]
        assert "open.law: 99" in reason
        message = to_pb(ToDrafter(opens=(opening(4),)))
        message.opens[0].prefix = b"odd"
        peer.say(from_pb(message))  # alone in its frame
        await until(lambda: 4 in peer.told)
        assert {slot for _, slot in drafter.grower.trees} == {1, 3}


def features(slot: int, *, size: int = 2, first: int = 0, num_rows: int = 3) -> OpenFeatures:
    return OpenFeatures(slot, first, Features(np.ones((num_rows, size), np.float32)))


async def test_features_that_no_head_here_reads_cost_their_slot_and_nothing_else(drafter) -> None:
    head = TabularHead(TabularModel(5, seed=3))
    async with drafter_of(head, capacity=8) as with_head, Peer(with_head) as peer, Peer(drafter) as other:
        opens = tuple(opening(slot, num_features=3) for slot in (1, 2, 3))
        peer.say(ToDrafter(opens=opens, features=(features(1), features(2, size=9), features(3, num_rows=2))))
        await peer.heard(1, "at rest")
        await until(lambda: 2 in peer.told)
        assert "rows of 9 numbers; this drafter takes 2" in peer.told[2][0]
        assert 3 not in peer.told  # still waits for its last feature
        wrong = Features(np.ones((1, 9), np.float32))
        peer.say(ToDrafter(commits=(replace(advance(1), features=wrong), advance(3)), features=(features(77),)))
        await peer.heard(3, "at rest")  # what has not come is not waited for after a commit
        assert "rows of 9 numbers" in peer.told[1][-1]
        peer.say(ToDrafter(opens=(opening(4, num_features=4), opening(5, num_features=MAX_FEATURES + 1))))
        await until(lambda: {4, 5} <= peer.told.keys())
        assert all("num_features" in peer.told[slot][0] for slot in (4, 5))
        assert {slot for _, slot in with_head.grower.trees} == {3}

        other.say(ToDrafter(opens=(opening(1), opening(2)), features=(features(1),)))
        await other.heard(2, "at rest")
        await until(lambda: any("this drafter takes none" in told for told in other.told[1]))


async def test_features_of_a_position_behind_the_text_take_no_memory() -> None:
    """A position is 32 bits: the zeros before the largest one would take gigabytes."""
    async with drafter_of(TabularHead(TabularModel(5, seed=3)), capacity=8) as drafter, Peer(drafter) as peer:
        peer.say(ToDrafter(opens=(opening(1, num_features=3),)))
        tracemalloc.start()
        try:
            peer.say(ToDrafter(features=(features(1, first=1 << 24),)))
            await peer.heard(1, "at rest")
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


async def test_an_open_that_is_refused_for_good_costs_no_other_verifier_a_tree() -> None:
    async with (
        drafter_of(Counting(5, seed=3, max_slots=8), capacity=2) as drafter,
        Peer(drafter) as one,
        Peer(drafter) as other,
    ):
        one.say(ToDrafter(opens=(opening(1), opening(2))))
        await one.heard(2, "at rest")
        other.say(ToDrafter(opens=(opening(1, prefix=[1] * drafter.grower.info.max_positions),)))
        await until(lambda: 1 in other.told)
        assert "does not fit the draft context" in other.told[1][0]
        assert "fair share" not in one.told[2]
        assert len(drafter.grower.trees) == 2


async def test_unreadable_features_close_the_tree_that_they_were_for() -> None:
    async with drafter_of(TabularHead(TabularModel(5, seed=3)), capacity=8) as drafter, Peer(drafter) as peer:
        peer.say(ToDrafter(opens=(opening(1), opening(2))))
        await peer.heard(1, "at rest")
        await peer.heard(2, "at rest")
        message = to_pb(ToDrafter(commits=(advance(1), advance(2))))
        message.commits[0].features.num_rows = 5
        peer.say(from_pb(message))
        await until(lambda: peer.told[2].count("at rest") == 2)
        assert "features.values: 0 bytes for 5 rows" in peer.told[1][-1]
        assert {slot for _, slot in drafter.grower.trees} == {2}
