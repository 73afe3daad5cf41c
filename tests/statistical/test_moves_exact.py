"""A session that moves to another drafter, enumerated through the pool: round one on the old tree, round two on whichever the pool keeps.

Both drafters draw while round one is verified, both hear its commit, and then one tree is dropped whole. Which one was decided by the clock
(something had come from the new drafter, or nothing had), so the committed text has exactly the target's law. A pool that chose the
tree that looks better below the new root would not be lossless.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.rounds import LENGTH, Chooser, Model, V, decide, draw_by, grow_level, put, tail_law

from rootward.core.frames import Hello, HelloAck
from rootward.core.growth import BestFirst, Growth
from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode, Rule, Speculation, Stopping, VerifierRequest
from verifier_service.drafter_link import Link
from verifier_service.drafter_pool import DrafterPool
from verifier_service.link_metrics import LinkMetrics
from verifier_service.session import Draft, Session
from verifier_service.settings import Shape

PROMPT = (0, 1)
HELLO = Hello("v", 1, "", V, 64)
Choose = Callable[[DrafterPool, Session, list[int]], None]


class SharedMetrics(LinkMetrics):
    """Of all pools and links here: to make a registry takes longer than the rounds of a program."""

    def watch(self, links: object) -> None:
        """Nobody reads the gauges, which a registry has only once."""


METRICS = SharedMetrics()


def planted(pool: DrafterPool, session: Session, name: str, law: DraftMode) -> tuple[Draft, Growth]:
    link = Link(name, lambda: HELLO, lambda: None, METRICS)
    link.ack = HelloAck(name, 2, "", V, 64, tuple(DraftMode), 4, V)
    pool.links.append(link)
    draft = link.open(session, Shape(atoms=V, node_cap=5, max_depth=3, topk=3))
    strategy = BestFirst(law, max_depth=3, topk=3, draws_per_level=1, root_family=(0.4,))
    draft.tree = LivingTree(len(PROMPT), session.hash, vocab_size=V)
    return draft, Growth(draft.tree, strategy, node_cap=5)


def commit(pool: DrafterPool, session: Session, run: list[int]) -> None:
    pool.commit(session, run, lambda session, draft: session.round.target_nodes)


def keep_if_likely(pool: DrafterPool, session: Session, run: list[int]) -> None:
    """Wrong: moves on when the kept subtree begins with an unlikely node."""
    old, new = session.draft, session.next_draft
    assert old is not None
    assert new is not None
    for draft in (old, new):
        draft.tree.commit(run)
    first, row = next(iter(old.tree.nodes.values()), None), old.tree.root.row
    unlikely = first is not None and row is not None and row[1][list(row[0]).index(first.token)] / row[1].sum() < 0.4
    session.draft, session.next_draft = (new if unlikely else old), None


def error(
    model: Model,
    law: DraftMode,
    levels: tuple[int, int, int],
    monkeypatch,
    choose: Choose = commit,
    *,
    heard: bool = True,
) -> float:
    """Largest error of the law of the first LENGTH committed tokens.

    levels: of the old tree before round one (all of it is verified) and while it is verified; of the new tree meanwhile.
    """
    out, chooser = np.zeros((V,) * LENGTH), Chooser()
    draw_by(chooser, monkeypatch)

    def program() -> None:
        text = list(PROMPT)
        wanted = VerifierRequest("r", PROMPT, stopping=Stopping(9), speculation=Speculation())
        session = Session(1, wanted, Rule.TRAVERSAL, law, frozenset())
        pool = DrafterPool(lambda: HELLO, lambda: None, shape=Shape(V, 5, 3, 3), metrics=METRICS)
        (session.draft, old), (session.next_draft, new) = (planted(pool, session, name, law) for name in ("old", "new"))
        growths = {id(session.draft.tree): old, id(session.next_draft.tree): new}
        for _ in range(levels[0]):
            grow_level(model, session.draft.tree, old, text)
        first = session.draft.tree.snapshot(8)
        for _ in range(levels[1]):
            grow_level(model, session.draft.tree, old, text)
        for _ in range(levels[2]):
            grow_level(model, session.next_draft.tree, new, text)
        session.next_draft.has_growth = heard
        verdict = decide(model, first, text)
        stop = chooser.choose(verdict.stop)
        bonus = chooser.choose(verdict.bonus_row(stop))
        run = [*first.tree.path(stop), bonus]
        choose(pool, session, run)
        text += run
        if len(run) >= LENGTH:
            put(out, model, text, len(PROMPT), chooser.mass)
            return
        assert session.draft is not None
        tree = session.draft.tree
        growths[id(tree)].rerooted()
        grow_level(model, tree, growths[id(tree)], text)
        second = tree.snapshot(8)
        verdict = decide(model, second, text)
        for stop in np.flatnonzero(verdict.stop).tolist():
            residual = verdict.bonus_row(stop)
            for bonus in np.flatnonzero(residual).tolist():
                mass = chooser.mass * verdict.stop[stop] * residual[bonus]
                put(out, model, [*text, *second.tree.path(stop), bonus], len(PROMPT), mass)

    chooser.runs(program)
    assert out.sum() == pytest.approx(1.0, abs=1e-12)
    return float(np.abs(out - tail_law(model, list(PROMPT), 0)).max())


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.GREEDY], ids=lambda v: v.value)
@pytest.mark.parametrize(("levels", "heard"), [((1, 0, 2), True), ((1, 1, 2), False), ((0, 1, 2), True)])
def test_a_session_that_moves_keeps_its_law(
    levels, heard: bool, law: DraftMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(error(Model(seed), law, levels, monkeypatch, heard=heard) for seed in range(3)) < 1e-12


def test_choosing_the_better_tree_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(Model(0), DraftMode.SAMPLED, (1, 2, 1), monkeypatch, keep_if_likely) > 1e-3
