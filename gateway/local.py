"""Everything on one machine: `python -m gateway.local` starts Redis, drafters, verifier and gateway as processes.

This is the only module that knows all three services, and it knows them by module name and flags alone. A process that dies
is started again on its address; they stop in the order in which requests flow, so that running ones end.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import structlog

from gateway.local_child import Child, listening_line
from gateway.local_redis import redis_answers, redis_command
from gateway.settings import LocalSettings
from rootward.client import AsyncClient
from rootward.demo import paths
from rootward.errors import APIError, ConfigurationError
from rootward.telemetry import configure_logging
from rootward.wire.lifecycle import announce, run_service

log = structlog.get_logger()

DRAFTERS_WAIT_S = 20.0  # for the verifier to find its drafters; it serves without them
ASK_EVERY_S, ASK_TIMEOUT_S = 0.05, 2.0


@dataclass(slots=True)
class Deployment:
    """The processes, in the order in which requests flow. Addresses are host:port."""

    gateway: Child
    verifier: Child
    drafters: list[Child] = field(default_factory=list)
    redis: Child | None = None
    runs: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def services(self) -> list[Child]:
        return [self.gateway, self.verifier, *self.drafters]

    @property
    def children(self) -> list[Child]:
        return [*self.services, *([self.redis] if self.redis else [])]

    @property
    def address(self) -> str:
        """Where the gateway speaks gRPC."""
        return self.gateway.address.partition(" ")[0]

    @property
    def url(self) -> str:
        """Where the gateway speaks HTTP."""
        return self.gateway.address.rpartition(" ")[2]

    async def unless_failed(self, events: Sequence[asyncio.Event]) -> None:
        """Wait for all of them; ConfigurationError as soon as a process does not start (again)."""

        async def all_set() -> None:
            for event in events:
                await event.wait()

        work = asyncio.create_task(all_set())
        try:
            await asyncio.wait({work, *self.runs}, return_when=asyncio.FIRST_COMPLETED)
            for run in self.runs:
                if run.done():
                    run.result()
            await work
        finally:
            work.cancel()


@asynccontextmanager
async def serve_all(settings: LocalSettings, *, log_to: int | None = None) -> AsyncIterator[Deployment]:
    """A running deployment; everything is stopped on leaving. `log_to` is a file descriptor for what the processes log.

    ConfigurationError, with its exit code, when one of them does not start. One that dies later is started again;
    `Deployment.unless_failed` raises when that does not help.
    """
    with tempfile.TemporaryDirectory(prefix="rootward-") as folder:
        deployment = _deployment(settings, folder, log_to)
        try:
            await _started(deployment, settings)
            yield deployment
            first, *others = deployment.children  # the gateway first: running requests end while all the rest works
            await first.stop(settings.shutdown_timeout_s)
            await asyncio.gather(*(child.stop(settings.shutdown_timeout_s) for child in others))
        finally:
            for child in deployment.children:
                child.kill()
            await asyncio.gather(*deployment.runs, return_exceptions=True)


def _deployment(settings: LocalSettings, folder: str, log_to: int | None) -> Deployment:
    pair = paths()
    target, draft = settings.model or str(pair.target), settings.draft_model or str(pair.draft)
    count = 0 if draft == "none" else settings.num_drafters
    ports = _free_ports(count + 2)
    verifier_port, redis_port, drafter_ports = ports[0], ports[1], ports[2:]

    def service(role: str, module: str, own: list[str], more: str) -> Child:
        shared = ["--log-level", settings.log_level, *(["--log-json"] if settings.log_json else [])]
        command = [sys.executable, "-m", module, *own, *shared, *shlex.split(more)]
        return Child(role, command, listening_line, log_to=log_to)

    stop = ["--shutdown-timeout-s", str(settings.shutdown_timeout_s)]
    drafters = [f"127.0.0.1:{port}" for port in drafter_ports]
    verifier = f"127.0.0.1:{verifier_port}"
    redis_url = settings.redis_url or f"redis://127.0.0.1:{redis_port}/0"
    of_drafters = ["--model", draft]
    of_verifier = ["--model", target, "--listen", verifier, "--drafters", ",".join(drafters), *stop]
    of_gateway = ["--model", target, "--verifiers", verifier, "--listen", settings.listen, *stop]
    of_gateway += ["--http-listen", settings.http_listen, "--served-model-name", settings.served_model_name]
    of_gateway += [] if redis_url == "none" else ["--redis-url", redis_url]
    own_redis = [] if settings.redis_url else redis_command(redis_port, folder)
    return Deployment(
        service("gateway", "gateway", of_gateway, settings.gateway_flags),
        service("verifier", "verifier_service", of_verifier, settings.verifier_flags),
        [
            service("drafter", "drafter_service", [*of_drafters, "--listen", address], settings.drafter_flags)
            for address in drafters
        ],
        Child("redis", own_redis, redis_answers(redis_port), log_to=log_to) if own_redis else None,
    )


def _free_ports(count: int) -> list[int]:
    """Ports nobody listens on now. They are needed before the processes start, because each is told of the others."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for made in sockets:
            made.bind(("127.0.0.1", 0))
        return [made.getsockname()[1] for made in sockets]
    finally:
        for made in sockets:
            made.close()


