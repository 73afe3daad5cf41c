"""Keyed randomness: known answers of Philox, roles that never share a number, noise of the right law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from rootward.core.rng import (
    DrawWords,
    Key,
    Role,
    bonus_coin,
    bonus_gumbel,
    coins,
    coins_batch,
    draw_words,
    philox,
    philox_one,
    target_gumbel,
)

KEY = Key(seed=42, choice=3)
KNOWN = [  # Random123, kat_vectors: philox4x32 10
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    want = [int(word, 16) for word in answer.split()]
    joined = key[0] | key[1] << 32
    assert np.stack(philox(np.array([counter] * 3, dtype=np.uint64).T, joined), axis=1).tolist() == [want] * 3
    assert philox_one(*counter, joined) == tuple(want)


def test_integers_and_arrays_agree():
    """Few counters go through plain integers, many through arrays."""
    many = coins(KEY, 7, 1000, np.arange(300))
    assert [coins(KEY, 7, 1000, [node])[0] for node in range(300)] == many.tolist()
    long = draw_words(KEY, 2**63, 2**40 + 5, 200)
    assert long.dtype == np.uint64
    for n in (0, 1, 2, 7, 33):
        assert draw_words(KEY, 2**63, 2**40 + 5, n).tolist() == long[:n].tolist()


def test_words_of_a_level_are_those_of_its_draw_number_and_none_comes_twice():
    source, long = DrawWords(KEY, 3, 11), draw_words(KEY, 3, 11, 1300)
    taken = [source(n) for n in (2, 2, 1, 0, 40, 2, 600, 2, 512, 1)]
    assert [len(words) for words in taken] == [2, 2, 1, 0, 40, 2, 600, 2, 512, 1]
    assert np.concatenate(taken).tolist() == long[:1162].tolist()
    assert len(set(long.tolist())) == len(long)


def test_the_noise_of_a_token_does_not_depend_on_the_tokens_asked_for():
    whole = target_gumbel(KEY, 12, 1001)
    some = [1000, 3, 2, 0, 777]
    assert target_gumbel(KEY, 12, some).tolist() == whole[some].tolist()
    assert bonus_gumbel(KEY.bonus(9), 1, 12, some).tolist() == bonus_gumbel(KEY.bonus(9), 1, 12, 1001)[some].tolist()


def test_each_round_has_bonus_noise_of_its_own():
    """Also at a text length that an earlier round could have ended at: a drafter was told the noise of that round."""
    told, own = bonus_gumbel(KEY.bonus(9), 1, 12, 64), bonus_gumbel(KEY.bonus(12), 1, 12, 64)
    assert not np.intersect1d(told, own).size
    assert KEY.bonus(9) != KEY.derive(Role.BONUS)  # the key of bonus coins, which no drafter is told


def streams():
    """Raw bits behind every role at overlapping counters, under neighbouring keys."""
    out = {}
    for key in (KEY, Key(42, 4), Key(43, 3)):
        for epoch in (0, 1):
            for position in (0, 1):
                at = (key.seed, key.choice, epoch, position)
                out["coin", *at] = coins(key, epoch, position, range(8)).tolist()
                for length in (0, 1):
                    out["bonus", *at, length] = bonus_gumbel(key.bonus(length), epoch, position, 8).tolist()
                out["bonus coin", *at] = [bonus_coin(key, epoch, position)]
        for position in (0, 1):
            out["target", key, position] = target_gumbel(key, position, 8).tolist()
        for incarnation in (0, 1):
            for number in (0, 1, 1 << 32):
                out["draw", key, incarnation, number] = draw_words(key, incarnation, number, 8).tolist()
    return out


def test_no_two_uses_share_a_number():
    numbers = [number for stream in streams().values() for number in stream]
    assert len(set(numbers)) == len(numbers)


def test_roles_differ_in_key_and_counter():
    assert len({KEY.derive(role) for role in Role}) == len(Role)
    assert len({role.value for role in Role}) == len(Role)


def test_same_key_same_bits():
    assert streams() == streams()


def test_target_noise_has_no_epoch():
    """It must survive a change of owner: its signature takes none, and the bonus noise of no epoch equals it."""
    target = target_gumbel(KEY, 5, 64)
    for epoch in range(3):
        assert not np.intersect1d(target, bonus_gumbel(KEY.bonus(4), epoch, 5, 64)).size


def test_laws_of_the_noise():
    uniform = coins(KEY, 0, 0, np.arange(200_000))
    assert 0.0 <= uniform.min() < uniform.max() < 1.0
    assert kstest(uniform, "uniform").pvalue > 1e-3
    assert kstest(target_gumbel(KEY, 3, 200_000), "gumbel_r").pvalue > 1e-3
    assert kstest(bonus_gumbel(KEY.bonus(2), 1, 3, 200_000), "gumbel_r").pvalue > 1e-3
    high = (draw_words(KEY, 1, 1, 100_000) >> np.uint64(32)).astype(float) / 2**32
    assert kstest(high, "uniform").pvalue > 1e-3
    across = np.array([bonus_coin(KEY, 0, position) for position in range(20_000)])
    assert kstest(across, "uniform").pvalue > 1e-3


def test_noise_is_finite_at_the_ends_of_the_words():
    from rootward.core.rng import _gumbel

    ends = _gumbel(np.array([0, 2**64 - 1, 2**63], dtype=np.uint64))
    assert np.isfinite(ends).all()
    assert ends[0] > 36.0
    assert ends[1] < -3.5


@pytest.mark.parametrize(
    "call",
    [
        lambda: Key(-1),
        lambda: Key(2**64),
        lambda: Key(0, -1),
        lambda: coins(KEY, 2**32, 0, [0]),
        lambda: coins(KEY, 0, -1, [0]),
        lambda: coins(KEY, 0, 0, [2**32]),
        lambda: draw_words(KEY, 0, 2**64, 1),
        lambda: draw_words(KEY, -1, 0, 1),
        lambda: target_gumbel(KEY, 2**32, 4),
    ],
)
def test_refuses_numbers_that_do_not_fit(call):
    with pytest.raises(ValueError, match="use "):
        call()


@given(
    st.lists(
        st.tuples(
            st.builds(Key, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**32 - 1),
            st.lists(st.integers(0, 2**32 - 1), max_size=20),
        ),
        max_size=5,
    )
)
def test_coins_of_a_batch_are_the_coins_of_its_rounds(rounds):
    want = [coins(key, epoch, position, nodes) for key, epoch, position, nodes in rounds]
    assert coins_batch(rounds).tobytes() == b"".join(column.tobytes() for column in want)


@pytest.mark.parametrize("change", [{"epoch": 2**32}, {"position": -1}, {"nodes": [2**32]}])
def test_coins_of_a_batch_refuse_what_coins_refuse(change):
    given_ = {"epoch": 1, "position": 1, "nodes": [1]} | change
    with pytest.raises(ValueError, match="counter"):
        coins_batch([(Key(1), 1, 1, [1]), (Key(2), given_["epoch"], given_["position"], given_["nodes"])])
