"""The KV tree of one slot, as bookkeeping: which token's K/V lies in which cell. Pure numpy; knows nothing of tensors.

A *cell* is a physical place in the slot's row of the cache. A node is written to any free cell; its logical position is
separate. A row sees the committed cells, its ancestors' cells and its own. Committing a path only renames its cells, a
rejected node only gives its own back: nothing is ever copied.

Conservation law: free + committed + uncommitted = num_cells (`check`).

Legend: Q new rows, M uncommitted nodes once the new rows are in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rootward.ports import COMMITTED

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NONE: Ints = np.empty(0, np.int64)

FREE, HELD, TENTATIVE = 0, 1, 2  # what a cell holds: nothing, a committed token, an uncommitted node


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where new rows go and what they see. A plan until `KvTree.adopt` is called with it.

    node       int64[M]    ids, older nodes first, the Q new rows last
    scratch    int64[M]    their cells
    position   int64[M]    their logical positions
    ancestors  bool[M, M]  row sees column (itself included) among the uncommitted nodes
    """

    num_rows: int
    node: Ints
    scratch: Ints
    position: Ints
    ancestors: Bools
    end: int  # every cell in use is below this one
    num_holes: int  # freed cells taken; the other rows lie at the end
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
        """bool[Q, M]: which scratch cells each new row sees, besides every committed one."""
        return self.ancestors[len(self.ancestors) - self.num_rows :]


class KvTree:
    """A committed chain and, below its end, uncommitted nodes.

    `max_positions` is the length of the context. Cells beyond it leave room for the trees on top of it; a tree may hang
    over the end of the context, but nothing grows from a committed end that has reached it.
    """

    def __init__(self, num_cells: int, max_positions: int | None = None):
        self.num_cells = num_cells
        self.max_positions = num_cells if max_positions is None else max_positions
        self._length = 0
        self._holes: list[int] = []  # free cells below `_end`, ascending
        self._end = 0  # cells from here on are free
        self._high_water = 0
        self._state = np.zeros(num_cells, dtype=np.int8)
        self._version = 0
        self._keep(NONE, NONE, NONE, np.empty((0, 0), np.bool_))

    def _keep(self, node: Ints, cell: Ints, position: Ints, ancestors: Bools) -> None:
        self._node, self._cell, self._position, self._ancestors = node, cell, position, ancestors
        self._row = {n: i for i, n in enumerate(node.tolist())}

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._length

    @property
    def num_uncommitted(self) -> int:
        return len(self._node)

    @property
    def num_free(self) -> int:
        return self.num_cells - self._end + len(self._holes)

    @property
    def end(self) -> int:
        """Every cell in use is below it."""
        return self._end

    @property
    def high_water(self) -> int:
        """Every cell that was ever in use is below it."""
        return self._high_water

    def __contains__(self, node: int) -> bool:
        """Whether an uncommitted node of this id is held."""
        return node in self._row

    def plan(self, node: Ints, parent: Ints) -> Placement:
        """Where new rows would go. ValueError if they cannot be placed; changes nothing."""
        up, position = self._lineage(node, parent)
        new = len(up)
        cells, num_holes = self._lowest_free(new)
        return Placement(
            num_rows=new,
            node=_joined(self._node, np.asarray(node, dtype=np.int64)),
            scratch=_joined(self._cell, cells),
            position=_joined(self._position, position),
            ancestors=_grown(self._ancestors, up),
            end=self._end + new - num_holes,
            num_holes=num_holes,
            version=self._version,
        )

    def adopt(self, plan: Placement) -> None:
        """Make a plan come true: its rows are uncommitted nodes from now on."""
        if plan.version != self._version:
            raise RuntimeError("placement: planned for an older state of this tree; plan again")
        del self._holes[: plan.num_holes]
        self._end = plan.end
        self._high_water = max(self._high_water, plan.end)
        self._state[plan.cells] = TENTATIVE
        self._keep(plan.node, plan.scratch, plan.position, plan.ancestors)
        self._version += 1

    def place(self, node: Ints, parent: Ints) -> Placement:
        """`plan` and `adopt` in one."""
        plan = self.plan(node, parent)
        self.adopt(plan)
        return plan

    def commit(self, node: int, *, keep_below: bool) -> Ints:
        """Commit the path down to `node`; returns its cells, top first. Other nodes go; those below `node` may stay."""
        if node not in self._row:
            raise ValueError(f"node: {node} is not an uncommitted node of this slot; commit a node that was forwarded")
        row = self._row[node]
        path = np.flatnonzero(self._ancestors[row])
        path = path[np.argsort(self._position[path])]
        stays = self._ancestors[:, row].copy() if keep_below else np.zeros(len(self._node), np.bool_)
        stays[row] = False
        goes = ~stays
        goes[path] = False
        cells = self._cell[path]
        self._state[cells] = HELD
        self._length += len(path)
        self._free(self._cell[goes])
        self._thin(np.flatnonzero(stays))
        return cells

    def release(self) -> None:
        """Free every uncommitted node."""
        self._free(self._cell)
        self._thin(NONE)

    def check(self) -> None:
        """RuntimeError unless every cell is free, committed or uncommitted, exactly one of them."""
        counts = (self.num_free, self._length, self.num_uncommitted)
        states = tuple(int((self._state == s).sum()) for s in (FREE, HELD, TENTATIVE))
        sound = (
            counts == states
            and sum(counts) == self.num_cells
            and len(set(self._holes)) == len(self._holes)
            and bool((self._state[self._holes] == FREE).all())
            and not self._state[self._end :].any()
            and bool((self._state[self._cell] == TENTATIVE).all())
            and len(set(self._cell.tolist())) == len(self._cell)
        )
        if not sound:
            names = "free, committed, uncommitted"
            raise RuntimeError(f"KV cells leaked: {names} = {counts}, by cell {states}, of {self.num_cells}")

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

    def _lowest_free(self, num: int) -> tuple[Ints, int]:
        """The lowest free cells (the high-water mark stays near the number of tokens); how many of them are holes."""
        if num > self.num_free:
            raise ValueError(f"rows: {num} need cells, {self.num_free} of {self.num_cells} are free; the slot is full")
        holes = self._holes[:num]
        tail = range(self._end, self._end + num - len(holes))
        return np.array([*holes, *tail], dtype=np.int64), len(holes)

    def _free(self, cells: Ints) -> None:
        self._state[cells] = FREE
        self._holes = sorted(self._holes + cells.tolist())
        while self._holes and self._holes[-1] == self._end - 1:
            self._holes.pop()
            self._end -= 1

    def _thin(self, rows: Ints) -> None:
        """Keep these uncommitted nodes only. Positions are absolute, so the survivors' stay as they are."""
        among = self._ancestors[rows[:, None], rows]
        self._keep(self._node[rows], self._cell[rows], self._position[rows], among)
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
