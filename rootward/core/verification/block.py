"""Block Verification: all prefixes of a sampled chain are tested, the last success wins.

Source: "Block Verification Accelerates Speculative Decoding" (2403.10444). With s_i = Σ_{k≤i} log p/q the entry
budget of position i is exp(s_i − max_{j≤i} s_j), here in its product form w_i = min(1, w_{i−1}·p/q). Given that
everything behind it failed, i is accepted with w'_i = S/(S + (1 − w_i)), S = Σ[w_i·p − q]₊. No lossless verifier
accepts more of a chain on average; on a chain traversal has the same law.
"""

from __future__ import annotations

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.law import VerificationLaw
from rootward.core.tree import TokenTree
from rootward.core.verification.step import child_laws, step


def block(tree: TokenTree, target: Floats, draft: Floats, replacement: bool) -> VerificationLaw:
    """Block verification of a chain. Arguments are checked by the caller."""
    if any(len(family) > 1 for family in tree.children):
        raise ValueError("tree: a node has several children; block needs a chain, use traversal")
    residual = target.copy()
    entry = np.ones(len(tree))
    budget = np.ones(len(tree))
    for node in range(len(tree) - 1):  # parents come first: on a chain the child of node i is i + 1
        child, token, q = next(child_laws(tree, draft, node, replacement))
        entry[child], budget[node], residual[node] = step(float(entry[node]), target[node], q, token)
    budget[-1] = entry[-1]  # below the last token nothing was tried
    return VerificationLaw("block", tree, last_success(budget), residual, entry, budget)


def last_success(budget: Floats) -> Floats:
    """float64[N]: probability that each position is the last whose test succeeds; the root's always does."""
    failed_behind = np.append(np.cumprod(1.0 - budget[:0:-1])[::-1], 1.0)
    stop: Floats = budget * failed_behind
    return stop
