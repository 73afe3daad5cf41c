"""`python -m verifier_service --model TARGET --drafters HOST:PORT,…`: the verifier as a process."""

from __future__ import annotations

import secrets
import sys
from contextlib import AsyncExitStack
from functools import partial

import structlog

from rootward.addresses import advertised
from rootward.discovery.registry import Worker, open_registry, registered
from rootward.discovery.sources import open_sources, parse_sources
from rootward.engine.grammar import Grammars, vocabulary_of
from rootward.engine.threads import on_passing_thread
from rootward.host import ask_for_huge_pages
from rootward.redis_client import open_redis
from rootward.wire.clients import RemoteDrafter
from rootward.wire.process import admin_port, announce, service_main, until_stopped
from rootward.wire.server import RpcServer
from verifier_service.audit import TIMEOUT_S
from verifier_service.metrics import Metrics
from verifier_service.service import VerifierService
from verifier_service.servicer import VerifierServicer
from verifier_service.settings import VerifierSettings
from verifier_service.step_time import measure
from verifier_service.target import follow_target, load_local_head, target_model

log = structlog.get_logger("verifier")


def registry_entry(verifier: VerifierService, settings: VerifierSettings, address: str) -> Worker:
    """The entry of the verifier in the registry."""
    return Worker(
        role="verifier",
        id=verifier.worker,
        name=settings.name,
        address=address,
        incarnation=verifier.incarnation,
        zone=settings.zone,
        draining=verifier.draining,
        counters={pool: demand.counters() for pool, demand in verifier.pool.demand.items()},
    )


async def serve(settings: VerifierSettings) -> None:
    ask_for_huge_pages()
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(admin_port(settings.admin_listen))
        if settings.node_rank > 0:
            log.info("follows", machine=settings.node_rank, nnodes=settings.nnodes, master=settings.master_addr)
            await follow_target(settings, lambda: admin.serving(ready=lambda: True))
            return
        model, lost = await stack.enter_async_context(target_model(settings))
        head = await on_passing_thread(load_local_head, settings, model)
        step_time = await on_passing_thread(measure, model)
        log.info(
            "step_cost", **{f"ms_of_{n}_rows": round(1e3 * step_time.seconds(n), 2) for n in (1, 2, 4, 8, 16, 32, 64)}
        )
        registry = redis = None
        if settings.redis_url:
            registry = await stack.enter_async_context(open_registry(settings.redis_url, prefix=settings.redis_prefix))
            redis = open_redis(settings.redis_url, timeout_s=TIMEOUT_S)
            stack.push_async_callback(redis.aclose)
        opened_sources = open_sources(parse_sources(settings.drafters), "drafter", registry=registry)
        sources = await stack.enter_async_context(opened_sources)
        info = model.info
        metrics = Metrics()
        service = VerifierService(
            model,
            incarnation=secrets.randbits(64),
            settings=settings,
            grammars=Grammars(lambda: vocabulary_of(settings.model, info.vocab_size, info.eos_ids)),
            step_time=step_time,
            sources=sources,
            dial=partial(RemoteDrafter, tls=settings.client_tls, on_frame=metrics.links.frame),
            metrics=metrics,
            redis=redis,
            head=head,
            secret=secrets.randbits(64),
        )
        verifier = await stack.enter_async_context(service)
        server = await stack.enter_async_context(RpcServer(settings.listen, tls=settings.server_tls, grace_s=1.0))

        servicer = VerifierServicer(verifier)
        servicer.register(server)
        stack.callback(servicer.feeds.end)  # before the server stops, which would wait for them
        await server.start()
        await server.set_ready(True)
        admin.serving(
            ready=lambda: not verifier.draining,
            live=lambda: verifier.alive,
            metrics=verifier.metrics.registry,
            model=settings.name if settings.metrics_compat == "vllm" else "",
        )
        if registry is not None:
            address = advertised(settings.advertise or server.address)
            await stack.enter_async_context(registered(registry, lambda: registry_entry(verifier, settings, address)))
        announce("verifier", server.address)
        assert verifier.ended is not None
        await until_stopped(server, verifier.drain, settings.shutdown_timeout_s, ended=[verifier.ended, lost])


main = service_main("verifier", VerifierSettings, serve)

if __name__ == "__main__":
    sys.exit(main(None))
