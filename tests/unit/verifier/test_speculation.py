"""The speculation controller: what it learns, what it decides, and how close it comes to the best fixed size on simulated machines."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.controller_simulation import SCENARIOS, share_of_best
from rootward.engine.tabular import TabularModel
from verifier_service.speculation import MAX_KINDS, PROBE_EVERY, RoundResult, SpeculationController, Statistics
from verifier_service.step_time import SIZES, StepTime, measure

FLAT = dict.fromkeys((1, 2, 3, 5, 9, 17, 33, 65), 0.05)
SEEDS = 2


def rounds(
    controller: SpeculationController,
    one: Statistics,
    num: int,
    *,
    accepted: int,
    most: int = 64,
    step_s: float = 0.05,
    wait: float = 0.0,
    sessions: int = 1,
) -> list[int]:
    """Rounds of which the first `accepted` nodes are accepted; returns their sizes."""
    sizes = []
    for _ in range(num):
        controller.plan({one: sessions}, most=most)
        nodes, _ = one.begin_round(1, most)
        path = tuple(range(1, min(accepted, nodes) + 1))
        one.add(1, RoundResult(nodes, nodes, path, wait if nodes else 0.0))
        controller.step_time.add(sessions * (nodes + 1), step_s, drafted=nodes > 0)
        sizes.append(nodes)
    return sizes


def test_reaches_most_of_the_best_fixed_size_on_simulated_machines_and_drafts() -> None:
    scenarios = SCENARIOS[::2]
    assert len(scenarios) >= 20
    shares = [float(np.mean([share_of_best(scenario, seed)[0] for seed in range(SEEDS)])) for scenario in scenarios]
    assert np.mean(shares) >= 0.95
    assert min(shares) >= 0.8


def test_decodes_plainly_but_for_trials_when_nothing_is_accepted() -> None:
    controller = SpeculationController(StepTime(FLAT))
    one = controller.of("bad")
    rounds(controller, one, 100, accepted=0, wait=0.05)
    sizes = rounds(controller, one, 1000, accepted=0, wait=0.05)
    assert not one.active
    assert 0 < sum(size > 0 for size in sizes) < 50


@pytest.mark.parametrize(("sessions", "share", "active"), [(8, 1.0, True), (8, 0.1, False), (1, 0.1, True)])
def test_trees_of_a_few_sessions_must_be_worth_the_time_of_all(sessions: int, share: float, active: bool) -> None:
    """A step with trees takes 1.2 times as long, however few; a session's own tree, where there is one, holds nobody else up."""
    rows = {sessions * (size + 1): 0.06 for size in SIZES[1:8]}
    controller = SpeculationController(StepTime({sessions: 0.05, sessions + 1: 0.06} | rows))
    one = controller.of("look-up")
    for i in range(200):
        nothing = i % 10 >= 10 * share
        one.add(1, RoundResult(found_nothing=True) if nothing else RoundResult(1, 1, (1,), 0.0))
        controller.plan({one: sessions}, most=1)
    assert one.active == active
    assert one.expected_trees(sessions) == pytest.approx(max(1.0, share * sessions))


def test_a_trial_of_a_slow_draft_does_not_begin_speculation() -> None:
    controller = SpeculationController(StepTime(FLAT))
    one = controller.of("right and slow")
    rounds(controller, one, 200, accepted=1, wait=0.08)
    assert not one.active
    one.begin_trial()
    controller.plan({one: 1}, most=64)
    assert not one.active, "its wait is remembered"


def test_begins_again_when_the_draft_becomes_good() -> None:
    controller = SpeculationController(StepTime(FLAT))
    one = controller.of("text")
    rounds(controller, one, 200, accepted=0, wait=0.05)
    assert not one.active
    rounds(controller, one, 2000, accepted=8, wait=0.005)
    assert one.active
    assert one.usual_nodes >= 8


def test_a_good_draft_on_a_dear_target_gets_large_trees() -> None:
    controller = SpeculationController(StepTime({rows: 1.0 + 0.01 * rows for rows in FLAT}))
    one = controller.of("good")
    rounds(controller, one, 300, accepted=30, step_s=1.2)
    assert one.usual_nodes >= 24


def test_rows_of_a_shared_step_go_to_the_sessions_whose_nodes_are_accepted() -> None:
    controller = SpeculationController(StepTime({rows: 0.02 + 0.004 * rows for rows in FLAT}))
    good, bad = controller.of("good"), controller.of("bad")
    for _ in range(200):
        for one, path in ((good, (1, 2, 3, 4, 5, 6)), (bad, (1,))):
            one.add(1, RoundResult(8, 8, path, 0.0))
    controller.plan({good: 4, bad: 4}, most=16)
    controller.plan({good: 4, bad: 4}, most=16)
    assert good.usual_nodes >= 5
    assert not bad.active or bad.usual_nodes <= 1


