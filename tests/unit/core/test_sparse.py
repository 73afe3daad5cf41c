"""The sparse form: what it asks for, what it refuses, what it gives back. That it equals the dense form is in
tests/statistical."""

from __future__ import annotations

import numpy as np
import pytest

from rootward.core import TokenTree
from rootward.core.verification import bonus_token, gather, gather_ids, sparse_law, stop_node

#   0 ── 1 (drawn 4) ── 3 (chosen 9)
#     └─ 2 (chosen 6)
TREE = TokenTree([0, 4, 6, 9], [-1, 0, 0, 1], [False, True, False, False])
ATOMS = np.array([[4, 5], [-1, -1], [-1, -1], [-1, -1]])
WEIGHT = np.array([[3, 1], [0, 0], [0, 0], [0, 0]])
TARGET = np.random.default_rng(0).dirichlet(np.ones(10), size=4)
IDS = gather_ids(TREE, ATOMS)
AT, TAIL = gather(TARGET, IDS)


def test_gather_ids_adds_chosen_tokens_outside_the_atoms():
    assert IDS.tolist() == [[4, 5, 6], [-1, -1, 9], [-1, -1, -1], [-1, -1, -1]]
    inside = TokenTree([0, 4, 5], [-1, 0, 0], [False, True, False])
    assert gather_ids(inside, ATOMS[:3]).tolist() == [[4, 5], [-1, -1], [-1, -1]]
    assert gather_ids(TokenTree([0], [-1], [False]), np.zeros((1, 0), int)).shape == (1, 0)
    with pytest.raises(ValueError, match="atoms: shape"):
        gather_ids(TREE, ATOMS[:2])


def test_gather_splits_a_row_exactly():
    np.testing.assert_array_equal(AT[0], TARGET[0, [4, 5, 6]])
    np.testing.assert_allclose(AT.sum(axis=1) + TAIL, 1.0, atol=1e-15)
    assert TAIL[2] == TARGET[2].sum()


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
def test_root_alone_is_the_target(algorithm):
    tree = TokenTree([0], [-1], [False])
    law = sparse_law(algorithm, tree, np.zeros((1, 0), int), np.zeros((1, 0), int), np.zeros((1, 0)), [1.0])
    assert law.stop.tolist() == [1.0]
    np.testing.assert_array_equal(law.bonus_row(0, TARGET[0]), TARGET[0])


def test_the_target_row_is_not_changed():
    law, row = sparse_law("traversal", TREE, IDS, WEIGHT, AT, TAIL), TARGET[0].copy()
    law.bonus_row(0, row)
    np.testing.assert_array_equal(row, TARGET[0])


def test_pads_may_hold_anything():
    dirty = np.where(IDS < 0, np.nan, AT)
    a, b = (sparse_law("traversal", TREE, IDS, WEIGHT, at, TAIL) for at in (AT, dirty))
    assert a.stop.tobytes() == b.stop.tobytes()
    assert a.residual.tobytes() == b.residual.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "block"}, "algorithm: 'block'"),
        ({"ids": IDS[:, :2]}, "ids, target_at, tail"),
        ({"ids": np.where(IDS == 9, 8, IDS)}, "ids: no token 9"),
        ({"ids": np.where(IDS == 5, 4, IDS)}, "ids: a row names a token twice"),
        ({"weight": np.tile(WEIGHT, 2)}, "weight: shape"),
        ({"weight": -WEIGHT}, "weight: negative"),
        ({"weight": WEIGHT + 1}, "weight: negative, not finite, or given where ids is -1"),
        ({"weight": np.where(WEIGHT == 3, np.inf, WEIGHT)}, "weight: negative, not finite"),
        ({"weight": WEIGHT * 0}, "weight: none for token 4 of node 1"),
        ({"tail": TAIL + 0.01}, "target_at, tail: row 0"),
        ({"tail": TAIL - TAIL[0] - 1e-9}, "target_at, tail: row 0"),
        ({"target_at": AT * np.nan}, "target_at, tail: row 0"),
        ({"tree": TokenTree([0, 4, 4, 9], [-1, 0, 0, 1], [False, True, False, False])}, "token: siblings"),
    ],
)
def test_refuses(change, message):
    given = {
        "algorithm": "traversal",
        "tree": TREE,
        "ids": IDS,
        "weight": WEIGHT,
        "target_at": AT,
        "tail": TAIL,
    } | change
    with pytest.raises(ValueError, match=message) as error:
        sparse_law(**given)
    assert "\n" not in str(error.value)


def test_coins_that_are_zero_never_accept_a_node_without_budget():
    forbidden = TARGET.copy()
    forbidden[:, [4, 6]] = 0.0
    forbidden /= forbidden.sum(axis=1, keepdims=True)
    for algorithm in ("token", "traversal"):
        law = sparse_law(algorithm, TREE, IDS, WEIGHT, *gather(forbidden, IDS))
        assert stop_node(law, np.zeros(4)) == 0


def test_stop_node_checks_its_coins():
    law = sparse_law("traversal", TREE, IDS, WEIGHT, AT, TAIL)
    with pytest.raises(ValueError, match="coins: shape"):
        stop_node(law, np.zeros(3))


def test_bonus_token_takes_mass_only():
    row = np.array([0.0, 1e-300, 0.0])
    assert bonus_token(row, np.array([50.0, -50.0, 50.0])) == 1
    with pytest.raises(ValueError, match="row: largest mass"):
        bonus_token(np.zeros(3), np.zeros(3))
