"""A hundred thousand malformed frames of one peer. They may break trees of this peer's own slots, and have no other effect.

Texts are compared with those without a drafter: greedy ones, and seeded ones under coupled noise, are functions of the target alone.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import resource
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from support.malformed_frames import CorruptingVerifier, FrameCorruptor, corrupting_drafter
from support.services import collect, drafter_of, request, tabular_pair, until, verifier_of
from support.tabular import perturbed

import verifier_service.circuit_breaker
import verifier_service.drafter_link
from drafter_service.growth_loop import DrafterService
from drafter_service.servicer import DrafterServicer
from drafter_service.stream import MAX_UNAPPLIED, MAX_UNSENT
from rootward.core.requests import DraftMode, Rule, SpeculationMode
from rootward.engine.grower import MAX_NODES
from rootward.wire.channel import DRAFTING
from rootward.wire.clients import RemoteDrafter
from rootward.wire.server import RpcServer
from verifier_service.drafter_link import Link
from verifier_service.service import VerifierService

WISHES = (
    {"temperature": 0.0},
    {"rule": Rule.MATCH, "law": DraftMode.COUPLED, "seed": 5},
    {"temperature": 1.0},  # sampled: its text is not compared; its frames have the most fields
)
GROWTH_BYTES = 3 << 20  # of a verifier's or drafter's memory while it is sent malformed frames
GROWTH_RATIO = 1.1  # the same, of the whole process as the system sees it
SESSIONS = 6
TOKENS = 40  # of each
NODES = 8  # of a tree


@pytest.fixture(autouse=True)
def no_quarantine(monkeypatch) -> None:
    """Or the corruptor would be over after three frames."""
    for limit in ("MAX_OFFENCES", "MAX_MISSES"):
        monkeypatch.setattr(verifier_service.circuit_breaker, limit, 1 << 60)
    monkeypatch.setattr(verifier_service.drafter_link, "MAX_MISSES", 1 << 60)
    for pause in ("FIRST_RETRY_S", "MAX_RETRY_S"):
        monkeypatch.setattr(verifier_service.drafter_link, pause, 0.01)


class Memory:
    """Memory that was allocated since the start of the measurement."""

    def __init__(self) -> None:
        tracemalloc.start(6)
        self._start, self._resident = self._now(), resident_bytes()

    @staticmethod
    def _now() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    def stop(self) -> None:
        """Asserts that it has not grown."""
        growth = self._now() - self._start
        tracemalloc.stop()
        assert growth < GROWTH_BYTES
        assert resident_bytes() < GROWTH_RATIO * self._resident


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Most:
    """The largest value of each size, read after every frame."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def note(self, **sizes: int) -> None:
        self.seen |= Counter(sizes)

    def watch_verifier(self, verifier: VerifierService) -> None:
        for link in verifier.pool.links:
            link._receive = self._after(link._receive, lambda link=link: self._of_link(link))  # type: ignore[method-assign]

    def _of_link(self, link: Link) -> None:
        trees = [draft.tree for draft in link.drafts.values()]
        self.note(
            drafts=len(trees),
            send_buffer=len(link.send_buffer),
            nodes=max((len(tree.nodes) for tree in trees), default=0),
            remembered=max((len(tree._spine) for tree in trees), default=0),
        )

    def watch_drafter(self, drafter: DrafterService) -> None:
        drafter._step = self._after(drafter._step, lambda: self._of_drafter(drafter))  # type: ignore[method-assign]

    def _of_drafter(self, drafter: DrafterService) -> None:
        streams = list(drafter._streams.values())
        self.note(
            trees=len(drafter.grower.trees),
            waited=len(drafter._queued_s),
            mailbox=drafter._mailbox.qsize(),
            unsent=max((len(s.grows) + len(s.need_syncs) + len(s.rejects) for s in streams), default=0),
            nodes=max((len(g.tree.nodes) for g in drafter.grower.trees.values()), default=0),
        )

    @staticmethod
    def _after(act: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
        def acted(*args: Any) -> Any:
            result = act(*args)
            note()
            return result

        return acted


async def texts_without_drafters() -> list[list[int]]:
    target, _ = tabular_pair()
    async with verifier_of(target, {}) as alone:
        mode = SpeculationMode.DISABLED
        return [
            (await collect(alone, request(f"o{i}", **wish, mode=mode, max_tokens=TOKENS)))[0]
            for i, wish in enumerate(WISHES[:2])
        ]


async def served(verifier, wanted: list[list[int]], names: itertools.count, *, over) -> int:
    """The number of rounds with trees of sessions that several tasks run until `over`. Their texts are compared with `wanted`."""

    async def one_after_another() -> int:
        rounds = 0
        while not over():
            number = next(names)
            kind = number % len(WISHES)
            await until(lambda: verifier.pool.up)  # a stream that was broken is dialled again
            wish = request(f"r{number}", **WISHES[kind], mode=SpeculationMode.REQUIRED, max_tokens=TOKENS)
            text, last = await collect(verifier, wish)
            assert kind >= len(wanted) or text == wanted[kind]
            rounds += last.finish.stats.num_spec_steps
        return rounds

    return sum(await asyncio.gather(*(one_after_another() for _ in range(SESSIONS))))


async def check_corrupting_drafter(num_frames: int, seed: int) -> None:
    wanted = await texts_without_drafters()
    target, draft = tabular_pair(slots=SESSIONS)
    corruptor = FrameCorruptor(seed, most=num_frames)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        honest = await enter(drafter_of(perturbed(target, 0.8, 2), incarnation=1, capacity=SESSIONS // 2))
        corrupting = await enter(drafter_of(draft, incarnation=2, capacity=SESSIONS))
        address = await enter(corrupting_drafter(corrupting, corruptor))
        drafters = {"honest": honest, "corrupting": await enter(RemoteDrafter(address))}
        verifier = await enter(verifier_of(target, drafters, draft_wait_ms=20))
        await until(lambda: verifier.pool.links)
        honest_link = next(link for link in verifier.pool.links if link.name == "honest")
        orphans: list[str] = []
        orphan = honest_link.orphan

        def noted(slot: int, reason: str):
            orphans.append(reason)
            return orphan(slot, reason)

        honest_link.orphan = noted  # type: ignore[method-assign]
        await until(lambda: len(verifier.pool.up) == 2)
        names = itertools.count()
        await served(verifier, wanted, names, over=lambda: corruptor.num_sent > num_frames // 3)
        memory, most = Memory(), Most()
        most.watch_verifier(verifier)
        rounds = await served(verifier, wanted, names, over=lambda: corruptor.over)
        memory.stop()
        assert corruptor.num_sent >= num_frames
        assert rounds > 0
        assert orphans == []  # sessions of the other drafter are not affected
        assert 0 < most.seen["drafts"] <= SESSIONS
        assert most.seen["send_buffer"] <= 3 * SESSIONS
        assert most.seen["nodes"] <= NODES
        assert most.seen["remembered"] <= TOKENS
        assert all(len(link.send_buffer) == len(link.drafts) == 0 for link in verifier.pool.links)
        await until(lambda: verifier.model.num_free_slots == verifier.max_sessions)
        verifier.model.check_idle()


async def check_corrupting_verifier(num_frames: int, seed: int) -> None:
    wanted = await texts_without_drafters()
    target, draft = tabular_pair(slots=3 * SESSIONS)
    corruptor = FrameCorruptor(seed, most=num_frames)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        drafter = await enter(drafter_of(draft, capacity=3 * SESSIONS))
        server = await enter(RpcServer("127.0.0.1:0", transport=DRAFTING, grace_s=0.1))
        DrafterServicer(drafter, drafter.describe).register(server)
        await server.start()
        honest = await enter(verifier_of(target, {"d": await enter(RemoteDrafter(server.address))}))
        corrupting = await enter(
            verifier_of(
                tabular_pair(slots=SESSIONS)[0], {"d": CorruptingVerifier(server.address, corruptor)}, draft_wait_ms=10
            )
        )
        await until(lambda: honest.pool.up and corrupting.pool.up)
        corrupted = asyncio.create_task(served(corrupting, wanted, itertools.count(), over=lambda: corruptor.over))
        await until(lambda: corruptor.num_sent > num_frames // 3 or corrupted.done(), 600)
        memory, most = Memory(), Most()
        most.watch_drafter(drafter)
        rounds = await served(honest, wanted, itertools.count(), over=lambda: corruptor.over or corrupted.done())
        await corrupted  # raises its errors
        memory.stop()
        assert rounds > 0
        assert 0 < most.seen["trees"] <= drafter.capacity
        assert most.seen["waited"] <= drafter.capacity
        assert most.seen["mailbox"] <= 2 * (MAX_UNAPPLIED + 1)
        assert most.seen["unsent"] <= MAX_UNSENT * (drafter.capacity + 1) + MAX_UNAPPLIED
        assert most.seen["nodes"] <= MAX_NODES
        await corrupting.pool.__aexit__()
        await until(lambda: not drafter.grower.trees)
        drafter.grower.model.check_idle()


async def test_malformed_frames_of_a_drafter_affect_its_own_slots_only() -> None:
    await check_corrupting_drafter(3000, seed=1)


async def test_malformed_frames_of_a_verifier_affect_its_own_trees_only() -> None:
    await check_corrupting_verifier(400, seed=2)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [11, 12])
async def test_many_malformed_frames_of_a_drafter(seed: int) -> None:
    await check_corrupting_drafter(100_000, seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_many_malformed_frames_of_a_verifier() -> None:
    await check_corrupting_verifier(20_000, seed=13)