@pytest.mark.parametrize("sessions", [1, 4, 16])
def test_more_sessions_never_get_larger_trees_where_rows_cost(sessions: int) -> None:
    def size(num: int) -> int:
        controller = SpeculationController(StepTime({rows: 0.05 + 0.002 * rows for rows in FLAT}))
        one = controller.of("text")
        for _ in range(100):
            one.add(1, RoundResult(16, 16, (1, 2, 5, 9), 0.0))
        controller.plan({one: num}, most=16)
        return one.usual_nodes if one.active else 0

    assert size(2 * sessions) <= size(sessions)


def test_the_size_of_a_round_is_fixed_by_past_rounds_alone() -> None:
    """Two rounds that begin between the same results get the same size, whatever else has happened to their trees."""
    controller = SpeculationController(StepTime(FLAT))
    one = controller.of("text")
    rounds(controller, one, 50, accepted=4)
    controller.plan({one: 2}, most=16)
    assert one.begin_round(1, 16) == one.begin_round(2, 16)
    assert one.begin_round(1, 3)[1] <= 3


def test_one_session_at_a_time_tries_trees_and_another_continues_when_it_ends() -> None:
    controller = SpeculationController(StepTime(FLAT))
    one = controller.of("bad")
    rounds(controller, one, 100, accepted=0, wait=0.05)
    one.pause_left = 0
    controller.plan({one: 2}, most=16)
    assert one.begin_round(1, 16)[0] > 0
    assert one.begin_round(2, 16) == (0, 0)
    one.forget_session(1)
    assert one.begin_round(2, 16)[0] > 0


def test_a_trial_whose_trees_do_not_come_ends() -> None:
    controller = SpeculationController(StepTime(FLAT))
    one = controller.of("bad")
    rounds(controller, one, 100, accepted=0, wait=0.05)
    one.pause_left = 0
    controller.plan({one: 1}, most=16)
    one.begin_round(1, 16)
    for _ in range(PROBE_EVERY):
        one.add(1, RoundResult())
    assert not one.uses_trees(1)
    assert one.pause_left >= PROBE_EVERY


@pytest.mark.parametrize("sessions", [1, 16])
def test_the_pause_between_trials_is_counted_in_steps_however_many_sessions_share_them(sessions: int) -> None:
    controller = SpeculationController(StepTime(FLAT))
    one = controller.of("bad")
    rounds(controller, one, 100, accepted=0, wait=0.05)
    one.pause_left = PROBE_EVERY
    for _ in range(PROBE_EVERY - 1):
        controller.plan({one: sessions}, most=16)
        for session in range(sessions):
            assert one.begin_round(session, 16) == (0, 0)
            one.add(session, RoundResult())
    controller.plan({one: sessions}, most=16)
    assert one.begin_round(1, 16)[0] > 0


def test_a_paused_kind_is_planned_again_when_its_number_of_sessions_changes() -> None:
    """Three of four nodes are accepted: worth the rows of one session, not those of eight."""
    controller = SpeculationController(StepTime({rows: 0.05 + 0.02 * max(0, rows - 8) for rows in range(1, 66)}))
    one = controller.of("text")
    for _ in range(300):
        controller.plan({one: 1}, most=4)
        nodes, _ = one.begin_round(1, 4)
        one.add(1, RoundResult(nodes, nodes, tuple(range(1, min(3, nodes) + 1)), 0.0))
    assert one.active
    controller.plan({one: 8}, most=4)
    assert not one.active
    pause = one.pause_left
    assert pause > 2
    controller.plan({one: 8}, most=4)
    assert (one.active, one.pause_left) == (False, pause - 1)
    controller.plan({one: 1}, most=4)
    assert one.active


def test_one_session_of_many_tries_another_size() -> None:
    controller = SpeculationController(StepTime({rows: 1.0 + 0.01 * rows for rows in FLAT}))
    one = controller.of("good")
    rounds(controller, one, 300, accepted=30, step_s=1.2)
    alone = 0
    for _ in range(2 * PROBE_EVERY):
        controller.plan({one: 4}, most=64)
        sizes = [one.begin_round(session, 64)[0] for session in range(4)]
        assert sizes[1:] == [sizes[1]] * 3
        alone += sizes[0] != sizes[1]
    assert alone


@pytest.mark.parametrize(("most", "tried"), [(16, [2, 2, 5, 5, 7, 7, 15, 15]), (6, [2, 2, 5, 5]), (1, [])])
def test_coarse_sizes_above_the_limit_are_skipped(most: int, tried: list[int]) -> None:
    controller = SpeculationController(StepTime({rows: 1.0 + 0.01 * rows for rows in FLAT}))
    one = controller.of("text")
    sizes = rounds(controller, one, len(tried) + 4, accepted=4, step_s=1.1, most=most)
    assert sizes[: len(tried)] == tried
    assert set(sizes[len(tried) :]) <= set(range(most + 1))
    assert one.num_probes <= len(tried) + 1


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 10.0)), min_size=1, max_size=60))
def test_the_time_of_a_step_never_falls_with_its_rows(steps: list[tuple[int, float]]) -> None:
    step_time = StepTime(FLAT)
    for rows, seconds in steps:
        step_time.add(rows, seconds)
    times = [step_time.seconds(rows) for rows in range(1, 400)]
    assert min(times) > 0
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))


