"""Dataclasses ↔ protobuf messages with the same field names, which then stand in the dataclass and the .proto file alone.

    LOAD = Record(Load, drafter_pb2.Load)
    OPEN = Record(Open, drafter_pb2.Open, prefix=u32("open.prefix"), law=enum(LAWS, "open.law"))

How a field is converted follows from its declaration in the message: scalars as they are, `optional` ones to None where they are
absent, repeated ones to tuples, maps to dicts. Other fields (messages, enums, packed columns) name their conversion. A field of
the dataclass without a counterpart in the message is a TypeError when the module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import Message

from rootward.wire.columns import pack_u32, unpack_u32

V = TypeVar("V")
P = TypeVar("P", bound=Message)
E = TypeVar("E", bound=Enum)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of one field: value → argument of the message's constructor, and back. present: an unset field is read as None."""

    to_pb: Callable[[Any], Any]
    from_pb: Callable[[Any], Any]
    present: bool = False


class Record(Generic[V, P]):
    """The codec of one dataclass. custom: fields without a conversion, which the caller passes to `to_pb` and `from_pb` as `more`."""

    def __init__(
        self, value_type: type[V], message_type: type[P], custom: tuple[str, ...] = (), **conversions: Conversion
    ) -> None:
        self.value_type = value_type
        self.message_type = message_type
        declared = message_type.DESCRIPTOR.fields_by_name
        names = [field.name for field in fields(cast(Any, value_type)) if field.name not in custom]
        if missing := [name for name in names if name not in declared] + [n for n in conversions if n not in names]:
            raise TypeError(f"{value_type.__name__}: {', '.join(missing)} is no field of both {message_type.__name__}")
        self._fields = [(name, conversions.get(name) or _declared(declared[name])) for name in names]

    def to_pb(self, value: V, **more: Any) -> P:
        """The message of a value. ValueError for what a message cannot hold. more: further fields of the message."""
        given = {name: conversion.to_pb(getattr(value, name)) for name, conversion in self._fields}
        return self.message_type(**given, **more)

    def from_pb(self, pb: P, **more: Any) -> V:
        """The value of a message. ValueError for what a value cannot hold. more: further fields of the value."""
        read = {
            name: conversion.from_pb(getattr(pb, name)) if not conversion.present or pb.HasField(name) else None
            for name, conversion in self._fields
        }
        return self.value_type(**read, **more)

    @property
    def one(self) -> Conversion:
        """Conversion of a field that is always set."""
        return Conversion(self.to_pb, self.from_pb)

    @property
    def optional(self) -> Conversion:
        """Conversion of a field that may be unset: None."""
        return Conversion(lambda value: None if value is None else self.to_pb(value), self.from_pb, present=True)

    @property
    def each(self) -> Conversion:
        """Conversion of a repeated field."""
        return Conversion(
            lambda values: [self.to_pb(value) for value in values], lambda pbs: tuple(self.from_pb(pb) for pb in pbs)
        )


def u32(name: str) -> Conversion:
    """Token ids in a column of u32."""
    return Conversion(lambda values: pack_u32(values, name), lambda data: unpack_u32(data, name))


def numbers_of(kind: type[E], declared: Any, prefix: str = "") -> dict[E, Any]:
    """The number of each member in an enum of the wire with the same names, behind `prefix`."""
    return {member: declared.Value(prefix + member.name) for member in kind}


def enum(numbers: Mapping[E, int], name: str, *, absent: E | None = None, required: bool = True) -> Conversion:
    """An enum of the domain. Not required: 0 means `absent`, which may be None."""
    values = {number: value for value, number in numbers.items()}

    def from_pb(number: int) -> E | None:
        if not required and not number:
            return absent
        if number not in values:
            known = ", ".join(f"{n} ({value.value})" for n, value in values.items())
            raise ValueError(f"{name}: {number} is unknown; use one of {known}")
        return values[number]

    return Conversion(lambda value: 0 if value is None else numbers[value], from_pb)


def _declared(field: Any) -> Conversion:
    """The conversion that follows from a FieldDescriptor."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return Conversion(dict, dict)
    if field.message_type is not None or field.enum_type is not None:
        raise TypeError(f"{field.full_name}: is a message or an enum; name its conversion")
    if field.is_repeated:
        return Conversion(_same, tuple)
    return Conversion(_same, _same, present=field.has_presence)


def _same(value: Any) -> Any:
    return value
