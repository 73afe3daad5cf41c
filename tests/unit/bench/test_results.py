"""The interval of a median."""

import random

import numpy as np
import pytest
from support.services import tabular_pair

from benchmarks.results import command, interval, p_value
from rootward.engine.tabular import TabularModel


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


def drawn_texts(model: TabularModel, num_texts: int, length: int, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    texts = [[1, 2, 3] for _ in range(num_texts)]
    for text in texts:
        for _ in range(length):
            text.append(int(rng.choice(model.vocab, p=model.law(text[-3:]))))
    return texts


def test_p_value_of_the_target_s_law_and_of_another() -> None:
    target, draft = tabular_pair(vocab=4, noise=1.0, slots=1)
    assert p_value(target, drawn_texts(target, 32, 224)) > 1e-4
    assert p_value(target, drawn_texts(draft, 32, 224)) < 1e-12


def test_p_value_counts_rare_tokens_as_one_cell() -> None:
    """With every context left out whose rarest token expects too few, 90 to 102 degrees of freedom remained here."""
    target, _ = tabular_pair(vocab=4, noise=1.0, slots=1)
    for seed in range(8):
        p_value(target, drawn_texts(target, 32, 224, seed), least_freedom=120)


def test_p_value_refuses_too_few_tokens() -> None:
    target, _ = tabular_pair(vocab=4, noise=1.0, slots=1)
    with pytest.raises(ValueError, match="give more tokens"):
        p_value(target, drawn_texts(target, 4, 100))


def test_an_interrupted_benchmark_ends_without_a_traceback(capsys):
    @command
    def interrupted(argv):
        raise KeyboardInterrupt

    assert interrupted([]) == 130
    assert capsys.readouterr().err == ""
