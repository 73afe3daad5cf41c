"""Acceptance by rank and depth: what it learns from a round is unbiased, and growth that scores by it."""

from __future__ import annotations

import numpy as np
import pytest
from support import enumeration as enum
from support.models import test_models

from rootward.core import TokenTree, verification
from rootward.core.calibration import Calibration, MatchScale, entry_masses, match_probabilities, places
from rootward.core.distribution import DraftDistribution
from rootward.core.growth import Growth, Policy
from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode

MODELS = test_models()
FULL = [model for model in MODELS if all((row > 0).all() for row in model.q.values())]
EVEN = DraftDistribution([0, 1, 2, 3], [1, 1, 1, 1])


def stopped_below(law) -> np.ndarray:
    """float64[N]: probability that the round stops in the subtree of each node, for this very tree."""
    return law.tree.ancestors.T.astype(float) @ law.stop


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
@pytest.mark.parametrize("shape", [[1, 1], [2, 1], [2, 2]], ids=str)
def test_entry_budgets_give_the_mean_mass_of_every_place(algorithm, shape):
    """Over the trees of a fixed shape: the same means as the subtrees' stop probabilities."""
    for model in FULL:
        trees = enum.drawn(model, enum.shape(model, shape))
        laws = [(p, enum.by(algorithm)(tree, model.target(tree), draft)) for p, tree, draft in trees]
        got = sum(p * entry_masses(law) for p, law in laws)
        want = sum(p * stopped_below(law) for p, law in laws)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
        assert got[1:].sum() == pytest.approx(enum.accepted(model, trees, enum.by(algorithm)), abs=1e-12)


def test_block_learns_as_traversal_does():
    model = FULL[0]
    for _, tree, draft in enum.drawn(model, enum.shape(model, [1, 1])):
        masses = [
            entry_masses(verification.law(name, tree, model.target(tree), draft)) for name in ("block", "traversal")
        ]
        np.testing.assert_array_equal(*masses)


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
def test_learned_acceptance_foretells_the_acceptance_length(algorithm):
    """From a round of every tree, each with its probability, the products of acceptances are the expected reach."""
    for model in FULL:
        trees = enum.drawn(model, enum.shape(model, [2, 1]))
        calibration = Calibration(0.5, strength=1e-9, decay=1.0)
        for p, tree, draft in trees:
            law = enum.by(algorithm)(tree, model.target(tree), draft)
            calibration.learn_masses(tree, p * entry_masses(law))
        a = calibration.acceptance
        first, second = a(0, 1), (1.0 - a(0, 1)) * a(1, 1)
        want = enum.accepted(model, trees, enum.by(algorithm))
        if min(a(0, 1), a(1, 1), a(0, 2)) > 0.01 and max(a(0, 1), a(1, 1), a(0, 2)) < 0.99:
            assert (first + second) * (1.0 + a(0, 2)) == pytest.approx(want, abs=1e-6)


CHAIN = TokenTree([0, 1, 2], [-1, 0, 1], [False, True, True])
FORK = TokenTree([0, 1, 2, 3], [-1, 0, 0, 1], [False, True, True, True])


def test_means_decay_towards_what_is_seen():
    calibration = Calibration(0.5, strength=2.0, decay=0.5)
    assert calibration.acceptance(0, 1) == 0.5
    calibration.learn_stop(CHAIN, 2)
    assert calibration.acceptance(0, 1) == pytest.approx((1.0 + 2 * 0.5) / (1.0 + 2.0))
    calibration.learn_stop(CHAIN, 0)
    assert calibration.acceptance(0, 1) == pytest.approx((0.5 + 2 * 0.5) / (1.5 + 2.0))
    assert calibration.acceptance(0, 2) == pytest.approx((0.5 + 2 * 0.5) / (0.5 + 2.0))  # offered in the first only
    assert calibration.acceptance(1, 1) == 0.5
    for _ in range(60):
        calibration.learn_stop(CHAIN, 2)
    assert calibration.acceptance(0, 1) == pytest.approx((2.0 + 1.0) / (2.0 + 2.0), abs=1e-6)


def test_later_siblings_are_offered_what_is_left():
    taken = list(places(FORK, np.array([1.0, 0.6, 0.3, 0.2])))
    assert taken == [(0, 1, 0.6, 1.0), (1, 1, 0.3, pytest.approx(0.4)), (0, 2, 0.2, 0.6)]


def test_acceptances_stay_inside_the_open_interval():
    calibration = Calibration(0.5, strength=0.001, decay=1.0)
    for _ in range(200):
        calibration.learn_stop(FORK, 2)
    assert calibration.acceptance(0, 1) == pytest.approx(0.01)
    assert calibration.acceptance(1, 1) == pytest.approx(0.99)


def test_the_prior_by_depth_and_rank_and_the_table():
    calibration = Calibration([[0.8, 0.4], [0.6, 0.3]], max_depth=3, max_rank=3)
    np.testing.assert_allclose(calibration.table(), [[0.8, 0.4, 0.4], [0.6, 0.3, 0.3], [0.6, 0.3, 0.3]])
    assert calibration.acceptance(9, 9) == 0.3


