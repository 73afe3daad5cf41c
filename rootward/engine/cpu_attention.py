"""Attention on the CPU over paged keys and values: the prefix where it lies, the tail under its small mask, merged.

Registered as `rootward_sdpa` through the public interfaces and chosen by the load probe. Query heads that share K and V are rows of one
product, so that grouped queries need no copy of them.

Legend: B entries, H query heads, H_kv heads of K and V, G = H / H_kv, Q rows, R = G · Q, D head dimension, N cells.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rootward.engine.kv_cache import PagedLayer, gathered, running
from rootward.engine.partial_softmax import Part, attend, attend_all, merged
from rootward.engine.reach import Padded, Reach

NAME = "rootward_sdpa"  # "sdpa" in the name makes transformers ask whether the model supports it


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, Q, D]; key and value the new rows' [B, H_kv, Q, D]. Returns [B, Q, H, D]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{NAME} knows no {name}; use eager")
    now = running.get()
    if now is None:  # a forward without a cache
        passed = dict(kwargs, dropout=dropout, scaling=scaling)
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **passed)
        return out
    assert now.layer is not None, "attention without keys and values of its own"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return paged(query, key, value, now.layer, now.step.reach(now.layer.window), scale), None


def paged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: PagedLayer, reach: Reach, scaling: float
) -> torch.Tensor:
    """[B, Q, H, D]: what `paged_reference` says."""
    num, heads, width, dim = query.shape
    group = heads // key.shape[1]
    folded = query.reshape(num, key.shape[1], group * width, dim)
    if reach.whole is not None:
        out = attend_all(folded, *_read(layer, reach.whole), scaling, reach.whole.bias(group, query.dtype))
    elif reach.tail is None and len(reach.pieces) == len(reach.pieces[0]) == 1:
        out = attend_all(folded, *layer.piece(*reach.pieces[0][0]), scaling)
    elif reach.tail is not None:
        if not reach.new_rows:
            key, value = _read(layer, reach.tail)
        tail = attend(folded, key, value, scaling, reach.tail.bias(group, query.dtype))
        out = merged(_prefix(folded, layer, reach, scaling), tail)
    else:
        out = _prefix(folded, layer, reach, scaling).out
    return out.reshape(num, heads, width, -1).transpose(1, 2).contiguous()


def _prefix(query: torch.Tensor, layer: PagedLayer, reach: Reach, scaling: float) -> Part:
    parts = [_one_prefix(query[b : b + 1], layer, pieces, scaling) for b, pieces in enumerate(reach.pieces)]
    if len(parts) == 1:
        return parts[0]
    return Part(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _one_prefix(query: torch.Tensor, layer: PagedLayer, pieces: list[tuple[int, int]], scaling: float) -> Part:
    """Of one entry: query [1, H_kv, R, D]."""
    found: Part | None = None
    for first, num in pieces:
        part = attend(query, *layer.piece(first, num), scaling)
        found = part if found is None else Part(merged(found, part), torch.logaddexp(found.lse, part.lse))
    if found is None:
        shape = (*query.shape[:-1], layer.values.shape[-1])
        return Part(query.new_zeros(shape), query.new_full(shape[:-1], -torch.inf, dtype=torch.float32))
    return found


def _read(layer: PagedLayer, what: Padded) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H_kv, N, D] twice."""
    if what.piece is not None:
        return layer.piece(*what.piece)
    return gathered(layer.keys, what.cells), gathered(layer.values, what.cells)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
