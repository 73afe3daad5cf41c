"""A link with delay, jitter, loss and bandwidth: a TCP proxy on loopback between a client and a server.

    async with SlowLink(drafter.address, Conditions(delay_s=0.010)) as link:      # 20 ms there and back
        RemoteDrafter(link.address)

A byte stream loses nothing and keeps its order, so loss is what TCP makes of it: a lost segment arrives a round trip later, and all data
behind it waits. The bytes in transit are bounded (`window_bytes`), so a sender that is faster than the link is slowed down.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from rootward.clock import Clock, SystemClock

SEGMENT_BYTES = 1460  # the unit of loss
READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of each direction. delay_s: one way; jitter_s: uniform, added to it; loss: share of segments; bandwidth: bytes per second,
    0 for no limit."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    bandwidth: float = 0.0
    window_bytes: int = 256 * 1024

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s", "bandwidth"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss: {self.loss} is outside [0, 1); give the share of segments that are lost")
        if self.window_bytes < 1:
            raise ValueError(f"window_bytes: {self.window_bytes} is below 1; nothing could pass")


class Pace:
    """Arrival times: a pure function of the conditions, the random generator and the bytes sent before."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._free_s = self._last_s = 0.0  # when the link can take more; when the last bytes arrive

    def arrival_s(self, now_s: float, size: int, on: Conditions) -> float:
        self._free_s = max(now_s, self._free_s) + (size / on.bandwidth if on.bandwidth else 0.0)
        arrives_s = self._free_s + on.delay_s + self._random.uniform(0.0, on.jitter_s)
        segments = -(-size // SEGMENT_BYTES)
        if on.loss and self._random.random() < 1.0 - (1.0 - on.loss) ** segments:
            arrives_s += 2 * on.delay_s + on.jitter_s
        self._last_s = max(arrives_s, self._last_s)
        return self._last_s


class SlowLink:
    """Listens on a free port of loopback and forwards to `address`. `conditions` may be changed while it runs."""

    def __init__(
        self, address: str, conditions: Conditions | None = None, *, seed: int = 0, clock: Clock | None = None
    ) -> None:
        self.conditions = conditions or Conditions()
        self.address = ""
        self.num_bytes = [0, 0]  # to the server, from it
        self._host, _, port = address.rpartition(":")
        self._port, self._seed, self._clock = int(port), seed, clock or SystemClock()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Break every connection, as a partition does that is noticed. New ones are taken."""
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            return  # either end may leave at any time; nothing awaits the task of a cancelled server
        finally:
            self._connections.discard(task)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.TaskGroup() as both:
                there = both.create_task(self._pump(reader, far_writer, 0))
                back = both.create_task(self._pump(far_reader, writer, 1))
                await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
                there.cancel()
                back.cancel()
        except* OSError:
            pass
        finally:
            far_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int) -> None:
        """One direction until its sender leaves."""
        pace, way = Pace(2 * self._seed + direction), _Way()
        delivery = asyncio.create_task(self._deliver(way, writer))
        try:
            while data := await reader.read(READ_BYTES):
                self.num_bytes[direction] += len(data)
                arrival_s = pace.arrival_s(self._clock.now(), len(data), self.conditions)
                await way.put(arrival_s, data, self.conditions.window_bytes)
            way.end()
            await delivery
        finally:
            delivery.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await delivery

    async def _deliver(self, way: _Way, writer: asyncio.StreamWriter) -> None:
        while (item := await way.get()) is not None:
            arrival_s, data = item
            if (wait_s := arrival_s - self._clock.now()) > 0:
                await self._clock.sleep(wait_s)
            writer.write(data)
            await writer.drain()
            way.arrived(len(data))


class _Way:
    """Bytes under way in one direction, never more than a window (or one chunk)."""

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        self._size = 0
        self._moved = asyncio.Event()

    async def put(self, arrival_s: float, data: bytes, window_bytes: int) -> None:
        """Returns when there is room for more."""
        self._chunks.put_nowait((arrival_s, data))
        self._size += len(data)
        while self._size >= window_bytes:
            self._moved.clear()
            await self._moved.wait()

    def get(self) -> Awaitable[tuple[float, bytes] | None]:
        return self._chunks.get()

    def arrived(self, size: int) -> None:
        self._size -= size
        self._moved.set()

    def end(self) -> None:
        self._chunks.put_nowait(None)
