"""Token streams cut into training windows."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from training.corpus import SourceFile


def token_stream(tokenizer: PreTrainedTokenizerFast, files: Iterable[SourceFile]) -> NDArray[np.int64]:
    """All files as one row of token ids, each preceded by the end-of-text token."""
    parts: list[int] = []
    for file in files:
        parts.append(int(tokenizer.eos_token_id))
        parts.extend(tokenizer(file.text, verbose=False).input_ids)
    return np.asarray(parts, dtype=np.int64)


class Windows:
    """Endless batches of windows `[batch, length + 1]`, each epoch a new shuffle at a new offset.

    One window overlaps the next by a token, so that every token is predicted once an epoch.
    """

    def __init__(self, stream: NDArray[np.int64], seed: int) -> None:
        self._stream = stream
        self._rng = np.random.default_rng(seed)
        self._starts: list[int] = []
        self._length = 0

    def next(self, batch: int, length: int) -> torch.Tensor:
        """The next `batch` windows of `length` inputs and as many labels."""
        if length != self._length:
            self._length, self._starts = length, []
        while len(self._starts) < batch:
            self._starts += self._epoch()
        starts = [self._starts.pop(0) for _ in range(batch)]
        return torch.from_numpy(np.stack([self._stream[s : s + length + 1] for s in starts]))

    def _epoch(self) -> list[int]:
        offset = int(self._rng.integers(self._length))
        starts = np.arange(offset, len(self._stream) - self._length, self._length)
        return self._rng.permutation(starts).tolist()


def fixed_windows(stream: NDArray[np.int64], count: int, length: int) -> torch.Tensor:
    """`count` windows `[count, length + 1]` spread evenly over the stream: the same ones at every evaluation."""
    starts = np.linspace(0, len(stream) - length - 1, count).astype(int)
    return torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]))


def chunks(rows: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Split along the first axis, so that logits of a whole evaluation set never lie in memory at once."""
    return iter(rows.split(size))
