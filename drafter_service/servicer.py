"""The drafter on the wire: a thin shell around any `ports.Drafter`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Self

import grpc

from rootward.core.frames import ToDrafter
from rootward.errors import InvalidRequest, NotFound
from rootward.ports import Drafter, DrafterInfo
from rootward.v1 import drafter_pb2, drafter_pb2_grpc
from rootward.wire.channel import parts
from rootward.wire.drafter_codec import FROM_DRAFTER, INFO, to_drafter_from_pb
from rootward.wire.server import RpcServer
from rootward.wire.status import errors_as_status, invalid_request

NAME = drafter_pb2.DESCRIPTOR.services_by_name["Drafter"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


class _Inbound:
    """The frames of one stream, and the long Opens that come beside it. What cannot be read ends it: the drafter sees its peer leave.

    Only one frame waits here: a drafter that does not listen is not sent more.
    """

    def __init__(self, messages: AsyncIterator[drafter_pb2.ToDrafter], streams: dict[int, _Inbound]) -> None:
        self._messages, self._streams = messages, streams
        self._frames: asyncio.Queue[ToDrafter | None] = asyncio.Queue(1)
        self._number = 0
        self._heard = True  # somebody takes what is put here
        self.error: InvalidRequest | None = None

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._streams.pop(self._number, None)
        self._heard = False
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def put(self, frame: ToDrafter) -> None:
        """Returns when the drafter has taken what was before."""
        await self._frames.put(frame)

    async def __aiter__(self) -> AsyncIterator[ToDrafter]:
        while (frame := await self._frames.get()) is not None:
            yield frame

    async def _read(self) -> None:
        try:
            async for message in self._messages:
                if message.HasField("hello") and message.hello.stream and not self._number:
                    self._number = message.hello.stream
                    self._streams[self._number] = self
                await self.put(to_drafter_from_pb(message))
        except ValueError as error:
            self.error = invalid_request(str(error))
        except Exception as error:  # bytes that gRPC itself could make no message of
            self.error = invalid_request(f"frame: cannot be read ({type(error).__name__}); send ToDrafter messages")
        finally:
            if self._heard:  # else the last frame lies there for ever, and so would this
                await self._frames.put(None)


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    """`info` is asked at every GetInfo; it must not block."""

    def __init__(self, drafter: Drafter, info: Callable[[], DrafterInfo]) -> None:
        self._drafter, self._info = drafter, info
        self._streams: dict[int, _Inbound] = {}  # by the name in their Hello

    def register(self, server: RpcServer) -> None:
        drafter_pb2_grpc.add_DrafterServicer_to_server(self, server.grpc)
        server.services.append(NAME)

    async def Session(
        self, request_iterator: AsyncIterator[drafter_pb2.ToDrafter], context: Context
    ) -> AsyncIterator[drafter_pb2.FromDrafter]:
        async with errors_as_status(context), _Inbound(request_iterator, self._streams) as inbound:
            async with aclosing(self._drafter.session(aiter(inbound))) as outbound:
                async for frame in outbound:
                    for part in parts(FROM_DRAFTER.to_pb(frame)):
                        yield part
            if inbound.error is not None:
                raise inbound.error

    async def OpenLong(self, request: drafter_pb2.OpenLongRequest, context: Context) -> drafter_pb2.OpenLongResponse:
        async with errors_as_status(context):
            stream = self._streams.get(request.stream)
            if stream is None:
                raise NotFound(
                    "stream: no stream has this name; name it in the Hello, and send long Opens while it lasts"
                )
            await stream.put(to_drafter_from_pb(drafter_pb2.ToDrafter(opens=request.opens)))
        return drafter_pb2.OpenLongResponse()

    async def GetInfo(self, request: drafter_pb2.GetDrafterInfoRequest, context: Context) -> drafter_pb2.DrafterInfo:
        async with errors_as_status(context):
            info = INFO.to_pb(self._info())
        return info
