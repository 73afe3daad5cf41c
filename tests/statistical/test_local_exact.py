"""Sessions that change between a drafter's tree and one looked up by the verifier, enumerated through the real session, scheduler and
ladder: the text has the target's law, whoever stands in for whom, as long as no arrived tree is asked whether it is good enough.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.rounds import Chooser, Model, V, decide, draw_by, grow_level, put, tail_law
from support.services import verifier_settings

from rootward.core.growth import BestFirst, Growth
from rootward.core.living_tree import LivingTree, Snapshot
from rootward.core.requests import DraftMode, Rule, Stopping, VerifierRequest
from verifier_service.local_drafts import LocalDrafts
from verifier_service.scheduler import Limits, SessionView, schedule
from verifier_service.session import Draft, Session
from verifier_service.speculation import SpeculationController

PROMPT, LENGTH, CAP = (0, 1, 2, 0, 1), 4, 3
EXACT, SEEN = 1e-12, 1e-4
SCRIPTS = {
    "no drafter, then none": ("none", "none"),
    "no drafter, then one": ("none", "heard"),
    "a drafter, then it is lost": ("heard", "none"),
    "nothing heard, then what grew meanwhile": ("unheard", "heard"),
    "lost and found": ("heard", "none", "heard"),
}
Look = Callable[["Walk", Snapshot], bool]  # a wrong twin: whether the local tree replaces what has arrived


class Walk:
    """One session, round after round. The drafter's tree is one object: while nothing is heard its nodes have not arrived."""

    def __init__(self, seed: int, law: DraftMode, chooser: Chooser, *, instead: Look | None = None):
        self.model, self.law, self.chooser, self.instead = Model(seed), law, chooser, instead
        wanted = VerifierRequest("r", PROMPT, stopping=Stopping(LENGTH + CAP + 2))
        self.session = Session(1, wanted, Rule.TRAVERSAL, law, frozenset())
        self.ladder = LocalDrafts(
            verifier_settings(num_draft_tokens=16, local_draft="ngram"), V, SpeculationController()
        )
        self.ladder.attach(self.session)
        self.session.local.statistics.begin_round = lambda *_: (CAP, CAP)  # type: ignore[method-assign,union-attr]

    def run(self, script: tuple[str, ...], out: np.ndarray) -> None:
        session, self.levels = self.session, 2 if script.count("none") == len(script) - 1 else 1
        for drafter in script:
            if session.num_output < LENGTH:
                self.round(drafter)
        put(out, self.model, session.tokens, len(PROMPT), self.chooser.mass)

    def round(self, drafter: str) -> None:
        session, text = self.session, list(self.session.tokens)
        self.meet(drafter, text)
        draft = session.draft
        local = self.ladder.plan(session, CAP, 1)
        arrived = len(draft.tree) if draft is not None and draft.has_growth else 0
        view = SessionView(1, 0, draft is not None, arrived, True, 0.0, 0.0, CAP, local=local)
        step = schedule([view], Limits(rows=64, chunk=1))
        snapshot = draft.tree.snapshot(step.verify[0][1]) if step.verify and draft is not None else None
        if snapshot is not None:
            snapshot = self.wrong(snapshot)
        snapshot = self.ladder.launch(session, snapshot) or LivingTree(len(text), 0, vocab_size=V).snapshot(0)
        law = decide(self.model, snapshot, text)
        stop = self.chooser.choose(law.stop)
        bonus = self.chooser.choose(law.bonus_row(stop))
        tokens = (*snapshot.tree.path(stop), bonus)
        session.advance(tokens, len(snapshot.tree) - 1, missed=False)
        if draft is not None:
            draft.tree.commit(tokens)
            self.growth.rerooted()

    def meet(self, drafter: str, text: list[int]) -> None:
        if drafter == "none":
            self.session.draft = None
            return
        if self.session.draft is None:
            tree = LivingTree(len(text), 0, vocab_size=V, eos_ids={2})
            self.session.draft = Draft(None, 1, tree)
            shape = BestFirst(
                self.law,
                max_depth=2,
                topk=2,
                draws_per_level=1 + (self.law is DraftMode.GREEDY),
                root_family=(0.4, 0.3),
            )
            self.growth = Growth(tree, shape, node_cap=4)
        self.session.draft.has_growth = drafter == "heard"
        for _ in range(self.levels):
            grow_level(self.model, self.session.draft.tree, self.growth, text)

    def wrong(self, arrived: Snapshot) -> Snapshot | None:
        """What a wrong twin makes of an arrived tree; the honest ladder leaves it alone."""
        if self.instead is None:
            return arrived
        local = self.session.local
        assert local is not None
        draft, self.session.draft, local.length = self.session.draft, None, -1
        self.ladder.plan(self.session, CAP, 1)
        self.session.draft = draft
        if local.tree is None:
            return arrived
        return None if self.instead(self, arrived) else arrived


def error(seed: int, law: DraftMode, script: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, **twin) -> float:
    chooser, out = Chooser(), np.zeros((V,) * LENGTH)
    draw_by(chooser, monkeypatch)
    chooser.runs(lambda: Walk(seed, law, chooser, **twin).run(script, out))
    assert out.sum() == pytest.approx(1.0, abs=1e-12)
    return float(np.abs(out - tail_law(Model(seed), list(PROMPT), 0, LENGTH)).max())


def likely(walk: Walk, arrived: Snapshot) -> float:
    """What the drafter gives the first child that it drew; 1 if there is none."""
    first = next((i for i in range(1, len(arrived.tree)) if arrived.tree.sampled[i]), None)
    row = arrived.rows[int(arrived.tree.parent[first])] if first is not None else None
    return 1.0 if row is None else float(row[1][row[0] == arrived.tree.token[first]].sum() / row[1].sum())


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.GREEDY], ids=lambda v: v.value)
@pytest.mark.parametrize("script", SCRIPTS)
def test_changing_between_a_drafter_s_tree_and_a_local_one_keeps_the_law(
    script: str, law: DraftMode, monkeypatch
) -> None:
    assert max(error(seed, law, SCRIPTS[script], monkeypatch) for seed in range(8)) < EXACT


def test_replacing_an_unlikely_tree_is_seen(monkeypatch) -> None:
    twin = {"instead": lambda walk, arrived: likely(walk, arrived) < 0.4}
    scripts = (("heard",), ("unheard", "heard"))
    assert max(error(s, DraftMode.SAMPLED, script, monkeypatch, **twin) for s in range(8) for script in scripts) > SEEN
