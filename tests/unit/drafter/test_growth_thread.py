"""The drafter's service: growth goes on by itself, and its answers come in the order in which they were made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np

from drafter_service.service import DrafterService, Key
from rootward.core.frames import Close, Commit, Grow, Hello, NeedSync, Open, Reject, ToDrafter
from rootward.core.requests import Law, Sampling
from rootward.demand import DrafterDemand
from rootward.ports import ModelInfo

LEVELS = 5
NONE = np.empty(0, np.int64)


class Counting:
    """Grows nothing, level by level; each frame says which level it is."""

    def __init__(self) -> None:
        self.info = ModelInfo("counting", 10, 100, ())
        self.incarnation, self.demand = 1, DrafterDemand(1)
        self.trees: dict[Key, int] = {}
        self.left = self.levels = 0
        self.rest = threading.Event()

    @property
    def idle(self) -> bool:
        return not self.left

    def open(self, key: Key, message: Open) -> Reject | None:
        self.trees[key], self.left = message.slot, LEVELS
        return None

    def commit(self, key: Key, message: Commit) -> list[Grow | NeedSync]:
        return []

    def close(self, key: Key) -> None:
        self.trees.pop(key, None)

    def level(self) -> list[tuple[Key, Grow]]:
        if not self.left:
            return []
        self.left -= 1
        self.levels += 1
        if not self.left:
            self.rest.set()
        # Neighbouring frames of one base would be joined while they wait: a base of its own each.
        return [(key, Grow(slot, self.levels, 0, 1, NONE, NONE, NONE.astype(bool))) for key, slot in self.trees.items()]


async def test_growth_needs_nothing_of_the_event_loop_until_it_rests() -> None:
    engine, inbound = Counting(), asyncio.Queue[ToDrafter]()

    async def frames() -> AsyncIterator[ToDrafter]:
        while True:
            yield await inbound.get()

    async with asyncio.timeout(60), DrafterService(engine, engine, worker="d", capacity=4) as service:
        stream = service.session(frames())
        inbound.put_nowait(ToDrafter(hello=Hello("v", 1, "", 10, 100)))
        assert (await anext(stream)).ack is not None
        answers = asyncio.ensure_future(anext(stream))
        inbound.put_nowait(ToDrafter(opens=(Open(1, "r", 1, (1,), Sampling(), Law.SAMPLED, 1, 0, 4, 8, 4, 2),)))
        while not engine.trees:
            await asyncio.sleep(0)
        assert engine.rest.wait(30)  # the loop stands still here
        assert engine.levels == LEVELS
        grown = [grow.base_len for grow in (await answers).grows]
        while len(grown) < LEVELS:
            grown += [grow.base_len for grow in (await anext(stream)).grows]
        assert grown == list(range(1, LEVELS + 1))
        inbound.put_nowait(ToDrafter(closes=(Close(1),)))
        while engine.trees:
            await asyncio.sleep(0)
        await stream.aclose()
    assert service.ended is not None
    async with asyncio.timeout(30):
        await service.ended
