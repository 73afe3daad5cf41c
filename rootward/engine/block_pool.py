"""KV memory as blocks of equal size: reference counts, the prefix cache, and block tables. No tensors here.

A block is *held* by the sessions whose tables contain it (one reference each), *idle* if no session holds it but its content can be found
by key, or *free*. Idle blocks are evicted when blocks are needed, least recently used first. A block with a key is never written again, so
it is shared without a copy.

Invariant: held + idle + free = num_blocks, and the references of a block are the tables that contain it (`check`).
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rootward.core.arrays import Ints
from rootward.errors import KvFull

EVICT_AT_ONCE = 16  # idle blocks evicted together, so that new blocks are in longer runs


class BlockPool:
    def __init__(self, num_blocks: int, now: Callable[[], float] = time.monotonic):
        """now: a clock in seconds."""
        self.num_blocks = num_blocks
        self._now = now
        self._evicted_until = -math.inf  # when the last evicted block became idle
        self._free, self._num_free = np.ones(num_blocks, dtype=np.bool_), num_blocks
        self._references = np.zeros(num_blocks, dtype=np.int64)
        self._idle: OrderedDict[int, float] = OrderedDict()  # when it became idle; least recent first
        self._by_key: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `take` can return: free and idle ones."""
        return self._num_free + len(self._idle)

    @property
    def evicted_age_s(self) -> float:
        """Seconds: content used more recently than this is still cached; inf: nothing has been evicted."""
        return self._now() - self._evicted_until

    def take(self, num: int, start: int) -> list[int]:
        """Hold `num` blocks, preferably `start` and those after it. KvFull, without a change, if there are too few."""
        if num > self.num_available:
            raise KvFull(num, self.num_available)
        if num > self._num_free:
            self._evict(max(num - self._num_free, min(EVICT_AT_ONCE, len(self._idle))))
        blocks = self._next_free(num, start)
        self._free[blocks] = False
        self._num_free -= num
        self._references[blocks] = 1
        return blocks

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """Hold and return the cached blocks of the longest prefix of these keys."""
        blocks: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def register(self, block: int, key: bytes) -> None:
        """Make a held, full block findable by this key, unless another block already is."""
        if key not in self._by_key and block not in self._key:
            self._by_key[key], self._key[block] = block, key

    def give_back(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each. Give the blocks of a table last one first, so that the end of a text is evicted before its prefix."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key:
                self._idle[block] = self._now()
            else:
                self._set_free(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """RuntimeError unless the invariant holds. tables: those of all sessions."""
        named = Counter(block for table in tables for block in table)
        counted = {block: int(n) for block, n in enumerate(self._references) if n}
        free = np.flatnonzero(self._free).tolist()
        parts = (len(named), len(self._idle), len(free))
        everywhere = sorted([*named, *self._idle, *free]) == list(range(self.num_blocks))
        known = {block: key for key, block in self._by_key.items()} == self._key
        findable = set(self._idle) <= set(self._key) and not set(free) & set(self._key)
        if not (named == counted and everywhere and known and findable and len(free) == self._num_free):
            raise RuntimeError(
                f"KV blocks leaked: held, idle, free = {parts} of {self.num_blocks}; references {counted}"
            )

    def _evict(self, num: int) -> None:
        for _ in range(num):
            block, self._evicted_until = self._idle.popitem(last=False)
            del self._by_key[self._key.pop(block)]
            self._set_free(block)

    def _set_free(self, block: int) -> None:
        self._free[block] = True
        self._num_free += 1

    def _next_free(self, num: int, start: int) -> list[int]:
        """The first free blocks from `start` on, then from 0 on, so that a growing table stays contiguous where possible."""
        if num == 1 and start < self.num_blocks and self._free[start]:
            return [start]
        free = np.flatnonzero(self._free)
        blocks: list[int] = np.roll(free, -int(np.searchsorted(free, start)))[:num].tolist()
        return blocks


class BlockTable:
    """The blocks of one session, in order: cell i of the session is cell i mod block_size of its block i div block_size."""

    def __init__(self, block_size: int, max_blocks: int):
        self.block_size = block_size
        self._block = np.zeros(max_blocks, dtype=np.int64)
        self._num = 0

    def __len__(self) -> int:
        return self._num

    @property
    def num_cells(self) -> int:
        return self._num * self.block_size

    @property
    def blocks(self) -> Ints:
        """int64[N]."""
        return self._block[: self._num]

    def extend(self, blocks: Sequence[int]) -> None:
        self._block[self._num : self._num + len(blocks)] = blocks
        self._num += len(blocks)

    def cut(self, num_blocks: int) -> list[int]:
        """Keep the first `num_blocks` blocks; returns the others, last first."""
        gone: list[int] = self._block[num_blocks : self._num][::-1].tolist()
        self._num -= len(gone)
        return gone

    def cells(self, own: Ints) -> Ints:
        """int64[n]: cells of the storage of these cells of the session."""
        block, inside = np.divmod(own, self.block_size)
        found: Ints = self._block[block] * self.block_size + inside
        return found
