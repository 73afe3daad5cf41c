"""The batched form of verification: its laws are those of the oracle in `rootward.core.verification`, for every rule, shape and type."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batched import batched_law, dense_law
from support.random_trees import Round, random_round

from rootward.core import TokenTree, verification
from rootward.core.requests import Rule, Sampling
from rootward.core.rng import Key, bonus_coin, bonus_gumbel
from rootward.core.tree import root_only
from rootward.core.verification.step import step
from rootward.engine import verify
from rootward.engine import verify_kernels as kernels
from rootward.engine.verify import (
    Forest,
    ForestLaw,
    decide,
    draw_bonus,
    forest_law,
    gather,
    gather_ids,
    inverse_rows,
    shared_bonus,
    stop_nodes,
)

DTYPES = {torch.float32: 2e-5, torch.float64: 1e-9}


@dataclass(frozen=True)
class Case:
    """A rule and the trees that it may verify."""

    algorithm: str
    copies: bool = False
    chain: bool = False

    @property
    def chosen(self) -> tuple[float, ...]:
        return (0.0,) if self.algorithm == "multi_step" else (0.0, 0.3, 1.0)


CASES = {
    "traversal": Case("traversal"),
    "traversal, copies": Case("traversal", copies=True),
    "token": Case("token"),
    "token, copies": Case("token", copies=True),
    "block": Case("block", chain=True),
    "multi_step": Case("multi_step", copies=True),
}
# A tree under multi_step is small enough to enumerate the orders of its siblings.
SMALL = {"multi_step"}


def twisted(rng: np.random.Generator, r: Round) -> Round:
    """The same trees and draft rows against the target rows that break careless arithmetic."""
    target = r.target.copy()
    for node, row in enumerate(target):
        atoms = r.atoms[node][r.atoms[node] >= 0]
        law = r.draft[node] if len(atoms) else row.copy()
        match rng.integers(8):
            case 0:  # zeros, also on tokens of children
                row[rng.random(len(row)) < 0.5] = 0.0
                row[0] += 1e-3
            case 1:
                row[:] = np.eye(len(row))[rng.choice(atoms) if len(atoms) else rng.integers(len(row))]
            case 2:  # P = Q
                row[:] = law
            case 3:  # P = Q up to an ulp
                row[:] = np.nextafter(law, law + rng.normal(size=len(law)), where=law > 0.0, out=law.copy())
            case 4:  # nothing outside the atoms, almost nothing, or hardly anything inside
                row[:] = law + rng.choice([0.0, 1e-17, 1e-13, 1e9]) * (row * (law == 0.0))
        row /= 1.0 if abs(row.sum() - 1.0) < 1e-12 else row.sum()
    return Round(r.tree, target, r.draft, r.atoms, r.weight)


def round_of(rng: np.random.Generator, case: Case, *, twist: bool, largest: int, vocab: int) -> Round:
    r = random_round(
        rng,
        vocab=vocab,
        num_atoms=int(rng.integers(1, 10)),  # fewer than some families: exhausted rows
        num_nodes=int(rng.integers(1, 6 if case.algorithm in SMALL else largest)),
        chosen=float(rng.choice(case.chosen)),
        copies=case.copies,
        chain=case.chain,
    )
    return twisted(rng, r) if twist else r


@dataclass(frozen=True)
class Batch:
    """Rounds of several rules, and their law as the engine computes it."""

    cases: list[Case]
    rounds: list[Round]
    order: np.ndarray
    probs: torch.Tensor
    law: ForestLaw

    @staticmethod
    def of(cases: list[Case], rounds: list[Round], order: np.ndarray, dtype: torch.dtype = torch.float64) -> Batch:
        algorithms, copies = [c.algorithm for c in cases], [c.copies for c in cases]
        forest = Forest.of([r.tree for r in rounds], algorithms, copies, order)
        width = max(r.atoms.shape[1] for r in rounds)
        wider = [((0, 0), (0, width - r.atoms.shape[1])) for r in rounds]
        atoms = np.concatenate([np.pad(r.atoms, w, constant_values=-1) for r, w in zip(rounds, wider, strict=True)])
        weight = np.concatenate([np.pad(r.weight, w) for r, w in zip(rounds, wider, strict=True)])
        probs = torch.from_numpy(np.concatenate([r.target for r in rounds])).to(dtype)
        ids = gather_ids(forest, atoms)
        return Batch(cases, rounds, order, probs, forest_law(forest, ids, weight, *gather(probs, ids)))

    def nodes(self, b: int) -> slice:
        return slice(int(self.law.forest.start[b]), int(self.law.forest.start[b + 1]))

    def target(self, b: int) -> np.ndarray:
        """The rows as the law sees them: laws in double precision."""
        rows = self.probs[self.nodes(b)].double().numpy()
        return rows / rows.sum(axis=1, keepdims=True)


def mixed(rng: np.random.Generator, *, twist: bool, dtype: torch.dtype = torch.float64, largest: int = 24) -> Batch:
    cases = [list(CASES.values())[i] for i in rng.integers(len(CASES), size=int(rng.integers(1, 7)))]
    vocab = int(rng.integers(24, 32))
    rounds = [round_of(rng, case, twist=twist, largest=largest, vocab=vocab) for case in cases]
    return Batch.of(cases, rounds, rng.random(sum(len(r.tree) for r in rounds)), dtype)


def oracle(case: Case, r: Round, target: np.ndarray):
    replacement = case.copies or case.algorithm == "multi_step"
    return verification.law(case.algorithm, r.tree, target, r.draft, replacement=replacement)


def assert_is_the_oracle(batch: Batch, tolerance: float, *, twist: bool) -> None:
    """Where P = Q up to rounding (twist), the budgets of nodes that are never reached are rounding noise and are not compared."""
    for b, (case, r) in enumerate(zip(batch.cases, batch.rounds, strict=True)):
        want, got = oracle(case, r, batch.target(b)), dense_law(batch.law, b, r.tree, batch.target(b))
        assert got.stop.sum() == pytest.approx(1.0, abs=1e-12)
        if case.algorithm == "multi_step":
            stop = np.mean([law.stop for law in over_orders(r, batch.target(b))], axis=0)
        else:
            stop = got.stop
            for name in () if twist else ("entry", "budget"):
                np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=0, atol=50 * tolerance)
            assert got.block_efficiency == pytest.approx(want.block_efficiency, abs=50 * tolerance)
        np.testing.assert_allclose(stop, want.stop, rtol=0, atol=tolerance)
        used = want.stop > max(1e-6, 1e3 * tolerance)
        np.testing.assert_allclose(got.residual[used], want.residual[used], rtol=0, atol=tolerance / 1e-3)
        weighted = want.stop[:, None] * (got.residual - want.residual)
        np.testing.assert_allclose(weighted, 0.0, rtol=0, atol=tolerance)
        for node in np.flatnonzero(got.stop > 0.0):  # the bonus token is never a tried child
            assert all(got.residual[node, r.tree.token[child]] == 0.0 for child in r.tree.children[node])


def over_orders(r: Round, target: np.ndarray):
    """The law of multi_step given each order of all siblings."""
    families = [list(family) for family in r.tree.children if len(family) > 1]
    for orders in itertools.product(*(itertools.permutations(range(len(family))) for family in families)):
        order = np.zeros(len(r.tree))
        for family, places in zip(families, orders, strict=True):
            order[family] = places
        yield batched_law("multi_step", r.tree, r.atoms, r.weight, target, copies=True, order=order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("twist", [False, True])
def test_every_rule_has_the_law_of_the_oracle(dtype, twist):
    rng = np.random.default_rng(11)
    for _ in range(60):
        assert_is_the_oracle(mixed(rng, twist=twist, dtype=dtype), DTYPES[dtype], twist=twist)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), twist=st.booleans())
def test_every_rule_has_the_law_of_the_oracle_on_any_tree(seed, twist):
    assert_is_the_oracle(
        mixed(np.random.default_rng(seed), twist=twist, largest=10), DTYPES[torch.float64], twist=twist
    )


def test_a_round_has_the_same_law_alone_and_in_a_batch():
    rng = np.random.default_rng(12)
    for _ in range(20):
        batch = mixed(rng, twist=True)
        for b, (case, r) in enumerate(zip(batch.cases, batch.rounds, strict=True)):
            alone = Batch.of([case], [r], batch.order[batch.nodes(b)]).law
            for name in ("stop", "entry", "budget", "tail", "tail_scale"):
                np.testing.assert_array_equal(getattr(batch.law, name)[batch.nodes(b)], getattr(alone, name))


def test_copies_verified_as_drawn_without_replacement_have_another_law():
    """A wrong twin: the rule must be told that siblings are copies."""
    rng = np.random.default_rng(13)
    differences = []
    for _ in range(40):
        r = random_round(rng, num_nodes=6, chosen=0.0, copies=True)
        if all(len({int(r.tree.token[c]) for c in family}) == len(family) for family in r.tree.children):
            right, wrong = (
                batched_law("traversal", r.tree, r.atoms, r.weight, r.target, copies=copies) for copies in (True, False)
            )
            differences.append(float(np.abs(right.stop - wrong.stop).max()))
    assert max(differences) > 1e-3


# -- coins and bonus tokens


def test_coins_stop_where_the_law_does():
    """Every representative set of coins of a small tree: a rule compares each coin with one threshold."""
    rng = np.random.default_rng(3)
    for case in CASES.values():
        for _ in range(8):
            r = round_of(rng, case, twist=False, largest=7, vocab=12)
            law = Batch.of([case], [r], rng.random(len(r.tree))).law
            thresholds = law.budget if case.algorithm in ("traversal", "block") else law.entry
            stop = np.zeros(len(r.tree))
            for below in itertools.product([True, False], repeat=len(r.tree)):
                chance = float(np.prod(np.where(below, thresholds, 1.0 - thresholds)))
                if chance:
                    stop[stop_nodes(law, np.where(below, 0.0, np.nextafter(1.0, 0.0)))[0]] += chance
            np.testing.assert_allclose(stop, law.stop, rtol=0, atol=1e-12)


def test_stop_nodes_are_those_of_the_oracle():
    rng = np.random.default_rng(4)
    for _ in range(40):
        batch = mixed(rng, twist=True)
        coins = np.where(rng.random(len(batch.probs)) < 0.2, 0.0, rng.random(len(batch.probs)))
        found = stop_nodes(batch.law, coins) - batch.law.forest.start[:-1]
        for b, (case, r) in enumerate(zip(batch.cases, batch.rounds, strict=True)):
            if case.algorithm != "multi_step":
                one = dense_law(batch.law, b, r.tree, batch.target(b))
                assert found[b] == verification.stop_node(one, coins[batch.nodes(b)])


def test_coins_of_zero_never_accept_a_node_without_budget():
    rng = np.random.default_rng(5)
    for _ in range(30):
        batch = mixed(rng, twist=True)
        assert (batch.law.stop[stop_nodes(batch.law, np.zeros(len(batch.probs)))] > 0.0).all()


def bonus_shares(dtype: torch.dtype):
    """(share of each token over a grid of coins, residual distribution) of some nodes where rounds stop."""
    rng, grid = np.random.default_rng(6), (np.arange(4000) + 0.5) / 4000
    for _ in range(6):
        batch = mixed(rng, twist=True, dtype=dtype, largest=8)
        b = int(rng.integers(len(batch.rounds)))
        for node in np.flatnonzero(batch.law.stop[batch.nodes(b)] > 1e-3).tolist():
            stop = np.full(len(grid), node + batch.nodes(b).start)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("rootward.engine.verify.bonus_coin", lambda u: u)
                tokens = draw_bonus(batch.probs, batch.law, stop, [(u,) for u in grid])
            row = dense_law(batch.law, b, batch.rounds[b].tree, batch.target(b)).residual[node]
            yield np.bincount(tokens, minlength=len(row)) / len(grid), row


@pytest.mark.parametrize("dtype", DTYPES)
def test_bonus_tokens_follow_the_residual_distribution(dtype):
    """Over a grid of coins each token gets its share, never one without mass."""
    for share, row in bonus_shares(dtype):
        assert (row[share > 0.0] > 0.0).all()
        np.testing.assert_allclose(share, row, atol=1.5 / 4000 + DTYPES[dtype])


def test_wrong_bonus_tokens_among_the_gathered_ones_are_noticed(monkeypatch):
    """A coin in the tail that falls on any token, gathered ones included, would draw rejected tokens."""
    monkeypatch.setattr(
        "rootward.engine.verify.inverse_rows", lambda probs, u, nodes_B, **_: inverse_rows(probs, u, nodes_B=nodes_B)
    )
    pairs = list(bonus_shares(torch.float64))
    assert any((row[share > 0.0] == 0.0).any() for share, row in pairs)
    assert max(np.abs(share - row).max() for share, row in pairs) > 0.05


def test_a_shared_bonus_is_the_largest_of_residual_and_noise():
    rng = np.random.default_rng(7)
    batch = mixed(rng, twist=False)
    stop = np.argmax(batch.law.stop[batch.nodes(0)]) + np.zeros(50, dtype=np.int64)
    at = [(Key(9).bonus(3), 1, position) for position in range(50)]
    row = dense_law(batch.law, 0, batch.rounds[0].tree, batch.target(0)).residual[stop[0]]
    with np.errstate(divide="ignore"):
        want = [int(np.argmax(np.log(row) + bonus_gumbel(*place, len(row)))) for place in at]
    assert shared_bonus(batch.probs, batch.law, stop, at).tolist() == want


@pytest.mark.parametrize("on_host", [True, False])
def test_extreme_coins_draw_tokens_with_mass(on_host, monkeypatch):
    monkeypatch.setattr("rootward.engine.verify.host_can_read", lambda device: on_host)
    rows = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 0.0, 0.0, 1e-300]], dtype=torch.float64)
    for u, want in ((0.0, [1, 4]), (0.2999, [1, 4]), (0.31, [3, 4]), (np.nextafter(1.0, 0.0), [3, 4]), (1.0, [3, 4])):
        assert inverse_rows(rows, np.full(2, u)).tolist() == want
    many = torch.tensor([[0.1] * 10 + [0.0]], dtype=torch.float64)
    assert inverse_rows(many, np.array([np.nextafter(1.0, 0.0)])).tolist() == [9]
    blocks = torch.zeros(1, 1000, dtype=torch.float64)  # no mass in the last blocks
    blocks[0, [3, 700]] = 0.5
    assert inverse_rows(blocks, np.array([1.0])).tolist() == [700]
    assert inverse_rows(torch.full((1, 1000), torch.nan), np.array([0.5])).tolist() == [-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [2, 255, 256, 257, 2049])
@pytest.mark.parametrize("on_host", [True, False])
def test_coins_invert_the_rows_of_some_nodes_without_excluded_tokens(on_host, vocab, dtype, monkeypatch):
    monkeypatch.setattr("rootward.engine.verify.host_can_read", lambda device: on_host)
    rng = np.random.default_rng(vocab)
    probs = torch.from_numpy(rng.dirichlet(np.full(vocab, 0.05), size=6)).to(dtype)
    probs[:, -1], probs[5] = 0.1, 0.0
    before = probs.clone()
    nodes, u = rng.integers(6, size=400), rng.random(400)
    excluded = np.array([rng.permutation(vocab - 1)[:3] if vocab > 3 else [-1, -1, -1] for _ in nodes])
    excluded[rng.random(excluded.shape) < 0.3] = -1
    tokens = inverse_rows(probs, u, nodes_B=nodes, excluded_BG=excluded)
    assert torch.equal(probs, before)
    for node, out, share, token in zip(nodes, excluded, u, tokens, strict=True):
        row = before[node].double().numpy().copy()
        row[out[out >= 0]] = 0.0
        if node == 5:
            assert token == -1
            continue
        assert row[token] > 0.0
        below, goal = row[:token].sum(), share * row.sum()
        assert below <= goal + 1e-12
        assert goal <= below + row[token] + 1e-12


def test_a_bonus_coin_at_the_upper_end_draws_the_last_token_with_mass():
    tree = TokenTree([0, 2], [-1, 0], [False, True])
    target = np.array([[0.25, 0.5, 0.25, 0.0], [0.5, 0.0, 0.5, 0.0]])
    batch = Batch.of(
        [CASES["token"]], [Round(tree, target, target, np.array([[2], [-1]]), np.array([[9], [0]]))], np.zeros(2)
    )
    for u in (0.0, bonus_coin(Key(1), 1, 1), np.nextafter(1.0, 0.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rootward.engine.verify.bonus_coin", lambda at: at)
            tokens = draw_bonus(batch.probs, batch.law, np.array([0, 1]), [(u,), (u,)])
        assert target[[0, 1], tokens].min() > 0.0
        assert tokens[0] != 2


def test_draws_are_what_the_audit_needs():
    """The distribution that each child was drawn from, in draw order, and the acceptance that the verdict used."""
    rng = np.random.default_rng(8)
    for _ in range(20):
        batch = mixed(rng, twist=False)
        forest = batch.law.forest
        for b, (r, draws) in enumerate(zip(batch.rounds, batch.law.draws(), strict=True)):
            child = [i for i in range(1, len(r.tree)) if r.tree.sampled[i]]
            at = np.arange(len(draws)), draws.column
            assert draws.ids[at].tolist() == r.tree.token[child].tolist()
            np.testing.assert_allclose(draws.q.sum(axis=1), 1.0, atol=1e-12)
            entry = batch.law.entry[batch.nodes(b)][child]
            np.testing.assert_allclose(np.minimum(1.0, draws.offered[at] / draws.q[at]), entry, atol=1e-9)
            if not forest.copies[forest.start[b]]:
                taken = [[r.tree.token[s] for s in r.tree.children[r.tree.parent[c]] if s < c] for c in child]
                assert all(not q[np.isin(ids, t)].any() for q, ids, t in zip(draws.q, draws.ids, taken, strict=True))


# -- STEP and the structure of a forest


STEPS = {  # w, P, tail, Q, column: what rounding makes of the cases of STEP
    "first": (1.0, [0.5, 0.25, 0.125], 0.125, [0.25, 0.25, 0.5], 2),
    "P = Q": (1.0, [0.5, 0.25, 0.25], 0.0, [0.5, 0.25, 0.25], 1),
    "P = Q, forbidden": (1.0, [1 - 1e-7, 0.0, 0.0], 0.0, [1 - 1e-7, 1e-7, 0.0], 1),
    "P = Q, an ulp less": (1.0, [0.5, np.nextafter(0.25, 0), 0.25], 0.0, [0.5, 0.25, 0.25], 1),
    "P = Q, an ulp more": (1.0, [0.5, 0.25, np.nextafter(0.25, 1)], 0.0, [0.5, 0.25, 0.25], 1),
    "nothing left": (0.25, [0.5, 0.25, 0.25], 0.0, [0.5, 0.25, 0.25], 0),
    "no budget": (0.0, [0.5, 0.25, 0.125], 0.125, [0.5, 0.25, 0.25], 0),
    "w below 1 by an ulp": (np.nextafter(1.0, 0), [0.5, 0.25, 0.25], 0.0, [0.5, 0.25, 0.25], 0),
    "a tail of 1e-17": (1.0, [0.5, 0.25, 0.25], 1e-17, [0.5, 0.25, 0.25], 2),
    "all in the tail": (1.0, [0.0, 0.0, 0.0], 1.0, [0.5, 0.25, 0.25], 2),
    "one-hot, chosen": (0.5, [1.0, 0.0, 0.0], 0.0, [1.0, 0.0, 0.0], 0),
    "one-hot, w = 1": (1.0, [1.0, 0.0, 0.0], 0.0, [1.0, 0.0, 0.0], 0),
}


def test_the_compiled_step_is_that_of_the_oracle():
    """The tail is one more token to the oracle."""
    for case, (w, p, tail, q, column) in STEPS.items():
        a, left, rest = step(w, np.append(p, tail), np.append(q, 0.0), column)
        residual = np.array(p)
        *got, tail_left = kernels.step(w, residual, tail, np.array(q), column)
        assert got == pytest.approx((a, left), rel=1e-12, abs=1e-15), case
        np.testing.assert_allclose(np.append(residual, tail_left), rest, rtol=1e-12, atol=1e-15, err_msg=case)


def forest_of(trees: list[TokenTree], algorithm: str = "traversal") -> Forest:
    return Forest.of(trees, [algorithm] * len(trees))


def shapes(rng: np.random.Generator) -> list[TokenTree]:
    size = 40
    parents = {
        "root": [],
        "chain": list(range(size)),
        "star": [0] * size,
        "comb": [max(0, i - i % 2) for i in range(size)],
        "any": [int(rng.integers(i + 1)) for i in range(size)],
    }
    return [TokenTree(range(len(p) + 1), [-1, *p], [True] * (len(p) + 1)) for p in parents.values()]


def test_a_forest_knows_its_trees():
    trees = shapes(np.random.default_rng(0))
    forest = forest_of(trees)
    for b, tree in enumerate(trees):
        nodes = slice(forest.start[b], forest.start[b + 1])
        np.testing.assert_array_equal(forest.depth[nodes], tree.depth)
        assert forest.name(int(nodes.stop) - 1) == f"node {len(tree) - 1} of tree {b}"
    assert len(forest) == len(trees)


@pytest.mark.parametrize("algorithm", ["traversal", "multi_step"])
def test_nodes_are_tried_after_their_parents_and_earlier_siblings(algorithm):
    rng = np.random.default_rng(1)
    trees = shapes(rng)
    order = rng.random(sum(map(len, trees)))
    forest = Forest.of(trees, [algorithm] * len(trees), order=order)
    assert sorted(forest.turn) == list(range(forest.num_nodes))
    turn = np.empty(forest.num_nodes, dtype=int)
    turn[forest.turn] = np.arange(forest.num_nodes)
    child = np.flatnonzero(forest.parent >= 0)
    assert (turn[child] > turn[forest.parent[child]]).all()
    key = order if algorithm == "multi_step" else np.arange(forest.num_nodes)
    for a in child:
        siblings = child[forest.parent[child] == forest.parent[a]]
        assert (turn[siblings[key[siblings] > key[a]]] > turn[a]).all()


def test_the_stop_node_is_the_first_success_in_post_order():
    rng = np.random.default_rng(2)
    trees = shapes(rng)
    forest = forest_of(trees)
    success = rng.random(forest.num_nodes) < 0.3
    stop = kernels.stop_nodes(
        forest.parent,
        forest.turn,
        forest.budgets,
        np.zeros(len(success)),
        success.astype(float),
        np.full(len(success), 0.5),
    )
    for b, tree in enumerate(trees):
        first = int(forest.start[b])
        assert stop[first] - first == next(v for v in tree.post_order.tolist() if v == 0 or success[first + v])


def test_gather_ids_adds_tokens_of_chosen_children_that_are_no_atoms():
    assert IDS[:4].tolist() == [[4, 5, 6], [-1, -1, 9], [-1, -1, -1], [-1, -1, -1]]
    inside = TokenTree([0, 4, 5], [-1, 0, 0], [False, True, False])
    assert gather_ids(forest_of([inside]), ATOMS[:3]).tolist() == [[4, 5], [-1, -1], [-1, -1]]
    with pytest.raises(ValueError, match="atoms: shape"):
        gather_ids(FOREST, ATOMS[1:])


@pytest.mark.parametrize("algorithm", ["traversal", "block", "token", "multi_step"])
def test_a_root_alone_stops_with_the_target(algorithm):
    root, none = TokenTree([0], [-1], [False]), np.zeros((2, 0), int)
    forest = Forest.of([root, root], [algorithm] * 2, order=np.zeros(2))
    law = forest_law(forest, none, none, np.zeros((2, 0)), [1.0, 1.0])
    assert law.stop.tolist() == law.tail_scale.tolist() == [1.0, 1.0]
    assert stop_nodes(law, [0.9, 0.9]).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounds_without_a_tree_are_decided_as_by_the_ratio_test(dtype):
    """One of them in a batch with a tree takes the way of the trees elsewhere: a session's tokens must not depend on it."""
    scores = torch.randn(200, 50, dtype=dtype, generator=torch.Generator().manual_seed(3)) * 3
    mine = [
        proposal(rule=rule, sampling=Sampling(temperature=t, top_k=k), key=Key(i), length=i + 1)
        for i, (rule, t, k) in zip(
            range(200), itertools.cycle(itertools.product((Rule.TRAVERSAL, Rule.TOKEN), (0.7, 1.0), (0, 5)))
        )
    ]
    decided = decide(mine, scores)
    by_ratio = verify._ratio_test(mine, scores, forest_law)
    assert [(d.stop, d.bonus) for d in decided] == [(d.stop, d.bonus) for d in by_ratio]


