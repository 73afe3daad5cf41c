"""Input of attention over paged keys and values: the cells of the committed prefix and of the tree of every entry.

The storage of a layer is flat: cell c of block b is row b · block_size + c of keys and values [C, H_kv, D]. The committed token at
position i of an entry lies in cell i mod block_size of its block i div block_size: the prefix is dense, in order, and visible to every row
of the entry (except for a sliding window). Uncommitted nodes, the new rows included, lie in any cells; which of them a row
sees is one bit each. So the two parts are computed apart and merged by their log-sum-exp, and no [Q, KV] mask exists.

Legend: B entries, Q rows of each (padded), M uncommitted nodes of each (padded), W = ⌈M / 32⌉ words, H heads, H_kv heads of K and V,
D head dimension, C cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rootward.engine.slots import Entry


@dataclass(slots=True, eq=False)
class PagedContext:
    """Cells and visibility of one step, shared by all layers.

    block_size
    block_table       int32[B, N]     blocks of the committed prefix, in order; padding is never read
    length            int32[B]        committed tokens
    scratch           int32[B, M]     cells of the uncommitted nodes, −1 for padding
    scratch_position  int32[B, M]     their logical positions
    sees              int32[B, Q, W]  bit m of the row: it sees node m (itself included); padding rows see what row 0 sees
    position          int32[B, Q]     logical positions of the rows
    max_length        largest `length`, a host integer (loop bounds without a synchronisation)
    """

    block_size: int
    block_table: torch.Tensor
    length: torch.Tensor
    scratch: torch.Tensor
    scratch_position: torch.Tensor
    sees: torch.Tensor
    position: torch.Tensor
    max_length: int


@dataclass(frozen=True, slots=True)
class Extents:
    """Sizes of a context, padding included: B entries of Q rows, blocks of their prefixes, uncommitted nodes."""

    entries: int
    rows: int
    blocks: int
    nodes: int

    @staticmethod
    def of(entries: Sequence[Entry], rows: int) -> Extents:
        """The smallest that holds them."""
        return Extents(
            len(entries), rows, max(1, *(len(e.table) for e in entries)), max(len(e.plan.node) for e in entries)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Per entry: block table, length, scratch, scratch positions, words of visibility, positions."""
        return self.blocks, 1, self.nodes, self.nodes, self.rows * -(-self.nodes // 32), self.rows

    @property
    def total(self) -> int:
        return self.entries * sum(self.sizes)


def paged_context(entries: Sequence[Entry], width: int, block_size: int, device: torch.device) -> PagedContext:
    """The context of a step with `width` rows per entry: packed in one array, so that one copy brings it to the device."""
    extents = Extents.of(entries, width)
    on_device = torch.from_numpy(packed_context(entries, extents, trash=0)).to(device, non_blocking=True)
    return unpacked_context(on_device, extents, block_size, max(e.plan.length for e in entries))


def packed_context(entries: Sequence[Entry], extents: Extents, trash: int) -> NDArray[np.int32]:
    """int32[total], which `unpacked_context` reads. Padding entries see only the trash cell."""
    packed = np.zeros(extents.total, dtype=np.int32)
    table, length, scratch, place, sees, position = _pieces(packed, extents)
    scratch[:] = -1
    words = -(-extents.nodes // 32)
    for b, e in enumerate(entries):
        plan, m = e.plan, len(e.plan.node)
        table[b, : len(e.table)] = e.table.blocks
        length[b] = plan.length
        scratch[b, :m] = e.table.cells(plan.scratch)
        place[b, :m] = plan.position
        seen = np.zeros((extents.rows, words * 32), np.bool_)
        seen[: plan.num_rows, :m] = plan.sees
        seen[plan.num_rows :, :m] = plan.sees[0]
        sees[b] = np.packbits(seen, axis=1, bitorder="little").view("<i4").reshape(-1)
        position[b] = np.append(plan.positions, np.full(extents.rows - plan.num_rows, plan.positions[0]))
    scratch[len(entries) :, 0] = trash
    sees[len(entries) :, ::words] = 1
    return packed


def unpacked_context(packed: torch.Tensor, extents: Extents, block_size: int, max_length: int) -> PagedContext:
    """The context in a packed tensor, as views: writing new content to the tensor makes a new context."""
    parts = _pieces(packed, extents)
    return PagedContext(
        block_size=block_size,
        block_table=parts[0],
        length=parts[1][:, 0],
        scratch=parts[2],
        scratch_position=parts[3],
        sees=parts[4].reshape(extents.entries, extents.rows, -1),
        position=parts[5],
        max_length=max_length,
    )


def _pieces(packed: Any, extents: Extents) -> list[Any]:
    """The arrays [B, …] that are concatenated in a flat one."""
    ends = np.cumsum([extents.entries * size for size in extents.sizes]).tolist()
    starts = [0, *ends[:-1]]
    return [packed[i:j].reshape(extents.entries, -1) for i, j in zip(starts, ends, strict=True)]
