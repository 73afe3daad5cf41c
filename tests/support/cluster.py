"""Verifiers and drafters over gRPC on loopback that come and go while generations run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from support.services import WAIT_S, drafter_of, request, tabular_pair, until, verifier_settings

from drafter_service.growth_loop import DrafterService
from drafter_service.servicer import DrafterServicer
from rootward.core.requests import Committed, DraftMode, Rule, SpeculationMode
from rootward.demand import Reading
from rootward.engine.tabular import TabularModel
from rootward.ports import Discovery, Peer
from rootward.wire.channel import DRAFTING
from rootward.wire.clients import RemoteDrafter
from rootward.wire.server import RpcServer
from verifier_service.service import VerifierService

COUPLED = {"rule": Rule.MATCH, "law": DraftMode.COUPLED}  # the text is a function of target and seed
LONG = 4000  # tokens: more than a test waits for
STREAMS = 8  # of each verifier
CAPACITY = 16  # of each drafter


class Announced:
    """A discovery that says what the test says."""

    def __init__(self) -> None:
        self.peers: tuple[Peer, ...] = ()
        self._news = asyncio.Event()

    def say(self, *peers: Peer) -> None:
        self.peers = peers
        self._news.set()

    async def watch(self) -> AsyncGenerator[tuple[Peer, ...], None]:
        while True:
            self._news.clear()
            yield self.peers
            await self._news.wait()


@dataclass
class Remote:
    """A drafter behind a port."""

    drafter: DrafterService
    server: RpcServer
    stack: AsyncExitStack
    gone: bool = False

    @property
    def peer(self) -> Peer:
        return Peer(self.server.address)

    @property
    def num_trees(self) -> int:
        return len(self.drafter.grower.trees)

    async def vanish(self) -> None:
        self.gone = True
        await self.stack.aclose()


@dataclass
class Cluster:
    target: Callable[[], TabularModel]
    stack: AsyncExitStack
    found: Announced = field(default_factory=Announced)
    sources: list[tuple[str, Discovery]] = field(default_factory=list)
    verifiers: list[VerifierService] = field(default_factory=list)
    drafters: list[Remote] = field(default_factory=list)
    streams: dict[str, tuple[asyncio.Task[None], list[int]]] = field(default_factory=dict)
    last: dict[str, Committed] = field(default_factory=dict)

    async def add_verifier(self) -> None:
        sources = self.sources or [("default", self.found)]
        number = len(self.verifiers)
        verifier = VerifierService(
            self.target(),
            incarnation=number,
            settings=verifier_settings(),
            sources=sources,
            dial=RemoteDrafter,
        )
        self.verifiers.append(await self.stack.enter_async_context(verifier))

    async def add_drafter(self, *, announce: bool = True) -> Remote:
        _, model = tabular_pair(noise=0.5, slots=CAPACITY)
        stack = await self.stack.enter_async_context(AsyncExitStack())
        number = len(self.drafters)
        drafter = await stack.enter_async_context(drafter_of(model, incarnation=100 + number, capacity=CAPACITY))
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", transport=DRAFTING, grace_s=0.0))
        DrafterServicer(drafter, drafter.describe).register(server)
        await server.start()
        self.drafters.append(Remote(drafter, server, stack))
        if announce:
            self.announce()
        return self.drafters[-1]

    def announce(self) -> None:
        self.found.say(*(d.peer for d in self.drafters))

    def load(self, streams: int = STREAMS) -> None:
        """Start long generations at every verifier. Where drafters are up they are required, for the sake of the numbers."""
        for number, verifier in enumerate(self.verifiers):
            for i in range(streams):
                name = f"{number}-{i}"
                mode = SpeculationMode.REQUIRED if verifier.pool.up else SpeculationMode.AUTO
                wanted = request(name, max_tokens=LONG, seed=i, mode=mode, **COUPLED)
                tokens: list[int] = []
                self.streams[name] = asyncio.create_task(self._consume(verifier, wanted, tokens)), tokens

    async def _consume(self, verifier: VerifierService, wanted, tokens: list[int]) -> None:
        async for run in verifier.generate(wanted):
            assert run.offset == len(tokens)
            tokens += run.tokens
            self.last[wanted.request_id] = run

    def counters(self) -> list[dict[str, float]]:
        """What every verifier and every drafter says in a heartbeat."""
        of_drafters = [d.drafter.grower.demand.counters() for d in self.drafters]
        return [v.pool.demand["default"].counters() for v in self.verifiers] + of_drafters

    def readings(self, before: list[dict[str, float]]) -> tuple[list[Reading], list[Reading]]:
        now = [Reading(old, new) for old, new in zip(before, self.counters(), strict=True)]
        return now[: len(self.verifiers)], now[len(self.verifiers) :]

    def num_tokens(self) -> list[int]:
        return [len(tokens) for _, tokens in self.streams.values()]

    async def progress(self, tokens: int) -> None:
        """Every stream goes on by so many tokens."""
        start = self.num_tokens()
        await until(lambda: all(b - a >= tokens for a, b in zip(start, self.num_tokens(), strict=True)), 3 * WAIT_S)

    async def stop(self) -> None:
        """No stream has failed; the text of each seed is one text, whoever drafted for it."""
        for task, _ in self.streams.values():
            assert not task.done() or task.exception() is None
            task.cancel()
        await asyncio.gather(*(task for task, _ in self.streams.values()), return_exceptions=True)
        for i in range(STREAMS):
            texts = [tokens for name, (_, tokens) in self.streams.items() if name.endswith(f"-{i}")]
            shortest = min(map(len, texts), default=0)
            assert len({tuple(text[:shortest]) for text in texts}) <= 1
        await until(lambda: not any(d.num_trees for d in self.drafters if not d.gone))


@asynccontextmanager
async def cluster(
    verifiers: int = 3, *, step_ms: float = 0.0, found: Discovery | None = None
) -> AsyncIterator[Cluster]:
    """found: where the verifiers look for drafters, if not where `announce` says."""

    def target() -> TabularModel:
        return tabular_pair(slots=CAPACITY, step_ms=step_ms)[0]

    async with AsyncExitStack() as stack:
        made = Cluster(target, stack, sources=[("default", found)] if found is not None else [])
        for _ in range(verifiers):
            await made.add_verifier()
        try:
            yield made
        finally:
            for task, _ in made.streams.values():
                task.cancel()
            await asyncio.gather(*(task for task, _ in made.streams.values()), return_exceptions=True)
