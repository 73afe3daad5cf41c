"""One process of a local deployment: started, watched, started again when it dies, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import structlog

from rootward.errors import ConfigurationError

log = structlog.get_logger()

RESTART_AFTER_S = 0.5
MAX_FAILED_STARTS = 5  # in a row, after which the deployment gives up
KILL_AFTER_S = 5.0  # beyond the time it was given to stop


class Child:
    """`run` keeps the process alive until `stop`; `ready` is set while it serves.

    `wait_ready` is told the process and returns when it serves; RuntimeError when it will not.
    """

    def __init__(
        self,
        role: str,
        command: Sequence[str],
        wait_ready: Callable[[Process], Awaitable[str]],
        *,
        log_to: int | None = None,
    ):
        self.role, self.address = role, ""
        self.ready = asyncio.Event()
        self._command, self._wait_ready, self._log_to = list(command), wait_ready, log_to
        self._process: Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        """Of the running process; 0 while there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    async def run(self) -> None:
        """ConfigurationError with the exit code of the process when it does not start."""
        failed = 0
        while not self._stopping:
            was_ready = await self._once()
            failed = 0 if was_ready else failed + 1
            if self._stopping:
                return
            code = self._process.returncode if self._process else None
            if not self.address or failed >= MAX_FAILED_STARTS:
                known = code if code in (2, 3, 4) else 1
                raise ConfigurationError(f"{self.role}: did not start; its own message is above", exit_code=known)
            log.warning("process_restarts", process=self.role, exit_code=code)
            await asyncio.sleep(RESTART_AFTER_S)

    async def _once(self) -> bool:
        """One life of the process; whether it ever served."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=PIPE,
            stderr=self._log_to,
            start_new_session=True,  # Ctrl-C in a terminal reaches us alone, who stop the processes in order
        )
        served = False
        try:
            self.address = await self._wait_ready(process)
            served = True
            self.ready.set()
            await _discard(process)
        except RuntimeError:
            pass
        finally:
            self.ready.clear()
            await process.wait()
        return served

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL when it has not ended after `grace_s` and a little more."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s + KILL_AFTER_S):
                await process.wait()
        except TimeoutError:
            log.error("process_killed", process=self.role, after_s=grace_s + KILL_AFTER_S)
            self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._stopping = True
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


async def listening_line(process: Process) -> str:
    """The address in "rootward <role> listening on <address>…"; RuntimeError when the output ends without it."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        _, found, rest = line.decode(errors="replace").partition(" listening on ")
        if found:
            return rest.strip()
    raise RuntimeError("it ended before it listened")


async def _discard(process: Process) -> None:
    """Read until the output ends, that is until the process does: a full pipe would block it."""
    assert process.stdout is not None
    while await process.stdout.read(65536):
        pass
