"""Acceptance by rank and depth, learned from past rounds (algorithms.md, section 10).

The *mass* of a node is the probability that the round stops in its subtree. The child of rank r of a node v is offered
what v has left, and takes a share of it:

    offered(v, r) = mass(v) − Σ_{j<r} mass(child j of v)        acceptance(r, d) = Σ mass(child r) / Σ offered(v, r)

both sums over the places of rank r and depth d of past rounds, older rounds counting less. The mass a node has on
average over the draws below and after it follows from the entry budgets a of a verdict, without a coin or a draw more
than it takes to reach the node. Under traversal a budget already contains its ancestors' budgets, under token-level
verification it does not:

    traversal, block   mass(c) = a(c) · Π (1 − a(s)) over the earlier siblings s of c and of all its ancestors
    token              mass(c) = mass(parent) · a(c) · Π (1 − a(s)) over the earlier siblings s of c

So one-step ratios min(1, p/q), which underrate depth under traversal, play no part. A score made of these acceptances
looks at ranks, depths and past rounds only: growth by it is non-anticipating.

Legend: N nodes, D depths, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Floats
from rootward.core.law import VerificationLaw
from rootward.core.tree import TokenTree
from rootward.core.verification.sparse import SparseLaw

LEAST, MOST = 0.01, 0.99  # no place is hopeless or certain


class Calibration:
    """Exponentially decayed means of acceptance by (rank, depth), pulled towards a prior.

    prior     float, or float[D, R] by (depth − 1, rank): acceptance before anything was seen; the last row and column
              stand for all that is deeper or of larger rank
    strength  how many fully offered places the prior is worth
    decay     what a round counts for after one more round
    """

    def __init__(
        self,
        prior: ArrayLike = ((0.7, 0.2),),
        *,
        strength: float = 8.0,
        decay: float = 0.98,
        max_depth: int = 32,
        max_rank: int = 8,
    ) -> None:
        first = np.atleast_2d(np.asarray(prior, dtype=np.float64))
        if first.ndim != 2 or not ((first > 0.0) & (first < 1.0)).all():
            raise ValueError(f"prior: shape {first.shape}; give one acceptance in (0, 1), or one per depth and rank")
        if not (strength > 0.0 and 0.0 < decay <= 1.0 and min(max_depth, max_rank) >= 1):
            raise ValueError(f"strength, decay, max_depth, max_rank: {strength}, {decay}, {max_depth}, {max_rank}")
        depths, ranks = (
            np.minimum(np.arange(n), m - 1) for n, m in zip((max_depth, max_rank), first.shape, strict=True)
        )
        self.prior_DR: Floats = first[np.ix_(depths, ranks)]
        self.strength, self.decay = strength, decay
        self.taken_DR, self.offered_DR = np.zeros((2, max_depth, max_rank))

    def acceptance(self, rank: int, depth: int) -> float:
        """Acceptance of the child of this rank (0 = tried first) at this depth (1 = below the root)."""
        d, r = self._cell(rank, depth)
        taken, prior = float(self.taken_DR[d, r]), float(self.prior_DR[d, r])
        offered = max(float(self.offered_DR[d, r]), taken)  # of a few places the sum may come out too small
        return min(max((taken + self.strength * prior) / (offered + self.strength), LEAST), MOST)

    def table(self) -> Floats:
        """float64[D, R]: acceptance by depth − 1 and rank, as `drafting.sequoia_shape` takes it."""
        D, R = self.prior_DR.shape
        return np.array([[self.acceptance(r, d + 1) for r in range(R)] for d in range(D)])

    def learn(self, law: VerificationLaw | SparseLaw) -> None:
        """One more round, from the entry budgets of its law."""
        self.learn_masses(law.tree, entry_masses(law))

    def learn_stop(self, tree: TokenTree, stop: int) -> None:
        """One more round of which only the stop node is known: what matching tells, and a drafter of its commits."""
        self.learn_masses(tree, tree.ancestors[stop].astype(np.float64))

    def learn_masses(self, tree: TokenTree, mass: ArrayLike) -> None:
        """One more round. mass float64[N]: probability that the round stops in the subtree of each node."""
        self.taken_DR *= self.decay
        self.offered_DR *= self.decay
        for rank, depth, taken, offered in places(tree, np.asarray(mass, dtype=np.float64)):
            cell = self._cell(rank, depth)
            self.taken_DR[cell] += taken
            self.offered_DR[cell] += offered

    def _cell(self, rank: int, depth: int) -> tuple[int, int]:
        D, R = self.prior_DR.shape
        return min(depth, D) - 1, min(rank, R - 1)


def entry_masses(law: VerificationLaw | SparseLaw) -> Floats:
    """float64[N]: mass of every node, averaged over what is drawn below and after it."""
    if law.algorithm not in ("traversal", "block", "token"):
        raise ValueError(f"algorithm: {law.algorithm!r} has no entry budgets to learn from; use learn_stop")
    cumulative = law.algorithm != "token"
    mass, turn = np.ones(len(law.tree)), np.ones(len(law.tree))  # turn: probability that all before a node has failed
    for node, family in enumerate(law.tree.children):
        here = float(turn[node] if cumulative else mass[node])
        for child in family:
            turn[child], mass[child] = here, here * law.entry[child]
            here *= 1.0 - float(law.entry[child])
    return mass


def places(tree: TokenTree, mass: Floats) -> Iterator[tuple[int, int, float, float]]:
    """(rank, depth, mass taken, mass offered) of every node below the root."""
    for node, family in enumerate(tree.children):
        left = float(mass[node])
        for rank, child in enumerate(family):
            yield rank, int(tree.depth[child]), float(mass[child]), left
            left -= float(mass[child])


class MatchScale:
    """The scale of log p − log q that makes the target's choices under shared noise likeliest, of a few; older choices count less."""

    SCALES = np.geomspace(0.1, 1.6, 9)

    def __init__(self, prior: float = 0.4, *, strength: float = 4.0, decay: float = 0.99) -> None:
        self.decay = decay
        self._score = -strength * np.log(self.SCALES / prior) ** 2

    @property
    def value(self) -> float:
        return float(self.SCALES[int(np.argmax(self._score))])

    def learn(self, perturbed: ArrayLike, chosen: int) -> None:
        """The target took atom number `chosen`. perturbed float[k]: log q + g, as for `match_probabilities`."""
        scaled = np.asarray(perturbed, dtype=np.float64)[None, :] / self.SCALES[:, None]
        scaled -= scaled.max(axis=1, keepdims=True)
        self._score = self.decay * self._score + scaled[:, chosen] - np.log(np.exp(scaled).sum(axis=1))


def match_probabilities(perturbed: ArrayLike, temperature: float) -> Floats:
    """float64[k]: for coupled trees, the probability that each child is the target's own token.

    perturbed float[k]: log q + g of the atoms under the shared noise g. The target takes the largest of log p + g; if
    log p − log q is a noise of scale T, its choice has the law softmax((log q + g) / T). Growth may look at anything here.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature: {temperature}; give the scale of log p − log q, above 0")
    scaled = np.asarray(perturbed, dtype=np.float64) / temperature
    weight = np.exp(scaled - scaled.max())
    law: Floats = weight / weight.sum()
    return law
