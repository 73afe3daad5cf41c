"""A service as a process: start, announce its address, answer probes, drain on SIGTERM, end with an exit code.

The admin port of every role is for supervisors, never for clients:

    GET /health/startup   200 once `serving` was called: the model is loaded and its first forward done
    GET /health/ready     200 while new work is taken; a missing drafter or Redis does not count
    GET /health/live      200 unless only a restart helps; it never asks a peer
    GET /metrics          the Prometheus text format

It listens from the beginning, so that a slow load differs from a hang, and answers in the event loop: a blocked loop fails the
probe by a timeout. gRPC health stays on the main port for clients; kubelets cannot use it under mutual TLS.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog
import uvloop
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from rootward.errors import ConfigurationError
from rootward.metrics import VllmNames
from rootward.settings import ProcessSettings
from rootward.telemetry import configure_logging
from rootward.tracing import configure_tracing
from rootward.wire.http_server import HttpServer
from rootward.wire.server import RpcServer

log = structlog.get_logger()

Drain = Callable[[], Awaitable[object]]
Question = Callable[[], bool]
S = TypeVar("S", bound=ProcessSettings)


class Admin:
    """The state of a process for probes and metrics. Until `serving` it is alive, not started and not ready."""

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
        """From now on these functions answer the probes, and `metrics` is exported beside the metrics of the process.

        model: its name, to export metrics of vLLM's meaning under vLLM's names as well ("": not)."""
        self._ready = ready
        self._live = live
        self._started = True
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


def run_service(role: str, main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a service's main; a configuration error is one line on stderr and its exit code, never a traceback.

    On uvloop: a message passes through several tasks and threads, whose hand-overs cost half as much on it."""
    try:
        uvloop.run(main())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is done: a late second signal must not spoil the exit code
    except ConfigurationError as error:
        print(f"rootward {role}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:
        logging.getLogger(role).exception("ended by an internal error")
        return 1
    return 0


def service_main(
    role: str, settings_type: type[S], serve: Callable[[S], Coroutine[Any, Any, None]]
) -> Callable[[Sequence[str] | None], int]:
    """The `main` of a service: takes its command line (None: that of the process), and returns the exit code."""

    def main(argv: Sequence[str] | None = None) -> int:
        async def run() -> None:
            settings = settings_type.load(argv, prog=f"rootward serve {role}")
            configure_logging(role, settings.log_level, settings.log_json)
            configure_tracing(role, settings.tracing_endpoint, settings.tracing_share)
            await serve(settings)

        return run_service(role, run)

    return main


def announce(role: str, address: str) -> None:
    """Print the line that a supervisor waits for. Freezes what was loaded so far, so that garbage collections skip it."""
    gc.collect()
    gc.freeze()
    print(f"rootward {role} listening on {address}", flush=True)


async def until_stopped(
    server: RpcServer, drain: Drain, shutdown_timeout_s: float, *, ended: Sequence[asyncio.Future[None]] = ()
) -> None:
    """Serve until SIGTERM or SIGINT; then refuse new work and let running work end within the limit. A second signal ends at once.

    ended: futures that the service depends on, such as its engine loop. When one of them ends, RuntimeError ends the process, and its
    supervisor starts another.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.put_nowait, None)
    first = asyncio.ensure_future(asked.get())
    await asyncio.wait({first, *ended}, return_when=asyncio.FIRST_COMPLETED)
    await server.set_ready(False)
    if not first.done():
        first.cancel()
        raise RuntimeError("a loop that the service depends on has ended")
    log.info("draining", at_most_s=shutdown_timeout_s)  # its supervisor, or a person, waits meanwhile
    draining = asyncio.ensure_future(drain())
    again = asyncio.ensure_future(asked.get())
    await asyncio.wait({draining, again}, timeout=shutdown_timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, again):
        task.cancel()
    await asyncio.gather(draining, again, return_exceptions=True)
