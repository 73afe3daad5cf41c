"""Chosen trees by path probability, for target matching."""

from __future__ import annotations

import numpy as np

from rootward.bench.lockstep import View
from rootward.bench.ranked import Floats, Path
from rootward.core.rows import top
from rootward.core.tree import TokenTree

EAGLE_DEPTH = 8


def eagle2(view: View, beam: int, depth: int, num_nodes: int) -> tuple[TokenTree, Floats]:
    """Per level the `beam` likeliest children of each of `beam` nodes by path probability, of which `beam` go on;
    finally the `num_nodes` likeliest of all ("EAGLE-2", 2406.16858). Pruned after the fact: `match` only."""
    frontier: list[tuple[float, Path]] = [(1.0, ())]
    found: list[tuple[float, Path]] = []
    for _ in range(depth):
        children = []
        for reach, path in frontier:
            row = view(path)
            children += [(reach * float(row[token]), (*path, token)) for token in top(row, beam).tolist()]
        children.sort(key=lambda child: -child[0])
        found += children
        frontier = children[:beam]
    # A child is never likelier than its parent; of equals the shorter path goes first, so parents are never lost.
    kept = sorted(found, key=lambda one: (-one[0], len(one[1])))[:num_nodes]
    paths = sorted((path for _, path in kept), key=len)
    index: dict[Path, int] = {(): 0} | {path: i for i, path in enumerate(paths, start=1)}
    tree = TokenTree([0, *(p[-1] for p in paths)], [-1, *(index[p[:-1]] for p in paths)], [False] * (len(paths) + 1))
    return tree, np.zeros((len(tree), view.rows.num_atoms))


def beam_of(budget: int) -> int:
    """A beam for a node budget: EAGLE-2 takes 10 for 60 nodes."""
    return min(max(budget // 4, 2), 10)
