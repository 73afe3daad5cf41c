"""The KV tree of one session, as bookkeeping: which token's K/V lies in which cell. Pure numpy; knows nothing of tensors or blocks.

Cells are counted within the session (its block table says where they lie). **The committed token at position i lies in cell i.** A new
node takes the cell of its own position when that is unclaimed, otherwise the lowest unclaimed one: the first node of each depth is in
place already, and committing moves only the others of its path. What else is needed of a moved cell's old holder, one that stays below
the committed node, moves too; the context never does.

Legend: Q new rows, M uncommitted nodes once the new rows are in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rootward.core.arrays import Bools, Ints
from rootward.ports import COMMITTED

NONE: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where new rows go and what they see. A plan until `KvTree.adopt` is called with it.

    node       int64[M]    ids, older nodes first, the Q new rows last
    token      int64[M]    their tokens
    scratch    int64[M]    their cells
    position   int64[M]    their logical positions
    ancestors  bool[M, M]  row sees column (itself included) among the uncommitted nodes
    """

    num_rows: int
    length: int  # committed tokens
    node: Ints
    token: Ints
    scratch: Ints
    position: Ints
    ancestors: Bools
    end: int  # every cell in use is below this one
    version: int  # of the tree this was planned for

    @property
    def cells(self) -> Ints:
        """int64[Q]: where the new rows are written."""
        return self.scratch[len(self.scratch) - self.num_rows :]

    @property
    def positions(self) -> Ints:
        """int64[Q]: logical positions of the new rows."""
        return self.position[len(self.position) - self.num_rows :]

    @property
    def sees(self) -> Bools:
        """bool[Q, M]: which uncommitted nodes each new row sees, besides everything committed."""
        return self.ancestors[len(self.ancestors) - self.num_rows :]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """What a commit asks for: the content of cell source[i] goes to target[i], all at once. `token`: what was committed."""

    token: Ints
    source: Ints
    target: Ints


