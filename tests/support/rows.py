"""Several children of one draft distribution, drawn as growth draws them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rootward.core.distribution import DraftDistribution


def draw_children(row: DraftDistribution, num_children: int, words: Iterable[int], bits: int = 64) -> np.ndarray:
    """int64[m]: tokens drawn without replacement, in draw order; fewer if the support is smaller."""
    source, tokens = iter(words.tolist() if isinstance(words, np.ndarray) else words), []
    for _ in range(min(num_children, len(row))):
        if tokens:
            row = row.without(tokens[-1:])
        tokens.append(row.draw(source, bits))
    return np.array(tokens, dtype=np.int64)
