"""Arrays as packed little-endian `bytes` columns: about fifty times cheaper to code than repeated protobuf scalars.

A column of n unsigned integers has one width for all entries, len(column) / n ∈ {1, 2, 3, 4} bytes; nothing else
describes it. Node references are stored relative to a base, so that the ids of a long-lived tree still fit one byte:
0 is node 0, v > 0 is node base + v - 1. Every reader raises ValueError("field: value fix") on what does not fit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_U32_MAX = 2**32 - 1
_UINT = {width: np.dtype(f"<u{width}") for width in (1, 2, 4)}
_INT64 = np.dtype(np.int64)
FEW = 16  # entries, as a level's nodes: below, numpy's fixed costs are most of the time


def _ints(values: Sequence[int] | Ints, name: str) -> tuple[Ints, int]:
    """The values as int64, all within u32, and all their bits in one: as wide as the largest of them."""
    try:
        array = np.asarray(values, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"{name}: a value does not fit 32 bits") from None
    bits = int(np.bitwise_or.reduce(array))
    if not 0 <= bits <= _U32_MAX:
        bad = array.min() if array.min() < 0 else array.max()
        raise ValueError(f"{name}: {bad} is outside [0, 2^32)")
    return array, bits


def _few(values: Sequence[int] | Ints, name: str) -> list[int] | None:
    """The values as plain integers, all within u32, if they are few."""
    if len(values) > FEW:
        return None
    plain: list[int] = values.tolist() if isinstance(values, np.ndarray) else [int(v) for v in values]
    if plain and not 0 <= min(plain) <= max(plain) <= _U32_MAX:
        bad = min(plain) if min(plain) < 0 else max(plain)
        raise ValueError(f"{name}: {bad} is outside [0, 2^32)")
    return plain


def pack_u32(values: Sequence[int] | Ints, name: str = "tokens") -> bytes:
    """Four bytes per entry."""
    if (few := _few(values, name)) is not None:
        return struct.pack(f"<{len(few)}I", *few)
    return _ints(values, name)[0].astype(_UINT[4]).tobytes()


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


def pack_column(values: Sequence[int] | Ints, name: str = "column", least_width: int = 1) -> bytes:
    """The smallest width that holds the largest value, but not less than `least_width` bytes."""
    if isinstance(values, list) and least_width == 1 and max(values, default=256) < 256 and min(values) >= 0:
        return bytes(values)
    if (few := _few(values, name)) is not None:
        return b"" if not few else _packed(few, max(least_width, (max(few).bit_length() + 7) // 8))
    array, bits = _ints(values, name)
    width = max(least_width, (bits.bit_length() + 7) // 8)
    if width == 3:
        return array.astype(_UINT[4]).view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    return array.astype(_UINT[width]).tobytes()


def _packed(values: list[int], width: int) -> bytes:
    if width == 1:
        return bytes(values)
    if width == 3:
        return b"".join([value.to_bytes(3, "little") for value in values])
    return struct.pack(f"<{len(values)}{'H' if width == 2 else 'I'}", *values)


def unpack_column(data: bytes, count: int, name: str = "column") -> Ints:
    """int64[count]: inverse of `pack_column`, any legal width."""
    width, rest = divmod(len(data), count) if count else (1, len(data))
    if rest or not 1 <= width <= 4:
        raise ValueError(f"{name}: {len(data)} bytes do not make {count} entries of 1 to 4 bytes")
    if width != 3:
        return np.frombuffer(data, dtype=_UINT[width]).astype(_INT64)
    if count <= FEW:
        return np.array([int.from_bytes(data[at : at + 3], "little") for at in range(0, len(data), 3)], dtype=_INT64)
    wide = np.zeros((count, 4), dtype=np.uint8)
    wide[:, :3] = np.frombuffer(data, dtype=np.uint8).reshape(count, 3)
    return wide.view(_UINT[4]).reshape(count).astype(_INT64)


def pack_each(columns: Sequence[Ints], name: str = "columns", least_width: int = 1) -> list[bytes]:
    """`pack_column` of each, made as one column: they get one width."""
    if len(columns) == 1:
        return [pack_column(columns[0], name, least_width)]
    whole = np.concatenate([np.empty(0, _INT64), *columns])
    return cut(pack_column(whole, name, least_width), [len(column) for column in columns])


def cut(data: bytes, counts: Sequence[int]) -> list[bytes]:
    """A column apart, into those of so many entries."""
    if len(counts) == 1:
        return [data]
    width = len(data) // (sum(counts) or 1)
    return [data[width * start : width * end] for start, end in pairwise(accumulate(counts, initial=0))]


def unpack_few(data: bytes, count: int, name: str = "column") -> list[int]:
    """`unpack_column` as plain integers."""
    if len(data) == count:
        return list(data)
    found: list[int] = unpack_column(data, count, name).tolist()
    return found


def pack_refs(nodes: Sequence[int] | Ints, name: str = "nodes") -> tuple[int, bytes]:
    """(base, column) of node references."""
    if (few := _few(nodes, name)) is not None:
        base = min(filter(None, few), default=0)
        relative = [node and node - base + 1 for node in few]
        return base, bytes(relative) if max(few, default=0) - base < 255 else pack_column(relative, name)
    array, _ = _ints(nodes, name)
    below = array[array > 0]
    base = int(below.min()) if below.size else 0
    return base, pack_column(np.where(array > 0, array - base + 1, 0), name)


def unpack_refs(base: int, data: bytes, count: int, name: str = "nodes") -> Ints:
    """int64[count]: inverse of `pack_refs`."""
    if len(data) == count <= FEW:
        return np.array(unpack_few_refs(base, data, count, name), dtype=_INT64)
    values = unpack_column(data, count, name)
    return np.where(values > 0, values + (base - 1), 0)


def unpack_few_refs(base: int, data: bytes, count: int, name: str = "nodes") -> list[int]:
    """The same as plain integers."""
    if len(data) == count:
        return [value + base - 1 if value else 0 for value in data]
    found: list[int] = unpack_refs(base, data, count, name).tolist()
    return found


def pack_bits(flags: NDArray[np.bool_]) -> bytes:
    """One bit per flag, least significant first; empty if none is set."""
    if len(flags) > FEW:
        return np.packbits(flags, bitorder="little").tobytes() if flags.any() else b""
    bits = sum([1 << at for at, flag in enumerate(flags.tolist()) if flag])
    return bits.to_bytes((len(flags) + 7) // 8, "little") if bits else b""


def unpack_bits(data: bytes, count: int, name: str = "flags") -> NDArray[np.bool_]:
    """bool[count]: inverse of `pack_bits`."""
    if not data:
        return np.zeros(count, dtype=np.bool_)
    if len(data) != (count + 7) // 8:
        raise ValueError(f"{name}: {len(data)} bytes do not make {count} bits; send {(count + 7) // 8} or none")
    if count <= FEW:
        bits = int.from_bytes(data, "little")
        return np.array([bits >> at & 1 for at in range(count)], dtype=np.bool_)
    return np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=count, bitorder="little").astype(np.bool_)