async def _started(deployment: Deployment, settings: LocalSettings) -> None:
    """Start Redis, which the gateway needs at once, then the rest together; wait until they have found each other."""
    try:
        async with asyncio.timeout(settings.start_timeout_s):
            for wave in ([deployment.redis] if deployment.redis else [], deployment.services):
                deployment.runs += [asyncio.create_task(child.run(), name=child.role) for child in wave]
                await deployment.unless_failed([child.ready for child in wave])
            await _connected(deployment)
    except TimeoutError:
        late = (
            ", ".join(child.role for child in deployment.children if not child.ready.is_set()) or "verifier for gateway"
        )
        message = f"start_timeout_s: {settings.start_timeout_s} s passed and not ready yet: {late}; give more time"
        raise ConfigurationError(message, exit_code=4) from None


async def _connected(deployment: Deployment) -> None:
    """The gateway has found the verifier, and the verifier its drafters. Drafters are no condition for serving for ever."""
    patience = asyncio.get_running_loop().time() + DRAFTERS_WAIT_S
    async with AsyncClient(deployment.address, timeout=ASK_TIMEOUT_S, max_retries=0) as client:
        while True:
            ready, num_drafters = await _found(client)
            if ready and num_drafters >= len(deployment.drafters):
                return
            if ready and asyncio.get_running_loop().time() > patience:
                log.warning("drafters_missing", wanted=len(deployment.drafters), found=num_drafters)
                return
            await asyncio.sleep(ASK_EVERY_S)


async def _found(client: AsyncClient) -> tuple[bool, int]:
    """Whether a verifier is ready, and how many drafters it has."""
    try:
        info = await client.server_info()
    except APIError:
        return False, 0
    return any(worker.ready for worker in info.verifiers), len(info.drafters)


async def _run(settings: LocalSettings) -> None:
    """Until SIGTERM or SIGINT; a second one, or one during the start, ends at once."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    stop, started = asyncio.Event(), False
    assert main is not None

    def signalled() -> None:
        if stop.is_set() or not started:
            main.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    async with serve_all(settings) as deployment:
        started = True
        for child in reversed(deployment.children):
            announce(child.role, child.address)
        announce("all", f"{deployment.address} and {deployment.url}")
        await deployment.unless_failed([stop])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 when told to stop, 2, 3 or 4 when a process refused to start."""

    async def run() -> None:
        settings = LocalSettings.load(argv, prog="rootward serve all")
        configure_logging("all", settings.log_level, settings.log_json)
        with suppress(asyncio.CancelledError):
            await _run(settings)

    return run_service("all", run)


if __name__ == "__main__":
    sys.exit(main())