def test_a_broken_row_without_a_tree_is_refused():
    with pytest.raises(ValueError, match="mass"):
        decide([proposal()], torch.full((1, 5), torch.nan))


def proposal(**given):
    values = {"tree": root_only(), "rows": (None,), "rule": Rule.TRAVERSAL, "sampling": Sampling(1.0), "key": Key(1)}
    return SimpleNamespace(**{**values, "epoch": 2, "length": 3, "shared": False, "copies": False, **given})


@pytest.mark.parametrize("on_host", [True, False])
def test_gather_splits_rows_exactly_and_restores_them(on_host, monkeypatch):
    monkeypatch.setattr("rootward.engine.verify.host_can_read", lambda device: on_host)
    rng = np.random.default_rng(0)
    probs = torch.from_numpy(rng.dirichlet(np.full(50, 0.1), size=3)).float()
    before, exact = probs.clone(), probs.double().numpy()
    ids = np.array([[4, 7, 9], [-1, 0, -1], [-1, -1, -1]])
    mass, tail = gather(probs, ids)
    assert torch.equal(probs, before)
    whole = exact.sum(axis=1)
    np.testing.assert_allclose(mass[0], exact[0, [4, 7, 9]] / whole[0], rtol=1e-14)
    np.testing.assert_allclose(mass[1], [0, exact[1, 0] / whole[1], 0], rtol=1e-14)
    outside = np.array([np.delete(exact[0], [4, 7, 9]).sum(), exact[1, 1:].sum(), exact[2].sum()]) / whole
    np.testing.assert_allclose(tail, outside, rtol=1e-14)
    with pytest.raises(ValueError, match="outside"):
        gather(probs, np.array([[50], [0], [0]]))


