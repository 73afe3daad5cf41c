"""Verdicts by coins follow the law; the whole path from keys to tokens follows the target."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import chisquare
from support.batched import batched_law
from support.models import Model, random_model
from support.random_trees import random_round
from support.rows import draw_children

from benchmarks.rows import quantise
from rootward.core import TokenTree, verification
from rootward.core.distribution import greedy_family
from rootward.core.rng import Key, bonus_gumbel, coins, draw_words, target_gumbel
from rootward.core.verification import bonus_token, stop_node

LARGEST_COIN = np.nextafter(1.0, 0.0)


def law_by_coins(law) -> np.ndarray:
    """float64[N]: exact probability of each verdict. A rule that compares each coin with one threshold is constant
    below and above it, so 2^N representative coins are enough."""
    thresholds = law.entry if law.algorithm == "token" else law.budget
    out = np.zeros(len(law.tree))
    for below in itertools.product([True, False], repeat=len(law.tree)):
        chance = float(np.prod(np.where(below, thresholds, 1.0 - thresholds)))
        if chance:
            out[stop_node(law, np.where(below, 0.0, LARGEST_COIN))] += chance
    return out


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
def test_coins_have_the_law(algorithm):
    rng = np.random.default_rng(3)
    for _ in range(25):
        r = random_round(rng, vocab=10, num_atoms=5, num_nodes=int(rng.integers(1, 9)))
        law = verification.law(algorithm, r.tree, r.target, r.draft)
        np.testing.assert_allclose(law_by_coins(law), law.stop, rtol=0, atol=1e-12)
        batched = batched_law(algorithm, r.tree, r.atoms, r.weight, r.target)
        np.testing.assert_allclose(law_by_coins(batched), law.stop, rtol=0, atol=1e-12)


def test_coins_have_the_law_of_block():
    rng = np.random.default_rng(4)
    chain = TokenTree([0, 1, 2, 0], [-1, 0, 1, 2], [True] * 4)
    for _ in range(10):
        target, draft = rng.dirichlet(np.ones(3), size=(2, 4))
        law = verification.law("block", chain, target, draft)
        np.testing.assert_allclose(law_by_coins(law), law.stop, rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["token", "multi_step", "block", "traversal"])
def test_draw_has_the_law(algorithm):
    """Law.draw on a grid of uniforms: each verdict gets its share up to the grid."""
    chain = TokenTree([0, 1, 2], [-1, 0, 1], [True] * 3)
    target, draft = np.random.default_rng(5).dirichlet(np.ones(3), size=(2, 3))
    law = verification.law(algorithm, chain, target, draft)
    grid = (np.arange(120) + 0.5) / 120
    counts = np.zeros((3, 3))
    for u, v in itertools.product(grid, grid):
        counts[law.draw(u, v)] += 1
    np.testing.assert_allclose(counts / 120**2, law.stop[:, None] * law.residual, atol=0.02)


def declared(model: Model, path: tuple[int, ...]):
    return quantise(model.q[path], 3)


def drawn_tree(model: Model, key: Key, committed: int, family: str) -> tuple[TokenTree, dict]:
    """A [2, 1] tree from keyed words: RSD-C or GREEDY families of bounded rows."""
    token, parent, sampled, path, rows = [0], [-1], [False], [()], {}
    level = [0]
    for depth, k in enumerate([2, 1]):
        below = []
        for node in level:
            words = draw_words(key, 99, committed * 100 + 10 * depth + node, 4)
            row = declared(model, path[node])
            if family == "greedy":
                tokens, flags, rows[node] = greedy_family(row, k, words)
            else:
                tokens, rows[node] = draw_children(row, k, words), row
                flags = np.ones(len(tokens), bool)
            for x, flag in zip(tokens.tolist(), flags.tolist(), strict=True):
                below.append(len(token))
                token.append(x)
                parent.append(node)
                sampled.append(flag)
                path.append((*path[node], x))
        level = below
    return TokenTree(token, parent, sampled), rows


def one_round(model: Model, key: Key, position: int, family: str, algorithm: str) -> list[int]:
    """Production path at a fresh root: draw, gather, batched law, coins, bonus."""
    tree, rows = drawn_tree(model, key, position, family)
    atoms, weight = np.full((len(tree), 3), -1), np.zeros((len(tree), 3), dtype=np.int64)
    for node, row in rows.items():
        atoms[node, : len(row)], weight[node, : len(row)] = row.ids, row.weight
    target = model.target(tree)
    law = batched_law(algorithm, tree, atoms, weight, target)
    stop = stop_node(law, coins(key, 1, position, np.arange(len(tree))))
    noise = bonus_gumbel(key.bonus(position), 1, position + int(tree.depth[stop]), model.vocab)
    return [*tree.path(stop), bonus_token(law.bonus_row(stop), noise)]


@pytest.mark.parametrize(("family", "algorithm"), [("rsd_c", "traversal"), ("greedy", "traversal"), ("rsd_c", "token")])
def test_keyed_rounds_emit_the_target(family, algorithm):
    """The first token of 4 000 rounds, and the second given the first, continued by target noise where the round was
    short."""
    model = random_model(41)
    counts, rounds = np.zeros((3, 3)), 4_000
    for position in range(rounds):
        key = Key(seed=12, choice=1)
        text = one_round(model, key, 3 * position, family, algorithm)
        if len(text) == 1:
            with np.errstate(divide="ignore"):
                score = np.log(model.p[tuple(text)]) + target_gumbel(key, 3 * position + 1, model.vocab)
            text.append(int(np.argmax(score)))
        counts[text[0], text[1]] += 1
    expected = np.array([model.p[()][x] * model.p[(x,)] for x in range(3)]) * rounds
    assert chisquare(counts.ravel(), expected.ravel()).pvalue > 1e-3
