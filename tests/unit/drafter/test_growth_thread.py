"""Where growth runs: on a thread that needs nothing of the event loop, or in the loop if levels are short. Answers come in the order in
which they were made, wherever that was."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

import drafter_service.turns as turns
from drafter_service.service import DrafterService, Key
from drafter_service.turns import LevelCost
from rootward.core.frames import Close, Commit, Grow, Hello, NeedSync, Open, Reject, ToDrafter
from rootward.core.requests import DraftMode, Sampling
from rootward.demand import DrafterDemand
from rootward.ports import ModelInfo

LEVELS = 5
NONE = np.empty(0, np.int64)


class Counting:
    """Grows nothing, level by level; each frame says which level it is."""

    def __init__(self, work: Callable[[int], None] = lambda level: None) -> None:
        self.info = ModelInfo("counting", 10, 100, ())
        self.incarnation, self.demand = 1, DrafterDemand(1)
        self.trees: dict[Key, int] = {}
        self.left = self.levels = self.unread = 0
        self.rest = threading.Event()
        self.threads: list[int] = []  # that each level ran on
        self.commits: list[int] = []  # levels before each commit
        self._work = work

    @property
    def idle(self) -> bool:
        return not self.left

    def open(self, key: Key, message: Open) -> Reject | None:
        self.trees[key], self.left, self.unread = message.slot, message.node_cap, len(message.prefix)
        self.rest.clear()
        return None

    def commit(self, key: Key, message: Commit) -> list[Grow | NeedSync]:
        self.commits.append(self.levels)
        return []

    def close(self, key: Key) -> None:
        self.trees.pop(key, None)

    def level(self) -> list[tuple[Key, Grow]]:
        if not self.left:
            return []
        self.left -= 1
        self.levels += 1
        self.unread = 0
        self.threads.append(threading.get_ident())
        self._work(self.levels)
        if not self.left:
            self.rest.set()
        # Neighbouring frames of one base would be joined while they wait: a base of its own each.
        return [(key, Grow(slot, self.levels, 0, 1, NONE, NONE, NONE.astype(bool))) for key, slot in self.trees.items()]


class Verifier:
    """The other end of a stream."""

    def __init__(self, service: DrafterService) -> None:
        self._said = asyncio.Queue[ToDrafter]()
        self._stream = service.session(self._frames())
        self.grown: list[int] = []

    async def _frames(self) -> AsyncIterator[ToDrafter]:
        while True:
            yield await self._said.get()

    def say(self, frame: ToDrafter) -> None:
        self._said.put_nowait(frame)

    def grow(self, slot: int, levels: int, unread: int = 1) -> None:
        prefix = (1,) * unread
        self.say(ToDrafter(opens=(Open(slot, "r", 1, prefix, Sampling(), DraftMode.SAMPLED, 1, 0, 4, levels, 4, 2),)))

    async def hear(self, levels: int) -> None:
        """Until so many levels were heard of, in all."""
        while len(self.grown) < levels:
            self.grown += [grow.base_len for grow in (await anext(self._stream)).grows]

    async def close(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def growing(engine: Counting) -> AsyncIterator[Verifier]:
    async with asyncio.timeout(60), DrafterService(engine, engine, worker="d", capacity=4) as service:
        verifier = Verifier(service)
        verifier.say(ToDrafter(hello=Hello("v", 1, "", 10, 100)))
        yield verifier
        await verifier.close()
    assert service.ended is not None
    async with asyncio.timeout(30):
        await service.ended


def long(_level: int) -> None:
    time.sleep(2 * turns.SHORT_S)


async def test_long_levels_need_nothing_of_the_event_loop_until_growth_rests() -> None:
    engine = Counting(long)
    async with growing(engine) as verifier:
        verifier.grow(1, LEVELS)
        hearing = asyncio.ensure_future(verifier.hear(LEVELS))
        while not engine.trees:
            await asyncio.sleep(0)
        assert engine.rest.wait(30)  # the loop stands still here
        assert engine.levels == LEVELS
        await hearing
        assert verifier.grown == list(range(1, LEVELS + 1))
        verifier.say(ToDrafter(closes=(Close(1),)))
        while engine.trees:
            await asyncio.sleep(0)
    assert threading.get_ident() not in engine.threads


async def test_short_levels_run_in_the_loop_which_has_its_turns_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SHORT_S", 60.0)  # whatever the machine does meanwhile
    monkeypatch.setattr(turns, "LONGEST_S", 60.0)
    ticks: list[int] = []
    count = 0

    async def tick() -> None:
        nonlocal count
        while True:
            count += 1
            await asyncio.sleep(0)

    engine = Counting(lambda level: ticks.append(count))
    ticking = asyncio.create_task(tick())
    async with growing(engine) as verifier:
        verifier.grow(1, LEVELS)
        await verifier.hear(LEVELS)
        assert engine.threads[0] != threading.get_ident()  # nothing was known of it
        here = engine.threads[1:]
        assert set(here) == {threading.get_ident()}
        between = np.diff(ticks[1:])
        assert between.min() >= turns.LOOP_TURNS
        verifier.grow(2, LEVELS, unread=turns.FEW_UNREAD + 1)
        await verifier.hear(LEVELS + 2 * LEVELS)
        assert engine.threads[LEVELS] == engine.threads[0]  # a text to read
        assert set(engine.threads[LEVELS + 1 :]) == {threading.get_ident()}
    ticking.cancel()
    assert verifier.grown[:LEVELS] == list(range(1, LEVELS + 1))
    assert verifier.grown[LEVELS:] == sorted(verifier.grown[LEVELS:])


async def test_what_is_said_during_short_levels_is_heard_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SHORT_S", 60.0)
    monkeypatch.setattr(turns, "LONGEST_S", 60.0)
    levels = 40

    def work(level: int) -> None:
        if level == levels // 2:
            verifier.say(ToDrafter(commits=(Commit(1, 1, (1,), 0),)))

    engine = Counting(work)
    async with growing(engine) as verifier:
        verifier.grow(1, levels)
        await verifier.hear(levels)
    assert engine.commits == [levels // 2]


async def test_levels_that_turn_out_long_go_back_to_the_thread_and_no_answer_is_overtaken() -> None:
    engine = Counting(lambda level: long(level) if 20 < level <= 60 else None)
    async with growing(engine) as verifier:
        verifier.grow(1, 100)
        await verifier.hear(100)
    assert verifier.grown == list(range(1, 101))
    assert threading.get_ident() not in engine.threads[50:60]


def test_a_level_is_known_to_be_short_by_the_last_ones() -> None:
    table = ModelInfo("table", 10, 100)
    cost, of_weights = LevelCost(table), LevelCost(replace(table, num_parameters=1))
    of_weights.took(0.0)
    assert not of_weights.short(1, 0)

    def took(seconds: float, times: int = 1) -> None:
        for _ in range(times):
            cost.took(seconds)

    assert not cost.short(1, 0)
    took(0.5 * turns.SHORT_S)
    assert cost.short(1, 0)
    assert cost.short(0, 0)
    assert not cost.short(1, turns.FEW_UNREAD + 1)
    took(1.5 * turns.SHORT_S, 20)
    assert not cost.short(1, 0)
    assert cost.short(8, 0)
    took(1.5 * turns.LONGEST_S, 20)
    assert not cost.short(100, 0)
    took(0.5 * turns.SHORT_S, 60)
    assert cost.short(1, 0)
