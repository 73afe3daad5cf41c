"""Growing ahead as the drafter does it, enumerated: `Ahead` draws and guesses, `LivingTree` cuts and re-roots, the sparse law decides,
two rounds and what the second one leaves for the third.

Every draw, verdict, bonus and noise is enumerated; the committed text must have exactly the target's law.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.rounds import Chooser, Model, V, draw_by
from support.shared_bonus import PROMPT, Session, error

from rootward.core.distribution import DraftDistribution
from rootward.core.growth import Ahead, AheadBudget, BestFirst, Growth
from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode

BUDGET = AheadBudget(nodes=4, share=2, draws_per_level=1, hits=(0.6, 0.3))
SHAPE = {"max_depth": 2, "topk": 3, "draws_per_level": 1, "root_family": (0.4,)}


class Grown(Session):
    """levels: before the first round, while it runs, before the second one, while that runs. caps: of the rounds."""

    law = DraftMode.SAMPLED
    levels = (2, 2, 1, 0)
    caps = (2, 2, 0)
    rows = 8  # of a level

    def __init__(self, model: Model, chooser: Chooser, out: np.ndarray) -> None:
        super().__init__(model, chooser, out)
        self.tree = LivingTree(len(PROMPT), 0, vocab_size=V, node_cap=8, ahead_cap=BUDGET.nodes)
        own = Growth(self.tree, BestFirst(self.law, **SHAPE), node_cap=2)
        self.ahead = Ahead(own, BUDGET, self.choose)

    def choose(self, node: int, row: DraftDistribution) -> np.ndarray:
        first = self.predicted(self.tree.at(node).depth, row.dense(V))
        return np.array([first, *(x for x in row.ids if x != first)])

    def grow(self, num_levels: int) -> None:
        for _ in range(num_levels):
            at_root = [] if self.ahead.own.root_expanded else [self.tree.root_id]
            for node in at_root or self.ahead.frontier(self.rows):
                self.ahead.expand(node, self.row(node))
            self.ahead.draw(lambda n: np.zeros(n, np.uint64))

    def commit(self, run: list[int]) -> None:
        self.ahead.commit(run)
        self.text += run

    def launch(self, cap: int) -> None:
        super().launch(cap)
        self.ahead.launched = True

    def run(self) -> None:
        for i in range(2):
            self.grow(self.levels[2 * i])
            self.launch(self.caps[i])
            self.grow(self.levels[2 * i + 1])
            if self.land():
                return
        self.last_round(self.caps[2])


class Greedy(Grown):
    law = DraftMode.GREEDY


class PlainFirst(Grown):
    levels = (1, 2, 1, 0)
    caps = (0, 8, 0)


class CutShort(Grown):
    caps = (1, 8, 0)


class ThreeDeep(Grown):
    levels = (2, 2, 2, 1)
    caps = (2, 8, 8)


class InTurns(Grown):
    """One row a level: guesses take turns."""

    rows = 1
    levels = (2, 4, 1, 0)


class LooksAtAGuess(Grown):
    """Wrong: whether a verified draw is made depends on what a prediction would be."""

    told_early = True
    levels = (1, 0, 0, 0)
    caps = (8, 0, 0)

    def grow(self, num_levels: int) -> None:
        if not num_levels:
            return
        super().grow(1)
        token = self.prediction(0)
        own = self.ahead.own
        own.strategy, own.node_cap = BestFirst(self.law, **SHAPE | {"max_depth": 1}), 1 + (token == 0)
        super().grow(1)


class Predicted(Grown):
    """What the client expects lies in the tree before anything is drawn."""

    levels = (2, 1, 1, 0)

    def foresee(self) -> None:
        first = (self.text[-1] + 1) % V
        self.ahead.own.follow([(first, 0.6), ((first + 1) % V, 0.9)][: 1 + self.text[-2] % 2])

    def commit(self, run: list[int]) -> None:
        super().commit(run)
        self.foresee()

    def run(self) -> None:
        self.foresee()
        super().run()


class PredictedGreedy(Predicted):
    law = DraftMode.GREEDY


SESSIONS = [Grown, Greedy, PlainFirst, CutShort, ThreeDeep, InTurns, Predicted, PredictedGreedy]


@pytest.mark.parametrize("session", [s for s in SESSIONS if s is not ThreeDeep], ids=lambda s: s.__name__)
def test_growing_ahead_is_exact(session: type[Grown], monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(session, 1, 2, lambda chooser: draw_by(chooser, monkeypatch)) < 1e-11


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("session", SESSIONS, ids=lambda s: s.__name__)
def test_growing_ahead_is_exact_on_more_models(
    session: type[Grown], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error(session, seed, 3, lambda chooser: draw_by(chooser, monkeypatch)) < 1e-11


def test_the_harness_sees_a_guess_that_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [error(LooksAtAGuess, seed, 2, lambda chooser: draw_by(chooser, monkeypatch)) for seed in range(8)]
    assert max(errors) > 1e-4
