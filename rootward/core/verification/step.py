"""The common parts of the ratio tests: the law of each child, the primitive STEP, and the checks of arguments.

A sampled child has the draft row of its parent without the tokens of ALL earlier siblings, drawn or chosen, renormalised; with replacement
the row unchanged. A chosen child has the law that is one-hot at its token. Siblings come in index order, which is draw order.

STEP is the one primitive of every ratio test (algorithms.md, section 2):

    a  = min(1, w·P(x) / Q(x))            acceptance budget of the child x
    R  = [w·P − Q]₊ ;  S = Σ R
    w' = S / (S + (1 − w))                budget of the parent once x and all nodes below it have failed; 0/0 := 1
    P' = R / S                            target law of the parent from then on; S = 0: keep P

For every token y, with A = Σ_x Q(x)·a(x):  w·P(y) = Q(y)·a(y) + (1 − A)·w'·P'(y).
With w = 1 this is the test of "Fast Inference from Transformers via Speculative Decoding" (2211.17192).

Legend: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Bools, Floats
from rootward.core.tree import TokenTree

TOLERANCE = 1e-6  # on the sum of a used row


def child_laws(tree: TokenTree, draft: Floats, node: int, replacement: bool) -> Iterator[tuple[int, int, Floats]]:
    """(child, its token, its law Q) for the children of a node in draw order."""
    row, whole = draft[node], True
    for child in tree.children[node]:
        token = int(tree.token[child])
        if not tree.sampled[child]:
            law = np.zeros_like(row)
            law[token] = 1.0
        else:
            if not row[token] > 0.0:
                raise ValueError(f"draft: no mass on token {token} of node {child}; declare the law it was drawn from")
            law = row if whole else row / row.sum()
        yield child, token, law
        if not replacement:
            row, whole = row.copy(), False
            row[token] = 0.0


def step(w: float, p: Floats, q: Floats, x: int) -> tuple[float, float, Floats]:
    """STEP(w, P, Q, x) -> (a, w', P') for a child x drawn from Q. Inputs are not changed."""
    if not q[x] > 0.0:
        raise ValueError(f"draft: no mass on the drawn token {x}; declare the law the child was drawn from")
    offered = w * p
    accept = min(1.0, float(offered[x]) / float(q[x]))
    rest = np.maximum(offered - q, 0.0)
    mass = float(rest.sum())
    if mass == 0.0:
        return nothing_left(w, accept), left(w, mass), p
    return accept, left(w, mass), rest / mass


def nothing_left(w: float, accept: float) -> float:
    """The acceptance a when S = 0. With w = 1 this is P = Q, and a = 1 unless the target forbids x. Computed from P and Q it may
    miss 1 by a rounding; x could then be tried, fail, and still be in the residual distribution."""
    return 1.0 if w == 1.0 and accept > 0.0 else accept


def left(w: float, mass: float) -> float:
    """w' = S / (S + (1 − w)); in this form nothing of a small S is lost when w is near 1."""
    whole = mass + (1.0 - w)
    return mass / whole if whole > 0.0 else 1.0


def checked(tree: TokenTree, target: ArrayLike, draft: ArrayLike, replacement: bool) -> tuple[Floats, Floats]:
    """target and draft as float64[N, V]. ValueError: shapes or tokens do not fit, or a row that is used is not a law."""
    p = np.array(target, dtype=np.float64)
    q = np.array(draft, dtype=np.float64)
    for name, rows in (("target", p), ("draft", q)):
        if rows.ndim != 2 or rows.shape[0] != len(tree) or rows.shape[1] == 0:
            raise ValueError(f"{name}: shape {rows.shape}; give one row over the vocabulary per node, {len(tree)} rows")
    if p.shape != q.shape:
        raise ValueError(f"draft: shape {q.shape}; use the vocabulary of target, {p.shape}")
    vocabulary, largest = p.shape[1], int(tree.token[1:].max(initial=0))
    if largest >= vocabulary:
        raise ValueError(f"token: {largest} in a vocabulary of {vocabulary}; use ids below it")
    tokens = tree.token.tolist()
    for family in tree.children:
        if not replacement and len({tokens[child] for child in family}) < len(family):
            raise ValueError(f"token: siblings {family} repeat a token; copies need replacement=True")
    has_sampled_child = np.zeros(len(tree), dtype=np.bool_)
    has_sampled_child[tree.parent[1:][tree.sampled[1:]]] = True
    _check_rows(p, q, has_sampled_child)
    return p, q


def _check_rows(p: Floats, q: Floats, has_sampled_child: Bools) -> None:
    """Used rows are finite, not negative, and sum to 1: all of p, and of q those that a child was drawn from."""
    rows = np.concatenate([p, q[has_sampled_child]])
    with np.errstate(invalid="ignore"):  # inf − inf
        sums = rows.sum(axis=1)
    lawful = (np.abs(sums - 1.0) <= TOLERANCE) & (rows.min(axis=1) >= 0.0)  # NaN fails every comparison
    if not lawful.all():
        at = int(np.argmin(lawful))
        name, node = ("target", at) if at < len(p) else ("draft", int(np.flatnonzero(has_sampled_child)[at - len(p)]))
        raise ValueError(
            f"{name}: row {node} has sum {sums[at]} and minimum {rows[at].min()}; give a finite law that sums to 1"
        )
