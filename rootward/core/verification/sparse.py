"""Verification with draft rows of bounded support: O(K) per child (algorithms.md, section 7).

A draft row is K atoms with integer weights; its law is weight / Σ weight. Below, G_v = atoms of row v ∪ tokens of v's
chosen children. Outside G_v no draft law has mass, so STEP treats all of it as one atom of target mass t that only
ever scales:

    a = min(1, w·P(x)/Q(x));  R = [w·P − Q]₊;  S = ΣR + w·t;  w' = S/(S + (1 − w));  P' = R/S;  t' = w·t/S

The engine asks `gather_ids` which target masses it must gather, gathers them with one tail per row, and gets the same
law as the dense form. Drawn children are without replacement.

Legend: N nodes, K atoms, G gathered tokens (the K atoms first, then chosen tokens that are no atoms), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Floats, Ints, read_only
from rootward.core.law import VerificationLaw
from rootward.core.tree import TokenTree
from rootward.core.verification.child_laws import TOLERANCE, check_siblings
from rootward.core.verification.step import left, nothing_left
from rootward.core.verification.token import stop_from_the_top
from rootward.core.verification.traversal import stop_in_post_order

ALGORITHMS = ("token", "traversal")


@dataclass(frozen=True, eq=False)
class SparseLaw:
    """`VerificationLaw` without a vocabulary: the residual distribution is `residual` on `ids` and tail_scale · p elsewhere.

    stop, entry, budget  float64[N]     as in `VerificationLaw`
    ids                  int64[N, G]    gathered tokens, -1 where there is none
    residual             float64[N, G]  mass of the residual distribution at ids
    tail_scale           float64[N]     multiplier of the target's mass outside ids
    """

    algorithm: str
    tree: TokenTree
    stop: Floats
    entry: Floats
    budget: Floats
    ids: Ints
    residual: Floats
    tail_scale: Floats

    def __post_init__(self) -> None:
        for array in (self.stop, self.entry, self.budget, self.ids, self.residual, self.tail_scale):
            read_only(array)

    @property
    def block_efficiency(self) -> float:
        """Expected tokens of the round, the bonus token included: 1 + Σ stop · depth."""
        return 1.0 + float(self.stop @ self.tree.depth)

    def bonus_row(self, node: int, target_row: ArrayLike) -> Floats:
        """float64[V]: the exact residual distribution at a node, from the target's row there."""
        row: Floats = np.asarray(target_row, dtype=np.float64) * self.tail_scale[node]
        gathered = self.ids[node] >= 0
        row[self.ids[node, gathered]] = self.residual[node, gathered]
        return row

    def dense(self, target: ArrayLike) -> VerificationLaw:
        """The same law over the vocabulary. target float64[N, V]."""
        rows = np.asarray(target, dtype=np.float64)
        residual = np.stack([self.bonus_row(node, rows[node]) for node in range(len(self.tree))])
        return VerificationLaw(self.algorithm, self.tree, self.stop, residual, self.entry, self.budget)


def gather_ids(tree: TokenTree, atoms: ArrayLike) -> Ints:
    """int64[N, G]: the tokens of each row whose target mass a verification needs; -1 where there is none.

    atoms int64[N, K]: support of each draft row, -1 pad. Columns 0..K-1 repeat it; the rest are tokens of chosen
    children outside it.
    """
    support = np.array(atoms, dtype=np.int64)
    if support.ndim != 2 or len(support) != len(tree):
        raise ValueError(f"atoms: shape {support.shape}; give K per node, [{len(tree)}, K], -1 where there is none")
    chosen = np.flatnonzero(~tree.sampled[1:]) + 1
    outside = chosen[~(support[tree.parent[chosen]] == tree.token[chosen, None]).any(axis=1)]
    extras: list[list[int]] = [[] for _ in range(len(tree))]
    for node in outside.tolist():
        extras[tree.parent[node]].append(int(tree.token[node]))
    width = max(map(len, extras))
    more = np.array([row + [-1] * (width - len(row)) for row in extras], dtype=np.int64).reshape(len(tree), width)
    return np.concatenate([support, more], axis=1)


def gather(target: ArrayLike, ids: Ints) -> tuple[Floats, Floats]:
    """(target_at float64[N, G], tail float64[N]) from a dense target; the tail is summed over the complement."""
    rows = np.array(target, dtype=np.float64)
    present = ids >= 0
    at = np.where(present, np.take_along_axis(rows, np.where(present, ids, 0), axis=1), 0.0)
    node, column = np.nonzero(present)
    rows[node, ids[node, column]] = 0.0
    return at, rows.sum(axis=1)


