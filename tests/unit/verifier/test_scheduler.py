"""The scheduler is a function of values: what launches, what waits, who makes room; what is never decided by the tree itself."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from verifier_service.scheduler import Limits, Plan, SessionView, schedule, share


def decide(*views: SessionView, **limits) -> Plan:
    return schedule(views, Limits(**({"rows": 20, "chunk": 10, "floor": 4} | limits)))


def waiting(session: int = 1, **changes) -> SessionView:
    base = {"drafting": True, "patience_s": 1.0, "max_nodes": 8}
    return SessionView(session, **(base | changes))


def test_without_a_drafter_a_session_decodes_at_once() -> None:
    assert decide(SessionView(1, max_nodes=8)).decode == (1,)


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
    step = decide(waiting(1, arrived=8), waiting(2, arrived=1), SessionView(3, max_nodes=8))
    assert step == Plan(verify=((1, 8),), decode=(3,))


def test_nothing_to_do_sleeps_until_something_happens() -> None:
    assert decide() == Plan(wait_s=None)


# -- rows ---------------------------------------------------------------------------------------------------------------


def test_one_step_holds_prefill_and_rounds() -> None:
    assert decide(SessionView(1, prefill_left=25), waiting(2, arrived=8)) == Plan(prefill=((1, 10),), verify=((2, 8),))
    assert decide(SessionView(1, prefill_left=25), waiting(2)) == Plan(
        prefill=((1, 10),)
    )  # the wait costs at most a chunk


def test_a_first_round_joins_the_end_of_its_prefill() -> None:
    first = SessionView(1, prefill_left=7, joins=True)
    assert decide(first) == Plan(prefill=((1, 7),), decode=(1,))
    assert decide(first).chunks == ()
    grown = waiting(1, prefill_left=7, joins=True, arrived=3)
    assert decide(replace(grown, waited_s=1.0)) == Plan(prefill=((1, 7),), verify=((1, 8),))
    assert decide(grown) == Plan(prefill=((1, 7),))  # its tree may still be waited for, its prefill not
    assert decide(replace(first, prefill_left=11)) == Plan(prefill=((1, 10),))
    assert decide(replace(first, joins=False)) == Plan(prefill=((1, 7),))
    step = decide(first, SessionView(2, prefill_left=9, joins=True, rank=(0, 2)), SessionView(3))
    assert (step.prefill, step.decode, step.chunks) == (((1, 7), (2, 2)), (3, 1), ((2, 2),))
    assert step.launches == ((3, 0), (1, 0))


def test_rows_of_first_rounds_count() -> None:
    views = [SessionView(n, prefill_left=2, joins=True, rank=(0, n)) for n in range(6)]
    step = decide(*views)  # a chunk of ten: three prompts with their roots, and one token of the fourth
    assert (step.decode, step.prefill) == ((0, 1, 2), ((0, 2), (1, 2), (2, 2), (3, 1)))
    grown = waiting(1, prefill_left=7, joins=True, arrived=8)
    assert decide(grown).verify == ((1, 8),)  # the first may exceed the budget
    assert decide(SessionView(2, prefill_left=1, rank=(-1, 0)), grown) == Plan(prefill=((2, 1), (1, 7)))


def test_a_first_round_without_blocks_is_left_for_later() -> None:
    tight = {"free_blocks": 1, "block_size": 4}
    assert decide(SessionView(1, prefill_left=4, joins=True), **tight) == Plan(prefill=((1, 4),))
    assert decide(SessionView(1, prefill_left=4, joins=True, room=1), **tight) == Plan(prefill=((1, 4),), decode=(1,))


def test_prefill_takes_what_rounds_leave_and_at_least_its_floor() -> None:
    rounds = [waiting(n, arrived=7, waited_s=float(n)) for n in (1, 2)]
    assert decide(SessionView(9, prefill_left=25), *rounds, rows=24).prefill == ((9, 8),)
    step = decide(SessionView(9, prefill_left=25), *rounds, rows=16)
    assert step == Plan(prefill=((9, 8),), verify=((2, 8),))  # the floor would not have fitted beside both
    assert decide(SessionView(9, prefill_left=25), waiting(1, arrived=8), rows=6, chunk=3, floor=3).prefill == ((9, 3),)


def test_rounds_that_have_waited_longest_run_first() -> None:
    waited = dict.fromkeys(range(7), 0.0)
    rounds = dict.fromkeys(waited, 0)
    for _ in range(14):
        step = decide(*(SessionView(n, waited_s=s, rank=(0, n)) for n, s in waited.items()), rows=4)
        assert len(step.decode) == 4
        for n in waited:
            waited[n] = 0.0 if n in step.decode else waited[n] + 1.0
            rounds[n] += n in step.decode
    assert min(rounds.values()) >= 7  # of 8 on average


def test_a_round_larger_than_the_budget_still_comes_to_its_turn() -> None:
    assert decide(waiting(arrived=8, waited_s=1.0), SessionView(2), rows=4).verify == ((1, 8),)


def test_the_prefill_budget_is_shared_by_rank() -> None:
    step = decide(SessionView(1, prefill_left=7, rank=(0, 1)), SessionView(2, prefill_left=7, rank=(-1, 2)))
    assert step.prefill == ((2, 7), (1, 3))


def test_a_short_prompt_does_not_wait_for_a_long_one_and_half_of_the_rows_stay_for_the_first() -> None:
    long, short, other = (SessionView(n, prefill_left=size, rank=(0, n)) for n, size in ((1, 100), (2, 3), (3, 90)))
    assert decide(long, short).prefill == ((1, 7), (2, 3))
    assert decide(long, other).prefill == ((1, 5), (3, 5))
    assert decide(long, other, short).prefill == ((1, 5), (2, 3), (3, 2))
    assert decide(short, replace(long, rank=(0, 9))).prefill == ((2, 3), (1, 7))  # the first one is the shortest
    assert decide(long, replace(short, rank=(1, 2))).prefill == ((1, 10),)  # nor does a worse priority overtake
    assert decide(long, replace(long, session=4, rank=(0, 4))).prefill == ((1, 10),)


def test_prompts_of_all_lengths_come_to_their_turn_beside_ever_new_short_ones() -> None:
    left, steps = {0: 400}, 0
    while 0 in left:
        steps += 1
        left |= {steps: 10}
        for number, size in decide(*(SessionView(n, prefill_left=k, rank=(0, n)) for n, k in left.items())).prefill:
            left[number] -= size
            if not left[number]:
                del left[number]
    assert steps <= 80  # in each of which it has five of ten rows
    assert sum(size < 10 for size in left.values()) <= 1


def test_shares_shrink_with_load_down_to_plain_decoding() -> None:
    assert [share(64, n) for n in (0, 1, 2, 16, 32, 64, 1000)] == [63, 63, 31, 3, 1, 0, 0]
    assert decide(waiting(arrived=8, max_nodes=0)).decode == (1,)


# -- blocks -------------------------------------------------------------------------------------------------------------

MEMORY = {"block_size": 4, "free_blocks": 1}


def test_rows_that_fit_into_held_blocks_cost_none() -> None:
    full = {"block_size": 4, "free_blocks": 0}
    assert decide(SessionView(1, room=1), SessionView(2, room=0, rank=(0, 1)), **full).decode == (1,)


def test_a_round_that_lacks_blocks_preempts_the_worst_ranked_first() -> None:
    views = [
        waiting(1, arrived=8, rank=(0, 1), room=1, blocks=3),
        SessionView(2, prefill_left=9, rank=(0, 2), blocks=1),
        waiting(3, arrived=2, rank=(0, 3), blocks=1),
        waiting(4, arrived=2, rank=(-1, 4), blocks=9),  # arrived last, but its priority is better
    ]
    assert decide(*views, **MEMORY) == Plan(preempt=(3,))
    rest = [v for v in views if v.session != 3]
    assert decide(*rest, block_size=4, free_blocks=2).verify == ((1, 8),)


def test_a_better_rank_is_never_preempted_and_a_round_without_room_waits_with_its_tree() -> None:
    better = SessionView(1, rank=(0, 1), room=1, blocks=5)
    worse = waiting(2, arrived=8, rank=(0, 2), blocks=5)
    assert decide(better, worse, block_size=4, free_blocks=0) == Plan(decode=(1,))


def test_no_session_is_preempted_without_a_use() -> None:
    views = [SessionView(1, rank=(0, 1)), waiting(2, rank=(0, 2), blocks=0), SessionView(3, rank=(0, 3), room=1)]
    assert decide(*views, block_size=4, free_blocks=0) == Plan(decode=(3,))


def test_a_chunk_shrinks_to_the_blocks_there_are() -> None:
    assert decide(SessionView(1, prefill_left=20, room=2), **MEMORY).prefill == ((1, 6),)


RANKS = st.permutations(range(6))
VIEWS = st.builds(
    waiting,
    session=st.integers(0, 5),
    prefill_left=st.sampled_from([0, 0, 3, 30]),
    arrived=st.integers(0, 12),
    at_rest=st.booleans(),
    waited_s=st.sampled_from([0.0, 0.5, 1.0]),
    drafting=st.booleans(),
    max_nodes=st.integers(0, 8),
    room=st.integers(0, 3),
    blocks=st.integers(0, 3),
)
SOME = st.lists(VIEWS, max_size=6, unique_by=lambda v: v.session)


def ranked(views: list[SessionView], ranks: list[int]) -> list[SessionView]:
    return [replace(v, rank=(0, ranks[v.session])) for v in views]


@settings(deadline=None)
@given(SOME, RANKS, st.integers(1, 30), st.integers(0, 8))
def test_the_cap_never_depends_on_any_tree(views: list[SessionView], ranks: list[int], rows: int, free: int) -> None:
    """Rule L2: how much is verified is fixed beforehand; a tree's size only decides when waiting stops."""
    step = decide(*ranked(views, ranks), rows=rows, block_size=4, free_blocks=free)
    by_session = {v.session: v for v in views}
    for session, cap in step.verify:
        assert cap == by_session[session].max_nodes
        assert by_session[session].arrived > 0
    for session in step.decode:
        view = by_session[session]
        assert view.arrived == 0 or not view.drafting or view.max_nodes < 1


