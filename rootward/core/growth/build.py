"""One whole tree from a function that gives draft distributions, for tests and benchmarks: the strategies that services run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rootward.core.arrays import Floats, Words
from rootward.core.distribution import DenseDistribution
from rootward.core.growth.growth import growth_of
from rootward.core.growth.strategies import UNLIMITED, Strategy
from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode
from rootward.core.tree import TokenTree

RowOf = Callable[[tuple[int, ...]], Floats]  # the processed draft law after these tokens


def build_tree(
    strategy: Strategy,
    row: RowOf,
    rng: np.random.Generator,
    *,
    num_nodes: int = UNLIMITED,
    noise: RowOf | None = None,
) -> tuple[TokenTree, Floats]:
    """(tree, draft float64[N, V]), ready for `verification.law`: a tree of at most `num_nodes` nodes, grown until it is at rest.

    Nodes come level by level, families in the order of their parents and in draw order; draft rows of nodes without drawn children are
    zero, but for chosen trees, where they inform. noise: COUPLED, float64[V] of Gumbel noise after these tokens.
    """
    first = checked_row(row, ())
    tree = LivingTree(0, 0, vocab_size=UNLIMITED, node_cap=UNLIMITED, copies=strategy.mode is DraftMode.IID)
    growth = growth_of(tree, strategy, node_cap=num_nodes)
    path: dict[int, tuple[int, ...]] = {tree.root_id: ()}
    dense: dict[int, Floats] = {}

    def new_words(n: int) -> Words:
        return rng.integers(1 << 64, size=n, dtype=np.uint64)

    frontier = [tree.root_id]
    while frontier or not growth.at_rest:
        for node in frontier:
            dense[node] = checked_row(row, path[node]) if path[node] else first
            found = DenseDistribution(dense[node])
            growth.expand(node, found, None if noise is None else noise(path[node])[found.ids])
        for child in growth.draw(new_words):
            record = tree.nodes[child]
            path[child] = (*path[record.parent], record.token)
        frontier = growth.frontier(UNLIMITED)
    chosen = None if strategy.mode.ratio else lambda node: dense[node] if node in dense else row(path[node])
    return _in_levels(tree, chosen, len(first))


def _in_levels(tree: LivingTree, row_of: Callable[[int], Floats] | None, vocabulary: int) -> tuple[TokenTree, Floats]:
    order = list(_levels(tree))
    index = {node: i for i, node in enumerate(order)}
    records = [tree.at(node) for node in order]
    draft = np.zeros((len(order), vocabulary))
    for node, record in zip(order, records, strict=True):
        if any(tree.nodes[c].sampled for c in record.children):
            assert record.row is not None
            ids, weight = record.row
            draft[index[node], ids] = weight / weight.sum()
        elif record.children and row_of is not None:
            draft[index[node]] = row_of(node)
    parents = [-1, *(index[record.parent] for record in records[1:])]
    return TokenTree([0, *(r.token for r in records[1:])], parents, [False, *(r.sampled for r in records[1:])]), draft


def _levels(tree: LivingTree) -> Iterator[int]:
    level = [tree.root_id]
    while level:
        yield from level
        level = [child for node in level for child in tree.at(node).children]


def checked_row(row: RowOf, path: tuple[int, ...]) -> Floats:
    """row(path) as float64[V], or a ValueError."""
    law = np.array(row(path), dtype=np.float64)
    if law.ndim != 1 or not (abs(law.sum() - 1.0) <= 1e-6 and law.min() >= 0.0):
        raise ValueError(f"row: after {path} shape {law.shape}, sum {law.sum()}; give a law over the vocabulary")
    return law
