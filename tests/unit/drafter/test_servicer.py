"""The drafter on the wire: a stream that nobody listens to any more ends, whatever its peer was about to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from drafter_service.servicer import _Inbound
from rootward.v1 import drafter_pb2


@pytest.mark.parametrize("num_frames", [1, 2], ids=["one waits", "one more is refused"])
async def test_a_stream_ends_although_frames_wait_that_nobody_takes(num_frames: int) -> None:
    last = asyncio.Event()

    async def messages() -> AsyncIterator[drafter_pb2.ToDrafter]:
        for slot in range(num_frames):
            if slot == num_frames - 1:
                last.set()
            yield drafter_pb2.ToDrafter(closes=[drafter_pb2.Close(slot=slot)])
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        async with _Inbound(messages(), {}):
            await last.wait()


async def test_a_frame_that_cannot_be_read_ends_the_stream_after_those_before_it() -> None:
    async def messages() -> AsyncIterator[drafter_pb2.ToDrafter]:
        yield drafter_pb2.ToDrafter(closes=[drafter_pb2.Close(slot=4)])
        yield drafter_pb2.ToDrafter(commits=[drafter_pb2.Commit(slot=4, tokens=b"odd")])

    async with asyncio.timeout(60), _Inbound(messages(), {}) as inbound:
        frames = [frame async for frame in inbound]
    assert [close.slot for frame in frames for close in frame.closes] == [4]
    assert inbound.error is not None
