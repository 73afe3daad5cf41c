"""When a round launches, enumerated through the real scheduler: growth comes level by level, and something may happen while a tree waits.

A tree that comes to rest is launched at once; one that does not, waits. Whether it came to rest depends on its values (end of sequence,
exhausted support). So what happens to a waiting tree must not change how much of it is verified: not a lost drafter, not new load.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.rounds import LENGTH, Chooser, Model, V, decide, draw_by, grow_level, put, tail_law

from rootward.core.growth import Growth, Policy
from rootward.core.living_tree import LivingTree
from rootward.core.requests import Law
from verifier_service.scheduler import View, plan

CAP = 8
EVENTS = ("patience ends", "drafter lost", "load rises")
WRONG = ("drafter lost: tree dropped", "load rises: cap follows")


def launched(tree: LivingTree, *, at_rest: bool, waited_s: float = 0.0, cap: int = CAP) -> int | None:
    """Nodes to verify if the scheduler launches this session now; None while it waits."""
    step = plan([View(1, 0, True, len(tree), at_rest, waited_s, 1.0, cap)], prefill_chunk=1, prefill_turn=False)
    if step.empty:
        return None
    return step.verify[0][1] if step.verify else 0


def after(event: str, tree: LivingTree) -> int:
    """What the verifier does with a tree that is still waiting when the event comes."""
    if event == "patience ends":
        cap = launched(tree, at_rest=False, waited_s=2.0)
    elif event == "drafter lost":  # an orphan is at rest: what has arrived is verified
        cap = launched(tree, at_rest=True)
    elif event == "load rises":  # the cap was fixed when the round began
        cap = launched(tree, at_rest=False, waited_s=2.0, cap=CAP)
    elif event == "load rises: cap follows":
        cap = launched(tree, at_rest=False, waited_s=2.0, cap=1)
    else:
        cap = 0
    assert cap is not None
    return cap


def error(seed: int, law: Law, event: str, levels: int, monkeypatch: pytest.MonkeyPatch) -> float:
    model, prompt, chooser = Model(seed), [0, 1], Chooser()
    out = np.zeros((V,) * LENGTH)
    draw_by(chooser, monkeypatch)

    def program() -> None:
        tree = LivingTree(len(prompt), 0, vocab_size=V, eos_ids={2})
        growth = Growth(tree, Policy(law, node_cap=CAP, max_depth=3, topk=1, draws_per_level=1))
        cap = None
        for _ in range(levels):
            if cap is None:
                grow_level(model, tree, growth, prompt)
                cap = launched(tree, at_rest=growth.at_rest)
        first = tree.snapshot(after(event, tree) if cap is None else cap)
        verdict, target = decide(model, first, prompt)
        stop = chooser.choose(verdict.stop)
        bonus = chooser.choose(verdict.bonus_row(stop, target[stop]))
        put(out, model, [*prompt, *first.tree.path(stop), bonus], len(prompt), chooser.mass)

    chooser.runs(program)
    assert out.sum() == pytest.approx(1.0, abs=1e-12)
    return float(np.abs(out - tail_law(model, prompt, 0)).max())


@pytest.mark.parametrize("law", [Law.SAMPLED, Law.GREEDY], ids=lambda v: v.value)
@pytest.mark.parametrize("event", EVENTS)
def test_whatever_happens_while_a_tree_waits_the_law_is_exact(event: str, law: Law, monkeypatch) -> None:
    assert max(error(seed, law, event, levels, monkeypatch) for seed in range(8) for levels in (1, 2)) < 1e-12


@pytest.mark.parametrize("event", WRONG)
def test_dropping_or_cutting_a_waiting_tree_is_seen(event: str, monkeypatch) -> None:
    assert max(error(seed, Law.SAMPLED, event, 2, monkeypatch) for seed in range(8)) > 1e-3
