"""A peer that sends malformed, late, duplicated, reordered and foreign frames: those of a correct peer, changed before they are sent.

All changes follow from one seed, which is printed, so that a run can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import grpc
from google.protobuf.message import DecodeError, Message
from support.codec import from_pb, to_pb

from rootward.core.frames import FromDrafter, ToDrafter
from rootward.ports import Drafter
from rootward.v1 import drafter_pb2

NUMBERS = (0, 1, 2, 7, 255, 256, 65535, 2**24, 2**31, 2**32 - 1)
SESSION = "/rootward.v1.Drafter/Session"


class FrameCorruptor:
    """`corrupt(frame)` returns the frames that are sent in place of a correct one. About a third of all frames are unchanged."""

    def __init__(self, seed: int, *, most: int) -> None:
        print(f"frame corruption: seed {seed}")
        self.num_sent, self.most = 0, most
        self._random = random.Random(seed)
        self._held: list[Message] = []  # sent later, out of order
        self._kinds: dict[str, Callable[[Message], list[Message | bytes]]] = {
            "unchanged": lambda m: [m],
            "again": lambda m: [m, m],
            "late": self._late,
            "foreign": lambda m: [m, self._foreign(m)],
            "scalars": lambda m: [self._scalars(m)],
            "columns": lambda m: [self._columns(m)],
            "mixed": lambda m: [m, self._scalars(self._columns(m))],
            "bytes": lambda m: [m, self._flipped(m)],
        }

    @property
    def over(self) -> bool:
        """`most` frames were sent; further ones stay unchanged."""
        return self.num_sent >= self.most

    def corrupt(self, message: Message) -> list[bytes]:
        if self.over:
            return [message.SerializeToString()]
        sent: list[Message | bytes] = []
        for _ in range(self._random.choice((1, 1, 2, 8))):
            kind = self._random.choice((*self._kinds, "unchanged", "unchanged"))
            sent += self._kinds[kind](message)
        self.num_sent += len(sent)
        return [m if isinstance(m, bytes) else m.SerializeToString() for m in sent]

    def _late(self, message: Message) -> list[Message | bytes]:
        self._held.append(message)
        self._random.shuffle(self._held)
        out = [self._held.pop() for _ in range(self._random.randrange(len(self._held) + 1))]
        del self._held[64:]
        return list(out)

    def _items(self, message: Message) -> list[Message]:
        """The messages within: opens, commits, grows, …, without the handshake."""
        items = []
        for field, value in message.ListFields():
            if field.message_type is not None and field.name not in ("hello", "ack", "load"):
                items += list(value)
        return items

    def _foreign(self, message: Message) -> Message:
        other = copied(message)
        for item in self._items(other):
            item.slot = self._random.choice((*NUMBERS, item.slot + 1, max(item.slot - 1, 0)))  # type: ignore[attr-defined]
        return other

    def _scalars(self, message: Message) -> Message:
        """Changes one number of every item."""
        other = copied(message)
        for item in self._items(other):
            names = [f.name for f in item.DESCRIPTOR.fields if f.type in (f.TYPE_UINT32, f.TYPE_UINT64, f.TYPE_FIXED64)]
            single = [n for n in names if isinstance(getattr(item, n), int)]
            name = self._random.choice(single)
            setattr(item, name, self._random.choice((*NUMBERS, getattr(item, name) ^ 1)))
        return other

    def _columns(self, message: Message) -> Message:
        """Fills one column of every item with random bytes, perhaps of another length."""
        other = copied(message)
        for item in self._items(other):
            holders = [item] + (
                [item.rows] if "rows" in item.DESCRIPTOR.fields_by_name and item.HasField("rows") else []
            )
            columns = [(h, f.name) for h in holders for f in h.DESCRIPTOR.fields if f.type == f.TYPE_BYTES]
            if columns:
                holder, name = self._random.choice(columns)
                size = max(0, len(getattr(holder, name)) + self._random.choice((0, 0, 0, -1, 1, 40)))
                setattr(holder, name, self._random.randbytes(size))
        return other

    def _flipped(self, message: Message) -> bytes:
        """Flips some bits, after which the frame may not even parse. Rarely, because that may end the stream."""
        data = bytearray(message.SerializeToString())
        if data and self._random.random() < 0.05:
            for _ in range(self._random.randint(1, 3)):
                data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(data)


def copied(message: Message) -> Message:
    return type(message).FromString(message.SerializeToString())


@asynccontextmanager
async def corrupting_drafter(drafter: Drafter, corruptor: FrameCorruptor) -> AsyncIterator[str]:
    """A server at the returned address: a drafter whose outgoing frames are corrupted."""

    async def session(messages: AsyncIterator[bytes], _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        async with aclosing(drafter.session(_parsed(messages, drafter_pb2.ToDrafter))) as frames:  # type: ignore[type-var]
            async for frame in frames:
                message = to_pb(frame)
                if frame.ack is not None:
                    yield message.SerializeToString()
                    continue
                for data in corruptor.corrupt(message):
                    yield data

    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(session)  # without (de)serialisers: bytes as they are
    name, _, call = SESSION.lstrip("/").partition("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {call: method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class CorruptingVerifier:
    """`ports.Drafter` for a verifier whose frames to the drafter at `address` are corrupted."""

    def __init__(self, address: str, corruptor: FrameCorruptor) -> None:
        self._address, self._corruptor = address, corruptor

    async def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncIterator[FromDrafter]:
        async def corrupted() -> AsyncIterator[bytes]:
            async for frame in inbound:
                message = to_pb(frame)
                for data in [message.SerializeToString()] if frame.hello else self._corruptor.corrupt(message):
                    yield data

        async with grpc.aio.insecure_channel(self._address) as channel:
            call = channel.stream_stream(SESSION)(corrupted())
            try:
                async for data in call:
                    yield from_pb(drafter_pb2.FromDrafter.FromString(data))
            except (grpc.RpcError, DecodeError):
                return


async def _parsed(messages: AsyncIterator[bytes], kind: type[Message]) -> AsyncIterator[ToDrafter]:
    async for data in messages:
        yield from_pb(kind.FromString(data))  # type: ignore[arg-type]
