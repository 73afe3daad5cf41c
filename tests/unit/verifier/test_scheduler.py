"""The scheduler is a function of values: what launches, what waits, what is never decided by the tree itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.scheduler import Plan, View, patience_s, plan, share


def decide(*views: View, turn: bool = False) -> Plan:
    return plan(views, prefill_chunk=10, prefill_turn=turn)


def waiting(session: int = 1, **changes) -> View:
    base = {"drafting": True, "patience_s": 1.0, "cap": 8}
    return View(session, **(base | changes))


def test_without_a_drafter_a_session_decodes_at_once() -> None:
    assert decide(View(1, cap=8)).decode == (1,)


def test_a_full_tree_is_verified_and_an_empty_one_waited_for() -> None:
    assert decide(waiting(arrived=8)).verify == ((1, 8),)
    assert decide(waiting(arrived=3, waited_s=0.25)) == Plan(wait_s=0.75)


def test_patience_ends_in_verify_if_anything_arrived_and_in_decode_if_nothing_did() -> None:
    assert decide(waiting(arrived=1, waited_s=1.0)).verify == ((1, 8),)
    assert decide(waiting(arrived=0, waited_s=1.0)).decode == (1,)


def test_a_drafter_at_rest_is_not_waited_for() -> None:
    assert decide(waiting(arrived=2, at_rest=True)).verify == ((1, 8),)
    assert decide(waiting(arrived=0, at_rest=True)).decode == (1,)


def test_sessions_that_wait_do_not_hold_up_those_that_are_ready() -> None:
    step = decide(waiting(1, arrived=8), waiting(2, arrived=1), View(3, cap=8))
    assert step == Plan(verify=((1, 8),), decode=(3,))


def test_prefill_and_rounds_take_turns() -> None:
    filling, ready = View(1, prefill_left=25), View(2, cap=8)
    assert decide(filling, ready, turn=True) == Plan(prefill=((1, 10),))
    assert decide(filling, ready, turn=False) == Plan(decode=(2,))
    assert decide(filling, waiting(2), turn=False) == Plan(prefill=((1, 10),))  # nothing else to do meanwhile


def test_the_prefill_budget_is_shared_in_order() -> None:
    assert decide(View(1, prefill_left=7), View(2, prefill_left=7), turn=True).prefill == ((1, 7), (2, 3))


def test_shares_shrink_with_load_down_to_plain_decoding() -> None:
    assert [share(64, n) for n in (0, 1, 2, 16, 32, 64, 1000)] == [63, 63, 31, 3, 1, 0, 0]
    assert decide(waiting(arrived=8, cap=0)).decode == (1,)


def test_nothing_to_do_sleeps_until_something_happens() -> None:
    assert decide() == Plan(wait_s=None)


@pytest.mark.parametrize(("expected", "wanted"), [(1.0, 0.0), (3.0, 0.02), (100.0, 0.05)])
def test_waiting_is_bounded_by_what_it_can_gain(expected: float, wanted: float) -> None:
    assert patience_s(expected_tokens=expected, plain_s=0.01, limit_s=0.05) == pytest.approx(wanted)


VIEWS = st.builds(
    waiting,
    session=st.integers(0, 5),
    arrived=st.integers(0, 12),
    at_rest=st.booleans(),
    waited_s=st.sampled_from([0.0, 0.5, 1.0]),
    drafting=st.booleans(),
    cap=st.integers(0, 8),
)


@given(st.lists(VIEWS, max_size=6, unique_by=lambda v: v.session))
def test_the_cap_never_depends_on_any_tree(views: list[View]) -> None:
    """Rule L2: how much is verified is fixed beforehand; a tree's size only decides when waiting stops."""
    step = decide(*views)
    by_session = {v.session: v for v in views}
    for session, cap in step.verify:
        assert cap == by_session[session].cap
        assert by_session[session].arrived > 0
    for session in step.decode:
        view = by_session[session]
        assert view.arrived == 0 or not view.drafting or view.cap < 1
