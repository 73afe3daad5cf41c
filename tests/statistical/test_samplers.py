"""Builders and row drawing against the enumerated law of their trees: chi-square with fixed seeds."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare
from support import enumeration as enum
from support.models import random_model
from support.rows import draw_children

from rootward.core import drafting
from rootward.core.distribution import DraftDistribution, greedy_family
from rootward.core.rng import Key, draw_words

SAMPLES = 12_000
PLAIN, SPARSE_Q, DEEP = random_model(50), random_model(14, zeros_q=0.7), random_model(51, depth=3)


def copies(model, branching):
    return enum.drawn(model, enum.shape(model, branching, replacement=True), replacement=True)


def without(model, branching):
    return enum.drawn(model, enum.shape(model, branching))


CASES = {
    "chain": (PLAIN, lambda m: without(m, [1, 1]), lambda row, rng: drafting.chain(row, 2, rng)),
    "rsd_c [2, 1]": (PLAIN, lambda m: without(m, [2, 1]), lambda row, rng: drafting.rsd_c(row, [2, 1], rng)),
    "rsd_c [2, 2]": (PLAIN, lambda m: without(m, [2, 2]), lambda row, rng: drafting.rsd_c(row, [2, 2], rng)),
    "rsd_c, exhausted": (SPARSE_Q, lambda m: without(m, [3, 2]), lambda row, rng: drafting.rsd_c(row, [3, 2], rng)),
    "rsd_s, width 2": (PLAIN, lambda m: enum.stochastic_beam(m, 2, 2), lambda row, rng: drafting.rsd_s(row, 2, 2, rng)),
    "rsd_s, width 3": (PLAIN, lambda m: enum.stochastic_beam(m, 3, 2), lambda row, rng: drafting.rsd_s(row, 3, 2, rng)),
    "rsd_s, depth 3": (DEEP, lambda m: enum.stochastic_beam(m, 2, 3), lambda row, rng: drafting.rsd_s(row, 2, 3, rng)),
    "rsd_s, zeros": (
        SPARSE_Q,
        lambda m: enum.stochastic_beam(m, 3, 2),
        lambda row, rng: drafting.rsd_s(row, 3, 2, rng),
    ),
    "greedy [2, 2]": (PLAIN, lambda m: enum.greedy(m, [2, 2]), lambda row, rng: drafting.greedy(row, [2, 2], rng)),
    "greedy [3, 1]": (PLAIN, lambda m: enum.greedy(m, [3, 1]), lambda row, rng: drafting.greedy(row, [3, 1], rng)),
    "greedy, zeros": (SPARSE_Q, lambda m: enum.greedy(m, [2, 2]), lambda row, rng: drafting.greedy(row, [2, 2], rng)),
    "iid [2, 1]": (PLAIN, lambda m: copies(m, [2, 1]), lambda row, rng: drafting.iid(row, [2, 1], rng)),
}


def chi_square(counts: Counter, expected: dict, total: int) -> float:
    """p-value; cells expected fewer than five times are put together."""
    assert set(counts) <= set(expected), "an impossible outcome was drawn"
    seen = [(counts[k], total * mass) for k, mass in expected.items()]
    cells = [cell for cell in seen if cell[1] >= 5]
    rare = [sum(column) for column in zip(*(cell for cell in seen if cell[1] < 5), strict=True)]
    if rare and rare[1] >= 5:
        cells.append(tuple(rare))
    elif rare:
        cells[-1] = (cells[-1][0] + rare[0], cells[-1][1] + rare[1])
    if len(cells) == 1:
        return 1.0
    observed, wanted = zip(*cells, strict=True)
    return float(chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize("case", CASES)
def test_tree_law(case):
    model, enumerate_trees, build = CASES[case]
    rng, counts = np.random.default_rng(1234), Counter()
    expected = {tree: probability for probability, tree, _ in enumerate_trees(model)}
    rows = {tree: draft for _, tree, draft in enumerate_trees(model)}
    for _ in range(SAMPLES):
        tree, draft = build(model.draft_row, rng)
        if tree not in counts:  # the declared rows are the enumerated ones
            np.testing.assert_allclose(draft, rows[tree], rtol=0, atol=1e-15)
        counts[tree] += 1
    assert chi_square(counts, expected, SAMPLES) > 1e-3


def test_top_k_is_the_enumerated_tree():
    for model in (PLAIN, SPARSE_Q):
        tree, draft = drafting.top_k(model.draft_row, [2, 2])
        [(_, want, rows)] = enum.top_k(model, [2, 2])
        assert tree == want
        np.testing.assert_array_equal(draft, rows)


def ordered(row: DraftDistribution, m: int) -> dict[tuple[int, ...], float]:
    """Law of m tokens drawn without replacement."""
    weight, out = dict(zip(row.ids.tolist(), row.weight.tolist(), strict=True)), {}
    for tokens in itertools.permutations(weight, m):
        chance, left = 1.0, row.total
        for x in tokens:
            chance, left = chance * weight[x] / left, left - weight[x]
        out[tokens] = chance
    return out


def test_keyed_drawing_without_replacement():
    row, counts = DraftDistribution([5, 7, 9, 11], [40000, 900, 65535, 17]), Counter()
    for number in range(SAMPLES):
        counts[tuple(draw_children(row, 2, draw_words(Key(3), 77, number, 4)).tolist())] += 1
    assert chi_square(counts, ordered(row, 2), SAMPLES) > 1e-3


def test_keyed_greedy_families():
    row, counts = DraftDistribution([5, 7, 9, 11], [40000, 900, 65535, 170]), Counter()
    for number in range(SAMPLES):
        family = greedy_family(row, 3, draw_words(Key(4), 77, number, 4))
        assert family.token[1:].tolist() == [9, 5]
        counts[int(family.token[0])] += 1
    assert chi_square(counts, {7: 900 / 1070, 11: 170 / 1070}, SAMPLES) > 1e-3
