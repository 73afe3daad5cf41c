"""The verifier on the wire: a thin shell around any `ports.Verifier`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from rootward.core.requests import VerifierRequest
from rootward.errors import InvalidRequest, Unavailable
from rootward.ports import Verifier
from rootward.v1 import verifier_pb2, verifier_pb2_grpc
from rootward.wire.feed import Feeds
from rootward.wire.server import RpcServer
from rootward.wire.status import Context, errors_as_status
from rootward.wire.verifier_codec import INFO, request_from_pb

NAME = verifier_pb2.DESCRIPTOR.services_by_name["Verifier"].full_name


class VerifierServicer(verifier_pb2_grpc.VerifierServicer):
    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self.feeds = Feeds()

    def register(self, server: RpcServer) -> None:
        verifier_pb2_grpc.add_VerifierServicer_to_server(self, server.grpc)
        server.services.append(NAME)

    async def Generate(  # type: ignore[override]  # a stream without messages: runs go to the feed
        self, request: verifier_pb2.VerifierRequest, context: Context
    ) -> None:
        """Ends with the generation. Everything that it commits goes to the feed that the request names."""
        async with (
            errors_as_status(context, request.request_id),
            aclosing(self._verifier.generate(_within(_decode(request), context.time_remaining()))) as runs,
        ):
            feed = self.feeds.get(request.feed)
            finished = False
            async for run in runs:
                feed.put(request.number, run)
                finished = run.finish is not None
            if not finished:  # the reader of the feed would wait for more
                raise Unavailable("the generation ended without a finish")

    async def Feed(self, request: verifier_pb2.FeedRequest, context: Context) -> AsyncIterator[verifier_pb2.FeedFrame]:
        async with errors_as_status(context), aclosing(self.feeds.frames(request.feed)) as frames:
            async for frame in frames:
                yield frame

    async def GetInfo(
        self, request: verifier_pb2.GetVerifierInfoRequest, context: Context
    ) -> verifier_pb2.VerifierInfo:
        async with errors_as_status(context):
            info = INFO.to_pb(await self._verifier.get_info())
        return info


def _decode(request: verifier_pb2.VerifierRequest) -> VerifierRequest:
    try:
        return request_from_pb(request)
    except ValueError as error:
        raise InvalidRequest.from_message(str(error)) from error


def _within(request: VerifierRequest, remaining_s: float | None) -> VerifierRequest:
    """The request with the earlier of its own deadline and that of the RPC."""
    limits = [limit for limit in (request.deadline_s, remaining_s) if limit is not None]
    return replace(request, deadline_s=min(limits, default=None))
