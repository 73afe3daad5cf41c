"""A verifier's frames on their way to a drafter: hot ones on the stream, Opens with long prefixes over another connection.

A prompt of a hundred thousand tokens is half a megabyte. On the stream it would hold up the commits of every other session, for as long
as the link takes to carry it. So it is sent beside the stream, by `OpenLong`, and messages of its slot are held meanwhile (a commit
merges with the next) until the drafter has the Open.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc

from rootward.core.frames import Close, Commit, Open, ToDrafter, cumulative
from rootward.errors import ServiceError
from rootward.v1 import drafter_pb2
from rootward.wire.channel import parts
from rootward.wire.drafter_codec import to_drafter_to_pb

LONG_TOKENS = 4096  # 16 KiB: what a hot frame may hold

OnFrame = Callable[[str, int], None]
OpenLong = Callable[[drafter_pb2.OpenLongRequest], Awaitable[Any]]


class Outgoing:
    """Of one stream. open_long: sends a request over the other connection, ServiceError if it did not arrive."""

    def __init__(self, call: Any, open_long: OpenLong, on_frame: OnFrame) -> None:
        self._call = call
        self._open_long = open_long
        self._on_frame = on_frame
        self._stream = secrets.randbits(64)
        self._held: dict[int, Commit | None] = {}  # slots whose Open is being sent, and the Commit that follows it
        self._closes: dict[int, Close] = {}
        self._writing = asyncio.Lock()
        self._opening: set[asyncio.Task[None]] = set()

    async def run(self, inbound: AsyncIterator[ToDrafter]) -> None:
        """Send the frames of `inbound` until it ends. A broken call ends this without an error: the reader of the call raises it."""
        try:
            async for frame in inbound:
                await self._send(self._hot(frame))
            await asyncio.gather(*self._opening)
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            return
        except Exception:
            self._call.cancel()
            raise
        finally:
            for task in self._opening:
                task.cancel()

    def _hot(self, frame: ToDrafter) -> ToDrafter:
        """The part of the frame that goes on the stream now; the rest is being sent beside it, or held."""
        long = [message for message in frame.opens if len(message.prefix) > LONG_TOKENS]
        if not (long or self._held):
            return frame
        for message in long:
            self._held[message.slot] = None
            task = asyncio.create_task(self._open(message))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        for commit in frame.commits:
            if commit.slot in self._held:
                before = self._held[commit.slot]
                self._held[commit.slot] = commit if before is None else cumulative(before, commit)
        self._closes |= {close.slot: close for close in frame.closes if close.slot in self._held}
        return replace(
            frame,
            opens=tuple(message for message in frame.opens if message.slot not in self._held),
            commits=tuple(commit for commit in frame.commits if commit.slot not in self._held),
            closes=tuple(close for close in frame.closes if close.slot not in self._held),
        )

    async def _open(self, message: Open) -> None:
        opens = to_drafter_to_pb(ToDrafter(opens=(message,))).opens
        arrived = True
        try:
            await self._open_long(drafter_pb2.OpenLongRequest(stream=self._stream, opens=opens))
        except ServiceError:
            arrived = False
        commit = self._held.pop(message.slot)
        close = self._closes.pop(message.slot, None)
        if not arrived and commit is None:
            # The drafter answers a Commit of an unknown slot with a resync request, which ends the slot.
            commit = Commit(message.slot, len(message.prefix), (), 0)
        after = ToDrafter(commits=(commit,) if commit else (), closes=(close,) if close else ())
        try:
            await self._send(after)
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            return  # the stream is broken; its reader raises the error

    async def _send(self, frame: ToDrafter) -> None:
        message = to_drafter_to_pb(frame)
        if frame.hello is not None:
            message.hello.stream = self._stream
        for part in parts(message):
            if num_bytes := part.ByteSize():
                self._on_frame("sent", num_bytes)
                async with self._writing:
                    await self._call.write(part)
