"""A hundred thousand frames that no honest peer sends. They may cost the peer's own slots their trees, and nobody anything else.

The texts are the oracle: greedy ones, and seeded ones under coupled noise, are functions of the target alone, whatever a drafter sends.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import tracemalloc
from contextlib import AsyncExitStack

import pytest
from support.mischief import Mischief, SpoiledVerifier, spoiled_drafter
from support.services import collect, drafter_of, request, tabular_pair, until, verifier_of

import verifier_service.breaker
import verifier_service.link
from drafter_service.servicer import DrafterServicer
from rootward.core.requests import Law, Rule, SpeculationMode
from rootward.engine.tabular import TabularModel
from rootward.rpc.channel import DRAFTING
from rootward.rpc.clients import RemoteDrafter
from rootward.rpc.server import RpcServer

WISHES = (
    {"temperature": 0.0},
    {"rule": Rule.MATCH, "law": Law.COUPLED, "seed": 5},
    {"temperature": 1.0},  # sampled: its text has no oracle here, its rows are the richest frames
)
GROWTH_BYTES = 3 << 20  # of a verifier's or drafter's memory while it is sent nonsense
SESSIONS = 6


@pytest.fixture(autouse=True)
def no_quarantine(monkeypatch) -> None:
    """Or the mischief would be over after three frames."""
    for limit in ("MAX_OFFENCES", "MAX_MISSES"):
        monkeypatch.setattr(verifier_service.breaker, limit, 1 << 60)
    for pause in ("FIRST_RETRY_S", "LONGEST_RETRY_S"):
        monkeypatch.setattr(verifier_service.link, pause, 0.01)


class Memory:
    """What was allocated since a moment, with the modules that did it."""

    def __init__(self) -> None:
        tracemalloc.start(6)
        self._start = self._now()

    @staticmethod
    def _now() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    def growth(self) -> int:
        return self._now() - self._start

    def stop(self) -> None:
        tracemalloc.stop()


async def texts_without_drafters() -> list[list[int]]:
    target, _ = tabular_pair()
    async with verifier_of(target, {}) as alone:
        mode = SpeculationMode.DISABLED
        return [(await collect(alone, request(f"o{i}", **wish, mode=mode)))[0] for i, wish in enumerate(WISHES[:2])]


async def served(verifier, wanted: list[list[int]], names: itertools.count, *, over) -> int:
    """Sessions one after another in several tasks until `over`; every text that has an oracle is right. Rounds with trees."""

    async def one_after_another() -> int:
        rounds = 0
        while not over():
            number = next(names)
            kind = number % len(WISHES)
            await until(lambda: verifier.pool.up)  # a stream that was broken is dialled again
            text, last = await collect(verifier, request(f"r{number}", **WISHES[kind], mode=SpeculationMode.REQUIRED))
            assert kind >= len(wanted) or text == wanted[kind]
            rounds += last.finish.stats.num_spec_steps
        return rounds

    return sum(await asyncio.gather(*(one_after_another() for _ in range(SESSIONS))))


async def a_drafter_out_of_its_mind(num_frames: int, seed: int) -> None:
    wanted = await texts_without_drafters()
    target, draft = tabular_pair(slots=SESSIONS)
    mischief = Mischief(seed, most=num_frames)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        honest = await enter(drafter_of(TabularModel.perturbed(target, 0.8, 2), incarnation=1, capacity=SESSIONS // 2))
        mad = await enter(drafter_of(draft, incarnation=2, capacity=SESSIONS))
        address = await enter(spoiled_drafter(mad, mischief))
        drafters = {"honest": honest, "mad": await enter(RemoteDrafter(address))}
        verifier = await enter(verifier_of(target, drafters, draft_wait_s=0.02))
        witness = next(link for link in verifier.pool.links if link.name == "honest")
        orphans: list[str] = []
        orphan = witness.orphan

        def noted(slot: int, reason: str):
            orphans.append(reason)
            return orphan(slot, reason)

        witness.orphan = noted  # type: ignore[method-assign]
        await until(lambda: len(verifier.pool.up) == 2)
        names = itertools.count()
        await served(verifier, wanted, names, over=lambda: mischief.num_sent > num_frames // 3)
        memory = Memory()
        rounds = await served(verifier, wanted, names, over=lambda: mischief.over)
        growth = memory.growth()
        memory.stop()
        assert mischief.num_sent >= num_frames
        assert rounds > 0
        assert orphans == []  # the neighbour's sessions noticed nothing
        assert growth < GROWTH_BYTES
        assert all(len(link.outbox) == len(link.drafts) == 0 for link in verifier.pool.links)
        await until(lambda: verifier.model.num_free_slots == verifier.max_sessions)
        verifier.model.check_idle()


async def a_verifier_out_of_its_mind(num_frames: int, seed: int) -> None:
    wanted = await texts_without_drafters()
    target, draft = tabular_pair(slots=3 * SESSIONS)
    mischief = Mischief(seed, most=num_frames)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        drafter = await enter(drafter_of(draft, capacity=3 * SESSIONS))
        server = await enter(RpcServer("127.0.0.1:0", transport=DRAFTING, grace_s=0.1))
        DrafterServicer(drafter, drafter.describe).register(server)
        await server.start()
        honest = await enter(verifier_of(target, {"d": await enter(RemoteDrafter(server.address))}))
        mad = await enter(
            verifier_of(
                tabular_pair(slots=SESSIONS)[0], {"d": SpoiledVerifier(server.address, mischief)}, draft_wait_s=0.01
            )
        )
        await until(lambda: honest.pool.up and mad.pool.up)
        nonsense = asyncio.create_task(served(mad, wanted, itertools.count(), over=lambda: mischief.over))
        await until(lambda: mischief.num_sent > num_frames // 3, 600)
        memory = Memory()
        rounds = await served(honest, wanted, itertools.count(), over=lambda: mischief.over)
        await nonsense
        growth = memory.growth()
        memory.stop()
        assert rounds > 0
        assert growth < GROWTH_BYTES
        assert len(drafter.grower.trees) <= drafter.capacity
        await mad.pool.__aexit__()
        await until(lambda: not drafter.grower.trees)
        drafter.model.check_idle()


async def test_a_drafter_out_of_its_mind_harms_its_own_slots_only() -> None:
    await a_drafter_out_of_its_mind(3000, seed=1)


async def test_a_verifier_out_of_its_mind_harms_its_own_trees_only() -> None:
    await a_verifier_out_of_its_mind(400, seed=2)


@pytest.mark.long
@pytest.mark.parametrize("seed", [11, 12])
async def test_a_drafter_out_of_its_mind_for_long(seed: int) -> None:
    await a_drafter_out_of_its_mind(100_000, seed)


@pytest.mark.long
async def test_a_verifier_out_of_its_mind_for_long() -> None:
    await a_verifier_out_of_its_mind(20_000, seed=13)
