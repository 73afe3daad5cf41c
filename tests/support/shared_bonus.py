"""Rounds whose bonus noise the drafter knows, as a random program that can be enumerated.

The noise of the bonus token at text length t is a uniform b_t; the bonus is the inverse distribution function of the residual at b_t,
and a guess that of the draft's row. Nothing is discretised: b_t is known to lie in an interval, and every question about it splits the
interval where the answer changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from support.rounds import LENGTH, Chooser, Model, V, decide, put, tail_law

from rootward.core.distribution import DraftDistribution
from rootward.core.living_tree import LivingTree

PROMPT = [0, 1]
SLIVER = 1e-14  # what rounding leaves of an empty interval


class Uniforms:
    """b by text length (and epoch)."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def law(self, length: int, row: np.ndarray, epoch: int = 0) -> np.ndarray:
        """float64[V]: of the token that the row's inverse distribution function gives, given what is known of b."""
        low, high = self._known.get((length, epoch), (0.0, 1.0))
        edges = np.concatenate([[0.0], np.cumsum(row)])
        edges[-1] = 1.0
        mass = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
        mass[(mass < SLIVER) | (row <= 0.0)] = 0.0
        return mass / mass.sum()

    def token(self, length: int, row: np.ndarray, epoch: int = 0) -> int:
        token = self._chooser.choose(self.law(length, row, epoch))
        low, high = self._known.get((length, epoch), (0.0, 1.0))
        edges = np.concatenate([[0.0], np.cumsum(row)])
        edges[-1] = 1.0
        self._known[length, epoch] = max(low, float(edges[token])), min(high, float(edges[token + 1]))
        return token


class Session:
    """Text, living tree and noise. What a test writes is `run`: a program of these steps."""

    def __init__(self, model: Model, chooser: Chooser, out: np.ndarray) -> None:
        self.model, self.chooser, self.out = model, chooser, out
        self.text = list(PROMPT)
        self.noise = Uniforms(chooser)
        self.tree = LivingTree(len(self.text), 0, vocab_size=V, ahead_cap=64)

    def run(self) -> None:
        raise NotImplementedError

    # -- the drafter

    def row(self, node: int) -> DraftDistribution:
        return self.model.q[tuple((self.text + self.path(node))[-2:])]

    def draw(self, node: int | None) -> int | None:
        """A child drawn without replacement; None if there is no node or nothing left to draw."""
        if node is None:
            return None
        record, row = self.tree.at(node), self.row(node)
        record.row = (row.ids, row.weight)
        left = row.without(self.tree.nodes[c].token for c in record.children)
        if not len(left):
            return None
        return self.tree.draw(node, int(left.ids[self.chooser.choose(left.law)]), sampled=True)

    def guess(self, node: int | None) -> int | None:
        """What the noise makes of the draft's row, below a node; None if a child spells it."""
        token = self.peek(node)
        if node is None or token in {self.tree.nodes[c].token for c in self.tree.at(node).children}:
            return None
        return self.tree.draw(node, token, sampled=False, guess=True)

    def peek(self, node: int | None) -> int:
        """The token of that guess, -1 if there is no node."""
        return -1 if node is None else self.noise.token(self.tree.at(node).depth, self.row(node).dense(V))

    def token(self, node: int | None) -> int:
        return -1 if node is None else self.tree.nodes[node].token

    def path(self, node: int) -> list[int]:
        if node in (0, self.tree.root_id):
            return []
        record = self.tree.nodes[node]
        return [*self.path(record.parent or self.tree.root_id), record.token]

    # -- the verifier

    def round(self, cap: int) -> bool:
        """Verify the first nodes and commit. True when there is text enough."""
        first = self.tree.snapshot(cap)
        verdict = decide(self.model, first, self.text)
        stop = self.chooser.choose(verdict.stop)
        length = len(self.text) + int(first.tree.depth[stop])
        bonus = self.noise.token(length, verdict.bonus_row(stop))
        self.commit([*first.tree.path(stop), bonus])
        return self.enough()

    def last_round(self, cap: int, epoch: int = 0) -> None:
        """As `round`, summed up."""
        first = self.tree.snapshot(cap)
        verdict = decide(self.model, first, self.text)
        for stop in np.flatnonzero(verdict.stop).tolist():
            length = len(self.text) + int(first.tree.depth[stop])
            law = self.noise.law(length, verdict.bonus_row(stop), epoch)
            for bonus in np.flatnonzero(law).tolist():
                self.put([*self.text, *first.tree.path(stop), bonus], verdict.stop[stop] * law[bonus])

    def commit(self, run: list[int]) -> None:
        self.tree.commit(run)
        self.text += run

    def enough(self) -> bool:
        if len(self.text) < len(PROMPT) + self.out.ndim:
            return False
        self.put(self.text, 1.0)
        return True

    def put(self, text: list[int], mass: float) -> None:
        put(self.out, self.model, text, len(PROMPT), self.chooser.mass * mass)


def error(
    session: type[Session], seed: int, length: int = LENGTH, begin: Callable[[Chooser], None] | None = None
) -> float:
    """Largest error of the law of the first `length` committed tokens."""
    model, chooser, out = Model(seed), Chooser(), np.zeros((V,) * length)
    if begin is not None:
        begin(chooser)
    chooser.runs(lambda: session(model, chooser, out).run())
    assert abs(out.sum() - 1.0) < 1e-11, out.sum()
    return float(np.abs(out - tail_law(model, PROMPT, 0, length)).max())
