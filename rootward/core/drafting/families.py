"""One family of children from one draft row: which tokens, in which order, and the row to declare.

Every function takes (row float64[V], k, rng) and returns a `Family`. Fewer than k children if the support is smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.distribution import top
from rootward.core.law import inverse


class Family(NamedTuple):
    """Children in draw order, whether each was drawn (or chosen), and the law the first drawn one came from."""

    tokens: list[int]
    sampled: list[bool]
    row: Floats


Maker = Callable[[Floats, int, np.random.Generator], Family]


def without_replacement(row: Floats, k: int, rng: np.random.Generator) -> Family:
    """Draw, remove, renormalise, repeat ("Recursive Speculative Decoding", 2402.14160)."""
    rest, tokens = row.copy(), []
    for _ in range(min(k, int(np.count_nonzero(row)))):
        tokens.append(inverse(rest, rng.random()))
        rest[tokens[-1]] = 0.0
    return Family(tokens, [True] * len(tokens), row)


def with_replacement(row: Floats, k: int, rng: np.random.Generator) -> Family:
    """k independent draws, copies kept as children of their own ("SpecInfer", 2305.09781)."""
    return Family([inverse(row, rng.random()) for _ in range(k)], [True] * k, row)


def greedy_family(row: Floats, k: int, rng: np.random.Generator) -> Family:
    """One drawn from q′ = q without its k−1 most likely tokens D, then D in decreasing q
    ("Towards Optimal Multi-draft Speculative Decoding", 2502.18779). Declares q′."""
    chosen = top(row, k - 1).tolist() if k > 1 else []
    rest = row.copy()
    rest[chosen] = 0.0
    if not rest.any():
        return Family(chosen, [False] * len(chosen), rest)
    declared = rest / rest.sum() if chosen else row
    return Family([inverse(declared, rng.random()), *chosen], [True] + [False] * len(chosen), declared)


def top_family(row: Floats, k: int, rng: np.random.Generator) -> Family:
    """The k most likely tokens, chosen."""
    tokens = top(row, k).tolist()
    return Family(tokens, [False] * len(tokens), row)
