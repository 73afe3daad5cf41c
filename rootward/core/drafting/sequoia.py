"""Fixed shapes that are optimal for measured acceptances, and the trees drawn in them.

Source: "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding" (2402.12374). If a child is accepted with a
probability that depends on its rank among its siblings only (here: on its depth too), the expected number of accepted
tokens of a shape is the sum over its nodes of the probability that they are reached, and the best shape of n nodes
splits into the best shapes of its subtrees:

    tree(d, n)        most accepted tokens of a subtree of n nodes whose own root is at depth d and reached
                      = 1 + family(d, 0, n − 1)
    family(d, r, n)   most of the children of ranks r, r+1, … of such a node, with n nodes for all their subtrees
                      = max over m of  p(d, r)·tree(d + 1, m) + family(d, r + 1, n − m)

A *shape* is a tuple: the family size of every node, level by level, families in the order of their parents. So the
children of node i are the next shape[i] nodes that no earlier node has taken, and len(shape) = nodes, root included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Floats
from rootward.core.drafting.families import without_replacement
from rootward.core.drafting.levels import RowOf, Sprout, checked_row
from rootward.core.tree import TokenTree

Shape = tuple[int, ...]


def taken_by_rank(acceptance: ArrayLike) -> Floats:
    """Sequoia's acceptance vector p from conditional acceptances a (over the last axis): p_r = a_r · Π_{j<r} (1 − a_j),
    the probability that the child of rank r is the accepted one."""
    a = np.asarray(acceptance, dtype=np.float64)
    if a.ndim == 0 or a.size == 0 or not ((a >= 0.0) & (a <= 1.0)).all():
        raise ValueError(f"acceptance: shape {a.shape}; give probabilities by rank, or by [depth, rank]")
    failed_before = np.concatenate([np.ones_like(a[..., :1]), np.cumprod(1.0 - a, axis=-1)[..., :-1]], axis=-1)
    taken: Floats = a * failed_before
    return taken


def sequoia_shape(acceptance_by_rank: ArrayLike, num_nodes: int, max_depth: int, max_family: int) -> Shape:
    """The shape of at most `num_nodes` nodes below the root with the most expected accepted tokens.

    acceptance_by_rank  [R] or [D, R]: probability that a child is accepted, given that its parent is and its earlier
                        siblings are not, by rank (and by depth − 1; deeper nodes take the last row). Ranks beyond R
                        are not used.
    """
    if min(num_nodes, max_depth, max_family) < 1:
        raise ValueError(f"num_nodes, max_depth, max_family: {num_nodes}, {max_depth}, {max_family}; all at least 1")
    taken = np.atleast_2d(taken_by_rank(acceptance_by_rank))
    width = min(max_family, taken.shape[1])
    p = [taken[min(depth, len(taken) - 1), :width].tolist() for depth in range(max_depth)]

    @cache
    def family(depth: int, rank: int, n: int) -> tuple[float, tuple[int, ...]]:
        """(most accepted tokens, nodes given to each child's subtree)."""
        best: tuple[float, tuple[int, ...]] = (0.0, ())
        if n == 0 or rank == width or depth == max_depth:
            return best
        for m in range(1, n + 1):
            here = p[depth][rank] * (1.0 + family(depth + 1, 0, m - 1)[0])
            later, split = family(depth, rank + 1, n - m)
            if here + later > best[0]:
                best = (here + later, (m, *split))
        return best

    for depth in range(max_depth - 1, -1, -1):  # deepest first, so that the recursion stays shallow
        for rank in range(width - 1, -1, -1):
            for n in range(num_nodes + 1):
                family(depth, rank, n)
    return _level_by_level(lambda depth, n: family(depth, 0, n)[1], num_nodes)


def expected_accepted(shape: Shape, acceptance_by_rank: ArrayLike) -> float:
    """Σ over the nodes below the root of the probability that they are reached."""
    taken = np.atleast_2d(taken_by_rank(acceptance_by_rank))
    reach, depth = [1.0], [0]
    for node, size in enumerate(checked_shape(shape)):
        row = taken[min(depth[node], len(taken) - 1)]
        reach += [reach[node] * float(row[rank]) for rank in range(size)]
        depth += [depth[node] + 1] * size
    return sum(reach[1:])


def fixed_shape(row: RowOf, shape: Shape, rng: np.random.Generator) -> tuple[TokenTree, Floats]:
    """Families of the sizes of `shape`, drawn without replacement: (tree, draft). Where the support is exhausted the
    places of the shape stay empty, with all that would hang below them."""
    first = np.cumsum([1, *checked_shape(shape)]).tolist()  # first[i]: the place of node i's first child
    sprout, places = Sprout(), [0]
    vocabulary = len(checked_row(row, ()))
    for node, place in enumerate(places):  # grows while it is read: level by level
        if shape[place]:
            tokens, _, sprout.row[node] = without_replacement(checked_row(row, sprout.path[node]), shape[place], rng)
            for rank, token in enumerate(tokens):
                sprout.add(node, token, True)
                places.append(first[place] + rank)
    return sprout.finish(vocabulary)


def checked_shape(shape: Shape) -> Shape:
    """The shape, or a ValueError: its family sizes must add up to its nodes, every node after its parent."""
    taken = np.cumsum([1, *shape])
    if not len(shape) or min(shape) < 0 or taken[-1] != len(shape) or (taken[:-1] <= np.arange(len(shape))).any():
        raise ValueError(f"shape: {shape}; give the family size of every node, level by level, 0 for a leaf")
    return shape


def _level_by_level(split: Callable[[int, int], tuple[int, ...]], num_nodes: int) -> Shape:
    """The shape in which a node at a depth, with n nodes below it, gives split(depth, n) to its children's subtrees."""
    shape, todo = [], [(0, num_nodes)]
    for depth, n in todo:  # grows while it is read
        sizes = split(depth, n)
        shape.append(len(sizes))
        todo += [(depth + 1, m - 1) for m in sizes]
    return tuple(shape)
