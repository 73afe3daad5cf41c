"""Choice of a drafter for a session, and of moves between drafters."""

from __future__ import annotations

import pytest

from verifier_service.placement import DrafterView, Move, best_drafter, moves


def view(
    name: str, used: int = 0, capacity: int = 16, *, own: int | None = None, room: int | None = None, **more
) -> DrafterView:
    free = capacity - used if room is None else room
    return DrafterView(name, free, capacity, used, used if own is None else own, **more)


@pytest.mark.parametrize(
    ("views", "best"),
    [
        ([], None),
        ([view("full", 16), view("down", room=0)], None),
        ([view("a", 3), view("b", 2)], "b"),
        ([view("small", 0, 2), view("large", 8, 64)], "small"),  # by share: the small one is empty
        ([view("far", latency_s=0.04), view("near", latency_s=0.01)], "near"),
        ([view("far", latency_s=0.04), view("near", 15, latency_s=0.01)], "far"),
        ([view("elsewhere", near=False), view("here", 7)], "here"),
        ([view("elsewhere", near=False), view("here", 9)], "elsewhere"),
        ([view("elsewhere", near=False, latency_s=0.01), view("here", latency_s=0.03)], "elsewhere"),  # measured
        ([view("poor", gain=1.5), view("good", gain=3.0)], "good"),
        ([view("poor", gain=1.5), view("good", 14, gain=3.0)], "poor"),
        ([view("known", 4, gain=2.0, latency_s=0.01), view("new")], "new"),  # what is not known is tried
        ([view("new", 4), view("known", gain=2.0, latency_s=0.01)], "known"),
    ],
)
def test_best_drafter_by_free_share_tokens_per_round_and_latency(views, best) -> None:
    assert best_drafter(views) == best


def after(views: list[DrafterView], steps: list[Move]) -> dict[str, int]:
    held = {v.name: v.used for v in views}
    for step in steps:
        held[step.source] -= 1
        held[step.target] += 1
    return held


def test_sessions_move_to_a_new_drafter_until_loads_are_balanced() -> None:
    views = [view("old", 16), view("new", 0)]
    held = after(views, moves(views, most=100, most_urgent=0))
    assert held == {"old": 9, "new": 7}  # 9 is no more than 1.25 times 7 and one
    assert moves([view("old", held["old"]), view("new", held["new"])], most=100, most_urgent=0) == []


def test_moves_are_limited() -> None:
    assert moves([view("old", 16), view("new")], most=2, most_urgent=8) == [Move("old", "new")] * 2


@pytest.mark.parametrize(
    "views",
    [
        [view("old", 7), view("new")],  # half of its capacity is free: moving gains nothing
        [view("old", 16), view("new", room=0)],
        [view("old", 16), view("new", fresh=False)],
        [view("old", 16, fresh=False), view("new")],
        [view("old", 16, own=0), view("new")],  # not ours to move
        [view("old", 4, 8), view("new", 8, 16)],  # the same share
    ],
)
def test_what_does_not_move(views) -> None:
    assert moves(views, most=100, most_urgent=100) == []


def test_one_that_queues_is_left_however_little_it_holds() -> None:
    assert moves([view("old", 7, queue_s=0.5), view("new")], most=1, most_urgent=0) == [Move("old", "new")]


def test_sessions_of_a_leaving_drafter_move_first_to_drafters_with_room() -> None:
    views = [view("leaving", 5, leaving=True), view("a", 14), view("b", 15)]
    steps = moves(views, most=2, most_urgent=8)
    assert [step.source for step in steps] == ["leaving"] * 3
    assert all(step.urgent for step in steps)
    assert after(views, steps) == {"leaving": 2, "a": 16, "b": 16}


def test_sessions_of_a_leaving_drafter_stay_where_no_other_has_room() -> None:
    assert moves([view("a", 5, leaving=True), view("b", 3, room=0, leaving=True)], most=2, most_urgent=8) == []


def test_pairs_that_no_session_fits_are_passed_over_and_not_counted() -> None:
    views = [view("leaving", 5, leaving=True), view("misfit"), view("full", 16), view("fuller", 17, 17), view("a", 4)]

    def start(move: Move) -> bool:
        return "misfit" not in (move.source, move.target) and move.source != "fuller"

    steps = moves(views, most=2, most_urgent=3, start=start)
    assert steps == [Move("leaving", "a", urgent=True)] * 3 + [Move("full", "a")] * 2


def test_three_verifiers_that_see_the_same_do_not_swing() -> None:
    """Each moves its own by the same loads, then all hear the new ones: it settles and stays."""
    held = {"old": [6, 5, 5], "new": [0, 0, 0]}
    seen = set()
    for _ in range(40):
        used = {name: sum(own) for name, own in held.items()}
        plans = [moves([view(n, used[n], own=held[n][i]) for n in held], most=2, most_urgent=0) for i in range(3)]
        for i, plan in enumerate(plans):
            for step in plan:
                held[step.source][i] -= 1
                held[step.target][i] += 1
        if not any(plans):
            break
        seen.add(tuple(sum(own) for own in held.values()))
    else:
        raise AssertionError(f"never settled: {seen}")
    assert abs(sum(held["old"]) - sum(held["new"])) <= 4