def whole(view: SessionView) -> int:
    """Blocks that the session needs in all, for its prompt or its round."""
    rows = view.prefill_left or 1 + view.max_nodes
    return view.blocks + -(-max(0, rows - view.room) // 4)


def rows_of(step: Plan, by_session: dict[int, SessionView]) -> dict[int, int]:
    rows = dict(step.prefill) | dict.fromkeys(step.decode, 1)
    return rows | {n: 1 + min(cap, by_session[n].arrived) for n, cap in step.verify}


@settings(deadline=None)
@given(SOME, RANKS, st.integers(1, 30), st.integers(0, 8))
def test_a_step_never_needs_more_than_there_is(
    views: list[SessionView], ranks: list[int], rows: int, free: int
) -> None:
    by_session = {v.session: v for v in views}
    step = decide(*ranked(views, ranks), rows=rows, block_size=4, free_blocks=free)
    taken = rows_of(step, by_session)
    assert sum(-(-max(0, size - by_session[n].room) // 4) for n, size in taken.items()) <= free
    assert sum(size for _, size in step.prefill) <= 10
    launched = len(step.verify) + len(step.decode)
    if launched > 1:
        assert sum(taken.values()) <= max(rows, 10)
    if step.preempt:
        assert not taken


@settings(deadline=None)
@given(SOME, RANKS, st.integers(1, 30), st.integers(0, 8), st.integers(0, 3))
def test_preemption_always_ends_in_a_step(
    views: list[SessionView], ranks: list[int], rows: int, free: int, shared: int
) -> None:
    """No deadlock: preempting what the plan says always ends in a step, whatever part of the blocks turns out to be shared."""
    left = ranked(views, ranks)
    # Each alone must fit: more is refused at admission.
    total = max([free + sum(v.blocks for v in left), 8, *map(whole, left)])
    free = total - sum(v.blocks for v in left)
    for _ in range(len(views) + 1):
        step = decide(*left, rows=rows, block_size=4, free_blocks=free)
        if not step.preempt:
            break
        for number in step.preempt:
            gone = next(v for v in left if v.session == number)
            assert gone.rank > min(v.rank for v in left)
            left.remove(gone)
            free += max(0, gone.blocks - shared)
        free = max(free, total - sum(v.blocks for v in left))  # a block that is not free has a holder
    wants = [v for v in left if decide(v).wait_s is None]
    best = min((v.rank for v in left), default=None)
    if any(v.rank == best for v in wants):
        assert not step.empty
