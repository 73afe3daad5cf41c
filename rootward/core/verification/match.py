"""Target matching: the target draws its own token after every node; the round walks along the children that agree.

Lossless for ANY tree, since the draft law plays no part. Used for chosen trees ("EAGLE-2", 2406.16858; "OPT-Tree",
2406.17276) and for shared noise ("Coupling without Communication and Drafter-Invariant Speculative Decoding",
2408.07978).
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from rootward.core.arrays import integers
from rootward.core.law import Verdict
from rootward.core.tree import TokenTree


def match(tree: TokenTree, choice: ArrayLike) -> Verdict:
    """(stop, bonus). choice int[N]: the target's own token after each node. Of equal siblings the first is taken."""
    choices = integers("choice", choice)
    if len(choices) != len(tree):
        raise ValueError(
            f"choice: {len(choices)} tokens for {len(tree)} nodes; give the target's token after each node"
        )
    stop = 0
    for node in range(1, len(tree)):  # parents come first, so one pass in index order is the walk
        if tree.parent[node] == stop and tree.token[node] == choices[stop]:
            stop = node
    return Verdict(stop, int(choices[stop]))
