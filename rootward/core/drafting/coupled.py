"""Children under noise shared with the target ("Coupling without Communication and Drafter-Invariant Speculative
Decoding", 2408.07978).

The target's token at a position is argmax log p + g; a drafter that knows g takes the largest of log q + g. Verified
by `match`, never by ratio tests: shared noise ties draws of one position together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Ints, integers


def coupled_children(ids: ArrayLike, probs: ArrayLike, noise: ArrayLike, num_children: int) -> Ints:
    """int64[m]: the m of `ids` with the largest log q + g, decreasing, ties to the smaller id.

    probs float[k]: draft masses of ids up to a common factor (integer weights will do); none without mass is taken.
    noise float[k]: `rng.target_gumbel` of ids at the position of the children.
    """
    atoms = integers("ids", ids)
    mass, gumbel = np.asarray(probs, dtype=np.float64), np.asarray(noise, dtype=np.float64)
    if not len(atoms) == len(mass) == len(gumbel):
        raise ValueError(f"ids, probs, noise: lengths {len(atoms)}, {len(mass)}, {len(gumbel)}; give one each per atom")
    with np.errstate(divide="ignore"):
        score = np.log(mass) + gumbel
    order = np.lexsort((atoms, -score))[: max(num_children, 0)]
    return atoms[order[mass[order] > 0.0]]