@pytest.mark.parametrize("on_host", [True, False])
def test_a_small_tail_is_not_rounding_noise(on_host, monkeypatch):
    monkeypatch.setattr("rootward.engine.verify.host_can_read", lambda device: on_host)
    mass, tail = gather(torch.tensor([[1.0, 1e-12, 3e-12]]), np.array([[0]]))
    assert mass[0, 0] == pytest.approx(1.0)
    assert tail[0] == pytest.approx(4e-12, rel=1e-6)


#   0 ── 1 (drawn 4) ── 3 (chosen 9)        and the same tree once more
#     └─ 2 (chosen 6)
TREE = TokenTree([0, 4, 6, 9], [-1, 0, 0, 1], [False, True, False, False])
FOREST = forest_of([TREE, TREE])
ATOMS = np.tile([[4, 5], [-1, -1], [-1, -1], [-1, -1]], (2, 1))
WEIGHT = np.tile([[3, 1], [0, 0], [0, 0], [0, 0]], (2, 1))
IDS = gather_ids(FOREST, ATOMS)
AT, TAIL = gather(torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(10), size=8)), IDS)
TWINS = forest_of([TREE, TokenTree([0, 4, 4, 9], [-1, 0, 0, 1], [False, True, False, False])])
LAST = np.arange(8) == 4  # the root of the second tree


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": IDS[:, :2]}, "ids, target_at, tail"),
        ({"ids": IDS[1:]}, "ids: shape"),
        ({"ids": np.where(IDS == 9, 8, IDS)}, "ids: no token 9 in the row of node 3 of tree 0"),
        (
            {
                "ids": np.zeros((8, 0), int),
                "weight": np.zeros((8, 0)),
                "target_at": np.zeros((8, 0)),
                "tail": np.ones(8),
            },
            "ids: no",
        ),
        ({"ids": np.where((IDS == 5) & LAST[:, None], 4, IDS)}, "ids: a row names a token twice"),
        ({"weight": np.tile(WEIGHT, 2)}, "weight: shape"),
        ({"weight": -WEIGHT}, "weight: negative"),
        ({"weight": WEIGHT + 1}, "weight: negative, not finite, or given where ids is -1"),
        ({"weight": np.where(WEIGHT == 3, np.inf, WEIGHT)}, "weight: negative, not finite"),
        ({"weight": np.where(WEIGHT == 3, np.nan, WEIGHT)}, "weight: negative, not finite"),
        ({"weight": np.where(LAST[:, None], 0, WEIGHT)}, "weight: none for token 4 of node 1 of tree 1"),
        ({"tail": TAIL + 0.01 * LAST}, "target_at, tail: row 4, node 0 of tree 1"),
        ({"tail": TAIL - (TAIL + 1e-9) * LAST}, "target_at, tail: row 4"),
        ({"target_at": AT * np.nan}, "target_at, tail: row 0"),
        ({"forest": TWINS}, "token: siblings below node 0 of tree 1"),
    ],
)
def test_refuses(change, message):
    whole = {"forest": FOREST, "ids": IDS, "weight": WEIGHT, "target_at": AT, "tail": TAIL}
    with pytest.raises(ValueError, match=message) as error:
        forest_law(**(whole | change))
    assert "\n" not in str(error.value)


