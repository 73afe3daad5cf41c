"""verification.law and match: the contract, the errors, the edges of STEP."""

from __future__ import annotations

import math

import numpy as np
import pytest

import rootward.core
from rootward.core import Law, TokenTree, verification
from rootward.core.law import inverse
from rootward.core.verification.step import left, step

CHAIN = TokenTree([0, 1, 2], [-1, 0, 1], [False, True, True])
FAMILY = TokenTree([0, 1, 2], [-1, 0, 0], [False, True, True])
COPIES = TokenTree([0, 1, 1], [-1, 0, 0], [False, True, True])
ROWS = np.array([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
UNIFORM = np.full((3, 3), 1 / 3)
ALL = ["token", "multi_step", "block", "traversal"]


def test_public_names():
    assert sorted(rootward.core.__all__)[:2] == ["Law", "TokenTree"]
    assert {"Law", "TokenTree", "drafting", "verification"} <= set(rootward.core.__all__)
    assert callable(verification.law)
    assert callable(verification.match)


@pytest.mark.parametrize("algorithm", ALL)
def test_shape_of_a_law(algorithm):
    law = verification.law(algorithm, CHAIN, ROWS, UNIFORM)
    assert isinstance(law, Law)
    assert law.stop.shape == law.entry.shape == law.budget.shape == (3,)
    assert law.residual.shape == (3, 3)
    assert law.stop.sum() == pytest.approx(1.0, abs=1e-14)
    assert law.block_efficiency == pytest.approx(1 + law.stop @ [0, 1, 2])
    assert law.entry[0] == law.budget[0] == 1.0
    assert law.bonus_row(1) is not None


@pytest.mark.parametrize("algorithm", ALL)
def test_inputs_are_untouched_and_results_repeat(algorithm):
    target, draft = ROWS.copy(), UNIFORM.copy()
    first = verification.law(algorithm, CHAIN, target, draft)
    second = verification.law(algorithm, CHAIN, target, draft)
    np.testing.assert_array_equal(target, ROWS)
    np.testing.assert_array_equal(draft, UNIFORM)
    assert first.stop.tobytes() == second.stop.tobytes()
    assert first.residual.tobytes() == second.residual.tobytes()
    assert not np.shares_memory(first.residual, target)


def test_results_are_read_only():
    law = verification.law("traversal", CHAIN, ROWS, UNIFORM)
    with pytest.raises(ValueError, match="read-only"):
        law.stop[0] = 1.0


def test_lists_and_single_precision_are_welcome():
    law = verification.law("traversal", CHAIN, ROWS.astype(np.float32).tolist(), UNIFORM.astype(np.float32))
    np.testing.assert_allclose(law.stop, verification.law("traversal", CHAIN, ROWS, UNIFORM).stop, atol=1e-6)


def test_rows_that_are_not_used_are_not_read():
    draft = np.array([UNIFORM[0], UNIFORM[1], [np.nan, -1.0, 7.0]])
    assert verification.law("traversal", CHAIN, ROWS, draft).stop.sum() == pytest.approx(1.0)
    chosen = TokenTree(CHAIN.token, CHAIN.parent, [False] * 3)
    assert verification.law("traversal", chosen, ROWS, np.full((3, 3), np.nan)).stop.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("algorithm", ["token", "traversal"])
def test_an_exhausted_family_never_stops_at_its_parent(algorithm):
    tree = TokenTree([0, 2, 0, 1], [-1, 0, 0, 0], [False, True, True, True])
    rng = np.random.default_rng(0)
    for _ in range(20):
        target, draft = rng.dirichlet(np.ones(3), size=(2, 4))
        assert verification.law(algorithm, tree, target, draft).stop[0] == pytest.approx(0.0, abs=1e-15)


def test_chosen_children_are_matched():
    """One-hot laws: every algorithm accepts a path with its target probability."""
    tree = TokenTree([0, 0, 2, 1], [-1, 0, 0, 1], [False] * 4)
    target = np.random.default_rng(1).dirichlet(np.ones(3), size=4)
    for algorithm in ("token", "traversal"):
        law = verification.law(algorithm, tree, target, np.zeros((4, 3)))
        want = [target[0, 1], target[0, 0] * (1 - target[1, 1]), target[0, 2], target[0, 0] * target[1, 1]]
        np.testing.assert_allclose(law.stop, want, atol=1e-15)


def test_multi_step_equals_token_on_a_chain_and_is_capped():
    target, draft = np.random.default_rng(2).dirichlet(np.ones(3), size=(2, 3))
    a, b = (verification.law(name, CHAIN, target, draft) for name in ("token", "multi_step"))
    np.testing.assert_allclose(a.stop, b.stop, atol=1e-15)
    many = TokenTree([0] * 16, [-1] + [0] * 15, [True] * 16)
    with pytest.raises(ValueError, match="at most 14"):
        verification.law("multi_step", many, np.full((16, 3), 1 / 3), np.full((16, 3), 1 / 3), replacement=True)


@pytest.mark.parametrize(
    ("algorithm", "tree", "target", "draft", "replacement", "message"),
    [
        ("greedy", CHAIN, ROWS, UNIFORM, False, "algorithm: 'greedy'"),
        ("token", CHAIN, ROWS[:2], UNIFORM, False, "target: shape"),
        ("token", CHAIN, ROWS, UNIFORM[:, :2], False, "draft: shape"),
        ("token", CHAIN, ROWS[0], UNIFORM, False, "target: shape"),
        ("token", CHAIN, ROWS[:, :2], UNIFORM[:, :2], False, "token: 2 in a vocabulary of 2"),
        ("token", CHAIN, ROWS * 2, UNIFORM, False, "target: row 0"),
        ("token", CHAIN, ROWS, UNIFORM * 0.999, False, "draft: row 0"),
        ("token", CHAIN, np.where(ROWS == 0.8, np.nan, ROWS), UNIFORM, False, "target: row 2"),
        ("token", CHAIN, np.where(ROWS == 0.8, np.inf, ROWS), UNIFORM, False, "target: row 2"),
        ("token", CHAIN, ROWS, [[1.5, -0.5, 0.0], [0, 0, 1], [0, 0, 1]], False, "draft: row 0"),
        ("token", CHAIN, ROWS, [[0.5, 0.0, 0.5], [0, 0, 1], [0, 0, 1]], False, "draft: no mass on token 1 of node 1"),
        ("traversal", FAMILY, ROWS, [[0.0, 1.0, 0.0], [0, 0, 1], [0, 0, 1]], False, "draft: no mass on token 2"),
        ("token", COPIES, ROWS, UNIFORM, False, "copies need replacement=True"),
        ("traversal", COPIES, ROWS, UNIFORM, False, "copies need replacement=True"),
        ("multi_step", COPIES, ROWS, UNIFORM, False, "replacement=True"),
        ("multi_step", FAMILY, ROWS, UNIFORM, False, "multi_step needs replacement=True"),
        ("block", FAMILY, ROWS, UNIFORM, False, "block needs a chain"),
        (
            "multi_step",
            TokenTree([0, 1, 2], [-1, 0, 0], [False, True, False]),
            ROWS,
            UNIFORM,
            True,
            "sampled: node 0",
        ),
    ],
)
def test_refuses(algorithm, tree, target, draft, replacement, message):
    with pytest.raises(ValueError, match=message) as error:
        verification.law(algorithm, tree, target, draft, replacement=replacement)
    assert "\n" not in str(error.value)


# ---- STEP


def test_step_satisfies_its_identity():
    """w·P(y) = Q(y)·a(y) + (1 − A)·w'·P'(y) for every y; the draw loses nothing."""
    rng = np.random.default_rng(3)
    for w in [1.0, 1.0 - 1e-12, 0.7, 1e-9, 0.0]:
        p, q = rng.dirichlet(np.full(5, 0.5), size=2) + 1e-3
        p, q = p / p.sum(), q / q.sum()
        steps = [step(w, p, q, x) for x in range(5)]
        a = np.array([s[0] for s in steps])
        _, after, law = steps[0]
        np.testing.assert_allclose(q * a + (1 - q @ a) * after * law, w * p, rtol=0, atol=1e-15)


def test_step_at_the_edges():
    third, p = np.full(3, 1 / 3), np.array([0.2, 0.3, 0.5])
    assert step(1.0, p, p, 2)[:2] == (1.0, 1.0)  # P = Q: accepted surely, 0/0 := 1
    assert step(1.0, p, p, 2)[2] is p
    assert step(0.0, p, third, 0)[:2] == (0.0, 0.0)  # a dead parent
    assert step(1.0, np.array([0.0, 0.5, 0.5]), third, 0)[0] == 0.0  # a token the target forbids
    with pytest.raises(ValueError, match="no mass"):
        step(1.0, p, np.array([0.0, 0.5, 0.5]), 0)
    with pytest.raises(ValueError, match="no mass"):
        step(1.0, p, np.array([np.nan, 0.5, 0.5]), 0)
    assert step(1.0, p, np.array([5e-324, 0.5, 0.5]), 0)[0] == 1.0  # the ratio overflows, the budget does not


def test_a_rejected_token_leaves_the_residual():
    """a < 1 implies R(x) = 0 in IEEE arithmetic, also where w·P and Q differ by one rounding."""
    rng = np.random.default_rng(4)
    for _ in range(2000):
        q = rng.multinomial(9, np.full(4, 0.25)) + 1.0
        q /= q.sum()
        p = np.nextafter(q, rng.integers(0, 2, size=4)) if rng.random() < 0.7 else rng.dirichlet(np.ones(4))
        p = np.minimum(p, q) if rng.random() < 0.5 else p  # S = 0 although P misses Q by a rounding
        w = rng.choice([1.0, np.nextafter(1.0, 0.0), rng.random()])
        x = int(rng.integers(4))
        accept, budget, law = step(w, p, q, x)
        if accept < 1.0 and budget > 0.0:
            assert law[x] == 0.0


def test_what_is_left_keeps_a_small_mass():
    assert left(1.0, 1e-300) == 1.0
    assert left(1.0, 0.0) == 1.0
    assert left(0.5, 0.0) == 0.0
    assert left(1.0 - 2**-53, 1e-17) == pytest.approx(1e-17 / (1e-17 + 2**-53), rel=1e-12)


# ---- drawing from a law, matching


def test_inverse_never_takes_a_token_without_mass():
    row = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    assert [inverse(row, u) for u in (0.0, 0.2999, 0.3, np.nextafter(1.0, 0.0))] == [1, 1, 3, 3]
    thirds = np.array([1 / 3, 1 / 3, 1 / 3, 0.0])
    assert inverse(thirds * (1 + 1e-16), np.nextafter(1.0, 0.0)) == 2
    assert inverse(np.array([0.0, 5e-324, 0.0]), 0.9) == 1


def test_draw_takes_two_uniforms():
    law = verification.law("traversal", CHAIN, ROWS, UNIFORM)
    assert law.draw(0.0, 0.0)[0] in np.flatnonzero(law.stop)
    stop, bonus = law.draw(math.nextafter(1.0, 0.0), math.nextafter(1.0, 0.0))
    assert law.stop[stop] > 0
    assert law.residual[stop, bonus] > 0


def test_match_walks_and_checks():
    tree = TokenTree([0, 1, 1, 2], [-1, 0, 0, 2], [False] * 4)  # of two equal children the first is taken
    assert verification.match(tree, [1, 7, 2, 0]) == (1, 7)
    assert verification.match(tree, [2, 7, 2, 0]) == (0, 2)
    with pytest.raises(ValueError, match="choice: 2 tokens"):
        verification.match(tree, [1, 2])
