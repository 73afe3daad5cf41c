"""Traversal Verification: leaf to root, one budget per node.

Source: "Traversal Verification for Speculative Tree Decoding" (2505.12398). The published loop (take the first leaf,
accept or delete it, update its parent, recompute the descendants) is here one top-down pass without randomness and
one decision:

    w(root) = 1;  P_v = p_v
    for v, parents first:  for c in children(v), in draw order:  (w(c), w(v), P_v) = STEP(w(v), P_v, Q_c, token c)
    stop = first node in post-order with U_v < w(v)

so that stop(v) = w(v) · Π (1 − w(u)) over the nodes u before v in post-order. On a chain this is Block Verification
(2403.10444).
"""

from __future__ import annotations

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.law import VerificationLaw
from rootward.core.tree import TokenTree
from rootward.core.verification.step import child_laws, step


def traversal(tree: TokenTree, target: Floats, draft: Floats, replacement: bool) -> VerificationLaw:
    """Traversal verification. Arguments are checked by the caller."""
    residual = target.copy()
    entry = np.ones(len(tree))
    budget = np.ones(len(tree))
    for node in range(len(tree)):
        w, p = float(entry[node]), target[node]
        for child, token, q in child_laws(tree, draft, node, replacement):
            entry[child], w, p = step(w, p, q, token)
        budget[node], residual[node] = w, p
    return VerificationLaw("traversal", tree, stop_in_post_order(tree, budget), residual, entry, budget)


def stop_in_post_order(tree: TokenTree, budget: Floats) -> Floats:
    """float64[N]: probability that each node is the first in post-order whose coin falls below its budget."""
    ordered = budget[tree.post_order]
    passed = np.concatenate([[1.0], np.cumprod(1.0 - ordered[:-1])])
    stop = np.empty(len(tree))
    stop[tree.post_order] = ordered * passed
    return stop
