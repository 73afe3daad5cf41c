"""Small tools for message streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
T = TypeVar("T")

FRAME_BYTES = 1 << 20  # a quarter of the message limit of the drafting stream


def parts(message: M, limit_bytes: int = FRAME_BYTES) -> Iterator[M]:
    """The message itself, or if it is too large the same content in several, order kept.

    For messages whose fields are all messages: a frame that opens many long prompts at once. An item is never divided.
    """
    if message.ByteSize() <= limit_bytes:
        yield message
        return
    part, size = type(message)(), 0
    for name, item, repeated in _items(message):
        item_bytes = item.ByteSize()
        if size and size + item_bytes > limit_bytes:
            yield part
            part, size = type(message)(), 0
        part.MergeFrom(type(message)(**{name: [item] if repeated else item}))
        size += item_bytes
    yield part


def _items(message: Message) -> Iterator[tuple[str, Message, bool]]:
    """(field, item, whether the field is repeated) in the order of the fields."""
    for descriptor, value in message.ListFields():
        repeated = not isinstance(value, Message)
        for item in value if repeated else (value,):
            yield descriptor.name, item, repeated


@asynccontextmanager
async def closing(stream: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an async generator at the end, so that its `finally` runs now and not when it is collected."""
    try:
        yield stream
    finally:
        if (close := getattr(stream, "aclose", None)) is not None:
            await close()
