"""Who is ready waits for who is nearly so, where they gain by one step for all."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.scheduler import LATE, Limits, Plan, SessionView, gathering_s, schedule

STEP_S = 0.06


def flat(rows: int) -> float:
    """A large model: any few rows take as long as one."""
    return STEP_S


def linear(rows: int) -> float:
    """Nothing is shared."""
    return 0.01 * rows


def waits(ready: list[SessionView], growing: list[SessionView], cost=flat, most_rows: int = 64) -> float:
    ready = [replace(view, arrived=5) for view in ready]
    return gathering_s(ready, growing, Limits(rows=most_rows, chunk=1, step_s=cost))


def soon(*seconds: float, priority: int = 0) -> list[SessionView]:
    """Sessions whose trees of five nodes are due in so many seconds."""
    return [
        SessionView(i, drafting=True, max_nodes=5, due_s=s, late_s=LATE * s, patience_s=1.0, rank=(priority, i))
        for i, s in enumerate(seconds)
    ]


def test_one_waits_for_another_for_less_than_half_a_step() -> None:
    assert waits(soon(0.0), soon(0.02)) == LATE * 0.02
    assert waits(soon(0.0), soon(0.029)) == LATE * 0.029
    assert waits(soon(0.0), soon(0.031)) == 0.0


def test_all_wait_while_it_costs_them_less_than_a_step_of_those_they_wait_for() -> None:
    assert waits(soon(*[0.0] * 4), soon(0.02)) == 0.0
    assert waits(soon(*[0.0] * 4), soon(0.009)) == LATE * 0.009
    assert waits(soon(0.0), soon(*[0.02] * 4)) == LATE * 0.02
    assert waits(soon(*[0.0] * 3), soon(*[0.037] * 5)) == LATE * 0.037  # 8 x 37 ms < 5 x 60 ms
    assert waits(soon(*[0.0] * 3), soon(*[0.038] * 5)) == 0.0


def test_the_time_that_a_tree_still_takes_counts_and_not_that_which_has_passed() -> None:
    begun = replace(soon(0.0)[0], due_s=0.005, late_s=0.0175)  # it takes 50 ms, of which 45 have passed
    assert waits(soon(*[0.0] * 7), [begun]) == pytest.approx(LATE * STEP_S / 8)  # 8 x 5 ms < 60 ms


def test_a_tree_that_is_late_is_given_up_before_it_has_cost_a_step() -> None:
    """Also one that should have taken long: an eighth of ten seconds is no time to wait."""
    late = replace(soon(0.0)[0], due_s=-0.02, late_s=1.25)
    assert waits(soon(0.0), [late]) == pytest.approx(LATE * STEP_S / 2)
    assert waits(soon(0.0), [replace(late, due_s=-0.031)]) == 0.0


def test_a_round_waits_for_the_last_one_that_is_worth_it() -> None:
    assert waits(soon(0.0), soon(0.01, 0.03, 0.2)) == LATE * 0.03


def test_no_round_waits_where_a_shared_step_saves_nothing() -> None:
    assert waits(soon(0.0), soon(0.001), linear) == 0.0
    assert waits(soon(0.0), soon(0.001), lambda rows: 0.0) == 0.0  # nothing is known


def test_no_round_waits_for_overdue_or_lower_ranked_rounds() -> None:
    assert waits(soon(0.0), soon(0.0)) == 0.0
    assert waits(soon(0.0), soon(0.02, priority=1)) == 0.0
    assert waits(soon(0.0, priority=1), soon(0.02)) == LATE * 0.02
    assert waits([], soon(0.02)) == 0.0


def test_no_round_waits_for_rounds_that_would_not_fit_into_the_step() -> None:
    assert waits(soon(0.0), soon(0.01, 0.02), most_rows=18) == LATE * 0.02
    assert waits(soon(0.0), soon(0.01, 0.02), most_rows=17) == LATE * 0.01
    assert waits(soon(0.0), soon(0.01, 0.02), most_rows=11) == 0.0


@given(st.lists(st.floats(0.0, 0.2), max_size=6), st.integers(1, 6))
def test_no_wait_is_longer_than_a_step(due: list[float], num_ready: int) -> None:
    held_s = waits(soon(*[0.0] * num_ready), soon(*due))
    assert held_s == 0.0 or (held_s in [LATE * s for s in due] and held_s < LATE * STEP_S)


# -- in the scheduler ---------------------------------------------------------------------------------------------------


def tree(session: int, **changes: object) -> SessionView:
    base = {"drafting": True, "patience_s": 1.0, "max_nodes": 5, "rank": (0, session)}
    return SessionView(session, **(base | changes))  # type: ignore[arg-type]


def decide(*views: SessionView, **limits: float) -> Plan:
    return schedule(views, Limits(**({"rows": 64, "chunk": 10, "step_s": flat} | limits)))  # type: ignore[arg-type]


def test_a_full_tree_waits_for_one_that_is_due() -> None:
    assert decide(tree(1, arrived=5), tree(2, arrived=1, due_s=0.02, late_s=0.03)) == Plan(wait_s=0.03, held=True)
    assert decide(tree(1, arrived=5), tree(2, arrived=1)) == Plan(verify=((1, 5),))
    assert decide(tree(1, arrived=5), tree(2, arrived=5)).verify == ((1, 5), (2, 5))


def test_it_waits_no_longer_than_the_other_would() -> None:
    late = tree(2, arrived=1, due_s=0.05, late_s=0.06, waited_s=0.99)
    assert decide(tree(1, arrived=5), late).wait_s == pytest.approx(0.01)


def test_plain_rounds_do_not_wait_and_prompts_are_read_at_once() -> None:
    due = tree(2, arrived=1, due_s=0.02, late_s=0.03)
    last = SessionView(1, drafting=True, rank=(0, 1))  # without a cap: the last token of its request
    for plain in (SessionView(1), last, tree(1, at_rest=True), tree(1, waited_s=1.0), tree(1, patience_s=0.0)):
        assert decide(plain, due) == Plan(decode=(1,))
    assert decide(SessionView(1), tree(3, arrived=5), due) == Plan(verify=((3, 5),), decode=(1,))
    assert decide(SessionView(1, prefill_left=4), tree(3, arrived=5), due) == Plan(prefill=((1, 4),), verify=((3, 5),))


def test_news_do_not_put_off_the_end_of_a_wait_and_room_in_the_step_is_needed() -> None:
    ready, due = tree(1, arrived=5), tree(2, arrived=4, due_s=0.02, late_s=0.03)
    assert decide(ready, due, hold_s=0.005) == Plan(wait_s=0.005, held=True)
    assert decide(ready, due, hold_s=0.0) == decide(ready, due, rows=11) == Plan(verify=((1, 5),))
    assert decide(ready, due, free_blocks=11) == Plan(verify=((1, 5),))


# -- over many rounds -----------------------------------------------------------------------------------------------------


def rounds_a_second(
    starts: list[float], growth_s: list[float], *, gather: bool, kept: float = 0.0, until_s: float = 60.0
) -> float:
    """Rounds per second and session on a clock that only counts: sessions draft for their time after each commit, or, with probability
    `kept`, have a tree at once."""
    dice = random.Random(1)
    ready_at, late_at, done, now_s, held_until_s = list(starts), list(starts), 0, 0.0, math.inf
    while now_s < until_s:
        views = [
            tree(
                i,
                arrived=5 if at <= now_s + 1e-9 else 0,
                due_s=at - now_s,
                late_s=max(0.0, late - now_s),
                waited_s=now_s,
                patience_s=1e9,
            )
            for i, (at, late) in enumerate(zip(ready_at, late_at, strict=True))
        ]
        limits = Limits(rows=1000, chunk=10, step_s=flat if gather else lambda rows: 0.0, hold_s=held_until_s - now_s)
        step = schedule(views, limits)
        if step.empty:
            next_s = min(at for at in ready_at if at > now_s + 1e-9)
            if step.held:
                held_until_s = min(held_until_s, now_s + step.wait_s)
            now_s = min(next_s, held_until_s)
            continue
        now_s, held_until_s = now_s + STEP_S, math.inf
        for session, _ in step.verify:
            takes_s = 0.0 if dice.random() < kept else growth_s[session]
            ready_at[session], late_at[session], done = now_s + takes_s, now_s + LATE * takes_s, done + 1
    return done / until_s / len(starts)


@pytest.mark.parametrize("num", [2, 3, 8])
def test_sessions_out_of_step_come_into_step(num: int) -> None:
    starts = [0.013 * i for i in range(num)]
    growth_s = [0.02] * num
    apart, together = (rounds_a_second(starts, growth_s, gather=g) for g in (False, True))
    assert together == pytest.approx(1 / (STEP_S + 0.02), rel=0.02)
    assert apart < 0.75 * together


@pytest.mark.parametrize("kept", [0.0, 0.25])
@pytest.mark.parametrize("share", [0.4, 0.5, 0.6, 0.7])
def test_sessions_that_begin_with_kept_trees_do_not_split_the_steps(kept: float, share: float) -> None:
    """Whatever the time of a tree, in steps, and whether or not some sessions have theirs at once: the better of both is nearly reached,
    one step for all and steps that wait for none."""
    growth_s = [share * STEP_S] * 8
    starts = [0.007 * i for i in range(8)]
    apart, together = (rounds_a_second(starts, growth_s, gather=g, kept=kept) for g in (False, True))
    assert together > 0.95 * max(apart, 1 / (STEP_S + growth_s[0]))


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5])
def test_sessions_of_different_speeds_share_steps(share: float) -> None:
    """The last trees of a step are waited for while the others are ready."""
    growth_s = [share * STEP_S * speed for speed in (0.8, 0.86, 0.92, 0.97, 1.03, 1.08, 1.14, 1.2)]
    together = rounds_a_second([0.013 * i for i in range(8)], growth_s, gather=True)
    assert together > 0.98 / (STEP_S + max(growth_s))


def test_drafts_of_all_speeds_seldom_lose_and_gain_on_average() -> None:
    ratios = []
    for seed in range(40):
        dice = random.Random(seed)
        num, usual_s = dice.choice([2, 3, 4, 8]), dice.uniform(0.005, 0.12)
        starts = [dice.uniform(0.0, 0.1) for _ in range(num)]
        growth_s = [usual_s * dice.uniform(0.7, 1.3) for _ in range(num)]
        apart, together = (rounds_a_second(starts, growth_s, gather=g, until_s=10.0) for g in (False, True))
        ratios.append(together / apart)
    assert min(ratios) > 0.95
    assert sum(ratios) / len(ratios) > 1.1
