"""The KV tree against a model that keeps parents in a dict and cells in sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rootward.engine.kv_tree import KvTree, Placement
from rootward.engine.slots import Slots, kept_rows
from rootward.ports import COMMITTED, Rows


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class KvTreeMachine(RuleBasedStateMachine):
    """Every operation in any order; after each, every cell belongs to exactly one of free, committed, uncommitted."""

    @initialize(num_cells=st.integers(4, 40), spare=st.integers(0, 8))
    def start(self, num_cells: int, spare: int) -> None:
        self.tree = KvTree(num_cells, max(1, num_cells - spare))
        self.committed: list[int] = []
        self.parent: dict[int, int] = {}
        self.cell: dict[int, int] = {}
        self.next_node = 0

    def path(self, node: int) -> list[int]:
        """The uncommitted nodes from the top down to `node`."""
        above = [] if self.parent[node] == COMMITTED else self.path(self.parent[node])
        return [*above, node]

    def snapshot(self) -> tuple[object, ...]:
        tree = self.tree
        return (tree.length, tree.num_free, tree.num_uncommitted, tree.end, tree._node.tolist(), tree._state.tolist())

    @rule(data=st.data(), num=st.integers(1, 9), chain=st.booleans())
    def place(self, data: st.DataObject, num: int, chain: bool) -> None:
        new = [self.next_node + i for i in range(num)]
        parents = []
        for i in range(num):
            known = [COMMITTED, *self.parent, *new[:i]]
            parents.append(new[i - 1] if chain and i else data.draw(st.sampled_from(known)))
        free = sorted(set(range(self.tree.num_cells)) - set(self.committed) - set(self.cell.values()))
        before = self.snapshot()
        if num > len(free) or len(self.committed) >= self.tree.max_positions:
            with pytest.raises(ValueError):
                self.tree.place(ints(*new), ints(*parents))
            assert self.snapshot() == before
            return
        placement = self.tree.place(ints(*new), ints(*parents))
        assert placement.cells.tolist() == free[:num]
        self.parent.update(zip(new, parents, strict=True))
        self.cell.update(zip(new, placement.cells.tolist(), strict=True))
        self.next_node += num
        self._check_rows(new, placement)

    def _check_rows(self, new: list[int], placement: Placement) -> None:
        assert sorted(placement.scratch.tolist()) == sorted(self.cell.values())
        for row, node in enumerate(new):
            path = self.path(node)
            assert set(placement.scratch[placement.sees[row]].tolist()) == {self.cell[n] for n in path}
            assert placement.positions[row] == len(self.committed) + len(path) - 1

    @precondition(lambda self: self.parent)
    @rule(data=st.data(), keep_below=st.booleans())
    def commit(self, data: st.DataObject, keep_below: bool) -> None:
        node = data.draw(st.sampled_from(sorted(self.parent)))
        path = self.path(node)
        cells = self.tree.commit(node, keep_below=keep_below)
        assert cells.tolist() == [self.cell[n] for n in path]
        self.committed += cells.tolist()
        stays = [n for n in self.parent if keep_below and n != node and node in self.path(n)]
        self.parent = {n: COMMITTED if self.parent[n] == node else self.parent[n] for n in stays}
        self.cell = {n: self.cell[n] for n in stays}

    @rule()
    def release(self) -> None:
        self.tree.release()
        self.parent, self.cell = {}, {}

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
            self.tree.place(*bad)
        with pytest.raises(ValueError, match="not an uncommitted node"):
            self.tree.commit(far, keep_below=True)
        assert self.snapshot() == before

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "tree"):
            return
        tree = self.tree
        tree.check()
        assert (tree.length, tree.num_uncommitted) == (len(self.committed), len(self.cell))
        assert tree.num_free + tree.length + tree.num_uncommitted == tree.num_cells
        used = [*self.committed, *self.cell.values()]
        assert len(set(used)) == len(used)
        assert tree.end == max(used, default=-1) + 1 <= tree.high_water


KvTreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestKvTree = KvTreeMachine.TestCase


def test_plan_changes_nothing_and_goes_stale() -> None:
    tree = KvTree(8)
    plan = tree.plan(ints(1, 2), ints(COMMITTED, 1))
    assert (tree.num_free, tree.num_uncommitted, tree.end) == (8, 0, 0)
    tree.place(ints(7), ints(COMMITTED))
    with pytest.raises(RuntimeError, match="plan again"):
        tree.adopt(plan)


def test_a_chunk_of_prefill_is_a_triangle() -> None:
    tree = KvTree(600)
    first = tree.place(ints(0), ints(COMMITTED))
    chunk = Rows.chain(0, 1, range(512))
    chunk.parent[0] = 0
    placement = tree.place(chunk.node, chunk.parent)
    assert first.sees.tolist() == [[True]]
    np.testing.assert_array_equal(placement.sees, np.tri(513, dtype=bool)[1:])
    assert placement.positions.tolist() == list(range(1, 513))


def test_check_finds_a_leak() -> None:
    tree = KvTree(8)
    tree.place(ints(1, 2), ints(COMMITTED, 1))
    tree._state[1] = 0
    with pytest.raises(RuntimeError, match="leaked"):
        tree.check()


def test_high_water_mark_stays_near_the_number_of_tokens() -> None:
    """Rounds of a tree and a commit: holes are filled before new ground is taken."""
    rng = np.random.default_rng(0)
    tree, width = KvTree(4096), 24
    for _ in range(200):
        parents = [COMMITTED, *(int(rng.integers(0, i)) for i in range(1, width))]
        tree.place(np.arange(width), ints(*parents))
        tree.commit(int(rng.integers(0, width)), keep_below=False)
        assert tree.end <= tree.length + width
    tree.check()


def test_slots_are_refused_as_a_whole() -> None:
    slots = Slots(2, 16, 16, vocab_size=5)
    a, b = slots.open(), slots.open()
    good = Rows.chain(a, 0, [1, 2])
    for bad, why in [
        (Rows.chain(a, 5, [1]), "repeat"),
        (Rows.chain(b, 0, [5]), "outside"),
        (Rows.chain(b, 0, [-1]), "outside"),
        (Rows(b, ints(), ints(), ints()), "at least one"),
        (Rows.chain(9, 0, [1]), "not open"),
        (Rows.chain(b, 0, [1] * 17), "full"),
    ]:
        with pytest.raises(ValueError, match=why):
            slots.plan([good, bad])
    with pytest.raises(ValueError, match="empty"):
        slots.plan([])
    with pytest.raises(ValueError, match="last_only"):
        kept_rows([good], [True, False])
    assert slots[a].num_uncommitted == slots[b].num_uncommitted == 0
    slots[b].place(np.arange(16), np.arange(16) - 1)
    slots[b].commit(15, keep_below=False)
    with pytest.raises(ValueError, match="context of 16"):
        slots.plan([Rows.chain(b, 0, [1])])
    with pytest.raises(RuntimeError, match="all 2 are taken"):
        slots.open()
    slots.close(a)
    assert slots.num_free == 1
    assert slots.open() == a
