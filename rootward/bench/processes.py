"""Services as processes on loopback: started by module name, waited for by the line they print, stopped at the end."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from rootward.errors import ConfigurationError

START_S = 120.0
STOP_S = 10.0
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
