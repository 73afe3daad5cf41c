"""Drafting: how token trees are drawn. Every builder returns (tree, draft), ready for `verification.law`.

    row(path) -> float64[V]   the processed draft law after these tokens
    rng                       a numpy.random.Generator; what is chosen needs none
    draft                     float64[N, V]: row i = law the first sampled child of i was drawn from, zero without one

| builder | children | verified by |
|---|---|---|
| chain | one per level, drawn | token, block, traversal |
| rsd_c | without replacement, fixed shape | token, traversal |
| delayed | a drawn chain, then without replacement | token, traversal |
| fixed_shape | without replacement, any shape, such as that of `sequoia_shape` | token, traversal |
| best_first_drawn | without replacement, where acceptance by rank and depth says | token, traversal |
| rsd_s | stochastic beam | token, traversal |
| iid | with replacement, copies kept | token, multi_step, traversal, all with replacement=True |
| iid_paths | i.i.d. strings merged | token, traversal |
| greedy | one drawn first, the most likely after it | token, traversal |
| top_k | the most likely, chosen | match, token, traversal |
| best_first | the most probable paths, chosen | match, token, traversal |
| eagle2, opt_tree | the most probable paths of a beam, chosen | match, token, traversal |
| independent_marginals | the most probable rank tuples, chosen | match, token, traversal |
| coupled_children | the largest under noise shared with the target | match only |

Target matching (`verification.match`) may verify every one of them. `rootward.core.pairing` says the same as a table
and refuses what is not in it, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.drafting.best_first import best_first, best_first_drawn, independent_marginals
from rootward.core.drafting.coupled import coupled_children
from rootward.core.drafting.delayed import delayed
from rootward.core.drafting.dynamic import eagle2, opt_tree
from rootward.core.drafting.families import greedy_family, top_family, with_replacement, without_replacement
from rootward.core.drafting.levels import RowOf, grow_levels, positive
from rootward.core.drafting.merged_paths import iid_paths
from rootward.core.drafting.sequoia import fixed_shape, sequoia_shape
from rootward.core.drafting.stochastic_beam import rsd_s
from rootward.core.tree import TokenTree

__all__ = [
    "best_first",
    "best_first_drawn",
    "chain",
    "coupled_children",
    "delayed",
    "eagle2",
    "fixed_shape",
    "greedy",
    "iid",
    "iid_paths",
    "independent_marginals",
    "opt_tree",
    "rsd_c",
    "rsd_s",
    "sequoia_shape",
    "top_k",
]


def chain(row: RowOf, depth: int, rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """One child per level, drawn from q (2211.17192)."""
    positive("depth", [depth])
    return grow_levels(row, [1] * depth, without_replacement, rng)


def rsd_c(row: RowOf, branching: Sequence[int], rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """Children without replacement, branching[d] of a node at depth d (2402.14160)."""
    return grow_levels(row, branching, without_replacement, rng)


def iid(row: RowOf, branching: Sequence[int], rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """Children with replacement, copies kept (2305.09781); verify with replacement=True."""
    return grow_levels(row, branching, with_replacement, rng)


def greedy(row: RowOf, branching: Sequence[int], rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """Families of one drawn child, first, and the k−1 most likely tokens (2502.18779). draft holds q′."""
    return grow_levels(row, branching, greedy_family, rng)


def top_k(row: RowOf, branching: Sequence[int]) -> tuple[TokenTree, Floats]:
    """The most likely tokens, chosen: nothing is drawn and draft holds plain rows for information."""
    return grow_levels(row, branching, top_family, np.random.default_rng(0))
