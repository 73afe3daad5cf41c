"""Token-level verification: root to leaf, each child accepted or not before its subtree is looked at.

Sources: "Fast Inference from Transformers via Speculative Decoding" (2211.17192) for a chain, "Recursive Speculative
Decoding" (2402.14160) for children drawn without replacement:

    P = p_v;  for each child c in draw order: accept with min(1, P(x)/Q_c(x)) and descend, else P = norm[P − Q_c]₊
    all children failed: stop at v, bonus token from P
"""

from __future__ import annotations

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.law import VerificationLaw
from rootward.core.tree import TokenTree
from rootward.core.verification.step import child_laws, step


def token(tree: TokenTree, target: Floats, draft: Floats, replacement: bool) -> VerificationLaw:
    """Token-level verification. Arguments are checked by the caller."""
    residual = target.copy()
    entry = np.ones(len(tree))
    for node in range(len(tree)):
        p = target[node]
        for child, x, q in child_laws(tree, draft, node, replacement):
            entry[child], _, p = step(1.0, p, q, x)
        residual[node] = p
    return VerificationLaw("token", tree, stop_from_the_top(tree, entry), residual, entry, np.ones(len(tree)))


def stop_from_the_top(tree: TokenTree, entry: Floats) -> Floats:
    """float64[N]: where a walk ends that enters each child, in draw order, with the child's own probability."""
    stop = np.zeros(len(tree))
    stop[0] = 1.0
    for node, family in enumerate(tree.children):
        here = float(stop[node])  # probability of reaching the node, until its children take their parts
        for child in family:
            stop[child] = here * entry[child]
            here *= 1.0 - entry[child]
        stop[node] = here
    return stop
