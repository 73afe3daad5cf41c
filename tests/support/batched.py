"""The law of `rootward.engine.verify` (batched) for one tree, in the type of `rootward.core.verification` (the oracle), to compare them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.law import VerificationLaw
from rootward.core.tree import TokenTree
from rootward.engine.verify import Forest, ForestLaw, forest_law, gather_ids


def batched_law(
    algorithm: str,
    tree: TokenTree,
    atoms: ArrayLike,
    weight: ArrayLike,
    target: ArrayLike,
    *,
    copies: bool = False,
    order: ArrayLike | None = None,
) -> VerificationLaw:
    """The engine's law of one round, over the whole vocabulary. atoms, weight: int[N, K]; target: float[N, V]."""
    forest = Forest.of([tree], [algorithm], [copies], None if order is None else np.asarray(order, dtype=np.float64))
    ids = gather_ids(forest, atoms)
    return dense_law(forest_law(forest, ids, weight, *split(target, ids)), 0, tree, target)


def dense_law(law: ForestLaw, b: int, tree: TokenTree, target: ArrayLike) -> VerificationLaw:
    """The law of tree b, over the whole vocabulary. target: float64[N, V]."""
    nodes = slice(int(law.forest.start[b]), int(law.forest.start[b + 1]))
    residual = np.asarray(target, dtype=np.float64) * law.tail_scale[nodes, None]
    node, column = np.nonzero(law.ids[nodes] >= 0)
    residual[node, law.ids[nodes][node, column]] = law.residual[nodes][node, column]
    arrays = (law.stop[nodes].copy(), residual, law.entry[nodes].copy(), law.budget[nodes].copy())
    return VerificationLaw(law.forest.algorithm[b], tree, *arrays)


def split(target: ArrayLike, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(target at `ids`, mass of the other tokens). Unlike `engine.verify.gather` without division by the mass of a row, which is 1 here:
    the division would round the last digit."""
    rows = np.array(target, dtype=np.float64)
    node, column = np.nonzero(ids >= 0)
    at = np.zeros(ids.shape)
    at[node, column] = rows[node, ids[node, column]]
    rows[node, ids[node, column]] = 0.0
    return at, rows.sum(axis=1)
