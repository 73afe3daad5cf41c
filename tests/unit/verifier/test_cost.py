"""The cost of a step as a line over its rows: learned from steps, never falling, never below zero."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootward.engine.tabular import TabularModel
from verifier_service.cost import SIZES, WARM, Machine, StepCost, measure


def test_nothing_is_known_before_the_first_step() -> None:
    assert not StepCost().known
    assert StepCost().seconds(8) == 0.0


def test_steps_of_one_size_tell_nothing_about_others() -> None:
    cost = StepCost()
    cost.add(8, 0.02)
    assert cost.seconds(1) == cost.seconds(100) == pytest.approx(0.02)


def test_the_line_is_found_and_followed_when_the_machine_changes() -> None:
    cost = StepCost()
    for scale in (1.0, 3.0):
        for rows in [1, 4, 16, 64] * 100:
            cost.add(rows, scale * (0.01 + 0.001 * rows))
        for rows in (1, 10, 100):
            assert cost.seconds(rows) == pytest.approx(scale * (0.01 + 0.001 * rows), rel=1e-3)


def test_one_step_that_was_held_up_is_not_believed_in_full() -> None:
    cost = StepCost()
    for rows in [1, 4, 16, 64] * 25:
        cost.add(rows, 0.01 + 0.001 * rows)
    cost.add(16, 5.0)
    for rows in (1, 16, 64):
        assert cost.seconds(rows) == pytest.approx(0.01 + 0.001 * rows, rel=0.25)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 10.0)), min_size=1, max_size=20), st.integers(1, 300))
def test_more_rows_never_look_cheaper_and_none_costs_less_than_nothing(steps, rows: int) -> None:
    cost = StepCost()
    for size, seconds in steps:
        cost.add(size, seconds)
    assert -1e-9 <= cost.seconds(rows) <= cost.seconds(rows + 1) + 1e-9


def machine(cost: Callable[[int], float]) -> Machine:
    table = StepCost()
    for rows in SIZES:
        table.add(rows, cost(rows))
    return Machine(table)


def test_what_was_measured_on_an_idle_machine_is_corrected_by_the_first_steps() -> None:
    busy = machine(lambda rows: 0.05 + 0.002 * rows)
    busy.steps.at_work()
    assert not busy.steps.warm
    for _ in range(WARM):
        busy.stepped(1, 1.6 * 0.052, trees=False)
    assert busy.steps.warm
    for rows in (1, 8, 32):
        assert busy.plain_s(rows) == pytest.approx(1.6 * (0.05 + 0.002 * rows), rel=0.02)


def test_a_step_with_a_tree_that_is_slower_than_others_says_that_the_machine_is() -> None:
    shared = machine(lambda rows: 0.1)
    for slow in (1.0, 1.5, 0.8):
        for _ in range(60):
            shared.stepped(5, 1.2 * slow * 0.1, trees=True)
        assert shared.step_s(5) == pytest.approx(1.2 * slow * 0.1, rel=0.02)
        assert shared.step_s(5) / shared.plain_s(5) == pytest.approx(1.2, rel=0.1)


def test_a_plain_step_among_them_says_what_the_tree_s_share_is() -> None:
    shared = machine(lambda rows: 0.1)
    for _ in range(300):
        for _ in range(9):
            shared.stepped(5, 0.15, trees=True)
        shared.stepped(1, 0.12, trees=False)
    assert shared.step_s(5) == pytest.approx(0.15, rel=0.05)
    assert shared.plain_s(1) == pytest.approx(0.12, rel=0.05)


def test_two_kinds_of_trees_on_one_machine_share_its_plain_steps() -> None:
    """Plain steps are told to one of them, and tell the other as well what its trees cost."""
    drafted = machine(lambda rows: 0.1)
    local = Machine(drafted.steps, "local")
    for _ in range(10):
        for _ in range(20):
            local.stepped(5, 0.14, trees=True)
        doubt = local.steps.doubt("local")
        drafted.stepped(1, 0.1, trees=False)
        assert local.steps.doubt("local") < doubt
    assert drafted.plain_s(1) == pytest.approx(0.1, rel=0.02)
    assert local.step_s(5) == pytest.approx(0.14, rel=0.02)
    assert drafted.step_s(5) == drafted.plain_s(5)  # of whose trees nothing is known


@pytest.mark.parametrize("seed", range(5))
def test_sizes_are_compared_by_steps_close_in_time(seed: int) -> None:
    """A machine whose speed moves by half every few steps; trees of eight nodes, others now and then."""
    rng = random.Random(seed)
    true = {1: 1.0, 2: 1.0, 4: 1.0, 6: 1.0, 8: 1.25, 9: 1.27, 12: 1.37, 16: 1.6, 32: 2.5, 64: 4.0}
    speed = lambda: rng.choice([1.0, 1.0, 1.2, 1.5])  # noqa: E731
    table, now = StepCost(), 1.0
    for _ in range(9):
        now = speed()
        for rows in SIZES:
            table.add(rows, 0.06 * now * true[rows] * rng.lognormvariate(0.0, 0.07))
    table.at_work()
    found = Machine(table)
    for i in range(1000):
        now = speed() if i % 30 == 0 else now
        trees = i >= WARM and i % 100 != 99
        rows = 1 if not trees else rng.choice([6, 16]) if i % 24 == 0 else 9
        found.stepped(
            rows, (1.1 if trees else 1.0) * 0.06 * now * true[rows] * rng.lognormvariate(0.0, 0.07), trees=trees
        )
    for rows in (6, 9, 16):
        assert found.step_s(rows) / found.plain_s(1) == pytest.approx(1.1 * true[rows], rel=0.12)
    assert found.step_s(9) / found.step_s(6) == pytest.approx(true[9], rel=0.07)


def test_measuring_leaves_the_model_idle() -> None:
    model = TabularModel(5, seed=1, max_positions=16)
    free = model.num_free_slots
    ticks = count()
    cost = measure(model, (1, 8, 32), clock=lambda: 0.5 * next(ticks))
    assert cost.seconds(8) == pytest.approx(0.5)
    assert model.num_free_slots == free


@pytest.mark.parametrize("held_up", [0, 1])
def test_a_first_step_with_trees_that_was_held_up_does_not_count_against_trees(held_up: int) -> None:
    shared = machine(lambda rows: 0.1)
    for _ in range(WARM):
        shared.stepped(1, 0.1, trees=False)
    for i in range(6):
        shared.stepped(6, 0.6 if i == held_up else 0.11, trees=True)
    shared.stepped(1, 0.1, trees=False)
    assert shared.step_s(6) / shared.plain_s(1) == pytest.approx(1.1, rel=0.05)


def test_one_step_of_a_new_size_that_was_held_up_is_forgotten_again() -> None:
    cost = lambda rows: 0.05 + 0.002 * rows  # noqa: E731
    shared, large = machine(cost), 181
    for _ in range(10):
        shared.stepped(32, cost(32), trees=False)
    shared.stepped(large, 10.0 * cost(large), trees=False)
    assert shared.plain_s(large) < 2.0 * cost(large)
    for _ in range(30):
        shared.stepped(32, cost(32), trees=False)
        shared.stepped(large, cost(large), trees=False)
    assert shared.plain_s(large) == pytest.approx(cost(large), rel=0.1)
    assert shared.plain_s(32) == pytest.approx(cost(32), rel=0.1)


def test_trees_before_any_plain_step_tell_how_fast_the_machine_is_at_work() -> None:
    shared = machine(lambda rows: 0.1)
    shared.steps.at_work()
    for _ in range(300):
        shared.stepped(6, 0.16, trees=True)
    assert shared.step_s(6) == pytest.approx(0.16, rel=0.02)
    assert shared.plain_s(1) == pytest.approx(0.16, rel=0.1)


def test_what_is_measured_begins_when_steps_are_recorded() -> None:
    """The second time of a size takes ten times as long."""
    model = TabularModel(5, seed=1, max_positions=64)
    now, times = [0.0], dict.fromkeys((1, 8, 32), 0)
    forward = model.forward

    def slow(batch, **more):  # type: ignore[no-untyped-def]
        size = len(batch[0].node)
        times[size] += 1
        now[0] += 5.0 if times[size] == 2 else 0.5
        return forward(batch, **more)

    model.forward = slow  # type: ignore[method-assign]
    cost = measure(model, (1, 8, 32), clock=lambda: now[0])
    for rows in (1, 8, 32):
        assert cost.seconds(rows) == pytest.approx(0.5)


def test_steps_that_all_cost_the_same_are_cheap_to_learn_from() -> None:
    """No more than two corrections a step, however many sizes are known."""
    shared, rng = machine(lambda rows: 0.005), random.Random(1)
    belief, counted = shared.steps._belief, [0]
    observe = belief.observe

    def counting(*arguments):  # type: ignore[no-untyped-def]
        counted[0] += 1
        observe(*arguments)

    belief.observe = counting  # type: ignore[method-assign]
    for _ in range(500):
        shared.stepped(rng.choice([5, 9, 17]), 0.005 * rng.lognormvariate(0.0, 0.07), trees=True)
    assert counted[0] < 1.5 * 500