class KvTree:
    """A committed chain and, below its end, uncommitted nodes.

    `max_positions` is the length of the context. Cells beyond it leave room for the trees on top of it; a tree may hang
    over the end of the context, but nothing grows from a committed end that has reached it.
    """

    def __init__(self, num_cells: int, max_positions: int | None = None, *, length: int = 0):
        """`length` committed tokens are held already."""
        self.num_cells = num_cells
        self.max_positions = num_cells if max_positions is None else max_positions
        self._length = length
        self._version = 0
        self._keep(NONE, NONE, NONE, NONE, np.empty((0, 0), np.bool_))

    def _keep(self, node: Ints, token: Ints, cell: Ints, position: Ints, ancestors: Bools) -> None:
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
        """Every cell in use is below it."""
        return self._end

    def __contains__(self, node: int) -> bool:
        """Whether an uncommitted node of this id is held."""
        return node in self._row

    def end_with(self, num_rows: int) -> int:
        """What `end` can become at most with so many new nodes, wherever they hang."""
        return max(self._end, self._length + len(self._node) + num_rows)

    def plan(self, node: Ints, parent: Ints, token: Ints) -> Placement:
        """Where new rows would go. ValueError if they cannot be placed; changes nothing."""
        up, position = self._lineage(node, parent)
        cells = self._cells_for(position)
        return Placement(
            num_rows=len(up),
            length=self._length,
            node=_joined(self._node, np.asarray(node, dtype=np.int64)),
            token=_joined(self._token, np.asarray(token, dtype=np.int64)),
            scratch=_joined(self._cell, cells),
            position=_joined(self._position, position),
            ancestors=_grown(self._ancestors, up),
            end=max(self._end, int(cells.max()) + 1),
            version=self._version,
        )

    def adopt(self, plan: Placement) -> None:
        """Make a plan come true: its rows are uncommitted nodes from now on."""
        if plan.version != self._version:
            raise RuntimeError("placement: planned for an older state of this tree; plan again")
        self._keep(plan.node, plan.token, plan.scratch, plan.position, plan.ancestors)
        self._version += 1

    def commit(self, node: int, *, keep_below: bool) -> Moves:
        """Commit the path down to `node`. Other nodes go; those below `node` may stay."""
        if node not in self._row:
            raise ValueError(f"node: {node} is not an uncommitted node of this slot; commit a node that was forwarded")
        row = self._row[node]
        path = np.flatnonzero(self._ancestors[row])
        path = path[np.argsort(self._position[path])]
        stays = self._ancestors[:, row].copy() if keep_below else np.zeros(len(self._node), np.bool_)
        stays[row] = False
        token, source, target = self._token[path], self._cell[path], self._position[path]
        self._length += len(path)
        below = np.flatnonzero(stays)
        cell = self._made_way(below)
        source, target = np.concatenate([source, self._cell[below]]), np.concatenate([target, cell])
        self._thin(below, cell)
        moved = source != target
        return Moves(token, source[moved], target[moved])

    def release(self, keep: Iterable[int] = ()) -> None:
        """Free every uncommitted node but those to keep. ValueError for one without its parent."""
        rows = np.array(sorted(self._row[n] for n in keep if n in self._row), dtype=np.int64)
        above = self._ancestors[rows].any(0)
        if not np.isin(np.flatnonzero(above), rows).all():
            raise ValueError("keep: holds a node without its parent; keep whole paths")
        self._thin(rows, self._cell[rows])

    def check(self) -> None:
        """RuntimeError unless committed tokens and uncommitted nodes hold a cell of their own each."""
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
        """Per new row the row of its parent (-1: the committed end) and its logical position."""
        nodes, parents = np.asarray(node).tolist(), np.asarray(parent).tolist()
        if self._length >= self.max_positions:
            raise ValueError(f"position: {self._length} is outside a context of {self.max_positions} tokens; end here")
        if len(nodes) != len(parents):
            raise ValueError(f"parent: {len(parents)} entries for {len(nodes)} nodes; give one each")
        old = self._position.tolist()
        fresh: dict[int, int] = {}
        up: list[int] = []
        for i, (n, p) in enumerate(zip(nodes, parents, strict=True)):
            if n < 0 or n in self._row or n in fresh:
                raise ValueError(f"node: {n} is negative or already held; give each uncommitted node an id of its own")
            above = -1 if p == COMMITTED else fresh.get(p, self._row.get(p))
            if above is None:
                raise ValueError(f"parent: {p} of node {n} is not held; forward parents first")
            up.append(above)
            old.append(old[above] + 1 if above >= 0 else self._length)
            fresh[n] = len(self._node) + i
        return up, np.array(old[len(self._node) :], dtype=np.int64)

    def _cells_for(self, position: Ints) -> Ints:
        """A cell for each new node: that of its position for the first to ask, the lowest unclaimed ones for the others."""
        if len(position) > self.num_free:
            raise ValueError(
                f"rows: {len(position)} need cells, {self.num_free} of {self.num_cells} are free; the slot is full"
            )
        claimed = set(self._cell.tolist())
        cells: list[int] = []
        for p in position.tolist():
            in_place = p not in claimed and p < self.num_cells
            cells.append(p if in_place else -1)
            if in_place:
                claimed.add(p)
        lowest = self._length
        for i, cell in enumerate(cells):
            if cell < 0:
                while lowest in claimed:
                    lowest += 1
                cells[i] = lowest
                claimed.add(lowest)
        return np.array(cells, dtype=np.int64)

    def _made_way(self, below: Ints) -> Ints:
        """Cells of the nodes that stay: their own, unless the committed tokens need it."""
        cell = self._cell[below]
        if not len(cell) or int(cell.min()) >= self._length:
            return cell
        claimed = {c for c in cell.tolist() if c >= self._length}
        lowest, found = self._length, []
        for c in cell.tolist():
            if c < self._length:
                while lowest in claimed:
                    lowest += 1
                c = lowest
                claimed.add(c)
            found.append(c)
        return np.array(found, dtype=np.int64)

    def _thin(self, rows: Ints, cell: Ints) -> None:
        """Keep these uncommitted nodes only, in these cells. Positions are absolute, so the survivors' stay as they are."""
        among = self._ancestors[rows[:, None], rows]
        self._keep(self._node[rows], self._token[rows], cell, self._position[rows], among)
        self._version += 1


def _joined(old: Ints, new: Ints) -> Ints:
    return np.concatenate([old, new]) if len(old) else new


def _grown(ancestors: Bools, up: list[int]) -> Bools:
    """bool[M, M]: the ancestor matrix with new rows below it; `up` holds the row of each one's parent, -1 for none.

    Among the new rows a set of ancestors is an integer, one bit a row: one Python operation per row, whatever its depth.
    """
    old, new = len(ancestors), len(up)
    bits: list[int] = []
    hook: list[int] = []  # the old row each new one hangs below, -1 for none
    for i, above in enumerate(up):
        inside = above - old
        bits.append(1 << i | (bits[inside] if inside >= 0 else 0))
        hook.append(hook[inside] if inside >= 0 else above)
    size = (new + 7) // 8
    packed = np.frombuffer(b"".join([b.to_bytes(size, "little") for b in bits]), dtype=np.uint8).reshape(new, size)
    among_new = np.unpackbits(packed, axis=1, count=new, bitorder="little").view(np.bool_)
    if not old:
        return among_new
    grown = np.zeros((old + new, old + new), dtype=np.bool_)
    grown[:old, :old] = ancestors
    grown[old:, old:] = among_new
    hooks = np.array(hook)
    grown[old:, :old] = ancestors[hooks] & (hooks >= 0)[:, None]
    return grown
