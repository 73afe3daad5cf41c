"""Frames of a stream to a drafter: one that cannot be read ends the stream, after those before it were taken."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from drafter_service.servicer import frames_of
from rootward.errors import InvalidRequest
from rootward.v1 import drafter_pb2


async def test_a_frame_that_cannot_be_read_ends_the_stream_after_those_before_it() -> None:
    async def messages() -> AsyncIterator[drafter_pb2.ToDrafter]:
        yield drafter_pb2.ToDrafter(closes=[drafter_pb2.Close(slot=4)])
        yield drafter_pb2.ToDrafter(commits=[drafter_pb2.Commit(slot=4, tokens=b"odd")])
        yield drafter_pb2.ToDrafter(closes=[drafter_pb2.Close(slot=5)])

    frames = frames_of(messages())
    assert [close.slot for close in (await anext(frames)).closes] == [4]
    with pytest.raises(InvalidRequest, match="tokens"):
        await anext(frames)
    with pytest.raises(StopAsyncIteration):
        await anext(frames)


async def test_bytes_that_grpc_cannot_make_a_message_of_end_the_stream_with_an_error() -> None:
    async def messages() -> AsyncIterator[drafter_pb2.ToDrafter]:
        yield drafter_pb2.ToDrafter(closes=[drafter_pb2.Close(slot=4)])
        raise RuntimeError("Failed to deserialize")

    frames = frames_of(messages())
    assert [close.slot for close in (await anext(frames)).closes] == [4]
    with pytest.raises(InvalidRequest, match="ToDrafter"):
        await anext(frames)
