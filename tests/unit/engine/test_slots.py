"""Sessions over shared blocks: whatever happens, every session reads back its own text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.kv import blocks_needed

from rootward.engine.slots import Size, Slots, kept_rows
from rootward.errors import KvFull
from rootward.ports import COMMITTED, Rows

BLOCK = 4


class SlotsMachine(RuleBasedStateMachine):
    """A cell's content is the whole text down to it: what is shared, moved or given to another must be the right one."""

    @initialize(num_slots=st.integers(1, 4), extra=st.integers(0, 12))
    def start(self, num_slots: int, extra: int) -> None:
        size = Size.of(num_slots, 24, 12, BLOCK, 36 + BLOCK * extra)
        self.slots = Slots(size, 2, "weights")
        self.history: list[tuple[object, ...]] = [("",)]
        self.storage: dict[int, tuple[object, ...]] = {}
        self.texts: dict[int, tuple[object, ...]] = {}
        self.nodes: dict[int, dict[int, tuple[object, ...]]] = {}

    def cell(self, slot: int, own: int) -> int:
        return int(self.slots.session(slot).table.cells(np.array([own]))[0])

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=9), other_salt=st.booleans())
    def open(self, data: st.DataObject, more: list[int], other_salt: bool) -> None:
        """With a text that was committed once, or one like it; what is not held is forwarded if there is room."""
        salt, *known = data.draw(st.sampled_from(self.history))
        tokens = [*known[: data.draw(st.integers(0, len(known)))], *more][:22]
        salt = "other" if other_salt else salt
        if self.slots.num_free_slots == 0:
            with pytest.raises(RuntimeError, match="are taken"):
                self.slots.open()
            return
        slot = self.slots.open(tokens, salt=salt)
        held = self.slots.tree(slot).length
        assert held % BLOCK == 0
        assert held <= max(0, len(tokens) - 1)
        self.texts[slot], self.nodes[slot] = (salt, *tokens[:held]), {}
        rest = len(tokens) - held
        if rest and blocks_needed(self.slots, slot, rest) <= self.slots.pool.num_available:
            assert self._runs([Rows.chain(slot, 0, tokens[held:])], rest, False)
            self._commit(slot, rest - 1, False)

    @rule(data=st.data(), chain=st.booleans(), fails=st.booleans())
    def forward(self, data: st.DataObject, chain: bool, fails: bool) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.texts)), unique=True)) if self.texts else []
        slots = [slot for slot in slots if self.slots.tree(slot).length < 24]
        batch = [self.rows(data, slot, chain) for slot in slots if self.slots.tree(slot).num_free > 6]
        if not batch:
            return
        before = [(self.slots.tree(r.slot).num_uncommitted, len(self.slots.session(r.slot).table)) for r in batch]
        most = sum(blocks_needed(self.slots, rows.slot, len(rows.node)) for rows in batch)
        free = self.slots.pool.num_available
        if self._runs(batch, most, fails):
            return
        after = [(self.slots.tree(r.slot).num_uncommitted, len(self.slots.session(r.slot).table)) for r in batch]
        assert after == before
        assert fails or most > free

    def _runs(self, batch: list[Rows], most: int, fails: bool) -> bool:
        free = self.slots.pool.num_available
        try:
            with self.slots.placed(batch) as entries:
                assert free - self.slots.pool.num_available <= most
                if fails:
                    raise ZeroDivisionError
                for entry in entries:
                    self.write(entry.rows, entry.table.cells(entry.plan.cells).tolist())
        except (KvFull, ZeroDivisionError):
            return False
        return True

    def rows(self, data: st.DataObject, slot: int, chain: bool) -> Rows:
        known, num = [COMMITTED, *self.nodes[slot]], data.draw(st.integers(1, 6))
        first = max(known) + 1
        parents = []
        for i in range(num):
            parents.append(known[-1] if chain else data.draw(st.sampled_from(known)))
            known.append(first + i)
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=num, max_size=num))
        return Rows(slot, np.arange(first, first + num), np.array(parents), np.array(tokens))

    def write(self, rows: Rows, cells: list[int]) -> None:
        known = {COMMITTED: self.texts[rows.slot], **self.nodes[rows.slot]}
        for node, parent, token, cell in zip(
            rows.node.tolist(), rows.parent.tolist(), rows.token.tolist(), cells, strict=True
        ):
            known[node] = self.nodes[rows.slot][node] = self.storage[cell] = (*known[parent], token)

    @rule(data=st.data(), keep_below=st.booleans())
    def commit(self, data: st.DataObject, keep_below: bool) -> None:
        some = [slot for slot in self.nodes if self.nodes[slot]]
        if not some:
            return
        slot = data.draw(st.sampled_from(some))
        self._commit(slot, data.draw(st.sampled_from(sorted(self.nodes[slot]))), keep_below)

    def _commit(self, slot: int, node: int, keep_below: bool) -> None:
        text = self.nodes[slot][node]
        tree = self.slots.tree(slot)
        row = tree._row[node]
        below = {n for i, n in enumerate(tree._node.tolist()) if tree._ancestors[i, row] and n != node}
        moves = self.slots.commit_cells(slot, node, keep_below=keep_below)
        moved = [self.storage[cell] for cell in moves.source.tolist()]
        self.storage.update(zip(moves.target.tolist(), moved, strict=True))
        self.texts[slot] = text
        self.history.append(text)
        self.nodes[slot] = {n: t for n, t in self.nodes[slot].items() if keep_below and n in below}

    @rule(data=st.data(), closes=st.booleans())
    def end(self, data: st.DataObject, closes: bool) -> None:
        if not self.texts:
            return
        slot = data.draw(st.sampled_from(sorted(self.texts)))
        self.slots.release(slot)
        self.nodes[slot] = {}
        if closes:
            self.slots.close(slot)
            del self.texts[slot], self.nodes[slot]

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "slots"):
            return
        self.slots.check_idle()
        for slot, text in self.texts.items():
            assert self.slots.tree(slot).length == len(text) - 1
            for i in range(1, len(text)):
                assert self.storage[self.cell(slot, i - 1)] == text[: i + 1]
            tree = self.slots.tree(slot)
            for node, own in zip(tree._node.tolist(), tree._cell.tolist(), strict=True):
                assert self.storage[self.cell(slot, own)] == self.nodes[slot][node]


SlotsMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestSlots = SlotsMachine.TestCase


def test_a_batch_is_refused_as_a_whole() -> None:
    slots = Slots(Size.of(2, 16, 0, BLOCK, None), 5, "")
    a, b = slots.open(), slots.open()
    good = Rows.chain(a, 0, [1, 2])
    none = np.empty(0, np.int64)
    for bad, why in [
        (Rows.chain(a, 5, [1]), "repeat"),
        (Rows.chain(b, 0, [5]), "outside"),
        (Rows.chain(b, 0, [-1]), "outside"),
        (Rows(b, none, none, none), "at least one"),
        (Rows.chain(9, 0, [1]), "not open"),
        (Rows.chain(b, 0, [1] * 17), "full"),
    ]:
        with pytest.raises(ValueError, match=why), slots.placed([good, bad]):
            pass
    with pytest.raises(ValueError, match="empty"), slots.placed([]):
        pass
    for wrong in ([1, 1], [0], [3]):
        with pytest.raises(ValueError, match="num_logits"):
            kept_rows([good], wrong)
    assert slots.tree(a).num_uncommitted == slots.tree(b).num_uncommitted == 0
    with slots.placed([Rows.chain(b, 0, [1] * 16)]):
        pass
    slots.commit_cells(b, 15, keep_below=False)
    with pytest.raises(ValueError, match="context of 16"), slots.placed([Rows.chain(b, 0, [1])]):
        pass
    with pytest.raises(RuntimeError, match="all 2 are taken"):
        slots.open()
    slots.close(a)
    assert slots.num_free_slots == 1
    assert slots.open() == a


def test_one_session_at_its_longest_always_fits() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_tokens: 27 .* give at least 28"):
        Size.of(3, 20, 6, BLOCK, 27)
    assert Size.of(3, 20, 6, BLOCK, 30).num_blocks == 7
    assert Size.of(3, 20, 6, BLOCK, None).num_blocks == 21
