"""`python -m drafter_service --model DRAFT`: the drafter as a process."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack

from drafter_service.growth_loop import DrafterService, Trees, without_model
from drafter_service.lookup_grower import LookupGrower
from drafter_service.metrics import Key
from drafter_service.servicer import DrafterServicer
from drafter_service.settings import DrafterSettings
from rootward.addresses import advertised
from rootward.core.frames import DraftHead
from rootward.core.growth import BestFirst
from rootward.core.lookup import Recipe, parse_recipe
from rootward.core.requests import DraftStrategy
from rootward.discovery.registry import Worker, open_registry, registered
from rootward.errors import ConfigurationError
from rootward.host import ask_for_huge_pages
from rootward.ports import DraftModel, ModelInfo
from rootward.wire.channel import DRAFTING
from rootward.wire.process import admin_port, announce, service_main, until_stopped
from rootward.wire.server import RpcServer

# Of a draft model a few nodes are worth most one below the other; beyond that a draft forward costs more than a wider step. A head is less
# often right the deeper it drafts, and here a level of it costs a message as well: its trees are wider than in the verifier.
LEAST_LEVELS, LEAST_LEVELS_OF_HEAD = 4, 1
HEAD = "head:"  # and the folder of a draft head, in the setting
LONGEST_TEXT = 131_072  # tokens that a drafter without a model holds of one session


def build(model: DraftModel, settings: DrafterSettings) -> DrafterService:
    """The drafter that grows trees with a model."""
    from rootward.engine.grower import Grower  # torch takes seconds to import, and lookups do without

    feature_size: int = getattr(model, "feature_size", 0)  # of a draft head
    best_first = BestFirst(
        draws_per_level=settings.draws_per_level,
        least_levels=LEAST_LEVELS_OF_HEAD if feature_size else LEAST_LEVELS,
        acceptance=settings.acceptance,
        later=settings.later_acceptance,
    )
    rows = settings.max_num_batched_tokens
    grower: Grower[Key] = Grower(
        model,
        incarnation=secrets.randbits(64),
        max_rows=rows,
        best_first=best_first,
        group=lambda key: key[0],
    )
    grower.demand.rows = min(rows, settings.max_num_seqs * settings.draws_per_level)  # what its trees can fill
    trees: Trees = grower
    head: DraftHead | None = None
    if feature_size:
        from drafter_service.head_grower import HeadGrower
        from rootward.engine.head_growth import compiled_trees

        head = DraftHead(model.info.fingerprint, feature_size, settings.feature_dtype == "int8")
        # An incarnation of its own: both count their draws, and no request may get the same random words twice.
        compiled = compiled_trees(model, incarnation=secrets.randbits(64), best_first=best_first)
        trees = grower if compiled is None else HeadGrower(compiled, grower)
    return DrafterService(
        trees,
        capacity=settings.max_num_seqs,
        max_atoms=settings.law_atoms,
        pool=settings.pool,
        strategy=DraftStrategy.parse(settings.draft_strategy),
        head=head,
    )


def registry_entry(drafter: DrafterService, settings: DrafterSettings, address: str) -> Worker:
    """The entry of the drafter in the registry."""
    return Worker(
        "drafter",
        drafter.worker,
        settings.pool,
        address,
        drafter.grower.incarnation,
        zone=settings.zone,
        draining=drafter.draining,
        counters={settings.pool: drafter.grower.demand.counters()},
    )


def build_lookup(recipe: Recipe, settings: DrafterSettings) -> DrafterService:
    """The drafter that looks trees up. What is learned from the sessions of one verifier serves that verifier."""
    if settings.cuda_graphs:
        raise ConfigurationError("cuda_graphs: a drafter without a model runs on no device; leave it out")
    if settings.target_tokenizer:
        raise ConfigurationError("target_tokenizer: a drafter without a model has no tokenizer; leave it out")
    lookup = LookupGrower(
        ModelInfo(recipe.name, 0, settings.max_model_len or LONGEST_TEXT),
        lambda message, shared: recipe.source(message.law, shared, message.prediction, message.num_prompt),
        incarnation=secrets.randbits(64),
    )
    return DrafterService(lookup, capacity=settings.max_num_seqs, agree=without_model, pool=settings.pool)


def recipe_of(spec: str) -> Recipe | None:
    """What a model setting says to look up, if it does."""
    try:
        return parse_recipe(spec)
    except ValueError as wrong:
        raise ConfigurationError(str(wrong)) from wrong


async def load(settings: DrafterSettings) -> DraftModel:
    """The draft model that these settings name, in the vocabulary of the target."""
    from rootward.engine.loading import load_model
    from rootward.engine.threads import on_passing_thread, use_threads

    use_threads(settings.num_threads)
    if settings.model.startswith(HEAD) or settings.target:
        return await on_passing_thread(load_head, settings)
    model = await on_passing_thread(
        load_model,
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_slots=settings.max_num_seqs,
        max_len=settings.max_model_len,
        require_trees=True,
        cuda_graphs=settings.cuda_graphs,
    )
    if not settings.target_tokenizer:
        return model
    from rootward.engine.other_vocabulary import in_vocabulary_of
    from rootward.engine.tokenizers import load_tokenizer

    own = getattr(model, "tokenizer", None)  # without one it has the target's vocabulary, or verifiers refuse it
    return model if own is None else in_vocabulary_of(model, own, load_tokenizer(settings.target_tokenizer))


def load_head(settings: DrafterSettings) -> DraftModel:
    """The draft head that these settings name, for their target."""
    from rootward.engine.head_growth import compile_growth
    from rootward.engine.head_loading import load_head_apart

    if settings.cuda_graphs or settings.target_tokenizer:
        name = "cuda_graphs" if settings.cuda_graphs else "target_tokenizer"
        raise ConfigurationError(f"{name}: not for a draft head; leave it out")
    if not settings.target:
        raise ConfigurationError("target: a draft head needs its target's embedding; give the target's folder")
    head = load_head_apart(
        settings.model.removeprefix(HEAD),
        settings.target,
        device=settings.device,
        dtype=settings.dtype,
        max_slots=settings.max_num_seqs,
        max_len=settings.max_model_len,
    )
    compile_growth(head)
    return head


async def serve(settings: DrafterSettings) -> None:
    ask_for_huge_pages()
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(admin_port(settings.admin_listen))
        recipe = recipe_of(settings.model)
        service = build_lookup(recipe, settings) if recipe is not None else build(await load(settings), settings)
        drafter = await stack.enter_async_context(service)
        server = RpcServer(settings.listen, transport=DRAFTING, tls=settings.server_tls, grace_s=1.0)
        await stack.enter_async_context(server)
        DrafterServicer(drafter, drafter.describe).register(server)
        await server.start()
        await server.set_ready(True)
        admin.serving(ready=lambda: not drafter.draining, live=lambda: drafter.alive, metrics=drafter.registry)
        beat: Callable[[], None] | None = None
        if settings.redis_url:  # where verifiers find it
            registry = await stack.enter_async_context(open_registry(settings.redis_url, prefix=settings.redis_prefix))
            address = advertised(settings.advertise or server.address)
            entry = registered(registry, lambda: registry_entry(drafter, settings, address))
            beat = await stack.enter_async_context(entry)

        async def drain() -> None:
            drafter.draining = True
            if beat is not None:  # at once
                beat()
            await drafter.drain()

        announce("drafter", server.address)
        ended = [drafter.ended] if drafter.ended else []
        await until_stopped(server, drain, settings.shutdown_timeout_s, ended=ended)


main = service_main("drafter", DrafterSettings, serve)

if __name__ == "__main__":
    sys.exit(main(None))
