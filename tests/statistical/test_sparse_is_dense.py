"""The batched form of a law is the oracle's, on rows of bounded support: same stop, same residuals (algorithms.md, section 7)."""

from __future__ import annotations

import numpy as np
import pytest
from support.batched import batched_law
from support.random_trees import random_round

from rootward.core import TokenTree, verification

ALGORITHMS = ["token", "traversal"]


def both(algorithm, tree, target, draft, atoms, weight):
    dense = verification.law(algorithm, tree, target, draft)
    return dense, batched_law(algorithm, tree, atoms, weight, target)


def assert_equal(dense, sparse, tolerance=1e-12):
    for name in ("stop", "entry", "budget"):
        np.testing.assert_allclose(getattr(sparse, name), getattr(dense, name), rtol=0, atol=tolerance, err_msg=name)
    used = dense.stop > 1e-9
    got = sparse.residual
    np.testing.assert_allclose(got[used], dense.residual[used], rtol=0, atol=1e-9)
    weighted = dense.stop[:, None]
    np.testing.assert_allclose(weighted * got, weighted * dense.residual, rtol=0, atol=tolerance)
    assert sparse.block_efficiency == pytest.approx(dense.block_efficiency, abs=tolerance * len(dense.tree) * 10)
    assert sparse.stop.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("chosen", [0.0, 0.3, 1.0])
def test_random_trees(algorithm, chosen):
    rng = np.random.default_rng(7)
    for _ in range(150):
        r = random_round(rng, chosen=chosen, num_nodes=int(rng.integers(1, 24)), num_atoms=int(rng.integers(1, 12)))
        assert_equal(*both(algorithm, r.tree, r.target, r.draft, r.atoms, r.weight))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_large_vocabulary(algorithm):
    rng = np.random.default_rng(8)
    r = random_round(rng, vocab=20_000, num_atoms=32, num_nodes=24)
    assert_equal(*both(algorithm, r.tree, r.target, r.draft, r.atoms, r.weight))


CHAIN = TokenTree([0, 1, 0], [-1, 0, 1], [False, True, True])
FAMILY = TokenTree([0, 1, 0, 2], [-1, 0, 0, 0], [False, True, True, True])
WEIGHT = np.array([3, 2, 1])
EDGES = {
    "P = Q": np.tile(WEIGHT / 6, (4, 1)),
    "P = Q up to an ulp": np.tile(np.nextafter(WEIGHT / 6, [1, 0, 1]), (4, 1)),
    "one-hot on the first token": np.tile([1.0, 0.0, 0.0, 0.0], (4, 1)),
    "one-hot outside the atoms": np.tile([0.0, 0.0, 0.0, 1.0], (4, 1)),
    "a tiny tail": np.tile([0.5, 0.25, 0.25 - 1e-13, 1e-13], (4, 1)),
    "almost all in the tail": np.tile([1e-13, 1e-13, 1e-13, 1 - 3e-13], (4, 1)),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("tree", [CHAIN, FAMILY], ids=["chain", "family"])
@pytest.mark.parametrize("case", EDGES)
def test_edges(algorithm, tree, case):
    target = np.zeros((len(tree), 4))
    target[:, : EDGES[case].shape[1]] = EDGES[case][: len(tree)]
    expanded = [bool(family) for family in tree.children]
    atoms = np.where(np.array(expanded)[:, None], [0, 1, 2], -1)
    weight = np.where(np.array(expanded)[:, None], WEIGHT, 0)
    draft = np.concatenate([weight / 6.0, np.zeros((len(tree), 1))], axis=1)
    dense, sparse = both(algorithm, tree, target, draft, atoms, weight)
    np.testing.assert_allclose(sparse.stop, dense.stop, rtol=0, atol=1e-12)
    for node in np.flatnonzero(dense.stop > 1e-9):
        row = sparse.bonus_row(node)
        assert row.sum() == pytest.approx(1.0, abs=1e-9)
        np.testing.assert_allclose(row, dense.residual[node], rtol=0, atol=1e-9)
        assert all(row[tree.token[child]] == 0.0 for child in tree.children[node])
