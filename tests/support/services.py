"""Real services for tests: in one process, over ports or over gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass

from support.tabular import perturbed

from benchmarks.slow_link import Conditions, SlowLink
from drafter_service.growth_loop import DrafterService
from drafter_service.head_grower import HeadGrower
from drafter_service.servicer import DrafterServicer
from rootward.core.frames import DraftHead
from rootward.core.growth import BestFirst
from rootward.core.requests import (
    Committed,
    DraftMode,
    Rule,
    Sampling,
    Speculation,
    SpeculationMode,
    Stopping,
    VerifierRequest,
)
from rootward.discovery.sources import StaticDiscovery
from rootward.engine.grower import Grower
from rootward.engine.head_growth import compiled_trees
from rootward.engine.head_model import DraftHead as HeadModel
from rootward.engine.tabular import TabularModel
from rootward.engine.verify import LawFunction, forest_law
from rootward.ports import DEFAULT_POOL, Drafter, LanguageModel, Verifier
from rootward.wire.channel import DRAFTING
from rootward.wire.clients import RemoteDrafter, RemoteVerifier
from rootward.wire.server import RpcServer
from verifier_service.head_drafts import HeadDrafts
from verifier_service.metrics import Metrics
from verifier_service.runner import Runner
from verifier_service.service import VerifierService
from verifier_service.servicer import VerifierServicer
from verifier_service.settings import VerifierSettings

WAIT_S = 60.0


def tabular_pair(*, vocab: int = 5, noise: float = 0.8, slots: int = 8, **law) -> tuple[TabularModel, TabularModel]:
    target = TabularModel(vocab, seed=1, max_slots=slots, **law)
    return target, perturbed(target, noise, seed=2)


def drafter_of(
    model: LanguageModel, *, incarnation: int = 7, capacity: int = 64, int8: bool = False, **policy
) -> DrafterService:
    """int8: how a draft head wants features."""
    best_first = BestFirst(**policy)
    grower = Grower(model, incarnation=incarnation, best_first=best_first)
    if not grower.feature_size:
        return DrafterService(grower, capacity=capacity)
    head = DraftHead(model.info.fingerprint, grower.feature_size, int8)
    compiled = compiled_trees(model, incarnation=incarnation, best_first=best_first)
    trees = grower if compiled is None else HeadGrower(compiled, grower)
    return DrafterService(trees, capacity=capacity, head=head)


def verifier_settings(**changes) -> VerifierSettings:
    """Small trees, awaited patiently; nothing grows ahead, and nothing is looked up."""
    own = {"num_draft_tokens": 8, "draft_wait_ms": 1000.0, "local_draft": "none", "num_ahead_tokens": 0}
    return VerifierSettings(**({"model": "target", "law": DraftMode.SAMPLED, **own} | changes))


def verifier_of(
    model: LanguageModel,
    drafters: dict[str, Drafter],
    *,
    decide: LawFunction | None = None,
    metrics: Metrics | None = None,
    head: HeadModel | None = None,
    fuse: HeadModel | None = None,
    **policy,
) -> VerifierService:
    """drafters: by name; head: grows trees here; fuse: makes the features of drafters."""
    heads = None if head is None else HeadDrafts(head, incarnation=3)
    runner = Runner(model, law=decide or forest_law, heads=heads, head=fuse)
    local_draft = "none" if head is None else "head:of a test"
    settings = verifier_settings(**({"local_draft": local_draft} | policy))
    return VerifierService(
        model,
        incarnation=3,
        settings=settings,
        runner=runner,
        metrics=metrics,
        sources=[(DEFAULT_POOL, StaticDiscovery(*drafters))] if drafters else (),
        dial=lambda name: nullcontext(drafters[name]),
        secret=11,
    )


@dataclass
class System:
    """A verifier and its drafter; `verifier` is what a caller holds, `service` the object behind it, `link` what lies between them."""

    verifier: Verifier
    service: VerifierService
    drafter: DrafterService
    link: SlowLink | None = None


@asynccontextmanager
async def in_process(target: LanguageModel, draft: LanguageModel, **policy) -> AsyncIterator[System]:
    drafter = drafter_of(draft)
    verifier = verifier_of(target, {"d": drafter}, **policy)
    async with drafter, verifier:
        await until(lambda: verifier.pool.up)
        yield System(verifier, verifier, drafter)


@asynccontextmanager
async def over_grpc(
    target: LanguageModel,
    draft: LanguageModel,
    *,
    conditions: Conditions | None = None,
    int8: bool = False,
    **policy,
) -> AsyncIterator[System]:
    """The same, with both hops on loopback; `conditions`: of the link between verifier and drafter."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        drafter = await enter(drafter_of(draft, int8=int8))
        server = await enter(RpcServer("127.0.0.1:0", transport=DRAFTING, grace_s=0.1))
        DrafterServicer(drafter, drafter.describe).register(server)
        await server.start()
        link = await enter(SlowLink(server.address, conditions)) if conditions is not None else None
        remote_drafter = await enter(RemoteDrafter(link.address if link is not None else server.address))
        verifier = await enter(verifier_of(target, {"d": remote_drafter}, **policy))
        front = await enter(RpcServer("127.0.0.1:0", grace_s=0.1))

        VerifierServicer(verifier).register(front)
        await front.start()
        remote = await enter(RemoteVerifier(front.address))
        await until(lambda: verifier.pool.up)
        yield System(remote, verifier, drafter, link)


def request(
    name: str = "r",
    prompt: tuple[int, ...] = (1, 2, 3),
    *,
    temperature: float = 1.0,
    max_tokens: int = 40,
    seed: int = 0,
    mode: SpeculationMode = SpeculationMode.REQUIRED,
    rule: Rule | None = None,
    law: DraftMode | None = None,
    **more,
) -> VerifierRequest:
    return VerifierRequest(
        name,
        prompt,
        Sampling(temperature),
        more.pop("stopping", Stopping(max_tokens)),
        more.pop("wish", Speculation(mode, rule, law)),
        seed=seed,
        **more,
    )


async def collect(verifier: Verifier, wanted: VerifierRequest) -> tuple[list[int], Committed]:
    """All tokens and the last message; offsets must be gapless."""
    tokens: list[int] = list(wanted.committed)
    last = None
    async for run in verifier.generate(wanted):
        assert run.offset == len(tokens)
        assert len(run.accepted) == len(run.tokens)
        tokens += run.tokens
        last = run
    assert last is not None
    assert last.finish is not None
    return tokens, last


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def assert_at_rest(system: System) -> None:
    """Nothing is held once nothing runs: slots, trees, KV cells."""
    await until(lambda: not system.service._running and not system.service._live)
    drafts = system.drafter.grower.model
    # A tree is forgotten before its slot is closed, on the thread that grows.
    await until(lambda: not system.drafter.grower.trees and drafts.num_free_slots == drafts.size.num_slots)
    for model in (system.service.model, drafts):
        model.check_idle()
    assert system.service.model.num_free_slots == system.service.max_sessions
