"""KV memory as blocks of equal size: who holds which, which may be found again by its content, which is free. No tensors here.

A block is *held* by the sessions whose tables name it (one reference each), *idle* if nobody holds it but its content can be found by
key, or *free*. Idle blocks are as good as free: the one idle longest is forgotten first. A block with a key is never written again, so
sharing it needs no copy.

Conservation law: held + idle + free = num_blocks, and the references of a block are the tables that name it (`check`).
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from rootward.core.arrays import Ints
from rootward.errors import KvFull

EVICT_AT_ONCE = 16  # idle blocks forgotten together: what replaces them lies in longer runs


class BlockPool:
    def __init__(self, num_blocks: int, now: Callable[[], float] = time.monotonic):
        """now: a clock in seconds."""
        self.num_blocks = num_blocks
        self._now = now
        self._evicted_until = -math.inf  # when the last forgotten block became idle
        self._free = np.ones(num_blocks, dtype=np.bool_)
        self._num_free = num_blocks
        self._references = np.zeros(num_blocks, dtype=np.int64)
        self._idle: OrderedDict[int, float] = OrderedDict()  # since when; idle longest first
        self._by_key: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free and idle ones."""
        return self._num_free + len(self._idle)

    @property
    def evicted_age_s(self) -> float:
        """Content that was in use within so many seconds is still held, older content may be forgotten; inf: nothing was forgotten yet."""
        return self._now() - self._evicted_until

    def take(self, num: int, start: int) -> list[int]:
        """Hold `num` blocks, preferably `start` and those that follow. KvFull if there are too few; nothing changes then."""
        if num > self.num_available:
            raise KvFull(num, self.num_available)
        if num > self._num_free:
            self._forget(max(num - self._num_free, min(EVICT_AT_ONCE, len(self._idle))))
        blocks = self._next_free(num, start)
        self._free[blocks] = False
        self._num_free -= num
        self._references[blocks] = 1
        return blocks

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the blocks of the longest known prefix of these keys; returns them."""
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
        """The held block is full for good and found by this key from now on; unless another block is already."""
        if key not in self._by_key and block not in self._key:
            self._by_key[key], self._key[block] = block, key

    def give_back(self, blocks: Iterable[int]) -> None:
        """Drop one reference each. Give a table deepest block first: a prefix is useful without its end, not the reverse."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key:
                self._idle[block] = self._now()
            else:
                self._free[block] = True
                self._num_free += 1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """RuntimeError unless the conservation law holds for these tables, all there are."""
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

    def _forget(self, num: int) -> None:
        for _ in range(num):
            block, self._evicted_until = self._idle.popitem(last=False)
            del self._by_key[self._key.pop(block)]
            self._free[block] = True
        self._num_free += num

    def _next_free(self, num: int, start: int) -> list[int]:
        """The first free blocks from `start` on, then from 0 on: a growing table stays in one piece while its neighbours leave room."""
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
        """Keep so many blocks; returns the others, deepest first."""
        gone: list[int] = self._block[num_blocks : self._num][::-1].tolist()
        self._num -= len(gone)
        return gone

    def cells(self, own: Ints) -> Ints:
        """Cells of the storage where these cells of the session lie."""
        block, inside = np.divmod(own, self.block_size)
        found: Ints = self._block[block] * self.block_size + inside
        return found
