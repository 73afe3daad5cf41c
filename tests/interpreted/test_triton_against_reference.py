"""The Triton kernels equal the dense float64 reference, whatever the shapes and options."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from interpreted.paged_cases import DEVICE, Case, build, error

from rootward.engine.triton_attention import Buffers, Plan, tree_attention

TOLERANCE = 1e-5
SMALL = Plan(tile_rows=16, tile_cells=16, num_pieces=3)  # several tiles and pieces even of a short prefix
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window 1": {"window": 1},
    "window 5": {"window": 5},
    "window beyond everything": {"window": 500},
    "softcap": {"softcap": 1.5},
    "window, softcap": {"window": 6, "softcap": 0.7},
}


def sinks(case: Case) -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, case.heads, device=DEVICE)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], with_sinks: bool) -> None:
    case = Case()
    given = dict(options, sinks=sinks(case)) if with_sinks else options
    assert error(build(case), plan=SMALL, **given) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 4, 24, 64])
def test_block_sizes(block_size: int) -> None:
    assert error(build(Case(block_size=block_size)), plan=SMALL) < TOLERANCE
    assert error(build(Case(block_size=block_size)), plan=SMALL, window=9) < TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 1), (1, 1)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    assert error(build(Case(heads=heads, kv_heads=kv_heads)), plan=SMALL) < TOLERANCE


@pytest.mark.parametrize(("dim", "dim_v"), [(16, 16), (20, 12), (48, 16), (80, 80), (96, 96), (128, 128), (256, 256)])
def test_head_dimensions(dim: int, dim_v: int) -> None:
    assert error(build(Case(dim=dim, dim_v=dim_v)), plan=SMALL) < TOLERANCE


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
@pytest.mark.parametrize("window", [None, 50])
def test_a_long_prefix_in_pieces(pieces: int, window: int | None) -> None:
    """Pieces of several tiles, pieces of none, and entries too short for all of them."""
    case = Case(lengths=(300, 5, 161), heads=2, kv_heads=1)
    assert error(build(case), plan=Plan(16, 16, pieces), window=window) < TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=(0,), old=(0,), new=(5,)),
        Case(lengths=(0, 0), old=(0, 0), new=(1, 1), padding=0),
        Case(lengths=(33, 48), old=(0, 0), new=(1, 1), padding=0),
        Case(lengths=(9,), old=(40,), new=(1,), heads=2),
        Case(lengths=(3, 20), old=(30, 1), new=(60, 2), heads=2, kv_heads=1),
    ],
    ids=["no prefix", "first tokens", "one row each", "one row on a large tree", "several words of bits"],
)
def test_edges(case: Case) -> None:
    assert error(build(case)) < TOLERANCE
    assert error(build(case), plan=SMALL, window=4, sinks=sinks(case)) < TOLERANCE


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    num, kv_heads = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    case = Case(
        lengths=tuple(rng.integers(0, 70, num).tolist()),
        old=tuple(rng.integers(0, 20, num).tolist()),
        new=tuple(rng.integers(1, 20, num).tolist()),
        heads=kv_heads * int(rng.integers(1, 4)),
        kv_heads=kv_heads,
        dim=int(rng.choice([16, 24, 40, 64])),
        block_size=int(rng.choice([1, 2, 8, 16, 32])),
        padding=int(rng.integers(0, 3)),
        seed=seed,
    )
    options = {
        "window": int(rng.integers(1, 40)) if rng.random() < 0.5 else None,
        "softcap": float(rng.uniform(0.5, 3.0)) if rng.random() < 0.3 else None,
        "sinks": sinks(case) if rng.random() < 0.3 else None,
    }
    plan = Plan(int(rng.choice([16, 32])), int(rng.choice([16, 32])), int(rng.integers(1, 6)))
    assert error(build(case), plan=plan, **options) < TOLERANCE


def test_half_types() -> None:
    """The interpreter multiplies bfloat16 as if it were integers, so that type is tested on a device only."""
    for dtype in [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]:
        assert error(build(Case(dtype=dtype)), plan=SMALL) < 4 * torch.finfo(dtype).eps


def test_large_scores_do_not_overflow() -> None:
    batch = build(Case())
    batch.query *= 300.0
    assert error(batch, plan=SMALL) < 1e-4


def test_buffers_are_reused_and_what_they_held_does_not_matter() -> None:
    buffers = Buffers()
    assert error(build(Case(lengths=(90, 20, 3))), plan=SMALL, buffers=buffers) < TOLERANCE
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    held = buffers.take(1, device)
    buffers._grown[-1].fill_(torch.nan)
    assert error(build(Case()), plan=SMALL, buffers=buffers, window=3) < TOLERANCE
    assert buffers.take(1, device).data_ptr() == held.data_ptr()
    larger = buffers.take(1 << 20, device)
    assert larger.data_ptr() != held.data_ptr()
    assert held.data_ptr() in [kept.data_ptr() for kept in buffers._grown]  # a captured graph may hold its address


def test_a_context_may_be_a_view_of_larger_buffers() -> None:
    """Static buffers of a CUDA graph are as large as the largest step; a step uses a corner of them."""
    batch = build(Case())
    context = batch.context

    def corner(small: torch.Tensor) -> torch.Tensor:
        large = torch.full([n + 3 for n in small.shape], 77, dtype=small.dtype, device=small.device)
        view = large[tuple(slice(n) for n in small.shape)]
        view.copy_(small)
        return view

    fields = ("block_table", "scratch", "scratch_position", "position")
    context = dataclasses.replace(context, **{name: corner(getattr(context, name)) for name in fields})
    sees = torch.full((9, 30, context.sees.shape[2]), 77, dtype=torch.int32, device=DEVICE)
    sees = sees[: context.sees.shape[0], : context.sees.shape[1]].copy_(context.sees)
    context = dataclasses.replace(context, sees=sees)
    assert error(batch, context, plan=SMALL, window=9) < TOLERANCE
    # A captured launch was planned for the longest prefix of its bucket, and serves shorter ones.
    longest = dataclasses.replace(context, max_length=48)
    assert error(batch, longest) < TOLERANCE


def test_padding_entries_get_zeros() -> None:
    """An entry that is padding altogether sees nothing: no NaN may come of it."""
    batch = build(Case())
    batch.context.length[1] = 0
    batch.context.scratch[1] = -1
    batch.context.sees[1] = 0
    out = tree_attention(*batch.tensors, batch.context, scaling=0.2, plan=SMALL)
    assert (out[1] == 0).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": torch.zeros(9, 3, 32)}, "keys"),
        ({"keys": torch.zeros(9, 2, 32, dtype=torch.float16)}, "floating type"),
        ({"sinks": torch.zeros(3)}, "sinks"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, torch.Tensor], message: str) -> None:
    batch = build(Case())
    given = dict(zip(("query", "keys", "values"), batch.tensors, strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        tree_attention(context=batch.context, scaling=0.2, **given)


def test_a_context_that_does_not_fit_is_refused() -> None:
    batch = build(Case())
    for changes in ({"max_length": 65}, {"sees": batch.context.sees[:2]}, {"scratch": torch.zeros(3, 40)}):
        with pytest.raises(ValueError, match=r"max_length|sees"):
            tree_attention(*batch.tensors, dataclasses.replace(batch.context, **changes), scaling=0.2)
