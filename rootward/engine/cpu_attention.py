"""Attention on the CPU, over cells of the paged storage: which keys each row of a step sees, told to the kernel of `cpu_kernels`.

A row sees what its session has committed, from the start of its window on, and the nodes of its tree that are its ancestors; in the order
of positions, so that the sums are those of plain decoding.

Legend: N rows of all entries, B entries, H query heads, S heads of K and V, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.engine import cpu_kernels
from rootward.engine.cpu_kernels import VisibleKeys
from rootward.engine.slots import Entry

if TYPE_CHECKING:
    from rootward.engine.kv_cache import PagedLayer

Floats = NDArray[np.float32]
ROWS_OF_PART = 4  # read their keys together


def visible_keys(entries: Sequence[Entry], offsets: Sequence[int], num_rows: int, window: int | None) -> VisibleKeys:
    """Of a step of `num_rows` rows, in which those of the entries begin at `offsets`; others are padding. `window`: None if rows see all
    that is behind them."""
    first, count = np.zeros(num_rows, np.int64), np.zeros(num_rows + 1, np.int64)
    parts: dict[int, int] = {}  # entry by first row
    blocks = np.zeros((len(entries), max(1, *(len(e.table) for e in entries))), np.int64)
    nodes = []
    for b, (own, offset) in enumerate(zip(entries, offsets, strict=True)):
        plan, rows = own.plan, slice(offset, offset + own.plan.num_rows)
        order = np.argsort(plan.position, kind="stable")
        sees = plan.sees[:, order]
        if window is not None:
            first[rows] = np.maximum(plan.positions - window + 1, 0)
            sees = sees & (plan.positions[:, None] - plan.position[order] < window)
        count[offset + 1 : offset + 1 + plan.num_rows] = sees.sum(1)
        parts |= dict.fromkeys(range(offset, rows.stop, ROWS_OF_PART), b)
        parts[rows.stop] = -1
        blocks[b, : len(own.table)] = own.table.blocks
        nodes.append(own.table.cells(plan.scratch[order])[np.nonzero(sees)[1]])
    parts.pop(num_rows, None)  # a part without rows would be a thread's share of the work
    length = np.array([e.plan.length for e in entries], np.int64)
    size = entries[0].table.block_size
    part_start = np.array([*parts, num_rows])
    return VisibleKeys(
        np.array([*parts.values()]), part_start, first, length, blocks, size, np.cumsum(count), np.concatenate(nodes)
    )


@cache
def no_sinks(num_heads: int) -> Floats:
    return np.full(num_heads, -np.inf, np.float32)


def attend(
    query: torch.Tensor,
    layer: PagedLayer,
    visible: VisibleKeys,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, H, D]: what `paged_reference` of the tests says; bfloat16 if query and cells are, else float32. query [N, H, D]; rows of no entry
    are padding and become 0."""
    if layer.keys.dtype not in cpu_kernels.SERVED:
        raise TypeError(f"attention on the CPU reads float32 and bfloat16, not {layer.keys.dtype}")
    num, heads, _ = query.shape
    # In bfloat16, `cpu_decoder` and this function share one compiled kernel; another type of results takes ten seconds to compile.
    dtype = torch.bfloat16 if query.dtype == layer.keys.dtype == torch.bfloat16 else torch.float32
    out = query.new_empty(num, heads * layer.values.shape[2], dtype=dtype)
    cpu_kernels.attention(
        query.float().contiguous().numpy(),
        *layer.arrays,
        visible,
        scaling=scaling,
        softcap=softcap or 0.0,
        sinks=no_sinks(heads) if sinks is None else sinks.float().numpy(),
        out=cpu_kernels.array_of(out),
    )
    return out.view(num, heads, -1)
