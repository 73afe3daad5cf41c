"""Block Verification: all prefixes of a sampled chain are tested at once, the last success wins.

Source: "Block Verification Accelerates Speculative Decoding" (2403.10444). With s_i = Σ_{k≤i} log p/q the entry
budget of position i is exp(s_i − max_{j≤i} s_j), here in its product form w_i = min(1, w_{i−1}·p/q); given that i is
reached from behind it is accepted with w'_i = S/(S + (1 − w_i)), S = Σ[w_i·p − q]₊. The best any lossless verifier of
a chain can do. The same law as traversal on a chain.
"""

from __future__ import annotations

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.law import Law
from rootward.core.tree import TokenTree
from rootward.core.verification.child_laws import child_laws


def block(tree: TokenTree, target: Floats, draft: Floats, replacement: bool) -> Law:
    """Block verification of a chain. Arguments are checked by the caller."""
    if any(len(family) > 1 for family in tree.children):
        raise ValueError("tree: a node has several children; block needs a chain, use traversal")
    drawn_from = np.zeros_like(target)  # row i: law of the child of node i; nothing below the last node
    ratio = np.ones(len(tree))
    for node in range(len(tree) - 1):  # parents come first: on a chain the child of node i is i + 1
        child, x, drawn_from[node] = next(child_laws(tree, draft, node, replacement))
        ratio[child] = target[node, x] / drawn_from[node, x]
    entry = entry_budgets(ratio)
    rest = np.maximum(entry[:, None] * target - drawn_from, 0.0)
    mass = rest.sum(axis=1)
    budget = left(entry, mass)
    budget[-1] = entry[-1]  # nothing was tried after the last token
    residual = np.divide(rest, mass[:, None], out=target.copy(), where=mass[:, None] > 0.0)
    residual[-1] = target[-1]
    return Law("block", tree, last_success(budget), residual, entry, budget)


def entry_budgets(ratio: Floats) -> Floats:
    """w_i = min(1, w_{i−1} · ratio_i), w_0 = 1."""
    entry = np.ones(len(ratio))
    for i in range(1, len(ratio)):
        entry[i] = min(1.0, entry[i - 1] * ratio[i])
    return entry


def left(entry: Floats, mass: Floats) -> Floats:
    """S / (S + (1 − w)), 0/0 := 1."""
    whole = mass + (1.0 - entry)
    share: Floats = np.divide(mass, whole, out=np.ones_like(mass), where=whole > 0.0)
    return share


def last_success(budget: Floats) -> Floats:
    """float64[N]: probability that each position is the last whose test succeeds; the root's always does."""
    failed_behind = np.append(np.cumprod(1.0 - budget[:0:-1])[::-1], 1.0)
    stop: Floats = budget * failed_behind
    return stop
