"""The life of a service process: start, say where it listens, serve, drain on SIGTERM, end with an exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import uvloop

from rootward.errors import ConfigurationError
from rootward.wire.server import RpcServer

Drain = Callable[[], Awaitable[object]]


def run_service(role: str, main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a service's main; a mistake of the operator is one line on stderr and its exit code, never a traceback.

    On uvloop: a message passes through several tasks and threads, whose hand-overs cost half as much on it."""
    try:
        uvloop.run(main())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is done: a late second signal must not spoil the exit code
    except ConfigurationError as error:
        print(f"rootward {role}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:
        logging.getLogger(role).exception("ended by an internal error")
        return 1
    return 0


def announce(role: str, address: str) -> None:
    """The line that whoever started the process waits for. All that was loaded until now stays: collections need not look at it."""
    gc.collect()
    gc.freeze()
    print(f"rootward {role} listening on {address}", flush=True)


async def until_stopped(
    server: RpcServer, drain: Drain, shutdown_timeout_s: float, *, ended: Sequence[asyncio.Future[None]] = ()
) -> None:
    """Serve until SIGTERM or SIGINT; then refuse new work and let running work end within the limit. A second signal ends at once.

    `ended`: what the service lives by, its own loop for one. When one of them ends by itself, so does the process (RuntimeError), for
    whoever supervises it to start another.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.put_nowait, None)
    first = asyncio.ensure_future(asked.get())
    await asyncio.wait({first, *ended}, return_when=asyncio.FIRST_COMPLETED)
    await server.set_ready(False)
    if not first.done():
        first.cancel()
        raise RuntimeError("what the service lives by has ended")
    draining, again = asyncio.ensure_future(drain()), asyncio.ensure_future(asked.get())
    await asyncio.wait({draining, again}, timeout=shutdown_timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, again):
        task.cancel()
    await asyncio.gather(draining, again, return_exceptions=True)
