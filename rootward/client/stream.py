"""A generation as the SDK's caller sees it: deltas, then the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self, TypeVar

import grpc

from rootward.client.codec import Received, delta_from_pb
from rootward.client.connection import Connection, Retries
from rootward.client.loop import ClosedError
from rootward.client.types import GenerationResult, TokenDelta
from rootward.errors import APIConnectionError, APIError, APITimeoutError, StreamInterruptedError, UnavailableError
from rootward.v1 import generate_pb2, generate_pb2_grpc
from rootward.wire.status import api_error

Chunk = generate_pb2.GenerateChunk
T = TypeVar("T")


class AsyncStream:
    """Deltas of one generation. Iterate once; leaving the loop or the context cancels the generation."""

    def __init__(self, connection: Connection, request: generate_pb2.GenerateRequest, retries: Retries):
        self._connection, self._request, self._retries = connection, request, retries
        self._call: Any = None
        self._over = self._attempted = False
        self._received = [Received(index) for index in range(max(1, request.sampling.n))]
        self._usage = generate_pb2.Usage()

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def over(self) -> bool:
        """Nothing more comes."""
        return self._over

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        try:
            while (chunk := await self._next()) is not None:
                yield delta_from_pb(chunk)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the generation on the server; what came so far stays in `get_final_result`."""
        self._over = True
        if self._call is not None:
            self._call.cancel()

    async def get_final_result(self) -> GenerationResult:
        """Read what is left, then the whole generation. `finish_reason` is "cancelled" if it was."""
        while await self._next() is not None:
            pass
        return self._result()

    async def _next(self) -> Chunk | None:
        """The next chunk, or None at the end."""
        if self._over:
            return None
        try:
            chunk = await self._chunk()
        except BaseException as error:
            self.cancel()
            if self._begun and isinstance(error, APIError):
                raise self._interrupted(error) from error
            raise
        if chunk is None:
            self._over = True
        else:
            self._take(chunk)
        return chunk

    async def _chunk(self) -> Chunk | None:
        if self._call is None:
            return await self._retries.first(self._begin)
        try:
            return await _read(self._call)
        except APIError as error:
            if self._request.sampling.n > 1 or not self._retries.resumes(error):
                raise
            return await self._retries.first(self._begin)

    async def _begin(self, timeout_s: float) -> Chunk | None:
        """One attempt, up to its first chunk. Whatever came before the attempt is never generated anew: the request goes on by its id."""
        if self._attempted:
            held = self._received[0].token_ids
            self._request.resume_offset = len(held)
            self._request.resume_tokens.ids[:] = held
        self._attempted = self._request.sampling.n <= 1
        stub = generate_pb2_grpc.InferenceStub(self._connection.channel())
        call: Any = stub.GenerateStream(self._request, timeout=timeout_s, metadata=self._connection.metadata())
        try:
            chunk = await _read(call)
        except BaseException:
            call.cancel()
            raise
        self._call = call
        return chunk

    @property
    def _begun(self) -> bool:
        return any(one.last is not None for one in self._received)

    def _take(self, chunk: Chunk) -> None:
        if chunk.index >= len(self._received):
            raise APIError(f"the server sent choice {chunk.index} of {len(self._received)}")
        self._received[chunk.index].take(chunk)
        if chunk.HasField("usage"):
            self._usage = chunk.usage

    def _result(self) -> GenerationResult:
        choices = tuple(one.result(self._usage, self.request_id) for one in self._received)
        return replace(choices[0], choices=choices)

    def _interrupted(self, error: APIError) -> APIError:
        lost = isinstance(error, APIConnectionError | UnavailableError) and not isinstance(error, APITimeoutError)
        return StreamInterruptedError(str(error), self._result()) if lost else error


class Stream:
    """`AsyncStream` without an event loop."""

    def __init__(self, stream: AsyncStream, run: Callable[[Coroutine[Any, Any, Any]], Any]):
        self._stream, self._run = stream, run

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
            while (delta := self._run(next_or_none(deltas))) is not None:
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


async def _read(call: Any) -> Chunk | None:
    """The next message of a call, None at its end and when it was cancelled here. APIError for a failed status."""
    try:
        message = await call.read()
    except grpc.RpcError as error:
        raise api_error(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return None
    return message if isinstance(message, Chunk) else None


async def next_or_none(items: AsyncIterator[T]) -> T | None:
    """The next one, None at the end."""
    return await anext(items, None)
