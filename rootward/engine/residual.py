"""The draws of a verdict that need a whole row: they happen where the logits are.

Legend: B drawn rows, T rows, V vocabulary, G gathered ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.rng import Key
from rootward.engine.noise import bonus_noise

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@torch.inference_mode()
def draw_residual(
    probs_BV: torch.Tensor, scale_B: Floats, ids: Sequence[Ints], mass: Sequence[Floats], u_B: Floats
) -> Ints:
    """int64[B]: the bonus token of each stop node by inverse distribution function, one uniform in [0, 1) each.

    The residual distribution is mass[b] at ids[b] (-1: none) and scale_B[b] · probs_BV[b] elsewhere (algorithms.md, section 7).
    Never a token without mass.
    """
    cumulative = residual_rows(probs_BV, scale_B, ids, mass).cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    _require_mass(total)
    goal = torch.from_numpy(u_B).to(total.device)[:, None] * total
    # u · total may round up to the total: then the first token that reaches it, which has mass.
    below = torch.minimum(torch.searchsorted(cumulative, goal, right=True), torch.searchsorted(cumulative, total))
    return below[:, 0].cpu().numpy()


@torch.inference_mode()
def largest_residual(
    probs_BV: torch.Tensor,
    scale_B: Floats,
    ids: Sequence[Ints],
    mass: Sequence[Floats],
    at: Sequence[tuple[Key, int, int]],
) -> Ints:
    """int64[B]: the bonus token of each stop node as argmax log r + b, r as in `draw_residual`; b is the bonus noise at each
    (key, epoch, text length). Never a token without mass."""
    rows_BV = residual_rows(probs_BV, scale_B, ids, mass)
    _require_mass(rows_BV.amax(-1))
    return (rows_BV.log() + bonus_noise(at, rows_BV.shape[1], rows_BV.device)).argmax(-1).cpu().numpy()


def residual_rows(probs_BV: torch.Tensor, scale_B: Floats, ids: Sequence[Ints], mass: Sequence[Floats]) -> torch.Tensor:
    """float64[B, V]: the residual distributions, up to a factor."""
    device, vocab = probs_BV.device, probs_BV.shape[1]
    rows = probs_BV.double() * torch.from_numpy(scale_B).to(device)[:, None]
    owner = np.repeat(np.arange(len(ids)), [int((i >= 0).sum()) for i in ids])
    if len(owner):
        flat = torch.from_numpy(owner * vocab + np.concatenate([i[i >= 0] for i in ids])).to(device)
        values = torch.from_numpy(np.concatenate([m[i >= 0] for i, m in zip(ids, mass, strict=True)])).to(device)
        rows.view(-1)[flat] = values
    return rows


def _require_mass(total: torch.Tensor) -> None:
    if not bool((total > 0).all()):
        raise ValueError("residual distribution without mass at a stop node")


@torch.inference_mode()
def gumbel_choice(probs_TV: torch.Tensor, noise_PV: torch.Tensor, row_T: Ints) -> Ints:
    """int64[T]: argmax of log p + g; row t uses the noise row_T[t]."""
    rows = torch.from_numpy(row_T).to(probs_TV.device)
    return (probs_TV.double().log() + noise_PV[rows]).argmax(-1).cpu().numpy()