def test_a_forest_refuses():
    with pytest.raises(ValueError, match="trees: none"):
        Forest.of([], [])
    with pytest.raises(ValueError, match="algorithm: 'other'"):
        forest_of([TREE], "other")
    with pytest.raises(ValueError, match="order: None"):
        forest_of([TokenTree([0, 1], [-1, 0], [False, True])], "multi_step")
    with pytest.raises(ValueError, match="sampled: tree 0 has a chosen node"):
        Forest.of([TREE], ["multi_step"], order=np.zeros(4))


def test_stop_nodes_check_their_coins():
    law = forest_law(FOREST, IDS, WEIGHT, AT, TAIL)
    with pytest.raises(ValueError, match="coins: shape"):
        stop_nodes(law, np.zeros(4))


def test_inputs_are_not_changed_and_pads_may_hold_anything():
    given_, dirty = (IDS.copy(), WEIGHT.copy(), AT.copy(), TAIL.copy()), np.where(IDS < 0, np.nan, AT)
    a, b = (forest_law(FOREST, IDS, WEIGHT, at, TAIL) for at in (AT, dirty))
    for before, after in zip(given_, (IDS, WEIGHT, AT, TAIL), strict=True):
        np.testing.assert_array_equal(before, after)
    assert IDS.flags.writeable
    assert all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("stop", "entry", "budget", "residual", "tail")
    )
