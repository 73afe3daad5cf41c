"""Trees of a fixed shape, grown level by level: families in the order of their parents, children in draw order.

Legend: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.drafting.families import Maker
from rootward.core.tree import TokenTree

RowOf = Callable[[tuple[int, ...]], Floats]  # the processed draft law after these tokens


class Sprout:
    """A tree while it is drawn, and the rows its families are declared to come from."""

    def __init__(self) -> None:
        self.token, self.parent, self.sampled = [0], [-1], [False]
        self.path: list[tuple[int, ...]] = [()]
        self.row: dict[int, Floats] = {}

    def add(self, parent: int, token: int, sampled: bool) -> int:
        """Append a node; returns its index."""
        self.token.append(token)
        self.parent.append(parent)
        self.sampled.append(sampled)
        self.path.append((*self.path[parent], token))
        return len(self.token) - 1

    def finish(self, vocabulary: int) -> tuple[TokenTree, Floats]:
        """(tree, draft float64[N, V]); rows of unexpanded nodes are zero."""
        draft = np.zeros((len(self.token), vocabulary))
        for node, row in self.row.items():
            draft[node] = row
        return TokenTree(self.token, self.parent, self.sampled), draft


def grow_levels(
    row: RowOf, branching: Sequence[int], make: Maker, rng: np.random.Generator
) -> tuple[TokenTree, Floats]:
    """Every node at depth d gets a family of branching[d] children."""
    sprout, level, vocabulary = Sprout(), [0], 0
    for k in positive("branching", branching):
        below = []
        for node in level:
            family = make(checked_row(row, sprout.path[node]), k, rng)
            sprout.row[node], vocabulary = family.row, len(family.row)
            children = zip(family.tokens, family.sampled, strict=True)
            below += [sprout.add(node, token, flag) for token, flag in children]
        level = below
    return sprout.finish(vocabulary)


def checked_row(row: RowOf, path: tuple[int, ...]) -> Floats:
    """row(path) as float64[V], or a ValueError."""
    law = np.array(row(path), dtype=np.float64)
    if law.ndim != 1 or not (abs(law.sum() - 1.0) <= 1e-6 and law.min() >= 0.0):
        raise ValueError(f"row: after {path} shape {law.shape}, sum {law.sum()}; give a law over the vocabulary")
    return law


def positive(name: str, numbers: Sequence[int]) -> Sequence[int]:
    """The numbers, all at least 1 and at least one of them, or a ValueError."""
    if len(numbers) == 0 or min(numbers) < 1:
        raise ValueError(f"{name}: {list(numbers)}; give at least one number, each at least 1")
    return numbers
