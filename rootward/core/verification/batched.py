"""Verification of many trees at once: `sparse_law` for a forest, in O(nodes × G) and without a Python loop over nodes.

The STEP of a child needs two things: the entry budget of its parent, which its parent's own STEP gives, and what the
STEPs of its earlier siblings left. So the child may be handled at the moment

    wave(v) = wave(parent) + rank among siblings + 1,      wave(root) = 0

and no two children of one wave share a parent. A wave is one vectorised STEP over all trees, whatever their shapes:

    for wave in waves:  v = parent[wave]
        (w(wave), w(v), P_v, t_v) = STEP(w(v), P_v, t_v, Q_wave, token of wave)

There are at most (largest depth) × (largest family) waves. What is computed is the traversal or the token-level law in
the form of `rootward.core.verification.sparse`; laws, guards and words are those of algorithms.md, sections 2, 3 and 7.

Legend: B trees, T nodes of all trees, K atoms, G gathered tokens (the K atoms first), M children of one wave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Bools, Floats, Ints, read_only
from rootward.core.tree import TokenTree
from rootward.core.verification.child_laws import TOLERANCE
from rootward.core.verification.sparse import ALGORITHMS, SparseLaw


@dataclass(frozen=True, eq=False)
class Forest:
    """Token trees one after another. Nodes are numbered through: node i of tree b is node start[b] + i of the forest.

    token, sampled  int64[T], bool[T]  as in `TokenTree`
    parent          int64[T]           number of the parent in the forest; -1 at a root
    start           int64[B + 1]       first node of each tree, and T

    As a sequence it is its trees: len(forest) is B, forest[b] a `TokenTree`. The columns given to it become read-only.
    """

    token: Ints
    parent: Ints
    sampled: Bools
    start: Ints

    def __post_init__(self) -> None:
        _check_forest(self.token, self.parent, self.sampled, self.start)
        for array in (self.token, self.parent, self.sampled, self.start):
            read_only(array)

    @staticmethod
    def of(trees: Sequence[TokenTree]) -> Forest:
        """The forest of some trees, at least one."""
        if not trees:
            raise ValueError("trees: none; give at least one")
        size = [len(tree) for tree in trees]
        start = np.concatenate([[0], np.cumsum(size)])
        parent = np.concatenate([tree.parent for tree in trees])
        parent = np.where(parent < 0, -1, parent + np.repeat(start[:-1], size))
        token, sampled = np.concatenate([t.token for t in trees]), np.concatenate([t.sampled for t in trees])
        return Forest(token, parent, sampled, start)

    def __len__(self) -> int:
        return len(self.start) - 1

    def __getitem__(self, b: int) -> TokenTree:
        if not 0 <= b < len(self):
            raise IndexError(f"tree {b} of {len(self)}")
        nodes = slice(int(self.start[b]), int(self.start[b + 1]))
        parent = self.parent[nodes] - self.start[b]
        return TokenTree(self.token[nodes], np.where(parent < 0, -1, parent), self.sampled[nodes])

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    @cached_property
    def tree(self) -> Ints:
        """int64[T]: the tree of each node."""
        return np.repeat(np.arange(len(self)), np.diff(self.start))

    @cached_property
    def depth(self) -> Ints:
        """int64[T]: number of draft tokens on the path to each node."""
        return self._along_path((self.parent >= 0).astype(np.int64))

    @cached_property
    def rank(self) -> Ints:
        """int64[T]: number of earlier siblings."""
        by_family = np.argsort(self.parent, kind="stable")  # index order is draw order
        place, parent = np.arange(self.num_nodes), self.parent[by_family]
        first = np.maximum.accumulate(np.where(np.diff(parent, prepend=-2) != 0, place, 0))
        rank = np.empty(self.num_nodes, dtype=np.int64)
        rank[by_family] = place - first
        rank[self.start[:-1]] = 0  # roots are no siblings
        return rank

    @cached_property
    def waves(self) -> list[Ints]:
        """The children that are handled together, wave after wave; parents and earlier siblings come in earlier waves."""
        wave = self._along_path(np.where(self.parent >= 0, self.rank + 1, 0))
        order = np.argsort(wave, kind="stable")
        first = np.searchsorted(wave[order], np.arange(1, wave[order[-1]] + 1))
        return np.split(order, first)[1:]  # the roots are wave 0

    @cached_property
    def post_order(self) -> Ints:
        """int64[T]: tree after tree; in each, children in draw order with their whole subtrees, then the parent."""
        size = np.ones(self.num_nodes, dtype=np.int64)
        for child in reversed(self.waves):
            size[self.parent[child]] += size[child]
        place = np.repeat(self.start[:-1], np.diff(self.start))  # of the next descendant to come; in the end, its own
        for child in self.waves:
            node = self.parent[child]
            place[child] = place[node]
            place[node] += size[child]
        order = np.empty(self.num_nodes, dtype=np.int64)
        order[place] = np.arange(self.num_nodes)
        return order

    def name(self, node: int) -> str:
        """A node in words, for messages."""
        return f"node {node - self.start[self.tree[node]]} of tree {self.tree[node]}"

    def _along_path(self, value: Ints) -> Ints:
        """int64[T]: sum of value over the path from the root, whose value is 0, to each node: log2(depth) passes."""
        up = np.where(self.parent < 0, np.arange(self.num_nodes), self.parent)
        while not np.array_equal(above := up[up], up):  # value[v] is the sum from v up to, but without, up[v]
            value, up = value + value[up], above
        return value


@dataclass(frozen=True, eq=False)
class ForestLaw:
    """`SparseLaw` of every tree of a forest, in flat arrays.

    stop, entry, budget  float64[T]     as in `Law`; stop sums to 1 over each tree
    ids                  int64[T, G]    gathered tokens, -1 where there is none
    residual             float64[T, G]  mass of the residual distribution at ids
    tail_scale           float64[T]     multiplier of the target's mass outside ids
    """

    algorithm: str
    forest: Forest
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
    def block_efficiency(self) -> Floats:
        """float64[B]: expected tokens of each round, the bonus token included: 1 + Σ stop · depth."""
        return 1.0 + np.add.reduceat(self.stop * self.forest.depth, self.forest.start[:-1])

    def of(self, b: int) -> SparseLaw:
        """The law of one tree; its arrays are views."""
        nodes = slice(int(self.forest.start[b]), int(self.forest.start[b + 1]))
        stop, entry, budget, scale = (a[nodes] for a in (self.stop, self.entry, self.budget, self.tail_scale))
        ids, residual = self.ids[nodes], self.residual[nodes]
        return SparseLaw(self.algorithm, self.forest[b], stop, entry, budget, ids, residual, scale)


def gather_ids(forest: Forest, atoms: ArrayLike) -> Ints:
    """int64[T, G]: `sparse.gather_ids` for a forest. atoms int64[T, K]: support of each draft row, -1 pad."""
    support = np.asarray(atoms, dtype=np.int64)
    if support.ndim != 2 or len(support) != forest.num_nodes:
        shape = f"[{forest.num_nodes}, K]"
        raise ValueError(f"atoms: shape {support.shape}; give K per node, {shape}, -1 where there is none")
    chosen = np.flatnonzero(~forest.sampled & (forest.parent >= 0))
    outside = chosen[~(support[forest.parent[chosen]] == forest.token[chosen, None]).any(axis=1)]
    if not len(outside):
        return support
    outside = outside[np.argsort(forest.parent[outside], kind="stable")]
    node = forest.parent[outside]
    place = np.arange(len(node)) - np.searchsorted(node, node)  # among the tokens that its parent's row lacks
    more = np.full((forest.num_nodes, int(place.max()) + 1), -1, dtype=np.int64)
    more[node, place] = forest.token[outside]
    return np.concatenate([support, more], axis=1)


def forest_law(
    algorithm: str, forest: Forest, ids: ArrayLike, weight: ArrayLike, target_at: ArrayLike, tail: ArrayLike
) -> ForestLaw:
    """The law of one round of every tree. algorithm: "token" or "traversal".

    ids       int64[T, G]    from `gather_ids`
    weight    int[T, K]      integer weights of the atoms ids[:, :K]; all zero where nothing was drawn
    target_at float64[T, G]  target mass at ids (anything where ids is -1)
    tail      float64[T]     target mass outside ids
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: {algorithm!r}; the batched form has {', '.join(ALGORITHMS)}")
    G, n = draft_rows(forest, ids, weight)
    p, t = _checked_target(forest, G, target_at, tail)
    column = columns(forest, G, n)
    entry, budget, rest = np.ones(len(t)), np.ones(len(t)), t.copy()
    budgets = algorithm == "traversal"  # token-level: every node starts again with the whole budget
    for child in forest.waves:
        v, j = forest.parent[child], column[child]
        q = _child_laws(n.take(v, axis=0), j, forest.sampled[child])
        entry[child], left_over, p[v], rest[v] = steps(budget[v], p.take(v, axis=0), rest[v], q, j)
        n[v, j] = 0.0
        if budgets:
            budget[child], budget[v] = entry[child], left_over
    stop = _stop_in_post_order(forest, budget) if budgets else _stop_from_the_top(forest, entry)
    scale = np.divide(rest, t, out=np.zeros_like(t), where=t > 0.0)
    return ForestLaw(algorithm, forest, stop, entry, budget, G, p, scale)