def sparse_law(
    algorithm: str, tree: TokenTree, ids: ArrayLike, weight: ArrayLike, target_at: ArrayLike, tail: ArrayLike
) -> SparseLaw:
    """The law of one round. algorithm: "token" or "traversal".

    ids       int64[N, G]    from `gather_ids`
    weight    int[N, K]      integer weights of the atoms ids[:, :K]; all zero where nothing was drawn
    target_at float64[N, G]  target mass at ids (anything where ids is -1)
    tail      float64[N]     target mass outside ids
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: {algorithm!r}; the sparse form has {', '.join(ALGORITHMS)}")
    G, n, p, t = _checked(tree, ids, weight, target_at, tail)
    column = _columns(tree, G)
    entry, budget, scale = np.ones(len(tree)), np.ones(len(tree)), np.ones(len(tree))
    budgets = algorithm == "traversal"  # token-level: every node starts again with the whole budget
    for node, family in enumerate(tree.children):
        w, mass, rest = float(entry[node]) if budgets else 1.0, p[node], float(t[node])
        remaining = n[node].copy()
        for child in family:
            j = int(column[child])
            q = _child_law(tree, child, remaining, j)
            entry[child], left_over, mass, rest = sparse_step(w, mass, rest, q, j)
            w = left_over if budgets else 1.0
            remaining[j] = 0.0
        p[node], budget[node] = mass, w
        scale[node] = rest / t[node] if t[node] > 0.0 else 0.0
    return _finished(algorithm, tree, G, p, scale, entry, budget)


def sparse_step(w: float, p: Floats, tail: float, q: Floats, j: int) -> tuple[float, float, Floats, float]:
    """(a, w', P', t') for the child at column j of the gathered tokens."""
    offered = w * p
    accept = min(1.0, float(offered[j]) / float(q[j]))
    rest = np.maximum(offered - q, 0.0)
    mass = float(rest.sum()) + w * tail
    if mass == 0.0:
        return nothing_left(w, accept), left(w, mass), p, tail
    return accept, left(w, mass), rest / mass, w * tail / mass


def _child_law(tree: TokenTree, child: int, remaining: Floats, j: int) -> Floats:
    if not tree.sampled[child]:
        one_hot = np.zeros_like(remaining)
        one_hot[j] = 1.0
        return one_hot
    if not remaining[j] > 0.0:
        x = tree.token[child]
        raise ValueError(f"weight: none for token {x} of node {child}; send the row the child was drawn from")
    law: Floats = remaining / remaining.sum()
    return law


def _columns(tree: TokenTree, ids: Ints) -> Ints:
    """int64[N]: where each node's token stands among the gathered tokens of its parent."""
    found = ids[tree.parent[1:]] == tree.token[1:, None]
    if not found.any(axis=1).all():
        node = int(np.argmin(found.any(axis=1))) + 1
        x = tree.token[node]
        raise ValueError(f"ids: no token {x} in the row of node {node}'s parent; use gather_ids(tree, atoms)")
    return np.concatenate([[-1], found.argmax(axis=1)]) if len(tree) > 1 else np.array([-1])


def _checked(
    tree: TokenTree, ids: ArrayLike, weight: ArrayLike, target_at: ArrayLike, tail: ArrayLike
) -> tuple[Ints, Floats, Floats, Floats]:
    """(ids, weight widened to G columns, target_at with 0 at pads, tail), all our own copies."""
    G, n = np.array(ids, dtype=np.int64), np.array(weight, dtype=np.float64)
    p, t = np.array(target_at, dtype=np.float64), np.array(tail, dtype=np.float64)
    N = len(tree)
    if G.ndim != 2 or len(G) != N or p.shape != G.shape or t.shape != (N,):
        shapes = f"{G.shape}, {p.shape}, {t.shape}"
        raise ValueError(f"ids, target_at, tail: shapes {shapes}; give [{N}, G], [{N}, G], [{N}]")
    if n.ndim != 2 or len(n) != N or n.shape[1] > G.shape[1]:
        raise ValueError(f"weight: shape {n.shape}; give the weights of the atoms, [{N}, K] with K <= {G.shape[1]}")
    n = np.pad(n, ((0, 0), (0, G.shape[1] - n.shape[1])))
    pad = G < 0
    p[pad] = 0.0
    if not ((n >= 0.0) & (n < np.inf)).all() or n[pad].any():
        raise ValueError("weight: negative, not finite, or given where ids is -1; give the weights of the atoms")
    ordered = np.sort(G, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise ValueError("ids: a row names a token twice; give each atom once")
    whole = p.sum(axis=1) + t
    wrong = ~((np.abs(whole - 1.0) <= TOLERANCE) & (t >= 0.0) & (p >= 0.0).all(axis=1))
    if wrong.any():
        node = int(np.argmax(wrong))
        raise ValueError(f"target_at, tail: row {node} sums to {whole[node]}; give the target law at ids and its rest")
    check_siblings(tree)
    return G, n, p, t


def _finished(
    algorithm: str, tree: TokenTree, ids: Ints, residual: Floats, scale: Floats, entry: Floats, budget: Floats
) -> SparseLaw:
    stop = stop_in_post_order(tree, budget) if algorithm == "traversal" else stop_from_the_top(tree, entry)
    return SparseLaw(algorithm, tree, stop, entry, budget, ids, residual, scale)
