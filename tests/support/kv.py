"""Bounds of what a forward takes of the KV memory, worked out beside the engine."""

from __future__ import annotations

from rootward.engine.kv_tree import KvTree
from rootward.engine.slots import Slots


def max_end_with(tree: KvTree, num_rows: int) -> int:
    """Upper bound of `end` after `num_rows` new nodes, whatever their parents."""
    return max(tree.end, tree.length + tree.num_uncommitted + num_rows)


def blocks_needed(slots: Slots, slot: int, num_rows: int) -> int:
    """Upper bound of the new blocks that a forward of `num_rows` new nodes takes; exact for a chain."""
    session = slots.session(slot)
    return max(0, -(-max_end_with(session.tree, num_rows) // slots.block_size) - len(session.table))
