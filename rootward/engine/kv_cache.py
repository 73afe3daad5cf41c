"""K and V of all slots, as a `transformers.Cache` whose layers write and read where the step says.

Storage per layer is [num_slots · num_cells + 1, heads, dim]: flat, so that one `index_copy_` writes the rows of all
sessions. The last cell is trash: padding rows write there and nobody reads it.

Legend: B entries, H heads, Q rows (padded), D head dimension, KV cells looked at per slot.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rootward.engine.batch import Size, Step


class Pool:
    """What the layers share: the size of the storage, and the step that is running."""

    def __init__(self, size: Size):
        self.size = size
        self.step: Step | None = None


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """K and V of one decoder layer. Sized by the first K and V it sees: the right heads under any attention."""

    is_compileable = False
    is_sliding = False

    def __init__(self, pool: Pool):
        super().__init__()
        self.pool = pool
        self._region: object = None  # the last part of the storage that was read; views of it are kept

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self._keys_by_slot = self._storage(key_states)
        self.values, self._values_by_slot = self._storage(value_states)
        self.is_initialized = True

    def _storage(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat storage, and the same seen as [num_slots, num_cells, H, D] without the trash cell."""
        size = self.pool.size
        flat = like.new_zeros(size.trash_cell + 1, like.shape[1], like.shape[3])
        return flat, flat[:-1].view(size.num_slots, size.num_cells, like.shape[1], like.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows [B, H, Q, D]; return everything the slots hold [B, H, KV, D]."""
        step = self.pool.step
        assert step is not None, "the cache is used outside a step"
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(0, step.write, key_states.transpose(1, 2).flatten(0, 1))
        self.values.index_copy_(0, step.write, value_states.transpose(1, 2).flatten(0, 1))
        if step.region is None:
            return step.select(self._keys_by_slot).transpose(1, 2), step.select(self._values_by_slot).transpose(1, 2)
        if step.region != self._region:
            self._region = step.region
            self._keys_read = step.select(self._keys_by_slot).transpose(1, 2)
            self._values_read = step.select(self._values_by_slot).transpose(1, 2)
        return self._keys_read, self._values_read

    def wipe(self, slot: int, end: int) -> None:
        """Zero what a slot held: a hidden NaN would still spoil the next session's weighted sum."""
        if self.is_initialized:
            self._keys_by_slot[slot, :end] = 0
            self._values_by_slot[slot, :end] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.pool.step.end if self.pool.step is not None else 0), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.pool.size.num_cells

    get_max_cache_shape = get_max_length  # its name in early releases of transformers 5


def slot_cache(pool: Pool, num_layers: int) -> Cache:
    return Cache(layers=[SlotLayer(pool) for _ in range(num_layers)])
