"""Sessions of two rounds that break one rule of algorithms.md 6.1 must be seen as biased (the rows of 6.3 about sessions), and
their honest twins as exact.

Every draw, verdict and bonus of round one and every draw of round two is enumerated, round two is summed in closed form. Places
depend on everything drawn so far, as rule L1 allows: that is what makes most of these mistakes visible.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.batched import batched_law
from support.rounds import Chooser

from rootward.core.distribution import DraftDistribution
from rootward.core.law import VerificationLaw
from rootward.core.living_tree import LivingTree, Snapshot

V, LENGTH, PROMPT = 3, 3, [0, 1]
EXACT, SEEN = 1e-12, 1e-4


class Model:
    """p and q depend on the last two tokens. q has integer weights, so it is declared exactly."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 6])
        contexts = list(itertools.product(range(V), repeat=2))
        zeros = 0.25 * (seed % 2)
        p = rng.integers(1, 9, (len(contexts), V)) * (rng.random((len(contexts), V)) >= zeros)
        p[:, seed % V] += 1
        q = rng.integers(1, 9, (len(contexts), V)) * (rng.random((len(contexts), V)) >= 0.3 * (seed % 3 == 0))
        q[:, (seed + 1) % V] += 1
        self.p = {c: row / row.sum() for c, row in zip(contexts, p, strict=True)}
        self.q = {c: DraftDistribution(np.flatnonzero(row), row[row > 0]) for c, row in zip(contexts, q, strict=True)}

    def rest(self, text: list[int], done: int) -> np.ndarray:
        """float64[V, …]: law of the tokens still missing to LENGTH under the target."""
        if done >= LENGTH:
            return np.ones(())
        row = self.p[tuple(text[-2:])]
        return np.stack([row[x] * self.rest([*text, x], done + 1) for x in range(V)])


class Session:
    """An honest session: draw, verify the first nodes, commit, draw on, verify what there is."""

    draws = (3, 1)  # before the first cut, after the commit
    first_cap = 1

    def __init__(self, model: Model, chooser: Chooser, out: np.ndarray) -> None:
        self.model, self.chooser, self.out = model, chooser, out
        self.text = list(PROMPT)
        self.plant()

    def plant(self) -> None:
        self.tree = LivingTree(len(self.text), 0, vocab_size=V)

    def run(self) -> None:
        self.grow(self.draws[0])
        first = self.tree.snapshot(self.first_cap)
        law = self.law(first)
        stop = self.chooser.choose(law.stop)
        self.commit(first, stop, self.bonus(first, stop, law.bonus_row(stop)))
        if len(self.text) >= len(PROMPT) + LENGTH:
            self.put(self.text, 1.0)
            return
        self.after_commit(law)
        self.grow(self.draws[1])
        second = self.tree.snapshot(self.second_cap())
        law = self.law(second)
        for stop in np.flatnonzero(law.stop).tolist():
            residual = law.bonus_row(stop)
            for bonus in np.flatnonzero(residual).tolist():
                self.put([*self.text, *second.tree.path(stop), bonus], law.stop[stop] * residual[bonus])

    # -- what a wrong rule changes

    def bonus(self, first: Snapshot, stop: int, residual: np.ndarray) -> int:
        return self.chooser.choose(residual)

    def commit(self, first: Snapshot, stop: int, bonus: int) -> None:
        run = [*first.tree.path(stop), bonus]
        self.tree.commit(run)
        self.text += run

    def after_commit(self, law: VerificationLaw) -> None:
        """Nothing is dropped: the whole subtree is kept."""

    def second_cap(self) -> int:
        return 99

    # -- mechanics

    def path(self, node: int) -> list[int]:
        if node == self.tree.root_id:
            return []
        record = self.tree.nodes[node]
        return [*self.path(record.parent or self.tree.root_id), record.token]

    def grow(self, num_draws: int) -> None:
        for _ in range(num_draws):
            if (node := self.place()) is not None:
                row = self.left(node)
                token = int(row.ids[self.chooser.choose(row.law)])
                self.tree.draw(node, token, sampled=True)

    def left(self, node: int) -> DraftDistribution:
        record = self.tree.at(node)
        row = self.model.q[tuple((self.text + self.path(node))[-2:])]
        record.row = (row.ids, row.weight)
        return row.without(self.tree.nodes[c].token for c in record.children)

    def place(self) -> int | None:
        """The node that gets the next child: the newest one, or any other, by all values drawn so far."""
        nodes = [self.tree.root_id, *self.tree.nodes]
        able = [n for n in nodes if len(self.path(n)) < 3 and len(self.left(n))]
        values = sum((i + 2) * self.tree.at(n).token for i, n in enumerate(nodes[1:]))
        return able[-1 - values % len(able)] if able else None

    def law(self, snapshot: Snapshot) -> VerificationLaw:
        tree = snapshot.tree
        target = np.stack([self.model.p[tuple((self.text + list(tree.path(i)))[-2:])] for i in range(len(tree))])
        atoms = np.full((len(tree), V), -1)
        weight = np.zeros((len(tree), V), dtype=np.int64)
        for i, row in enumerate(snapshot.rows):
            if row is not None:
                atoms[i, : len(row[0])], weight[i, : len(row[0])] = row
        return batched_law("traversal", tree, atoms, weight, target)

    def put(self, text: list[int], mass: float) -> None:
        emitted = text[len(PROMPT) : len(PROMPT) + LENGTH]
        self.out[tuple(emitted)] += self.chooser.mass * mass * self.model.rest(text, len(emitted))


