"""Random paged batches of ragged trees, in a storage whose every other cell is NaN: reading one too many shows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from support.paged_reference import paged_reference

from rootward.engine.paged import PagedContext
from rootward.engine.triton_attention import Plan, tree_attention

if find_spec("triton") is None:
    pytest.skip("triton is not installed; it exists for Linux only", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"


@dataclass(frozen=True)
class Case:
    """Shapes of a batch. `lengths`, `old`, `new`: per entry committed tokens, nodes of earlier steps, new rows."""

    lengths: tuple[int, ...] = (37, 0, 16)
    old: tuple[int, ...] = (0, 2, 1)
    new: tuple[int, ...] = (7, 1, 4)
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dim_v: int | None = None
    block_size: int = 16
    padding: int = 1  # rows and nodes beyond the longest entry
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass
class Batch:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    context: PagedContext

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.keys, self.values


def build(case: Case) -> Batch:
    rng = np.random.default_rng(case.seed)
    num, size = len(case.lengths), case.block_size
    width, nodes = max(case.new) + case.padding, max(map(sum, zip(case.old, case.new, strict=True))) + case.padding
    blocks_of = [-(-length // size) for length in case.lengths]
    num_cells = (sum(blocks_of) + 1 - (-num * nodes // size)) * size
    nan_block, *blocks = rng.permutation(num_cells // size)
    table = np.full((num, max(blocks_of) + 1), nan_block, dtype=np.int32)
    for b, count in enumerate(blocks_of):
        table[b, :count], blocks = blocks[:count], blocks[count:]
    free = rng.permutation([c for block in blocks for c in range(block * size, (block + 1) * size)])
    scratch, there = np.full((num, nodes), -1, np.int32), np.zeros((num, nodes), np.int32)
    sees, stands = np.zeros((num, width, -(-nodes // 32) * 32), bool), np.zeros((num, width), np.int32)
    for b in range(num):
        visible, depth = _random_tree(rng, case.old[b] + case.new[b])
        count, new = len(depth), case.new[b]
        scratch[b, :count], free = free[:count], free[count:]
        there[b, :count] = case.lengths[b] + depth
        sees[b, :new, :count], stands[b, :new] = visible[-new:], there[b, count - new : count]
        sees[b, new:], stands[b, new:] = sees[b, 0], stands[b, 0]
    used = [
        *(table[b, at // size] * size + at % size for b in range(num) for at in range(case.lengths[b])),
        *scratch[scratch >= 0],
    ]
    keys, values = (np.full((num_cells, case.kv_heads, d), np.nan) for d in (case.dim, case.dim_v or case.dim))
    keys[used], values[used] = (rng.normal(size=(len(used), *x.shape[1:])) for x in (keys, values))
    query = rng.normal(size=(num, width, case.heads, case.dim))
    to = {"device": DEVICE, "dtype": case.dtype}
    words = torch.from_numpy(np.packbits(sees, axis=-1, bitorder="little").view(np.int32))
    ints = [torch.from_numpy(np.asarray(x, np.int32)) for x in (table, case.lengths, scratch, there, words, stands)]
    context = PagedContext(size, *(x.to(DEVICE) for x in ints), max_length=max(case.lengths))
    # As the network gives it: rows before heads in memory.
    return Batch(
        torch.tensor(query, **to).transpose(1, 2), torch.tensor(keys, **to), torch.tensor(values, **to), context
    )


def _random_tree(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ancestors-or-self bool[count, count] and depths of a random forest, a deep path in it."""
    visible, depth = np.eye(count, dtype=bool), np.zeros(count, np.int64)
    for node in range(1, count):
        parent = node - 1 if rng.random() < 0.6 else int(rng.integers(-1, node))
        if parent >= 0:
            visible[node] |= visible[parent]
            depth[node] = depth[parent] + 1
    return visible, depth


def error(batch: Batch, context: PagedContext | None = None, *, plan: Plan | None = None, **options: Any) -> float:
    """Largest difference from the reference; NaN counts as infinite. The kernel may be given another context."""
    scaling = batch.query.shape[-1] ** -0.5
    got = tree_attention(*batch.tensors, context or batch.context, scaling=scaling, plan=plan, **options).double()
    options.pop("buffers", None)
    expected = paged_reference(*batch.tensors, batch.context, scaling=scaling, **options)
    assert torch.isfinite(expected).all()
    assert got.shape == expected.shape
    return float((got - expected).abs().nan_to_num(nan=torch.inf).max())
