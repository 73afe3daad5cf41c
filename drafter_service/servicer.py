"""The drafter on the wire: a thin shell around any `ports.Drafter`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from rootward.core.frames import ToDrafter
from rootward.errors import InvalidRequest
from rootward.ports import Drafter, DrafterInfo
from rootward.v1 import drafter_pb2, drafter_pb2_grpc
from rootward.wire.channel import split_message
from rootward.wire.drafter_codec import FROM_DRAFTER, INFO, to_drafter_from_pb
from rootward.wire.server import RpcServer
from rootward.wire.status import Context, errors_as_status

NAME = drafter_pb2.DESCRIPTOR.services_by_name["Drafter"].full_name


async def frames_of(messages: AsyncIterator[drafter_pb2.ToDrafter]) -> AsyncIterator[ToDrafter]:
    """The frames of one stream. InvalidRequest: the next one cannot be read."""
    try:
        async for message in messages:
            yield to_drafter_from_pb(message)
    except ValueError as error:
        raise InvalidRequest.from_message(str(error)) from error
    except Exception as error:  # bytes that gRPC itself could make no message of
        unreadable = f"frame: cannot be read ({type(error).__name__}); send ToDrafter messages"
        raise InvalidRequest.from_message(unreadable) from error


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
        async with (
            errors_as_status(context),
            aclosing(self._drafter.session(frames_of(request_iterator))) as outbound,
        ):
            async for frame in outbound:
                for part in split_message(FROM_DRAFTER.to_pb(frame)):
                    yield part

    async def GetInfo(self, request: drafter_pb2.GetDrafterInfoRequest, context: Context) -> drafter_pb2.DrafterInfo:
        async with errors_as_status(context):
            info = INFO.to_pb(self._info())
        return info
