"""Whether speculation pays is measured, forgotten slowly, asked again, and never looks at a tree."""

from __future__ import annotations

from verifier_service.cost import StepCost
from verifier_service.gain import FIRST_PAUSE, PLAIN_EVERY, TRIAL, WHOLE_EVERY, Gain, Gains, Pace, Worth


def known_plain(seconds: float = 0.01) -> Pace:
    plain = Pace()
    plain.add(1, seconds)
    plain.add(1, seconds)
    return plain


def test_a_new_session_tries_once_plain_decoding_has_been_seen() -> None:
    assert not Gain(Pace()).pays
    assert Gain(known_plain()).pays
    assert Gain(Pace()).speedup == 1.0


def test_what_pays_goes_on_with_a_plain_round_now_and_then() -> None:
    gain = Gain(known_plain())
    plain = 0
    for _ in range(5 * PLAIN_EVERY):
        if gain.pays:
            gain.add(3, 0.015, with_tree=True)
        else:
            plain += 1
            gain.add(1, 0.01, with_tree=False)
    assert plain == 5
    assert 1.9 < gain.speedup < 2.1


def test_what_loses_stops_after_a_trial_and_is_tried_again_later_and_later() -> None:
    gain = Gain(known_plain())
    pattern = []
    for _ in range(TRIAL + FIRST_PAUSE + TRIAL + 2 * FIRST_PAUSE):
        pattern.append(gain.pays)
        gain.add(2 if gain.pays else 1, 0.05 if gain.pays else 0.01, with_tree=gain.pays)
    assert pattern[:TRIAL] == [True] * TRIAL
    assert pattern[TRIAL : TRIAL + FIRST_PAUSE] == [False] * FIRST_PAUSE
    again = pattern[TRIAL + FIRST_PAUSE :]
    assert 0 < sum(again) <= TRIAL + 1
    assert not any(again[TRIAL + 1 :])


def test_many_sessions_that_lose_at_once_lose_one_trial_and_pause_in_steps() -> None:
    gain, load = Gain(known_plain()), 8
    for _ in range(2):  # the step in which the trial is lost, and one that had begun
        for _ in range(load):
            gain.add(1, 1.0, with_tree=True, load=load)
    steps = 0
    while gain.paused:
        for _ in range(load):
            gain.add(1, 0.01, with_tree=False, load=load)
        steps += 1
    assert steps == FIRST_PAUSE


def test_waiting_in_vain_counts_against_trees() -> None:
    gain = Gain(known_plain())
    for _ in range(TRIAL):
        gain.add(1, 0.03, with_tree=True)
    assert not gain.pays
    assert gain.plain.tokens_per_s == 100


def line(base: float, slope: float) -> StepCost:
    cost = StepCost()
    for rows in [1, 2, 4, 8, 16, 32, 64] * 20:
        cost.add(rows, base + slope * rows)
    return cost


def learned(share: float = 0.7, most: int = 16, rounds: int = 4000) -> Worth:
    """Node n lies on the accepted path with probability share^n."""
    worth = Worth()
    for k in range(rounds):
        worth.add(most, [n for n in range(1, most + 1) if (k * 0.6180339887) % 1.0 < share**n])
    return worth


def test_what_was_never_tried_is_tried() -> None:
    assert Worth().best(16, 1, line(1.0, 0.1)) == 16
    assert learned(most=8).best(16, 1, line(1.0, 10.0)) == 16
    assert learned().best(16, 1, StepCost()) == 16


def test_nodes_are_worth_their_rows_or_left_out() -> None:
    worth = learned()
    assert worth.best(16, 1, line(1.0, 0.0)) == 16  # rows cost nothing
    sizes = [worth.best(16, load, line(1.0, 0.02)) for load in (1, 2, 4, 8, 16, 64)]
    assert sizes == sorted(sizes, reverse=True)
    assert 4 <= sizes[0] < 16
    assert sizes[-1] <= 2
    assert worth.best(16, 1, line(0.0, 1.0)) == 0  # every row costs as much as a step


def test_the_number_of_nodes_is_the_best_of_all() -> None:
    worth, cost = learned(0.8), line(1.0, 0.03)
    rates = [(1 + sum(0.8**i for i in range(1, n + 1))) / cost.seconds(3 * (n + 1)) for n in range(17)]
    assert abs(worth.best(16, 3, cost) - rates.index(max(rates))) <= 1


def test_a_kind_verifies_fewer_nodes_under_load_and_all_of_them_now_and_then() -> None:
    gain = Gain(known_plain(), line(1.0, 0.02))
    for k in range(2000):
        gain.add(3, 0.015, with_tree=True, cap=16, path=[n for n in (1, 2, 3) if (k * 0.6180339887) % 1.0 < 0.8**n])
    caps = []
    for _ in range(2 * WHOLE_EVERY):
        caps.append(gain.nodes(16, 4))
        gain.add(3, 0.015, with_tree=True, cap=caps[-1], path=(1,))
    assert caps.count(16) == 2
    assert max(c for c in caps if c != 16) <= 3
    assert gain.nodes(0, 1) == 0


def test_kinds_share_plain_decoding_and_nothing_else() -> None:
    gains = Gains()
    one, two = gains.of("a"), gains.of("b")
    assert gains.of("a") is one
    assert gains.speedup == 1.0
    for _ in range(2):
        one.add(1, 0.01, with_tree=False)
    two.add(3, 0.015, with_tree=True)
    assert gains.speedup == two.speedup > 1.9
    assert one.speedup == 1.0
