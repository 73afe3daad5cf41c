"""Sequoia's dynamic programme against every shape there is, and the trees drawn in a shape."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from rootward.core import drafting
from rootward.core.drafting.sequoia import expected_accepted, sequoia_shape, taken_by_rank

Nested = tuple  # a node as the tuple of its children
WIDTH = 3  # largest family


@cache
def forests(num_nodes: int, max_depth: int, max_family: int) -> list[Nested]:
    """Every ordered forest of exactly so many nodes; max_family limits its roots, WIDTH the families below."""
    if num_nodes == 0:
        return [()]
    if max_depth == 0 or max_family == 0:
        return []
    return [
        (first, *rest)
        for size in range(1, num_nodes + 1)
        for first in forests(size - 1, max_depth - 1, WIDTH)
        for rest in forests(num_nodes - size, max_depth, max_family - 1)
    ]


def value(children: Nested, taken: np.ndarray, depth: int = 0) -> float:
    """Expected accepted tokens below a reached node."""
    row = taken[min(depth, len(taken) - 1)]
    return sum(row[rank] * (1.0 + value(child, taken, depth + 1)) for rank, child in enumerate(children))


def measured(seed: int, depths: int = 3, ranks: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.05, 0.95, size=(depths, ranks))


@pytest.mark.parametrize("max_depth", [1, 2, 4])
@pytest.mark.parametrize("num_nodes", [1, 3, 6])
def test_the_programme_equals_brute_force(num_nodes, max_depth):
    for seed in range(6):
        a = measured(seed)
        best = max(
            value(forest, taken_by_rank(a))
            for size in range(num_nodes + 1)
            for forest in forests(size, max_depth, WIDTH)
        )
        shape = sequoia_shape(a, num_nodes, max_depth, WIDTH)
        assert len(shape) <= num_nodes + 1
        assert expected_accepted(shape, a) == pytest.approx(best, abs=1e-12)


def test_by_rank_alone_equals_the_same_row_at_every_depth():
    a = measured(9)[0]
    shape = sequoia_shape(a, 12, 5, 3)
    assert shape == sequoia_shape(np.tile(a, (5, 1)), 12, 5, 3)
    assert expected_accepted(shape, a) == pytest.approx(expected_accepted(shape, np.tile(a, (5, 1))))


def test_limits_are_kept():
    shape = sequoia_shape([0.9, 0.8, 0.7], 20, 3, 2)
    assert max(shape) <= 2
    tree, _ = drafting.fixed_shape(lambda path: np.full(8, 1 / 8), shape, np.random.default_rng(0))
    assert tree.depth.max() <= 3
    assert tree.depth.tolist() == sorted(tree.depth.tolist())  # level by level
    assert [len(family) for family in tree.children] == list(shape)


def test_certain_first_children_make_a_chain_and_even_ones_a_bush():
    assert sequoia_shape([0.99, 0.5], 5, 5, 2) == (1, 1, 1, 1, 1, 0)
    assert sequoia_shape([0.1, 0.11, 0.12], 3, 3, 3) == (3, 0, 0, 0)


def test_constant_acceptance_is_best_first():
    """With a constant, places by falling reach are the best shape: the programme and the heap agree on its worth."""
    uniform = np.full(9, 1 / 9)
    for a, n in itertools.product((0.3, 0.6, 0.85), (1, 5, 14)):
        tree, _ = drafting.best_first_drawn(lambda path: uniform, n, 6, a, np.random.default_rng(0))
        order = np.argsort(tree.depth, kind="stable")
        place = {int(node): i for i, node in enumerate(order)}
        grown = sorted(
            range(len(tree)), key=lambda node: (tree.depth[node], place[int(max(tree.parent[node], 0))], node)
        )
        shape = tuple(len(tree.children[node]) for node in grown)
        best = expected_accepted(sequoia_shape(np.full(9, a), n, 6, 9), np.full(9, a))
        assert expected_accepted(shape, np.full(9, a)) == pytest.approx(best, abs=1e-12)


def test_exhausted_support_leaves_places_empty():
    shape = (3, 0, 2, 1, 0, 0, 0)
    tree, draft = drafting.fixed_shape(lambda path: np.array([0.5, 0.5, 0.0]), shape, np.random.default_rng(0))
    assert [len(family) for family in tree.children] == [2, 0, 2, 0, 0]
    assert (draft.sum(axis=1) > 0).tolist() == [True, False, True, False, False]
    alone, rows = drafting.fixed_shape(lambda path: np.full(3, 1 / 3), (0,), np.random.default_rng(0))
    assert len(alone) == 1
    assert not rows.any()


def test_acceptance_vector():
    np.testing.assert_allclose(taken_by_rank([0.5, 0.5, 0.2]), [0.5, 0.25, 0.05])
    np.testing.assert_allclose(taken_by_rank([[1.0, 0.5], [0.0, 0.5]]), [[1.0, 0.0], [0.0, 0.5]])


@pytest.mark.parametrize(
    "wrong", [([], 3, 3, 3), ([1.2], 3, 3, 3), ([0.5], 0, 3, 3), ([0.5], 3, 0, 3), ([0.5], 3, 3, 0)]
)
def test_refuses(wrong):
    with pytest.raises(ValueError, match=r"acceptance|num_nodes"):
        sequoia_shape(*wrong)
