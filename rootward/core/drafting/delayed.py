"""Delayed trees: one drawn path first, branching only below its end.

Source: "Dynamic Delayed Tree Expansion For Improved Multi-Path Speculative Decoding" (2602.16994). Near the root draft
and target agree and one child is mostly accepted; further down, where they part, a second child pays. The paper draws
i.i.d. paths below the trunk and lets a network choose lengths and number; here the shape is fixed and siblings are drawn
without replacement, so a family never holds the same token twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.drafting.families import without_replacement
from rootward.core.drafting.levels import RowOf, grow_levels, positive
from rootward.core.tree import TokenTree


def delayed(row: RowOf, trunk: int, branching: Sequence[int], rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """A chain of `trunk` nodes; branching[d] children of the nodes d below its end: (tree, draft)."""
    positive("trunk", [trunk])
    return grow_levels(row, [1] * trunk + list(positive("branching", branching)), without_replacement, rng)
