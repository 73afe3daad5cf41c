"""Blocks: taken, shared, forgotten and given back; and tables that name them."""

from __future__ import annotations

import numpy as np
import pytest

from rootward.engine.block_pool import BlockPool, BlockTable
from rootward.errors import KvFull


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_a_growing_table_stays_in_one_piece() -> None:
    pool = BlockPool(16)
    assert pool.take(3, 4) == [4, 5, 6]
    assert pool.take(2, 7) == [7, 8]
    assert pool.take(2, 5) == [9, 10]
    assert pool.take(6, 14) == [14, 15, 0, 1, 2, 3]
    assert pool.num_available == 3
    with pytest.raises(KvFull, match="4 more blocks are needed and 3 are free") as caught:
        pool.take(4, 0)
    assert (caught.value.needed, caught.value.free) == (4, 3)
    assert pool.num_available == 3


def test_known_blocks_are_shared_and_forgotten_oldest_first() -> None:
    pool = BlockPool(20)
    table = pool.take(3, 0)
    for block, key in zip(table, keys("a", "ab", "abc"), strict=True):
        pool.register(block, key)
    assert pool.share(keys("a", "ab", "x", "abc")) == table[:2]
    pool.check([table, table[:2]])
    pool.give_back(table[::-1])
    pool.check([table[:2]])
    assert pool.num_available == 18
    pool.give_back(table[1::-1])
    assert pool.num_available == 20
    assert pool.share(keys("a", "ab", "abc")) == table
    pool.give_back(table[::-1])
    other = pool.take(17, 3)  # all that is free: nothing need be forgotten
    assert pool.share(keys("a")) == [0]
    pool.give_back([0])
    pool.check([other])
    last = pool.take(3, 0)
    assert sorted(last) == table
    assert pool.share(keys("a", "ab", "abc")) == []
    pool.check([other, last])


def test_only_as_much_is_forgotten_as_a_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootward.engine.block_pool.EVICT_AT_ONCE", 2)
    pool = BlockPool(4)
    table = pool.take(4, 0)
    for block, key in zip(table, keys("a", "ab", "abc", "abcd"), strict=True):
        pool.register(block, key)
    pool.give_back(table[::-1])
    assert pool.take(1, 0) == [2]  # the deepest two were forgotten
    assert pool.share(keys("a", "ab", "abc")) == [0, 1]


def test_a_block_has_one_key_and_a_key_one_block() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2, 0)
    pool.register(first, b"a")
    pool.register(second, b"a")
    pool.register(first, b"b")
    pool.give_back([second])
    pool.check([[first]])
    assert pool.share([b"a"]) == [first]
    assert pool.share([b"b"]) == []


@pytest.mark.parametrize("defect", ["reference", "leak", "twice", "key"])
def test_check_finds(defect: str) -> None:
    pool = BlockPool(4)
    table = pool.take(2, 0)
    pool.register(table[0], b"a")
    pool.check([table])
    if defect == "reference":
        pool._references[table[1]] += 1
    if defect == "leak":
        pool._free[3] = False
    if defect == "twice":
        pool._idle[table[0]] = None
    if defect == "key":
        pool._by_key.clear()
    with pytest.raises(RuntimeError, match="leaked"):
        pool.check([table])


def test_tables_know_where_cells_lie() -> None:
    table = BlockTable(4, 8)
    for blocks in ([5], [6, 7, 2], [3], [9]):
        table.extend(blocks)
    assert table.cells(np.arange(24)).tolist() == [*range(20, 32), *range(8, 16), *range(36, 40)]
    assert table.cut(4) == [9, 3]
    assert (len(table), table.num_cells, table.blocks.tolist()) == (4, 16, [5, 6, 7, 2])
    assert table.cut(3) == [2]
    table.extend([8])
    assert table.cells(np.arange(16)).tolist() == [*range(20, 36)]
    assert table.cut(0) == [8, 7, 6, 5]
    table.extend([1])
    assert table.cells(np.arange(4)).tolist() == [4, 5, 6, 7]


def test_what_was_in_use_since_the_last_eviction_is_still_held():
    time = [0.0]
    pool = BlockPool(2, lambda: time[0])
    for at_s, key in ((10.0, b"a"), (20.0, b"b")):
        (block,) = pool.take(1, 0)
        pool.register(block, key)
        time[0] = at_s
        pool.give_back([block])
    time[0] = 50.0
    assert pool.evicted_age_s == float("inf")
    pool._evict(1)
    assert pool.evicted_age_s == 40.0  # the block that became idle at 10
    assert pool.share([b"b"])
    assert not pool.share([b"a"])
