"""Slots of a model: each open slot is one session with a KV tree, a block table and the keys of its full blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from rootward.core.arrays import Ints
from rootward.engine.block_pool import BlockPool, BlockTable
from rootward.engine.kv_tree import KvTree, Moves, Placement
from rootward.engine.prefix_keys import chain, first_key, next_key
from rootward.errors import KvFull
from rootward.ports import Rows


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the KV memory.

    num_slots      most sessions at a time
    num_cells      most cells of a session: its context and a tree
    max_positions  length of the context
    num_blocks     blocks of all sessions, of block_size cells each
    """

    num_slots: int
    num_cells: int
    max_positions: int
    num_blocks: int
    block_size: int

    @staticmethod
    def of(num_slots: int, max_positions: int, tree_room: int, block_size: int, kv_cache_tokens: int | None) -> Size:
        """ValueError if the longest session would not fit: preempting all others could not let it finish."""
        cells = max_positions + tree_room
        longest = -(-cells // block_size)  # blocks of a session at its longest
        blocks = num_slots * longest if kv_cache_tokens is None else kv_cache_tokens // block_size
        if blocks < longest:
            raise ValueError(
                f"kv_cache_tokens: {kv_cache_tokens} is less than one session of {cells} tokens takes (context and tree); "
                f"give at least {longest * block_size} or lower the longest context"
            )
        return Size(num_slots, cells, max_positions, blocks, block_size)

    @property
    def storage(self) -> int:
        """Cells of all blocks. The storage has one more, the trash cell, to which padding rows are written."""
        return self.num_blocks * self.block_size


@dataclass(slots=True, eq=False)
class SlotState:
    """State of an open slot. `key`: prefix key of its last full committed block; `rest`: committed tokens after that block."""

    tree: KvTree
    table: BlockTable
    key: bytes
    rest: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One session's part of a forward: its rows, their placement, and the session's block table."""

    rows: Rows
    plan: Placement
    table: BlockTable

    def path(self, row: int) -> Ints:
        """Indices of the uncommitted nodes that a row sees, in the order of positions, its own the last."""
        seen = np.flatnonzero(self.plan.sees[row])
        return seen[np.argsort(self.plan.position[seen])]

    def cells_seen(self, row: int, *, start: int = 0) -> Ints:
        """Cells of the storage that a row sees, from position `start` of the committed text on, in the order of positions."""
        committed = np.arange(start, self.plan.length)
        return self.table.cells(np.concatenate([committed, self.plan.scratch[self.path(row)]]))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory in bytes. `bytes_per_token`: K and V of a token in all layers, measured by the load probe; 0 without a KV cache."""

    weights: int
    bytes_per_token: int
    size: Size

    def __str__(self) -> str:
        size = self.size
        weights = f"weights {_mib(self.weights)}"
        if not self.bytes_per_token:
            return f"memory plan: {weights}, no KV cache"
        return (
            f"memory plan: {weights}, KV cache {_mib(self.bytes_per_token * size.storage)} = {size.num_blocks} blocks "
            f"of {size.block_size} tokens of {self.bytes_per_token / 1024:.1f} KiB; {size.storage} tokens fit, "
            f"{size.num_slots} sessions at their longest take {size.num_slots * size.num_cells}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


class Slots:
    """The open slots of a model; every `ports.LanguageModel` has such a table. identity: name of the weights, part of every block key."""

    def __init__(self, size: Size, vocab_size: int, identity: str):
        self.size, self.vocab_size, self.identity = size, vocab_size, identity
        self.pool = BlockPool(size.num_blocks)
        self._sessions: list[SlotState | None] = [None] * size.num_slots

    @property
    def num_free_slots(self) -> int:
        return sum(session is None for session in self._sessions)

    @property
    def block_size(self) -> int:
        return self.size.block_size

    @property
    def num_blocks(self) -> int:
        return self.size.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_available

    @property
    def evicted_age_s(self) -> float:
        return self.pool.evicted_age_s

    def open(self, tokens: Sequence[int] = (), *, salt: str = "") -> int:
        """Open the lowest free slot, with the full blocks of this text that are cached, but never with its last token, whose logits are
        needed. RuntimeError if all slots are taken."""
        for slot, session in enumerate(self._sessions):
            if session is None:
                self._sessions[slot] = self._started(tokens, salt)
                return slot
        raise RuntimeError(f"slots: all {self.size.num_slots} are taken; close one or load the model with more")

    def _started(self, tokens: Sequence[int], salt: str) -> SlotState:
        size, first = self.size, first_key(self.identity, salt)
        keys = chain(first, tokens, size.block_size, max(0, len(tokens) - 1) // size.block_size)
        blocks = self.pool.share(keys)
        table = BlockTable(size.block_size, -(-size.num_cells // size.block_size))
        table.extend(blocks)
        tree = KvTree(size.num_cells, size.max_positions, length=table.num_cells)
        return SlotState(tree, table, keys[len(blocks) - 1] if blocks else first, [])

    def close(self, slot: int) -> None:
        session = self.session(slot)
        session.tree.check()
        self.pool.give_back(session.table.cut(0))
        self._sessions[slot] = None

    def session(self, slot: int) -> SlotState:
        session = self._sessions[slot] if 0 <= slot < len(self._sessions) else None
        if session is None:
            raise ValueError(f"slot: {slot} is not open; take one with open()")
        return session

    def tree(self, slot: int) -> KvTree:
        """The KV tree of a slot, for reading."""
        return self.session(slot).tree

    def length(self, slot: int) -> int:
        return self.session(slot).tree.length

    def _blocks(self, num_cells: int) -> int:
        return -(-num_cells // self.size.block_size)

    @contextmanager
    def placed(self, batch: Sequence[Rows]) -> Iterator[list[Entry]]:
        """Placements of a batch, adopted at the end of the `with` body. After ValueError, KvFull or an error of the body nothing has
        changed."""
        entries = self._entries(batch)
        sessions = [self.session(rows.slot) for rows in batch]
        missing = [max(0, self._blocks(e.plan.end) - len(e.table)) for e in entries]
        if sum(missing) > self.pool.num_available:
            raise KvFull(sum(missing), self.pool.num_available)
        try:
            for rows, session, num in zip(batch, sessions, missing, strict=True):
                if num:
                    session.table.extend(self.pool.take(num, self._next_block(rows.slot, session.table)))
            yield entries
            for session, entry in zip(sessions, entries, strict=True):
                session.tree.adopt(entry.plan)
        finally:
            for session in sessions:
                self._trim(session)

    def reserve(self, slot: int, num_cells: int) -> None:
        """Hold blocks for so many cells behind the text of a slot without uncommitted nodes, until `append`. KvFull: there are too few."""
        session = self.session(slot)
        missing = self._blocks(session.tree.length + num_cells) - len(session.table)
        if missing > 0:
            session.table.extend(self.pool.take(missing, self._next_block(slot, session.table)))

    def append(self, slot: int, num_tokens: int) -> None:
        """Commit the next tokens, whose K and V are in their cells, and give back what `reserve` holds beyond them. The blocks are not
        shared with other sessions."""
        session = self.session(slot)
        session.tree.append(num_tokens)
        self._trim(session)

    def _next_block(self, slot: int, table: BlockTable) -> int:
        """Number of the preferred next block: that after the table's last one. The first blocks of tables are far apart."""
        return int(table.blocks[-1]) + 1 if len(table) else slot * self.size.num_blocks // self.size.num_slots

    def _trim(self, session: SlotState) -> None:
        self.pool.give_back(session.table.cut(self._blocks(session.tree.end)))

    def commit_cells(self, slot: int, node: int, *, keep_below: bool) -> Moves:
        """Commit the path to a node. Returns the copies between cells of the storage, which must be made before its next write."""
        session = self.session(slot)
        moves = session.tree.commit(node, keep_below=keep_below)
        if len(moves.source):
            moves = replace(moves, source=session.table.cells(moves.source), target=session.table.cells(moves.target))
        self._trim(session)
        self._register(session, moves.token.tolist())
        return moves

    def _register(self, session: SlotState, tokens: list[int]) -> None:
        """Register blocks that have become full, so that other sessions can share them."""
        size = self.size.block_size
        session.rest += tokens
        full = len(session.rest) // size
        first = session.tree.length // size - full
        for i in range(full):
            session.key = next_key(session.key, session.rest[i * size : (i + 1) * size])
            self.pool.register(int(session.table.blocks[first + i]), session.key)
        del session.rest[: full * size]

    def release(self, slot: int, keep: Collection[int] = ()) -> None:
        session = self.session(slot)
        session.tree.release(keep)
        self._trim(session)

    def _entries(self, batch: Sequence[Rows]) -> list[Entry]:
        """Placements of a batch. ValueError if an entry is invalid."""
        if not batch:
            raise ValueError("batch: is empty; give at least one entry")
        slots = [rows.slot for rows in batch]
        if len(set(slots)) != len(slots):
            raise ValueError(f"batch: slots {slots} repeat; give each slot one entry")
        entries = []
        for rows in batch:
            self._check_tokens(rows)
            session = self.session(rows.slot)
            entries.append(Entry(rows, session.tree.plan(rows.node, rows.parent, rows.token), session.table))
        return entries

    def _check_tokens(self, rows: Rows) -> None:
        token: Ints = np.asarray(rows.token)
        if token.ndim != 1 or len(token) == 0 or len(token) != len(rows.node):
            raise ValueError(f"token: shape {token.shape} for {len(rows.node)} nodes; give one a node, at least one")
        if int(token.min()) < 0 or int(token.max()) >= self.vocab_size:
            raise ValueError(f"token: ids {int(token.min())}…{int(token.max())} are outside [0, {self.vocab_size})")

    def check_idle(self) -> None:
        """RuntimeError unless every cell and block is accounted for exactly once (`KvTree.check`, `BlockPool.check`)."""
        open_ = [session for session in self._sessions if session is not None]
        for session in open_:
            session.tree.check()
            if len(session.table) != self._blocks(session.tree.end):
                raise RuntimeError(f"KV blocks leaked: {len(session.table)} held for {session.tree.end} cells")
        self.pool.check([session.table.blocks.tolist() for session in open_])


def kept_rows(batch: Sequence[Rows], num_logits: Sequence[int] | None) -> list[range]:
    """Rows of each entry whose logits are wanted: its last `num_logits`, or all of them for None. ValueError if out of range."""
    if num_logits is None:
        return [range(len(rows.node)) for rows in batch]
    if len(num_logits) != len(batch):
        raise ValueError(f"num_logits: {len(num_logits)} entries for a batch of {len(batch)}; give one each")
    sizes = [len(rows.node) for rows in batch]
    for num, size in zip(num_logits, sizes, strict=True):
        if not 1 <= num <= size:
            raise ValueError(f"num_logits: {num} of {size} rows; ask for one at least, and for no more than there are")
    return [range(size - num, size) for num, size in zip(num_logits, sizes, strict=True)]
