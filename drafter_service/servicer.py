"""The drafter on the wire: a thin shell around any `ports.Drafter`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from rootward.core.frames import ToDrafter
from rootward.errors import InvalidRequest
from rootward.ports import Drafter
from rootward.rpc.codec import from_pb, to_pb
from rootward.rpc.info import DrafterInfo
from rootward.rpc.server import RpcServer
from rootward.rpc.status import errors_as_status, invalid_request
from rootward.rpc.streams import closing, parts
from rootward.v1 import drafter_pb2, drafter_pb2_grpc

NAME = drafter_pb2.DESCRIPTOR.services_by_name["Drafter"].full_name
Context = grpc.aio.ServicerContext[Any, Any]


class _Frames:
    """The frames of one stream. One that cannot be read ends it: the drafter sees its peer leave."""

    def __init__(self, messages: AsyncIterator[drafter_pb2.ToDrafter]) -> None:
        self._messages = messages
        self.error: InvalidRequest | None = None

    async def __aiter__(self) -> AsyncIterator[ToDrafter]:
        async for message in self._messages:
            try:
                frame = from_pb(message)
            except ValueError as error:
                self.error = invalid_request(str(error))
                return
            yield frame


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    """`info` is asked at every GetInfo; it must not block."""

    def __init__(self, drafter: Drafter, info: Callable[[], DrafterInfo]) -> None:
        self._drafter, self._info = drafter, info

    def register(self, server: RpcServer) -> None:
        drafter_pb2_grpc.add_DrafterServicer_to_server(self, server.grpc)
        server.services.append(NAME)

    async def Session(
        self, request_iterator: AsyncIterator[drafter_pb2.ToDrafter], context: Context
    ) -> AsyncIterator[drafter_pb2.FromDrafter]:
        inbound = _Frames(request_iterator)
        async with errors_as_status(context), closing(self._drafter.session(aiter(inbound))) as outbound:
            async for frame in outbound:
                for part in parts(to_pb(frame)):
                    yield part
            if inbound.error is not None:
                raise inbound.error

    async def GetInfo(self, request: drafter_pb2.GetDrafterInfoRequest, context: Context) -> drafter_pb2.DrafterInfo:
        async with errors_as_status(context):
            info = to_pb(self._info())
        return info
