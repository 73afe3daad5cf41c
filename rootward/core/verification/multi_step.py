"""Multi-step speculative sampling: i.i.d. children, tried in uniformly random order.

Source: "SpecInfer" (2305.09781):

    H = children;  P = p_v
    while H: pick s in H uniformly; accept with min(1, P(x_s)/q_v(x_s)), else P = norm[P − q_v]₊ and H −= s
    H empty: stop at v, bonus token from P

After k failures the residual is P_k, whatever the order; so a round has one law: the average over the orders, with
one residual per node. Valid only if repeated tokens are kept and the number of children was fixed before they were drawn.
"""

from __future__ import annotations

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.law import VerificationLaw
from rootward.core.tree import TokenTree
from rootward.core.verification.step import child_laws, step

MOST_CHILDREN = 14  # the average runs over all subsets of a family


def multi_step(tree: TokenTree, target: Floats, draft: Floats, replacement: bool) -> VerificationLaw:
    """Multi-step verification. Arguments are checked by the caller. `entry` is here the probability that a node is
    the accepted one among its siblings, given that their parent is reached."""
    _check_families(tree, replacement)
    residual = target.copy()
    entry = np.ones(len(tree))
    stop = np.ones(len(tree))  # probability of reaching each node, replaced at its turn by that of stopping there
    for node, family in enumerate(tree.children):
        accept, residual[node] = after_failures(tree, target[node], draft, node, replacement)
        taken, none = one_of(accept)
        entry[list(family)] = taken
        stop[list(family)] = stop[node] * taken
        stop[node] *= none
    return VerificationLaw("multi_step", tree, stop, residual, entry, np.ones(len(tree)))


def after_failures(tree: TokenTree, p: Floats, draft: Floats, node: int, replacement: bool) -> tuple[Floats, Floats]:
    """(float64[k, i]: acceptance probability of child i after k failures; float64[V]: the residual distribution after all failed)."""
    drawn = [(x, q) for _, x, q in child_laws(tree, draft, node, replacement)]
    accept = np.empty((len(drawn), len(drawn)))
    for k in range(len(drawn)):
        steps = [step(1.0, p, q, x) for x, q in drawn]
        accept[k] = [a for a, _, _ in steps]
        p = steps[0][2]  # the same for every child: their laws are equal
    return accept, p


def one_of(accept: Floats) -> tuple[Floats, float]:
    """(probability that each child is the accepted one, probability that none is), over uniformly random orders."""
    n = len(accept)
    taken = np.zeros(n)
    failed = np.zeros(1 << n)  # [set]: probability that the children of this set were tried first and all failed
    failed[0] = 1.0
    for subset in range((1 << n) - 1):
        rest = [i for i in range(n) if not subset >> i & 1]
        turn = failed[subset] / len(rest)
        for i in rest:
            a = accept[n - len(rest), i]
            taken[i] += turn * a
            failed[subset | 1 << i] += turn * (1.0 - a)
    return taken, float(failed[-1])


def _check_families(tree: TokenTree, replacement: bool) -> None:
    for node, family in enumerate(tree.children):
        if len(family) < 2:
            continue
        if not replacement:
            raise ValueError(
                f"replacement: False, {len(family)} children at node {node}; multi_step needs replacement=True"
            )
        if not tree.sampled[list(family)].all():
            raise ValueError(f"sampled: node {node} has a chosen child; multi_step needs families that are all drawn")
        if len(family) > MOST_CHILDREN:
            raise ValueError(f"tree: node {node} has {len(family)} children; multi_step takes at most {MOST_CHILDREN}")
