"""Every valid pair of tree construction and verifier leaves the target's law unchanged: exact enumeration
(algorithms.md, section 4)."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support import enumeration as enum
from support import wrong_rules as wrong
from support.batched import batched_law
from support.models import Model, deep_models, test_models

from benchmarks.rows import quantise
from rootward.core import TokenTree
from rootward.core.distribution import DraftDistribution

MODELS = test_models()
DEEP = deep_models()
EXACT = 1e-12

# Verifiers by name, for trees whose siblings are drawn without replacement, for chains, and for siblings drawn independently.
WITHOUT_REPLACEMENT = {"token": enum.by("token"), "traversal": enum.by("traversal"), "match": enum.matching}
CHAIN = {**WITHOUT_REPLACEMENT, "block": enum.by("block"), "multi_step": enum.by("multi_step")}
INDEPENDENT = {
    **{name: enum.by(name, replacement=True) for name in ("token", "multi_step", "traversal")},
    "match": enum.matching,
}


def drawn(process, **kwargs):
    """A function from a model to all weighted trees of the drawing process `process(model)`."""
    return lambda model: enum.drawn(model, process(model), **kwargs)


# Each entry: construction, and the verifiers that are lossless for it.


CONSTRUCTIONS = {
    "chain": (drawn(lambda m: enum.shape(m, [1, 1])), CHAIN),
    "chain, stops after an unlikely draw": (drawn(lambda m: enum.chain_until(m, 2, lambda q: q < 0.4)), CHAIN),
    "chain, stops after a likely draw": (drawn(lambda m: enum.chain_until(m, 2, lambda q: q > 0.4)), CHAIN),
    "rsd_c [2, 1]": (drawn(lambda m: enum.shape(m, [2, 1])), WITHOUT_REPLACEMENT),
    "rsd_c [2, 2]": (drawn(lambda m: enum.shape(m, [2, 2])), WITHOUT_REPLACEMENT),
    "rsd_c [3, 1]": (drawn(lambda m: enum.shape(m, [3, 1])), WITHOUT_REPLACEMENT),
    "rsd_s, width 2": (lambda m: enum.stochastic_beam(m, 2, 2), WITHOUT_REPLACEMENT),
    "rsd_s, width 3": (lambda m: enum.stochastic_beam(m, 3, 2), WITHOUT_REPLACEMENT),
    "best-first by value": (drawn(lambda m: enum.best_first(m, 4)), WITHOUT_REPLACEMENT),
    "best-first, fixed rate": (drawn(lambda m: enum.best_first(m, 4, by_value=False)), WITHOUT_REPLACEMENT),
    "i.i.d. paths merged": (lambda m: enum.merged_paths(m, 3, 2), WITHOUT_REPLACEMENT),
    "greedy [2, 2]": (lambda m: enum.greedy(m, [2, 2]), WITHOUT_REPLACEMENT),
    "greedy [3, 2]": (lambda m: enum.greedy(m, [3, 2]), WITHOUT_REPLACEMENT),
    "greedy, highest-q child first": (lambda m: enum.greedy(m, [2, 2], chosen_first=True), WITHOUT_REPLACEMENT),
    "highest-q child after drawn ones": (
        lambda m: enum.with_chosen_last(m, enum.drawn(m, enum.shape(m, [2, 1]))),
        WITHOUT_REPLACEMENT,
    ),
    "highest-q child after best-first": (
        lambda m: enum.with_chosen_last(m, enum.drawn(m, enum.best_first(m, 3))),
        WITHOUT_REPLACEMENT,
    ),
    "top_k [2, 2]": (lambda m: enum.top_k(m, [2, 2]), WITHOUT_REPLACEMENT),
    "top_k chain": (lambda m: enum.top_k(m, [1, 1]), CHAIN),
    "i.i.d. siblings [2, 1]": (drawn(lambda m: enum.shape(m, [2, 1], replacement=True), replacement=True), INDEPENDENT),
    "i.i.d. siblings [3, 1]": (drawn(lambda m: enum.shape(m, [3, 1], replacement=True), replacement=True), INDEPENDENT),
    "i.i.d. siblings, growth by value": (
        drawn(lambda m: enum.best_first(m, 4), replacement=True),
        {name: INDEPENDENT[name] for name in ("token", "traversal", "match")},
    ),
    "i.i.d. siblings, shuffled": (
        lambda m: wrong.shuffled(enum.drawn(m, enum.shape(m, [2, 1], replacement=True), replacement=True)),
        INDEPENDENT,
    ),
    "sorted after drawing, matched": (
        lambda m: wrong.sorted_by_q(enum.drawn(m, enum.shape(m, [2, 1]))),
        {"match": enum.matching},
    ),
    "cut after drawing, matched": (
        lambda m: wrong.cut_by_own_value(enum.drawn(m, enum.shape(m, [2, 1]))),
        {"match": enum.matching},
    ),
}
DEEP_CONSTRUCTIONS = {
    "chain": (drawn(lambda m: enum.shape(m, [1, 1, 1])), CHAIN),
    "rsd_c [2, 1, 1]": (drawn(lambda m: enum.shape(m, [2, 1, 1])), WITHOUT_REPLACEMENT),
    "rsd_s, width 2": (lambda m: enum.stochastic_beam(m, 2, 3), WITHOUT_REPLACEMENT),
    "best-first by value": (drawn(lambda m: enum.best_first(m, 4)), WITHOUT_REPLACEMENT),
    "greedy [2, 2, 1]": (lambda m: enum.greedy(m, [2, 2, 1]), WITHOUT_REPLACEMENT),
    "i.i.d. siblings [2, 1, 1]": (
        drawn(lambda m: enum.shape(m, [2, 1, 1], replacement=True), replacement=True),
        INDEPENDENT,
    ),
}


@cache
def trees(name: str, index: int, deep: bool) -> enum.Weighted:
    constructions, models = (DEEP_CONSTRUCTIONS, DEEP) if deep else (CONSTRUCTIONS, MODELS)
    return constructions[name][0](models[index])


def pairs(constructions):
    return [(name, verifier) for name, (_, verifiers) in constructions.items() for verifier in verifiers]


@pytest.mark.parametrize(("construction", "verifier"), pairs(CONSTRUCTIONS))
def test_lossless_at_depth_two(construction, verifier):
    for index, model in enumerate(MODELS):
        rule = CONSTRUCTIONS[construction][1][verifier]
        assert enum.error(model, trees(construction, index, False), rule) < EXACT, model.name


@pytest.mark.parametrize(("construction", "verifier"), pairs(DEEP_CONSTRUCTIONS))
def test_lossless_at_depth_three(construction, verifier):
    for index, model in enumerate(DEEP):
        rule = DEEP_CONSTRUCTIONS[construction][1][verifier]
        assert enum.error(model, trees(construction, index, True), rule) < EXACT, model.name


def bounded(model: Model, num_atoms: int) -> tuple[Model, dict[tuple[int, ...], DraftDistribution]]:
    """(the model with its drafter limited to K tokens with integer weights, its draft distributions in that form)."""
    rows = {path: quantise(row, num_atoms) for path, row in model.q.items()}
    dense = {path: row.dense(model.vocab) for path, row in rows.items()}
    return Model(model.name, model.vocab, model.depth, model.p, dense), rows


def batched(
    rows: dict[tuple[int, ...], DraftDistribution], algorithm: str, num_atoms: int, chosen: int = 0
) -> enum.Verifier:
    """The batched verifier on tokens and integer weights of every expanded node, the data that a drafter sends. chosen: leading tokens of a
    distribution that were not drawn but chosen (GREEDY children)."""

    def verifier(tree: TokenTree, target: np.ndarray, draft: np.ndarray):
        atoms = np.full((len(tree), num_atoms), -1)
        weight = np.zeros((len(tree), num_atoms), dtype=np.int64)
        for node, family in enumerate(tree.children):
            if family:
                row = rows[tree.path(node)]
                row = row.without(row.ids[:chosen].tolist())
                atoms[node, : len(row)], weight[node, : len(row)] = row.ids, row.weight
        return batched_law(algorithm, tree, atoms, weight, target)

    return verifier


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
@pytest.mark.parametrize("num_atoms", [1, 2, 4])
def test_bounded_support_is_lossless(algorithm, num_atoms):
    for model in MODELS:
        drafter, rows = bounded(model, num_atoms)
        trees_ = enum.drawn(drafter, enum.shape(drafter, [2, 2]))
        assert enum.error(drafter, trees_, batched(rows, algorithm, num_atoms)) < EXACT, model.name


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
def test_bounded_support_greedy_is_lossless(algorithm):
    for model in MODELS:
        drafter, rows = bounded(model, 3)
        assert enum.error(drafter, enum.greedy(drafter, [2, 2]), batched(rows, algorithm, 3, chosen=1)) < EXACT, (
            model.name
        )


def test_traversal_has_the_law_of_the_published_algorithm():
    loop = wrong.published_loop(wrong.first_in_post_order)
    for index, model in enumerate(MODELS[:6]):
        for construction in ("rsd_c [2, 1]", "best-first by value"):
            for _, tree, draft in trees(construction, index, False)[:40]:
                target = model.target(tree)
                want, got = loop(tree, target, draft), CHAIN["traversal"](tree, target, draft)
                np.testing.assert_allclose(got.stop, want.stop, rtol=0, atol=1e-13)
                used = want.stop > 1e-9
                np.testing.assert_allclose(got.residual[used], want.residual[used], rtol=0, atol=1e-9)
