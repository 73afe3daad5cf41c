"""Verdicts on a device: the laws of the host, without looking at a value on the way."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from support.random_trees import Round, random_round
from torch._dynamo.backends.common import aot_autograd

from rootward.core import TokenTree
from rootward.core.verification import batched
from rootward.core.verification.batched import Forest, ForestLaw, forest_law
from rootward.engine.residual import draw_residual
from rootward.engine.sampling import draw, gather
from rootward.engine.verification import Placed, Shape, device_law, drawn, gathered, place, verify

ALGORITHMS = ["token", "traversal"]
VOCAB, ATOMS = 40, 6
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


class Batch:
    """A ragged forest, its tables, and its laws as the engine has them."""

    def __init__(
        self,
        rng: np.random.Generator,
        dtype: torch.dtype,
        *,
        num_trees: int = 5,
        largest: int = 24,
        twist: bool = False,
    ) -> None:
        rounds = [
            random_round(rng, vocab=VOCAB, num_atoms=ATOMS, num_nodes=int(n), chosen=float(rng.choice([0.0, 0.4])))
            for n in rng.integers(1, largest, size=num_trees)
        ]
        self.forest = Forest.of([r.tree for r in rounds])
        self.weight = np.concatenate([r.weight for r in rounds])
        self.ids = batched.gather_ids(self.forest, np.concatenate([r.atoms for r in rounds]))
        rows = np.concatenate([_twisted(rng, r) if twist else r.target for r in rounds])
        self.probs = torch.from_numpy(rows).to(dtype)
        self.coins = rng.random(self.forest.num_nodes)
        self.u = rng.random(num_trees)

    def place(self, shape: Shape | None = None) -> Placed:
        return place(self.forest, self.ids, self.weight, VOCAB, "cpu", shape)

    def on_host(self, algorithm: str) -> ForestLaw:
        at, tail = gather(self.probs, self.ids)
        whole = at.sum(-1) + tail
        return forest_law(algorithm, self.forest, self.ids, self.weight, at / whole[:, None], tail / whole)

    def verify(self, algorithm: str, placed: Placed):
        size = placed.shape.num_nodes
        probs, coins = self.probs.new_zeros(size, VOCAB), torch.zeros(size, dtype=torch.float64)
        u = torch.zeros(placed.shape.num_trees, dtype=torch.float64)
        for padded, given in ((probs, self.probs), (coins, self.coins), (u, self.u)):
            padded[: len(given)] = torch.as_tensor(given)
        return verify(algorithm, placed, probs, coins, u)


def _twisted(rng: np.random.Generator, r: Round) -> np.ndarray:
    """Target rows with zeros, one-hot, equal to the draft row, or all but without a tail."""
    target = r.target.copy()
    for node, row in enumerate(target):
        law = r.draft[node] if r.draft[node].any() else row
        match rng.integers(5):
            case 0:
                row[1:][rng.random(VOCAB - 1) < 0.5] = 0.0
            case 1:
                row[:] = np.eye(VOCAB)[rng.choice(VOCAB, p=law)]
            case 2:
                row[:] = law
            case 3:
                row[:] = law + 1e-9 * row
        row /= row.sum()
    return target


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("twist", [False, True])
def test_the_law_and_the_verdict_are_those_of_the_host(algorithm, dtype, twist):
    rng, close = np.random.default_rng(5), {"rtol": 0, "atol": TOLERANCE[dtype]}
    for _ in range(12):
        b = Batch(rng, dtype, twist=twist)
        placed, host = b.place(), b.on_host(algorithm)
        p, tail, _ = gathered(b.probs, placed.ids_TG)
        law = device_law(algorithm, placed, p, tail)
        assert (law.stop_T.dtype, law.residual_TG.dtype) == (torch.float64, dtype)
        np.testing.assert_allclose(law.stop_T, host.stop, **close)
        used, width = host.stop > 0.02, b.ids.shape[1]
        np.testing.assert_allclose(law.residual_TG[used, :width], host.residual[used], **close)
        weighted = law.stop_T[:, None] * law.residual_TG[:, :width]
        np.testing.assert_allclose(weighted, host.stop[:, None] * host.residual, **close)
        outside = host.stop * host.tail_scale * tail.numpy()
        np.testing.assert_allclose(law.stop_T * law.tail_scale_T * tail, outside, **close)

        stop, bonus, expected = b.verify(algorithm, placed).to_host(len(b.forest))
        want = batched.stop_nodes(host, b.coins)
        assert stop.tolist() == want.tolist()
        ids, mass = list(host.ids[want]), list(host.residual[want])
        assert bonus.tolist() == draw_residual(b.probs[want], host.tail_scale[want], ids, mass, b.u).tolist()
        np.testing.assert_allclose(expected, host.block_efficiency, rtol=0, atol=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_bonus_token_is_no_tried_child(algorithm):
    rng = np.random.default_rng(6)
    for _ in range(12):
        b = Batch(rng, torch.float32, twist=True)
        placed = b.place()
        for _ in range(6):
            b.coins = np.where(rng.random(len(b.coins)) < 0.1, 0.0, rng.random(len(b.coins)))
            b.u = rng.choice([0.0, np.nextafter(1.0, 0.0), rng.random()], size=len(b.u))
            stop, bonus, _ = b.verify(algorithm, placed).to_host(len(b.forest))
            for node, token in zip(stop, bonus, strict=True):
                assert token not in b.forest.token[b.forest.parent == node]
                assert b.probs[node, token] > 0.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_padding_changes_nothing(algorithm):
    b = Batch(np.random.default_rng(7), torch.float32)
    own = Shape.of(b.forest, b.ids.shape[1])
    larger = Shape(
        own.num_trees + 2, own.num_nodes + 9, own.num_columns + 3, own.tree_size + 4, (*(m + 5 for m in own.waves), 3)
    )
    tight, loose = (b.verify(algorithm, b.place(shape)).to_host(len(b.forest)) for shape in (own, larger))
    for a, c in zip(tight, loose, strict=True):
        np.testing.assert_allclose(a, c, rtol=0, atol=1e-6)  # sums over wider rows add up in another order
    with pytest.raises(ValueError, match="shape: "):
        b.place(own._replace(waves=own.waves[:-1]))
    with pytest.raises(ValueError, match="shape: "):
        b.place(own._replace(num_nodes=own.num_nodes - 1))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_roots_alone(algorithm):
    root = TokenTree([0], [-1], [False])
    none = np.zeros((2, 0), int)
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    placed = place(Forest.of([root, root]), none, none, 3, "cpu")
    verdicts = verify(algorithm, placed, probs, torch.zeros(2).double(), torch.tensor([0.9, 0.5]).double())
    assert [column.tolist() for column in verdicts] == [[0, 1], [1, 2], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_value_is_looked_at(algorithm):
    """Tensors of the meta device have shapes and no values: whatever asks for one raises."""
    b = Batch(np.random.default_rng(8), torch.float32)
    placed = b.place()
    tables = {f.name: getattr(placed, f.name) for f in dataclasses.fields(placed) if f.name != "shape"}
    bare = Placed(placed.shape, **{name: table.to("meta") for name, table in tables.items()})
    coins, u = torch.from_numpy(b.coins).to("meta"), torch.from_numpy(b.u).to("meta")
    verdicts = verify(algorithm, bare, b.probs.to("meta"), coins, u)
    assert [column.shape for column in verdicts] == [(len(b.forest),)] * 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_graph_serves_all_forests_of_a_shape(algorithm):
    rng = np.random.default_rng(9)
    batches = [Batch(rng, torch.float32, num_trees=2, largest=7) for _ in range(3)]
    own = [Shape.of(b.forest, b.ids.shape[1]) for b in batches]
    length = max(len(s.waves) for s in own)
    waves = tuple(max((s.waves[i] for s in own if i < len(s.waves)), default=0) for i in range(length))
    shape = Shape(*(max(column) for column in zip(*(s[:4] for s in own), strict=True)), waves)
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(verify, backend=aot_autograd(fw_compiler=counting), fullgraph=True, dynamic=False)
    for b in batches:
        placed = b.place(shape)
        plain = b.verify(algorithm, placed)
        size = (shape.num_nodes, VOCAB)
        probs, coins, u = (
            torch.zeros(size),
            torch.zeros(shape.num_nodes).double(),
            torch.zeros(shape.num_trees).double(),
        )
        probs[: len(b.probs)], coins[: len(b.coins)] = b.probs, torch.from_numpy(b.coins)
        u[: len(b.u)] = torch.from_numpy(b.u)
        for got, want in zip(compiled(algorithm, placed, probs, coins, u), plain, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert len(graphs) == 1


@pytest.mark.parametrize("row", [[0.0, 0.25, 0.0, 0.75, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1e-300]])
def test_drawn_is_draw(row):
    u = [0.0, 0.2, 0.25, 0.5, float(np.nextafter(1.0, 0.0))]
    rows = torch.tensor([row] * len(u), dtype=torch.float64)
    tokens, mass = drawn(rows, torch.tensor(u, dtype=torch.float64))
    assert tokens.tolist() == [draw(np.array(row), value) for value in u]
    assert all(row[token] > 0.0 for token in tokens.tolist())
    assert mass.tolist() == [sum(row)] * len(u)


def test_refuses():
    b = Batch(np.random.default_rng(10), torch.float32)
    with pytest.raises(ValueError, match="is outside"):
        place(b.forest, b.ids, b.weight, int(b.ids.max()), "cpu")
    with pytest.raises(ValueError, match="weight: none"):
        place(b.forest, b.ids, 0 * b.weight, VOCAB, "cpu")
    with pytest.raises(ValueError, match="algorithm: 'block'"):
        b.verify("block", b.place())
    b.probs[:] = torch.nan
    with pytest.raises(ValueError, match="probs: mass"):
        b.verify("token", b.place()).to_host(len(b.forest))
