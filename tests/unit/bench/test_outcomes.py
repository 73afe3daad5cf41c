"""Closed forms against brute force: whole-vocabulary laws, enumeration over trees, fresh noise."""

from __future__ import annotations

import numpy as np
import pytest
from support import enumeration as enum
from support.models import test_models as tiny_models

from benchmarks.constructions import constructions
from benchmarks.lockstep import Drafted
from benchmarks.outcomes import Coins, coupling, matching, outcome, rounds, subtree
from benchmarks.ranked import Expansion, RankedRows
from rootward.core import TokenTree, verification
from rootward.core.calibration import entry_masses
from rootward.core.distribution import quantise
from rootward.core.requests import Sampling
from rootward.engine.sampling import processed
from rootward.engine.tabular import TabularModel

TARGET = TabularModel(9, seed=3, sharpness=1.5, zeros=0.2)
DRAFT = TabularModel.perturbed(TARGET, 1.0, seed=5)
CONTEXTS = [[1, 2, 3], [4, 0], [5, 5, 5, 1]]
NUM_ATOMS = 4  # fewer than tokens: OTHER has mass
RATIO = ("token", "multi_step", "block", "traversal")


@pytest.fixture(scope="module", params=[1.0, 0.7])
def rows(request):
    with RankedRows(TARGET, DRAFT, CONTEXTS, request.param, num_atoms=NUM_ATOMS, seed=2) as found:
        yield found


def law_of(model, text, temperature):
    import torch

    return processed(torch.from_numpy(model.log_law(text).copy())[None], [Sampling(temperature)])[0].numpy()


def on_tokens(rows, context, one):
    """The same tree on the whole vocabulary: (tree, target float64[N, V], draft float64[N, V])."""
    names, text = {0: ()}, {0: list(CONTEXTS[context])}
    token, target, draft = [0], [], np.zeros((len(one.tree), 9))
    for node in range(len(one.tree)):
        if node:
            parent, rank = int(one.tree.parent[node]), int(one.tree.token[node])
            names[node] = (*names[parent], rank)
            token.append(int(rows.at(context, names[parent]).ids[rank]))
            text[node] = [*text[parent], token[-1]]
        target.append(law_of(TARGET, text[node], rows.temperature))
        if one.tree.children[node]:
            whole = quantise(law_of(DRAFT, text[node], rows.temperature), NUM_ATOMS)
            draft[node, whole.ids] = one.draft[node, : len(whole)]
    return TokenTree(token, one.tree.parent, one.tree.sampled), np.array(target), draft


@pytest.mark.parametrize("name", [name for name in constructions() if not name.startswith("coupled")])
def test_rank_space_gives_the_law_of_the_whole_vocabulary(rows, name):
    construction = constructions()[name]
    for context, drafted in enumerate(construction.trees(rows, 6)):
        one = rounds(rows, context, drafted)
        tree, target, draft = on_tokens(rows, context, drafted)
        for rule in construction.rules:
            stop = outcome(rule, rows, one, construction.replacement, Coins(0), 0).stop
            if rule == "match":
                want = enum.matching(tree, target, draft).stop
            else:
                want = verification.law(rule, tree, target, draft, replacement=construction.replacement).stop
            np.testing.assert_allclose(stop, want, atol=2e-5)  # gathered in float32


@pytest.mark.parametrize("model", tiny_models(), ids=lambda m: m.name)
def test_integrating_later_draws_out_keeps_the_mean(model):
    """Summed over every tree a construction can draw, on RSD-C and GREEDY trees."""
    for trees in (enum.drawn(model, enum.shape(model, [2, 2])), enum.greedy(model, [2, 2])):
        plain = integrated = token = 0.0
        for probability, tree, draft in trees:
            law = verification.law("traversal", tree, model.target(tree), draft)
            plain += probability * law.block_efficiency
            integrated += probability * entry_masses(law).sum()
            token += probability * verification.law("token", tree, model.target(tree), draft).block_efficiency
            assert subtree(tree, law.stop).sum() == pytest.approx(law.block_efficiency, abs=1e-12)
        assert integrated == pytest.approx(plain, abs=1e-12)
        assert integrated >= token - 1e-12


def test_verdicts_follow_the_closed_form(rows):
    for name in ("rsd_c_bushy", "greedy_bushy", "iid_copies", "top_k_best_first"):
        construction = constructions()[name]
        one = rounds(rows, 0, construction.trees(rows, 6)[0])
        for rule in construction.rules:
            found = outcome(rule, rows, one, construction.replacement, Coins(7), 2000)
            depth = one.tree.depth
            mean = found.stop @ depth
            error = np.sqrt(found.stop @ (depth - mean) ** 2 / 2000)
            assert abs(np.mean(found.drawn) - mean) <= 4 * error + 1e-12, (name, rule)


def test_matching_takes_the_first_of_equal_siblings():
    tree = TokenTree([0, 1, 1, 2], [-1, 0, 0, 2], [False, True, True, True])
    target = np.array([[0.2, 0.5, 0.3]] * 4)
    np.testing.assert_allclose(matching(tree, target), enum.matching(tree, target, target).stop, atol=1e-12)


class OneRow:
    """The rows of a single node under fresh noise."""

    def __init__(self, p, q, rng):
        self.p, self.q, self.num_atoms = p, q, len(q)
        self.whole = rng.gumbel(size=len(p))

    def at(self, context, path):
        noise = self.whole[: self.num_atoms].astype(np.float32)
        with np.errstate(divide="ignore"):
            choice = int(np.argmax(np.log(self.p) + self.whole))
        return Expansion(np.arange(self.num_atoms), np.ones(self.num_atoms), self.q, self.p, noise, choice)


@pytest.mark.parametrize("num_children", [1, 2, 3])
def test_shared_noise_in_closed_form_is_the_frequency_of_agreement(num_children):
    """OTHER stands here for one token outside the draft's support."""
    rng = np.random.default_rng(num_children)
    p, q = np.array([0.3, 0.25, 0.1, 0.05, 0.3]), np.array([0.5, 0.1, 0.3, 0.1])
    closed, seen = [], []
    for _ in range(4000):
        rows = OneRow(p, q, rng)
        children = np.argsort(-(np.log(q) + rows.whole[:4]))[:num_children]
        tree = TokenTree([0, *children], [-1] + [0] * num_children, [False] * (num_children + 1))
        one = rounds(rows, 0, Drafted(tree, np.zeros((len(tree), 4))))
        closed.append(1.0 - coupling(rows, one)[0])
        seen.append(float(rows.at(0, ()).choice in children))
    error = np.std(np.subtract(closed, seen)) / np.sqrt(len(seen))
    assert abs(np.mean(closed) - np.mean(seen)) <= 4 * error
    if num_children == 1:
        pairs = [(x, y) for x in range(4) for y in range(5)]
        ratio = {
            x: sum(max(p[b] / p[x], (q[b] if b < 4 else 0.0) / q[x]) for a, b in pairs if a == x) for x in range(4)
        }
        exact = sum(1.0 / r for r in ratio.values())
        assert abs(np.mean(closed) - exact) <= 4 * np.std(closed) / np.sqrt(len(closed))
