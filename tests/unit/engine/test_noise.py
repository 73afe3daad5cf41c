"""The device's noise is the host's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rootward.core.rng import Key, Role, bonus_gumbel, target_gumbel
from rootward.engine import noise as noise_module
from rootward.engine.noise import bonus_noise, device_noise, target_noise
from rootward.engine.verify import gumbel_choice


@pytest.mark.parametrize("vocab", [1, 2, 7, 2049])
def test_the_same_numbers_as_on_the_host(vocab: int) -> None:
    at = [(Key(5), 0), (Key(2**64 - 1, 3), 17), (Key(5), 2**32 - 1), (Key(123456789), 4)]
    for noise in (device_noise(at, vocab, "cpu"), target_noise(at, vocab, "cpu")):
        for row, (key, position) in zip(noise.numpy(), at, strict=True):
            np.testing.assert_allclose(row, target_gumbel(key, position, vocab), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocab", [1, 7, 2048])
def test_the_noise_of_the_bonus_token_is_what_a_drafter_computes(vocab: int) -> None:
    at = [(Key(5), 1, 0), (Key(2**64 - 1, 3), 2**32 - 1, 17), (Key(5), 2, 0)]
    on_device = noise_module._gumbel([(key, position, epoch) for key, epoch, position in at], Role.BONUS, vocab, "cpu")
    for noise in (on_device, bonus_noise(at, vocab, "cpu")):
        for row, (key, epoch, position) in zip(noise.numpy(), at, strict=True):
            np.testing.assert_allclose(row, bonus_gumbel(key.bonus(), epoch, position, vocab), rtol=1e-12, atol=1e-12)


def test_the_choice_takes_the_noise_of_its_row_and_never_a_token_without_mass() -> None:
    rng = np.random.default_rng(0)
    probs = rng.random((6, 40)) * (rng.random((6, 40)) > 0.5)
    probs /= probs.sum(-1, keepdims=True)
    noise = rng.gumbel(size=(2, 40))
    row = np.array([0, 0, 1, 1, 0, 1])
    with np.errstate(divide="ignore"):
        wanted = (np.log(probs) + noise[row]).argmax(-1)
    got = gumbel_choice(torch.from_numpy(probs), torch.from_numpy(noise), row)
    np.testing.assert_array_equal(got, wanted)
    assert (probs[np.arange(6), got] > 0).all()
