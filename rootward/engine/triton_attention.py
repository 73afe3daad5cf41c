"""Paged tree attention on a GPU: two kernel launches, without a host synchronisation. The tests have a reference (`paged_reference`).

The prefix of every entry is cut into pieces, the tree is one more; each is a partial softmax, and a second kernel merges them by their
log-sum-exp. Shapes and grids depend on padded sizes and on `max_length` only, so a launch can be captured in a CUDA graph (after one
uncaptured call that compiles the kernels): capture with the largest `max_length` of the bucket, and replay for any shorter one.

triton is imported at the first call, because it is not installed on every machine.

Legend: B entries, H query heads, H_kv heads of K and V, Q rows of each entry (padded), D head dimension, C cells.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import torch

from rootward.engine.paged import PagedContext

LOG2E = 1.0 / 0.6931471805599453
MIN_PIECE = 128  # cells of a prefix piece below which another program costs more than it brings
MAX_PIECES = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a launch. A fixed `num_pieces` makes results independent of the batch."""

    tile_rows: int
    tile_cells: int
    num_pieces: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(slots=True)
class Buffers:
    """Memory for partial results on the network's device, kept between calls and shared by all layers of a step.

    Memory that became too small is kept, because a captured CUDA graph may write to it: so it grows to powers of two, and all of it is less
    than four times what is needed.
    """

    _grown: list[torch.Tensor] = field(default_factory=list)

    def take(self, num: int, device: torch.device) -> torch.Tensor:
        """float32[num], contents undefined."""
        if not self._grown or len(self._grown[-1]) < num:
            self._grown.append(torch.empty(1 << (num - 1).bit_length(), dtype=torch.float32, device=device))
        return self._grown[-1][:num]


def is_available(device: torch.device) -> bool:
    """Whether the kernels can be compiled for this device."""
    return device.type == "cuda" and find_spec("triton") is not None


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: PagedContext,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    buffers: Buffers | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Attention of every row over its prefix and the nodes it sees. Returns [B, Q, H, D_v] in the type of `query`.

    query [B, H, Q, D]; keys [C, H_kv, D], values [C, H_kv, D_v], all of one type; sinks [H]. See `paged_reference` of the tests. The sums
    are float32; a row that sees nothing gets zeros. ValueError if shapes or types do not fit.
    """
    _check(query, keys, values, context, sinks)
    from rootward.engine import triton_kernels as kernels

    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    num, heads, width, dim = query.shape
    kv_heads, dim_v = values.shape[1], values.shape[2]
    rows, pairs = width * heads // kv_heads, num * kv_heads
    plan = plan or make_plan(
        rows, pairs, max(dim, dim_v), query.element_size(), context.max_length, _num_sms(query.device)
    )
    parts = plan.num_pieces + 1
    num_sums = parts * pairs * rows
    memory = (buffers or Buffers()).take(num_sums * (dim_v + 1), query.device)
    partial, lse = memory[: num_sums * dim_v], memory[num_sums * dim_v :]
    out = query.new_empty(num, width, heads, dim_v)
    scale, cap = (scaling * LOG2E, 0.0) if softcap is None else (scaling / softcap, softcap * LOG2E)
    c = context
    kernels.partial_attention[-(-rows // plan.tile_rows), pairs, parts](
        query, keys, values, partial, lse,
        c.block_table, c.length, c.scratch, c.scratch_position, c.sees, c.position,
        scale, cap, window or 0, rows, c.scratch.shape[1], plan.num_pieces,
        *query.stride()[:3], *keys.stride()[:2], *values.stride()[:2],
        c.block_table.stride(0), c.scratch.stride(0), c.scratch_position.stride(0), *c.sees.stride()[:2], c.position.stride(0),
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, BLOCK_SIZE=c.block_size, DIM=dim, DIM_V=dim_v,
        TILE_R=plan.tile_rows, TILE_N=plan.tile_cells, TILE_D=_tile(dim), TILE_DV=_tile(dim_v),
        CAPPED=softcap is not None, WINDOWED=window is not None,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    kernels.merge_partials[rows, pairs](
        out, partial, lse, out if sinks is None else sinks, parts, *out.stride()[:3],
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, DIM_V=dim_v,
        TILE_P=1 << (parts - 1).bit_length(), TILE_DV=_tile(dim_v), SINKS=sinks is not None,
        num_warps=1 if parts <= 4 else 4,
    )  # fmt: skip
    return out


def make_plan(rows: int, pairs: int, dim: int, element_size: int, max_length: int, num_sms: int) -> Plan:
    """Sizes for R rows of `pairs` entries and KV heads: tiles as tall as fits, prefix pieces until the device is full once.

    dim: head dimension; element_size: bytes; num_sms: multiprocessors of the device.
    """
    wide = element_size == 4 or dim > 128  # keys that take many registers: smaller tiles
    tile_rows = min(max(16, 1 << (rows - 1).bit_length()), 32 if element_size == 4 else 64 if wide else 128)
    per_sm = max(1, 128 // max(tile_rows, 32))  # programs that fit a multiprocessor together
    programs = -(-rows // tile_rows) * pairs
    pieces = min(max(1, per_sm * num_sms // programs), -(-max_length // MIN_PIECE), MAX_PIECES)
    return Plan(tile_rows, 32 if wide else 64, pieces, 8 if tile_rows > 64 else 4, 2 if wide else 3)


def _tile(dim: int) -> int:
    """Next power of two, at least what a matrix product takes."""
    return max(16, 1 << (dim - 1).bit_length())


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # interpreted
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: PagedContext, sinks: torch.Tensor | None
) -> None:
    """Host-side only: nothing here looks at device memory."""
    num, heads, width, dim = query.shape
    if query.dtype not in DTYPES or not query.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"query: {query.dtype} over keys {keys.dtype} and values {values.dtype}; use one floating type for all"
        )
    if keys.shape[:2] != values.shape[:2] or keys.shape[2] != dim or heads % keys.shape[1]:
        raise ValueError(
            f"keys: {tuple(keys.shape)} and values {tuple(values.shape)} do not fit query {tuple(query.shape)}"
        )
    words, nodes = context.sees.shape[2], context.scratch.shape[1]
    if context.position.shape != (num, width) or context.sees.shape[:2] != (num, width) or words * 32 < nodes:
        raise ValueError(
            f"sees: {tuple(context.sees.shape)} does not fit {num} entries of {width} rows and {nodes} nodes"
        )
    if context.max_length > context.block_table.shape[1] * context.block_size:
        raise ValueError(
            f"max_length: {context.max_length} is beyond the block table {tuple(context.block_table.shape)}"
        )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks: {tuple(sinks.shape)}; give one per head, {heads}")
