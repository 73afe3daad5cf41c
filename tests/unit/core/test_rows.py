"""Rows of bounded support: rounding, and drawing exactly what is declared."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from support.rows import draw_children

from benchmarks.rows import quantise, quantise_top
from rootward.core.distribution import (
    LARGEST,
    DraftDistribution,
    below,
    greedy_family,
    top,
)

ROW = DraftDistribution([5, 7, 9], [2, 4, 1])


def test_a_row_is_in_order():
    row = DraftDistribution([3, 1, 2], [5, 9, 9])
    assert (row.ids.tolist(), row.weight.tolist(), row.total, len(row)) == ([1, 2, 3], [9, 9, 5], 23, 3)
    assert row == DraftDistribution([1, 3, 2], [9, 5, 9])
    assert hash(row) == hash(DraftDistribution([1, 3, 2], [9, 5, 9]))
    assert row != ROW
    np.testing.assert_array_equal(row.law, np.array([9, 9, 5]) / 23)
    np.testing.assert_array_equal(row.dense(5), np.array([0, 9, 9, 5, 0]) / 23)


def test_without_removes_weight():
    assert ROW.without([7, 100]) == DraftDistribution([5, 9], [2, 1])
    assert len(ROW.without([5, 7, 9])) == 0
    assert DraftDistribution([], []).total == 0
    assert ROW.without([5, 7, 9]).law.shape == (0,)


@pytest.mark.parametrize(
    ("ids", "weight", "field"),
    [
        ([1, 2], [1], "weight"),
        ([1], [0], "weight"),
        ([1], [65536], "weight"),
        ([1, 1], [1, 1], "ids"),
        ([-1], [1], "ids"),
    ],
)
def test_refuses(ids, weight, field):
    with pytest.raises(ValueError, match=field):
        DraftDistribution(ids, weight)


def test_quantise_keeps_the_largest_in_proportion():
    row = quantise([0.1, 0.4, 0.0, 0.4, 0.1], 3)
    assert row.ids.tolist() == [1, 3, 0]  # ties: smaller id
    assert row.weight.tolist() == [LARGEST, LARGEST, round(LARGEST / 4)]
    assert len(quantise([0.5, 0.5, 0.0], 3)) == 2  # no atom without mass
    assert quantise([1e-12, 1.0], 2).weight.tolist() == [LARGEST, 1]  # and none with mass is lost
    assert quantise(np.float32([0.25, 0.75]), 2) == quantise([0.25, 0.75], 2)
    for wrong in ([np.nan, 1.0], [-0.5, 1.5], [[1.0]]):
        with pytest.raises(ValueError, match="probs"):
            quantise(wrong, 2)
    with pytest.raises(ValueError, match="k: 0"):
        quantise([1.0], 0)


def test_quantise_top_is_quantise_for_many_rows():
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(30, 0.1), size=20)
    probs[3] = np.eye(30)[4]
    order = rng.permuted(np.argsort(-probs, axis=1)[:, :8], axis=1)
    ids, weight = quantise_top(order, np.take_along_axis(probs, order, axis=1))
    for row, k, n in zip(probs, ids, weight, strict=True):
        want = quantise(row, 8)
        assert k[: len(want)].tolist() == want.ids.tolist()
        assert n[: len(want)].tolist() == want.weight.tolist()
        assert (k[len(want) :] == -1).all()
        assert (n[len(want) :] == 0).all()
    with pytest.raises(ValueError, match="ids, probs"):
        quantise_top(order[:, :3], probs)


def test_top_breaks_ties_by_id():
    law = np.array([0.1, 0.3, 0.3, 0.3, 0.0])
    assert top(law, 2).tolist() == [1, 2]
    assert top(law, 5).tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("bound", range(1, 40))
def test_below_is_unbiased(bound):
    """All 256 words of 8 bits: every value comes from equally many, the rest are rejected."""
    counts = Counter()
    for word in range(256):
        try:
            counts[below(bound, iter([word]), bits=8)] += 1
        except ValueError:
            counts["rejected"] += 1
    rejected = counts.pop("rejected", 0)
    assert rejected == 256 % bound
    assert set(counts) == set(range(bound))
    assert set(counts.values()) == {256 // bound}


def test_below_takes_the_next_word_after_a_rejection():
    assert below(3, iter([0, 255]), bits=8) == 2
    with pytest.raises(ValueError, match="words: used up"):
        below(3, iter([0]), bits=8)


def exact(row: DraftDistribution, m: int) -> dict[tuple[int, ...], Fraction]:
    """Rational law of m children drawn in turn from what is left."""
    weight, out = dict(zip(row.ids.tolist(), row.weight.tolist(), strict=True)), {}
    for tokens in itertools.permutations(weight, m):
        chance, left = Fraction(1), row.total
        for x in tokens:
            chance, left = chance * Fraction(weight[x], left), left - weight[x]
        out[tokens] = chance
    return out


@pytest.mark.parametrize("row", [ROW, DraftDistribution([0, 1, 2, 3], [1, 1, 3, 2]), DraftDistribution([4, 2], [3, 5])])
def test_drawing_is_the_rational_law(row):
    """All pairs of 8-bit words. Rejection makes the accepted words of a draw uniform, so counting them gives
    rationals."""
    accepted = Counter()
    for first in range(256):
        for second in range(256):
            try:
                accepted[tuple(draw_children(row, 2, [first, second], bits=8).tolist())] += 1
            except ValueError:
                continue
    # Given the first token, a share of the second words is rejected that depends on what is left; undo it.
    weight = dict(zip(row.ids.tolist(), row.weight.tolist(), strict=True))
    usable_first = 256 - 256 % row.total
    for tokens, chance in exact(row, 2).items():
        left = row.total - weight[tokens[0]]
        assert Fraction(accepted[tokens], usable_first * (256 - 256 % left)) == chance


def test_drawing_stops_with_the_support():
    tokens = draw_children(ROW, 10, range(1 << 60, 1 << 62, 1 << 58))
    assert sorted(tokens.tolist()) == [5, 7, 9]
    assert draw_children(DraftDistribution([], []), 3, []).shape == (0,)
    assert draw_children(ROW, 0, []).shape == (0,)
    with pytest.raises(ValueError, match="row: empty"):
        DraftDistribution([], []).draw([1])


def test_one_draw_is_the_first_of_a_family():
    rng = np.random.default_rng(1)
    for word in rng.integers(0, 2**64, size=50, dtype=np.uint64):
        assert ROW.draw([int(word)]) == draw_children(ROW, 1, np.array([word]))[0]


def test_greedy_family_has_the_sampled_child_first():
    row = DraftDistribution([10, 20, 30, 40], [100, 50, 50, 1])
    token, sampled, rest = greedy_family(row, 3, [2**63])
    assert token[1:].tolist() == [10, 20]  # the most likely, ties by id
    assert sampled.tolist() == [True, False, False]
    assert rest == DraftDistribution([30, 40], [50, 1])
    assert int(token[0]) in (30, 40)
    alone = greedy_family(row, 1, [2**63])
    assert alone.row == row
    assert alone.sampled.tolist() == [True]


def test_greedy_family_of_an_exhausted_support_is_all_chosen():
    token, sampled, rest = greedy_family(DraftDistribution([1, 2], [3, 4]), 4, [])
    assert token.tolist() == [2, 1]
    assert not sampled.any()
    assert len(rest) == 0
    with pytest.raises(ValueError, match="num_children: 0"):
        greedy_family(ROW, 0, [])
