"""Verification: (tree, target rows, draft rows) → the law of the round, a probability distribution over its verdicts.
The table of algorithms.md, section 4, tells which algorithm is lossless for which tree construction; "token" and
"traversal" may verify all trees of `rootward.core.drafting` except those of `coupled`.
"""

from __future__ import annotations

from collections.abc import Callable

from numpy.typing import ArrayLike

from rootward.core.arrays import Floats
from rootward.core.law import Verdict, VerificationLaw, bonus_token, stop_node
from rootward.core.tree import TokenTree
from rootward.core.verification.block import block
from rootward.core.verification.match import match
from rootward.core.verification.multi_step import multi_step
from rootward.core.verification.step import checked
from rootward.core.verification.token import token
from rootward.core.verification.traversal import traversal

__all__ = ["Verdict", "bonus_token", "law", "match", "stop_node"]

ALGORITHMS: dict[str, Callable[[TokenTree, Floats, Floats, bool], VerificationLaw]] = {
    "token": token,
    "multi_step": multi_step,
    "block": block,
    "traversal": traversal,
}


def law(
    algorithm: str, tree: TokenTree, target: ArrayLike, draft: ArrayLike, *, replacement: bool = False
) -> VerificationLaw:
    """The law of one round.

    algorithm   "token" | "multi_step" | "block" | "traversal"
    target      float64[N, V]  row i = law p of what follows node i, leaves included
    draft       float64[N, V]  row i = law the FIRST sampled child of i was drawn from (GREEDY: q′); rows of nodes
                               without sampled children are ignored
    replacement True: children are i.i.d. copies, each drawn from the whole row
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: {algorithm!r}; choose from {', '.join(ALGORITHMS)}")
    p, q = checked(tree, target, draft, replacement)
    return ALGORITHMS[algorithm](tree, p, q, replacement)
