"""How much a level draws, and how coupled growth is scored."""

from __future__ import annotations

import numpy as np
import pytest

from rootward.core.distribution import DraftDistribution
from rootward.core.growth import BestFirst, Growth, match_probabilities, strategies
from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode

EVEN = DraftDistribution([0, 1, 2, 3], [1, 1, 1, 1])


@pytest.mark.parametrize(("cap", "draws"), [(1, 1), (5, 1), (7, 2), (8, 2), (11, 3), (12, 3), (15, 4), (64, 4)])
def test_a_small_tree_has_at_least_so_many_levels_as_it_should(cap: int, draws: int) -> None:
    strategy = BestFirst(draws_per_level=4, least_levels=4)
    assert strategy.draws(cap) == draws
    assert cap < 4 or -(-cap // strategy.draws(cap)) >= 4


@pytest.mark.parametrize(("cap", "draws"), [(0, 1), (4, 4), (5, 3), (6, 3), (7, 4), (9, 3), (10, 4), (16, 4)])
def test_the_levels_of_a_tree_are_even(cap: int, draws: int) -> None:
    assert BestFirst(draws_per_level=4).draws(cap) == draws


def grown(num_nodes: int, **strategy) -> LivingTree:
    tree = LivingTree(3, 0, vocab_size=4)
    growth = Growth(tree, BestFirst(max_depth=6, topk=4, draws_per_level=1, **strategy), node_cap=num_nodes)
    words = np.random.default_rng(1)
    while len(tree) < num_nodes:
        for node in [*([] if growth.root_expanded else [tree.root_id]), *growth.frontier(99)]:
            growth.expand(node, EVEN, np.array([3.0, 0.0, -1.0, -1.0]))
        growth.draw(lambda n: words.integers(0, 2**63, n).astype(np.uint64))
    return tree


def test_acceptance_decides_between_depth_and_width():
    assert grown(6, acceptance=0.95, later=0.1).snapshot(9).tree.depth.max() == 6
    assert grown(6, acceptance=0.05, later=0.5).snapshot(9).tree.depth.tolist()[:5] == [0, 1, 1, 1, 1]


def test_coupled_growth_scores_by_match_probability(monkeypatch):
    monkeypatch.setattr(strategies, "MATCH_SCALE", 0.3)
    near = grown(5, mode=DraftMode.COUPLED).snapshot(9).tree
    assert near.depth.tolist() == [0, 1, 2, 3, 4, 5], "the largest value is nearly always the target's"
    monkeypatch.setattr(strategies, "MATCH_SCALE", 50.0)
    far = grown(5, mode=DraftMode.COUPLED).snapshot(9).tree
    assert far.depth.tolist() == [0, 1, 1, 1, 1, 2], "all children are about as likely"


def test_match_probabilities():
    np.testing.assert_allclose(match_probabilities(np.log([0.5, 0.25, 0.25]), 1.0), [0.5, 0.25, 0.25])
    assert match_probabilities([2.0, 1.0], 0.01)[0] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="temperature"):
        match_probabilities([1.0], 0.0)


@pytest.mark.parametrize(("draws", "chosen"), [(1, 0), (2, 0), (3, 2), (4, 2)])
def test_a_greedy_family_is_whole_or_not_at_all(draws: int, chosen: int) -> None:
    strategy = BestFirst(DraftMode.GREEDY, draws_per_level=draws, root_family=(0.3, 0.3, 0.1))
    growth = Growth(LivingTree(3, 0, vocab_size=4), strategy, node_cap=8)
    growth.expand(growth.root_id, EVEN)
    words = np.random.default_rng(1)
    drawn = growth.draw(lambda n: words.integers(0, 2**63, n).astype(np.uint64))
    assert len(drawn) == min(draws, 3), "a family is all that its node gets"
    assert sum(not growth.tree.nodes[node].sampled for node in drawn) == chosen
