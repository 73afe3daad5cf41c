"""Muon (Jordan et al. 2024): momentum whose singular values are made equal, for matrices; AdamW for vectors.

torch.optim.Muon multiplies in bfloat16 always, which on a processor without matrix units for it costs as much as the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon:
    """Optimizer of a module; updates have the root mean square of AdamW's (0.2), so that one learning rate serves both."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        self._matrices = [p for p in parameters if p.ndim == 2]
        self._momentum = [torch.zeros_like(p) for p in self._matrices]
        self._vectors = torch.optim.AdamW([p for p in parameters if p.ndim == 1], betas=(0.9, 0.95), weight_decay=0.0)
        self._all = parameters

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at this learning rate; gradients are cleared."""
        for weight, momentum in zip(self._matrices, self._momentum, strict=True):
            assert weight.grad is not None
            momentum.lerp_(weight.grad, 1 - MOMENTUM)
            direction = _orthogonal(weight.grad.lerp(momentum, MOMENTUM))
            weight.mul_(1 - rate * WEIGHT_DECAY).add_(direction, alpha=-rate * 0.2 * max(weight.shape) ** 0.5)
        for group in self._vectors.param_groups:
            group["lr"] = rate
        self._vectors.step()
        for parameter in self._all:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"momentum": self._momentum, "vectors": self._vectors.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        for kept, loaded in zip(self._momentum, state["momentum"], strict=True):
            kept.copy_(loaded)
        self._vectors.load_state_dict(state["vectors"])


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration towards U V^T of the singular value decomposition; singular values end between 0.7 and 1.2."""
    a, b, c = QUINTIC
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x
