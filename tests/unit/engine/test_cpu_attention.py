"""Attention on the CPU against the dense float64 reference: random ragged trees on random block tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.paged_reference import paged_reference

from rootward.engine import cpu_kernels
from rootward.engine.attention import DenseView
from rootward.engine.batch import Step
from rootward.engine.cpu_attention import VisibleKeys, attend
from rootward.engine.kv_cache import PagedLayer, gathered
from rootward.engine.paged import PagedContext
from rootward.engine.slots import Size, Slots
from rootward.ports import COMMITTED, Rows

TOLERANCE = 1e-5
SCALING = 0.3
HEADS, SHARED, DIM = 6, 2, 16


@dataclass
class Case:
    """Sessions with uncommitted trees, some nodes of which are new; and a layer whose storage is random."""

    step: Step
    layer: PagedLayer
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def attended(self, window: int | None, **options: Any) -> torch.Tensor:
        num, heads, width, dim = self.query.shape
        rows = self.query.transpose(1, 2).reshape(num * width, heads, dim)
        return attend(rows, self.layer, self.step.visible(window), SCALING, **options).view(num, width, heads, -1)

    def error(self, window: int | None, context: PagedContext | None = None, **options: Any) -> float:
        context = context or self.step.paged
        given = {"scaling": SCALING, "window": window, **options}
        expected = paged_reference(self.query, self.layer.keys, self.layer.values, context, **given)
        self.layer.window = window
        got = self.attended(window, **options)
        assert got.shape == expected.shape
        assert torch.isfinite(got).all()
        worst = 0.0
        for b, entry in enumerate(self.step.entries):  # padding rows may see what they like
            rows = slice(0, entry.plan.num_rows)
            worst = max(worst, float((got[b, rows] - expected[b, rows]).abs().nan_to_num(torch.inf).max()))
        return worst


def grow(slots: Slots, slot: int, rng: np.random.Generator, num: int, chain: float = 0.3) -> Rows:
    tree = slots.tree(slot)
    known = [COMMITTED, *tree._node.tolist()]
    first = max(known) + 1
    parents = []
    for i in range(num):
        parents.append(known[-1] if rng.random() < chain else known[int(rng.integers(0, len(known)))])
        known.append(first + i)
    return Rows(slot, np.arange(first, first + num), np.array(parents), rng.integers(0, 50, num))


def random_case(
    seed: int,
    lengths: tuple[int, ...],
    widths: tuple[int, ...],
    dim_v: int = DIM,
    old: bool = True,
    dim: int = DIM,
) -> Case:
    """Sessions grown side by side, in small blocks and a fragmented pool."""
    rng = np.random.default_rng(seed)
    slots = Slots(Size.of(3 * len(lengths), max(lengths) + 8, 64, 4, None), 50, "x")
    taken = slots.pool.take(slots.pool.num_blocks, 0)
    slots.pool.give_back(block for block in taken if block % 3 or rng.random() < 0.5)  # what is left lies in short runs
    mine = [slots.open() for _ in lengths]
    left = dict(zip(mine, lengths, strict=True))
    while any(left.values()):
        slot = int(rng.choice([s for s, n in left.items() if n]))
        num = min(left[slot], int(rng.integers(1, 12)))
        with slots.placed([grow(slots, slot, rng, num, chain=1.0)]) as entries:
            pass
        slots.commit_cells(slot, int(entries[0].rows.node[-1]), keep_below=False)
        left[slot] -= num
    if old:
        for slot in mine[::2]:
            with slots.placed([grow(slots, slot, rng, 7)]):
                pass
    batch = [grow(slots, slot, rng, num) for slot, num in zip(mine, widths, strict=True)]
    with slots.placed(batch) as entries:
        step = Step(entries, [range(len(r.node)) for r in batch], slots.size, torch.device("cpu"))
    return with_storage(step, dim, dim_v)


def with_storage(step: Step, dim: int, dim_v: int) -> Case:
    """What nobody may look at is NaN."""
    rng = torch.Generator().manual_seed(0)
    layer = PagedLayer(step.size, None)
    num, width = step.ids.shape
    key, value = (torch.randn(num, width, SHARED, d, generator=rng) for d in (dim, dim_v))
    layer.lazy_initialization(key.transpose(1, 2), value.transpose(1, 2))
    layer.keys.fill_(torch.nan)
    layer.values.fill_(torch.nan)
    for entry in step.entries:
        cells = torch.from_numpy(
            np.concatenate([entry.table.cells(np.arange(entry.plan.length)), entry.table.cells(entry.plan.scratch)])
        )
        layer.keys[cells] = torch.randn(len(cells), SHARED, dim, generator=rng)
        layer.values[cells] = torch.randn(len(cells), SHARED, dim_v, generator=rng)
    for b, entry in enumerate(step.entries):  # padding rows repeat row 0
        key[b, entry.plan.num_rows :], value[b, entry.plan.num_rows :] = key[b, 0], value[b, 0]
    layer.keys[step.write] = key.flatten(0, 1)
    layer.values[step.write] = value.flatten(0, 1)
    layer.keys[-1] = layer.values[-1] = torch.nan
    query = torch.randn(num, HEADS, width, dim, generator=rng)
    return Case(step, layer, query, key.transpose(1, 2), value.transpose(1, 2))


SHAPES = [
    ((40,), (1,)),
    ((40,), (9,)),
    ((0,), (5,)),
    ((33, 8, 17, 60), (1, 1, 1, 1)),
    ((33, 8, 0, 60), (7, 1, 12, 4)),
    ((300, 5), (3, 16)),
    ((2,), (2,)),
]


@pytest.mark.parametrize("window", [None, 3, 11, 50])
@pytest.mark.parametrize(("lengths", "widths"), SHAPES)
def test_equals_the_reference(lengths: tuple[int, ...], widths: tuple[int, ...], window: int | None) -> None:
    """With nodes of earlier forwards and without."""
    for seed in range(3):
        assert random_case(seed, lengths, widths, old=bool(seed % 2)).error(window) < TOLERANCE


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("lengths", "widths"), [SHAPES[0], SHAPES[2], SHAPES[4]])
def test_caps_and_sinks_equal_the_reference(
    lengths: tuple[int, ...],
    widths: tuple[int, ...],
    softcap: float | None,
    window: int | None,
) -> None:
    case, sinks = random_case(3, lengths, widths), torch.linspace(-1.0, 2.0, HEADS)
    for given in ({"softcap": softcap, "sinks": sinks}, {"softcap": softcap}):
        assert case.error(window, **given) < TOLERANCE


def test_sinks_of_other_heads_show() -> None:
    case, sinks = random_case(3, *SHAPES[4]), torch.linspace(-1.0, 2.0, HEADS)
    right, wrong = (case.attended(None, sinks=given) for given in (sinks, sinks.roll(1)))
    assert float((right[0, 0] - wrong[0, 0]).abs().max()) > 1e-3


def test_every_part_has_rows() -> None:
    """Threads share the parts equally: one without rows would leave a thread idle."""
    for widths in ((1,), (4,), (7, 3)):
        visible = random_case(1, (33, 40)[: len(widths)], widths).step.visible(None)
        assert np.diff(visible.part_start).min() > 0
        assert len(visible.part_entry) == len(visible.part_start) - 1


@pytest.mark.parametrize("dim", [DIM, 64, 80])
def test_a_row_has_the_same_bits_in_bfloat16_whatever_is_beside_it(dim: int) -> None:
    """As long as it sees the same keys in the order of positions, wherever they lie."""
    case = random_case(1, (300,), (1,), old=False, dim=dim, dim_v=dim)
    for storage in ("keys", "values"):
        setattr(case.layer, storage, getattr(case.layer, storage).bfloat16())
    case.layer.arrays = tuple(cpu_kernels.array_of(of) for of in (case.layer.keys, case.layer.values))
    alone = case.attended(None)[0, 0]
    visible, query = case.step.visible(None), case.query.transpose(1, 2).reshape(1, HEADS, dim)
    cells = [
        visible.blocks[0, i // visible.block_size] * visible.block_size + i % visible.block_size for i in range(300)
    ]
    beside = VisibleKeys(
        part_entry=np.array([0, -1, 0]),
        part_start=np.array([0, 1, 2, 3]),
        first=np.array([40, 0, 0]),
        length=np.array([57]),
        blocks=visible.blocks,
        block_size=visible.block_size,
        node_start=np.array([0, 3, 3, 3 + 300 - 57 + 1]),
        nodes=np.array([5, 6, 7, *cells[57:], visible.nodes[0]]),
    )
    got = attend(query.expand(3, -1, -1), case.layer, beside, SCALING)
    assert torch.equal(got[2], alone)
    assert not got[1].any()
    assert torch.isfinite(alone).all()


@pytest.mark.parametrize(("dim", "dim_v"), [(16, 8), (64, 64), (80, 48), (12, 72), (128, 100)])
def test_keys_and_values_of_any_dimension(dim: int, dim_v: int) -> None:
    """Whole vectors of them, parts of one, and both."""
    for window in (None, 11):
        assert random_case(5, (33, 8, 60), (7, 1, 4), dim_v, dim=dim).error(window) < TOLERANCE


def test_planted_defects_show() -> None:
    """One committed token too few, a node's position or a bit of visibility off by one: the comparison sees each."""
    case = random_case(1, (33, 40, 17), (7, 3, 12))
    right = case.step.paged
    assert case.error(3) < TOLERANCE
    shorter = replace(right, length=right.length - 1)
    shifted = replace(right, scratch_position=right.scratch_position + 1)
    swapped = replace(right, sees=right.sees.roll(1, 1))
    moved = replace(right, block_table=right.block_table.roll(1, 1))
    for wrong in (shorter, shifted, swapped, moved):
        assert case.error(3, wrong) > 1e-3


@pytest.mark.parametrize("window", [None, 11])
def test_the_dense_view_equals_the_reference(window: int | None) -> None:
    case = random_case(2, (33, 0, 60), (7, 2, 4))
    view = DenseView(case.step.paged)
    keys, values = (
        gathered(storage, view.cells).repeat_interleave(HEADS // SHARED, 1)
        for storage in (case.layer.keys, case.layer.values)
    )
    score = case.query @ keys.transpose(-1, -2) * SCALING + view.mask(window, torch.float32)
    got = (torch.softmax(score, -1) @ values).transpose(1, 2)
    expected = paged_reference(
        case.query, case.layer.keys, case.layer.values, case.step.paged, scaling=SCALING, window=window
    )
    assert float((got - expected).abs().max()) < TOLERANCE
