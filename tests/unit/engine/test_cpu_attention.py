"""Attention on the CPU against the dense float64 reference: random ragged trees on random block tables."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.paged_reference import paged_reference

from rootward.engine import cpu_kernels
from rootward.engine.attention import DenseView
from rootward.engine.batch import Step
from rootward.engine.cpu_attention import attend
from rootward.engine.cpu_kernels import VisibleKeys
from rootward.engine.kv_cache import PagedLayer, gathered
from rootward.engine.paged import PagedContext
from rootward.engine.slots import Size, Slots
from rootward.ports import COMMITTED, Rows

TOLERANCE, AMX_TOLERANCE = 1e-5, 0.02
needs_amx = pytest.mark.skipif(cpu_kernels.bf16_arithmetic() is not cpu_kernels.Arithmetic.AMX, reason="no AMX")
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


def in_bfloat16(case: Case) -> Case:
    """The same, of numbers that bfloat16 has."""
    case.layer.keys, case.layer.values = case.layer.keys.bfloat16(), case.layer.values.bfloat16()
    case.layer.arrays = tuple(cpu_kernels.array_of(of) for of in (case.layer.keys, case.layer.values))
    case.query = case.query.bfloat16().float()
    return case


def test_results_in_bfloat16_are_those_in_float32_rounded() -> None:
    case = in_bfloat16(random_case(3, *SHAPES[4]))
    whole = case.attended(None)
    case.query = case.query.bfloat16()
    rounded = case.attended(None)
    assert (whole.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(rounded, whole.bfloat16())


@needs_amx
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1), (16, 1)])
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (32, 96), (96, 32)])
def test_amx_equals_the_reference(
    heads: tuple[int, int], dim: int, dim_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for weights that are rounded to eight bits; the smallest defect of `test_planted_defects_show` is ten times as large."""
    monkeypatch.setattr(sys.modules[__name__], "HEADS", heads[0])
    monkeypatch.setattr(sys.modules[__name__], "SHARED", heads[1])
    assert cpu_kernels.fits_amx(*heads, dim, dim_v)
    sinks = torch.linspace(-1.0, 2.0, heads[0])
    for seed, (lengths, widths) in enumerate(SHAPES):
        case = in_bfloat16(random_case(seed, lengths, widths, dim_v, old=bool(seed % 2), dim=dim))
        for window in (None, 3, 11, 50):
            assert case.error(window) < AMX_TOLERANCE
        assert case.error(11, softcap=1.5, sinks=sinks) < AMX_TOLERANCE
        assert case.error(None, sinks=sinks) < AMX_TOLERANCE


@needs_amx
def test_planted_defects_show_by_amx() -> None:
    case = in_bfloat16(random_case(1, (33, 40, 17), (7, 3, 12), 64, dim=64))
    right = case.step.paged
    assert case.error(3) < AMX_TOLERANCE
    for wrong in (replace(right, length=right.length - 1), replace(right, sees=right.sees.roll(1, 1))):
        assert case.error(3, wrong) > 10 * AMX_TOLERANCE


@needs_amx
@pytest.mark.parametrize("window", [None, 20, 40])
@pytest.mark.parametrize("length", [32, 200, 213, 255])
def test_nodes_have_the_bits_of_committed_tokens_by_amx(length: int, window: int | None) -> None:
    """Each node of a chain as the only row, and all of them in parts of several sizes, with none, some or all of their text committed."""
    num = 9
    case = in_bfloat16(random_case(length, (length + num,), (1,), 64, old=False, dim=64))
    layer, seen = case.layer, case.step.visible(None)
    size = seen.block_size
    cells = np.array([seen.blocks[0, i // size] * size + i % size for i in range(length + num)])
    query = torch.randn(num, HEADS, 64, generator=torch.Generator().manual_seed(0))

    def attended(committed: int, rows: range, parts: list[int]) -> torch.Tensor:
        """Rows of the chain behind `length` tokens, with this many committed; parts: their first rows."""
        positions = np.array(rows) + length
        nodes = [cells[committed : position + 1] for position in positions]
        first = np.maximum(0, positions - (window or 10**6) + 1)
        nodes = [own[max(0, begin - committed) :] for own, begin in zip(nodes, first, strict=True)]
        given = VisibleKeys(
            part_entry=np.zeros(len(parts), np.int64),
            part_start=np.array([*parts, len(rows)]),
            first=first,
            length=np.array([committed]),
            blocks=seen.blocks,
            block_size=size,
            node_start=np.cumsum([0, *map(len, nodes)]),
            nodes=np.concatenate(nodes),
        )
        return attend(query[rows.start : rows.stop], layer, given, SCALING)

    alone = torch.cat([attended(length + i, range(i, i + 1), [0]) for i in range(num)])
    assert torch.isfinite(alone).all()
    for parts in ([0], [0, 4, 8], [0, 1, 7]):
        assert torch.equal(attended(length, range(num), parts), alone)
    assert torch.equal(attended(length + 3, range(3, num), [0, 2]), alone[3:])
    assert torch.equal(attended(0, range(num), [0, 4]), alone)  # as rows of a prompt


def test_amx_takes_whole_matrix_registers_only() -> None:
    assert cpu_kernels.fits_amx(9, 3, 64, 64)
    for other in ((9, 3, 80, 64), (9, 3, 64, 48), (17, 1, 64, 64)):
        assert not cpu_kernels.fits_amx(*other)


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
