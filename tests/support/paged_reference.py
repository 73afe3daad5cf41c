"""Attention over paged keys and values as its definition says it: the oracle of every kernel."""

from __future__ import annotations

import torch

from rootward.engine.paged import PagedContext


def paged_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: PagedContext,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dense float64 attention, one entry at a time: what every fast path must equal. Returns [B, Q, H, D].

    query [B, H, Q, D]; keys, values [C, H_kv, D]. A row at position t sees cells at positions above t − window. sinks [H]: a logit
    per head that takes part in the softmax and carries no value.
    """
    num, heads, width, _ = query.shape
    out = query.new_zeros(num, width, heads, values.shape[-1], dtype=torch.float64)
    for b in range(num):
        cells, position, visible = _dense(context, b, width)
        k, v = keys[cells].double(), values[cells].double()
        group = heads // k.shape[1]
        score = torch.einsum("hqd,khd->hqk", query[b].double(), k.repeat_interleave(group, 1)) * scaling
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if window is not None:
            visible = visible & (context.position[b][:, None] - position[None, :] < window)
        score = score.masked_fill(~visible[None], -torch.inf)
        if sinks is not None:
            score = torch.cat([score, sinks.double()[:, None, None].expand(heads, width, 1)], dim=-1)
        weight = torch.softmax(score, dim=-1)[..., : len(cells)]
        out[b] = torch.einsum("hqk,khd->qhd", weight, v.repeat_interleave(group, 1))
    return out


def _dense(context: PagedContext, b: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one entry: its cells int64[L + m], their positions, and which of them each row sees bool[Q, L + m]."""
    length, size = int(context.length[b]), context.block_size
    places = torch.arange(length, device=context.length.device)
    prefix = context.block_table[b].long()[places // size] * size + places % size
    real = context.scratch[b] >= 0
    nodes = torch.arange(context.scratch.shape[1], device=real.device)
    bits = (context.sees[b].long()[:, nodes // 32] >> (nodes % 32)) & 1
    visible = torch.cat([torch.ones(width, length, dtype=torch.bool, device=real.device), bits[:, real].bool()], dim=1)
    cells = torch.cat([prefix, context.scratch[b][real].long()])
    return cells, torch.cat([places, context.scratch_position[b][real].long()]), visible
