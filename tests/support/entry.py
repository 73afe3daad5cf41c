"""`python entry.py MODULE flags…`: a service with two weak points for tests of failures.

SIGUSR1 makes the wall clock of our code jump by an hour, forwards and back in turn. (Not that of gRPC: it converts monotonic deadlines
whenever it is asked, so that a jump of the system's clock does not matter, and one that Python sees alone would.)

A verifier ends with a segmentation fault, before the first token, by every prompt that begins with DEADLY: what a bug in native code would
do.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

DEADLY = (38, 39)
JUMP_S = 3600.0


def weaken_clock() -> None:
    from rootward.clock import SystemClock

    offset_s = 0.0

    def jump(*_: object) -> None:
        nonlocal offset_s
        offset_s = JUMP_S - offset_s

    SystemClock.wall = lambda self: time.time() + offset_s
    signal.signal(signal.SIGUSR1, jump)


def weaken_verifier() -> None:
    from verifier_service.service import VerifierService

    honest = VerifierService.generate

    async def dying() -> AsyncIterator[Any]:
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGSEGV)
        yield

    VerifierService.generate = lambda self, request: (
        dying() if tuple(request.prompt[:2]) == DEADLY else honest(self, request)
    )


if __name__ == "__main__":
    module, *flags = sys.argv[1:]
    sys.path[0] = str(Path(__file__).parents[2])  # not this folder, whose names are those of libraries
    weaken_clock()
    if module == "verifier_service":
        weaken_verifier()
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
