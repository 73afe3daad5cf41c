"""The slots of a model: which are taken, and the KV tree of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootward.engine.kv_tree import Ints, KvTree, Placement
from rootward.ports import Rows


class Slots:
    """`num_slots` KV trees of `num_cells` cells each. The lowest free slot goes first: slots in use stay together."""

    def __init__(self, num_slots: int, num_cells: int, max_positions: int, vocab_size: int):
        self.num_cells, self.max_positions, self.vocab_size = num_cells, max_positions, vocab_size
        self._trees: list[KvTree | None] = [None] * num_slots

    def __len__(self) -> int:
        return len(self._trees)

    @property
    def num_free(self) -> int:
        return sum(tree is None for tree in self._trees)

    def open(self) -> int:
        for slot, tree in enumerate(self._trees):
            if tree is None:
                self._trees[slot] = KvTree(self.num_cells, self.max_positions)
                return slot
        raise RuntimeError(f"slots: all {len(self._trees)} are taken; close one or load the model with more")

    def close(self, slot: int) -> None:
        self[slot].check()
        self._trees[slot] = None

    def __getitem__(self, slot: int) -> KvTree:
        tree = self._trees[slot] if 0 <= slot < len(self._trees) else None
        if tree is None:
            raise ValueError(f"slot: {slot} is not open; take one with open()")
        return tree

    def plan(self, batch: Sequence[Rows]) -> list[Placement]:
        """A placement per entry. ValueError on the first thing that is wrong; changes nothing."""
        if not batch:
            raise ValueError("batch: is empty; give at least one entry")
        slots = [rows.slot for rows in batch]
        if len(set(slots)) != len(slots):
            raise ValueError(f"batch: slots {slots} repeat; give each slot one entry")
        for rows in batch:
            self._check_tokens(rows)
        return [self[rows.slot].plan(rows.node, rows.parent) for rows in batch]

    def _check_tokens(self, rows: Rows) -> None:
        token: Ints = np.asarray(rows.token)
        if token.ndim != 1 or len(token) == 0 or len(token) != len(rows.node):
            raise ValueError(f"token: shape {token.shape} for {len(rows.node)} nodes; give one a node, at least one")
        if int(token.min()) < 0 or int(token.max()) >= self.vocab_size:
            raise ValueError(f"token: ids {int(token.min())}…{int(token.max())} are outside [0, {self.vocab_size})")

    def adopt(self, batch: Sequence[Rows], plans: Sequence[Placement]) -> None:
        for rows, plan in zip(batch, plans, strict=True):
            self[rows.slot].adopt(plan)

    def check(self) -> None:
        """The conservation law of every open slot."""
        for tree in self._trees:
            if tree is not None:
                tree.check()


def kept_rows(batch: Sequence[Rows], last_only: Sequence[bool] | None) -> list[range]:
    """Per entry the rows whose logits are wanted: all of them, or the last one."""
    if last_only is None:
        return [range(len(rows.node)) for rows in batch]
    if len(last_only) != len(batch):
        raise ValueError(f"last_only: {len(last_only)} entries for a batch of {len(batch)}; give one each")
    return [range(len(r.node) - 1 if last else 0, len(r.node)) for r, last in zip(batch, last_only, strict=True)]
