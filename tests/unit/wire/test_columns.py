"""Packed integer columns: round trips, width, range, and the size of the frame of one round."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.codec import to_pb

from rootward.core.frames import FromDrafter, Grow
from rootward.wire import columns

u32_lists = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@given(u32_lists)
def test_u32_round_trip(values):
    assert columns.unpack_u32(columns.pack_u32(values)) == tuple(values)


@given(u32_lists)
def test_columns_round_trip(values):
    array = np.array(values, dtype=np.int64)
    packed = columns.pack_column(array, "ids")
    assert columns.unpack_column(packed, len(values), "ids").tolist() == values
    assert columns.pack_small(values, "ids") == packed
    assert columns.unpack_small(packed, len(values), "ids") == values
    base, data = columns.pack_references(values, "nodes")
    assert columns.unpack_references(base, data, len(values), "nodes") == values


@given(u32_lists)
def test_columns_with_a_minimum_width_round_trip(values):
    packed = columns.pack_small(values, "ids", least_width=3)
    assert len(packed) in (3 * len(values), 4 * len(values))
    assert columns.unpack_column(packed, len(values), "ids").tolist() == values


@given(st.lists(st.booleans(), max_size=70))
def test_bits_round_trip(flags):
    array = np.array(flags, dtype=np.bool_)
    assert columns.unpack_bits(columns.pack_bits(array), len(flags), "flags").tolist() == flags


@pytest.mark.parametrize(("largest", "width"), [(0, 1), (255, 1), (256, 2), (65536, 3), (2**24, 4), (2**32 - 1, 4)])
def test_the_width_is_the_smallest_that_fits(largest, width):
    assert len(columns.pack_column(np.array([0, largest]), "ids")) == 2 * width
    assert len(columns.pack_small([0, largest], "ids")) == 2 * width


def test_references_within_255_of_their_base_take_one_byte():
    assert len(columns.pack_references([0, 10_000, 10_100, 10_254], "nodes")[1]) == 4


@pytest.mark.parametrize("values", [[-1], [2**32], [2**80]])
def test_values_outside_u32_are_refused(values):
    with pytest.raises(ValueError, match=r"^ids: "):
        columns.pack_u32(values, "ids")
    if values[0] < 2**63:
        with pytest.raises(ValueError, match=r"^ids: "):
            columns.pack_column(np.array(values, dtype=np.int64), "ids")
    with pytest.raises(ValueError, match=r"^ids: "):
        columns.pack_small(values, "ids")


def round_of_64(rng: np.random.Generator, *, vocab: int, atoms: int) -> Grow:
    """The frame of 64 nodes with ids from 700 on; each has a draft distribution of `atoms` tokens (none for 0)."""
    first = 700
    parent = np.maximum(first + np.arange(64) - rng.integers(1, 60, 64), 0)
    parent[:4] = 0
    rows = {
        int(first - 60 + i): (rng.integers(0, vocab, atoms), rng.integers(1, 65536, atoms)) for i in range(64) if atoms
    }
    return Grow(
        slot=90,
        base_len=9000,
        base_hash=2**63 + 12345,
        first_node=first,
        parent=parent,
        token=rng.integers(0, vocab, 64),
        sampled=np.full(64, atoms > 0),
        rows=rows,
        at_rest=True,
        draft_us=9000,
        queue_us=900,
    )


@pytest.mark.parametrize("vocab", [32_000, 151_936, 256_000])
@pytest.mark.parametrize(("atoms", "limit"), [(0, 300), (32, 16 * 1024)])
def test_size_of_the_frame_of_64_nodes_is_bounded(vocab, atoms, limit):
    grow = round_of_64(np.random.default_rng(0), vocab=vocab, atoms=atoms)
    size = to_pb(FromDrafter(grows=(grow,))).ByteSize()
    print(f"vocabulary {vocab}, {atoms} atoms: {size} bytes")
    assert size <= limit
