"""One step as tensors: the rows of all sessions, padded to one width.

Padding rows repeat the first row of their entry (position, token and visibility: they are finite) and write to a trash
cell that nobody reads. Entries are ordered by slot: slots side by side are read without a copy.

Legend: B entries, Q rows of each (padded), P scratch cells of all entries, T wanted rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rootward.engine.kv_tree import Ints, Placement
from rootward.ports import Rows

CELL_MULTIPLE = 64  # cells are looked at in multiples of this: fewer shapes, aligned rows


@dataclass(frozen=True, slots=True)
class Size:
    """Of the cache: slots, cells of each, and the last position the network knows."""

    num_slots: int
    num_cells: int
    last_position: int

    @property
    def trash_cell(self) -> int:
        return self.num_slots * self.num_cells


@dataclass(slots=True, eq=False)
class Step:
    """What one forward needs besides the weights.

    ids, positions     int64[B, Q]
    write              int64[B·Q]  flat cell of each row, the trash cell for padding
    keep               bool[B, Q]  rows whose logits are wanted; None: all of them
    slots              B slots, ascending; slot_ids the same on the device
    owner, scratch     int64[P]    entry and cell of each uncommitted node; scratch_position its logical position
    sees               bool[P, Q]  row sees scratch cell
    end                cells looked at per slot
    region             what is looked at, if one view of the storage holds it: first slot, number of slots, end
    restore            int64[T]    order of the caller's rows in the step's; None if they agree
    """

    ids: torch.Tensor
    positions: torch.Tensor
    write: torch.Tensor
    keep: torch.Tensor | None
    num_kept: int
    slots: list[int]
    slot_ids: torch.Tensor
    owner: torch.Tensor
    scratch: torch.Tensor
    scratch_position: torch.Tensor
    sees: torch.Tensor
    end: int
    region: tuple[int, int, int] | None
    max_position: int
    restore: torch.Tensor | None

    def select(self, by_slot: torch.Tensor) -> torch.Tensor:
        """[B, KV, ...]: the cells looked at, of the slots of this step. A view where the slots lie side by side."""
        if self.region is not None:
            first, num, end = self.region
            return by_slot[first : first + num, :end]
        return by_slot[:, : self.end].index_select(0, self.slot_ids)


def assemble(
    batch: Sequence[Rows],
    plans: Sequence[Placement],
    kept: Sequence[range],
    size: Size,
    device: torch.device,
) -> Step:
    """The step of a batch whose rows have been placed."""
    order = sorted(range(len(batch)), key=lambda i: batch[i].slot)
    slots = [batch[i].slot for i in order]
    num, width = len(order), max(plan.num_rows for plan in plans)
    num_scratch = [len(plans[i].scratch) for i in order]
    total = sum(num_scratch)
    # Everything of type int64 lies in one array: one copy to the device.
    packed = np.empty(3 * (num * width + total) + num, dtype=np.int64)
    by_row = packed[: 3 * num * width].reshape(3, num, width)
    by_node = packed[3 * num * width : -num].reshape(3, total)
    packed[-num:] = slots
    sees = np.empty((total, width), np.bool_)
    top = 0
    for b, i in enumerate(order):
        plan, q, bottom = plans[i], plans[i].num_rows, top + num_scratch[b]
        by_row[0, b, :q] = batch[i].token
        by_row[1, b, :q] = plan.positions
        by_row[2, b, :q] = plan.cells + batch[i].slot * size.num_cells
        by_node[0, top:bottom] = b
        by_node[1, top:bottom] = plan.scratch
        by_node[2, top:bottom] = plan.position
        sees[top:bottom, :q] = plan.sees.T
        if q < width:
            by_row[:2, b, q:] = by_row[:2, b, :1]
            by_row[2, b, q:] = size.trash_cell
            sees[top:bottom, q:] = plan.sees[0, :, None]
        top = bottom
    np.minimum(by_row[1], size.last_position, out=by_row[1])
    end = min(-(-max(plan.end for plan in plans) // CELL_MULTIPLE) * CELL_MULTIPLE, size.num_cells)
    on_device = torch.from_numpy(packed).to(device)
    ids, positions, write = on_device[: 3 * num * width].view(3, num, width).unbind(0)
    owner, scratch, scratch_position = on_device[3 * num * width : -num].view(3, total).unbind(0)
    return Step(
        ids=ids,
        positions=positions,
        write=write.reshape(-1),
        keep=_keep(order, kept, (num, width), device),
        num_kept=sum(map(len, kept)),
        slots=slots,
        slot_ids=on_device[-num:],
        owner=owner,
        scratch=scratch,
        scratch_position=scratch_position,
        sees=torch.from_numpy(sees).to(device),
        end=end,
        region=(slots[0], num, end) if slots[-1] - slots[0] == num - 1 else None,
        max_position=int(by_row[1].max()),
        restore=_restore(order, kept, device),
    )


def split(widths: Sequence[int], overhead: int) -> list[list[int]]:
    """Entries by forward: one, or two if padding the narrow ones to the widest costs more than another forward.

    A forward costs its padded rows, plus `overhead` rows.
    """
    order = sorted(range(len(widths)), key=lambda i: widths[i])
    widest = widths[order[-1]]
    saved = [(widest - widths[order[k - 1]]) * k for k in range(1, len(order))]  # by the k narrowest in their own
    if not saved or max(saved) <= overhead:
        return [list(range(len(widths)))]
    k = saved.index(max(saved)) + 1
    return [order[:k], order[k:]]


def _keep(order: list[int], kept: Sequence[range], shape: tuple[int, int], device: torch.device) -> torch.Tensor | None:
    """bool[B, Q]: the rows whose logits are wanted; None if that is every row."""
    if sum(map(len, kept)) == shape[0] * shape[1]:
        return None
    keep = np.zeros(shape, np.bool_)
    for b, i in enumerate(order):
        keep[b, kept[i].start : kept[i].stop] = True
    return torch.from_numpy(keep).to(device)


def _restore(order: list[int], kept: Sequence[range], device: torch.device) -> torch.Tensor | None:
    """int64[T]: where the caller's rows stand among the step's, if the entries were reordered."""
    if order == sorted(order):
        return None
    start, first = {}, 0
    for i in order:
        start[i], first = first, first + len(kept[i])
    index: Ints = np.concatenate([np.arange(start[i], start[i] + len(rows)) for i, rows in enumerate(kept)])
    return torch.from_numpy(index).to(device)
