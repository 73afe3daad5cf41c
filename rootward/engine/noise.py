"""Tokens chosen by keyed noise, where the rows are: argmax of log mass + Gumbel noise, the noise of `rootward.core.rng`.

On a CPU a compiled loop finds it without the noise of most tokens (`verify_kernels.noisy_choice`). On a device it is tensor arithmetic:
a product of two 32-bit words wraps in int64, but its bits are those of the unsigned product, and masking after the shift removes the sign.

Legend: T rows, P positions, V vocabulary, H = ⌈V / 2⌉ blocks (two tokens share one).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rootward.core.arrays import Floats, Ints
from rootward.core.rng import Key, Role
from rootward.engine import verify_kernels as kernels
from rootward.engine.atoms import host_can_read

MASK = 0xFFFFFFFF

At = tuple[Key | int, int, int]  # key, or the key derived for the role; epoch; absolute position


@torch.inference_mode()
def noisy_choice(mass_TV: torch.Tensor, role: Role, at: Sequence[At], noise_of: Ints) -> Ints:
    """int64[T]: argmax of log mass + noise, never a token without mass. Row t has the noise of `role` at at[noise_of[t]] (Role.TARGET
    knows no epoch: 0). ValueError if a row has no mass."""
    if host_can_read(mass_TV.device):
        choice = np.full(len(mass_TV), -1, dtype=np.int64)
        key, position, epoch = _numbers(role, at).T.copy()
        kernels.noisy_choice(mass_TV.numpy(), noise_of, key, position, epoch, np.uint64(role.value), choice)
    else:
        rows = torch.from_numpy(noise_of).to(mass_TV.device)
        choice_T = (mass_TV.double().log() + gumbel(role, at, int(mass_TV.shape[1]), mass_TV.device)[rows]).argmax(-1)
        has_mass_T = mass_TV.gather(1, choice_T[:, None])[:, 0] > 0.0
        choice = torch.where(has_mass_T, choice_T, -1).cpu().numpy()
    if (choice < 0).any():
        raise ValueError("target: a row has no mass; give rows that are laws")
    return choice


def coins_of_nodes(at: Sequence[At], start: Ints) -> Floats:
    """float64[T]: the coin of each node 0, 1, ... of each round, whose nodes are start[b] to start[b + 1]; the bits of `rng.coins`.
    ValueError: a position or epoch is outside [0, 2³²)."""
    coin = np.empty(int(start[-1]))
    for number in (number for _, *numbers in at for number in numbers):
        if not 0 <= number <= MASK:
            raise ValueError(f"counter: {number}; use numbers from 0 to 2**32 - 1")
    key, position, epoch = _numbers(Role.COIN, at).T.copy()
    kernels.coins(key, position, epoch, np.uint64(Role.COIN.value), start, coin)
    return coin


def gumbel_of_tokens(role: Role, at: Sequence[At], tokens_TA: Ints) -> Floats:
    """float64[T, A]: the noise of a role for some tokens of each row, on the host; row t has the noise at at[t]. The same bits as
    `rng.target_gumbel` and `rng.bonus_gumbel`. ValueError: a token, position or epoch is outside [0, 2³²)."""
    key, position, epoch = _numbers(role, at).T.copy()
    for numbers in (tokens_TA, position, epoch):
        if numbers.size and (int(numbers.max()) >> 32 or int(numbers.min()) < 0):
            raise ValueError(f"counter: {numbers.min()} to {numbers.max()}; use numbers from 0 to 2**32 - 1")
    uniform = np.empty(tokens_TA.shape)
    kernels.uniforms_of_tokens(key, position, epoch, np.uint64(role.value), np.ascontiguousarray(tokens_TA), uniform)
    noise: Floats = -np.log(-np.log1p(-uniform))
    return noise


def gumbel(role: Role, at: Sequence[At], vocab: int, device: torch.device | str) -> torch.Tensor:
    """float64[P, V]: the noise of a role, in tensor arithmetic; see `rng.target_gumbel` and `rng.bonus_gumbel`."""
    table = [[key & MASK, key >> 32, position, epoch] for key, position, epoch in _numbers(role, at).tolist()]
    k0, k1, position, epoch = torch.tensor(table, dtype=torch.int64, device=device).T[:, :, None]
    block = torch.arange((vocab + 1) // 2, device=device)[None, :]
    out = _philox([block, position, epoch, torch.full_like(position, role.value)], k0, k1)
    low, high = torch.stack([out[0], out[2]], -1), torch.stack([out[1], out[3]], -1)
    bits = (high << 20 | low >> 12).flatten(1)[:, :vocab]  # the high 52 of 64
    return -torch.log(-torch.log1p(-(bits.double() + 0.5) * 2.0**-52))


def _numbers(role: Role, at: Sequence[At]) -> np.ndarray:
    """uint64[P, 3]: derived key, position and epoch."""
    derived = {key: key.derive(role) if isinstance(key, Key) else key for key in {key for key, *_ in at}}
    return np.array([(derived[key], position, epoch) for key, epoch, position in at], dtype=np.uint64).reshape(-1, 3)


def _philox(c: list[torch.Tensor], k0: torch.Tensor, k1: torch.Tensor) -> list[torch.Tensor]:
    """Ten rounds on four words [P, H] held in the low halves of int64."""
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32 & MASK) ^ c[1] ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c
