"""The tensors of one step: rows of all sessions, concatenated, or padded to one width for a network that takes a batch.

Padding rows repeat the first row of their entry (position, token and visibility, so their values are finite) and write to a trash cell that
is never read. The description of the keys that attention reads depends on the implementation and is made on first use: `paged` for kernels
over block tables and for dense attention, `visible` for the CPU.

Legend: B entries, Q rows of each (padded), T wanted rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.engine import cpu_attention
from rootward.engine.cpu_kernels import VisibleKeys
from rootward.engine.paged import PagedContext, paged_context
from rootward.engine.slots import Entry, Size


class Step:
    """Inputs of one forward.

    ids, positions  int64[B, Q], or int64[N] if the rows are not padded
    write           int64[N]  cell of the storage for each row, the trash cell for padding
    offsets         index of the first row of each entry
    wanted          int64[T]  rows whose logits are wanted; None: all of them
    """

    def __init__(
        self, entries: Sequence[Entry], kept: Sequence[range], size: Size, device: torch.device, *, pad: bool = True
    ):
        self.entries, self.size, self.device, self._kept = entries, size, device, kept
        self._visible: dict[int | None, VisibleKeys] = {}
        rows = [entry.plan.num_rows for entry in entries]
        self.width = max(rows)
        self.max_position = max(int(entry.plan.positions.max()) for entry in entries)
        packed = packed_rows(entries, len(entries), self.width, size) if pad else joined_rows(entries, size)
        self.offsets = [b * self.width if pad else sum(rows[:b]) for b in range(len(rows))]
        self.ids, self.positions, write = self._on_device(packed).unbind(0)  # one array: one copy
        self.write = write.reshape(-1)
        wanted = flat_rows(kept, self.offsets)
        self.wanted = None if len(wanted) == len(self.write) else self._on_device(wanted)

    def logits_to_keep(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64[n]: columns of ids that hold a wanted row, which a network of transformers takes; int64[T]: indices of the wanted rows
        among its logits [B, n])."""
        some = np.unique(np.concatenate(self._kept))
        wanted = [b * len(some) + np.searchsorted(some, rows) for b, rows in enumerate(self._kept)]
        return self._on_device(some), self._on_device(np.concatenate(wanted))

    def _on_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    @cached_property
    def paged(self) -> PagedContext:
        """Input of kernels over block tables, on the device."""
        return paged_context(self.entries, self.width, self.size.block_size, self.device)

    def visible(self, window: int | None) -> VisibleKeys:
        """Input of attention on the CPU, in layers with this sliding window."""
        if window is not None and self.max_position < window:
            window = None
        if window not in self._visible:
            self._visible[window] = cpu_attention.visible_keys(self.entries, self.offsets, len(self.write), window)
        return self._visible[window]


def joined_rows(entries: Sequence[Entry], size: Size) -> NDArray[np.int64]:
    """int64[3, N]: ids, positions and cells of the rows, without padding."""
    parts = [(one.rows.token, one.plan.positions, one.table.cells(one.plan.cells)) for one in entries]
    joined = np.array([np.concatenate(column) for column in zip(*parts, strict=True)], np.int64)
    np.minimum(joined[1], size.max_positions - 1, out=joined[1])  # rows beyond the network's context are never used
    return joined


def packed_rows(entries: Sequence[Entry], num: int, width: int, size: Size) -> NDArray[np.int64]:
    """int64[3, num, width]: ids, positions and cells of the rows. Entries of padding are token 0 at position 0."""
    packed = np.zeros((3, num, width), dtype=np.int64)
    packed[2] = size.storage
    for b, entry in enumerate(entries):
        plan, q = entry.plan, entry.plan.num_rows
        packed[0, b, :q] = entry.rows.token
        packed[1, b, :q] = plan.positions
        packed[2, b, :q] = entry.table.cells(plan.cells)
        packed[:2, b, q:] = packed[:2, b, :1]
    # rows beyond the network's context are never used
    np.minimum(packed[1], size.max_positions - 1, out=packed[1])
    return packed


def flat_rows(kept: Sequence[range], offsets: Sequence[int]) -> NDArray[np.int64]:
    """int64[T]: indices of the kept rows among all rows. offsets: of the first row of each entry."""
    return np.concatenate([offset + np.asarray(rows) for offset, rows in zip(offsets, kept, strict=True)])


def split(widths: Sequence[int], overhead: int) -> list[list[int]]:
    """Entries of each forward: one forward, or two if padding the narrow entries to the widest costs more than a second forward.

    The cost of a forward is its padded rows plus `overhead` rows.
    """
    order = sorted(range(len(widths)), key=lambda i: widths[i])
    widest = widths[order[-1]]
    saved = [
        (widest - widths[order[k - 1]]) * k for k in range(1, len(order))
    ]  # if the k narrowest have their own forward
    if not saved or max(saved) <= overhead:
        return [list(range(len(widths)))]
    k = saved.index(max(saved)) + 1
    return [order[:k], order[k:]]
