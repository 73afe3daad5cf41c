"""The order in which systems are measured in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def balanced_order(systems: Sequence[T], turn: int) -> list[T]:
    """All systems, in the order of this turn: a row of a Williams square (E. J. Williams, 1949).

    Within as many turns as there are systems (twice as many if their number is odd) each of them has each place equally often and follows
    each other one equally often, because what ran before may leave the machine slower or faster.
    """
    num = len(systems)
    zigzag = [(num - i // 2) % num if i % 2 == 0 else (i + 1) // 2 for i in range(num)]  # 0, 1, n - 1, 2, n - 2, …
    order = [systems[(place + turn) % num] for place in zigzag]
    return order[::-1] if num % 2 and turn // num % 2 else order
