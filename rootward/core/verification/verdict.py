"""The verdict of a round, computed from a verification law and random numbers.

Each node v has one uniform random number U_v ("coin"), keyed by the node, so that the same tree gets the same verdict:

    traversal, block   the stop node is the first node in post-order with U_v < w(v) (`law.budget`), otherwise the root
    token              from the root, descend into the first child c with U_c < a(c) (`law.entry`); stop where there is none

The bonus token is argmax over y of log r(y) + g(y) with Gumbel noise g: a sample of the residual distribution r of
the stop node.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Floats
from rootward.core.law import VerificationLaw


def stop_node(law: VerificationLaw, coins: ArrayLike) -> int:
    """The stop node. coins: float64[N] in [0, 1), one per node of the tree; that of the root is not used."""
    u = np.asarray(coins, dtype=np.float64)
    if u.shape != (len(law.tree),):
        raise ValueError(f"coins: shape {u.shape}; give ({len(law.tree)},), one per node")
    if law.algorithm in ("traversal", "block"):
        return _first_in_post_order(law, u)
    if law.algorithm == "token":
        return _by_descent(law, u)
    raise ValueError(f"algorithm: {law.algorithm!r} has no verdict from one coin per node; use VerificationLaw.draw")


def bonus_token(row: ArrayLike, gumbel: ArrayLike) -> int:
    """A sample of the distribution `row` (float64[V]) by Gumbel noise float64[V]; the smallest token among equals, never one of mass 0."""
    mass = np.asarray(row, dtype=np.float64)
    if not mass.max() > 0.0:
        raise ValueError(f"row: largest mass {mass.max()}; give the residual distribution of the stop node")
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(mass) + np.asarray(gumbel, dtype=np.float64)))


def _first_in_post_order(law: VerificationLaw, u: Floats) -> int:
    order = law.tree.post_order
    success = u[order] < law.budget[order]
    success[-1] = True
    return int(order[np.argmax(success)])


def _by_descent(law: VerificationLaw, u: Floats) -> int:
    node = 0
    while (child := next((c for c in law.tree.children[node] if u[c] < law.entry[c]), None)) is not None:
        node = child
    return node
