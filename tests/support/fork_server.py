"""Starts services of tests as forks of one process, in which the packages that they import are loaded already: that takes most of the CPU
time of a start.

The process runs this file, `python fork_server.py DESCRIPTOR` of a socket, and ends when the other end of that is closed. It imports
third-party packages only: those of this repository load kernels as they are imported, and a process in which OpenMP has begun cannot be
forked. Threads of OpenBLAS, which numpy and scipy begin, end before a fork and begin again when they are needed. `ForkServer` and `Forked`
are for the process that starts services.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import IO

PRELOADED = (
    "numba",
    "torch",
    "transformers.modeling_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "scipy.linalg",
    "fastapi",
    "google.rpc.status_pb2",
    "grpc.aio",
    "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection",
    "prometheus_client.core",
    "pydantic_settings",
    "redis.asyncio",
    "structlog",
    "uvicorn",
    "uvicorn.protocols.http.auto",
    "uvloop",
)
SET_BY_SERVICES = {
    "OMP_WAIT_POLICY": "passive",
    "THP_MEM_ALLOC_ENABLE": "1",
}  # variables that services set before they load torch
MAX_MESSAGE = 1 << 20  # bytes of a message: arguments and environment
SIGINT_AT_START = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background of a shell


class Forked:
    """A process that a fork server has started, with the part of the interface of `subprocess.Popen` that tests use."""

    def __init__(self, args: list[str], stdout: IO[str], status: IO[bytes]) -> None:
        """stdout: what it prints; status: its id, and its return code once it has ended, a line each."""
        self.args, self.stdout, self._status = args, stdout, status
        self.returncode: int | None = None
        self._lock = Lock()
        started = status.readline()
        assert started, "the fork server has ended"
        self.pid = int(started)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """timeout: in s; TimeoutExpired after it."""
        code = self._ended(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _ended(self, timeout_s: float | None) -> int | None:
        """Its return code; None if it still runs."""
        ready = select.poll()
        ready.register(self._status, select.POLLIN)
        if self.returncode is None and ready.poll(None if timeout_s is None else 1000 * timeout_s):
            with self._lock:  # only one thread reads the line
                if self.returncode is None:
                    self.returncode = int(self._status.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Its process has the environment of this one, and loads what is needed meanwhile."""

    def __init__(self) -> None:
        self.environment = third_party_environment()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            environment = SET_BY_SERVICES | os.environ
            self._process = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def start(self, command: list[str], stderr: IO[str]) -> Forked:
        """command: an interpreter, -m and a module, or the path of a script, and its arguments."""
        read_output, output = os.pipe()
        read_status, status = os.pipe()
        request = {"argv": command[1:], "environment": dict(os.environ), "folder": os.getcwd()}
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [output, stderr.fileno(), status])
        finally:
            os.close(output)
            os.close(status)
        return Forked(command, open(read_output), open(read_status, "rb", buffering=0))


def third_party_environment() -> dict[str, str]:
    """Variables that third-party packages may read as they are imported."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTEST_CURRENT_TEST", *SET_BY_SERVICES) and not name.startswith("ROOTWARD_")
    }


def serve_forks(requests: socket.socket) -> list[str]:
    """Forks for every request, and returns in the fork, with the arguments of `run`. Returns an empty list in the server once the other
    end of the socket is closed."""
    running: dict[int, tuple[int, int]] = {}  # by the descriptor of a process: its id, and where to report its end
    with requests, selectors.DefaultSelector() as ready:
        ready.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fd in running:
                    ready.unregister(key.fd)
                    pid, status = running.pop(key.fd)
                    report(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    close_all(key.fd, status)
                    continue
                message, descriptors, _, _ = socket.recv_fds(requests, MAX_MESSAGE, 3)
                if not message:
                    return []
                *outputs, status = descriptors
                pid = os.fork()
                if not pid:
                    for number, output in enumerate(outputs, 1):
                        os.dup2(output, number)
                    close_all(*outputs, status, *running, *(other for _, other in running.values()))
                    return apply_start(**json.loads(message))
                assert len(os.listdir("/proc/self/task")) == 1, "forks would miss threads that do not end before them"
                close_all(*outputs)
                report(status, pid)
                end = os.pidfd_open(pid)
                running[end] = pid, status
                ready.register(end, selectors.EVENT_READ)


def close_all(*descriptors: int) -> None:
    for one in descriptors:
        os.close(one)


def report(status: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the test no longer waits for it
        os.write(status, b"%d\n" % number)


def apply_start(argv: list[str], environment: dict[str, str], folder: str) -> list[str]:
    """Give this process what an interpreter in this folder would have started with; returns the arguments."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, SIGINT_AT_START)
    return argv


def run(argv: list[str]) -> None:
    """As the command line of an interpreter: -m and a module, or the path of a script, and its arguments."""
    if argv[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(argv[0]).resolve().parent), argv
        runpy.run_path(argv[0], run_name="__main__")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: for the tests
    sys.path[0] = os.getcwd()  # not the folder of this file, some of which have the names of packages
    for name in PRELOADED:
        import_module(name)
    gc.freeze()
    if argv := serve_forks(socket.socket(fileno=int(sys.argv[1]))):
        run(argv)


if __name__ == "__main__":
    main()
