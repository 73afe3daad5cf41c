"""The launch rule over two rounds, enumerated through `launch_time` and the scheduler: a round waits for more of its tree or not by how
much was kept of the one before, and then verifies all that is there. How much is kept depends on values (support ends, texts end), so
what a small or unlikely tree must not lead to is anything but waiting or verifying: the twins that decode plainly or draw anew are biased.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.rounds import LENGTH, Chooser, Model, V, decide, draw_by, grow_level, put, tail_law
from support.shared_bonus import Session
from support.shared_bonus import error as error_with_guesses

from rootward.core.growth import BestFirst, Growth
from rootward.core.living_tree import ROOT, LivingTree
from rootward.core.requests import DraftMode
from verifier_service.draft_pace import launch_time
from verifier_service.scheduler import Limits, SessionView, schedule

EXACT, SEEN = 1e-11, 1e-4
TOKENS, VERIFY_S, LEVEL_S = (1.0, 1.5, 2.2, 2.4), 1.0, 0.2  # one kept node is worth waiting with, two are not
CAP = len(TOKENS) - 1


def patience_s(arrived: int, since_s: float) -> float:
    due = {"next_s": since_s + LEVEL_S, "node_s": LEVEL_S}
    return launch_time(min(arrived, CAP), since_s, tokens=TOKENS, verify_s=VERIFY_S, **due)


def launches(tree: LivingTree, growth: Growth, waited_s: float, since_s: float) -> bool:
    view = SessionView(1, 0, True, len(tree), growth.at_rest, waited_s, patience_s(len(tree), since_s), CAP)
    return not schedule([view], Limits(rows=64, chunk=1)).empty


class Program:
    """Two rounds of one session; three levels of a chain, if no end of text is drawn, go by while the first is verified."""

    def __init__(self, model: Model, chooser: Chooser, out: np.ndarray) -> None:
        self.model, self.chooser, self.out, self.text = model, chooser, out, [0, 1]
        self.tree = LivingTree(len(self.text), 0, vocab_size=V, eos_ids={2})
        self.growth = Growth(
            self.tree, BestFirst(DraftMode.SAMPLED, max_depth=4, topk=1, draws_per_level=1), node_cap=4
        )

    def run(self) -> None:
        self.level()
        self.round(1, meanwhile=3)
        if len(self.text) >= 2 + LENGTH:
            put(self.out, self.model, self.text, 2, self.chooser.mass)
            return
        self.round(self.wait())

    def wait(self) -> int:
        """Nodes of the second round."""
        waited_s = since_s = 0.0
        while not launches(self.tree, self.growth, waited_s, since_s):
            before = len(self.tree)
            self.level()
            waited_s += LEVEL_S
            since_s = waited_s if len(self.tree) > before else since_s
        return CAP

    def level(self) -> None:
        grow_level(self.model, self.tree, self.growth, self.text)

    def round(self, cap: int, meanwhile: int | None = None) -> None:
        first = self.tree.snapshot(cap)
        for _ in range(meanwhile or 0):
            self.level()
        verdict = decide(self.model, first, self.text)
        if meanwhile is None:
            for stop in np.flatnonzero(verdict.stop).tolist():
                row = verdict.bonus_row(stop)
                for bonus in np.flatnonzero(row).tolist():
                    mass = self.chooser.mass * verdict.stop[stop] * row[bonus]
                    put(self.out, self.model, [*self.text, *first.tree.path(stop), bonus], 2, mass)
            return
        stop = self.chooser.choose(verdict.stop)
        run = [*first.tree.path(stop), self.chooser.choose(verdict.bonus_row(stop))]
        self.tree.commit(run)
        self.growth.rerooted()
        self.text += run

    @property
    def small(self) -> bool:
        return 0 < len(self.tree) < CAP and patience_s(len(self.tree), 0.0) > 0.0


class DecodedPlainly(Program):
    """A tree that is too small to be launched, and not worth the wait, is passed over."""

    def wait(self) -> int:
        return 0 if self.small else super().wait()


class DrawnAnew(Program):
    """A tree that is too small to be launched makes room for one that is grown from the root."""

    def wait(self) -> int:
        if self.small:
            self.tree = LivingTree(len(self.text), 0, vocab_size=V, eos_ids={2})
            self.growth = Growth(self.tree, self.growth.strategy, node_cap=4)
        return super().wait()


class Unlikely(Program):
    """A tree whose first node is unlikely is not waited with, but passed over."""

    def wait(self) -> int:
        node = next((r for r in self.tree.nodes.values() if r.row is None or r.parent == ROOT), None)
        row = self.tree.root.row
        if node is not None and row is not None and row[1][row[0] == node.token].sum() / row[1].sum() < 0.5:
            return 0
        return super().wait()


def error(program: Callable[[Model, Chooser, np.ndarray], Program], seed: int, monkeypatch) -> float:
    model, chooser, out = Model(seed), Chooser(), np.zeros((V,) * LENGTH)
    draw_by(chooser, monkeypatch)
    chooser.runs(lambda: program(model, chooser, out).run())
    assert out.sum() == pytest.approx(1.0, abs=1e-11)
    return float(np.abs(out - tail_law(model, [0, 1], 0)).max())


def test_waiting_and_launching_by_what_was_kept_is_exact(monkeypatch) -> None:
    assert max(error(Program, seed, monkeypatch) for seed in range(8)) < EXACT


@pytest.mark.parametrize("wrong", [DecodedPlainly, DrawnAnew, Unlikely], ids=lambda c: c.__name__)
def test_anything_else_because_of_what_was_kept_is_seen(wrong: type[Program], monkeypatch) -> None:
    assert any(error(wrong, seed, monkeypatch) > SEEN for seed in range(8))


# -- below guesses: what is launched at once leaves its drafter to the predictions of the round after it


class AtOnce(Session):
    """A right guess with nodes below it is launched with them, and predictions are made below; without them the tree is grown first."""

    def run(self) -> None:
        self.draw(0)
        self.launch(99)
        self.draw(self.predict(0))
        if self.land():
            return
        if len(self.tree):
            self.launch(99)
            self.draw(self.predict(next(iter(self.tree.nodes))))
        else:
            self.draw(self.tree.root_id)
            self.draw(self.tree.root_id)
            self.launch(99)
        if not self.land():
            self.last_round(99)


class AtOnceOrPlain(Session):
    """The same, but what is too small for that is decoded plainly: whether its second node exists depends on values."""

    def run(self) -> None:
        self.draw(0)
        self.launch(99)
        below = self.draw(self.predict(0))
        if self.land():
            return
        if below in self.tree.nodes and self.tree.nodes[below].token == 0:
            self.last_round(0)
        else:
            self.last_round(99)


def test_a_right_guess_launched_at_once_is_exact() -> None:
    assert max(error_with_guesses(AtOnce, seed) for seed in range(8)) < EXACT


def test_a_right_guess_passed_over_for_what_hangs_below_it_is_seen() -> None:
    assert any(error_with_guesses(AtOnceOrPlain, seed) > SEEN for seed in range(8))


# -- a tree at rest without a node is given up (`Link.record_empty`)


class GivenUp(Session):
    """The round after one that found the tree empty has a new tree, whatever the commit kept of the old one below a right guess."""

    def run(self) -> None:
        self.draw(0)
        self.launch(99)
        self.draw(self.predict(0))
        if self.land():
            return
        if len(self.tree):
            self.last_round(99)
            return
        self.launch(99)  # at rest without a node
        below = self.draw(self.predict(self.tree.root_id))
        if self.land():
            return
        if self.gives_up(below):
            self.tree = LivingTree(len(self.text), 0, vocab_size=V, ahead_cap=64)
            self.draw(0)
        self.last_round(99)

    def gives_up(self, below: int | None) -> bool:
        return True


class UnlikelyGivenUp(GivenUp):
    """Wrong: only if nothing was kept, or what was kept begins with token 0."""

    def gives_up(self, below: int | None) -> bool:
        return below not in self.tree.nodes or self.tree.nodes[below].token == 0


@pytest.mark.parametrize("length", [3, 4])
def test_a_tree_given_up_because_it_was_empty_is_exact(length: int) -> None:
    assert max(error_with_guesses(GivenUp, seed, length) for seed in range(4)) < EXACT


def test_a_tree_given_up_for_what_the_commit_kept_of_it_is_seen() -> None:
    assert any(error_with_guesses(UnlikelyGivenUp, seed, 4) > SEEN for seed in range(4))
