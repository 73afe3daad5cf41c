"""Best-first trees: the place with the largest score gets the next node.

`best_first` is chosen: scores are draft path probabilities, and the N nodes of largest path probability are what a
verifier by matching accepts most of, as far as the draft knows. `independent_marginals` is the same over rows that
depend on the position only, as a block-diffusion drafter gives them ("Accelerating Speculative Decoding with Block
Diffusion Draft Trees", 2604.12989): the heap then holds tuples of ranks.

`best_first_drawn` is drawn, for ratio tests: a place is scored by ranks and depths alone, so no score looks at a value.
With acceptances that do not change while it grows this is a fixed shape.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Floats, Ints
from rootward.core.distribution import top
from rootward.core.drafting.families import without_replacement
from rootward.core.drafting.levels import RowOf, Sprout, checked_row, positive
from rootward.core.tree import TokenTree

Acceptance = Callable[[int, int], float]  # (rank, depth of the child) -> acceptance once its earlier siblings failed


def best_first(row: RowOf, num_nodes: int, max_depth: int) -> tuple[TokenTree, Floats]:
    """The `num_nodes` most probable paths, chosen, in order of decreasing probability: (tree, draft)."""
    positive("num_nodes, max_depth", [num_nodes, max_depth])
    sprout, ranked = Sprout(), {0: _ranked(checked_row(row, ()), num_nodes)}
    heap = [(-float(ranked[0][1][0]), 0, 0, 1.0)]  # (−path probability of the next child, parent, rank, parent's)
    while heap and len(sprout.token) <= num_nodes:
        minus, parent, rank, above = heapq.heappop(heap)
        ids, probs, law = ranked[parent]
        node = sprout.add(parent, int(ids[rank]), False)
        sprout.row[parent] = law
        if rank + 1 < len(ids):
            heapq.heappush(heap, (-above * float(probs[rank + 1]), parent, rank + 1, above))
        if len(sprout.path[node]) < max_depth:
            ranked[node] = _ranked(checked_row(row, sprout.path[node]), num_nodes)
            heapq.heappush(heap, (minus * float(ranked[node][1][0]), node, 0, -minus))
    return sprout.finish(len(ranked[0][2]))


def independent_marginals(marginals: ArrayLike, num_nodes: int) -> tuple[TokenTree, Floats]:
    """The `num_nodes` most probable paths under independent positions, chosen: (tree, draft).

    marginals float64[D, V]: law of the token at depth 1, 2, …, D.
    """
    rows = np.asarray(marginals, dtype=np.float64)
    if rows.ndim != 2 or len(rows) == 0:
        raise ValueError(f"marginals: shape {rows.shape}; give one law over the vocabulary per position")
    return best_first(lambda path: rows[len(path)], num_nodes, len(rows))


def best_first_drawn(
    row: RowOf, num_nodes: int, max_depth: int, acceptance: Acceptance | float, rng: np.random.Generator
) -> tuple[TokenTree, Floats]:
    """`num_nodes` children drawn without replacement, each at the place most likely to be reached: (tree, draft).

    reach of the child of rank r at depth d = reach of its parent · a(r, d) · Π_{j<r} (1 − a(j, d)).
    """
    positive("num_nodes, max_depth", [num_nodes, max_depth])
    a = acceptance if callable(acceptance) else lambda rank, depth: float(acceptance)
    sprout, rest = Sprout(), {}
    heap = [(-a(0, 1), 0, 0, 1.0)]  # (−reach of the next child, parent, rank, reach of the place)
    while heap and len(sprout.token) <= num_nodes:
        minus, parent, rank, here = heapq.heappop(heap)
        if parent not in rest:
            sprout.row[parent] = rest[parent] = checked_row(row, sprout.path[parent])
        [token] = without_replacement(rest[parent], 1, rng).tokens
        rest[parent] = rest[parent].copy()
        rest[parent][token] = 0.0
        node = sprout.add(parent, token, True)
        depth, left = len(sprout.path[node]), here * (1.0 - a(rank, len(sprout.path[node])))
        if rest[parent].any():
            heapq.heappush(heap, (-left * a(rank + 1, depth), parent, rank + 1, left))
        if depth < max_depth:
            heapq.heappush(heap, (minus * a(0, depth + 1), node, 0, -minus))
    return sprout.finish(len(rest[0]))


def _ranked(law: Floats, most: int) -> tuple[Ints, Floats, Floats]:
    """(ids by decreasing mass, their masses, the whole law)."""
    ids = top(law, most)
    return ids, law[ids], law
