"""The line in front of the engine: priority, then who was running before, then tenants in turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_service.kv_admission import WaitingLine

NUMBERS = count()


@dataclass(eq=False)
class One:
    tenant: str = "a"
    priority: int = 0
    work: int = 1
    done: bool = False
    number: int = field(default_factory=lambda: next(NUMBERS))


def line(*ones: One) -> WaitingLine[One]:
    waiting: WaitingLine[One] = WaitingLine()
    for one in ones:
        waiting.push(one)
    return waiting


def drained(waiting: WaitingLine[One]) -> list[One]:
    return [waiting.pop() for _ in range(len(waiting))]


def test_first_come_first_served_within_a_tenant() -> None:
    ones = [One() for _ in range(5)]
    assert drained(line(*ones)) == ones


def test_lower_priorities_run_earlier() -> None:
    late, early, middle = One(priority=3), One(priority=-1), One(priority=0)
    assert drained(line(late, early, middle)) == [early, middle, late]


def test_a_single_request_does_not_wait_behind_a_thousand_of_another_tenant() -> None:
    crowd = [One("crowd") for _ in range(1000)]
    waiting = line(*crowd)
    for _ in range(100):
        waiting.pop()
    guest = One("guest")
    waiting.push(guest)
    assert guest in [waiting.pop(), waiting.pop()]


def test_tenants_share_by_work_and_not_by_requests() -> None:
    waiting = line(*(One("long", work=30) for _ in range(10)), *(One("short", work=10) for _ in range(30)))
    first = [waiting.pop() for _ in range(20)]
    asked = {name: sum(one.work for one in first if one.tenant == name) for name in ("long", "short")}
    assert abs(asked["long"] - asked["short"]) <= 30


def test_being_away_saves_nothing_up() -> None:
    waiting = line(*(One("busy") for _ in range(50)))
    for _ in range(40):
        waiting.pop()
    for _ in range(10):
        waiting.push(One("back"))
    names = [waiting.pop().tenant for _ in range(10)]
    assert 4 <= names.count("back") <= 6


def test_clocks_of_tenants_that_came_and_went_are_not_kept() -> None:
    """Somebody always waits, so the line never begins anew; who is ahead of the others stays so."""
    waiting = line(One("always"), One("ahead", work=10_000))
    assert [waiting.pop().tenant, waiting.pop().tenant] == ["always", "ahead"]
    waiting.push(One("always"))
    for i in range(2000):
        waiting.push(One(f"guest {i}"))
        waiting.push(One("always"))
        waiting.pop()
        waiting.pop()
    (tenants,) = waiting._fresh.values()
    assert len(tenants._clock) < 200
    waiting.push(One("ahead"))
    waiting.push(One("new"))
    assert [one.tenant for one in drained(waiting)][-1] == "ahead"


def test_the_preempted_come_first_but_not_before_a_better_priority() -> None:
    fresh, urgent, old, older = One(), One(priority=-1), One(number=-1), One(number=-2)
    waiting = line(fresh, urgent)
    waiting.push_front(old)
    waiting.push_front(older)
    assert drained(waiting) == [urgent, older, old, fresh]


def test_whoever_has_left_is_passed_over_and_nothing_is_kept_of_it() -> None:
    gone, stays, preempted = One("a"), One("b", priority=5), One()
    waiting = line(gone, stays)
    waiting.push_front(preempted)
    gone.done = preempted.done = True
    assert (len(waiting), list(waiting)) == (1, [stays])
    assert waiting.pop() is stays
    assert waiting.head() is None
    assert not waiting._fresh
    assert not waiting._back
    with pytest.raises(IndexError):
        waiting.pop()


ONES = st.builds(
    One, tenant=st.sampled_from("abc"), priority=st.integers(-1, 1), work=st.integers(1, 9), done=st.booleans()
)


@settings(deadline=None)
@given(st.lists(st.tuples(ONES, st.sampled_from(["push", "front", "pop"])), max_size=30))
def test_everybody_who_stays_is_served_once(moves: list[tuple[One, str]]) -> None:
    waiting: WaitingLine[One] = WaitingLine()
    came, served = [], []
    for one, move in moves:
        if move == "pop":
            served += [waiting.pop()] if waiting.head() is not None else []
            continue
        came.append(one)
        (waiting.push if move == "push" else waiting.push_front)(one)
    served += drained(waiting)
    assert sorted(one.number for one in served) == sorted(one.number for one in came if not one.done)


def test_whoever_leaves_behind_a_waiting_head_is_held_no_longer() -> None:
    head, others = One(), [One(tenant, priority) for tenant in "abc" for priority in (0, 1, 2)]
    waiting = line(head, *others)
    back = One(priority=1)
    waiting.push_front(back)
    for one in (*others, back):
        one.done = True
        waiting.discard(one)
    assert waiting.pop() is head
    assert not waiting._back
    assert not any(list(tenants) for tenants in waiting._fresh.values())


def test_preempted_ones_do_not_fill_the_queue() -> None:
    waiting = line(One(), One())
    waiting.push_front(One())
    assert (waiting.num_fresh, len(waiting)) == (2, 3)
