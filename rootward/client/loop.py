"""An event loop for code that has none."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rootward.errors import APIError

T = TypeVar("T")

CLOSE_S = 30.0  # for the connections to close


class ClosedError(APIError):
    """The client was closed."""


class LoopThread:
    """An event loop on a daemon thread, started on first use."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; Ctrl-C cancels it."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._started())
        except ClosedError:
            work.close()
            raise
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, then end the thread."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
            self._closed = True
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(last(), loop).result(CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_S)
        loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                name = f"rootward-client-{next(self._numbers)}"
                self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
                self._thread.start()
            return self._loop