def steps(w: Floats, p: Floats, tail: Floats, q: Floats, j: Ints) -> tuple[Floats, Floats, Floats, Floats]:
    """`sparse_step` for M children: (a[M], w'[M], P'[M, G], t'[M]) from w[M], p[M, G], tail[M], q[M, G] and columns j[M]."""
    row = np.arange(len(j))
    rest = w[:, None] * p
    accept = np.minimum(1.0, rest[row, j] / q[row, j])
    rest -= q
    np.maximum(rest, 0.0, out=rest)
    mass = rest.sum(axis=1) + w * tail
    whole = mass + (1.0 - w)  # in this form nothing of a small S is lost when w is near 1
    left_over = np.divide(mass, whole, out=np.ones_like(w), where=whole > 0.0)
    nothing = mass == 0.0
    divisor = np.where(nothing, 1.0, mass)
    rest /= divisor[:, None]
    tail_left = w * tail / divisor
    if nothing.any():
        rest[nothing], tail_left[nothing] = p[nothing], tail[nothing]
        accept[nothing & (w == 1.0) & (accept > 0.0)] = 1.0  # P = Q up to rounding: `step.nothing_left`
    return accept, left_over, rest, tail_left


def stop_nodes(law: ForestLaw, coins: ArrayLike) -> Ints:
    """int64[B]: the node of the forest where each round stops; `verdict.stop_node` on every tree.

    coins float64[T] in [0, 1), one per node; those of the roots are not used.
    """
    u, forest = np.asarray(coins, dtype=np.float64), law.forest
    if u.shape != (forest.num_nodes,):
        raise ValueError(f"coins: shape {u.shape}; give one per node, {forest.num_nodes}")
    if law.algorithm == "traversal":
        order, place = forest.post_order, np.arange(forest.num_nodes)
        success = (u[order] < law.budget[order]) | (forest.parent[order] < 0)
        return order[np.minimum.reduceat(np.where(success, place, len(place)), forest.start[:-1])]
    accepted = np.flatnonzero((u < law.entry) & (forest.parent >= 0))[::-1]
    down = np.arange(forest.num_nodes)
    down[forest.parent[accepted]] = accepted  # of several accepted children the last assignment holds: the first drawn
    stop = forest.start[:-1]
    while not np.array_equal(below := down[stop], stop):
        stop = below
    return stop


