"""`to_pb` and `from_pb` for every domain type that crosses the wire.

Both raise ValueError("field: value fix") and nothing else, whatever they are given: `from_pb` is safe on messages of
a peer that is buggy or hostile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from google.protobuf.message import DecodeError, Message

from rootward.core.frames import FromDrafter, ToDrafter
from rootward.core.requests import Committed, VerifierRequest
from rootward.ports import ModelInfo, VerifierInfo
from rootward.v1 import control_pb2, drafter_pb2, verifier_pb2
from rootward.wire import codec_common, codec_drafter, codec_verifier
from rootward.wire.columns import pack_u32, unpack_u32
from rootward.wire.info import DrafterInfo

__all__ = ["from_pb", "pack_u32", "parse", "to_pb", "unpack_u32"]

M = TypeVar("M", bound=Message)

_TO_PB: dict[type, Callable[[Any], Message]] = {
    ToDrafter: codec_drafter.to_drafter_to_pb,
    FromDrafter: codec_drafter.from_drafter_to_pb,
    DrafterInfo: codec_drafter.drafter_info_to_pb,
    VerifierRequest: codec_verifier.request_to_pb,
    Committed: codec_verifier.committed_to_pb,
    VerifierInfo: codec_verifier.verifier_info_to_pb,
    ModelInfo: codec_common.model_to_pb,
}
_FROM_PB: dict[type, Callable[[Any], object]] = {
    drafter_pb2.ToDrafter: codec_drafter.to_drafter_from_pb,
    drafter_pb2.FromDrafter: codec_drafter.from_drafter_from_pb,
    drafter_pb2.DrafterInfo: codec_drafter.drafter_info_from_pb,
    verifier_pb2.VerifierRequest: codec_verifier.request_from_pb,
    verifier_pb2.Committed: codec_verifier.committed_from_pb,
    verifier_pb2.VerifierInfo: codec_verifier.verifier_info_from_pb,
    control_pb2.ModelInfo: codec_common.model_from_pb,
}


@overload
def to_pb(value: ToDrafter) -> drafter_pb2.ToDrafter: ...
@overload
def to_pb(value: FromDrafter) -> drafter_pb2.FromDrafter: ...
@overload
def to_pb(value: DrafterInfo) -> drafter_pb2.DrafterInfo: ...
@overload
def to_pb(value: VerifierRequest) -> verifier_pb2.VerifierRequest: ...
@overload
def to_pb(value: Committed) -> verifier_pb2.Committed: ...
@overload
def to_pb(value: VerifierInfo) -> verifier_pb2.VerifierInfo: ...
@overload
def to_pb(value: ModelInfo) -> control_pb2.ModelInfo: ...


def to_pb(value: object) -> Message:
    """The protobuf message of a domain value."""
    return _TO_PB[type(value)](value)


@overload
def from_pb(pb: drafter_pb2.ToDrafter) -> ToDrafter: ...
@overload
def from_pb(pb: drafter_pb2.FromDrafter) -> FromDrafter: ...
@overload
def from_pb(pb: drafter_pb2.DrafterInfo) -> DrafterInfo: ...
@overload
def from_pb(pb: verifier_pb2.VerifierRequest) -> VerifierRequest: ...
@overload
def from_pb(pb: verifier_pb2.Committed) -> Committed: ...
@overload
def from_pb(pb: verifier_pb2.VerifierInfo) -> VerifierInfo: ...
@overload
def from_pb(pb: control_pb2.ModelInfo) -> ModelInfo: ...


def from_pb(pb: Message) -> object:
    """The domain value of a protobuf message."""
    return _FROM_PB[type(pb)](pb)


def parse(message_type: type[M], data: bytes) -> M:
    """Bytes → message; ValueError if they are not one."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise ValueError(f"{message_type.__name__}: {error}") from error
