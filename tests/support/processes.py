"""Service processes for tests: started, waited for by the line they print, killed or stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from types import TracebackType
from typing import IO, Self

from support.fork_server import Forked, ForkServer, third_party_environment

from rootward.addresses import reserved_port

START_S = 240.0
STOP_S = 60.0


_reserved = ExitStack()


def free_port() -> int:
    """A port of 127.0.0.1 that no other process gets by chance as long as this one runs."""
    return _reserved.enter_context(reserved_port())


RUNNING: set[Service] = set()  # whose logs a failing test shows
_starting = threading.Lock()


@cache
def _fork_server() -> ForkServer:
    return ForkServer()


def started(command: list[str], stderr: IO[str]) -> subprocess.Popen[str] | Forked:
    """Runs the command of an interpreter, with its output in a pipe. It is a fork of a process that has loaded third-party packages; where
    these might read other variables of the environment than they did, a new interpreter."""
    if sys.platform == "linux":
        with _starting:
            if (server := _fork_server()).environment == third_party_environment():
                return server.start(command, stderr)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)


class Service:
    """`python -m module flags…`; use as a context manager. `address` is the gRPC one, `http` the gateway's other."""

    def __init__(self, module: str, *flags: str) -> None:
        self.command = [sys.executable, "-m", module, *flags]
        self.log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in stop()
        self.process: subprocess.Popen[str] | Forked | None = None
        self.address = self.http = ""

    def spawn(self) -> subprocess.Popen[str] | Forked:
        """Not waited for: a service that prints no line."""
        self.process = started(self.command, self.log)
        RUNNING.add(self)
        return self.process

    def start(self) -> Self:
        process = self.spawn()
        assert process.stdout is not None
        alarm = threading.Timer(START_S, process.kill)
        alarm.start()
        line = process.stdout.readline()
        alarm.cancel()
        found = re.search(r"listening on (\S+:\d+)(?: and (https?://\S+))?", line)
        assert found, f"{self.command} did not start:\n{self.output()}"
        self.address, self.http = found[1], found[2] or ""
        return self

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        RUNNING.discard(self)
        self.log.close()


def wait_until(condition, timeout_s: float = 60.0, what: str = "") -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"timed out waiting for {what or condition}"
        time.sleep(0.05)


def drafter(model: str, *flags: str, port: int = 0) -> Service:
    return Service("drafter_service", "--model", model, "--listen", f"127.0.0.1:{port}", *flags)


def verifier(model: str, drafters: Sequence[str], *flags: str, port: int = 0) -> Service:
    more = ["--drafters", ",".join(drafters)] if drafters else []
    if "--num-ahead-tokens" not in flags:
        more += ["--num-ahead-tokens", "32"]  # as for drafters on other machines
    return Service("verifier_service", "--model", model, "--listen", f"127.0.0.1:{port}", *more, *flags)


def gateway(model: str, verifiers: Sequence[str], *flags: str, port: int = 0) -> Service:
    listen = ["--listen", f"127.0.0.1:{port}", "--http-listen", "127.0.0.1:0"]
    return Service("gateway", "--model", model, "--verifiers", ",".join(verifiers), *listen, *flags)