def draft_rows(forest: Forest, ids: ArrayLike, weight: ArrayLike) -> tuple[Ints, Floats]:
    """(a view of ids int64[T, G], our own copy of weight widened to float64[T, G]), or a ValueError."""
    G, n, T = np.asarray(ids, dtype=np.int64).view(), np.asarray(weight), forest.num_nodes
    if G.ndim != 2 or len(G) != T:
        raise ValueError(f"ids: shape {G.shape}; give the gathered tokens, [{T}, G], -1 where there is none")
    if n.ndim != 2 or len(n) != T or n.shape[1] > G.shape[1]:
        raise ValueError(f"weight: shape {n.shape}; give the weights of the atoms, [{T}, K] with K <= {G.shape[1]}")
    wide = np.zeros(G.shape)
    wide[:, : n.shape[1]] = n
    pad = G < 0
    lightest, heaviest = wide.min(initial=0.0), wide.max(initial=0.0)  # NaN wins, and fails every comparison
    if not (lightest >= 0.0 and heaviest < np.inf) or ((wide > 0.0) & pad).any():
        raise ValueError("weight: negative, not finite, or given where ids is -1; give the weights of the atoms")
    ordered = G[~pad.all(axis=1)]
    ordered.sort(axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & ~(ordered[:, 1:] < 0)).any():
        raise ValueError("ids: a row names a token twice; give each atom once")
    return G, wide


