"""Services as processes on loopback: started by module name, waited for by the line they print, stopped at the end."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.request import urlopen

from rootward.errors import ConfigurationError

START_S = 120.0
STOP_S = 10.0
SCRAPE_S = 10.0
_LISTENING = re.compile(r"listening on (\S+:\d+)")


def service(module: str, *flags: str) -> AbstractAsyncContextManager[str]:
    """The gRPC address of a running service on a free port. ConfigurationError with its exit code when it does not start."""
    return address_of(sys.executable, "-m", module, "--listen", "127.0.0.1:0", *flags)


@asynccontextmanager
async def address_of(*command: str) -> AsyncIterator[str]:
    """What a process says that it listens on; the process is stopped at the end."""
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        yield await _address(process, command)
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _address(process: asyncio.subprocess.Process, command: Sequence[str]) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        while line := await process.stdout.readline():
            if found := _LISTENING.search(line.decode(errors="replace")):
                return found[1]
    raise ConfigurationError(
        f"{' '.join(command[1:3])}: did not start, exit code {await process.wait()}; run it by hand to see why"
    )


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scraped(admin: str) -> dict[str, float]:
    """Metrics at an admin port: name → value, labels summed up; "name:value of its only label" → value beside it."""
    with urlopen(f"http://{admin}/metrics", timeout=SCRAPE_S) as answer:
        text = answer.read().decode()
    found: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            bare, _, labels = name.partition("{")
            found[bare] += float(value)
            if labels:
                found[f"{bare}:{labels.split(chr(34))[1]}"] += float(value)
    return found
