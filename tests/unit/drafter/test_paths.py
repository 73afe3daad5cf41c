"""Trees from a source: the best paths, each once, within the shape."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tokens import RandomTokens

from rootward.core.living_tree import LivingTree
from rootward.core.lookup import Candidate, Ngram, extend_tree


class Table:
    """Scores per (last token, next token); counts how often it is asked."""

    def __init__(self, scores: dict[int, dict[int, float]]) -> None:
        self.scores, self.asked = scores, 0

    def extend(self, tokens) -> None: ...

    def start(self) -> int:
        return 0

    def step(self, state: int, token: int) -> int:
        return token

    def candidates(self, state: int) -> list[Candidate]:
        self.asked += 1
        found = self.scores.get(state, {})
        return sorted((Candidate(t, s) for t, s in found.items()), key=lambda c: -c.score)


def tree_of(**changes) -> LivingTree:
    return LivingTree(3, 0, vocab_size=100, **changes)


def paths(tree: LivingTree) -> list[tuple[int, ...]]:
    """In draw order."""
    snapshot = tree.snapshot(10_000)
    return [snapshot.tree.path(node) for node in range(1, len(snapshot.tree))]


SCORES = st.dictionaries(
    st.integers(0, 3),
    st.dictionaries(st.integers(0, 3), st.floats(0.01, 0.99), max_size=4),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(SCORES, st.integers(1, 12), st.integers(1, 4), st.integers(1, 4))
def test_the_best_paths_in_order(scores, cap: int, depth: int, topk: int) -> None:
    tree = tree_of(node_cap=cap)
    extend_tree(tree, Table(scores), max_depth=depth, topk=topk, least_score=0.05)
    table = Table(scores)

    def score(path: tuple[int, ...]) -> float:
        before = (0, *path)
        return math.prod(dict(table.candidates(a)[:topk]).get(b, 0.0) for a, b in itertools.pairwise(before))

    every = [p for size in range(1, depth + 1) for p in itertools.product(range(4), repeat=size)]
    wanted = sorted((score(p) for p in every if score(p) >= 0.05), reverse=True)[:cap]
    drawn = paths(tree)
    assert len(set(drawn)) == len(drawn)
    assert [score(p) for p in drawn] == pytest.approx(wanted)


def test_nothing_below_end_of_sequence_also_at_the_root() -> None:
    source = Table({0: {1: 0.9}, 1: {2: 0.9}, 2: {3: 0.9}})
    tree = tree_of(node_cap=8, eos_ids=(2,))
    assert extend_tree(tree, source, max_depth=8, topk=2) == 2
    assert paths(tree) == [(1,), (1, 2)]
    tree.commit([1, 2])
    assert extend_tree(tree, source, max_depth=8, topk=2) == 0


def test_what_was_kept_is_extended_and_not_drawn_again() -> None:
    tree = tree_of(node_cap=4)
    table = Table({0: {1: 0.9, 2: 0.05}, 1: {1: 0.9}, 2: {3: 0.9}})
    extend_tree(tree, table, max_depth=3, topk=2)
    kept = paths(tree)
    assert kept == [(1,), (1, 1), (1, 1, 1), (2,)]
    tree.commit([1])
    assert tree.nodes

    class Shifted(Table):
        def start(self) -> int:
            return 1

    before = tree.next_id
    assert extend_tree(tree, Shifted({1: {2: 0.9, 1: 0.5}, 2: {3: 0.9}}), max_depth=3, topk=2) == 2
    assert [n for n in tree.nodes if n >= before] == [before, before + 1]
    assert paths(tree) == [(1,), (1, 1), (2,), (2, 3)]


def test_a_family_is_never_larger_than_allowed() -> None:
    tree = tree_of(node_cap=8)
    extend_tree(tree, Table({0: {1: 0.5, 2: 0.4}}), max_depth=1, topk=2)
    assert extend_tree(tree, Table({0: {3: 0.9}}), max_depth=1, topk=2) == 0
    assert paths(tree) == [(1,), (2,)]


def test_branches_that_meet_share_what_is_looked_up() -> None:
    """Two tokens, any order: 14 paths of depth 3 unfold a graph of three states."""
    table = Table({state: {1: 0.6, 2: 0.5} for state in (0, 1, 2)})
    tree = tree_of(node_cap=100)
    assert extend_tree(tree, table, max_depth=3, topk=2) == 14
    assert table.asked == 3


def test_ngram_branches_go_on_alike_and_no_state_is_looked_up_twice() -> None:
    """After 1 came 5 7 8 9 and 6 7 8 9."""
    source, asked = Ngram(), []
    source.extend([1, 5, 7, 8, 9, 0, 1, 6, 7, 8, 9, 4, 1])
    look = source.candidates
    source.candidates = lambda state: asked.append(state) or look(state)
    tree = tree_of(node_cap=64)
    extend_tree(tree, source, max_depth=5, topk=2, least_score=0.0001)
    assert {(5, 7, 8, 9), (6, 7, 8, 9)} <= set(paths(tree))
    assert len(asked) == len(set(asked)) < len(tree)


def test_random_trees_have_the_shape_that_is_asked_for() -> None:
    tree = tree_of(node_cap=16)
    assert extend_tree(tree, RandomTokens(100), max_depth=4, topk=3, least_score=0.0) == 16
    assert max(map(len, paths(tree))) <= 4