def columns(forest: Forest, ids: Ints, weight: Floats) -> Ints:
    """int64[T]: where each node's token stands among the gathered tokens of its parent; 0 at roots.

    ids [T, G], weight [T, G]. ValueError if it is not there, is there for a sibling too, or if a drawn one has no weight.
    """
    column, present = np.zeros(forest.num_nodes, dtype=np.int64), forest.parent < 0
    for child in forest.waves if ids.shape[1] else ():
        rows = ids.take(forest.parent[child], axis=0)
        column[child] = j = (rows == forest.token[child, None]).argmax(axis=1)
        present[child] = rows[np.arange(len(j)), j] == forest.token[child]
    if not present.all():
        node = int(np.argmin(present))
        x = forest.token[node]
        raise ValueError(f"ids: no token {x} in the row of {forest.name(node)}'s parent; use gather_ids(forest, atoms)")
    child = np.flatnonzero(forest.parent >= 0)
    v = forest.parent[child]
    places = np.sort(v * ids.shape[1] + column[child])
    if (places[1:] == places[:-1]).any():
        node = int(places[np.argmax(places[1:] == places[:-1])]) // ids.shape[1]
        raise ValueError(
            f"token: siblings below {forest.name(node)} repeat a token; drawn children are without replacement"
        )
    empty = forest.sampled[child] & ~(weight[v, column[child]] > 0.0)
    if empty.any():
        node = int(child[np.argmax(empty)])
        x = forest.token[node]
        raise ValueError(f"weight: none for token {x} of {forest.name(node)}; send the row the child was drawn from")
    return column


def _child_laws(n: Floats, j: Ints, sampled: Bools) -> Floats:
    """float64[M, G]: the law each child was drawn from; n [M, G]: weights of its parent's row without earlier siblings.

    n is a copy and is used up."""
    total = n.sum(axis=1)
    total[~sampled] = np.inf  # a chosen child: one-hot
    n /= total[:, None]
    chosen = np.flatnonzero(~sampled)
    n[chosen, j[chosen]] = 1.0
    return n


def _stop_in_post_order(forest: Forest, budget: Floats) -> Floats:
    """float64[T]: probability that each node is the first of its tree in post-order whose coin falls below its budget."""
    order = forest.post_order
    tree, place = forest.tree, np.arange(len(order)) - forest.start[forest.tree]  # post-order goes tree by tree as well
    failed = np.ones((len(forest), int(place.max()) + 2))
    failed[tree, place + 1] = 1.0 - budget[order]
    stop = np.empty(len(order))
    stop[order] = budget[order] * np.cumprod(failed, axis=1)[tree, place]
    return stop


def _stop_from_the_top(forest: Forest, entry: Floats) -> Floats:
    """float64[T]: where a walk ends that enters each child, in draw order, with the child's own probability."""
    stop = (forest.parent < 0).astype(np.float64)
    for child in forest.waves:
        v = forest.parent[child]
        stop[child] = stop[v] * entry[child]  # stop[v]: probability of reaching v and passing the earlier siblings
        stop[v] *= 1.0 - entry[child]
    return stop


def _checked_target(forest: Forest, ids: Ints, target_at: ArrayLike, tail: ArrayLike) -> tuple[Floats, Floats]:
    """(target_at with 0 at pads, tail), our own copies."""
    at, t, T = np.asarray(target_at, dtype=np.float64), np.array(tail, dtype=np.float64), forest.num_nodes
    if at.shape != ids.shape or t.shape != (T,):
        shapes = f"{ids.shape}, {at.shape}, {t.shape}"
        raise ValueError(f"ids, target_at, tail: shapes {shapes}; give [{T}, G], [{T}, G], [{T}]")
    p = np.where(ids < 0, 0.0, at)
    whole = p.sum(axis=1) + t
    wrong = ~((np.abs(whole - 1.0) <= TOLERANCE) & (t >= 0.0))  # NaN fails every comparison
    if p.min(initial=0.0) < 0.0:
        wrong |= (p < 0.0).any(axis=1)
    if wrong.any():
        node = int(np.argmax(wrong))
        given = f"row {node}, {forest.name(node)}, sums to {whole[node]}"
        raise ValueError(f"target_at, tail: {given}; give the target law at ids and its rest")
    return p, t


def _check_forest(token: Ints, parent: Ints, sampled: Bools, start: Ints) -> None:
    if not token.shape == parent.shape == sampled.shape == (len(parent),):
        shapes = f"{token.shape}, {parent.shape}, {sampled.shape}"
        raise ValueError(f"token, parent, sampled: shapes {shapes}; give one each per node")
    if len(start) < 2 or start[0] != 0 or start[-1] != len(parent) or (np.diff(start) < 1).any():
        raise ValueError(f"start: from {start[:1]} to {start[-1:]}; give the first node of each tree and {len(parent)}")
    first = np.repeat(start[:-1], np.diff(start))
    node = np.arange(len(parent))
    wrong = np.where(node == first, parent != -1, (parent < first) | (parent >= node))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(f"parent: {parent[i]} at {i}; -1 at the first node of a tree, an earlier node of it elsewhere")
