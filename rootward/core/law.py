"""The law of one round, given the tree (where it stops, and what the bonus token is drawn from there), and the verdict drawn from it.

Each node v has one uniform random number U_v ("coin"), keyed by the node, so that the same tree gets the same verdict:

    traversal, block   the stop node is the first node in post-order with U_v < w(v) (`law.budget`), otherwise the root
    token              from the root, descend into the first child c with U_c < a(c) (`law.entry`); stop where there is none

The bonus token is argmax over y of log r(y) + g(y) with Gumbel noise g: a sample of the residual distribution r of
the stop node. The engine draws it by inverse distribution function from one uniform, unless the drafter knows the
noise (docs/decisions/0003); the law is the same.

Legend: N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

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


def stop_node(law: VerificationLaw, coins: ArrayLike) -> int:
    """The stop node. coins: float64[N] in [0, 1), one per node of the tree; that of the root is not used."""
    u = np.asarray(coins, dtype=np.float64)
    if u.shape != (len(law.tree),):
        raise ValueError(f"coins: shape {u.shape}; give ({len(law.tree)},), one per node")
    if law.algorithm in ("traversal", "block"):
        order = law.tree.post_order
        success = u[order] < law.budget[order]
        success[-1] = True
        return int(order[np.argmax(success)])
    if law.algorithm == "token":
        node = 0
        while (child := next((c for c in law.tree.children[node] if u[c] < law.entry[c]), None)) is not None:
            node = child
        return node
    raise ValueError(f"algorithm: {law.algorithm!r} has no verdict from one coin per node; use VerificationLaw.draw")


def bonus_token(row: ArrayLike, gumbel: ArrayLike) -> int:
    """A sample of the distribution `row` (float64[V]) by Gumbel noise float64[V]; the smallest token among equals, never one of mass 0."""
    mass = np.asarray(row, dtype=np.float64)
    if not mass.max() > 0.0:
        raise ValueError(f"row: largest mass {mass.max()}; give the residual distribution of the stop node")
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(mass) + np.asarray(gumbel, dtype=np.float64)))
