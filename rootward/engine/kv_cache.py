"""K and V of all sessions, as a `transformers.Cache` whose layers write to and read from the cells of the current step.

Storage per layer is [num_blocks · block_size + 1, heads, dim]: flat, so that one `index_copy_` writes the rows of all sessions. Padding
rows write to the last cell, the trash cell, which is never read. Storage is not cleared: a session reads only cells that it has written.

Legend: B entries, H heads, Q rows (padded), D head dimension, KV cells gathered per entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from rootward.engine.attention import DenseView
from rootward.engine.batch import Step
from rootward.engine.cpu_kernels import SERVED, array_of
from rootward.engine.graphs import StaticStep
from rootward.engine.kv_tree import Moves
from rootward.engine.slots import Size
from rootward.engine.triton_attention import Buffers


class Running:
    """The current forward: its step, the view of dense attention (None: attention reads the storage), and the layer that wrote last."""

    def __init__(self, step: Step | StaticStep, view: DenseView | None):
        self.step, self.view = step, view
        self.layer: PagedLayer | None = None


# transformers passes no such argument to attention.
running: ContextVar[Running | None] = ContextVar("running", default=None)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """K and V of one decoder layer. The first K and V determine heads and dimensions."""

    is_compileable = False
    is_sliding = False

    def __init__(self, size: Size, window: int | None, buffers: Buffers | None = None):
        """`buffers`: scratch memory of kernels, shared by all layers."""
        super().__init__()
        self.size, self.window, self.buffers = size, window, buffers or Buffers()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        num = self.size.storage + 1
        self.keys = key_states.new_empty(num, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_empty(num, value_states.shape[1], value_states.shape[3])
        self.arrays = (None, None)
        if self.device.type == "cpu" and self.keys.dtype in SERVED:
            self.arrays = (array_of(self.keys), array_of(self.values))  # for kernels on the CPU
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows [B, H, Q, D]. Returns them if attention reads the storage itself, else all keys and values [B, H, KV, D] of
        the entries."""
        now = running.get()
        assert now is not None, "the cache is used outside a step"
        self.write(now.step.write, *(new.transpose(1, 2).flatten(0, 1) for new in (key_states, value_states)))
        now.layer = self
        if now.view is None:
            return key_states, value_states
        return gathered(self.keys, now.view.cells), gathered(self.values, now.view.cells)

    def write(self, cells: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Rows [N, H, D] go to cells int64[N]."""
        if not self.is_initialized:
            self.lazy_initialization(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        self.keys.index_copy_(0, cells, keys)
        self.values.index_copy_(0, cells, values)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """The content of cells source[i] goes to target[i], all at once."""
        if self.is_initialized:
            self.keys.index_copy_(0, target, self.keys.index_select(0, source))
            self.values.index_copy_(0, target, self.values.index_select(0, source))

    @property
    def bytes_per_token(self) -> int:
        """0 before the first forward."""
        both = (self.keys, self.values) if self.is_initialized else ()
        return sum(cells[0].numel() * cells.element_size() for cells in both)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 0, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.size.num_cells

    get_max_cache_shape = get_max_length  # its name in early releases of transformers 5


def gathered(storage: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """[B, H, N, D] of [C, H, D] at cells int64[B, N]."""
    return storage.index_select(0, cells.reshape(-1)).view(*cells.shape, *storage.shape[1:]).transpose(1, 2)


class PagedCache:
    """The layers of a network."""

    def __init__(self, size: Size, windows: Sequence[int | None]):
        buffers = Buffers()
        self.layers = [PagedLayer(size, window, buffers) for window in windows]
        self.cache = Cache(layers=self.layers)

    def move(self, moves: Moves, device: torch.device) -> None:
        if len(moves.source):
            source, target = (
                torch.from_numpy(cells).to(device, non_blocking=True) for cells in (moves.source, moves.target)
            )
            for layer in self.layers:
                layer.move(source, target)

    @property
    def bytes_per_token(self) -> int:
        """Of K and V in all layers; 0 before the first forward."""
        return sum(layer.bytes_per_token for layer in self.layers)
