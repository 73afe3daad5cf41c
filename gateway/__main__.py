"""`python -m gateway --model TARGET --verifiers HOST:PORT,…`: both servers in one event loop, until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from functools import partial

from gateway.admission import LogprobLimit
from gateway.app import build_app
from gateway.auth import Access, Keys
from gateway.autoscaling import scaler_port
from gateway.http_guard import RequestGuard, for_web_pages
from gateway.models import Models
from gateway.redis_store import Store, open_store
from gateway.router import Upstreams
from gateway.sampling_defaults import recommended_sampling
from gateway.service import ABORT_S, GatewayService, loop_time
from gateway.servicer import register
from gateway.settings import GatewaySettings
from gateway.stored_responses import ResponseStore
from gateway.tokenizer import load_tokenizer
from gateway.watching import Watching
from rootward.addresses import is_loopback
from rootward.discovery.registry import Registry, open_registry
from rootward.discovery.sources import open_sources
from rootward.wire.auth import BytesInFlight, RefusalLog
from rootward.wire.channel import public
from rootward.wire.clients import RemoteVerifier
from rootward.wire.http_server import HttpServer
from rootward.wire.process import admin_port, announce, service_main, until_stopped
from rootward.wire.server import RpcServer

READY_POLL_S = 0.2
FIRST_VERIFIER_S = 1.0  # longest wait for the verifiers before the line that announces the gateway


async def serve(settings: GatewaySettings) -> None:
    """Run until SIGTERM; then refuse new requests, let running ones end, abort the rest, stop."""
    async with AsyncExitStack() as stack:
        http = HttpServer(settings.http_listen, tls=settings.public_tls, max_connections=settings.max_http_connections)
        admin = await stack.enter_async_context(admin_port(settings.admin_listen))
        keys = Keys(settings.api_keys) if settings.api_keys else None
        store = open_store(settings.redis_url, prefix=settings.redis_prefix)
        stack.push_async_callback(store.close)
        stored = ResponseStore(
            store,
            lifetime_s=settings.response_lifetime_s,
            max_responses=settings.max_stored_responses,
            max_bytes=settings.max_stored_response_bytes,
        )
        registry = None
        if settings.redis_url:
            registry = await stack.enter_async_context(open_registry(settings.redis_url, prefix=settings.redis_prefix))
        models = await _models(settings, store, registry, stack)
        in_flight = BytesInFlight(settings.max_bytes_in_flight)
        refusals = RefusalLog(refused=models.calls.refused)
        access = Access(keys, models.names, local=is_loopback(settings.listen), refusals=refusals)
        server = RpcServer(
            settings.listen,
            transport=public(settings.max_request_bytes),
            tls=settings.public_tls,
            checks=(access.check_rpc,),
            in_flight=in_flight,
            refusals=refusals,
            grace_s=1.0,
        )
        await stack.enter_async_context(server)
        register(models, server, shutdown_timeout_s=settings.shutdown_timeout_s)
        await server.start()
        if settings.scaler_listen and registry is not None:
            await stack.enter_async_context(scaler_port(settings, registry))
        async with asyncio.TaskGroup() as group:
            app = RequestGuard(
                build_app(
                    models,
                    stored=stored,
                    reasoning_content=settings.reasoning_content,
                    call_formats=settings.call_formats,
                ),
                max_body_bytes=settings.max_request_bytes,
                in_flight=in_flight,
                refused=models.calls.refused,
                hosts=settings.http_hosts,
            )
            served = for_web_pages(access.around(app), settings.http_allowed_origins)
            group.create_task(http.run_until_stopped(served))
            readiness = group.create_task(_keep_ready(models, server))
            await models.wait_ready(FIRST_VERIFIER_S)
            await server.set_ready(models.ready)
            alias = models.names[0] if settings.metrics_compat == "vllm" else ""
            admin.serving(ready=lambda: models.ready, metrics=models.registry, model=alias)
            announce("gateway", f"{server.address} and {http.scheme}://{http.address}")
            limit_s = settings.shutdown_timeout_s
            await until_stopped(server, lambda: _drain(models, limit_s, readiness), limit_s + 2 * ABORT_S)
            await models.drain(0)
            http.stop()


async def _models(settings: GatewaySettings, store: Store, registry: Registry | None, stack: AsyncExitStack) -> Models:
    watching, logprob_limit = Watching(loop_time), LogprobLimit(settings.max_held_logprobs)
    several, services = len(settings.served) > 1, []
    for served in settings.served:
        tokenizer = await asyncio.to_thread(
            load_tokenizer,
            served.model,
            add_special_tokens=settings.add_special_tokens,
            special_tokens_in_messages=settings.special_tokens_in_messages,
        )
        recommends = settings.http_sampling_defaults == "model"
        sampling = await asyncio.to_thread(recommended_sampling, served.model) if recommends else None
        sources = await stack.enter_async_context(open_sources(served.sources, "verifier", registry=registry))
        service = GatewayService(
            tokenizer,
            Upstreams(
                {},
                sources=sources,
                dial=partial(RemoteVerifier, tls=settings.client_tls),
                tokenizer_hash=tokenizer.content_hash,
            ),
            store,
            settings=settings,
            served_model=served.name,
            watching=watching,
            logprob_limit=logprob_limit,
            beside_others=several,
            http_sampling=sampling,
        )
        services.append(await stack.enter_async_context(service))
    return Models(services, by_model=bool(settings.models))


async def _keep_ready(models: Models, server: RpcServer) -> None:
    """Keep the health service up to date: it depends on verifiers, not on drafters. A gateway that an administrator has drained ends as
    with SIGTERM."""
    while not models.drained.is_set():
        await server.set_ready(models.ready)
        await asyncio.sleep(READY_POLL_S)
    signal.raise_signal(signal.SIGTERM)


async def _drain(models: Models, limit_s: float, readiness: asyncio.Task[None]) -> None:
    readiness.cancel()
    await models.drain(limit_s)


main = service_main("gateway", GatewaySettings, serve)

if __name__ == "__main__":
    sys.exit(main(None))
