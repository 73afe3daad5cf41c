"""The admin port of every role: HTTP probes for whoever supervises the process, metrics for Prometheus. Never for clients.

    GET /health/startup   200 once `serving` was called: the model is loaded and its first forward done
    GET /health/ready     200 while new work is taken; a missing drafter or Redis does not count
    GET /health/live      200 unless only a restart helps; it never asks a peer
    GET /metrics          the Prometheus text format

It listens from the beginning, so that a slow load is told from a hang, and answers in the event loop: a loop that is blocked fails
the probe by silence. gRPC health stays on the main port for clients; kubelets cannot use it under mutual TLS.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rootward.vllm_names import VllmNames
from rootward.wire.http_server import HttpServer

Question = Callable[[], bool]


class Admin:
    """What a process says about itself. Until `serving` it is alive, not started and not ready."""

    def __init__(self) -> None:
        process = CollectorRegistry()
        ProcessCollector(registry=process)
        self._registries = [process]
        self.address = ""
        self._ready: Question = lambda: False
        self._live: Question = lambda: True
        self._started = False

    def serving(
        self,
        *,
        ready: Question,
        live: Question = lambda: True,
        metrics: CollectorRegistry | None = None,
        model: str = "",
    ) -> None:
        """From now on these decide, and `metrics` is exported beside what the process tells about itself.

        model: its name, to export what has vLLM's meaning under vLLM's names as well ("": not)."""
        self._ready, self._live, self._started = ready, live, True
        self._registries += [metrics] if metrics is not None else []
        if metrics is not None and model:
            theirs = CollectorRegistry()
            theirs.register(VllmNames(metrics, model))
            self._registries.append(theirs)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                _probe("/health/startup", lambda: self._started),
                _probe("/health/ready", lambda: self._ready()),
                _probe("/health/live", lambda: self._live()),
                Route("/metrics", self._metrics),
            ]
        )

    async def _metrics(self, request: Request) -> Response:
        text = b"".join(generate_latest(registry) for registry in self._registries)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


@asynccontextmanager
async def admin_port(address: str) -> AsyncIterator[Admin]:
    """Serve on an address; "" serves nowhere, and costs nothing. ConfigurationError if it is taken."""
    admin = Admin()
    if not address:
        yield admin
        return
    server = HttpServer(address, setting="admin_listen")
    admin.address = server.address
    serving = asyncio.create_task(server.run_until_stopped(admin.app()), name="admin")
    try:
        yield admin
    finally:
        server.stop()
        await asyncio.gather(serving, return_exceptions=True)


def _probe(path: str, question: Question) -> Route:
    async def answer(request: Request) -> Response:
        good = question()
        return PlainTextResponse("ok\n" if good else "no\n", status_code=200 if good else 503)

    return Route(path, answer)