@pytest.mark.parametrize("wrong", [{"prior": 1.0}, {"prior": [0.5, 0.0]}, {"strength": 0.0}, {"decay": 1.5}])
def test_refuses(wrong):
    with pytest.raises(ValueError, match=r"prior|strength"):
        Calibration(**wrong)


def test_random_order_has_no_entry_budgets():
    model = FULL[0]
    copies = enum.drawn(model, enum.shape(model, [2], replacement=True), replacement=True)
    _, tree, draft = copies[0]
    with pytest.raises(ValueError, match="learn_stop"):
        entry_masses(verification.law("multi_step", tree, model.target(tree), draft, replacement=True))


# ---- growth


def grown(
    calibration: Calibration | None, num_nodes: int = 6, law: DraftMode = DraftMode.SAMPLED, **policy
) -> LivingTree:
    tree = LivingTree(3, 0, vocab_size=4)
    shape = Policy(law, node_cap=num_nodes, max_depth=6, topk=4, draws_per_level=1, **policy)
    growth = Growth(tree, shape, calibration=calibration)
    level(tree, growth, num_nodes)
    tree.growth = growth
    return tree


def level(tree: LivingTree, growth: Growth, num_nodes: int) -> None:
    words = np.random.default_rng(1)
    while len(tree) < num_nodes:
        for node in [] if growth.root_expanded else [tree.root_id]:
            expand(tree, growth, node)
        for node in growth.frontier(99):
            expand(tree, growth, node)
        growth.draw(lambda n: words.integers(0, 2**63, n).astype(np.uint64))


def expand(tree: LivingTree, growth: Growth, node: int) -> None:
    tree.at(node).row = (EVEN.ids, EVEN.weight)
    growth.expand(node, EVEN, np.array([3.0, 0.0, -1.0, -1.0]))


def test_a_constant_calibration_grows_as_the_constant_does():
    for a in (0.35, 0.55, 0.8):
        plain, learned = grown(None, 8, acceptance=a, later=a), grown(Calibration(a), 8)
        assert plain.snapshot(8).tree == learned.snapshot(8).tree


def test_growth_goes_where_acceptance_is():
    deep = grown(Calibration([[0.95, 0.1]])).snapshot(9).tree
    assert deep.depth.tolist() == [0, 1, 2, 3, 4, 5, 6]
    wide = grown(Calibration([[0.3, 0.4, 0.5, 0.5], [0.02, 0.02, 0.02, 0.02]])).snapshot(9).tree
    assert wide.depth.tolist()[:5] == [0, 1, 1, 1, 1]


def test_what_is_kept_is_scored_by_its_new_depth_and_by_what_was_learned():
    calibration = Calibration([[0.9, 0.05], [0.85, 0.05]], strength=1.0)
    tree = grown(calibration, 4)
    growth = tree.growth
    chain = tree.snapshot(9).tree
    assert chain.depth.tolist() == [0, 1, 2, 3, 4]
    calibration.taken_DR[:], calibration.offered_DR[:] = 0.0, 100.0  # nothing is ever accepted at rank 0 …
    calibration.taken_DR[:, 1] = 90.0  # … and nearly always at rank 1
    tree.commit([int(chain.token[1])])
    growth.rerooted()
    level(tree, growth, 4)
    after = tree.snapshot(9).tree
    assert after.parent[-1] == 0, "the second child of the new root comes next"


def test_greedy_families_are_scored_by_order_of_trial():
    tree = grown(Calibration([[0.9, 0.5], [0.5, 0.5]]), 5, law=DraftMode.GREEDY, family=(0.3, 0.3))
    assert len(tree) == 5
    assert tree.growth._score[1] > tree.growth._score[2]


def test_coupled_growth_scores_by_match_probability():
    near = grown(None, 5, law=DraftMode.COUPLED, match_scale=0.3).snapshot(9).tree
    assert near.depth.tolist() == [0, 1, 2, 3, 4, 5], "the largest value is nearly always the target's"
    far = grown(None, 5, law=DraftMode.COUPLED, match_scale=50.0).snapshot(9).tree
    assert far.depth.tolist() == [0, 1, 1, 1, 1, 2], "all children are about as likely"
    with pytest.raises(ValueError, match="match_scale"):
        Policy(DraftMode.COUPLED, match_scale=-1.0)


def test_match_probabilities():
    np.testing.assert_allclose(match_probabilities(np.log([0.5, 0.25, 0.25]), 1.0), [0.5, 0.25, 0.25])
    assert match_probabilities([2.0, 1.0], 0.01)[0] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="temperature"):
        match_probabilities([1.0], 0.0)


@pytest.mark.parametrize("true", [0.14, 0.4, 1.13])
def test_the_scale_of_a_pair_is_found_from_what_its_target_takes(true: float) -> None:
    rng, scale = np.random.default_rng(1), MatchScale()
    for _ in range(400):
        perturbed = rng.gumbel(size=12)
        scale.learn(perturbed, int(np.argmax(perturbed + true * rng.gumbel(size=12))))
    assert true / 1.5 < scale.value < true * 1.5
