"""Every draft strategy with every rule: the exact law of its trees, every valid pair lossless, every other pair refused and biased
(algorithms.md, section 4).

A strategy that draws is enumerated itself: the draws of the production growth become branch points. That law must be the one written from
the definition. RSD-S draws arrival times too, so its sampler is compared by χ² in `test_samplers.py`, and its definition is enumerated.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from support import enumeration as enum
from support import wrong_rules as wrong
from support.models import Model, deep_models, test_models
from support.rounds import Chooser

from rootward.core import drafting
from rootward.core.distribution import DenseDistribution
from rootward.core.drafting import build_tree
from rootward.core.growth import BestFirst, strategy_of
from rootward.core.pairing import COLUMNS, check_pair, lossless_columns
from rootward.core.requests import DraftMode, DraftStrategy

MODELS, DEEP = test_models(), deep_models()
EXACT, SEEN = 1e-12, 1e-4
ACCEPTANCE, LATER, NODES = 0.6, 0.35, 4

VERIFIERS = {
    ("match", False): enum.matching,
    **{(name, copies): enum.by(name, replacement=copies) for name, copies in COLUMNS if name != "match"},
}


def by_reach(model: Model) -> enum.Process:
    """Best-first: the place that is most likely reached, by ranks alone."""

    def process(state: enum.State) -> int | None:
        reach, score = {0: 1.0}, {}
        for node in range(len(state.token)):
            here = reach[node]
            for rank, child in enumerate(state.children(node)):
                a = LATER if rank else ACCEPTANCE
                reach[child], here = here * a, here * (1.0 - a)
            rank = len(state.children(node))
            if state.depth(node) < model.depth and rank < np.count_nonzero(model.q[state.path[node]]):
                score[node] = here * (LATER if rank else ACCEPTANCE)
        full = len(state.token) > NODES or not score
        return None if full else max(score, key=lambda node: (score[node], -node))

    return process


def shape(branching: list[int], *, copies: bool = False):
    return lambda m: enum.drawn(m, enum.shape(m, branching, replacement=copies), replacement=copies)


# strategy: the law of its trees from the definition
DRAWN = {
    "chain:2": shape([1, 1]),
    "rsd_c:2,1": shape([2, 1]),
    "rsd_c:2,2": shape([2, 2]),
    "iid:2,1": shape([2, 1], copies=True),
    "greedy:2,2": lambda m: enum.greedy(m, [2, 2]),
    "best_first": lambda m: enum.drawn(m, by_reach(m)),
    "rsd_s:2,2": lambda m: enum.stochastic_beam(m, 2, 2),
}
DEEP_DRAWN = {
    "chain:3": shape([1, 1, 1]),
    "rsd_c:1,2,1": shape([1, 2, 1]),
    "iid:2,1,1": shape([2, 1, 1], copies=True),
    "greedy:2,2,1": lambda m: enum.greedy(m, [2, 2, 1]),
    "best_first": lambda m: enum.drawn(m, by_reach(m)),
    "rsd_s:2,3": lambda m: enum.stochastic_beam(m, 2, 3),
}
# `test_lossless.py` has the same constructions with every rule; these are not there.
LOSSLESS = [("best_first", False), ("best_first", True), ("rsd_c:1,2,1", True)]
CASES = [(name, False) for name in DRAWN] + [(name, True) for name in DEEP_DRAWN]
ENUMERABLE = [case for case in CASES if not case[0].startswith("rsd_s")]


def construction(name: str) -> str:
    return DraftStrategy.parse(name).name


def built(name: str, model: Model, rng: np.random.Generator):
    """A tree of the production strategy."""
    asked = DraftStrategy.parse(name)
    settings = BestFirst(max_depth=model.depth, topk=99, draws_per_level=1, acceptance=ACCEPTANCE, later=LATER)
    strategy = strategy_of(asked, asked.mode or DraftMode.SAMPLED, settings)
    return build_tree(strategy, model.draft_row, rng, num_nodes=NODES if asked.name == "best_first" else 99)


def outcomes(model: Model, name: str, monkeypatch: pytest.MonkeyPatch):
    """Every tree of a strategy with its probability: each draw is a branch point, walked like an odometer."""
    chooser, found = Chooser(), []
    monkeypatch.setattr(DenseDistribution, "draw", lambda row, words: int(row.ids[chooser.choose(row.law)]))

    def program() -> None:
        tree, draft = built(name, model, np.random.default_rng(0))
        found.append((chooser.mass, tree, draft))

    chooser.runs(program)
    return enum.merged(iter(found))


@cache
def trees(name: str, index: int, deep: bool) -> enum.Weighted:
    return (DEEP_DRAWN if deep else DRAWN)[name]((DEEP if deep else MODELS)[index])


def models(deep: bool) -> list[Model]:
    return DEEP if deep else MODELS


def by_level(tree, draft):
    """The tree with its nodes level by level, families in the order of their parents."""
    level, order = [0], []
    while level:
        order += level
        level = [child for node in level for child in tree.children[node]]
    index = {node: i for i, node in enumerate(order)}
    parents = [-1, *(index[int(tree.parent[node])] for node in order[1:])]
    return type(tree)(tree.token[order], parents, tree.sampled[order]), draft[order]


@pytest.mark.parametrize(("name", "deep"), ENUMERABLE)
def test_a_strategy_draws_the_law_of_its_definition(name, deep, monkeypatch):
    for index, model in enumerate(models(deep)):
        levels = [(p, *by_level(tree, draft)) for p, tree, draft in trees(name, index, deep)]
        want = {tree: (p, draft) for p, tree, draft in enum.merged(iter(levels))}
        got = {tree: (p, draft) for p, tree, draft in outcomes(model, name, monkeypatch)}
        assert want.keys() == got.keys(), model.name
        for tree, (probability, draft) in want.items():
            assert got[tree][0] == pytest.approx(probability, abs=1e-12)
            np.testing.assert_allclose(got[tree][1], draft, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("name", "deep"), LOSSLESS)
def test_drawn_trees_are_lossless_with_every_valid_rule(name, deep):
    for column in lossless_columns(construction(name)):
        check_pair(construction(name), *column)
        for index, model in enumerate(models(deep)):
            assert enum.error(model, trees(name, index, deep), VERIFIERS[column]) < EXACT, (column, model.name)


WRONG = [
    (name, column)
    for name in DRAWN
    for column in COLUMNS
    if column[0] in ("token", "multi_step", "traversal")
    and column not in lossless_columns(construction(name))
    # of a GREEDY family one child is drawn, and first: with or without replacement is the same to it
    and (construction(name) != "greedy" or column[0] == "multi_step")
]


@pytest.mark.parametrize(("name", "column"), WRONG)
def test_a_rule_for_other_child_laws_is_refused_and_biased(name, column):
    with pytest.raises(ValueError, match="is not lossless for"):
        check_pair(construction(name), *column)
    assert any(is_seen(name, index, column) for index in range(len(MODELS)))


def is_seen(name: str, index: int, column) -> bool:
    """The rule is biased on this model, or the library itself refuses such trees."""
    try:
        return enum.error(MODELS[index], trees(name, index, False), VERIFIERS[column]) > SEEN
    except ValueError:
        return True


# ---- chosen trees


def marginals(model: Model) -> np.ndarray:
    return np.stack([model.q[()], model.q[(0,)]])


CHOSEN = {
    "top_k": lambda m: built("top_k:2,2", m, np.random.default_rng(0)),
    "marginals": lambda m: drafting.marginals(marginals(m), 4),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_trees_are_lossless_with_one_hot_laws(name):
    for column in lossless_columns(name) - {("block", False)}:
        for model in MODELS:
            assert enum.error(model, [(1.0, *CHOSEN[name](model))], VERIFIERS[column]) < EXACT, (column, model.name)


def test_a_chosen_chain_may_be_verified_by_block():
    for model in MODELS:
        tree, draft = drafting.top_k(model.draft_row, [1, 1])
        assert enum.error(model, [(1.0, tree, draft)], VERIFIERS[("block", False)]) < EXACT


@pytest.mark.parametrize("column", [c for c in COLUMNS if c[0] in ("token", "traversal", "multi_step")], ids=str)
@pytest.mark.parametrize("name", CHOSEN)
def test_ratio_tests_against_q_on_chosen_trees_are_refused_and_biased(name, column):
    with pytest.raises(ValueError, match="is not lossless for"):
        check_pair("chosen_called_drawn", *column)
    errors = [enum.error(m, wrong.called_drawn([(1.0, *CHOSEN[name](m))]), VERIFIERS[column]) for m in MODELS]
    assert max(errors) > SEEN


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
def test_shared_noise_under_ratio_tests_is_refused_and_biased(algorithm):
    with pytest.raises(ValueError, match="noise shared"):
        check_pair("coupled", algorithm)
    full = [model for model in MODELS if all((row > 0).all() for row in model.q.values())]
    assert max(enum.error(m, wrong.shared_noise(m), VERIFIERS[(algorithm, False)]) for m in full) > SEEN
    for model in full:
        assert enum.error(model, wrong.shared_noise(model), enum.matching) < EXACT


def path_probability(model: Model, path: tuple[int, ...]) -> float:
    return float(np.prod([model.q[path[:i]][x] for i, x in enumerate(path)]))


@pytest.mark.parametrize("num_nodes", [1, 3, 6])
def test_best_first_trees_of_chosen_tokens_cover_the_most_probability(num_nodes):
    """`top_k` as services run it, one node a level: EAGLE-2's aim without a beam."""
    for model in DEEP:
        strategy = BestFirst(DraftMode.TOP_K, max_depth=3, topk=99, draws_per_level=1)
        tree, _ = build_tree(strategy, model.draft_row, np.random.default_rng(0), num_nodes=num_nodes)
        every = [p for d in range(1, 4) for p in itertools.product(range(model.vocab), repeat=d)]
        most = sum(sorted((path_probability(model, path) for path in every), reverse=True)[:num_nodes])
        assert sum(path_probability(model, tree.path(i)) for i in range(1, len(tree))) == pytest.approx(most, abs=1e-12)
