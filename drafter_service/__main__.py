"""`python -m drafter_service --model DRAFT`: the drafter as a process."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence

from drafter_service.growing import Grower
from drafter_service.service import DrafterService, Key
from drafter_service.servicer import DrafterServicer
from drafter_service.settings import DrafterSettings
from rootward.core.growth import Policy
from rootward.core.requests import Law
from rootward.engine.loading import load_model
from rootward.engine.threads import use_threads
from rootward.ports import LanguageModel
from rootward.rpc.channel import DRAFTING
from rootward.rpc.lifecycle import announce, run_service, until_stopped
from rootward.rpc.server import RpcServer
from rootward.telemetry import configure_logging


def build(model: LanguageModel, settings: DrafterSettings) -> DrafterService:
    """The drafter that these settings describe."""
    policy = Policy(
        Law.SAMPLED,
        draws_per_level=settings.draws_per_level,
        acceptance=settings.acceptance,
        family=settings.family,
    )
    incarnation = secrets.randbits(64)
    rows = settings.max_num_batched_tokens
    grower: Grower[Key] = Grower(model, incarnation=incarnation, max_rows=rows, prefill_chunk=rows, policy=policy)
    worker = f"drafter-{incarnation:016x}"
    return DrafterService(model, grower, worker=worker, capacity=settings.max_num_seqs, max_atoms=settings.law_atoms)


async def serve(settings: DrafterSettings) -> None:
    use_threads(settings.num_threads)
    model = await asyncio.to_thread(
        load_model,
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_slots=settings.max_num_seqs,
        max_len=settings.max_model_len,
        require_trees=True,
    )
    drafter = build(model, settings)
    async with drafter, RpcServer(settings.listen, transport=DRAFTING, grace_s=1.0) as server:
        DrafterServicer(drafter, drafter.describe).register(server)
        await server.start()
        await server.set_ready(True)
        announce("drafter", server.address)
        await until_stopped(server, drafter.drain, settings.shutdown_timeout_s, ended=drafter.ended)


def main(argv: Sequence[str] | None = None) -> int:
    async def run() -> None:
        settings = DrafterSettings.load(argv, prog="rootward serve drafter")
        configure_logging("drafter", settings.log_level, settings.log_json)
        await serve(settings)

    return run_service("drafter", run)


if __name__ == "__main__":
    sys.exit(main())
