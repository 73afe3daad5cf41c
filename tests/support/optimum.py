"""The best any lossless verifier can do for a tree law, as a linear program (algorithms.md, 5.11).

Variables F(T, v) = P(tree T, path v accepted):  F(T, root) = P(T);  Σ_{children c of v} F(T, c) ≤ F(T, v), since
siblings exclude one another;  Σ_T F(T, v) ≤ p(token v)·Σ_T F(T, parent v) for every path;  maximise Σ_{v ≠ root} F.
Draw order plays no part.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array
from support.enumeration import Weighted
from support.models import Model


def optimum(model: Model, trees: Weighted) -> float:
    """Largest E[τ] of a lossless verifier."""
    mass: dict[frozenset, float] = defaultdict(float)
    for probability, tree, _ in trees:
        mass[frozenset(tree.path(node) for node in range(len(tree)))] += probability
    variable = {(t, path): k for k, (t, path) in enumerate((t, path) for t in mass for path in t)}
    entries: list[tuple[int, int, float]] = []  # (row, column, coefficient) of A·F ≤ 0
    row_of: dict = {}
    for (t, path), k in variable.items():
        if path:
            family = row_of.setdefault((t, path[:-1]), len(row_of))
            shared = row_of.setdefault(path, len(row_of))
            entries += [(family, k, 1.0), (shared, k, 1.0)]
    for (t, path), k in variable.items():
        if (t, path) in row_of:
            entries.append((row_of[t, path], k, -1.0))
    for (_, path), k in variable.items():  # p(token)·F(T, parent) counts in every tree that has the parent
        for x in range(model.vocab):
            if (*path, x) in row_of:
                entries.append((row_of[(*path, x)], k, -float(model.p[path][x])))
    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(row_of), len(variable))).tocsr()
    bounds = [(mass[t], mass[t]) if not path else (0.0, None) for t, path in variable]
    gain = np.array([0.0 if not path else -1.0 for _, path in variable])
    solution = linprog(gain, A_ub=matrix, b_ub=np.zeros(len(row_of)), bounds=bounds, method="highs")
    assert solution.status == 0, solution.message
    return -float(solution.fun)
