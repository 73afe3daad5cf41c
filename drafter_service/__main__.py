"""`python -m drafter_service --model DRAFT`: the drafter as a process."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence

from drafter_service.lookup import Lookup
from drafter_service.pairing import without_model
from drafter_service.service import DrafterService, Key
from drafter_service.servicer import DrafterServicer
from drafter_service.settings import DrafterSettings
from rootward.core.drafting.lookup import Recipe, parse_recipe
from rootward.core.growth import Policy
from rootward.core.requests import Law
from rootward.errors import ConfigurationError
from rootward.ports import LanguageModel, ModelInfo
from rootward.rpc.admin import Admin, admin_port
from rootward.rpc.channel import DRAFTING
from rootward.rpc.lifecycle import announce, run_service, until_stopped
from rootward.rpc.server import RpcServer
from rootward.telemetry import configure_logging

LONGEST_TEXT = 131_072  # tokens that a drafter without a model holds of one session


def build(model: LanguageModel, settings: DrafterSettings) -> DrafterService:
    """The drafter that grows trees with a model."""
    from drafter_service.growing import Grower  # torch takes seconds to import, and lookups do without

    policy = Policy(
        Law.SAMPLED,
        draws_per_level=settings.draws_per_level,
        acceptance=settings.acceptance,
        later=settings.later_acceptance,
    )
    incarnation = secrets.randbits(64)
    rows = settings.max_num_batched_tokens
    grower: Grower[Key] = Grower(model, incarnation=incarnation, max_rows=rows, prefill_chunk=rows, policy=policy)
    worker = f"drafter-{incarnation:016x}"
    return DrafterService(model, grower, worker=worker, capacity=settings.max_num_seqs, max_atoms=settings.law_atoms)


def build_lookup(recipe: Recipe, settings: DrafterSettings) -> DrafterService:
    """The drafter that looks trees up. What is learned from the sessions of one verifier serves that verifier."""
    incarnation = secrets.randbits(64)
    lookup: Lookup[Key] = Lookup(
        ModelInfo(recipe.name, recipe.vocab_size, settings.max_model_len or LONGEST_TEXT),
        lambda message, shared: recipe.source(message.law, shared),
        recipe.memory,
        incarnation=incarnation,
        group=lambda key: key[0],
    )
    worker = f"drafter-{incarnation:016x}"
    return DrafterService(lookup, lookup, worker=worker, capacity=settings.max_num_seqs, agree=without_model)


def recipe_of(spec: str) -> Recipe | None:
    """What a model setting says to look up, if it does."""
    try:
        return parse_recipe(spec)
    except ValueError as wrong:
        raise ConfigurationError(str(wrong)) from wrong


async def load(settings: DrafterSettings) -> LanguageModel:
    """The draft model that these settings name."""
    from rootward.engine.loading import load_model
    from rootward.engine.threads import use_threads

    use_threads(settings.num_threads)
    return await asyncio.to_thread(
        load_model,
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_slots=settings.max_num_seqs,
        max_len=settings.max_model_len,
        require_trees=True,
    )


async def serve(settings: DrafterSettings) -> None:
    async with admin_port(settings.admin_listen) as admin:
        await _serve(settings, admin)


async def _serve(settings: DrafterSettings, admin: Admin) -> None:
    recipe = recipe_of(settings.model)
    drafter = build_lookup(recipe, settings) if recipe is not None else build(await load(settings), settings)
    server = RpcServer(settings.listen, transport=DRAFTING, tls=settings.server_tls, grace_s=1.0)
    async with drafter, server:
        DrafterServicer(drafter, drafter.describe).register(server)
        await server.start()
        await server.set_ready(True)
        admin.serving(ready=lambda: not drafter.draining, live=lambda: drafter.alive, metrics=drafter.metrics.registry)
        announce("drafter", server.address)
        await until_stopped(
            server, drafter.drain, settings.shutdown_timeout_s, ended=[drafter.ended] if drafter.ended else []
        )


def main(argv: Sequence[str] | None = None) -> int:
    async def run() -> None:
        settings = DrafterSettings.load(argv, prog="rootward serve drafter")
        configure_logging("drafter", settings.log_level, settings.log_json)
        await serve(settings)

    return run_service("drafter", run)


if __name__ == "__main__":
    sys.exit(main())
