"""The blocks of one session, in order: from its own cells to cells of the storage.

Cell i of the session is cell i mod block_size of its block i div block_size. Blocks that follow one another in the storage are kept as
runs, so that what reads many cells can read few long pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootward.core.arrays import Ints

Extent = tuple[int, int]  # first cell of the storage, number of cells


class BlockTable:
    def __init__(self, block_size: int, max_blocks: int):
        self.block_size = block_size
        self._block = np.zeros(max_blocks, dtype=np.int64)
        self._num = 0
        self._runs: list[
            list[int]
        ] = []  # index of the first block in the table, the block, how many follow one another

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
        for block in blocks:
            if self._runs and self._runs[-1][1] + self._runs[-1][2] == block:
                self._runs[-1][2] += 1
            else:
                self._runs.append([self._num, block, 1])
            self._block[self._num] = block
            self._num += 1

    def cut(self, num_blocks: int) -> list[int]:
        """Keep so many blocks; returns the others, deepest first."""
        gone: list[int] = self._block[num_blocks : self._num][::-1].tolist()
        self._num -= len(gone)
        while self._runs and self._runs[-1][0] >= self._num:
            self._runs.pop()
        if self._runs:
            self._runs[-1][2] = self._num - self._runs[-1][0]
        return gone

    def cells(self, own: Ints) -> Ints:
        """Cells of the storage where these cells of the session lie."""
        block, inside = np.divmod(own, self.block_size)
        found: Ints = self._block[block] * self.block_size + inside
        return found

    def extents(self, start: int, stop: int) -> list[Extent]:
        """Where the session's cells from `start` to `stop` lie, as few pieces in order."""
        size, found = self.block_size, []
        for index, block, num in self._runs:
            first, last = max(start, index * size), min(stop, (index + num) * size)
            if first < last:
                found.append((block * size + first - index * size, last - first))
        return found
