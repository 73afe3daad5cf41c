"""The production path, enumerated: Growth draws, LivingTree cuts and re-roots, the batched law decides, twice over.

Every draw, verdict and bonus of round one and every draw of round two is enumerated; round two is summed in closed form. The committed
text, continued by the target, must have exactly the target's law. Two wrong twins show that the harness can see a bias.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.rounds import LENGTH, Chooser, Model, V, decide, draw_by, grow_level, put, start, tail_law

from rootward.core.living_tree import LivingTree
from rootward.core.requests import DraftMode

Cap = Callable[[Model, LivingTree, int], int]


def honest_cap(model: Model, tree: LivingTree, cap: int) -> int:
    return cap


def cut_before_unlikely(model: Model, tree: LivingTree, cap: int) -> int:
    """Wrong: stops before the first node whose own q is small."""
    snapshot = tree.snapshot(cap)
    for i in range(1, len(snapshot.rows)):
        above = snapshot.rows[snapshot.tree.parent[i]]
        assert above is not None
        if above[1][list(above[0]).index(snapshot.tree.token[i])] / above[1].sum() < 0.4:
            return i - 1
    return cap


def plain_if_it_looks_bad(model: Model, tree: LivingTree, cap: int) -> int:
    """Wrong: decodes plainly when the first node is not the draft's favourite."""
    first = next(iter(tree.nodes.values()), None)
    row = tree.root.row
    return cap if first is None or row is None or first.token == row[0][0] else 0


def error(
    model: Model,
    law: DraftMode,
    levels: tuple[int, int, int],
    caps: tuple[int, int],
    monkeypatch,
    cap: Cap = honest_cap,
    *,
    root_family: tuple[float, ...] = (0.4, 0.3),
) -> float:
    """Largest error of the law of the first LENGTH committed tokens over two rounds.

    levels: before the first snapshot, while it is verified, after the commit.
    """
    prompt = [0, 1]
    out = np.zeros((V,) * LENGTH)
    chooser = Chooser()

    draw_by(chooser, monkeypatch)

    def program() -> None:
        text = list(prompt)
        tree, growth = start(text, law, root_family=root_family)
        for _ in range(levels[0]):
            grow_level(model, tree, growth, text)
        first = tree.snapshot(cap(model, tree, caps[0]))
        verdict = decide(model, first, text)
        for _ in range(levels[1]):
            grow_level(model, tree, growth, text)
        stop = chooser.choose(verdict.stop)
        bonus = chooser.choose(verdict.bonus_row(stop))
        run = [*first.tree.path(stop), bonus]
        tree.commit(run)
        growth.rerooted()
        text += run
        if len(run) >= LENGTH:
            put(out, model, text, len(prompt), chooser.mass)
            return
        for _ in range(levels[2]):
            grow_level(model, tree, growth, text)
        second = tree.snapshot(cap(model, tree, caps[1]))
        verdict = decide(model, second, text)
        for stop in np.flatnonzero(verdict.stop).tolist():
            residual = verdict.bonus_row(stop)
            for bonus in np.flatnonzero(residual).tolist():
                mass = chooser.mass * verdict.stop[stop] * residual[bonus]
                put(out, model, [*text, *second.tree.path(stop), bonus], len(prompt), mass)

    chooser.runs(program)
    assert out.sum() == pytest.approx(1.0, abs=1e-12)
    return float(np.abs(out - tail_law(model, prompt, 0)).max())


SCHEDULES = [((1, 1, 0), (1, 2)), ((2, 0, 1), (2, 2)), ((1, 1, 1), (0, 3))]


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.GREEDY], ids=lambda v: v.value)
@pytest.mark.parametrize("seed", range(8))
def test_two_rounds_of_the_production_path_are_exact(
    seed: int, law: DraftMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels, caps = SCHEDULES[seed % len(SCHEDULES)]
    assert error(Model(seed), law, levels, caps, monkeypatch) < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_children_drawn_in_place_of_a_greedy_family_are_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level draws two nodes, so a family of three is not made."""
    levels, caps = SCHEDULES[seed % len(SCHEDULES)]
    family = (0.4, 0.3, 0.1)
    assert error(Model(seed), DraftMode.GREEDY, levels, caps, monkeypatch, root_family=family) < 1e-12


@pytest.mark.parametrize("wrong", [cut_before_unlikely, plain_if_it_looks_bad], ids=lambda f: f.__name__)
def test_the_harness_sees_a_cut_that_looks_at_values(wrong: Cap, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [error(Model(seed), DraftMode.SAMPLED, (1, 1, 0), (1, 2), monkeypatch, wrong) for seed in range(3)]
    assert max(errors) > 1e-3
