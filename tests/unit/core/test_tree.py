"""TokenTree: what it derives, what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rootward.core import TokenTree
from rootward.core.tree import root_only

#        0
#      /   \
#     1     2        draw order 1 2 3 4 5
#    / \     \
#   3   5     4
TREE = TokenTree([9, 7, 8, 5, 6, 4], [-1, 0, 0, 1, 2, 1], [True, True, False, True, True, False])


def test_derived_tables():
    assert len(TREE) == 6
    assert TREE.depth.tolist() == [0, 1, 1, 2, 2, 2]
    assert TREE.children == ((1, 2), (3, 5), (4,), (), (), ())
    assert TREE.post_order.tolist() == [3, 5, 1, 4, 2, 0]
    assert [TREE.path(node) for node in range(6)] == [(), (7,), (8,), (7, 5), (8, 6), (7, 4)]


def test_ancestors_mask():
    seen = [np.flatnonzero(row).tolist() for row in TREE.ancestors]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 5]]


def test_root_alone():
    tree = root_only()
    assert (len(tree), tree.children, tree.post_order.tolist(), tree.depth.tolist()) == (1, ((),), [0], [0])


def test_a_cut_keeps_what_was_drawn_first():
    cut = TREE.first(3)
    assert (cut.token.tolist(), cut.parent.tolist()) == ([9, 7, 8], [-1, 0, 0])
    assert TREE.first(6) == TREE
    for wrong in (0, 7):
        with pytest.raises(ValueError, match="num_nodes"):
            TREE.first(wrong)


def test_equality_ignores_the_root_token():
    same = TokenTree([1, 7, 8, 5, 6, 4], [-1, 0, 0, 1, 2, 1], [False, True, False, True, True, False])
    assert same == TREE
    assert hash(same) == hash(TREE)
    assert TokenTree([9, 7, 8, 5, 6, 4], [-1, 0, 0, 1, 2, 1], [True] * 6) != TREE
    assert TREE != "tree"


def test_frozen_and_a_copy():
    token = np.array([0, 1])
    tree = TokenTree(token, [-1, 0], [1, 1])
    token[1] = 5
    assert tree.token[1] == 1
    assert tree.sampled.dtype == np.bool_
    for array in (tree.token, tree.parent, tree.sampled, tree.depth, tree.post_order, tree.ancestors):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.token = token


@pytest.mark.parametrize(
    ("token", "parent", "sampled", "field"),
    [
        ([], [], [], "parent"),
        ([0, 1], [-1], [True, True], "token, parent, sampled"),
        ([0, 1], [0, 0], [True, True], "parent"),
        ([0, 1], [-1, 1], [True, True], "parent: node 1"),
        ([0, 1, 2], [-1, 2, 0], [True] * 3, "parent: node 1"),
        ([0, 1, 2], [-1, 0, -1], [True] * 3, "parent: node 2"),
        ([0, -1], [-1, 0], [True, True], "token: node 1"),
        ([0, 1.5], [-1, 0], [True, True], "token"),
        ([[0, 1]], [-1, 0], [True, True], "token"),
        ([0, 1], [-1, 0], [True, 2], "sampled"),
        ([0, 1], [-1, 0], [[True, True]], "sampled"),
    ],
)
def test_refuses(token, parent, sampled, field):
    with pytest.raises(ValueError, match=field) as error:
        TokenTree(token, parent, sampled)
    assert "\n" not in str(error.value)
