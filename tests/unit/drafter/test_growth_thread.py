"""Growth runs on a thread that needs nothing of the event loop. Answers come in the order in which they were made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from drafter_service.growth_loop import DrafterService
from drafter_service.metrics import Key
from rootward.core.frames import Close, Commit, Grow, Hello, NeedSync, Open, Reject, ToDrafter
from rootward.core.requests import DraftMode, Sampling
from rootward.demand import DrafterDemand
from rootward.ports import ModelInfo

LEVELS = 5
NONE = np.empty(0, np.int64)


class Counting:
    """Grows nothing, level by level; each frame says which level it is."""

    def __init__(self, work: Callable[[int], None] = lambda level: None) -> None:
        self.modes = tuple(DraftMode)
        self.info = ModelInfo("counting", 10, 100, ())
        self.incarnation, self.demand = 1, DrafterDemand(1)
        self.trees: dict[Key, int] = {}
        self.left = self.levels = 0
        self.rest = threading.Event()
        self.threads: list[int] = []  # that each level ran on
        self.commits: list[int] = []  # levels before each commit
        self._work = work

    @property
    def idle(self) -> bool:
        return not self.left

    def fault(self, key: Key, message: Open) -> str:
        return ""

    def open(self, key: Key, message: Open) -> Reject | None:
        self.trees[key], self.left = message.slot, message.node_cap
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
        self.say(ToDrafter(opens=(Open(slot, 1, prefix, Sampling(), DraftMode.SAMPLED, 1, 0, 4, levels, 4, 2),)))

    async def hear(self, levels: int) -> None:
        """Until so many levels were heard of, in all."""
        while len(self.grown) < levels:
            self.grown += [grow.base_len for grow in (await anext(self._stream)).grows]

    async def close(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def growing(engine: Counting) -> AsyncIterator[Verifier]:
    async with asyncio.timeout(60), DrafterService(engine, capacity=4) as service:
        verifier = Verifier(service)
        verifier.say(ToDrafter(hello=Hello("v", 1, "", 10, 100)))
        yield verifier
        await verifier.close()
    assert service.ended is not None
    async with asyncio.timeout(30):
        await service.ended


async def test_levels_need_nothing_of_the_event_loop_until_growth_rests() -> None:
    engine = Counting()
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


async def test_no_answer_is_overtaken() -> None:
    engine = Counting()
    async with growing(engine) as verifier:
        verifier.grow(1, 100)
        await verifier.hear(100)
    assert verifier.grown == list(range(1, 101))
