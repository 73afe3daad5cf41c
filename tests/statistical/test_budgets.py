"""One budget over two sessions: what both commit must have the law of two independent targets (algorithms.md, 6.4).

All trees of both sessions are enumerated; a rule sees both and says what each verifies. The selections of TETRIS and ProPD
look at the nodes they drop: biased under ratio tests, exact under match.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
from support import budgets
from support import enumeration as enum
from support import wrong_rules as wrong
from support.models import random_model, test_models
from support.wrong_rules import Rounds

MODELS = [model for model in test_models() if model.vocab == 3]
PAIRS = [(a, (a + 1) % len(MODELS)) for a in range(len(MODELS))]
EXACT, SEEN = 1e-12, 1e-4
TABLE = ((0.8, 0.5), (0.6, 0.45))  # acceptance by (depth − 1, rank)
RATIO = {name: enum.by(name) for name in ("token", "traversal")}

Rule = Callable[[Rounds], Rounds]


def ACCEPTANCE(rank: int, depth: int) -> float:
    return TABLE[min(depth, 2) - 1][min(rank, 1)]


def stopping(model) -> enum.Process:
    """Places by value, and growth that ends after an unlikely draw: sizes depend on values too."""
    place = enum.best_first(model, 4)

    def process(state: enum.State) -> int | None:
        last = len(state.token) - 1
        unlikely = last and model.q[state.path[state.parent[last]]][state.token[last]] < 0.3
        return None if unlikely else place(state)

    return process


@cache
def trees(index: int, by_value: bool) -> enum.Weighted:
    model = MODELS[index]
    return enum.drawn(model, stopping(model) if by_value else enum.shape(model, [2, 1]))


def joint_error(models, batch, rule: Rule, verifier) -> float:
    """Largest error of the joint law of what two sessions commit."""
    mass: list[dict] = [{}, {}]  # cut tree → (number, law of the committed text)
    joint: dict[tuple[int, int], float] = defaultdict(float)
    for (p, *first), (q, *second) in itertools.product(*batch):
        cut = rule([tuple(first), tuple(second)])
        numbers = []
        for known, model, (tree, draft) in zip(mass, models, cut, strict=True):
            if tree not in known:
                known[tree] = len(known), enum.committed_law(model, [(1.0, tree, draft)], verifier).ravel()
            numbers.append(known[tree][0])
        joint[tuple(numbers)] += p * q
    table = np.zeros([len(known) for known in mass])
    for place, probability in joint.items():
        table[place] = probability
    left, right = (np.stack([law for _, law in known.values()]) for known in mass)
    target = [enum.continuation(model, ()).ravel() for model in models]
    return float(np.abs(left.T @ table @ right - np.outer(*target)).max())


def worst(rule: Callable[..., Rule], verifier, pairs=PAIRS) -> float:
    return max(
        joint_error([MODELS[a], MODELS[b]], [trees(a, True), trees(b, False)], rule(MODELS[a]), verifier)
        for a, b in pairs
    )


def first_nodes(rounds: Rounds, shares: list[int]) -> Rounds:
    return [wrong.first(*r, 1 + n) for r, n in zip(rounds, shares, strict=True)]


def in_turn(rounds: Rounds, budget: int) -> Rounds:
    return first_nodes(rounds, budgets.deal_in_turn([len(tree) - 1 for tree, _ in rounds], budget))


def by_structure(rounds: Rounds, budget: int) -> Rounds:
    scores = [budgets.place_scores(tree, ACCEPTANCE) for tree, _ in rounds]
    return first_nodes(rounds, budgets.deal_by_score(scores, budget))


def by_bound(rounds: Rounds, budget: int) -> Rounds:
    return first_nodes(rounds, budgets.deal_by_score([budgets.path_bounds(*r) for r in rounds], budget))


def closed_places(rounds: Rounds, least: float) -> Rounds:
    pruned = []
    for tree, draft in rounds:
        smaller, old = budgets.without_places(tree, budgets.path_bounds(tree, draft), least)
        pruned.append((smaller, draft[old]))
    return pruned


LOSSLESS = {
    **{f"in turn, {n} rows": partial(in_turn, budget=n) for n in (1, 3, 5)},
    **{f"heap by ranks and depths, {n} rows": partial(by_structure, budget=n) for n in (3, 5)},
    **{f"heap by path bounds, {n} rows": partial(by_bound, budget=n) for n in (1, 3, 5)},
    **{f"places below {least} closed": partial(closed_places, least=least) for least in (0.2, 0.4)},
}


def early_layer(model):
    """A guess of the target between the draft and the target."""
    return lambda path: 0.5 * (model.p[path] + model.q[path])


NAIVE = {
    "TETRIS": lambda model: partial(wrong.batch_by_own_probability, budget=4),
    "TETRIS in draw order": lambda model: partial(wrong.batch_in_draw_order_by_own_probability, budget=3),
    "in proportion to probability": lambda model: partial(wrong.batch_in_proportion_to_probability, budget=4),
    "in proportion to size": lambda model: partial(wrong.batch_in_proportion_to_size, budget=2),
}


@pytest.mark.parametrize("algorithm", RATIO)
@pytest.mark.parametrize("rule", LOSSLESS)
def test_lossless_over_two_sessions(rule, algorithm):
    assert worst(lambda model: LOSSLESS[rule], RATIO[algorithm]) < EXACT


def test_there_are_eight_pairs():
    assert len(PAIRS) >= 8


@pytest.mark.parametrize("algorithm", RATIO)
@pytest.mark.parametrize("rule", NAIVE)
def test_naive_budgets_are_biased(rule, algorithm):
    assert worst(NAIVE[rule], RATIO[algorithm]) > SEEN


@pytest.mark.parametrize("algorithm", RATIO)
def test_pruning_by_an_early_layer_is_biased(algorithm):
    errors = []
    for index, model in enumerate(MODELS):
        rounds = [
            (p, *wrong.pruned_early(early_layer(model), [(tree, draft)])[0]) for p, tree, draft in trees(index, False)
        ]
        errors.append(enum.error(model, enum.merged(iter(rounds)), RATIO[algorithm]))
    assert max(errors) > SEEN


@pytest.mark.parametrize("rule", NAIVE)
def test_naive_budgets_are_exact_under_match(rule):
    assert worst(NAIVE[rule], enum.matching, PAIRS[:4]) < EXACT


def test_dealing_in_turn():
    assert budgets.deal_in_turn([3, 1, 5], 6) == [3, 1, 2]
    assert budgets.deal_in_turn([3, 1, 5], 20) == [3, 1, 5]
    assert budgets.deal_in_turn([3, 3, 3], 2) == [1, 1, 0]
    assert budgets.deal_in_turn([0, 2], 1) == [0, 1]
    assert budgets.deal_in_turn([], 4) == []
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes, budget = rng.integers(0, 6, size=rng.integers(1, 6)).tolist(), int(rng.integers(0, 20))
        want = [0] * len(sizes)
        for _ in range(6):
            for b, size in enumerate(sizes):
                if want[b] < size and sum(want) < budget:
                    want[b] += 1
        assert budgets.deal_in_turn(sizes, budget) == want


def test_dealing_by_score_keeps_draw_order():
    scores = [[1.0, 0.5, 0.1, 0.9], [1.0, 0.4, 0.3]]
    assert budgets.deal_by_score(scores, 1) == [1, 0]
    assert budgets.deal_by_score(scores, 3) == [1, 2]  # the 0.9 waits behind the 0.1
    assert budgets.deal_by_score(scores, 9) == [3, 2]
    assert budgets.deal_by_score([[1.0], [1.0, 0.2]], 2) == [0, 1]
    with pytest.raises(ValueError, match="budget"):
        budgets.deal_by_score(scores, -1)


def test_scores_are_known_before_their_node_is_drawn():
    """Another token at node i leaves the scores of places up to i as they are."""
    model = random_model(7, vocab=4)
    for _, tree, draft in enum.drawn(model, enum.shape(model, [2, 1]))[:200]:
        bounds = budgets.path_bounds(tree, draft)
        assert (bounds >= wrong.path_probabilities(tree, draft) - 1e-15).all()
        for i in range(1, len(tree)):
            cut, rows = tree.first(i + 1), draft[: i + 1].copy()
            rows[i:] = 0.0
            token = cut.token.copy()
            token[i] = (token[i] + 1) % 4
            changed = type(tree)(token, cut.parent, cut.sampled)
            np.testing.assert_array_equal(budgets.path_bounds(changed, rows), bounds[: i + 1])
