"""A real Redis for tests."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from support.processes import free_port, wait_until

from gateway.local_redis import redis_command


def _answers(port: int) -> bool:
    try:
        with redis.Redis(port=port, socket_connect_timeout=1) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


@contextmanager
def running_redis(port: int = 0) -> Iterator[str]:
    """URL of a fresh Redis on loopback that keeps nothing on disk."""
    port = port or free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(redis_command(port, folder), stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: _answers(port), what="Redis")
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()
