"""The order of systems that are measured in turns."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.turns import balanced_order


@pytest.mark.parametrize("num", range(1, 9))
def test_each_system_has_each_place_and_follows_each_other_one_equally_often(num: int) -> None:
    systems = [f"system {i}" for i in range(num)]
    num_turns = num * (1 + num % 2)
    orders = [balanced_order(systems, turn) for turn in range(3, 3 + num_turns)]
    assert all(sorted(order) == systems for order in orders)
    for place in range(num):
        assert set(Counter(order[place] for order in orders).values()) == {num_turns // num}
    neighbours = Counter(pair for order in orders for pair in pairwise(order))
    assert set(neighbours.values()) == ({num_turns // num} if num > 1 else set())
    assert len(neighbours) == num * (num - 1)


def test_no_system_has_no_order() -> None:
    assert balanced_order([], 5) == []
