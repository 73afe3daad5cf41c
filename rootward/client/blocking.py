"""`Client`: `AsyncClient` for code without an event loop. An event loop on a daemon thread runs its calls."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar, Unpack

from rootward.client.asynchronous import DEFAULT_TARGET, AsyncClient, AsyncStream
from rootward.client.types import (
    GenerationResult,
    Load,
    Messages,
    Prompt,
    RequestOptions,
    ServerInfo,
    SessionEvent,
    TokenDelta,
)
from rootward.errors import APIError

T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0


class ClosedError(APIError):
    """The client was closed."""


class LoopThread:
    """An event loop on a daemon thread."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        name = f"rootward-client-{next(self._numbers)}"
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._closed = False
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; Ctrl-C cancels it. ClosedError after `close`."""
        with self._lock:
            if self._closed:
                work.close()
                raise ClosedError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, then end the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(last(), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()


class Stream:
    """`AsyncStream` without an event loop."""

    def __init__(self, stream: AsyncStream, run: Callable[[Coroutine[Any, Any, Any]], Any]):
        self._stream = stream
        self._run = run

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
            while (delta := self._run(_next_or_none(deltas))) is not None:
                yield delta
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the generation on the server."""
        if not self._stream.over:
            with suppress(ClosedError):
                self._run(self._stream.__aexit__())

    def get_final_result(self) -> GenerationResult:
        """Read what is left, then the whole generation."""
        result: GenerationResult = self._run(self._stream.get_final_result())
        return result


class Client:
    """`AsyncClient` for code without an event loop: the same arguments and calls."""

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
        return Stream(self._client.stream(prompt, **options), self._thread.run)

    def generate(self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]) -> GenerationResult:
        """See `AsyncClient.generate`."""
        return self._thread.run(self._client.generate(prompt, **options))

    def generate_many(
        self, prompts: Sequence[Prompt | Messages], *, at_once: int = 32, **options: Unpack[RequestOptions]
    ) -> list[GenerationResult]:
        """The texts of several prompts, in their order. See `AsyncClient.generate_many`."""
        return self._thread.run(self._client.generate_many(prompts, at_once=at_once, **options))

    def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Token ids as the server would make them of a prompt."""
        return self._thread.run(self._client.tokenize(text, model=model, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        call = self._client.detokenize(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        return self._thread.run(call)

    def server_info(self) -> ServerInfo:
        """Version, models, verifiers and drafters."""
        return self._thread.run(self._client.server_info())

    def load(self) -> Load:
        """See `AsyncClient.load`."""
        return self._thread.run(self._client.load())

    def watch(self, *, session_id: str = "", request_id: str = "") -> Iterator[SessionEvent]:
        """See `AsyncClient.watch`."""
        events = self._client.watch(session_id=session_id, request_id=request_id)
        try:
            while (event := self._thread.run(_next_or_none(events))) is not None:
                yield event
        finally:
            self._thread.run(events.aclose())

    def abort(self, request_ids: str | Sequence[str]) -> tuple[str, ...]:
        """End generations; returns the ids that were running."""
        return self._thread.run(self._client.abort(request_ids))

    def drain(self, *, timeout_s: float = 0.0) -> int:
        """Have the gateway end once its running requests have. See `AsyncClient.drain`."""
        return self._thread.run(self._client.drain(timeout_s=timeout_s))


async def _next_or_none(items: AsyncIterator[T]) -> T | None:
    """The next item, None at the end."""
    return await anext(items, None)
