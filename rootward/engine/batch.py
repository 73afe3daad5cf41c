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
from rootward.engine.atoms import host_can_read
from rootward.engine.cpu_attention import VisibleKeys
from rootward.engine.paged import PagedContext, paged_context
from rootward.engine.slots import Entry, Size


class Step:
    """Inputs of one forward.

    ids, positions  int64[B, Q], or int64[N] if the rows are not padded
    write           int64[N]  cell of the storage for each row, the trash cell for padding
    wanted          int64[T]  rows whose logits are wanted; None: all of them
    """

    def __init__(
        self, entries: Sequence[Entry], kept: Sequence[range], size: Size, device: torch.device, *, pad: bool = True
    ):
        self.entries, self.size, self.device, self._kept = entries, size, device, kept
        self._visible: dict[int | None, VisibleKeys] = {}
        num, width = len(entries), max(entry.plan.num_rows for entry in entries)
        self.width = width
        self.max_position = max(int(entry.plan.positions.max()) for entry in entries)
        if not pad:
            rows = [entry.plan.num_rows for entry in entries]
            self._offsets = [sum(rows[:b]) for b in range(num)]
            joined = packed_rows(entries, num, width, size)
            real = np.arange(width) < np.array(rows)[:, None]
            self.ids, self.positions, self.write = torch.from_numpy(joined[:, real]).unbind(0)
            keep = [offset + np.asarray(wanted) for offset, wanted in zip(self._offsets, kept, strict=True)]
            self.wanted = None if sum(map(len, kept)) == sum(rows) else torch.from_numpy(np.concatenate(keep))
            return
        self._offsets = [b * width for b in range(num)]
        packed = packed_rows(entries, num, width, size)
        self.ids, self.positions, write = self._on_device(packed).unbind(0)  # one array: one copy
        self.write = write.reshape(-1)
        self.wanted = None if sum(map(len, kept)) == num * width else self._on_device(flat_rows(kept, width))

    def logits_to_keep(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(the argument `logits_to_keep` of a network of transformers, indices of the wanted rows among its logits; None: all of them)."""
        if len(self._kept) == 1:
            return self._on_device(np.asarray(self._kept[0])), None
        if host_can_read(self.device):  # a mask; on a device its sum would be a synchronisation
            mask = np.zeros((len(self._kept), self.width), np.bool_)
            for b, rows in enumerate(self._kept):
                mask[b, rows.start : rows.stop] = True
            return torch.from_numpy(mask), None
        most = max(map(len, self._kept))
        some = np.stack([np.resize(np.asarray(rows), most) for rows in self._kept])
        return self._on_device(some), self._on_device(flat_rows([range(len(rows)) for rows in self._kept], most))

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
            self._visible[window] = cpu_attention.visible_keys(self.entries, self._offsets, len(self.write), window)
        return self._visible[window]


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


def flat_rows(kept: Sequence[range], width: int) -> NDArray[np.int64]:
    """int64[T]: indices of the kept rows among all rows, with `width` rows per entry."""
    return np.concatenate([b * width + np.asarray(rows) for b, rows in enumerate(kept)])


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
