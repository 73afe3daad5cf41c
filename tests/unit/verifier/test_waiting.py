"""The queue for KV slots: priority, then preempted sessions, then tenants in turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_service.kv_admission import MAX_HELD_LOGPROBS, WaitingQueue

NUMBERS = count()


@dataclass(eq=False)
class One:
    tenant: str = "a"
    priority: int = 0
    done: bool = False
    has_run: bool = False  # and was preempted
    num_held_logprobs: int = 0
    number: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def request(self) -> One:
        """Tenant and priority are all that is asked of it."""
        return self


def line(*ones: One) -> WaitingQueue:
    waiting: WaitingQueue = WaitingQueue()
    for one in ones:
        waiting.push(one)
    return waiting


def served(waiting: WaitingQueue, running=()) -> One:
    one = waiting.head(running)
    waiting.pop(one)
    return one


def drained(waiting: WaitingQueue) -> list[One]:
    return [served(waiting) for _ in range(len(waiting))]


def test_first_come_first_served_within_a_tenant() -> None:
    ones = [One() for _ in range(5)]
    assert drained(line(*ones)) == ones


def test_lower_priorities_run_earlier() -> None:
    late, early, middle = One(priority=3), One(priority=-1), One(priority=0)
    assert drained(line(late, early, middle)) == [early, middle, late]


def test_a_single_request_does_not_wait_behind_a_thousand_of_another_tenant() -> None:
    waiting = line(*(One("crowd") for _ in range(1000)))
    for _ in range(100):
        served(waiting)
    guest = One("guest")
    waiting.push(guest)
    assert served(waiting) is guest


def test_tenants_share_the_slots_equally_however_long_their_sessions_run() -> None:
    """Four slots; sessions of `long` stay three times as long as those of `short`."""
    waiting = line(*(One("long") for _ in range(50)), *(One("short") for _ in range(200)))
    running: list[tuple[int, One]] = []
    held: Counter[str] = Counter()
    for now in range(60):
        running = [(end, one) for end, one in running if end > now]
        while len(running) < 4:
            one = served(waiting, [other for _, other in running])
            running.append((now + (3 if one.tenant == "long" else 1), one))
        held.update(one.tenant for _, one in running)
    assert held["long"] == held["short"]


def test_a_tenant_that_was_away_saves_nothing_up() -> None:
    waiting = line(*(One("busy") for _ in range(50)))
    for _ in range(40):
        served(waiting)
    for _ in range(10):
        waiting.push(One("back"))
    names = [served(waiting).tenant for _ in range(10)]
    assert names.count("back") == 5


def test_nothing_is_kept_of_tenants_that_do_not_wait() -> None:
    waiting = line(One("always"))
    for i in range(200):
        waiting.push(One(f"guest {i}"))
        waiting.push(One("always"))
        served(waiting)
        served(waiting)
    assert len(waiting._served) <= 2


def test_the_preempted_come_first_but_not_before_a_better_priority() -> None:
    fresh, urgent = One(), One(priority=-1)
    old, older = One(number=-1, has_run=True), One(number=-2, has_run=True)
    waiting = line(fresh, urgent, old, older)
    assert drained(waiting) == [urgent, older, old, fresh]


def test_those_that_are_done_are_passed_over_and_not_counted() -> None:
    gone, stays, preempted = One("a"), One("b", priority=5), One(has_run=True)
    waiting = line(gone, stays, preempted)
    gone.done = preempted.done = True
    assert (len(waiting), waiting.num_fresh) == (1, 1)
    assert served(waiting) is stays
    assert waiting.head() is None
    assert waiting.remove_done() == [gone, preempted]
    assert not waiting._waiting


ONES = st.builds(One, tenant=st.sampled_from("abc"), priority=st.integers(-1, 1), done=st.booleans())


@settings(deadline=None)
@given(st.lists(st.tuples(ONES, st.sampled_from(["push", "front", "pop"])), max_size=30))
def test_each_request_that_is_not_cancelled_gets_one_slot(moves: list[tuple[One, str]]) -> None:
    waiting: WaitingQueue = WaitingQueue()
    came, left = [], []
    for one, move in moves:
        if move == "pop":
            left += [served(waiting)] if waiting.head() is not None else []
            continue
        came.append(one)
        one.has_run = move == "front"
        waiting.push(one)
    left += drained(waiting)
    assert sorted(one.number for one in left) == sorted(one.number for one in came if not one.done)


def test_preempted_ones_do_not_fill_the_queue() -> None:
    waiting = line(One(), One(), One(has_run=True))
    assert (waiting.num_fresh, len(waiting)) == (2, 3)


def test_logprobs_of_prompts_are_bounded_and_only_those_that_ask_for_them_wait() -> None:
    """Sixteen sessions with as many as one may have took two gigabytes of a verifier."""
    half = MAX_HELD_LOGPROBS // 2
    running = [One(num_held_logprobs=half)]
    more, few, plain = One(num_held_logprobs=half + 1), One(num_held_logprobs=1), One()
    waiting = line(more, few, plain)
    assert served(waiting, running) is plain
    assert waiting.head(running) is None
    running[0].num_held_logprobs -= 1
    assert served(waiting, running) is more
    assert waiting.head([*running, more]) is None
    assert served(waiting, [more]) is few


def test_one_session_may_have_more_logprobs_than_there_is_room_for() -> None:
    alone = One(num_held_logprobs=2 * MAX_HELD_LOGPROBS)
    waiting = line(alone)
    assert waiting.head([One(num_held_logprobs=1)]) is None
    assert served(waiting, [One()]) is alone


def test_a_preempted_session_keeps_its_room_for_logprobs_and_waits_for_none() -> None:
    preempted, fresh = One(has_run=True, num_held_logprobs=MAX_HELD_LOGPROBS), One(num_held_logprobs=1)
    waiting = line(fresh, preempted)
    assert served(waiting, [One(num_held_logprobs=1)]) is preempted
    assert waiting.head([preempted]) is None
    waiting.push(preempted)
    preempted.done = True
    assert served(waiting) is fresh