def test_a_change_of_speed_between_steps_of_one_size_scales_all_sizes() -> None:
    step_time = StepTime({1: 0.05, 8: 0.1})
    for _ in range(60):
        step_time.add(8, 0.2)
    assert step_time.seconds(8) == pytest.approx(0.2, rel=0.01)
    assert step_time.seconds(1) == pytest.approx(0.1, rel=0.2)


def test_steps_of_alternating_sizes_correct_what_a_size_costs() -> None:
    step_time = StepTime({1: 0.05, 8: 0.05})
    for _ in range(200):
        step_time.add(1, 0.05)
        step_time.add(8, 0.1)
    assert step_time.seconds(8) / step_time.seconds(1) == pytest.approx(2.0, rel=0.05)


def test_a_drafter_that_slows_the_steps_it_grows_trees_beside_is_not_worth_them() -> None:
    """One more token a round, of steps that take 2.5 times as long: as long as all steps before this one did, whatever their size."""
    controller = SpeculationController(StepTime(FLAT))
    one = controller.of("shared machine")
    for _ in range(600):
        controller.plan({one: 1}, most=64)
        nodes, _ = one.begin_round(1, 64)
        one.add(1, RoundResult(nodes, nodes, (1,) if nodes else (), 0.0))
        controller.step_time.add(nodes + 1, 0.125 if nodes else 0.05, drafted=nodes > 0)
    assert not one.active
    step_time = controller.step_time
    assert step_time.seconds(9) / step_time.seconds(1, drafted=False) == pytest.approx(2.5, rel=0.1)


def test_the_speed_factor_of_drafters_does_not_count_for_trees_of_the_verifier() -> None:
    """Steps with trees of drafters take 2.5 times as long, and the verifier's own trees gain one token in steps that do not."""
    controller = SpeculationController(StepTime(FLAT))
    one = controller.of("looked up")
    for turn in range(600):
        controller.plan({one: 1}, most=64, from_drafters=False)
        nodes, _ = one.begin_round(1, 64)
        one.add(1, RoundResult(nodes, nodes, (1,) if nodes else (), 0.0))
        drafted = turn // 20 % 2 > 0
        controller.step_time.add(nodes + 1, 0.125 if drafted else 0.05, drafted=drafted)
    assert one.active
    assert one.speedup == pytest.approx(2.0, rel=0.1)


def test_one_step_that_was_held_up_hardly_counts() -> None:
    step_time = StepTime(FLAT)
    for _ in range(20):
        step_time.add(9, 0.05)
    step_time.add(9, 5.0)
    assert step_time.seconds(9) < 0.065


def test_nothing_is_decided_before_a_step_was_seen() -> None:
    controller = SpeculationController()
    one = controller.of("text")
    controller.plan({one: 1}, most=16)
    assert one.begin_round(1, 16) == (0, 0)
    controller.step_time.add(1, 0.05)
    controller.plan({one: 1}, most=16)
    assert one.begin_round(1, 16)[0] > 0


def test_kinds_of_rounds_that_requests_make_up_are_bounded() -> None:
    controller = SpeculationController()
    used = controller.of("used")
    for i in range(2 * MAX_KINDS):
        controller.of(i)
        assert controller.of("used") is used
    assert len(controller._kinds) == MAX_KINDS


def test_the_wait_of_sizes_that_were_not_tried_follows_the_nearest_one() -> None:
    one = Statistics()
    assert one.draft_wait(8) == 0.0
    one.add(1, RoundResult(8, 8, (), 0.01))
    assert one.draft_wait(0) == 0.0
    assert one.draft_wait(4) < one.draft_wait(8) == 0.01 < one.draft_wait(16) < 0.02


def test_one_long_wait_at_first_is_one_of_many() -> None:
    one = Statistics()
    one.add(1, RoundResult(8, 8, (), 0.1))
    for _ in range(9):
        one.add(1, RoundResult(8, 8, (), 0.0))
    assert one.draft_wait(8) == pytest.approx(0.01)


def test_a_wait_that_is_not_known_changes_nothing() -> None:
    one = Statistics()
    one.add(1, RoundResult(8, 8, (), 0.01))
    one.add(1, RoundResult(8, 8, (), None))
    assert one.draft_wait(8) == 0.01


def test_steps_are_measured_on_a_slot_that_is_given_back() -> None:
    model = TabularModel(5, seed=1)
    ticks = iter(np.arange(0.0, 1e6, 0.5).tolist())
    step_time = measure(model, clock=lambda: next(ticks))
    assert step_time.seconds(1) == pytest.approx(0.5)
    assert step_time.seconds(SIZES[-1]) == pytest.approx(0.5)
    model.check_idle()
