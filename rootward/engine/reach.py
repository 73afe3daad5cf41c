"""What the rows of a step reach, cut in two for a CPU: a long *prefix* that every row of an entry sees whole, and a short *tail*.

The prefix lies in few contiguous pieces of the storage and needs no mask, so K and V are read where they are. It is the committed
context, and the nodes in place on top of it that every row descends from (the root: a plain step has no tail at all). Under a sliding
window its beginning, where the rows' windows differ, belongs to the tail.

Short contexts are read as a whole instead, in one call under a mask, copied together unless they lie in one piece: a call costs as much
as copying CALL_CELLS cells, or as the mask of twice as many (measured). Padding repeats a cell of the entry itself: one session's NaN
stays its own.

Legend: B entries, Q rows of each (padded), N cells of each (padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rootward.engine.block_table import Extent
from rootward.engine.kv_tree import Bools, Ints
from rootward.engine.slots import Entry

CALL_CELLS = 256


@dataclass(slots=True, eq=False)
class Padded:
    """cells int64[B, N] of the storage; visible bool[B, Q, N]: the row sees them. piece: the cells, if they are one."""

    cells: torch.Tensor
    visible: torch.Tensor
    piece: Extent | None = None
    _bias: dict[int, torch.Tensor] = field(default_factory=dict, init=False)

    def bias(self, group: int, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, group · Q, N]: 0 or the lowest number, for `group` query heads in a row; the same for every layer."""
        if group not in self._bias:
            low = torch.finfo(
                dtype
            ).min  # not −∞: a row may see nothing here; its weight becomes 0 when the parts are merged
            hidden = ~self.visible.repeat(1, group, 1)
            self._bias[group] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, low)[:, None]
        return self._bias[group]


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """Where a step reads: `whole` in one call; or, if that is None, the pieces of the prefix by entry, and the tail.

    tail      None if every row sees its whole reach in the prefix
    new_rows  the tail is the new rows of the step, in order: their K and V need not be read back
    """

    whole: Padded | None
    pieces: list[list[Extent]]
    tail: Padded | None = None
    new_rows: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One entry: prefix [first, last) and band [band, first) in cells of the session; tail: nodes; sees bool[q, band + nodes]."""

    band: int
    first: int
    last: int
    tail: Ints
    sees: Bools


def reach(entries: Sequence[Entry], width: int, window: int | None) -> Reach:
    """`width`: rows of an entry with padding. `window`: None if every row sees all that is behind it."""
    parts = [_part(entry, window) for entry in entries]
    pieces = [entry.table.extents(part.first, part.last) for entry, part in zip(entries, parts, strict=True)]
    most = max(len(part.tail) for part in parts)
    calls = sum(map(len, pieces)) + (2 if most else 0)  # the tail's own, and merging costs as much as another
    whole = _whole(entries, parts, width, CALL_CELLS * (calls - 1))
    if whole is not None:
        return Reach(whole, pieces)
    if not most:
        return Reach(None, pieces)
    if all(
        part.band == part.first and len(e.plan.node) == e.plan.num_rows for e, part in zip(entries, parts, strict=True)
    ):
        tails, sees = [e.plan.scratch for e in entries], [_all_nodes(e, p) for e, p in zip(entries, parts, strict=True)]
        return Reach(None, pieces, _padded(entries, tails, sees, width, width), True)
    tail = _padded(entries, [part.tail for part in parts], [part.sees for part in parts], most, width)
    return Reach(None, pieces, tail)


def _whole(entries: Sequence[Entry], parts: Sequence[_Part], width: int, most: int) -> Padded | None:
    """Prefix and tail of every entry together; None if that costs more than copying `most` cells."""
    alone, longest = len(parts) == 1, max(part.last - part.first + len(part.tail) for part in parts)
    if longest * len(parts) >= (2 * most if alone else most):
        return None
    cells, sees = [], []
    for part in parts:
        tail = np.argsort(part.tail)
        cells.append(np.concatenate([np.arange(part.first, part.last), part.tail[tail]]))
        sees.append(np.hstack([np.ones((len(part.sees), part.last - part.first), np.bool_), part.sees[:, tail]]))
    found = _padded(entries, cells, sees, longest, width)
    if alone and bool((found.cells[0].diff() == 1).all()):
        found.piece = int(found.cells[0, 0]), longest
    return found if found.piece is not None or longest * len(parts) < most else None


def _part(entry: Entry, window: int | None) -> _Part:
    plan = entry.plan
    last = plan.length + _num_shared(entry)
    nodes = np.flatnonzero(plan.scratch >= last)
    if window is None:
        return _Part(0, 0, last, plan.scratch[nodes], plan.sees[:, nodes])
    at = plan.positions[:, None]
    first = min(max(0, int(at.max()) - window + 1), last)
    band = min(max(0, int(at.min()) - window + 1), first)
    edge = np.arange(band, first)
    sees = np.hstack([np.ones((len(at), len(edge)), np.bool_), plan.sees[:, nodes]])
    sees &= at - np.concatenate([edge, plan.position[nodes]]) < window
    return _Part(band, first, last, np.concatenate([edge, plan.scratch[nodes]]), sees)


def _num_shared(entry: Entry) -> int:
    """How many nodes lie in place on top of the committed context, one after the other, and are seen by every new row."""
    plan = entry.plan
    if plan.num_rows == len(plan.node) == 1:
        return int(plan.scratch[0] == plan.length)
    everywhere = plan.sees.all(0) & (plan.scratch == plan.position)
    depth = np.sort(plan.position[everywhere]) - plan.length
    return int((depth == np.arange(len(depth))).cumprod().sum())


def _all_nodes(entry: Entry, part: _Part) -> Bools:
    """bool[q, M]: what the rows see of all nodes of the tree, those in the prefix hidden."""
    sees = np.zeros(entry.plan.sees.shape, np.bool_)
    sees[:, entry.plan.scratch >= part.last] = part.sees
    return sees


def _padded(entries: Sequence[Entry], own: list[Ints], sees: list[Bools], num: int, width: int) -> Padded:
    """Cells of the sessions as cells of the storage; padding cells are hidden, padding rows see what row 0 sees."""
    cells = np.empty((len(entries), num), np.int64)
    visible = np.zeros((len(entries), width, num), np.bool_)
    for b, (entry, mine, seen) in enumerate(zip(entries, own, sees, strict=True)):
        cells[b, : len(mine)] = entry.table.cells(mine)
        cells[b, len(mine) :] = entry.table.cells(entry.plan.cells[:1])
        visible[b, : len(seen), : len(mine)] = seen
        visible[b, len(seen) :, : len(mine)] = seen[0]
    return Padded(torch.from_numpy(cells), torch.from_numpy(visible))
