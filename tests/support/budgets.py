"""One budget of rows for the sessions of a step, shared out losslessly (algorithms.md, 6.4).

A session's round verifies a prefix of what has arrived, in draw order. Under ratio tests "node k is in" must be decided by
what was drawn before it: so rows are given one at a time, each by what is known of its *place* (parent, rank, the row it
will be drawn from, the path above it), and a node is looked at only after it is in.

    deal_in_turn      one node per session, round and round
    deal_by_score     always to the session whose next place has the best score: a heap, the aim of "TETRIS: Optimal
                      Draft Token Selection for Batch Speculative Decoding" (2502.15197) without looking at what it drops
    without_places    places closed before their node is looked at, the aim of "ProPD: Dynamic Token Tree Pruning and
                      Generation for LLM Parallel Decoding" (2402.13485); for trees that do not live on after the round

Sorting all drafted nodes by their own probability, or pruning them by it, is lossless under match only.

Legend: N nodes, B sessions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Floats, Ints
from rootward.core.tree import TokenTree


def deal_in_turn(num_arrived: Sequence[int], budget: int) -> list[int]:
    """Rows for each session, one node at a time in turn, until the budget or what has arrived is spent.

    num_arrived: nodes below the root that have arrived, all in draw order.
    """
    dealt = [0] * len(_sizes(num_arrived, budget))
    hungry = [b for b, size in enumerate(num_arrived) if size > 0]
    while budget >= len(hungry) > 0:  # whole turns
        turns = min(budget // len(hungry), min(num_arrived[b] - dealt[b] for b in hungry))
        for b in hungry:
            dealt[b] += turns
        budget -= turns * len(hungry)
        hungry = [b for b in hungry if dealt[b] < num_arrived[b]]
    for b in hungry[:budget]:
        dealt[b] += 1
    return dealt


def deal_by_score(scores: Sequence[ArrayLike], budget: int) -> list[int]:
    """Rows for each session: the next node of the session whose next place has the best score, until the budget is spent.

    scores: per session float64[N], the score of the place of every node that has arrived, root included and ignored.
    scores[b][i] must be known before node i is drawn (`place_scores` is). Within a session draw order is kept, whatever the scores.
    """
    rows = [np.asarray(row, dtype=np.float64) for row in scores]
    dealt = [0] * len(_sizes([len(row) - 1 for row in rows], budget))
    heap = [(-float(row[1]), b) for b, row in enumerate(rows) if len(row) > 1]
    heapq.heapify(heap)
    for _ in range(budget):
        if not heap:
            break
        b = heap[0][1]
        dealt[b] += 1
        if dealt[b] + 1 < len(rows[b]):
            heapq.heapreplace(heap, (-float(rows[b][dealt[b] + 1]), b))
        else:
            heapq.heappop(heap)
    return dealt


def place_scores(tree: TokenTree, acceptance: Callable[[int, int], float]) -> Floats:
    """float64[N]: probability that each place is reached, by ranks and depths alone (as `Calibration.acceptance` has it):
    reach of the parent · a(r, d) · Π_{j<r} (1 − a(j, d)). 1 at the root."""
    reach = np.ones(len(tree))
    for node, family in enumerate(tree.children):
        here = float(reach[node])
        for rank, child in enumerate(family):
            a = acceptance(rank, int(tree.depth[child]))
            reach[child], here = here * a, here * (1.0 - a)
    return reach


def path_bounds(tree: TokenTree, draft: ArrayLike) -> Floats:
    """float64[N]: the largest path probability the node of each place could have, known before it is drawn: that of its
    parent times the largest mass its earlier siblings left of the row. 1 at the root.

    draft float64[N, V]: row i = law the children of node i were drawn from.
    """
    rows = np.asarray(draft, dtype=np.float64)
    path, bound = np.ones(len(tree)), np.ones(len(tree))
    for node, family in enumerate(tree.children):
        rest = rows[node].copy()
        for child in family:
            token = tree.token[child]
            bound[child] = path[node] * rest.max()
            path[child] = path[node] * rows[node, token]
            rest[token] = 0.0
    return bound


def without_places(tree: TokenTree, scores: ArrayLike, least: float) -> tuple[TokenTree, Ints]:
    """(the tree without the places that score below `least`, the old index of each of its nodes).

    A closed place closes those of its later siblings (their laws name it) and all below it. scores as in `deal_by_score`. What
    is dropped must not be used again: a kept node of a living tree may not hang on having been looked at.
    """
    score = np.asarray(scores, dtype=np.float64)
    kept, new = [0], {0: 0}
    closed: set[int] = set()
    for node in range(1, len(tree)):
        parent = int(tree.parent[node])
        if parent not in new or parent in closed:
            continue
        if score[node] < least:
            closed.add(parent)
            continue
        new[node] = len(kept)
        kept.append(node)
    old = np.array(kept, dtype=np.int64)
    parents = [-1, *(new[int(tree.parent[node])] for node in kept[1:])]
    return TokenTree(tree.token[old], parents, tree.sampled[old]), old


def _sizes(num_arrived: Sequence[int], budget: int) -> Sequence[int]:
    if budget < 0 or min(num_arrived, default=0) < 0:
        raise ValueError(f"budget, num_arrived: {budget}, {list(num_arrived)}; neither may be negative")
    return num_arrived
