"""Attention on the CPU over paged keys and values: the prefix where it lies, the tail under its small mask, merged.

Query heads that share K and V are rows of one product, so that grouped queries need no copy of them.

Legend: B entries, H query heads, H_kv heads of K and V, G = H / H_kv, Q rows, R = G · Q, D head dimension, N cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rootward.engine.kv_cache import PagedLayer, gathered
from rootward.engine.partial_softmax import Part, attend, attend_all, merged, with_sinks
from rootward.engine.reach import Padded, Reach


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made: products times `scaling`, then softcap · tanh(score / softcap) if there is a cap."""

    scaling: float
    softcap: float | None = None


def paged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: PagedLayer,
    reach: Reach,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, Q, H, D]: what `paged_reference` says."""
    num, heads, width, dim = query.shape
    group = heads // key.shape[1]
    folded = query.reshape(num, key.shape[1], group * width, dim)
    scores = Scores(scaling, softcap)
    if softcap is None and sinks is None and _in_one_call(reach):
        out = _one_call(folded, layer, reach, scaling, group)
    else:
        part = _seen(folded, key, value, layer, reach, scores, group)
        out = part.out if sinks is None else with_sinks(part, sinks.view(1, -1, group).repeat_interleave(width, 2))
    return out.reshape(num, heads, width, -1).transpose(1, 2).contiguous()


def _in_one_call(reach: Reach) -> bool:
    alone = reach.tail is None and len(reach.pieces) == len(reach.pieces[0]) == 1
    return reach.whole is not None or alone


def _one_call(query: torch.Tensor, layer: PagedLayer, reach: Reach, scaling: float, group: int) -> torch.Tensor:
    if reach.whole is not None:
        return attend_all(query, *_read(layer, reach.whole), scaling, reach.whole.bias(group, query.dtype))
    return attend_all(query, *layer.piece(*reach.pieces[0][0]), scaling)


def _seen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: PagedLayer,
    reach: Reach,
    scores: Scores,
    group: int,
) -> Part:
    """Of all that the rows reach."""
    if reach.whole is not None:
        return _attend(query, *_read(layer, reach.whole), scores, reach.whole.bias(group, query.dtype))
    prefix = _prefix(query, layer, reach, scores)
    if reach.tail is None:
        return prefix
    if not reach.new_rows:
        key, value = _read(layer, reach.tail)
    return merged(prefix, _attend(query, key, value, scores, reach.tail.bias(group, query.dtype)))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, bias: torch.Tensor | None = None
) -> Part:
    return attend(query, key, value, scores.scaling, bias, scores.softcap)


def _prefix(query: torch.Tensor, layer: PagedLayer, reach: Reach, scores: Scores) -> Part:
    parts = [_one_prefix(query[b : b + 1], layer, pieces, scores) for b, pieces in enumerate(reach.pieces)]
    if len(parts) == 1:
        return parts[0]
    return Part(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _one_prefix(query: torch.Tensor, layer: PagedLayer, pieces: list[tuple[int, int]], scores: Scores) -> Part:
    """Of one entry: query [1, H_kv, R, D]."""
    found: Part | None = None
    for first, num in pieces:
        part = _attend(query, *layer.piece(first, num), scores)
        found = part if found is None else merged(found, part)
    if found is None:
        shape = (*query.shape[:-1], layer.values.shape[-1])
        return Part(query.new_zeros(shape), query.new_full(shape[:-1], -torch.inf, dtype=torch.float32))
    return found


def _read(layer: PagedLayer, what: Padded) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H_kv, N, D] twice."""
    if what.piece is not None:
        return layer.piece(*what.piece)
    return gathered(layer.keys, what.cells), gathered(layer.values, what.cells)
