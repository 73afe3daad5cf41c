"""From a law and coins to a verdict.

One coin per node, keyed by the node, so the same tree gets the same verdict:

    traversal, block   the first node in post-order with U_v < w(v); the root always succeeds
    token              from the root: descend into the first child c with U_c < a(c); none: stop

The bonus token is argmax over y of log r(y) + g(y) with Gumbel noise g: a sample of the residual distribution r of
the stop node.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Floats
from rootward.core.law import VerificationLaw


def stop_node(law: VerificationLaw, coins: ArrayLike) -> int:
    """The node where the round stops. coins float64[N] in [0, 1), one per node of the tree; the root's is not used."""
    u = np.asarray(coins, dtype=np.float64)
    if u.shape != (len(law.tree),):
        raise ValueError(f"coins: shape {u.shape}; give one per node, {len(law.tree)}")
    if law.algorithm in ("traversal", "block"):
        return _first_in_post_order(law, u)
    if law.algorithm == "token":
        return _from_the_top(law, u)
    raise ValueError(f"algorithm: {law.algorithm!r} has no rule for coins; use VerificationLaw.draw")


def bonus_token(row: ArrayLike, gumbel: ArrayLike) -> int:
    """A token with law `row` (float64[V]), the smallest of equals; never one without mass."""
    law = np.asarray(row, dtype=np.float64)
    if not law.max() > 0.0:
        raise ValueError(f"row: largest mass {law.max()}; give the residual distribution of the stop node")
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(law) + np.asarray(gumbel, dtype=np.float64)))


def _first_in_post_order(law: VerificationLaw, u: Floats) -> int:
    order = law.tree.post_order
    success = u[order] < law.budget[order]
    success[-1] = True
    return int(order[np.argmax(success)])


def _from_the_top(law: VerificationLaw, u: Floats) -> int:
    node = 0
    while (child := next((c for c in law.tree.children[node] if u[c] < law.entry[c]), None)) is not None:
        node = child
    return node
