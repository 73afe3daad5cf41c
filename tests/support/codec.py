"""`to_pb` and `from_pb` by type, for every domain type that crosses the wire between services.

Both raise ValueError("field: value fix") and nothing else, whatever they are given: `from_pb` is safe on messages of a
peer that is buggy or hostile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from rootward.core.frames import ToDrafter
from rootward.core.requests import Committed, VerifierRequest
from rootward.v1 import drafter_pb2, verifier_pb2
from rootward.wire import drafter_codec, verifier_codec
from rootward.wire.records import Record
from rootward.wire.values_codec import MODEL

M = TypeVar("M", bound=Message)

_RECORDS: tuple[Record[Any, Any], ...] = (drafter_codec.FROM_DRAFTER, drafter_codec.INFO, verifier_codec.INFO, MODEL)
_TO_PB: dict[type, Callable[[Any], Any]] = {record.value_type: record.to_pb for record in _RECORDS} | {
    ToDrafter: drafter_codec.to_drafter_to_pb,
    VerifierRequest: verifier_codec.request_to_pb,
    Committed: verifier_codec.committed_to_pb,
}
_FROM_PB: dict[type, Callable[[Any], Any]] = {record.message_type: record.from_pb for record in _RECORDS} | {
    drafter_pb2.ToDrafter: drafter_codec.to_drafter_from_pb,
    verifier_pb2.VerifierRequest: verifier_codec.request_from_pb,
    verifier_pb2.Committed: verifier_codec.committed_from_pb,
}


def to_pb(value: object) -> Any:
    """The protobuf message of a domain value."""
    return _TO_PB[type(value)](value)


def from_pb(pb: Message) -> Any:
    """The domain value of a protobuf message."""
    return _FROM_PB[type(pb)](pb)


def parse(message_type: type[M], data: bytes) -> M:
    """Bytes → message; ValueError if they are not one."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise ValueError(f"{message_type.__name__}: {error}") from error
