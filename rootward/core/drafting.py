"""Drafting: whole trees under the strategies of `rootward.core.growth`. Every function returns (tree, draft), ready for
`verification.law`.

    row(path) -> float64[V]   the processed draft law after these tokens
    rng                       a numpy.random.Generator; functions that only choose children need none
    draft                     float64[N, V]: row i = law the first sampled child of i was drawn from, zero without one

| function | children | verified by |
|---|---|---|
| chain | one per level, drawn | token, block, traversal |
| rsd_c | without replacement, fixed shape | token, traversal |
| rsd_s | stochastic beam | token, traversal |
| best_first | without replacement, where acceptance by rank says | token, traversal |
| iid | with replacement, copies kept | token, multi_step, traversal, all with replacement=True |
| greedy | one drawn first, the most likely after it | token, traversal |
| top_k | the most likely, chosen | match, token, traversal |
| marginals | the most probable rank tuples of independent positions, chosen | match, token, traversal |
| coupled | the largest under noise shared with the target | match only |

Target matching (`verification.match`) may verify every one of them. `rootward.core.pairing` says the same as a table
and refuses what is not in it, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Floats, Words
from rootward.core.distribution import DenseDistribution
from rootward.core.growth.growth import growth_of
from rootward.core.growth.strategies import (
    UNLIMITED,
    BestFirst,
    FixedShape,
    Marginals,
    StochasticBeam,
    Strategy,
    positive,
)
from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode
from rootward.core.tree import TokenTree

__all__ = ["best_first", "chain", "coupled", "greedy", "iid", "marginals", "rsd_c", "rsd_s", "top_k"]

RowOf = Callable[[tuple[int, ...]], Floats]  # the processed draft law after these tokens


def chain(row: RowOf, depth: int, rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """One child per level, drawn from q (2211.17192)."""
    positive("depth", (depth,))
    return build_tree(FixedShape(DraftMode.SAMPLED, (1,) * depth), row, rng)


def rsd_c(row: RowOf, branching: Sequence[int], rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """Children without replacement, branching[d] of a node at depth d (2402.14160)."""
    return build_tree(FixedShape(DraftMode.SAMPLED, tuple(branching)), row, rng)


def rsd_s(row: RowOf, width: int, depth: int, rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """A stochastic beam of `width` nodes per level, `depth` levels (2402.14160)."""
    return build_tree(StochasticBeam(width, depth), row, rng)


def best_first(
    row: RowOf, num_nodes: int, rng: np.random.Generator, *, acceptance: float = 0.7, later: float = 0.2
) -> tuple[TokenTree, Floats]:
    """`num_nodes` children drawn without replacement, each at the place most likely to be reached.

    acceptance: assumed of a first child; later: of its later siblings, once it has failed.
    """
    positive("num_nodes", (num_nodes,))
    strategy = BestFirst(max_depth=num_nodes, topk=num_nodes, draws_per_level=1, acceptance=acceptance, later=later)
    return build_tree(strategy, row, rng, num_nodes=num_nodes)


def iid(row: RowOf, branching: Sequence[int], rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """Children with replacement, copies kept (2305.09781); verify with replacement=True."""
    return build_tree(FixedShape(DraftMode.IID, tuple(branching)), row, rng)


def greedy(row: RowOf, branching: Sequence[int], rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """Families of one drawn child, first, and the k−1 most likely tokens (2502.18779). draft holds q′, the law of the drawn child."""
    return build_tree(FixedShape(DraftMode.GREEDY, tuple(branching)), row, rng)


def top_k(row: RowOf, branching: Sequence[int]) -> tuple[TokenTree, Floats]:
    """The most likely tokens, chosen: nothing is drawn and draft holds plain rows for information."""
    return build_tree(FixedShape(DraftMode.TOP_K, tuple(branching)), row, np.random.default_rng(0))


def coupled(row: RowOf, noise: RowOf, branching: Sequence[int]) -> tuple[TokenTree, Floats]:
    """The largest log q + noise (2408.07978), ties to the smaller id. noise(path): `rng.target_gumbel` at the position of the children."""
    return build_tree(FixedShape(DraftMode.COUPLED, tuple(branching)), row, np.random.default_rng(0), noise=noise)


def marginals(rows: ArrayLike, num_nodes: int) -> tuple[TokenTree, Floats]:
    """The `num_nodes` most probable paths under independent positions, chosen (DDTree, 2604.12989).

    rows float64[D, V]: law of the token at depth 1, 2, …, D.
    """
    table = np.asarray(rows, dtype=np.float64)
    if table.ndim != 2 or len(table) == 0:
        raise ValueError(f"rows: shape {table.shape}; give one law over the vocabulary per position")
    positive("num_nodes", (num_nodes,))
    strategy = Marginals(len(table))
    return build_tree(strategy, lambda path: table[len(path)], np.random.default_rng(0), num_nodes=num_nodes)


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
    zero, except in trees that are chosen throughout, where they are for information. noise: for COUPLED, float64[V] of Gumbel noise after
    the tokens of a path.
    """
    first = _checked_row(row, ())
    tree = LivingTree(0, 0, vocab_size=UNLIMITED, node_cap=UNLIMITED, copies=strategy.mode is DraftMode.IID)
    growth = growth_of(tree, strategy, node_cap=num_nodes)
    path: dict[int, tuple[int, ...]] = {tree.root_id: ()}
    dense: dict[int, Floats] = {}

    def new_words(n: int) -> Words:
        return rng.integers(1 << 64, size=n, dtype=np.uint64)

    frontier = [tree.root_id]
    while frontier or not growth.at_rest:
        for node in frontier:
            dense[node] = _checked_row(row, path[node]) if path[node] else first
            distribution = DenseDistribution(dense[node])
            growth.expand(node, distribution, None if noise is None else noise(path[node])[distribution.ids])
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


def _checked_row(row: RowOf, path: tuple[int, ...]) -> Floats:
    """row(path) as float64[V], or a ValueError."""
    law = np.array(row(path), dtype=np.float64)
    if law.ndim != 1 or not (abs(law.sum() - 1.0) <= 1e-6 and law.min() >= 0.0):
        raise ValueError(f"row: after {path} shape {law.shape}, sum {law.sum()}; give a law over the vocabulary")
    return law
