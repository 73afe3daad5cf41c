"""The audit of drafters: every factor has expectation 1 for an honest drafter, and cheats are detected."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cheats import drawn_by

from rootward.core import audit
from rootward.core.audit import BUCKETS, STRATEGIES, Draws, Record, factors, joined, log_mean

WEIGHTS = st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, 65535]), min_size=1, max_size=7).filter(any)


def all_draws(weight: list[int], rng: np.random.Generator) -> Draws:
    """Every token that a row may give, as draws from it: ids with ties, zeros and pads."""
    q = np.array(weight) / sum(weight)
    ids = np.where(q > 0, rng.permutation(1000)[: len(q)], -1)
    offered = rng.random() * rng.dirichlet(np.ones(len(q))) * (rng.random(len(q)) > 0.2)
    columns = np.flatnonzero(q)
    rows = [np.tile(row, (len(columns), 1)) for row in (ids, q, offered)]
    return Draws(ids=rows[0], q=rows[1], offered=rows[2], column=columns)


def part(draws: Draws, which: slice) -> Draws:
    return Draws(draws.ids[which], draws.q[which], draws.offered[which], draws.column[which])


def expectation(draws: Draws, favour: np.ndarray) -> np.ndarray:
    """float64[S]: of each factor over the tokens of one row."""
    chance = draws.q[np.arange(len(draws)), draws.column]
    return chance @ factors(draws, favour)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(weight=WEIGHTS, seed=st.integers(0, 2**32 - 1))
def test_every_factor_has_expectation_one_for_an_honest_drafter(weight, seed):
    rng = np.random.default_rng(seed)
    favour = rng.uniform(0.1, 10.0, BUCKETS)
    np.testing.assert_allclose(expectation(all_draws(weight, rng), favour), 1.0, rtol=1e-12)
    assert (factors(all_draws(weight, rng), favour) > 0.0).all()


def test_a_rank_without_half_of_the_own_mass_has_another_expectation(monkeypatch):
    """A wrong twin: a factor that would accuse honest drafters."""
    rng = np.random.default_rng(0)
    draws = all_draws([5, 3, 1], rng)
    above = factors(draws, np.ones(BUCKETS))[:, STRATEGIES.index("rank 0.8")]
    chance = draws.q[np.arange(len(draws)), draws.column]
    assert abs(chance @ (above + 0.8 * chance) - 1.0) > 1e-2


def test_a_set_bet_that_has_seen_the_draw_has_another_expectation():
    """A wrong twin: the strategy "set" must bet before it counts."""
    draws = all_draws([5, 3, 1], np.random.default_rng(0))
    chance = draws.q[np.arange(len(draws)), draws.column]
    total = 0.0
    for i in range(len(draws)):
        one = part(draws, slice(i, i + 1))
        seen = Record()
        seen.observe(one)
        favour = (seen.drawn + 1.0) / (seen.expected + 1.0)
        total += chance[i] * factors(one, favour)[0, -1]
    assert total > 1.05


def test_honest_drafters_are_rarely_accused():
    alpha, runs, alarms = 0.05, 300, 0
    for seed in range(runs):
        rng, record = np.random.default_rng([seed, 1]), Record()
        alarms += any(observed(record, "honest", rng, 50) >= math.log(1 / alpha) for _ in range(12))
    assert alarms <= alpha * runs


def observed(record: Record, cheat: str, rng: np.random.Generator, num: int) -> float:
    record.observe(drawn_by(cheat, rng, num))
    return record.log_wealth


CHEATS = {  # median draws to the alarm at alpha = 1e-6, at most
    "argmax": 45,
    "temperature:0.5": 75,
    "temperature:0.8": 700,
    "best-of:2": 300,
    "peek": 250,
    "argmax:0.05": 9_000,
    "boost:0.1": 3_000,
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_are_detected(cheat):
    step, found = max(5, CHEATS[cheat] // 30), []
    for seed in range(7):
        rng, record = np.random.default_rng([seed, 2]), Record()
        while not record.caught() and record.num_draws < 2 * CHEATS[cheat]:
            observed(record, cheat, rng, step)
        found.append(record.num_draws)
    assert np.median(found) <= CHEATS[cheat]


def test_honest_drafters_are_rarely_accused_however_often_they_are_observed():
    """By M or R. An e-detector, in which each beginning has the weight 1, would accuse most of them."""
    alpha, runs, alarms, by_detector = 0.05, 300, 0, 0
    for seed in range(runs):
        rng, record, accused = np.random.default_rng([seed, 4]), Record(), False
        detector, largest = np.full(len(STRATEGIES), -np.inf), -np.inf
        for _ in range(150):
            gain = record.observe(drawn_by("honest", rng, 16))
            accused |= bool(record.caught(alpha=alpha))
            detector = np.logaddexp(detector, 0.0) + gain
            largest = max(largest, log_mean(detector))
        alarms += accused
        by_detector += largest >= math.log(2 / alpha)
    assert alarms <= alpha * runs
    assert by_detector > runs / 2


def test_a_favoured_set_is_detected_after_a_long_honest_time():
    found = []
    for seed in range(3):
        rng, record = np.random.default_rng([seed, 9]), Record()
        while record.num_draws < 100_000:
            record.observe(drawn_by("honest", rng, 256))
        honest = record.num_draws
        while not record.caught() and record.num_draws - honest < 20_000:
            record.observe(drawn_by("boost:0.1", rng, 256))
        found.append(record.num_draws - honest)
    assert np.median(found) <= 8_000


def test_a_drafter_that_turns_dishonest_is_detected_by_products_that_begin_later():
    """Long honesty spends the wealth of the strategies."""
    rng, record = np.random.default_rng(3), Record()
    for _ in range(400):
        observed(record, "honest", rng, 50)
    spent = record.log_product[STRATEGIES.index("rank 0.8")]
    assert spent < -1000.0
    honest = record.num_draws
    while not record.caught() and record.num_draws < honest + 2000:
        observed(record, "argmax", rng, 10)
    assert record.caught().split()[0] in ("rank", "temperature", "top")
    assert record.num_draws - honest <= 200


def test_the_threshold_grows_with_the_number_of_drafters():
    record = Record()
    record.log_product[:] = math.log(1 / audit.ALPHA) + 1.0
    assert record.caught()
    assert not record.caught(num_drafters=100)


def test_observations_may_be_joined():
    rng = np.random.default_rng(4)
    parts = [drawn_by("honest", rng, 7), drawn_by("honest", rng, 5)]
    narrow = Draws(parts[1].ids[:, :20], parts[1].q[:, :20], parts[1].offered[:, :20], parts[1].column.clip(max=19))
    whole = joined([parts[0], narrow])
    assert len(whole) == 12
    favour = np.ones(BUCKETS)
    np.testing.assert_allclose(factors(whole, favour)[7:], factors(narrow, favour), rtol=1e-12)
    assert Record().observe(part(narrow, slice(0))).tolist() == [0.0] * len(STRATEGIES)
