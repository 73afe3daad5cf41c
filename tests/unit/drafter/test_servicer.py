"""Frames of a stream to a drafter: one that cannot be read ends the stream, after those before it were taken."""

from __future__ import annotations

from collections.abc import AsyncIterator

from drafter_service.servicer import _Inbound
from rootward.v1 import drafter_pb2


async def test_a_frame_that_cannot_be_read_ends_the_stream_after_those_before_it() -> None:
    async def messages() -> AsyncIterator[drafter_pb2.ToDrafter]:
        yield drafter_pb2.ToDrafter(closes=[drafter_pb2.Close(slot=4)])
        yield drafter_pb2.ToDrafter(commits=[drafter_pb2.Commit(slot=4, tokens=b"odd")])
        yield drafter_pb2.ToDrafter(closes=[drafter_pb2.Close(slot=5)])

    inbound = _Inbound(messages())
    frames = [frame async for frame in inbound]
    assert [close.slot for frame in frames for close in frame.closes] == [4]
    assert inbound.error is not None


async def test_bytes_that_grpc_cannot_make_a_message_of_end_the_stream_with_an_error() -> None:
    async def messages() -> AsyncIterator[drafter_pb2.ToDrafter]:
        yield drafter_pb2.ToDrafter(closes=[drafter_pb2.Close(slot=4)])
        raise RuntimeError("Failed to deserialize")

    inbound = _Inbound(messages())
    assert len([frame async for frame in inbound]) == 1
    assert "ToDrafter" in str(inbound.error)
