"""Processors against those of transformers; atoms against their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rootward.core.requests import Sampling
from rootward.engine import sampling
from rootward.engine.sampling import distributions, greedy_choice, top_atoms


def reference(row_V: torch.Tensor, s: Sampling) -> torch.Tensor:
    """What `generate` would sample from."""
    scores = TemperatureLogitsWarper(s.temperature)(None, row_V[None])
    if s.top_k:
        scores = TopKLogitsWarper(s.top_k)(None, scores)
    if s.top_p < 1:
        scores = TopPLogitsWarper(s.top_p)(None, scores)
    return scores.softmax(-1)[0]


def random_sampling(rng: np.random.Generator, vocab: int) -> Sampling:
    top_k = int(rng.choice([0, 1, 3, vocab // 2 + 1, vocab + 3]))
    return Sampling(float(rng.uniform(0.2, 2.0)), top_k, float(rng.choice([1.0, 0.05, 0.5, 0.9, 0.999])))


@pytest.mark.parametrize("vocab", [2, 7, 50, 700, 9000])
def test_processors_equal_those_of_transformers(vocab: int) -> None:
    """A batch of rows with different parameters, each as `generate` would treat it alone."""
    rng = np.random.default_rng(vocab)
    for spread in (0.3, 3.0):
        logits = torch.from_numpy(rng.normal(size=(12, vocab)).astype(np.float32) * spread)
        parameters = [random_sampling(rng, vocab) for _ in range(12)]
        probs = distributions(logits, parameters)
        assert probs.dtype == torch.float32
        for got, row, s in zip(probs, logits, parameters, strict=True):
            torch.testing.assert_close(got, reference(row, s), atol=2e-6, rtol=1e-4)


def test_ties_keep_as_many_tokens_as_transformers() -> None:
    """transformers leaves open which of equally likely tokens top-p keeps; here it is the smaller ids. Top-k keeps all."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        logits = torch.from_numpy(rng.integers(-3, 4, size=(3, 40)).astype(np.float32))
        parameters = [random_sampling(rng, 40) for _ in range(3)]
        for got, row, s in zip(distributions(logits, parameters), logits, parameters, strict=True):
            torch.testing.assert_close(got.sort().values, reference(row, s).sort().values, atol=2e-6, rtol=1e-4)
            for value in row.unique():
                kept = (got[row == value] > 0).int()
                assert bool((kept.diff() <= 0).all())


def test_one_row_does_not_change_another() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    mixed = [Sampling(0.7, 5, 0.9), Sampling(0.0), Sampling(1.3), Sampling(1.0, 0, 0.5)]
    together = distributions(logits, mixed)
    for row, s, got in zip(logits, mixed, together, strict=True):
        torch.testing.assert_close(distributions(row[None], [s])[0], got, atol=0, rtol=0)


@pytest.mark.parametrize("beside", [Sampling(0.5), Sampling(0.0), Sampling(1.0)])
@pytest.mark.parametrize("own", [Sampling(1.0, top_k=2), Sampling(1.0, min_p=0.125), Sampling(0.5, top_k=2)])
def test_the_temperature_of_one_row_does_not_change_what_is_kept_of_another(own: Sampling, beside: Sampling) -> None:
    """Two scores that differ in their last bit alone are equal once the largest has been subtracted."""
    near = 1.0 if own.top_k else 8 + math.log(own.min_p)  # the edge
    row = torch.tensor([[8.0, *(near * (1 + i * 2**-23) for i in range(1 if own.top_k else 8, -9, -1))]])
    alone = distributions(row, [own])
    both = torch.cat([row, torch.zeros_like(row)])
    assert torch.equal(distributions(both, [own, beside])[:1], alone)


def test_temperature_zero_is_one_hot_at_the_smaller_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf], [2.0, 0.0, 1.0, 2.0]])
    probs = distributions(logits, [Sampling(0.0), Sampling(0.0, 2, 0.5)])
    assert probs.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert greedy_choice(logits).tolist() == [1, 0]
    assert greedy_choice(logits.bfloat16()).tolist() == [1, 0]
    with pytest.raises(ValueError, match="NaN"):
        greedy_choice(torch.tensor([[0.0, torch.nan]]))


def test_float64_stays_float64_and_zeros_stay_zeros() -> None:
    law = np.array([[0.5, 0.0, 0.3, 0.2]])
    with np.errstate(divide="ignore"):
        logits = torch.from_numpy(np.log(law))
    probs = distributions(logits, [Sampling()])
    assert probs.dtype == torch.float64
    np.testing.assert_allclose(probs, law, atol=1e-15)
    np.testing.assert_allclose(distributions(logits, [Sampling(1.0, 0, 0.6)]), [[0.625, 0, 0.375, 0]], atol=1e-15)
    with pytest.raises(ValueError, match="sampling"):
        distributions(logits, [])


def test_the_search_for_the_nucleus_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few candidates at first: the same law, by way of the next numbers of candidates."""
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(3)) * torch.linspace(0, 6, 6)[:, None]
    parameters = [Sampling(1.0, 0, 0.8)] * 6
    expected = distributions(logits, parameters)
    monkeypatch.setattr(sampling, "host_can_read", lambda _: False)
    for steps in ((), (1,), (2, 5, 40), (499,), (500,), (900,)):
        monkeypatch.setattr(sampling, "NUM_CANDIDATES", steps)
        torch.testing.assert_close(distributions(logits, parameters), expected, atol=0, rtol=0)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-np.inf, -90.0, -3.0, -0.01, 0.0, 0.01, 1.0, 5.0]), min_size=12, max_size=12),
        min_size=1,
        max_size=4,
    ),
    top_p=st.sampled_from([1e-9, 0.05, 0.5, 0.7, 0.9, 0.999, 1.0 - 1e-9]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_nucleus_is_the_same_on_the_host_and_on_a_device(
    rows: list[list[float]], top_p: float, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[0.0, *row] for row in rows], dtype=dtype)
    parameters = [Sampling(1.0, 0, top_p)] * len(rows)
    found = distributions(logits, parameters)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampling, "host_can_read", lambda _: False)
        torch.testing.assert_close(found, distributions(logits, parameters), atol=0, rtol=0)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_the_nucleus_of_broken_logits_is_no_distribution(broken: float) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    whole = distributions(logits, [Sampling(1.0, 0, 0.9)] * 3)
    logits[1, 7] = broken
    found = distributions(logits, [Sampling(1.0, 0, 0.9)] * 3)
    assert bool(found[1].isnan().any())
    torch.testing.assert_close(found[[0, 2]], whole[[0, 2]], atol=0, rtol=0)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=4),
    num=st.integers(1, 9),
)
def test_top_atoms_break_ties_by_id(rows: list[list[int]], num: int) -> None:
    probs = torch.tensor(rows, dtype=torch.float32) / 8
    ids, values = top_atoms(probs, num)
    expected = [sorted(range(6), key=lambda i: (-row[i], i))[:num] for row in rows]
    assert ids.tolist() == expected
    assert values.tolist() == [[row[i] / 8 for i in e] for row, e in zip(rows, expected, strict=True)]
