"""Independent strings from the draft model, merged into a tree; siblings in order of first appearance.

Merging keeps the first appearances only, so siblings are drawn without replacement in that order.
"""

from __future__ import annotations

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.drafting.levels import RowOf, Sprout, checked_row, positive
from rootward.core.law import inverse
from rootward.core.tree import TokenTree


def iid_paths(row: RowOf, paths: int, depth: int, rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """That many i.i.d. strings of this depth, merged: (tree, draft). Nodes come level by level, family by family."""
    positive("paths, depth", [paths, depth])
    rows: dict[tuple[int, ...], Floats] = {}
    appeared: list[dict[tuple[int, ...], None]] = [{} for _ in range(depth + 1)]  # in order of first appearance
    for _ in range(paths):
        path: tuple[int, ...] = ()
        for level in range(1, depth + 1):
            if path not in rows:
                rows[path] = checked_row(row, path)
            path = (*path, inverse(rows[path], rng.random()))
            appeared[level].setdefault(path)
    sprout = Sprout()
    nodes: dict[tuple[int, ...], int] = {(): 0}
    for level in range(1, depth + 1):
        for path in sorted(appeared[level], key=lambda p: nodes[p[:-1]]):  # stable
            nodes[path] = sprout.add(nodes[path[:-1]], path[-1], True)
    sprout.row = {nodes[path]: law for path, law in rows.items()}
    return sprout.finish(len(rows[()]))
