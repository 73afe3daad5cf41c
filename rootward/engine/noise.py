"""The noise of target and bonus tokens where the logits are: Philox-4x32-10 in tensor arithmetic, the same words as `rootward.core.rng`.

A product of two 32-bit words wraps in int64, but its bits are those of the unsigned product, and masking after the shift removes the
sign. So no unsigned type is needed.

Legend: P positions, V vocabulary, H = ⌈V / 2⌉ blocks (two tokens share one).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rootward.core.rng import Key, Role, bonus_gumbel, target_gumbel

MASK = 0xFFFFFFFF


@torch.inference_mode()
def target_noise(at: Sequence[tuple[Key, int]], vocab: int, device: torch.device | str) -> torch.Tensor:
    """float64[P, V]: Gumbel noise of the target's own token at each (key, absolute position); see `rng.target_gumbel`."""
    if torch.device(device).type == "cpu":  # numpy multiplies 64-bit integers several times faster than torch
        return torch.from_numpy(np.stack([target_gumbel(key, position, vocab) for key, position in at]))
    return device_noise(at, vocab, device)


@torch.inference_mode()
def bonus_noise(at: Sequence[tuple[Key, int, int]], vocab: int, device: torch.device | str) -> torch.Tensor:
    """float64[P, V]: Gumbel noise of the bonus token at each (key, epoch, absolute position); see `rng.bonus_gumbel`."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy(np.stack([bonus_gumbel(key, epoch, position, vocab) for key, epoch, position in at]))
    return _gumbel([(key, position, epoch) for key, epoch, position in at], Role.BONUS, vocab, device)


def device_noise(at: Sequence[tuple[Key, int]], vocab: int, device: torch.device | str) -> torch.Tensor:
    """`target_noise` in tensor arithmetic, without a transfer."""
    return _gumbel([(key, position, 0) for key, position in at], Role.TARGET, vocab, device)


def _gumbel(at: Sequence[tuple[Key, int, int]], role: Role, vocab: int, device: torch.device | str) -> torch.Tensor:
    """float64[P, V] at each (key, position, epoch)."""
    derived = {key: key.derive(role) for key in {key for key, *_ in at}}
    table = [[derived[key] & MASK, derived[key] >> 32, position, epoch] for key, position, epoch in at]
    k0, k1, position, epoch = torch.tensor(table, dtype=torch.int64, device=device).T[:, :, None]
    block = torch.arange((vocab + 1) // 2, device=device)[None, :]
    out = _philox([block, position, epoch, torch.full_like(position, role.value)], k0, k1)
    low, high = torch.stack([out[0], out[2]], -1), torch.stack([out[1], out[3]], -1)
    bits = (high << 20 | low >> 12).flatten(1)[:, :vocab]  # the high 52 of 64
    return -torch.log(-torch.log1p(-(bits.double() + 0.5) * 2.0**-52))


def _philox(c: list[torch.Tensor], k0: torch.Tensor, k1: torch.Tensor) -> list[torch.Tensor]:
    """Ten rounds on four words [P, H] held in the low halves of int64."""
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32 & MASK) ^ c[1] ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c
