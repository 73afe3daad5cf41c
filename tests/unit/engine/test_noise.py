"""Tokens chosen by noise are those of the oracle's noise, on a CPU and in tensor arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rootward.core.rng import Key, Role, bonus_gumbel, coins, target_gumbel
from rootward.engine.noise import At, coins_of_nodes, gumbel, gumbel_of_tokens, noisy_choice

AT = [(Key(5), 1, 0), (Key(2**64 - 1, 3), 2**32 - 1, 17), (Key(5), 2, 2**32 - 1), (Key(123456789), 1, 4)]


def oracle(at: At, vocab: int) -> np.ndarray:
    key, epoch, position = at
    return target_gumbel(key, position, vocab) if isinstance(key, Key) else bonus_gumbel(key, epoch, position, vocab)


def places(role: Role) -> list[At]:
    if role is Role.TARGET:
        return [(key, 0, position) for key, _, position in AT]
    return [(key.bonus(7), epoch, position) for key, epoch, position in AT]


@pytest.mark.parametrize("role", [Role.TARGET, Role.BONUS])
@pytest.mark.parametrize("vocab", [1, 2, 7, 2049])
def test_tensor_arithmetic_has_the_numbers_of_the_oracle(role: Role, vocab: int) -> None:
    at = places(role)
    for row, one in zip(gumbel(role, at, vocab, "cpu").numpy(), at, strict=True):
        np.testing.assert_allclose(row, oracle(one, vocab), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("role", [Role.TARGET, Role.BONUS])
def test_the_noise_of_some_tokens_is_that_of_the_oracle(role: Role) -> None:
    at = places(role)
    tokens = np.random.default_rng(0).integers(0, 2049, (len(at), 300))
    for row, one, ids in zip(gumbel_of_tokens(role, at, tokens), at, tokens, strict=True):
        assert row.tolist() == oracle(one, 2049)[ids].tolist()


def test_tokens_at_the_end_of_the_words_have_the_noise_of_the_oracle() -> None:
    at = [(Key(5, 2), 0, 2**32 - 1)]
    tokens = np.array([[2**32 - 1, 8, 8, 100_000]])
    assert gumbel_of_tokens(Role.TARGET, at, tokens).tolist() == [
        target_gumbel(Key(5, 2), 2**32 - 1, tokens[0]).tolist()
    ]


@pytest.mark.parametrize(
    ("at", "token"), [((Key(1), 0, 2**32), 4), ((Key(1), 2**32, 0), 4), ((Key(1), 0, 1), 2**32), ((Key(1), 0, 1), -1)]
)
def test_noise_of_numbers_that_do_not_fit_is_refused(at: tuple[Key, int, int], token: int) -> None:
    with pytest.raises(ValueError, match="use numbers from 0"):
        gumbel_of_tokens(Role.TARGET, [at], np.array([[token]]))


def test_coins_of_nodes_are_those_of_the_round() -> None:
    at = [(Key(7, 1), 3, 11), (Key(8), 0, 2**32 - 1), (Key(7, 1), 2**32 - 1, 0)]
    start = np.array([0, 5, 6, 40])
    want = [coins(*place, range(num)) for place, num in zip(at, np.diff(start), strict=True)]
    assert coins_of_nodes(at, start).tobytes() == np.concatenate(want).tobytes()


@pytest.mark.parametrize("place", [(Key(1), 2**32, 1), (Key(1), 1, 2**32), (Key(1), -1, 1), (Key(1), 1, -1)])
def test_coins_of_nodes_refuse_numbers_that_do_not_fit(place: tuple[Key, int, int]) -> None:
    with pytest.raises(ValueError, match="use numbers from 0"):
        coins_of_nodes([(Key(1), 1, 1), place], np.array([0, 1, 2]))


@pytest.mark.parametrize("role", [Role.TARGET, Role.BONUS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 2049])
@pytest.mark.parametrize("on_host", [True, False])
def test_the_choice_is_the_largest_under_the_noise_of_its_row(
    role: Role, dtype: torch.dtype, vocab: int, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rootward.engine.noise.host_can_read", lambda device: on_host)
    rng = np.random.default_rng(0)
    at, num = places(role), 200
    scores = rng.normal(size=(num, vocab)) * rng.choice([0.0, 1.0, 8.0], size=(num, 1))
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    scores[:, rng.integers(vocab)] = 0.0  # at least one token has mass
    mass = torch.from_numpy(scores).softmax(-1).to(dtype)
    noise_of = rng.integers(len(at), size=num)
    noise = np.stack([oracle(one, vocab) for one in at])
    wanted = (mass.double().log().numpy() + noise[noise_of]).argmax(-1)
    got = noisy_choice(mass, role, at, noise_of)
    np.testing.assert_array_equal(got, wanted)
    assert (mass.numpy()[np.arange(num), got] > 0).all()


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_row_without_mass_is_refused(value: float, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootward.engine.noise.host_can_read", lambda device: on_host)
    with pytest.raises(ValueError, match="no mass"):
        noisy_choice(torch.full((1, 5), value), Role.TARGET, places(Role.TARGET), np.zeros(1, np.int64))
