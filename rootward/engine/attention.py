"""Sliding windows of a network's layers, and dense attention: all keys and values of an entry are gathered, with an additive mask.

The mask is additive because eager attention adds it to the scores, and sdpa would convert a boolean one in every layer. Padding repeats a
cell of the entry.

Legend: B entries, Q rows of each (padded), KV cells gathered per entry (padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rootward.engine.paged import PagedContext

Mask = torch.Tensor | dict[str, torch.Tensor]

FULL, SLIDING = "full_attention", "sliding_attention"


class Windows:
    """The sliding window of each layer, and whether the network takes a mask per kind of layer or a single one."""

    def __init__(self, by_layer: Sequence[int | None], by_kind: dict[str, int | None] | None):
        self.by_layer, self._by_kind = tuple(by_layer), by_kind

    def masks(self, make: Any) -> Mask:
        """The network's mask argument: one mask, or one per kind of layer. `make` returns the mask of a window."""
        if self._by_kind is None:
            mask: torch.Tensor = make(self.by_layer[0])
            return mask
        return {kind: make(window) for kind, window in self._by_kind.items()}


def layer_windows(config: Any) -> Windows | None:
    """The windows of a text configuration; None if it has layers that are neither full nor sliding attention."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    num = config.num_hidden_layers
    types = list(getattr(config, "layer_types", None) or ())
    if not types:
        return Windows([window] * num, None)
    if not set(types) <= {FULL, SLIDING}:
        return None
    by_kind = {FULL: None, SLIDING: window}
    by_layer = [by_kind[kind] for kind in types]
    return Windows(by_layer, by_kind if len(set(types)) > 1 else None)


class DenseView:
    """cells int64[B, KV] of the storage, the committed prefix first; computed on the device from the paged context."""

    def __init__(self, context: PagedContext):
        self.context = context
        self.place = torch.arange(context.max_length, device=context.length.device)
        prefix = context.block_table.long()[:, self.place // context.block_size] * context.block_size
        prefix = prefix + self.place % context.block_size
        nodes = torch.where(context.scratch < 0, context.scratch[:, :1], context.scratch).long()
        self.held = self.place < context.length[:, None]  # bool[B, prefix]
        self.cells = torch.cat([torch.where(self.held, prefix, nodes[:, :1]), nodes], dim=1)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, Q, KV]: 0 or the lowest number. Windows compare logical positions."""
        c = self.context
        bit = torch.arange(c.scratch.shape[1], device=c.scratch.device)
        sees = (c.sees[:, :, bit // 32] >> (bit % 32)) & 1
        visible = torch.cat([self.held[:, None].expand(-1, sees.shape[1], -1), sees.bool()], dim=2)
        if window is not None:
            position = torch.cat([self.place.expand(len(c.length), -1), c.scratch_position], dim=1)
            visible = visible & (c.position[:, :, None] - position[:, None, :] < window)
        hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return hidden.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
