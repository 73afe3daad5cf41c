"""A real Redis for tests."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import redis
from support.processes import free_port, wait_until

from gateway.local import redis_command


def _answers(port: int) -> bool:
    try:
        with redis.Redis(port=port, socket_connect_timeout=1) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


class RedisProcess:
    """A fresh Redis on loopback that keeps nothing on disk; it may be killed and started again on its port.

    With a `config` file it is a Sentinel.
    """

    def __init__(self, port: int = 0, *options: str, config: Path | None = None) -> None:
        self.port, self._options, self._config = port or free_port(), options, config
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        program, *flags = redis_command(self.port, self._folder.name)
        command = [program, *flags, *self._options]
        if self._config is not None:
            command = [program, str(self._config), "--sentinel", "--port", str(self.port), "--bind", "127.0.0.1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self._is_up, what="Redis")

    def _is_up(self) -> bool:
        assert self._process is not None
        assert (code := self._process.poll()) is None, f"Redis on port {self.port} has ended with {code}"
        return _answers(self.port)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9; also of a stopped one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()


@contextmanager
def running_redis(port: int = 0) -> Iterator[str]:
    """URL of a fresh Redis."""
    with RedisProcess(port) as process:
        yield process.url
