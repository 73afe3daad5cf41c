"""Readers of JSON values, each with the error that names parameter, value and fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from rootward.errors import InvalidRequest, UnsupportedParameter

T = TypeVar("T")


def one(body: Mapping[str, object], name: str, read: Callable[[str, object], T], default: T) -> T:
    """The value of an optional parameter; null means absent, as in OpenAI's API."""
    value = body.get(name)
    return default if value is None else read(name, value)


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(name, short(value), "is not a boolean; use true or false")
    return value


def string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(name, short(value), "is not a string")
    return value


def strings(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InvalidRequest(name, short(value), "is not a list of strings")
    return tuple(value)


def integer(name: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, short(value), "is not an integer")
    return value


def number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise InvalidRequest(name, short(value), "is not a number")
    return float(value)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(v) is int for v in value):
        raise InvalidRequest(name, short(value), "is not a list of token ids")
    return tuple(value)


def token_numbers(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """An object of numbers by token id; JSON writes the ids as strings."""
    if not isinstance(value, dict) or not all(isinstance(k, str) and k.isascii() and k.isdecimal() for k in value):
        raise InvalidRequest(name, short(value), "is not an object of numbers by token id")
    return tuple((int(k[:20]), number(f"{name}.{k[:20]}", v)) for k, v in value.items())


def content(at: str, value: object) -> str:
    """A text, or a list of parts that are texts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequest(at, short(value), "is neither a text nor a list of parts")
    return "".join(_part(f"{at}[{i}]", part) for i, part in enumerate(value))


def _part(at: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(at, short(part), "is no part with a type")
    if kind != "text":
        raise UnsupportedParameter(f"{at}.type", kind[:32], "is not supported; this model reads text alone")
    return string(f"{at}.text", part.get("text"))


def short(value: object) -> object:
    """A value that is fit for a message: scalars as they are, texts cut, the rest by its type."""
    if isinstance(value, str):
        return value[:32]
    return value if value is None or isinstance(value, bool | int | float) else type(value).__name__