# ---- wrong rules and their honest twins


class CapByOwnSize(Session):
    """Verifies half of what was kept."""

    draws = (4, 0)

    def second_cap(self) -> int:
        return len(self.tree) // 2


class CapByClock(Session):
    draws = (4, 0)

    def second_cap(self) -> int:
        return 1


class PlainIfSmall(Session):
    """Decodes plainly when fewer than two nodes were kept."""

    draws = (4, 0)

    def second_cap(self) -> int:
        return 99 if len(self.tree) >= 2 else 0


class DropUnlikely(Session):
    """Drops the kept subtree when its first node was unlikely."""

    def after_commit(self, law: VerificationLaw) -> None:
        first = next(iter(self.tree.nodes.values()), None)
        row = self.model.q[tuple(self.text[-2:])]
        if first is not None and row.law[row.ids == first.token].sum() < 0.4:
            self.plant()


class DropByText(Session):
    """Drops the kept subtree on grounds that do not look below the new root."""

    def after_commit(self, law: VerificationLaw) -> None:
        if sum(self.text) % 2:
            self.plant()


class PartOfTheVerdict(Session):
    """Commits the first token of the run only; what was accepted below it is verified again."""

    draws = (2, 1)
    first_cap = 2

    def commit(self, first: Snapshot, stop: int, bonus: int) -> None:
        run = [*first.tree.path(stop), bonus][:1]
        self.tree.commit(run)
        self.text += run


class WholeVerdict(Session):
    draws = (2, 1)
    first_cap = 2


class RedrawBonus(Session):
    """A bonus token that no node spells is drawn once more."""

    def bonus(self, first: Snapshot, stop: int, residual: np.ndarray) -> int:
        token = self.chooser.choose(residual)
        children = self.tree.at(first.ids[stop]).children
        spelled = any(self.tree.nodes[c].token == token for c in children)
        return token if spelled or not children else self.chooser.choose(residual)


class LostVerdict(Session):
    """A verdict is lost after the drafter heard of it; it draws anew if it heard of an acceptance, and nothing if not. The
    successor tosses the coin of node 1 again, or uses the same one."""

    same_coins = True

    def run(self) -> None:
        self.grow(1)
        heard = self.entry()
        accepted = self.chooser.choose([1.0 - heard, heard])  # U below the budget
        self.plant()
        if not accepted:
            self.put([*self.text], 1.0)
            return
        self.grow(1)
        now = self.entry()
        again = min(1.0, now / heard) if self.same_coins else now  # P(U < now | U < heard)
        law = self.law(self.tree.snapshot(1))
        self.put([*self.text, *self.path(1)], again)
        for token, mass in enumerate(law.bonus_row(0)):
            self.put([*self.text, token], (1.0 - again) * mass)

    def entry(self) -> float:
        return float(self.law(self.tree.snapshot(1)).entry[1])


class LostVerdictFreshCoins(LostVerdict):
    same_coins = False


def error(session: type[Session], seed: int) -> float:
    """Largest error of the law of the first LENGTH committed tokens."""
    model, chooser, out = Model(seed), Chooser(), np.zeros((V,) * LENGTH)
    chooser.runs(lambda: session(model, chooser, out).run())
    assert out.sum() == pytest.approx(1.0, abs=1e-12)
    return float(np.abs(out - model.rest(PROMPT, 0)).max())


WRONG = [CapByOwnSize, PlainIfSmall, DropUnlikely, PartOfTheVerdict, RedrawBonus, LostVerdict]
HONEST = [Session, CapByClock, DropByText, WholeVerdict, LostVerdictFreshCoins]


@pytest.mark.parametrize("session", WRONG, ids=lambda s: s.__name__)
def test_wrong_session_is_seen(session):
    assert any(error(session, seed) > SEEN for seed in range(8))


@pytest.mark.parametrize("session", HONEST, ids=lambda s: s.__name__)
def test_honest_twin_is_exact(session):
    for seed in range(8):
        assert error(session, seed) < EXACT, seed
