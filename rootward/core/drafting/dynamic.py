"""Chosen trees that follow the draft's own confidence, level by level.

Sources: "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2406.16858), "OPT-Tree: Speculative
Decoding with Adaptive Draft Tree Structure" (2406.17276). Both expand a beam of the most probable paths of a level, one
draft forward each, and finally keep the most probable nodes of all levels. A child is never likelier than its parent,
so what is kept is a tree. Verified by matching: a node is looked at before it is kept.
"""

from __future__ import annotations

from typing import NamedTuple

from rootward.core.arrays import Floats
from rootward.core.distribution import top
from rootward.core.drafting.levels import RowOf, Sprout, checked_row, positive
from rootward.core.tree import TokenTree


class Candidate(NamedTuple):
    """A path that may become a node; ordered by decreasing probability, then shorter, then smaller tokens."""

    minus: float  # −path probability
    depth: int
    path: tuple[int, ...]


def eagle2(row: RowOf, width: int, depth: int, num_nodes: int) -> tuple[TokenTree, Floats]:
    """EAGLE-2: `width` children of each of the `width` best nodes of a level, the best `num_nodes` of all: (tree, draft)."""
    positive("width, depth, num_nodes", [width, depth, num_nodes])
    rows: dict[tuple[int, ...], Floats] = {}
    beam, seen = [Candidate(-1.0, 0, ())], list[Candidate]()
    for _ in range(depth):
        level = _expanded(row, beam, width, rows)
        seen += level
        beam = level[:width]
    return _tree(sorted(seen)[:num_nodes], rows)


def opt_tree(row: RowOf, num_nodes: int, max_depth: int, least_gain: float = 0.0) -> tuple[TokenTree, Floats]:
    """OPT-Tree: the `num_nodes` best paths of every level are expanded, until the probability of the best `num_nodes`
    of all levels grows by no more than `least_gain`: (tree, draft)."""
    positive("num_nodes, max_depth", [num_nodes, max_depth])
    rows: dict[tuple[int, ...], Floats] = {}
    beam, best, accepted = [Candidate(-1.0, 0, ())], list[Candidate](), 0.0
    for _ in range(max_depth):
        beam = _expanded(row, beam, num_nodes, rows)[:num_nodes]
        wider = sorted(best + beam)[:num_nodes]
        expected = -sum(candidate.minus for candidate in wider)
        if best and expected - accepted <= least_gain:
            break
        best, accepted = wider, expected
    return _tree(best, rows)


def _expanded(row: RowOf, beam: list[Candidate], k: int, rows: dict[tuple[int, ...], Floats]) -> list[Candidate]:
    """The k most probable children of every node of the beam, best first."""
    children = []
    for minus, depth, path in beam:
        rows[path] = law = checked_row(row, path)
        children += [Candidate(minus * float(law[x]), depth + 1, (*path, x)) for x in top(law, k).tolist()]
    return sorted(children)


def _tree(kept: list[Candidate], rows: dict[tuple[int, ...], Floats]) -> tuple[TokenTree, Floats]:
    """Chosen nodes level by level, families in the order of their parents, siblings by decreasing probability."""
    sprout = Sprout()
    index: dict[tuple[int, ...], int] = {(): 0}
    for depth in range(1, max(candidate.depth for candidate in kept) + 1):
        level = [candidate.path for candidate in kept if candidate.depth == depth]
        for path in sorted(level, key=lambda p: index[p[:-1]]):  # stable: best first within a family
            index[path] = sprout.add(index[path[:-1]], path[-1], False)
    sprout.row = {index[path[:-1]]: rows[path[:-1]] for path in index if path}
    return sprout.finish(len(rows[()]))
