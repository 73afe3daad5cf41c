"""Draft distributions in integer weights from probabilities, as tests and benchmarks need them; services make them from logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Ints
from rootward.core.distribution import DraftDistribution, integer_weights, top


def quantise(probs: ArrayLike, num_atoms: int) -> DraftDistribution:
    """The K largest atoms of a law float[V] (ties: smaller id), as integer weights in proportion to the largest."""
    law = np.asarray(probs, dtype=np.float64)
    if law.ndim != 1 or not np.isfinite(law).all() or (law < 0.0).any():
        raise ValueError(f"probs: shape {law.shape}, negative or not finite; give one law over the vocabulary")
    ids = top(law, num_atoms)
    weight = integer_weights(law[None, ids])[0]
    return DraftDistribution(ids[weight > 0], weight[weight > 0])


def quantise_top(ids: ArrayLike, probs: ArrayLike) -> tuple[Ints, Ints]:
    """`quantise` for many rows of selected atoms: (ids int64[B, K], weight int64[B, K]) in the order of `DraftDistribution`.

    ids int[B, K], probs float[B, K] in any order. Atoms without mass become id -1, weight 0, at the end of the row.
    """
    atoms, weight = np.array(ids, dtype=np.int64), integer_weights(np.asarray(probs, dtype=np.float64))
    if atoms.ndim != 2 or atoms.shape != weight.shape:
        raise ValueError(f"ids, probs: shapes {atoms.shape}, {weight.shape}; give both as [B, K]")
    order = np.lexsort((atoms, -weight), axis=1)
    atoms, weight = np.take_along_axis(atoms, order, axis=1), np.take_along_axis(weight, order, axis=1)
    atoms[weight == 0] = -1
    return atoms, weight
