"""Enumeration of rounds whose drafter is told the noise of the bonus token once the round runs.

The noise of the bonus token at text length t, in the round that begins at length s, is a uniform b. The bonus token is the inverse
distribution function of the residual at b, the drafter's prediction that of the draft distribution at b. b is not discretised: it is known
to lie in an interval, and each question about it splits the interval at the points where the answer changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from support.rounds import LENGTH, Chooser, Model, V, decide, put, tail_law

from rootward.core.distribution import DraftDistribution
from rootward.core.living_tree import LivingTree, Snapshot

PROMPT = [0, 1]
EMPTY = 1e-14  # an interval that is empty up to rounding


class Uniforms:
    """b by the text length at which the round begins, the text length of the bonus token, and the epoch; each known up to an interval."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._known: dict[tuple[int, int, int], tuple[float, float]] = {}

    def law(self, begin: int, length: int, row: np.ndarray, epoch: int = 0) -> np.ndarray:
        """float64[V]: distribution of the inverse distribution function of `row` at b, given the interval of b."""
        low, high = self._known.get((begin, length, epoch), (0.0, 1.0))
        edges = np.concatenate([[0.0], np.cumsum(row)])
        edges[-1] = 1.0
        mass = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
        mass[(mass < EMPTY) | (row <= 0.0)] = 0.0
        return mass / mass.sum()

    def token(self, begin: int, length: int, row: np.ndarray, epoch: int = 0) -> int:
        """A token of that distribution (a branch of the enumeration). Narrows the interval."""
        token = self._chooser.choose(self.law(begin, length, row, epoch))
        low, high = self._known.get((begin, length, epoch), (0.0, 1.0))
        edges = np.concatenate([[0.0], np.cumsum(row)])
        edges[-1] = 1.0
        self._known[begin, length, epoch] = max(low, float(edges[token])), min(high, float(edges[token + 1]))
        return token


class Session:
    """Text, living tree and noise of one session. A test implements `run` by calls of the methods below.

    told_early (wrong): the noise is known before the round runs. one_noise (wrong): rounds share the noise of a text length.
    """

    told_early = one_noise = False

    def __init__(self, model: Model, chooser: Chooser, out: np.ndarray) -> None:
        self.model, self.chooser, self.out = model, chooser, out
        self.text = list(PROMPT)
        self.noise = Uniforms(chooser)
        self.tree = LivingTree(len(self.text), 0, vocab_size=V, ahead_cap=64)
        self.running: Snapshot | None = None  # what the round verifies

    def run(self) -> None:
        raise NotImplementedError

    # -- the drafter

    def row(self, node: int) -> DraftDistribution:
        return self.model.q[tuple((self.text + self.path(node))[-2:])]

    def draw(self, node: int | None) -> int | None:
        """A new child drawn without replacement; None if `node` is None or all tokens are drawn."""
        if node is None:
            return None
        record, row = self.tree.at(node), self.row(node)
        record.row = (row.ids, row.weight)
        left = row.without(self.tree.nodes[c].token for c in record.children)
        if not len(left):
            return None
        return self.tree.draw(node, int(left.ids[self.chooser.choose(left.law)]), sampled=True)

    def predict(self, node: int | None) -> int | None:
        """A new child with the predicted bonus token; None if `node` is None or has a child with this token."""
        token = self.prediction(node)
        if node is None or token in {self.tree.nodes[c].token for c in self.tree.at(node).children}:
            return None
        return self.tree.draw(node, token, sampled=False, guess=True)

    def prediction(self, node: int | None) -> int:
        """The predicted bonus token of the present round below `node`, -1 if `node` is None."""
        return -1 if node is None else self.predicted(self.tree.at(node).depth, self.row(node).dense(V))

    def predicted(self, length: int, row: np.ndarray) -> int:
        """A branch for each token that the noise of the present round may make of a row."""
        assert self.running is not None or self.told_early
        return self.noise.token(self.begin, length, row)

    @property
    def begin(self) -> int:
        """Text length at which the present round begins, as far as its noise depends on it."""
        return 0 if self.one_noise else len(self.text)

    def token(self, node: int | None) -> int:
        return -1 if node is None else self.tree.nodes[node].token

    def path(self, node: int) -> list[int]:
        if node in (0, self.tree.root_id):
            return []
        record = self.tree.nodes[node]
        return [*self.path(record.parent or self.tree.root_id), record.token]

    # -- the verifier

    def round(self, cap: int) -> bool:
        """A round during which nothing is drawn."""
        self.launch(cap)
        return self.land()

    def launch(self, cap: int) -> None:
        """The round runs: it verifies the first `cap` nodes, and its noise is told."""
        self.running = self.tree.snapshot(cap)

    def land(self) -> bool:
        """The verdict of the round that runs, and its commit. True if the compared length is reached."""
        snapshot, self.running = self.running, None
        assert snapshot is not None
        verdict = decide(self.model, snapshot, self.text)
        stop = self.chooser.choose(verdict.stop)
        length = len(self.text) + int(snapshot.tree.depth[stop])
        bonus = self.noise.token(self.begin, length, verdict.bonus_row(stop))
        self.commit([*snapshot.tree.path(stop), bonus])
        return self.finished()

    def last_round(self, cap: int, epoch: int = 0) -> None:
        """As `round`, but adds the probabilities of all outcomes instead of branching."""
        snapshot = self.tree.snapshot(cap)
        verdict = decide(self.model, snapshot, self.text)
        for stop in np.flatnonzero(verdict.stop).tolist():
            length = len(self.text) + int(snapshot.tree.depth[stop])
            law = self.noise.law(self.begin, length, verdict.bonus_row(stop), epoch)
            for bonus in np.flatnonzero(law).tolist():
                self.put([*self.text, *snapshot.tree.path(stop), bonus], verdict.stop[stop] * law[bonus])

    def commit(self, run: list[int]) -> None:
        self.tree.commit(run)
        self.text += run

    def finished(self) -> bool:
        """Whether the text has the compared length; its probability is then recorded."""
        if len(self.text) < len(PROMPT) + self.out.ndim:
            return False
        self.put(self.text, 1.0)
        return True

    def put(self, text: list[int], mass: float) -> None:
        put(self.out, self.model, text, len(PROMPT), self.chooser.mass * mass)


def error(
    session: type[Session], seed: int, length: int = LENGTH, begin: Callable[[Chooser], None] | None = None
) -> float:
    """Largest error of the distribution of the first `length` committed tokens. begin: called with the chooser before the enumeration."""
    model, chooser, out = Model(seed), Chooser(), np.zeros((V,) * length)
    if begin is not None:
        begin(chooser)
    chooser.runs(lambda: session(model, chooser, out).run())
    assert abs(out.sum() - 1.0) < 1e-11, out.sum()
    return float(np.abs(out - tail_law(model, PROMPT, 0, length)).max())
