"""Builders: shapes, order, what they declare. Their laws are in tests/statistical."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rootward.core import drafting, verification

V = 6
TABLE = np.random.default_rng(0).dirichlet(np.ones(V), size=V)


def row(path):
    return TABLE[path[-1] if path else 0]


def narrow(path):
    """Two tokens only."""
    return np.array([0.0, 0.7, 0.0, 0.3, 0.0, 0.0])


def rng(seed=0):
    return np.random.default_rng(seed)


BUILDERS = {
    "chain": lambda r, seed=0: drafting.chain(r, 3, rng(seed)),
    "rsd_c": lambda r, seed=0: drafting.rsd_c(r, [3, 2], rng(seed)),
    "rsd_s": lambda r, seed=0: drafting.rsd_s(r, 3, 2, rng(seed)),
    "iid": lambda r, seed=0: drafting.iid(r, [2, 2], rng(seed)),
    "best_first": lambda r, seed=0: drafting.best_first(r, 6, rng(seed)),
    "greedy": lambda r, seed=0: drafting.greedy(r, [3, 2], rng(seed)),
    "top_k": lambda r, seed=0: drafting.top_k(r, [3, 2]),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_what_every_builder_returns(name):
    for seed in range(10):
        tree, draft = BUILDERS[name](row, seed)
        assert draft.shape == (len(tree), V)
        assert (np.diff(tree.depth) >= 0).all()  # level by level
        assert (np.diff(tree.parent) >= 0).all()  # families in the order of their parents
        for node, family in enumerate(tree.children):
            if not family:
                assert not draft[node].any()
            elif any(tree.sampled[c] for c in family):
                assert draft[node].sum() == pytest.approx(1.0)
        again, rows = BUILDERS[name](row, seed)
        assert again == tree
        assert rows.tobytes() == draft.tobytes()
        law = verification.law("traversal", tree, np.full((len(tree), V), 1 / V), draft, replacement=name == "iid")
        assert law.stop.sum() == pytest.approx(1.0)


def test_shapes():
    assert BUILDERS["chain"](row)[0].depth.tolist() == [0, 1, 2, 3]
    assert np.bincount(BUILDERS["rsd_c"](row)[0].depth).tolist() == [1, 3, 6]
    assert np.bincount(BUILDERS["rsd_s"](row)[0].depth).tolist() == [1, 3, 3]
    assert np.bincount(BUILDERS["iid"](row)[0].depth).tolist() == [1, 2, 4]


@pytest.mark.parametrize("name", ["rsd_c", "rsd_s", "best_first", "greedy", "top_k"])
def test_siblings_differ(name):
    for seed in range(20):
        tree, _ = BUILDERS[name](row, seed)
        for family in tree.children:
            assert len({int(tree.token[c]) for c in family}) == len(family)


def test_exhausted_support_gives_fewer_children():
    assert np.bincount(BUILDERS["rsd_c"](narrow)[0].depth).tolist() == [1, 2, 4]
    assert np.bincount(BUILDERS["rsd_s"](narrow)[0].depth).tolist() == [1, 2, 3]
    assert np.bincount(BUILDERS["top_k"](narrow)[0].depth).tolist() == [1, 2, 4]
    tree, draft = BUILDERS["greedy"](narrow)  # three children wanted: all of the support is chosen
    assert tree.sampled[1:3].tolist() == [False, False]
    assert not draft[0].any()


def test_greedy_declares_what_it_drew_from():
    tree, draft = BUILDERS["greedy"](row)
    first, *chosen = tree.children[0]
    assert tree.sampled[first]
    assert not tree.sampled[chosen].any()
    assert tree.token[chosen].tolist() == np.argsort(-TABLE[0])[:2].tolist()
    assert not draft[0, tree.token[chosen]].any()
    assert draft[0].sum() == pytest.approx(1.0)


def test_top_k_breaks_ties_by_id():
    tree, _ = drafting.top_k(lambda path: np.full(4, 0.25), [2])
    assert tree.token[1:].tolist() == [0, 1]
    assert not tree.sampled.any()


def test_coupled_trees_take_the_largest_under_the_noise():
    law, noise = np.array([0.5, 0.25, 0.25, 0.0]), np.array([0.0, 0.0, 5.0, 9.0])
    tree, _ = drafting.coupled(lambda path: law, lambda path: noise, [2, 1])
    assert tree.token.tolist() == [0, 2, 0, 2, 2]
    assert not tree.sampled.any()


def test_marginals_are_the_best_rank_tuples():
    rows = np.array([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.9, 0.05, 0.05]])
    paths = [p for d in range(1, 4) for p in itertools.product(range(3), repeat=d)]
    mass = sorted((float(np.prod([rows[i, x] for i, x in enumerate(path)])) for path in paths), reverse=True)
    for num_nodes in range(1, 15):
        tree, _ = drafting.marginals(rows, num_nodes)
        covered = sum(np.prod([rows[d, x] for d, x in enumerate(tree.path(i))]) for i in range(1, len(tree)))
        assert len(tree) == num_nodes + 1
        # the most likely path is there whole, as an autoregressive drafter reads one row per position from it
        assert covered == pytest.approx(sum(mass[:num_nodes]), abs=1e-12) or num_nodes < 4


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: drafting.chain(row, 0, rng()), "depth"),
        (lambda: drafting.rsd_c(row, [], rng()), "branching"),
        (lambda: drafting.rsd_c(row, [2, 0], rng()), "branching"),
        (lambda: drafting.rsd_s(row, 0, 2, rng()), "width, depth"),
        (lambda: drafting.best_first(row, 0, rng()), "num_nodes"),
        (lambda: drafting.marginals(TABLE[0], 3), "rows"),
        (lambda: drafting.rsd_c(lambda path: np.ones(3), [1], rng()), "row"),
        (lambda: drafting.rsd_s(lambda path: np.array([np.nan, 1.0]), 1, 1, rng()), "row"),
        (lambda: drafting.greedy(lambda path: np.array([-1.0, 2.0]), [1], rng()), "row"),
    ],
)
def test_refuses(call, field):
    with pytest.raises(ValueError, match=field):
        call()
