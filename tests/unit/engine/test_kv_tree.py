"""The KV tree against a model that keeps parents in a dict, and a storage that remembers what was written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.kv import max_end_with

from rootward.engine.kv_tree import KvTree, Moves, Placement
from rootward.ports import COMMITTED, Rows


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def place(tree: KvTree, node: np.ndarray, parent: np.ndarray) -> Placement:
    plan = tree.plan(node, parent, node % 7)
    tree.adopt(plan)
    return plan


class KvTreeMachine(RuleBasedStateMachine):
    """Every operation in any order; after each, every token lies where the rules say. A node's content is its id."""

    @initialize(num_cells=st.integers(4, 40), spare=st.integers(0, 8), held=st.integers(0, 3))
    def start(self, num_cells: int, spare: int, held: int) -> None:
        self.tree = KvTree(num_cells, max(1, num_cells - spare), length=held)
        self.committed = [-5 - i for i in range(held)]
        self.storage = dict(enumerate(self.committed))
        self.parent: dict[int, int] = {}
        self.next_node = 0

    def path(self, node: int) -> list[int]:
        """The uncommitted nodes from the top down to `node`."""
        above = [] if self.parent[node] == COMMITTED else self.path(self.parent[node])
        return [*above, node]

    def snapshot(self) -> tuple[object, ...]:
        tree = self.tree
        return (tree.length, tree.num_free, tree.num_uncommitted, tree.end, tree._node.tolist(), tree._cell.tolist())

    @rule(data=st.data(), num=st.integers(1, 4), chain=st.booleans())
    def place(self, data: st.DataObject, num: int, chain: bool) -> None:
        new = [self.next_node + i for i in range(num)]
        parents = []
        for i in range(num):
            known = [COMMITTED, *self.parent, *new[:i]]
            parents.append(new[i - 1] if chain and i else data.draw(st.sampled_from(known)))
        before, most = self.snapshot(), max_end_with(self.tree, num)
        if num > self.tree.num_free or len(self.committed) >= self.tree.max_positions:
            with pytest.raises(ValueError):
                place(self.tree, ints(*new), ints(*parents))
            assert self.snapshot() == before
            return
        placement = place(self.tree, ints(*new), ints(*parents))
        assert self.tree.end == placement.end <= most
        self.parent.update(zip(new, parents, strict=True))
        self._check_cells(new, placement, set(self.storage))
        self.storage.update(zip(placement.cells.tolist(), new, strict=True))
        self.next_node += num
        self._check_rows(new, placement)

    def _check_cells(self, new: list[int], placement: Placement, held: set[int]) -> None:
        """The first of each position is in place if it can be, and nothing is written that was held."""
        cells = placement.cells.tolist()
        assert len(set(cells)) == len(cells)
        assert not set(cells) & held
        assert max(cells) < self.tree.num_cells
        first: dict[int, int] = {}
        for position, cell in zip(placement.positions.tolist(), cells, strict=True):
            first.setdefault(position, cell)
        assert all(cell == at or at in held or at >= self.tree.num_cells for at, cell in first.items())

    def _check_rows(self, new: list[int], placement: Placement) -> None:
        assert placement.token.tolist() == [node % 7 for node in placement.node]
        for row, node in enumerate(new):
            path = self.path(node)
            assert {self.storage[cell] for cell in placement.scratch[placement.sees[row]].tolist()} == set(path)
            assert placement.positions[row] == len(self.committed) + len(path) - 1

    @precondition(lambda self: self.parent)
    @rule(data=st.data(), keep_below=st.booleans(), one=st.booleans())
    def commit(self, data: st.DataObject, keep_below: bool, one: bool) -> None:
        """Of any node; or, as living trees do, of one token, with what is below it."""
        some = [n for n, parent in self.parent.items() if parent == COMMITTED or not one]
        node, keep_below = data.draw(st.sampled_from(some)), keep_below or one
        path = self.path(node)
        stays = [n for n in self.parent if keep_below and n != node and node in self.path(n)]
        moves = self.tree.commit(node, keep_below=keep_below)
        assert moves.token.tolist() == [n % 7 for n in path]
        assert len(moves.source) <= len(path) + len(stays)
        self._move(moves)
        self.committed += path
        self.parent = {n: COMMITTED if self.parent[n] == node else self.parent[n] for n in stays}

    def _move(self, moves: Moves) -> None:
        assert len(set(moves.target.tolist())) == len(moves.target)
        assert (moves.source != moves.target).all()
        moved = {t: self.storage[s] for s, t in zip(moves.source.tolist(), moves.target.tolist(), strict=True)}
        self.storage.update(moved)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """All of it, or all that is not on the way to some nodes."""
        keep: set[int] = set()
        for node in data.draw(st.sets(st.sampled_from(sorted(self.parent)))) if self.parent else ():
            while node != COMMITTED and node not in keep:
                keep.add(node)
                node = self.parent[node]
        self.tree.release(keep)
        self.parent = {n: p for n, p in self.parent.items() if n in keep}

    @rule(kind=st.sampled_from(["unknown parent", "own parent", "negative", "repeated", "held", "ragged"]))
    def refuse(self, kind: str) -> None:
        new, far = self.next_node, self.next_node + 1000
        held = next(iter(self.parent), new)
        bad = {
            "unknown parent": (ints(new), ints(far)),
            "own parent": (ints(new), ints(new)),
            "negative": (ints(-1), ints(COMMITTED)),
            "repeated": (ints(new, new), ints(COMMITTED, COMMITTED)),
            "held": (ints(held, held), ints(COMMITTED, COMMITTED)),
            "ragged": (ints(new, new + 1), ints(COMMITTED)),
        }[kind]
        before = self.snapshot()
        with pytest.raises(ValueError):
            place(self.tree, *bad)
        with pytest.raises(ValueError, match="not an uncommitted node"):
            self.tree.commit(far, keep_below=True)
        assert self.snapshot() == before

    @invariant()
    def in_order(self) -> None:
        """The committed token at position i lies in cell i; every node in a cell of its own beyond."""
        if not hasattr(self, "tree"):
            return
        tree = self.tree
        tree.check()
        assert (tree.length, tree.num_uncommitted) == (len(self.committed), len(self.parent))
        assert [self.storage[i] for i in range(tree.length)] == self.committed
        assert [self.storage[cell] for cell in tree._cell.tolist()] == tree._node.tolist()
        assert tree.num_free + tree.length + tree.num_uncommitted == tree.num_cells
        used = {*range(tree.length), *tree._cell.tolist()}
        assert tree.end == max(used, default=-1) + 1
        self.storage = {cell: node for cell, node in self.storage.items() if cell in used}


KvTreeMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestKvTree = KvTreeMachine.TestCase


def test_plan_changes_nothing_and_goes_stale() -> None:
    tree = KvTree(8)
    plan = tree.plan(ints(1, 2), ints(COMMITTED, 1), ints(0, 0))
    assert (tree.num_free, tree.num_uncommitted, tree.end) == (8, 0, 0)
    place(tree, ints(7), ints(COMMITTED))
    with pytest.raises(RuntimeError, match="plan again"):
        tree.adopt(plan)


def test_a_chunk_of_prefill_is_a_triangle() -> None:
    tree = KvTree(600)
    first = place(tree, ints(0), ints(COMMITTED))
    chunk = Rows.chain(0, 1, range(512))
    chunk.parent[0] = 0
    placement = place(tree, chunk.node, chunk.parent)
    assert first.sees.tolist() == [[True]]
    np.testing.assert_array_equal(placement.sees, np.tri(513, dtype=bool)[1:])
    assert placement.positions.tolist() == placement.cells.tolist() == list(range(1, 513))
    assert len(tree.commit(512, keep_below=False).source) == 0


def test_a_likeliest_path_drawn_first_is_never_moved() -> None:
    """Root, its first child, and the first child of that are in place; a sibling is not."""
    tree = KvTree(64, length=20)
    place(tree, ints(0, 1, 2, 3, 4), ints(COMMITTED, 0, 0, 1, 2))
    assert tree._cell.tolist() == [20, 21, 23, 22, 24]
    moves = tree.commit(3, keep_below=False)
    assert len(moves.source) == 0
    place(tree, ints(0, 1, 2, 3, 4), ints(COMMITTED, 0, 0, 1, 2))
    moves = tree.commit(4, keep_below=False)
    assert (moves.source.tolist(), moves.target.tolist()) == ([26, 27], [24, 25])


def test_a_kept_node_makes_way() -> None:
    """Node 3 took a cell that had become free; the committed path needs it: the two change places."""
    tree = KvTree(64)
    place(tree, ints(0, 1), ints(COMMITTED, COMMITTED))
    place(tree, ints(2), ints(1))
    assert tree._cell.tolist() == [0, 1, 2]
    assert tree.commit(1, keep_below=True).source.tolist() == [1]
    place(tree, ints(3), ints(2))
    assert tree._cell.tolist() == [2, 1]
    moves = tree.commit(2, keep_below=True)
    assert dict(zip(moves.source.tolist(), moves.target.tolist(), strict=True)) == {2: 1, 1: 2}
    assert tree._cell.tolist() == [2]


def test_check_finds_a_leak() -> None:
    tree = KvTree(8)
    place(tree, ints(1, 2), ints(COMMITTED, 1))
    tree._cell[1] = 0
    with pytest.raises(RuntimeError, match="leaked"):
        tree.check()
