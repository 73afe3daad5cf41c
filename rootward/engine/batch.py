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


@dataclass(slots=True, eq=False)
class Step:
    """What one forward needs besides the weights.

    ids, positions     int64[B, Q]
    keep               bool[B, Q]  rows whose logits are wanted
    slots              B slots, ascending
    slot_ids           int64[B]    the same, on the device
    write              int64[B·Q]  flat cell of each row, the trash cell for padding
    owner, scratch     int64[P]    entry and cell of each uncommitted node; scratch_position its logical position
    sees               bool[P, Q]  row sees scratch cell
    end                cells looked at per slot
    restore            int64[T]    order of the caller's rows in the step's; None if they agree
    """

    ids: torch.Tensor
    positions: torch.Tensor
    keep: torch.Tensor
    slots: list[int]
    slot_ids: torch.Tensor
    write: torch.Tensor
    owner: torch.Tensor
    scratch: torch.Tensor
    scratch_position: torch.Tensor
    sees: torch.Tensor
    end: int
    max_position: int
    num_kept: int
    restore: torch.Tensor | None

    @property
    def keeps_all(self) -> bool:
        return self.num_kept == self.keep.numel()

    def select(self, by_slot: torch.Tensor) -> torch.Tensor:
        """[B, KV, ...]: the cells looked at, of the slots of this step. A view where the slots lie side by side."""
        first, num = self.slots[0], len(self.slots)
        if self.slots[-1] - first == num - 1:
            return by_slot[first : first + num, : self.end]
        return by_slot[:, : self.end].index_select(0, self.slot_ids)


def assemble(
    batch: Sequence[Rows],
    plans: Sequence[Placement],
    kept: Sequence[range],
    *,
    num_slots: int,
    num_cells: int,
    device: torch.device,
) -> Step:
    """The step of a batch whose rows have been placed."""
    order = sorted(range(len(batch)), key=lambda i: batch[i].slot)
    shape = len(batch), max(plan.num_rows for plan in plans)
    ids, positions, write = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64)
    keep = np.zeros(shape, np.bool_)
    num_scratch = [len(plans[i].scratch) for i in order]
    sees = np.empty((sum(num_scratch), shape[1]), np.bool_)
    top = 0
    for b, i in enumerate(order):
        rows, plan, q = batch[i], plans[i], plans[i].num_rows
        ids[b, :q], ids[b, q:] = rows.token, rows.token[0]
        positions[b, :q], positions[b, q:] = plan.positions, plan.positions[0]
        write[b, :q], write[b, q:] = plan.cells + rows.slot * num_cells, num_slots * num_cells
        keep[b, kept[i].start : kept[i].stop] = True
        block = sees[top : top + len(plan.scratch)]
        block[:, :q], block[:, q:] = plan.sees.T, plan.sees[0, :, None]
        top += len(plan.scratch)
    slots = [batch[i].slot for i in order]
    end = max(plan.end for plan in plans)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Step(
        ids=put(ids),
        positions=put(positions),
        keep=put(keep),
        slots=slots,
        slot_ids=put(np.array(slots)),
        write=put(write.reshape(-1)),
        owner=put(np.repeat(np.arange(len(order)), num_scratch)),
        scratch=put(np.concatenate([plans[i].scratch for i in order])),
        scratch_position=put(np.concatenate([plans[i].position for i in order])),
        sees=put(sees),
        end=min(-(-end // CELL_MULTIPLE) * CELL_MULTIPLE, num_cells),
        max_position=int(positions.max()),
        num_kept=sum(map(len, kept)),
        restore=_restore(order, kept, device),
    )


def _restore(order: list[int], kept: Sequence[range], device: torch.device) -> torch.Tensor | None:
    """int64[T]: where the caller's rows stand among the step's, if the entries were reordered."""
    if order == sorted(order):
        return None
    start, first = {}, 0
    for i in order:
        start[i], first = first, first + len(kept[i])
    index: Ints = np.concatenate([np.arange(start[i], start[i] + len(rows)) for i, rows in enumerate(kept)])
    return torch.from_numpy(index).to(device)
