"""The blocks of one session, in order: from its own cells to cells of the storage.

Cell i of the session is cell i mod block_size of its block i div block_size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rootward.core.arrays import Ints


class BlockTable:
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
