"""The interval of a median."""

import random

import pytest

from benchmarks.results import interval


@pytest.mark.parametrize("n", [1, 2, 5, 8, 15])
def test_interval_covers_the_median_as_often_as_stated(n):
    rng, hits, trials = random.Random(n), 0, 4000
    for _ in range(trials):
        found = interval([rng.random() for _ in range(n)])
        assert found.low <= found.median <= found.high
        hits += found.low <= 0.5 <= found.high
    sigma = (found.coverage * (1 - found.coverage) / trials) ** 0.5
    assert abs(hits / trials - found.coverage) <= 4 * sigma
    assert found.coverage >= (0.9 if n >= 5 else 0)
