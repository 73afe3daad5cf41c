"""Whether speculation pays is measured, forgotten slowly, asked again, and never looks at a tree."""

from __future__ import annotations

from verifier_service.gain import FIRST_PAUSE, PLAIN_EVERY, TRIAL, Gain, Pace


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


def test_waiting_in_vain_counts_against_trees() -> None:
    gain = Gain(known_plain())
    for _ in range(TRIAL):
        gain.add(1, 0.03, with_tree=True)
    assert not gain.pays
    assert gain.plain.tokens_per_s == 100
