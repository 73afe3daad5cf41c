"""The law of one round, given the tree: where it stops, and what the bonus token is drawn from there.

Legend: N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rootward.core.arrays import Floats, read_only
from rootward.core.tree import TokenTree


class Verdict(NamedTuple):
    """The outcome of a round: the path to `stop` is committed, then the token `bonus`."""

    stop: int
    bonus: int


@dataclass(frozen=True, eq=False)
class VerificationLaw:
    """What a verification algorithm does with a tree, before any coin is tossed.

    stop      float64[N]     probability that the round stops at node i; sums to 1
    residual  float64[N, V]  law of the bonus token at node i (where stop is 0: finite, otherwise unspecified)
    entry     float64[N]     acceptance budget of node i when it is reached, its children not yet tried; 1 at the root
    budget    float64[N]     w(i) once all children of i have failed; 1 at the root (token-level: 1 everywhere)
    """

    algorithm: str
    tree: TokenTree
    stop: Floats
    residual: Floats
    entry: Floats
    budget: Floats

    def __post_init__(self) -> None:
        for array in (self.stop, self.residual, self.entry, self.budget):
            read_only(array)

    @property
    def block_efficiency(self) -> float:
        """Expected tokens of the round, the bonus token included: 1 + Σ stop · depth."""
        return 1.0 + float(self.stop @ self.tree.depth)

    def bonus_row(self, node: int) -> Floats:
        """float64[V]: the residual distribution at one node."""
        row: Floats = self.residual[node]
        return row

    def draw(self, u_stop: float, u_bonus: float) -> Verdict:
        """One verdict from two uniforms in [0, 1), by inverse distribution functions (any algorithm)."""
        stop = inverse(self.stop, u_stop)
        return Verdict(stop, inverse(self.residual[stop], u_bonus))


def inverse(law: Floats, u: float) -> int:
    """The smallest index whose cumulative mass exceeds u times the whole; never an index without mass."""
    cumulative = np.cumsum(law)
    total = float(cumulative[-1])
    index = int(np.searchsorted(cumulative, u * total, side="right"))
    return index if index < len(law) else int(np.searchsorted(cumulative, total, side="left"))
