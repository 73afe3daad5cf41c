"""Builders: shapes, order, what they declare. Their laws are in tests/statistical."""

from __future__ import annotations

import numpy as np
import pytest

from rootward.core import drafting, verification
from rootward.core.drafting.stochastic_beam import conditioned_on_maximum

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
    "iid_paths": lambda r, seed=0: drafting.iid_paths(r, 3, 2, rng(seed)),
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


@pytest.mark.parametrize("name", ["rsd_c", "rsd_s", "iid_paths", "greedy", "top_k"])
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


def test_the_largest_of_a_family_keeps_its_value():
    values = rng(3).gumbel(size=50)
    shifted = conditioned_on_maximum(values, -1.25)
    assert shifted.max() == shifted[values.argmax()] == -1.25
    assert (np.argsort(shifted) == np.argsort(values)).all()


def test_coupled_children():
    ids, noise = [4, 8, 6], [0.0, 0.0, 5.0]
    assert drafting.coupled_children(ids, [0.5, 0.5, 0.0], noise, 3).tolist() == [4, 8]
    assert drafting.coupled_children(ids, [2, 1, 1], noise, 2).tolist() == [6, 4]
    assert drafting.coupled_children(ids, [2, 1, 1], noise, 0).tolist() == []
    with pytest.raises(ValueError, match="ids, probs, noise"):
        drafting.coupled_children(ids, [1, 2], noise, 1)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: drafting.chain(row, 0, rng()), "depth"),
        (lambda: drafting.rsd_c(row, [], rng()), "branching"),
        (lambda: drafting.rsd_c(row, [2, 0], rng()), "branching"),
        (lambda: drafting.rsd_s(row, 0, 2, rng()), "width, depth"),
        (lambda: drafting.iid_paths(row, 2, 0, rng()), "paths, depth"),
        (lambda: drafting.rsd_c(lambda path: np.ones(3), [1], rng()), "row"),
        (lambda: drafting.rsd_s(lambda path: np.array([np.nan, 1.0]), 1, 1, rng()), "row"),
        (lambda: drafting.greedy(lambda path: np.array([-1.0, 2.0]), [1], rng()), "row"),
    ],
)
def test_refuses(call, field):
    with pytest.raises(ValueError, match=field):
        call()
