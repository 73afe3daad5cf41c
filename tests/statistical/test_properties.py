"""What holds for every tree: hypothesis looks for rows and trees where it does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batched import batched_law
from support.random_trees import Round, declared

from rootward.core import TokenTree, verification
from rootward.core.distribution import DraftDistribution
from rootward.core.verification import stop_node

WEIGHTS = st.sampled_from([0, 0, 1, 1, 2, 3, 7, 1000, 65535])
NUDGES = st.sampled_from([0.0, 0.0, 1e-16, 2.3e-16, 1e-12, 1e-3, 1e3])


@st.composite
def laws(draw, vocab: int) -> tuple[DraftDistribution, np.ndarray]:
    """(draft row, target row): small integers with zeros; the target sometimes equals the draft up to roundings."""
    weight = draw(st.lists(WEIGHTS, min_size=vocab, max_size=vocab).filter(any))
    row = DraftDistribution(np.flatnonzero(weight), np.array(weight)[np.flatnonzero(weight)])
    if draw(st.booleans()):
        other = np.array(draw(st.lists(WEIGHTS, min_size=vocab, max_size=vocab).filter(any)), dtype=float)
    else:
        other = np.array(weight) * (1.0 + np.array(draw(st.lists(NUDGES, min_size=vocab, max_size=vocab))))
    return row, other / other.sum()


@st.composite
def rounds(draw, *, replacement: bool = False, max_nodes: int = 9) -> Round:
    vocab = draw(st.integers(2, 6))
    num_nodes = draw(st.integers(1, max_nodes))
    pairs = [draw(laws(vocab)) for _ in range(num_nodes)]
    token, parent, sampled = [0], [-1], [False]
    taken: list[list[int]] = [[] for _ in range(num_nodes)]
    while len(token) < num_nodes:
        node = draw(st.integers(0, len(token) - 1))
        left = pairs[node][0] if replacement else pairs[node][0].without(taken[node])
        free = [x for x in range(vocab) if replacement or x not in taken[node]]
        flag = len(left) > 0 and draw(st.booleans())
        if not flag and not free:
            break
        x = draw(st.sampled_from(left.ids.tolist() if flag else free))
        taken[node].append(x)
        token.append(x)
        parent.append(node)
        sampled.append(flag)
    tree = TokenTree(token, parent, sampled)
    target = np.stack([p for _, p in pairs])[: len(tree)]
    return Round(tree, target, *declared(tree, [row for row, _ in pairs], vocab, vocab))


def check(law, r: Round) -> None:
    """The invariants of a law."""
    assert (law.stop >= 0.0).all()
    assert law.stop.sum() == pytest.approx(1.0, abs=1e-12)
    assert ((law.budget >= 0.0) & (law.budget <= 1.0)).all()
    assert ((law.entry >= 0.0) & (law.entry <= 1.0)).all()
    assert law.budget[0] == 1.0
    assert np.isfinite(law.residual).all()
    for node in np.flatnonzero(law.stop):
        row = law.residual[node]
        assert row.sum() == pytest.approx(1.0, abs=1e-9)
        assert (row >= 0.0).all()
        assert not row[r.target[node] == 0.0].any(), "a token the target forbids"
        assert all(row[r.tree.token[child]] == 0.0 for child in r.tree.children[node]), "a tried child"


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
@settings(deadline=None, max_examples=150, derandomize=True)
@given(r=rounds())
def test_without_replacement(algorithm, r):
    law = verification.law(algorithm, r.tree, r.target, r.draft)
    check(law, r)
    again = verification.law(algorithm, r.tree, r.target.copy(), r.draft.copy())
    assert law.stop.tobytes() == again.stop.tobytes()
    assert law.residual.tobytes() == again.residual.tobytes()


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
@settings(deadline=None, max_examples=100, derandomize=True)
@given(r=rounds(replacement=True))
def test_with_replacement(algorithm, r):
    check(verification.law(algorithm, r.tree, r.target, r.draft, replacement=True), r)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(r=rounds(replacement=True, max_nodes=7))
def test_multi_step(r):
    families = [list(family) for family in r.tree.children if len(family) > 1]
    if all(r.tree.sampled[family].all() for family in families):
        check(verification.law("multi_step", r.tree, r.target, r.draft, replacement=True), r)


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
@settings(deadline=None, max_examples=150, derandomize=True)
@given(r=rounds())
def test_the_batched_form_is_the_oracle(algorithm, r):
    sparse = batched_law(algorithm, r.tree, r.atoms, r.weight, r.target)
    dense = verification.law(algorithm, r.tree, r.target, r.draft)
    check(sparse, r)
    np.testing.assert_allclose(sparse.stop, dense.stop, rtol=0, atol=1e-12)
    weighted = sparse.stop[:, None] * sparse.residual
    np.testing.assert_allclose(weighted, dense.stop[:, None] * dense.residual, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(r=rounds(), seed=st.integers(0, 2**32 - 1))
def test_coins_stop_where_the_law_can(r, seed):
    coins = np.random.default_rng(seed).random(len(r.tree))
    for algorithm in ("token", "traversal"):
        law = verification.law(algorithm, r.tree, r.target, r.draft)
        assert law.stop[stop_node(law, coins)] > 0.0
        assert law.stop[stop_node(law, np.zeros(len(r.tree)))] > 0.0


@settings(deadline=None, max_examples=100, derandomize=True)
@given(data=st.data(), length=st.integers(1, 6))
def test_block_is_the_published_scan_and_traversal(data, length):
    """Entry budgets exp(s_i − max_{j≤i} s_j) of the paper; the law is traversal's."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    token = [0, *rng.integers(0, 4, size=length).tolist()]
    chain = TokenTree(token, range(-1, length), [True] * (length + 1))
    target, draft = rng.dirichlet(np.full(4, 0.5), size=(2, length + 1)) * 0.999 + 0.00025
    law = verification.law("block", chain, target, draft)
    s = np.concatenate([[0.0], np.cumsum(np.log([target[i, x] / draft[i, x] for i, x in enumerate(token[1:])]))])
    np.testing.assert_allclose(law.entry, np.exp(s - np.maximum.accumulate(s)), rtol=1e-9)
    same = verification.law("traversal", chain, target, draft)
    np.testing.assert_allclose(law.stop, same.stop, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(law.residual, same.residual)
