"""Many trees at once: the laws, verdicts and refusals of the forms for one tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_trees import Round, random_round

from rootward.core import TokenTree, verification
from rootward.core.rng import Key, coins, coins_batch
from rootward.core.verification import gather, sparse_law, stop_node
from rootward.core.verification.batched import Forest, forest_law, gather_ids, steps, stop_nodes
from rootward.core.verification.sparse import gather_ids as gather_ids_of_one
from rootward.core.verification.sparse import sparse_step

ALGORITHMS = ["token", "traversal"]
FLOATS = ("stop", "entry", "budget", "residual", "tail_scale")


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


def batch(rounds: list[Round]) -> tuple:
    """The arguments of `forest_law`, behind the algorithm."""
    forest = Forest.of([r.tree for r in rounds])
    width = max(r.atoms.shape[1] for r in rounds)
    wider = [((0, 0), (0, width - r.atoms.shape[1])) for r in rounds]
    atoms = np.concatenate([np.pad(r.atoms, w, constant_values=-1) for r, w in zip(rounds, wider, strict=True)])
    weight = np.concatenate([np.pad(r.weight, w) for r, w in zip(rounds, wider, strict=True)])
    ids = gather_ids(forest, atoms)
    return forest, ids, weight, *gather(np.concatenate([r.target for r in rounds]), ids)


def ragged(rng: np.random.Generator, *, twist: bool, largest: int = 24, vocab: int = 24) -> list[Round]:
    rounds = [
        random_round(
            rng,
            vocab=vocab,
            num_atoms=int(rng.integers(1, 10)),  # fewer than some families: exhausted rows
            num_nodes=int(rng.integers(1, largest)),
            chosen=float(rng.choice([0.0, 0.3, 1.0])),
        )
        for _ in range(int(rng.integers(1, 6)))
    ]
    return [twisted(rng, r) if twist else r for r in rounds]


def assert_same_laws(algorithm: str, rounds: list[Round], u: np.ndarray) -> None:
    forest, ids, weight, at, tail = batch(rounds)
    law = forest_law(algorithm, forest, ids, weight, at, tail)
    stop = stop_nodes(law, u[: forest.num_nodes])
    for b, r in enumerate(rounds):
        nodes = slice(forest.start[b], forest.start[b + 1])
        one = sparse_law(algorithm, r.tree, ids[nodes], weight[nodes], at[nodes], tail[nodes])
        got = law.of(b)
        assert got.tree == r.tree
        for name in FLOATS:
            a, b_ = getattr(got, name), getattr(one, name)
            np.testing.assert_allclose(a, b_, rtol=1e-12, atol=1e-12, err_msg=name)
        assert law.block_efficiency[b] == pytest.approx(one.block_efficiency, abs=1e-12)
        assert stop[b] - forest.start[b] == stop_node(one, u[nodes])
        assert_same_as_dense(got, r)


def assert_same_as_dense(got, r: Round) -> None:
    dense = verification.law(got.algorithm, r.tree, r.target, r.draft)
    residual = got.dense(r.target).residual
    np.testing.assert_allclose(got.stop, dense.stop, rtol=0, atol=1e-9)
    used = dense.stop > 1e-6
    np.testing.assert_allclose(residual[used], dense.residual[used], rtol=0, atol=1e-9)
    np.testing.assert_allclose(residual[used].sum(axis=1), 1.0, rtol=0, atol=1e-9)
    assert got.stop.sum() == pytest.approx(1.0, abs=1e-12)
    for node in np.flatnonzero(got.stop > 0.0):  # the bonus token is never a tried child
        assert all(residual[node, r.tree.token[child]] == 0.0 for child in r.tree.children[node])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("twist", [False, True])
def test_the_laws_are_those_of_the_trees(algorithm, twist):
    rng = np.random.default_rng(11)
    for _ in range(60):
        assert_same_laws(algorithm, ragged(rng, twist=twist), rng.random(200))


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), algorithm=st.sampled_from(ALGORITHMS), twist=st.booleans())
def test_the_laws_are_those_of_the_trees_whatever_they_are(seed, algorithm, twist):
    rng = np.random.default_rng(seed)
    coins = np.where(rng.random(60) < 0.2, 0.0, rng.random(60))
    assert_same_laws(algorithm, ragged(rng, twist=twist, largest=10, vocab=int(rng.integers(10, 16))), coins)


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


def test_steps_are_the_step_row_by_row():
    w, p, tail, q, j = (np.array(column) for column in zip(*STEPS.values(), strict=True))
    before = p.copy()
    got = steps(w, p, tail, q, j)
    for i, case in enumerate(STEPS):
        a, left, rest, tail_left = sparse_step(float(w[i]), p[i], float(tail[i]), q[i], int(j[i]))
        assert (got[0][i], got[1][i], got[3][i]) == (a, left, tail_left), case
        assert got[2][i].tolist() == rest.tolist(), case
    np.testing.assert_array_equal(p, before)


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
    forest = Forest.of(trees)
    for b, tree in enumerate(trees):
        nodes = slice(forest.start[b], forest.start[b + 1])
        assert forest[b] == tree
        np.testing.assert_array_equal(forest.depth[nodes], tree.depth)
        np.testing.assert_array_equal(forest.post_order[nodes] - forest.start[b], tree.post_order)
        ranks = {child: i for family in tree.children for i, child in enumerate(family)}
        assert forest.rank[nodes].tolist() == [0, *(ranks[node] for node in range(1, len(tree)))]
    assert len(forest) == len(list(forest)) == len(trees)


def test_parents_and_earlier_siblings_come_in_earlier_waves():
    forest = Forest.of(shapes(np.random.default_rng(1)))
    wave = np.zeros(forest.num_nodes, dtype=int)
    for i, children in enumerate(forest.waves):
        wave[children] = i + 1
        assert len(set(forest.parent[children])) == len(children) > 0
    child = np.flatnonzero(forest.parent >= 0)
    assert (wave[child] > wave[forest.parent[child]]).all()
    for a in child:
        assert (wave[child[(forest.parent[child] == forest.parent[a]) & (child > a)]] > wave[a]).all()
    assert sorted(np.concatenate(forest.waves)) == child.tolist()


def test_gather_ids_asks_for_what_every_tree_asks_for():
    rng = np.random.default_rng(2)
    rounds = [
        random_round(rng, num_atoms=5, chosen=c, num_nodes=n) for c, n in ((1.0, 9), (0.4, 20), (0.0, 5), (0.0, 1))
    ]
    forest, ids, *_ = batch(rounds)
    for b, r in enumerate(rounds):
        rows = ids[forest.start[b] : forest.start[b + 1]]
        for mine, theirs in zip(rows, gather_ids_of_one(r.tree, r.atoms), strict=True):
            assert [x for x in mine if x >= 0] == [x for x in theirs if x >= 0]
    with pytest.raises(ValueError, match="atoms: shape"):
        gather_ids(forest, ids[1:])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_roots_alone_are_the_target(algorithm):
    root = TokenTree([0], [-1], [False])
    none = np.zeros((2, 0), int)
    law = forest_law(algorithm, Forest.of([root, root]), none, none, np.zeros((2, 0)), [1.0, 1.0])
    assert law.stop.tolist() == law.tail_scale.tolist() == law.block_efficiency.tolist() == [1.0, 1.0]
    assert stop_nodes(law, [0.9, 0.9]).tolist() == [0, 1]


#   0 ── 1 (drawn 4) ── 3 (chosen 9)        and the same tree once more
#     └─ 2 (chosen 6)
TREE = TokenTree([0, 4, 6, 9], [-1, 0, 0, 1], [False, True, False, False])
FOREST = Forest.of([TREE, TREE])
WEIGHT = np.tile([[3, 1], [0, 0], [0, 0], [0, 0]], (2, 1))
IDS = gather_ids(FOREST, np.tile([[4, 5], [-1, -1], [-1, -1], [-1, -1]], (2, 1)))
AT, TAIL = gather(np.random.default_rng(0).dirichlet(np.ones(10), size=8), IDS)
TWINS = Forest.of([TREE, TokenTree([0, 4, 4, 9], [-1, 0, 0, 1], [False, True, False, False])])
LAST = np.arange(8) == 4  # the root of the second tree


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "block"}, "algorithm: 'block'"),
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
    whole = {"algorithm": "traversal", "forest": FOREST, "ids": IDS, "weight": WEIGHT, "target_at": AT, "tail": TAIL}
    with pytest.raises(ValueError, match=message) as error:
        forest_law(**(whole | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": [0, 1]}, "token, parent, sampled: shapes"),
        ({"start": [0, 2]}, "start: "),
        ({"start": [0, 0, 3]}, "start: "),
        ({"parent": [-1, 1, 0]}, "parent: 1 at 1"),
        ({"parent": [-1, -1, 0]}, "parent: -1 at 1"),
        ({"parent": [-1, 0, 1], "start": [0, 2, 3]}, "parent: 1 at 2"),
    ],
)
def test_a_forest_refuses(change, message):
    whole = {"token": [0, 1, 2], "parent": [-1, 0, 0], "sampled": [True] * 3, "start": [0, 3]} | change
    with pytest.raises(ValueError, match=message):
        Forest(**{name: np.array(column) for name, column in whole.items()})


def test_no_trees_and_wrong_coins():
    with pytest.raises(ValueError, match="trees: none"):
        Forest.of([])
    law = forest_law("traversal", FOREST, IDS, WEIGHT, AT, TAIL)
    with pytest.raises(ValueError, match="coins: shape"):
        stop_nodes(law, np.zeros(4))


def test_inputs_are_not_changed_and_pads_may_hold_anything():
    given_, dirty = (IDS.copy(), WEIGHT.copy(), AT.copy(), TAIL.copy()), np.where(IDS < 0, np.nan, AT)
    a, b = (forest_law("traversal", FOREST, IDS, WEIGHT, at, TAIL) for at in (AT, dirty))
    for before, after in zip(given_, (IDS, WEIGHT, AT, TAIL), strict=True):
        np.testing.assert_array_equal(before, after)
    assert IDS.flags.writeable
    assert [getattr(a, name).tobytes() for name in FLOATS] == [getattr(b, name).tobytes() for name in FLOATS]


@given(
    st.lists(
        st.tuples(
            st.builds(Key, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**32 - 1),
            st.lists(st.integers(0, 2**32 - 1), max_size=20),
        ),
        max_size=5,
    )
)
def test_coins_of_a_batch_are_the_coins_of_its_rounds(rounds):
    want = [coins(key, epoch, position, nodes) for key, epoch, position, nodes in rounds]
    assert coins_batch(rounds).tobytes() == b"".join(column.tobytes() for column in want)


@pytest.mark.parametrize("change", [{"epoch": 2**32}, {"position": -1}, {"nodes": [2**32]}])
def test_coins_of_a_batch_refuse_what_coins_refuse(change):
    given_ = {"epoch": 1, "position": 1, "nodes": [1]} | change
    with pytest.raises(ValueError, match="counter"):
        coins_batch([(Key(1), 1, 1, [1]), (Key(2), given_["epoch"], given_["position"], given_["nodes"])])
