"""The further builders: their exact tree laws, every valid pair with a verifier lossless, every other pair refused, and
biased where algorithms.md, section 4, says so.

A drawing builder is enumerated itself: its draws become branch points. That law must be the one written from the definition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from support import enumeration as enum
from support import wrong_rules as wrong
from support.models import Model, deep_models, test_models

from rootward.core import drafting
from rootward.core.drafting import families
from rootward.core.pairing import COLUMNS, check_pair, lossless_columns

MODELS, DEEP = test_models(), deep_models()
EXACT, SEEN = 1e-12, 1e-4
TABLE = np.array([[0.83, 0.41], [0.62, 0.35], [0.57, 0.31]])  # acceptance by (depth − 1, rank)
SHAPES = {"bushy": (2, 2, 1, 0, 0, 0), "narrow": (3, 1, 0, 0, 0), "deep": (2, 1, 1, 2, 0, 0, 0)}


def acceptance(rank: int, depth: int) -> float:
    return float(TABLE[min(depth, 3) - 1, min(rank, 1)])


VERIFIERS = {
    ("match", False): enum.matching,
    **{(name, copies): enum.by(name, replacement=copies) for name, copies in COLUMNS if name != "match"},
}


def following(sizes: tuple[int, ...]) -> Callable[[Model], enum.Process]:
    """The next place of a shape: nodes remember the place they fill as the path of their ranks."""
    names, todo = {(): 0}, [()]
    for place in todo:
        for rank in range(sizes[names[place]]):
            names[(*place, rank)] = len(names)
            todo.append((*place, rank))

    def of(model: Model) -> enum.Process:
        def process(state: enum.State) -> int | None:
            ranks: list[tuple[int, ...]] = [()]
            for node in range(1, len(state.token)):
                earlier = [c for c in state.children(state.parent[node]) if c < node]
                ranks.append((*ranks[state.parent[node]], len(earlier)))
            for node in range(len(state.token)):
                full = min(sizes[names[ranks[node]]], int(np.count_nonzero(model.q[state.path[node]])))
                if len(state.children(node)) < full:
                    return node
            return None

        return process

    return of


def by_reach(num_nodes: int, max_depth: int) -> Callable[[Model], enum.Process]:
    """The place that is most likely reached, by ranks and depths."""

    def of(model: Model) -> enum.Process:
        def process(state: enum.State) -> int | None:
            reach, score = {0: 1.0}, {}
            for node in range(len(state.token)):
                here, depth = reach[node], state.depth(node) + 1
                for rank, child in enumerate(state.children(node)):
                    reach[child], here = here * acceptance(rank, depth), here * (1.0 - acceptance(rank, depth))
                rank = len(state.children(node))
                if depth <= max_depth and rank < np.count_nonzero(model.q[state.path[node]]):
                    score[node] = here * acceptance(rank, depth)
            enough = len(state.token) > num_nodes or not score
            return None if enough else max(score, key=lambda node: (score[node], -node))

        return process

    return of


# name: (construction in pairing.py, build(row, rng), its law from the definition)
DRAWN = {
    "delayed 1 + [2]": (
        "delayed",
        lambda row, rng: drafting.delayed(row, 1, [2], rng),
        lambda m: enum.shape(m, [1, 2]),
    ),
    "fixed_shape, bushy": (
        "fixed_shape",
        lambda row, rng: drafting.fixed_shape(row, SHAPES["bushy"], rng),
        following(SHAPES["bushy"]),
    ),
    "fixed_shape, narrow": (
        "fixed_shape",
        lambda row, rng: drafting.fixed_shape(row, SHAPES["narrow"], rng),
        following(SHAPES["narrow"]),
    ),
    "best_first_drawn": (
        "best_first_drawn",
        lambda row, rng: drafting.best_first_drawn(row, 4, 2, acceptance, rng),
        by_reach(4, 2),
    ),
}
DEEP_DRAWN = {
    "delayed 1 + [2, 1]": (
        "delayed",
        lambda row, rng: drafting.delayed(row, 1, [2, 1], rng),
        lambda m: enum.shape(m, [1, 2, 1]),
    ),
    "delayed 2 + [2]": (
        "delayed",
        lambda row, rng: drafting.delayed(row, 2, [2], rng),
        lambda m: enum.shape(m, [1, 1, 2]),
    ),
    "best_first_drawn": (
        "best_first_drawn",
        lambda row, rng: drafting.best_first_drawn(row, 4, 3, acceptance, rng),
        by_reach(4, 3),
    ),
}


def marginals(model: Model) -> np.ndarray:
    return np.stack([model.q[()], model.q[(0,)]])


CHOSEN = {
    "best_first": ("best_first", lambda m: drafting.best_first(m.draft_row, 4, 2)),
    "eagle2": ("eagle2", lambda m: drafting.eagle2(m.draft_row, 2, 2, 4)),
    "opt_tree": ("opt_tree", lambda m: drafting.opt_tree(m.draft_row, 4, 2)),
    "independent_marginals": (
        "independent_marginals",
        lambda m: drafting.independent_marginals(marginals(m), 4),
    ),
}


def outcomes(model: Model, build, monkeypatch: pytest.MonkeyPatch):
    """Every tree of a builder with its probability: each draw is a branch point, walked like an odometer."""
    path: list[tuple[int, list[int]]] = []  # (position in options, options)
    state = {"depth": 0, "mass": 1.0}

    def choose(law: np.ndarray, _: float) -> int:
        if state["depth"] == len(path):
            path.append((0, np.flatnonzero(law).tolist()))
        at, options = path[state["depth"]]
        state["depth"] += 1
        state["mass"] *= float(law[options[at]] / law.sum())
        return options[at]

    monkeypatch.setattr(families, "inverse", choose)
    while True:
        state.update(depth=0, mass=1.0)
        tree, draft = build(model.draft_row, np.random.default_rng(0))
        yield state["mass"], tree, draft
        while path and path[-1][0] + 1 == len(path[-1][1]):
            path.pop()
        if not path:
            return
        path[-1] = path[-1][0] + 1, path[-1][1]


@cache
def trees(name: str, index: int, deep: bool) -> enum.Weighted:
    _, _, process = (DEEP_DRAWN if deep else DRAWN)[name]
    model = (DEEP if deep else MODELS)[index]
    return enum.drawn(model, process(model))


CASES = [(name, False) for name in DRAWN] + [(name, True) for name in DEEP_DRAWN]


def models(deep: bool) -> list[Model]:
    return DEEP if deep else MODELS


@pytest.mark.parametrize(("name", "deep"), CASES)
def test_the_builder_draws_the_law_of_its_definition(name, deep, monkeypatch):
    build = (DEEP_DRAWN if deep else DRAWN)[name][1]
    for index, model in enumerate(models(deep)):
        want = {tree: (p, draft) for p, tree, draft in trees(name, index, deep)}
        got = {tree: (p, draft) for p, tree, draft in enum.merged(outcomes(model, build, monkeypatch))}
        assert want.keys() == got.keys(), model.name
        for tree, (probability, draft) in want.items():
            assert got[tree][0] == pytest.approx(probability, abs=1e-12)
            np.testing.assert_allclose(got[tree][1], draft, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("name", "deep"), CASES)
def test_drawn_trees_are_lossless_with_every_valid_verifier(name, deep):
    construction = (DEEP_DRAWN if deep else DRAWN)[name][0]
    for column in lossless_columns(construction):
        check_pair(construction, *column)
        for index, model in enumerate(models(deep)):
            assert enum.error(model, trees(name, index, deep), VERIFIERS[column]) < EXACT, (column, model.name)


@pytest.mark.parametrize("column", [("token", True), ("multi_step", True), ("traversal", True)], ids=lambda c: c[0])
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_trees_with_another_law_are_refused_and_biased(name, column):
    with pytest.raises(ValueError, match="is not lossless for"):
        check_pair(DRAWN[name][0], *column)
    errors = [enum.error(model, trees(name, i, False), VERIFIERS[column]) for i, model in enumerate(MODELS)]
    assert max(errors) > SEEN


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_trees_are_lossless_with_one_hot_laws(name):
    construction, build = CHOSEN[name]
    for column in lossless_columns(construction) - {("block", False)}:
        for model in MODELS:
            assert enum.error(model, [(1.0, *build(model))], VERIFIERS[column]) < EXACT, (column, model.name)


def test_a_chosen_chain_may_be_verified_by_block():
    for model in MODELS:
        tree, draft = drafting.opt_tree(model.draft_row, 1, 1)
        assert enum.error(model, [(1.0, tree, draft)], VERIFIERS[("block", False)]) < EXACT


@pytest.mark.parametrize("column", [c for c in COLUMNS if c[0] in ("token", "traversal", "multi_step")], ids=str)
@pytest.mark.parametrize("name", CHOSEN)
def test_ratio_tests_against_q_on_chosen_trees_are_refused_and_biased(name, column):
    with pytest.raises(ValueError, match="is not lossless for"):
        check_pair("chosen_called_drawn", *column)
    build = CHOSEN[name][1]
    errors = [enum.error(m, wrong.called_drawn([(1.0, *declaring(m, name, build))]), VERIFIERS[column]) for m in MODELS]
    assert max(errors) > SEEN


def declaring(model: Model, name: str, build):
    """(tree, draft) with rows that give every node mass (independent positions declare their marginals)."""
    tree, draft = build(model)
    assert all(draft[tree.parent[i], tree.token[i]] > 0 for i in range(1, len(tree))), name
    return tree, draft


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
def test_shared_noise_under_ratio_tests_is_refused_and_biased(algorithm):
    with pytest.raises(ValueError, match="noise shared"):
        check_pair("coupled_children", algorithm)
    full = [model for model in MODELS if all((row > 0).all() for row in model.q.values())]
    assert max(enum.error(m, wrong.shared_noise(m), VERIFIERS[(algorithm, False)]) for m in full) > SEEN
    for model in full:
        assert enum.error(model, wrong.shared_noise(model), enum.matching) < EXACT


# ---- what the chosen trees are


def path_probability(model: Model, path: tuple[int, ...]) -> float:
    return float(np.prod([model.q[path[:i]][x] for i, x in enumerate(path)]))


def likeliest(model: Model, num_nodes: int, depth: int) -> float:
    """Largest sum of path probabilities of a tree of so many nodes."""
    every = [p for d in range(1, depth + 1) for p in itertools.product(range(model.vocab), repeat=d)]
    return sum(sorted((path_probability(model, path) for path in every), reverse=True)[:num_nodes])


def covered(model: Model, tree) -> float:
    return sum(path_probability(model, tree.path(i)) for i in range(1, len(tree)))


@pytest.mark.parametrize("num_nodes", [1, 3, 6])
def test_best_first_and_opt_tree_cover_the_most_probability(num_nodes):
    for model in DEEP:
        best, _ = drafting.best_first(model.draft_row, num_nodes, 3)
        assert covered(model, best) == pytest.approx(likeliest(model, num_nodes, 3), abs=1e-12)
        assert covered(model, drafting.opt_tree(model.draft_row, num_nodes, 3)[0]) == pytest.approx(
            likeliest(model, num_nodes, 3), abs=1e-12
        )
        reach = [path_probability(model, best.path(i)) for i in range(len(best))]
        assert all(a >= b - 1e-15 for a, b in itertools.pairwise(reach))


def test_opt_tree_stops_where_the_sum_stops_growing():
    model = DEEP[0]
    assert drafting.opt_tree(model.draft_row, 6, 3, least_gain=9.0)[0].depth.max() == 1
    assert drafting.opt_tree(model.draft_row, 12, 3)[0].depth.max() == 3


def test_eagle2_keeps_the_best_of_its_beam():
    for model in DEEP:
        tree, _ = drafting.eagle2(model.draft_row, 3, 3, 5)  # the beam is as wide as the vocabulary
        assert covered(model, tree) <= likeliest(model, 5, 3) + 1e-12
        wide, _ = drafting.eagle2(model.draft_row, 3, 1, 9)
        assert len(wide) == 1 + np.count_nonzero(model.q[()])
    narrow, _ = drafting.eagle2(DEEP[0].draft_row, 1, 3, 5)
    assert narrow.depth.tolist() == [0, 1, 2, 3]


def test_independent_marginals_are_the_best_rank_tuples():
    rows = np.array([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.9, 0.05, 0.05]])
    model = Model("marginals", 3, 3, {}, {})
    for d in range(3):
        model.q.update({path: rows[d] for path in itertools.product(range(3), repeat=d)})
    for num_nodes in range(1, 15):
        tree, _ = drafting.independent_marginals(rows, num_nodes)
        assert len(tree) == num_nodes + 1
        assert covered(model, tree) == pytest.approx(likeliest(model, num_nodes, 3), abs=1e-12)
    with pytest.raises(ValueError, match="marginals"):
        drafting.independent_marginals(rows[0], 3)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda row, rng: drafting.delayed(row, 0, [1], rng), "trunk"),
        (lambda row, rng: drafting.fixed_shape(row, (2, 0), rng), "shape"),
        (lambda row, rng: drafting.fixed_shape(row, (0, 1), rng), "shape"),
        (lambda row, rng: drafting.best_first(row, 0, 1), "num_nodes"),
        (lambda row, rng: drafting.eagle2(row, 1, 0, 1), "width, depth"),
        (lambda row, rng: drafting.opt_tree(row, 1, 0), "num_nodes"),
        (lambda row, rng: drafting.best_first_drawn(row, 2, 0, 0.5, rng), "num_nodes"),
    ],
)
def test_refuses(call, field):
    with pytest.raises(ValueError, match=field):
        call(DEEP[0].draft_row, np.random.default_rng(0))
