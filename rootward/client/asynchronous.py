"""`AsyncClient`: the calls of a gateway, and a generation as it arrives."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeGuard, Unpack, cast

import grpc
from google.protobuf.message import Message

from rootward.client.codec import LOAD, SERVER_INFO, Received, event_from_pb, request_to_pb, set_field
from rootward.client.connection import ApiKey, Connection, Retries
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
from rootward.errors import APIConnectionError, APIError, APITimeoutError, StreamInterruptedError, UnavailableError
from rootward.v1 import control_pb2, control_pb2_grpc, generate_pb2, generate_pb2_grpc
from rootward.wire.status import api_error

DEFAULT_TARGET = "127.0.0.1:50051"
SHORT_TIMEOUT_S = 30.0  # of calls that do not generate
LONGEST_TIMEOUT_S = 365 * 86400.0  # gRPC takes times of centuries, and infinity, for deadlines that have passed

Chunk = generate_pb2.GenerateChunk


class AsyncClient:
    """A gateway. Opens connections on first use; close it, or use it as a context manager."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: ApiKey | None = None,
        timeout: float = 600.0,
        connect_timeout: float = 5.0,
        max_retries: int = 2,
        tls: grpc.ChannelCredentials | None = None,
        channels: int = 2,
        channel_options: Mapping[str, str | int] | None = None,
        metadata: Mapping[str, str] | None = None,
    ):
        """`target` is host:port, grpc://host:port, grpcs://host:port (TLS) or dns:///name:port; several gateways have commas between,
        as in "one:50051,two:50051": a generation that one of them loses is resumed at another. Times in seconds. ValueError for a
        timeout of 0 or less, or of more than a year. channel_options: arguments of gRPC channels, as "grpc.keepalive_time_ms".
        """
        self._connection = Connection(
            target,
            api_key=api_key,
            connect_timeout_s=connect_timeout,
            tls=tls,
            num_channels=channels,
            channel_options=channel_options or {},
            metadata=metadata or {},
        )
        self._timeout_s = _checked(timeout)
        self._max_retries = max_retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    def with_options(self, *, timeout: float | None = None, max_retries: int | None = None) -> Self:
        """The same client, on the same connections, with other limits."""
        other = copy.copy(self)
        other._timeout_s = self._timeout_s if timeout is None else _checked(timeout)
        other._max_retries = self._max_retries if max_retries is None else max_retries
        return other

    def stream(self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]) -> AsyncStream:
        """Text as it becomes final. The prompt is text or token ids; options: see `RequestOptions`."""
        return AsyncStream(self._connection, request_to_pb(prompt, **options), self._retries(self._timeout_s))

    async def generate(self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]) -> GenerationResult:
        """The whole text at once; otherwise as `stream`."""
        async with self.stream(prompt, **options) as stream:
            return await stream.get_final_result()

    async def generate_many(
        self, prompts: Sequence[Prompt | Messages], *, at_once: int = 32, **options: Unpack[RequestOptions]
    ) -> list[GenerationResult]:
        """The texts of several prompts, in their order, with the same options. At most `at_once` are asked for at one time.

        A prompt is text, token ids, or the messages of a chat. The first generation that fails ends the others and raises. ValueError for
        a `request_id`, because one id is of one request, and for `at_once` below 1.
        """
        if at_once < 1:
            raise ValueError(f"at_once: {at_once} is below 1; use at least 1")
        if options.get("request_id"):
            raise ValueError(f"request_id: {options['request_id']!r} is of one request; leave it out")
        results: dict[int, GenerationResult] = {}
        left = iter(enumerate(prompts))

        async def work() -> None:
            for i, prompt in left:
                if _is_chat(prompt):
                    chat: RequestOptions = {**options, "messages": prompt}
                    results[i] = await self.generate(**chat)
                else:
                    results[i] = await self.generate(cast(Prompt, prompt), **options)

        tasks = [asyncio.create_task(work()) for _ in range(min(at_once, len(prompts)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [results[i] for i in range(len(prompts))]

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Token ids of a text. add_special_tokens: None as the server does for prompts."""
        request = generate_pb2.TokenizeRequest()
        _set_fields(request, model=model, text=text, add_special_tokens=add_special_tokens)
        return tuple((await self._call(self._inference().Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        request = generate_pb2.DetokenizeRequest()
        _set_fields(request, model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call(self._inference().Detokenize, request)).text)

    async def server_info(self) -> ServerInfo:
        """Version, models, verifiers and drafters."""
        request = control_pb2.GetServerInfoRequest()
        return SERVER_INFO.from_pb(await self._call(self._control().GetServerInfo, request))

    async def load(self) -> Load:
        """Numbers of running and waiting requests, and counters of the gateway."""
        return LOAD.from_pb(await self._call(self._control().GetLoad, control_pb2.GetLoadRequest()))

    async def watch(self, *, session_id: str = "", request_id: str = "") -> AsyncGenerator[SessionEvent, None]:
        """Events of the requests of a session, until the caller stops reading, or of one request, until it ends.

        Requests that run already come first. Of several gateways one answers, with the requests that it drives itself. Where the gateway
        has keys this needs one with the scope "admin", which sees all tenants. ValueError if both ids are given.
        """
        if session_id and request_id:
            raise ValueError(f"request_id: {request_id!r} beside session_id {session_id!r}; watch one of them")
        wanted = {"session_id": session_id} if session_id else {"request_id": request_id}
        request = control_pb2.WatchSessionRequest(**wanted)
        call = self._control().WatchSession(request, metadata=self._connection.metadata())
        try:
            async for message in call:
                yield event_from_pb(message)
        except grpc.RpcError as error:
            raise api_error(error) from error
        finally:
            call.cancel()

    async def abort(self, request_ids: str | Sequence[str]) -> tuple[str, ...]:
        """End generations; returns the ids that were running."""
        request = control_pb2.AbortRequest()
        _set_fields(request, request_ids=[request_ids] if isinstance(request_ids, str) else request_ids)
        return tuple((await self._call(self._control().Abort, request)).aborted)

    async def drain(self, *, timeout_s: float = 0.0) -> int:
        """Have the gateway refuse new requests, let running ones end, and end itself; returns how many are running. Does not wait.

        timeout_s: running requests are ended after this time (0: the gateway's `shutdown_timeout_s`); clients resume them elsewhere.
        Where the gateway has keys this needs one with the scope "admin". ValueError if the target names several gateways, and for a time
        below 0 or of more than a year.
        """
        if not 0 <= timeout_s <= LONGEST_TIMEOUT_S:
            fix = f"use seconds from 0 to {LONGEST_TIMEOUT_S:.0f}"
            raise ValueError(f"timeout_s: {timeout_s} is no time to wait; {fix}")
        if len(self._connection.addresses) > 1:
            several = ", ".join(self._connection.addresses)
            raise ValueError(f"target: {several} are several gateways; drain each with a client of its own")
        request = control_pb2.DrainRequest(timeout_s=timeout_s)
        return int((await self._call(self._control().Drain, request)).num_running)

    def _inference(self) -> Any:
        return generate_pb2_grpc.InferenceStub(self._connection.channel())

    def _control(self) -> Any:
        return control_pb2_grpc.ControlStub(self._connection.channel())

    def _retries(self, timeout_s: float) -> Retries:
        return Retries(timeout_s, self._max_retries)

    async def _call(self, method: Any, request: object) -> Any:
        async def attempt(timeout_s: float) -> Any:
            try:
                return await method(request, timeout=timeout_s, metadata=self._connection.metadata())
            except grpc.RpcError as error:
                raise api_error(error) from error

        return await self._retries(min(self._timeout_s, SHORT_TIMEOUT_S)).attempt_until_success(attempt)


class AsyncStream:
    """Deltas of one generation. Iterate once; leaving the loop or the context cancels the generation."""

    def __init__(self, connection: Connection, request: generate_pb2.GenerateRequest, retries: Retries):
        self._connection = connection
        self._request = request
        self._retries = retries
        self._call: Any = None
        self._over = self._attempted = False
        self._received = [Received(index) for index in range(max(1, request.sampling.n))]
        self._usage = generate_pb2.Usage()

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def over(self) -> bool:
        """Whether the generation has ended."""
        return self._over

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        try:
            while (delta := await self._next()) is not None:
                yield delta
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the generation on the server; `get_final_result` keeps the part that has arrived."""
        self._over = True
        if self._call is not None:
            self._call.cancel()

    async def get_final_result(self) -> GenerationResult:
        """Read what is left, then the whole generation. `finish_reason` is "cancelled" if it was."""
        while await self._next() is not None:
            pass
        return self._result()

    async def _next(self) -> TokenDelta | None:
        """None at the end."""
        if self._over:
            return None
        try:
            chunk = await self._chunk()
        except BaseException as error:
            self.cancel()
            lost = isinstance(error, APIConnectionError | UnavailableError) and not isinstance(error, APITimeoutError)
            if lost and any(one.last is not None for one in self._received):
                raise StreamInterruptedError(str(error), self._result()) from error
            raise
        if chunk is None:
            self._over = True
            return None
        if chunk.index >= len(self._received):
            raise APIError(f"the server sent choice {chunk.index} of {len(self._received)}")
        if chunk.HasField("usage"):
            self._usage = chunk.usage
        return self._received[chunk.index].take(chunk)

    async def _chunk(self) -> Chunk | None:
        if self._call is not None:
            try:
                return await _read(self._call)
            except APIError as error:
                if self._request.sampling.n > 1 or not self._retries.allow_resume(error):
                    raise
        return await self._retries.attempt_until_success(self._begin)

    async def _begin(self, timeout_s: float) -> Chunk | None:
        """One attempt, up to its first chunk. Tokens received before are never generated again: the request is resumed by its id."""
        if self._attempted:
            held = self._received[0].joined("token_ids")
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

    def _result(self) -> GenerationResult:
        choices = tuple(one.result(self._usage, self.request_id) for one in self._received)
        return replace(choices[0], choices=choices)


def _checked(timeout: float) -> float:
    """The timeout. ValueError if a call could not have it."""
    if not 0 < timeout <= LONGEST_TIMEOUT_S:
        raise ValueError(f"timeout: {timeout} is no time to wait; use seconds above 0, at most {LONGEST_TIMEOUT_S:.0f}")
    return timeout


def _set_fields(message: Message, **values: object) -> None:
    """Set fields of a request. None leaves one unset. ValueError, naming the field, for a value that it cannot hold."""
    for name, value in values.items():
        if value is not None:
            set_field(message, name, value)


def _is_chat(prompt: Prompt | Messages) -> TypeGuard[Messages]:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


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
