"""When a round launches, enumerated through the real scheduler: growth comes level by level, and something may happen while a tree waits.

A tree that comes to rest is launched at once; one that does not, waits. Whether it came to rest depends on its values (end of sequence,
exhausted support). So what happens to a waiting tree must not change how much of it is verified: not a lost drafter, not new load, not
a session that has to give its KV to others. More waiting is always allowed, even because of what has arrived: nodes that come meanwhile
are verified too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.rounds import LENGTH, Chooser, Model, V, decide, draw_by, grow_level, put, tail_law

from rootward.core.growth import BestFirst, Growth
from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode
from verifier_service.scheduler import Limits, Plan, SessionView, schedule

CAP = 8
EVENTS = (
    "patience ends",
    "drafter lost",
    "load rises",
    "preempted",
    "no room for a large tree",
    "joins the end of its prefill",
    "joins if its rows fit",
    "held for another session",
)
WRONG = (
    "joins if its rows fit: without its tree if not",
    "drafter lost: tree dropped",
    "load rises: cap follows",
    "preempted: tree dropped",
    "no room for a large tree: cut",
)


def launched(
    tree: LivingTree, *, at_rest: bool, waited_s: float = 0.0, cap: int = CAP, enough: int = CAP
) -> int | None:
    """Nodes to verify if the scheduler launches this session now; None while it waits."""
    view = SessionView(1, 0, True, len(tree), at_rest, waited_s, 1.0, cap, target_nodes=enough)
    step = schedule([view], Limits(rows=64, chunk=1))
    if step.empty:
        return None
    return step.verify[0][1] if step.verify else 0


def lacking_room(tree: LivingTree) -> bool:
    """Whether the rows of this tree find no blocks: two fit, and a session of better rank holds the rest."""
    mine = SessionView(1, 0, True, len(tree), False, 2.0, 1.0, CAP, rank=(0, 1), room=2)
    step = schedule([mine, SessionView(2, 0, rank=(0, 0), room=1)], Limits(rows=64, chunk=1, free_blocks=0))
    assert step.decode == (2,)
    return not step.verify


def joined(tree: LivingTree, *others: SessionView, chunk: int = 64) -> int | None:
    """Nodes to verify if the step that reads the last five tokens of the prompt launches this session; None if it does not."""
    mine = SessionView(1, 5, True, len(tree), False, 2.0, 1.0, CAP, rank=(0, 1), joins=True)
    step = schedule([mine, *others], Limits(rows=64, chunk=chunk))
    assert (1, 5) in step.prefill
    return dict(step.launches).get(1)


def after(event: str, tree: LivingTree, grow: Callable[[], object]) -> int:
    """What the verifier does with a tree that is still waiting when the event comes. `grow`: the drafter goes on meanwhile."""
    if event == "patience ends":
        cap = launched(tree, at_rest=False, waited_s=2.0)
    elif event == "drafter lost":  # an orphan is at rest: what has arrived is verified
        cap = launched(tree, at_rest=True)
    elif event == "load rises":  # the cap was fixed when the round began
        cap = launched(tree, at_rest=False, waited_s=2.0, cap=CAP)
    elif event == "preempted":  # what is committed is computed again; cap and tree stay, and the wait begins anew
        step = schedule([SessionView(1, 5, True, len(tree), False, 2.0, 1.0, CAP)], Limits(rows=64, chunk=5))
        assert step == Plan(prefill=((1, 5),))
        grow()
        cap = launched(tree, at_rest=False, waited_s=2.0)
    elif event.startswith("no room"):
        if lacking_room(tree):
            if event.endswith("cut"):
                return 1
            grow()
        cap = launched(tree, at_rest=False, waited_s=2.0)
    elif event == "joins the end of its prefill":
        cap = joined(tree)
    elif event.startswith("joins if its rows fit"):  # the prompt of another session leaves room for one node
        cap = joined(tree, SessionView(2, 1, rank=(0, 0)), chunk=8)
        if cap is None:
            if event.endswith("if not"):
                return 0
            grow()
            cap = launched(tree, at_rest=False, waited_s=2.0)
    elif event == "held for another session":
        # Its patience has ended; another tree is due, and one step shall serve both.
        mine, other = (
            SessionView(1, 0, True, len(tree), False, 2.0, 1.0, CAP),
            SessionView(2, 0, True, 1, False, 0.0, 1.0, CAP, due_s=0.02, late_s=0.02),
        )
        assert schedule([mine, other], Limits(rows=64, chunk=1, step_s=lambda rows: 0.06)) == Plan(
            wait_s=0.02, held=True
        )
        grow()
        cap = launched(tree, at_rest=False, waited_s=2.0)
    elif event == "load rises: cap follows":
        cap = launched(tree, at_rest=False, waited_s=2.0, cap=1)
    else:
        cap = 0
    assert cap is not None
    return cap


def error(
    seed: int,
    law: DraftMode,
    event: str,
    levels: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    draws: int = 1,
    enough: int = CAP,
    cap_of: Callable[[LivingTree, int], int] = lambda tree, cap: cap,
) -> float:
    model, prompt, chooser = Model(seed), [0, 1], Chooser()
    out = np.zeros((V,) * LENGTH)
    draw_by(chooser, monkeypatch)

    def program() -> None:
        tree = LivingTree(len(prompt), 0, vocab_size=V, eos_ids={2})
        shape = BestFirst(law, max_depth=3, topk=draws, draws_per_level=draws, root_family=(0.33, 0.27)[:draws])
        growth = Growth(tree, shape, node_cap=CAP)
        cap = None
        for _ in range(levels):
            if cap is None:
                grow_level(model, tree, growth, prompt)
                cap = launched(tree, at_rest=growth.at_rest, enough=enough)
        if cap is None:
            cap = after(event, tree, lambda: grow_level(model, tree, growth, prompt))
        first = tree.snapshot(cap_of(tree, cap))
        verdict = decide(model, first, prompt)
        stop = chooser.choose(verdict.stop)
        bonus = chooser.choose(verdict.bonus_row(stop))
        put(out, model, [*prompt, *first.tree.path(stop), bonus], len(prompt), chooser.mass)

    chooser.runs(program)
    assert out.sum() == pytest.approx(1.0, abs=1e-12)
    return float(np.abs(out - tail_law(model, prompt, 0)).max())


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.GREEDY], ids=lambda v: v.value)
@pytest.mark.parametrize("event", EVENTS)
def test_whatever_happens_while_a_tree_waits_the_law_is_exact(event: str, law: DraftMode, monkeypatch) -> None:
    assert max(error(seed, law, event, levels, monkeypatch) for seed in range(8) for levels in (1, 2)) < 1e-12


@pytest.mark.parametrize("event", WRONG)
def test_dropping_or_cutting_a_waiting_tree_is_seen(event: str, monkeypatch) -> None:
    assert max(error(seed, DraftMode.SAMPLED, event, 2, monkeypatch) for seed in range(8)) > 1e-3


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.GREEDY], ids=lambda v: v.value)
@pytest.mark.parametrize("enough", [1, 2, 3])
def test_a_round_that_waits_for_enough_nodes_verifies_all_that_have_come(
    enough: int, law: DraftMode, monkeypatch
) -> None:
    shape = {"draws": 2, "enough": enough}
    assert max(error(seed, law, "patience ends", 3, monkeypatch, **shape) for seed in range(6)) < 1e-12


def test_verifying_what_came_beyond_enough_by_what_it_is_is_seen(monkeypatch) -> None:
    def few(tree: LivingTree, cap: int) -> int:
        last = list(tree.nodes.values())[-1]
        return cap if last.token == 0 else len(tree) - 1

    shape = {"draws": 2, "enough": 3, "cap_of": few}
    assert max(error(seed, DraftMode.SAMPLED, "patience ends", 3, monkeypatch, **shape) for seed in range(6)) > 1e-3
