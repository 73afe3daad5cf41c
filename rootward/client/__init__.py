"""The Python SDK: `AsyncClient`, and `Client`, the same for code without an event loop.

    client = Client("127.0.0.1:50051")
    result = client.generate("def fib(n):", sampling=SamplingParams(temperature=0, max_tokens=64))
    with client.stream("def fib(n):") as stream:
        for delta in stream:
            print(delta.text, end="")
        result = stream.get_final_result()

Errors are those of `rootward.errors` below `APIError`. Every call has a deadline. Leaving a stream cancels it on the server.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from rootward.client.codec import Messages, Prompt, event_from_pb, load_from_pb, request_to_pb, server_info_from_pb
from rootward.client.connection import ApiKey, Connection, Retries
from rootward.client.loop import LoopThread
from rootward.client.stream import AsyncStream, Stream, next_or_none
from rootward.client.types import (
    GenerationResult,
    KeepAlive,
    Load,
    ModelCard,
    SamplingParams,
    ServerInfo,
    SessionEvent,
    Speculation,
    SpeculationStats,
    Timing,
    TokenDelta,
    TokenLogprob,
    Usage,
    VerifierLoad,
    Worker,
)
from rootward.v1 import control_pb2, control_pb2_grpc, generate_pb2, generate_pb2_grpc
from rootward.wire.status import api_error

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "GenerationResult",
    "KeepAlive",
    "Load",
    "ModelCard",
    "SamplingParams",
    "ServerInfo",
    "SessionEvent",
    "Speculation",
    "SpeculationStats",
    "Stream",
    "Timing",
    "TokenDelta",
    "TokenLogprob",
    "Usage",
    "VerifierLoad",
    "Worker",
]

DEFAULT_TARGET = "127.0.0.1:50051"
SHORT_TIMEOUT_S = 30.0  # of calls that do not generate


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
        keepalive: KeepAlive | None = None,
        channels: int = 2,
        channel_options: Mapping[str, str | int] | None = None,
        metadata: Mapping[str, str] | None = None,
    ):
        """`target` is host:port, grpc://host:port, grpcs://host:port (TLS) or dns:///name:port; several gateways have commas between,
        as in "one:50051,two:50051": what one leaves unfinished another finishes. Times in seconds.
        """
        self._connection = Connection(
            target,
            api_key=api_key,
            connect_timeout_s=connect_timeout,
            tls=tls,
            keepalive=keepalive or KeepAlive(),
            num_channels=channels,
            channel_options=channel_options or {},
            metadata=metadata or {},
        )
        self._timeout_s, self._max_retries = timeout, max_retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    def with_options(self, *, timeout: float | None = None, max_retries: int | None = None) -> Self:
        """The same client, on the same connections, with other limits."""
        other = copy.copy(self)
        other._timeout_s = self._timeout_s if timeout is None else timeout
        other._max_retries = self._max_retries if max_retries is None else max_retries
        return other

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        sampling: SamplingParams | None = None,
        speculation: Speculation | str | bool | None = None,
        model: str = "",
        request_id: str = "",
        session_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncStream:
        """Text as it becomes final. A prompt is text or token ids; `messages` go through the model's chat template.

        A lower `priority` runs earlier. Prompts with different `cache_salt` never share cached prefixes.
        """
        wanted = request_to_pb(
            prompt,
            messages,
            sampling or SamplingParams(),
            speculation,
            model=model,
            request_id=request_id or uuid.uuid4().hex,
            session_id=session_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        return AsyncStream(self._connection, wanted, self._retries(self._timeout_s))

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        sampling: SamplingParams | None = None,
        speculation: Speculation | str | bool | None = None,
        model: str = "",
        request_id: str = "",
        session_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> GenerationResult:
        """The whole text at once; otherwise as `stream`."""
        async with self.stream(
            prompt,
            messages=messages,
            sampling=sampling,
            speculation=speculation,
            model=model,
            request_id=request_id,
            session_id=session_id,
            priority=priority,
            cache_salt=cache_salt,
        ) as stream:
            return await stream.get_final_result()

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Token ids as the server makes them of a prompt, or with special tokens or without if that is said."""
        request = generate_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return tuple((await self._call(self._inference().Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        request = generate_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return str((await self._call(self._inference().Detokenize, request)).text)

    async def server_info(self) -> ServerInfo:
        """Version, models, verifiers and drafters."""
        request = control_pb2.GetServerInfoRequest()
        return server_info_from_pb(await self._call(self._control().GetServerInfo, request))

    async def load(self) -> Load:
        """How busy the gateway is."""
        return load_from_pb(await self._call(self._control().GetLoad, control_pb2.GetLoadRequest()))

    async def watch(self, *, session_id: str = "", request_id: str = "") -> AsyncGenerator[SessionEvent, None]:
        """What becomes of the requests of a session, until the loop is left, or of one request, until it ends.

        What runs already is told of first. Of several gateways one is heard, and it tells what it drives itself. Where the gateway has
        keys this needs one with the scope "admin"; it then sees all tenants.
        """
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
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        return tuple((await self._call(self._control().Abort, control_pb2.AbortRequest(request_ids=ids))).aborted)

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

        return await self._retries(min(self._timeout_s, SHORT_TIMEOUT_S)).first(attempt)


class Client:
    """`AsyncClient` for code without an event loop: the same arguments, the same calls, one private loop on a thread."""

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

    def stream(self, prompt: Prompt | None = None, **options: Any) -> Stream:
        """See `AsyncClient.stream`."""
        return Stream(self._client.stream(prompt, **options), self._thread.run)

    def generate(self, prompt: Prompt | None = None, **options: Any) -> GenerationResult:
        """See `AsyncClient.generate`."""
        return self._thread.run(self._client.generate(prompt, **options))

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
        """How busy the gateway is."""
        return self._thread.run(self._client.load())

    def watch(self, *, session_id: str = "", request_id: str = "") -> Iterator[SessionEvent]:
        """See `AsyncClient.watch`."""
        events = self._client.watch(session_id=session_id, request_id=request_id)
        try:
            while (event := self._thread.run(next_or_none(events))) is not None:
                yield event
        finally:
            self._thread.run(events.aclose())

    def abort(self, request_ids: str | Sequence[str]) -> tuple[str, ...]:
        """End generations; returns the ids that were running."""
        return self._thread.run(self._client.abort(request_ids))
