"""Both ends of a feed: the committed runs of many generations of one caller, in one message per engine step.

The number of messages per step must not grow with the batch: reading or writing one costs a Python event loop more than decoding its
content. A generation is still a call of its own, which carries its request, errors, deadline and cancellation; only its runs take the
feed. Both ends queue at most the tokens that requests may still generate, so `max_tokens` bounds them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count

from rootward.core.requests import Committed
from rootward.errors import IncompatiblePair, InvalidRequest, ServiceError, Unavailable
from rootward.v1 import verifier_pb2
from rootward.wire import channel
from rootward.wire.channel import split_message
from rootward.wire.verifier_codec import committed_from_pb, committed_to_pb

Frame = verifier_pb2.FeedFrame

MAX_MERGED_TOKENS = 256  # approximate limit of a merged run: one stream must not block the loop for the others


class Feeds:
    """The verifier's end: the feeds that are open."""

    def __init__(self) -> None:
        self._open: dict[int, Feed] = {}

    def get(self, name: int) -> Feed:
        """Unavailable if it is not open (any more): the caller may open another and try again. InvalidRequest for 0."""
        if not name:
            raise InvalidRequest.from_message(
                "feed: 0 is no feed; open one with Verifier.Feed and name it in the request"
            )
        if (feed := self._open.get(name)) is None:
            raise Unavailable(f"feed {name:x} is not open here")
        return feed

    async def frames(self, name: int) -> AsyncGenerator[Frame, None]:
        """All messages of a new feed, until `end` or the caller leaves."""
        if not name or name in self._open:
            raise InvalidRequest.from_message(f"feed: {name} is zero or open already; choose a random number")
        feed = self._open[name] = Feed()
        try:
            yield Frame()
            async for frame in feed.frames():
                yield frame
        finally:
            feed.end()
            del self._open[name]

    def end(self) -> None:
        """End all feeds after the messages that are queued."""
        for feed in self._open.values():
            feed.end()


class Feed:
    """One feed at the verifier: the runs committed since the last message."""

    def __init__(self) -> None:
        self._pending = Frame()
        self._changed = asyncio.Event()
        self._ended = False

    def put(self, number: int, run: Committed) -> None:
        """Add a run to the next message. Unavailable once the feed has no reader, InvalidRequest for one that no message can carry, since
        that would end the feed for all generations."""
        if self._ended:
            raise Unavailable("the feed has ended")
        message = committed_to_pb(run)
        if run.prefilled is not None and (num_bytes := message.ByteSize()) > channel.MAX_ITEM_BYTES:
            told = run.prefilled.logprobs
            size = f"per token take {num_bytes} bytes for {len(told)} tokens, more than {channel.MAX_ITEM_BYTES}"
            fix = f"{size}; ask for fewer, or send a shorter prompt"
            raise InvalidRequest("prompt_logprobs", len(told[0].top) if told else 0, fix)
        self._pending.entries.add(number=number, run=message)
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def frames(self) -> AsyncIterator[Frame]:
        """The messages. Generations that wake up for one step all put their runs before this task runs: the first of them wakes it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            frame = self._pending
            self._pending = Frame()
            if frame.entries:
                for part in split_message(frame):
                    yield part
            if self._ended:
                return


class RunQueue:
    """Queue of one generation at the caller: its runs, and its error."""

    def __init__(self, *, merging: bool) -> None:
        """merging: runs of several rounds may be merged into one."""
        self._merging = merging
        self._items: deque[Committed | ServiceError] = deque()
        self._some = asyncio.Event()

    def put(self, item: Committed | ServiceError) -> None:
        self._items.append(item)
        self._some.set()

    async def take(self) -> Committed:
        """The next run, merged with those after it, so that a slow caller handles fewer of them. Raises the error of the generation."""
        while not self._items:
            self._some.clear()
            await self._some.wait()
        first = self._items.popleft()
        if isinstance(first, ServiceError):
            raise first
        runs = [first]
        num_tokens = len(first.tokens)
        while self._merging and num_tokens < MAX_MERGED_TOKENS and self._items and _can_merge(runs[-1], self._items[0]):
            runs.append(self._items.popleft())  # type: ignore[arg-type]  # errors join nothing
            num_tokens += len(runs[-1].tokens)
        return first if len(runs) == 1 else _merged(runs)


def _can_merge(run: Committed, after: Committed | ServiceError) -> bool:
    if isinstance(after, ServiceError) or run.finish is not None or after.prefilled is not None:
        return False
    return (after.epoch, after.offset) == (run.epoch, run.offset + len(run.tokens))


def _merged(runs: Sequence[Committed]) -> Committed:
    tokens, accepted, logprobs = (
        tuple(chain.from_iterable(getattr(run, name) for run in runs)) for name in ("tokens", "accepted", "logprobs")
    )
    return replace(runs[0], tokens=tokens, accepted=accepted, logprobs=logprobs, finish=runs[-1].finish)


class FeedReader:
    """The caller's end: passes the runs of a feed to their generations."""

    def __init__(self, address: str) -> None:
        self.name = 1 + secrets.randbelow(2**64 - 1)
        self.over: ServiceError | None = None  # why the feed has ended
        self._address = address
        self._numbers = count(1)
        self._waiting: dict[int, RunQueue] = {}
        self._settled = asyncio.Event()  # open, or over

    async def read(self, frames: AsyncIterator[Frame]) -> None:
        """Read until the messages end; every generation that still waits then fails with Unavailable."""
        try:
            async for frame in frames:
                self._settled.set()
                for entry in frame.entries:
                    if (queue := self._waiting.get(entry.number)) is not None:
                        queue.put(self._decoded(entry.run))
            self.over = Unavailable("the verifier ended its feed")
        except ServiceError as error:
            self.over = error
        finally:
            self.over = self.over or Unavailable("the feed was closed")
            self._settled.set()
            for queue in self._waiting.values():
                queue.put(self.over)

    async def opened(self, timeout_s: float) -> None:
        """Unavailable, or what the verifier says, if it does not open in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            raise Unavailable(f"{self._address} did not open a feed within {timeout_s} s") from None
        if self.over is not None:
            raise self.over

    @contextmanager
    def subscribed(self, *, merging: bool = True) -> Iterator[tuple[int, RunQueue]]:
        """A number for one generation, and the queue of its runs."""
        number = next(self._numbers)
        queue = RunQueue(merging=merging)
        self._waiting[number] = queue
        if self.over is not None:
            queue.put(self.over)
        try:
            yield number, queue
        finally:
            del self._waiting[number]

    def _decoded(self, run: verifier_pb2.Committed) -> Committed | ServiceError:
        try:
            return committed_from_pb(run)
        except ValueError as error:
            return IncompatiblePair(f"{self._address} sent a message that cannot be read: {error}")
