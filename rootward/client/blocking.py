"""`Client`: `AsyncClient` for code without an event loop. An event loop on a daemon thread runs its calls."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent import futures
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from rootward.client.asynchronous import DEFAULT_TARGET, AsyncClient, AsyncStream
from rootward.client.types import GenerationResult, Prompt, RequestOptions, SessionEvent, TokenDelta
from rootward.errors import APIError

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0


class ClosedError(APIError):
    """The client was closed, or was created before this process was forked from another one."""


class LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rootward-client", daemon=True)
        self._thread.start()
        self._closed = False
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; Ctrl-C cancels it. ClosedError after `close`, and in a forked process."""
        if not (self._thread.is_alive() or self._closed):  # threads do not survive a fork
            work.close()
            raise ClosedError("the client was created before this process was forked; create one in each process")
        with self._lock:
            if self._closed:
                work.close()
                raise ClosedError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except futures.CancelledError:
            if self._closed:
                raise ClosedError("the client was closed during the call") from None
            raise
        except BaseException:
            future.cancel()
            raise

    def start(self, callback: Callable[[], object]) -> None:
        """Have the loop call `callback`, without waiting for it; nothing after `close`.

        For the ends of generators: the garbage collector may run them in the loop's own thread, or while the interpreter exits and the
        thread is gone, where waiting would never end. Nor is the lock taken, which the interrupted code may hold.
        """
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, then end the calls of other threads and the thread. Idempotent; a forked process leaves them to the other one."""
        if not self._thread.is_alive():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(_then_cancel_others(last()), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()


class Stream:
    """`AsyncStream` without an event loop."""

    def __init__(self, stream: AsyncStream, thread: LoopThread):
        self._stream = stream
        self._thread = thread

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[TokenDelta]:
        deltas = self._stream.__aiter__()
        try:
            while (delta := self._thread.run(_next_or_none(deltas))) is not None:
                yield delta
        finally:
            self._thread.start(self._stream.cancel)

    def cancel(self) -> None:
        """End the generation on the server."""
        if not self._stream.over:
            with suppress(ClosedError):
                self._thread.run(self._stream.__aexit__())

    def get_final_result(self) -> GenerationResult:
        """Read what is left, then the whole generation."""
        return self._thread.run(self._stream.get_final_result())


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """A method of `AsyncClient` as a method of `Client`, which returns its result."""

    @wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(method(self._client, *args, **kwargs))

    call.__qualname__ = f"Client.{method.__name__}"
    # Frameworks follow `__wrapped__` to find out whether a function is asynchronous.
    call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    del call.__wrapped__
    return call


class Client:
    """`AsyncClient` for code without an event loop. Its calls have the names and arguments of `AsyncClient`, and return their results."""

    def __init__(self, target: str = DEFAULT_TARGET, **options: Any):
        self._client = AsyncClient(target, **options)
        self._thread = LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        self._thread.close(self._client.close)

    def with_options(self, *, timeout: float | None = None, max_retries: int | None = None) -> Self:
        """The same client with other limits. Close only one of them."""
        other = copy.copy(self)
        other._client = self._client.with_options(timeout=timeout, max_retries=max_retries)
        return other

    def stream(self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]) -> Stream:
        """See `AsyncClient.stream`."""
        return Stream(self._client.stream(prompt, **options), self._thread)

    generate = _blocking(AsyncClient.generate)
    generate_many = _blocking(AsyncClient.generate_many)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    server_info = _blocking(AsyncClient.server_info)
    load = _blocking(AsyncClient.load)
    abort = _blocking(AsyncClient.abort)
    drain = _blocking(AsyncClient.drain)

    def watch(self, *, session_id: str = "", request_id: str = "") -> Iterator[SessionEvent]:
        """See `AsyncClient.watch`."""
        events = self._client.watch(session_id=session_id, request_id=request_id)
        try:
            while (event := self._thread.run(_next_or_none(events))) is not None:
                yield event
        finally:
            # The coroutine is made in the loop: one that never runs would warn.
            self._thread.start(lambda: asyncio.ensure_future(events.aclose()))


async def _then_cancel_others(work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, then cancel all other tasks of the loop, since nobody would wake those that wait for them."""
    await work
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _next_or_none(items: AsyncIterator[T]) -> T | None:
    """The next item, None at the end."""
    return await anext(items, None)
