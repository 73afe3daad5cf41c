"""The remote implementations of the ports: a drafter and a verifier behind an address.

Code above a port uses them like the objects that they stand for: values in, values out, `ServiceError` for every failure. Both are
context managers; the channel is opened on first use, inside the event loop that uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Self, TypeVar

import grpc

from rootward.core.frames import FromDrafter, ToDrafter
from rootward.core.requests import Committed, VerifierRequest
from rootward.errors import ConfigurationError, IncompatiblePair, ServiceError, Unavailable
from rootward.ports import DrafterInfo, VerifierInfo
from rootward.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from rootward.wire import drafter_codec, verifier_codec
from rootward.wire.channel import CALLING, TO_DRAFTER, Transport, open_channel, split_message
from rootward.wire.feed import FeedReader, RunQueue
from rootward.wire.status import from_rpc_error
from rootward.wire.tls import ClientTls

T = TypeVar("T")

DEADLINE_SLACK_S = 1.0  # the service reaches a deadline first: its error says more than that of gRPC
LONGEST_GENERATION_S = 3600.0  # bound of a generation without a deadline


class _Remote:
    """An address and the channel to it."""

    def __init__(
        self, address: str, transport: Transport, tls: ClientTls | None = None, rpc_timeout_s: float = 5.0
    ) -> None:
        self.address = address
        self._transport = transport
        self._tls = tls
        self._rpc_timeout_s = rpc_timeout_s
        self._files = tls.certificates.watch() if tls else None
        self._channels: list[grpc.aio.Channel] = []  # new calls take the last one

    def _channel(self) -> grpc.aio.Channel:
        """The channel for a new call: another one once the certificates have been renewed; calls under way keep theirs."""
        if not self._channels or (self._files is not None and self._files.changed()):
            try:
                self._channels.append(open_channel(self.address, self._transport, self._tls))
            except ConfigurationError:
                if not self._channels:
                    raise
                # In the middle of being replaced: the old ones serve this call, a later one looks again.
        return self._channels[-1]

    def _decoded(self, message: Any, decode: Callable[[Any], T]) -> T:
        """The value of a received message. IncompatiblePair for one that cannot be read; grpc gives None for bytes that are no message."""
        try:
            if message is None:
                raise ValueError("its bytes are no message")
            return decode(message)
        except ValueError as error:
            raise IncompatiblePair(f"{self.address} sent a message that cannot be read: {error}") from error

    async def close(self) -> None:
        """Close the channel; RPCs under way end with Unavailable."""
        channels = self._channels
        self._channels = []
        for channel in channels:
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class RemoteDrafter(_Remote):
    """`ports.Drafter` over one bidirectional stream per session.

    on_frame: called for every message with "sent" or "received" and its size in bytes."""

    def __init__(
        self,
        address: str,
        *,
        tls: ClientTls | None = None,
        rpc_timeout_s: float = 5.0,
        on_frame: Callable[[str, int], None] = lambda direction, num_bytes: None,
    ) -> None:
        super().__init__(address, TO_DRAFTER, tls, rpc_timeout_s)
        self._on_frame = on_frame

    async def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncGenerator[FromDrafter, None]:
        """Frames of the drafter until it ends the stream or `inbound` ends. No deadline; keepalive notices a dead peer.

        Unavailable if the drafter is gone, IncompatiblePair if it sends what cannot be read; errors of `inbound` pass.
        """
        call = drafter_pb2_grpc.DrafterStub(self._channel()).Session()  # type: ignore[call-arg]  # written to by hand
        writer = asyncio.create_task(self._write(call, inbound))
        try:
            while (message := await _next(call)) is not None:
                self._on_frame("received", message.ByteSize())
                yield self._decoded(message, drafter_codec.from_drafter_from_pb)
        except Unavailable:
            if writer.done() and not writer.cancelled() and (failure := writer.exception()) is not None:
                raise failure from None
            raise
        finally:
            call.cancel()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: Any, inbound: AsyncIterator[ToDrafter]) -> None:
        """Send the frames until they end. A broken call ends this without an error: the reader of the call raises it."""
        try:
            async for frame in inbound:
                for part in split_message(drafter_codec.to_drafter_to_pb(frame)):
                    self._on_frame("sent", part.ByteSize())
                    await call.write(part)
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            return
        except Exception:
            call.cancel()
            raise

    async def get_info(self) -> DrafterInfo:
        stub = drafter_pb2_grpc.DrafterStub(self._channel())
        call = stub.GetInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=self._rpc_timeout_s)
        return self._decoded(await _awaited(call), drafter_codec.INFO.from_pb)


class RemoteVerifier(_Remote):
    """`ports.Verifier` over one call per generation and one feed with the committed runs of all of them."""

    def __init__(self, address: str, *, tls: ClientTls | None = None, rpc_timeout_s: float = 5.0) -> None:
        super().__init__(address, CALLING, tls, rpc_timeout_s)
        self._feed: FeedReader | None = None
        self._reading: asyncio.Task[None] | None = None

    async def generate(self, request: VerifierRequest) -> AsyncGenerator[Committed, None]:
        """Runs of committed tokens. Closing the iterator ends the generation at the verifier."""
        deadline_s = LONGEST_GENERATION_S if request.deadline_s is None else request.deadline_s
        feed = await self._opened_feed()
        with feed.subscribed(merging=not request.trees) as (number, runs):
            message = verifier_codec.request_to_pb(request)
            message.feed = feed.name
            message.number = number
            stub = verifier_pb2_grpc.VerifierStub(self._channel())
            call = stub.Generate(message, timeout=max(0.0, deadline_s) + DEADLINE_SLACK_S)
            failure = asyncio.create_task(_failure(call, runs))
            try:
                while True:
                    run = await runs.take()
                    yield run
                    if run.finish is not None:
                        return
            finally:
                call.cancel()
                failure.cancel()
                await asyncio.gather(failure, return_exceptions=True)

    async def _opened_feed(self) -> FeedReader:
        """The one that is open, or another. Unavailable if the verifier does not answer in time."""
        feed = self._feed
        if feed is None or feed.over is not None:
            feed = self._feed = FeedReader(self.address)
            stub = verifier_pb2_grpc.VerifierStub(self._channel())
            call = stub.Feed(verifier_pb2.FeedRequest(feed=feed.name))
            self._reading = asyncio.create_task(feed.read(_messages(call)))
        await feed.opened(self._rpc_timeout_s)
        return feed

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await super().close()

    async def get_info(self) -> VerifierInfo:
        stub = verifier_pb2_grpc.VerifierStub(self._channel())
        call = stub.GetInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=self._rpc_timeout_s)
        return self._decoded(await _awaited(call), verifier_codec.INFO.from_pb)


async def _next(call: Any) -> Any:
    """The next message of a stream, None at its end; ServiceError for a failed status."""
    message = await _awaited(call.read())
    return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]


async def _messages(call: Any) -> AsyncGenerator[Any, None]:
    """All messages of a stream; leaving it cancels the call."""
    try:
        while (message := await _next(call)) is not None:
            yield message
    finally:
        call.cancel()


async def _failure(call: Any, runs: RunQueue) -> None:
    """Pass the failure of a call, if it fails, to the generation whose runs come by the feed."""
    try:
        await _next(call)
    except ServiceError as error:
        runs.put(error)


async def _awaited(pending: Awaitable[T]) -> T:
    """Await a call; ServiceError for a failed status. A cancelled call is Unavailable, a cancelled task is not.

    grpc loses the cancellation of a task that waits for a stream to begin: the call then fails with its own status."""
    try:
        return await pending
    except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise asyncio.CancelledError from error
        if isinstance(error, grpc.RpcError):
            raise from_rpc_error(error) from error
        if isinstance(error, asyncio.CancelledError):
            raise Unavailable("the call was cancelled") from None
        raise Unavailable(f"the channel is closed: {error}") from error
