"""The KV tree of one session: the assignment of tokens to KV cells. Pure numpy, without tensors or blocks.

Cells are numbered within the session; its block table maps them to physical cells. **The committed token at position i is in cell i.**
A new node gets the cell of its own position if that is free, otherwise the lowest free cell. The first node of each depth therefore already
has its final cell, and a commit copies only the other nodes of its path. A node that stays below the committed node is copied too if its
cell is needed for a committed token. Committed tokens are never copied.

Legend: Q new rows, M uncommitted nodes including the new rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rootward.core.arrays import Bools, Ints
from rootward.ports import COMMITTED

NONE: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Cells, positions and visible nodes of new rows. `KvTree.adopt` applies it; until then the tree is unchanged.

    node       int64[M]    ids of the uncommitted nodes, the Q new rows last
    token      int64[M]    their tokens
    scratch    int64[M]    their cells before a commit
    position   int64[M]    their logical positions
    ancestors  bool[M, M]  [i, j]: node j is node i or one of its ancestors
    """

    num_rows: int
    length: int  # committed tokens
    node: Ints
    token: Ints
    scratch: Ints
    position: Ints
    ancestors: Bools
    end: int  # one past the highest cell in use
    version: int  # version of the tree that it applies to

    @property
    def cells(self) -> Ints:
        """int64[Q]: cells of the new rows."""
        return self.scratch[len(self.scratch) - self.num_rows :]

    @property
    def positions(self) -> Ints:
        """int64[Q]: logical positions of the new rows."""
        return self.position[len(self.position) - self.num_rows :]

    @property
    def sees(self) -> Bools:
        """bool[Q, M]: the uncommitted nodes that each new row attends to, in addition to all committed tokens."""
        return self.ancestors[len(self.ancestors) - self.num_rows :]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Copies that a commit requires: cell source[i] to cell target[i], all reads before all writes. `token`: the committed tokens."""

    token: Ints
    source: Ints
    target: Ints


class KvTree:
    """A committed chain with uncommitted nodes below its last token.

    `max_positions` is the length of the context; further cells are for trees. A tree may extend past the end of the context, but once the
    committed tokens fill the context no node is added.
    """

    def __init__(self, num_cells: int, max_positions: int | None = None, *, length: int = 0):
        """The first `length` cells hold committed tokens."""
        self.num_cells = num_cells
        self.max_positions = num_cells if max_positions is None else max_positions
        self._length = length
        self._version = 0
        self._set_nodes(NONE, NONE, NONE, NONE, np.empty((0, 0), np.bool_))

    def _set_nodes(self, node: Ints, token: Ints, cell: Ints, position: Ints, ancestors: Bools) -> None:
        self._node, self._token, self._cell, self._position, self._ancestors = node, token, cell, position, ancestors
        self._row = {n: i for i, n in enumerate(node.tolist())}
        self._end = max(self._length, int(cell.max()) + 1) if len(cell) else self._length

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._length

    @property
    def num_uncommitted(self) -> int:
        return len(self._node)

    @property
    def num_free(self) -> int:
        return self.num_cells - self._length - len(self._node)

    @property
    def end(self) -> int:
        """One past the highest cell in use."""
        return self._end

    def __contains__(self, node: int) -> bool:
        """Whether `node` is an uncommitted node."""
        return node in self._row

    def plan(self, node: Ints, parent: Ints, token: Ints) -> Placement:
        """The placement of new rows, without applying it. ValueError if they cannot be placed."""
        parent_row, position = self._lineage(node, parent)
        if len(position) > self.num_free:
            raise ValueError(
                f"rows: {len(position)} need cells, {self.num_free} of {self.num_cells} are free; the slot is full"
            )
        cells = self._cells_for(position, set(self._cell.tolist()))
        return Placement(
            num_rows=len(parent_row),
            length=self._length,
            node=np.concatenate([self._node, np.asarray(node, dtype=np.int64)]),
            token=np.concatenate([self._token, np.asarray(token, dtype=np.int64)]),
            scratch=np.concatenate([self._cell, cells]),
            position=np.concatenate([self._position, position]),
            ancestors=_with_new_rows(self._ancestors, parent_row),
            end=max(self._end, int(cells.max()) + 1),
            version=self._version,
        )

    def adopt(self, plan: Placement) -> None:
        """Apply a placement: its rows become uncommitted nodes."""
        if plan.version != self._version:
            raise RuntimeError("placement: the tree has changed since it was planned; plan again")
        self._set_nodes(plan.node, plan.token, plan.scratch, plan.position, plan.ancestors)
        self._version += 1

    def append(self, num: int) -> None:
        """Commit the next `num` cells, which hold tokens. There are no uncommitted nodes."""
        if len(self._node) or self._length + num > self.max_positions:
            raise ValueError(
                f"num: {num} behind {self._length} tokens and {len(self._node)} nodes; commit or release those"
            )
        self._length += num
        self._end = self._length
        self._version += 1

    def commit(self, node: int, *, keep_below: bool) -> Moves:
        """Commit the path to `node`. Other nodes are freed; descendants of `node` are kept if `keep_below`."""
        if node not in self._row:
            raise ValueError(f"node: {node} is not an uncommitted node of this slot; commit a node that was forwarded")
        row = self._row[node]
        path = np.flatnonzero(self._ancestors[row])  # parents come first
        token, source, target = self._token[path], self._cell[path], self._position[path]
        self._length += len(path)
        if keep_below:
            stays = self._ancestors[:, row].copy()
            stays[row] = False
            below = np.flatnonzero(stays)
            cell = self._cells_for(self._cell[below], set())
            source, target = np.concatenate([source, self._cell[below]]), np.concatenate([target, cell])
            self._retain(below, cell)
        else:
            self._set_nodes(NONE, NONE, NONE, NONE, np.empty((0, 0), np.bool_))
            self._version += 1
        moved = source != target
        return Moves(token, source[moved], target[moved])

    def release(self, keep: Iterable[int] = ()) -> None:
        """Free all uncommitted nodes except `keep`. ValueError if `keep` contains a node without its parent."""
        rows = np.array(sorted(self._row[n] for n in keep if n in self._row), dtype=np.int64)
        above = self._ancestors[rows].any(0)
        if not np.isin(np.flatnonzero(above), rows).all():
            raise ValueError("keep: contains a node without its parent; keep whole paths")
        self._retain(rows, self._cell[rows])

    def check(self) -> None:
        """RuntimeError if two tokens share a cell or a cell is out of range."""
        own = set(self._cell.tolist())
        sound = (
            len(own) == len(self._cell) == len(self._row)
            and all(self._length <= cell < self._end <= self.num_cells for cell in own)
            and self.num_free >= 0
        )
        if not sound:
            raise RuntimeError(
                f"KV cells leaked: {self._length} committed, uncommitted in {sorted(self._cell.tolist())}"
            )

    def _lineage(self, node: Ints, parent: Ints) -> tuple[list[int], Ints]:
        """(index of the parent of each new row, -1 for the last committed token; its logical position)."""
        nodes, parents = np.asarray(node).tolist(), np.asarray(parent).tolist()
        if self._length >= self.max_positions:
            raise ValueError(f"position: {self._length} is outside a context of {self.max_positions} tokens; end here")
        if len(nodes) != len(parents):
            raise ValueError(f"parent: {len(parents)} entries for {len(nodes)} nodes; give one each")
        old = self._position.tolist()
        fresh: dict[int, int] = {}
        parent_rows: list[int] = []
        for i, (n, p) in enumerate(zip(nodes, parents, strict=True)):
            if n < 0 or n in self._row or n in fresh:
                raise ValueError(f"node: {n} is negative or in use; give each uncommitted node an id of its own")
            above = -1 if p == COMMITTED else fresh.get(p, self._row.get(p))
            if above is None:
                raise ValueError(f"parent: {p} of node {n} is unknown; forward parents first")
            parent_rows.append(above)
            old.append(old[above] + 1 if above >= 0 else self._length)
            fresh[n] = len(self._node) + i
        return parent_rows, np.array(old[len(self._node) :], dtype=np.int64)

    def _cells_for(self, preferred: Ints, used: set[int]) -> Ints:
        """int64[n]: each preferred cell if it is neither used nor committed, otherwise the lowest free one. `used` is updated."""
        cells: list[int | None] = []
        for cell in preferred.tolist():
            is_free = self._length <= cell < self.num_cells and cell not in used
            cells.append(cell if is_free else None)
            if is_free:
                used.add(cell)
        free = (cell for cell in itertools.count(self._length) if cell not in used)
        return np.array([next(free) if cell is None else cell for cell in cells], dtype=np.int64)

    def _retain(self, rows: Ints, cell: Ints) -> None:
        """Keep only these uncommitted nodes, in these cells. Positions are absolute and do not change."""
        ancestors = self._ancestors[rows[:, None], rows]
        self._set_nodes(self._node[rows], self._token[rows], cell, self._position[rows], ancestors)
        self._version += 1


def _with_new_rows(ancestors: Bools, parent_row: list[int]) -> Bools:
    """bool[M, M]: the ancestor matrix with new rows added. parent_row: index of each new row's parent, -1 for the last committed token."""
    old = len(ancestors)
    matrix = np.zeros((old + len(parent_row), old + len(parent_row)), dtype=np.bool_)
    matrix[:old, :old] = ancestors
    for row, parent in enumerate(parent_row, start=old):
        if parent >= 0:
            matrix[row] = matrix[parent]
        matrix[row, row] = True
    return matrix
