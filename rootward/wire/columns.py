"""Arrays as packed little-endian `bytes` columns: about fifty times cheaper to encode than repeated protobuf scalars.

A column of n unsigned integers has one width for all entries, len(column) / n ∈ {1, 2, 3, 4} bytes; nothing else describes it.
Node references are stored relative to a base, so that the ids of a long-lived tree still fit one byte: 0 is node 0, v > 0 is
node base + v - 1. Every reader raises ValueError("field: value fix") for a column that does not fit its count.

Columns of token ids and weights are numpy arrays. Columns that a tree has a handful of entries in (`small`) are lists: the fixed costs of
numpy would be most of the time of a frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_U32_MAX = 2**32 - 1


def pack_u32(values: Sequence[int] | Ints, name: str = "tokens") -> bytes:
    """Four bytes per entry. ValueError if a value does not fit them."""
    try:
        return struct.pack(f"<{len(values)}I", *values)
    except (struct.error, OverflowError):
        raise _outside_u32(name, min(values), max(values)) from None


def unpack_u32(data: bytes, name: str = "tokens") -> tuple[int, ...]:
    """Inverse of `pack_u32`."""
    if len(data) % 4:
        raise ValueError(f"{name}: {len(data)} bytes are not a multiple of 4; pack token ids as little-endian u32")
    return struct.unpack(f"<{len(data) // 4}I", data)


def pack_f32(values: Sequence[float]) -> bytes:
    """Four bytes per entry."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_f32(data: bytes, name: str) -> tuple[float, ...]:
    """Inverse of `pack_f32`."""
    if len(data) % 4:
        raise ValueError(f"{name}: {len(data)} bytes are not a multiple of 4; pack as little-endian f32")
    return tuple(np.frombuffer(data, dtype="<f4").tolist())


def pack_column(values: Ints, name: str) -> bytes:
    """The smallest width that holds the largest value. ValueError for a value outside u32."""
    bits = int(np.bitwise_or.reduce(values))  # as wide as the widest value, negative if one is
    if not 0 <= bits <= _U32_MAX:
        raise _outside_u32(name, int(values.min()), int(values.max()))
    width = _num_bytes(bits)
    return values.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def unpack_column(data: bytes, count: int, name: str) -> Ints:
    """int64[count]: inverse of `pack_column`, any legal width."""
    width = _width_of(data, count, name)
    wide = np.zeros((count, 4), dtype=np.uint8)
    wide[:, :width] = np.frombuffer(data, dtype=np.uint8).reshape(count, width)
    return wide.view("<u4").reshape(count).astype(np.int64)


def pack_small(values: Sequence[int], name: str, least_width: int = 1) -> bytes:
    """`pack_column` of a list, with at least `least_width` bytes per entry."""
    least = min(values, default=0)
    largest = max(values, default=0)
    if least < 0 or largest > _U32_MAX:
        raise _outside_u32(name, least, largest)
    width = max(least_width, _num_bytes(largest))
    return bytes(values) if width == 1 else b"".join([value.to_bytes(width, "little") for value in values])


def unpack_small(data: bytes, count: int, name: str) -> list[int]:
    """Inverse of `pack_small`."""
    width = _width_of(data, count, name)
    if width == 1:
        return list(data)
    return [int.from_bytes(data[start : start + width], "little") for start in range(0, len(data), width)]


def pack_references(nodes: Sequence[int], name: str) -> tuple[int, bytes]:
    """(base, column) of node references."""
    base = min(filter(None, nodes), default=0)
    return base, pack_small([node and node - base + 1 for node in nodes], name)


def unpack_references(base: int, data: bytes, count: int, name: str) -> list[int]:
    """Inverse of `pack_references`."""
    return [value and value + base - 1 for value in unpack_small(data, count, name)]


def pack_bits(flags: NDArray[np.bool_]) -> bytes:
    """One bit per flag, least significant first; empty if none is set."""
    return np.packbits(flags, bitorder="little").tobytes() if flags.any() else b""


def unpack_bits(data: bytes, count: int, name: str) -> NDArray[np.bool_]:
    """bool[count]: inverse of `pack_bits`."""
    if not data:
        return np.zeros(count, dtype=np.bool_)
    if len(data) != (count + 7) // 8:
        raise ValueError(f"{name}: {len(data)} bytes do not make {count} bits; send {(count + 7) // 8} or none")
    return np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count, bitorder="little").astype(np.bool_)


def _num_bytes(largest: int) -> int:
    return max(1, (largest.bit_length() + 7) // 8)


def _outside_u32(name: str, least: int, largest: int) -> ValueError:
    return ValueError(f"{name}: {least if least < 0 else largest} is outside [0, 2^32)")


def _width_of(data: bytes, count: int, name: str) -> int:
    """Bytes per entry of a received column."""
    width, rest = divmod(len(data), count) if count else (1, len(data))
    if rest or not 1 <= width <= 4:
        raise ValueError(f"{name}: {len(data)} bytes do not make {count} entries of 1 to 4 bytes")
    return width
