"""The loss of a draft distribution q against the target's p over the draft vocabulary, with its gradient, never holding all logits at
once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

CPU_ROWS = 128  # logits of so many rows stay in a core's cache
GPU_ROWS = 4096  # and so many keep a GPU busy


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        drafts: torch.Tensor,
        target: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor,
        tv: float,
        measure_every: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(drafts)
        sums = torch.zeros(len(drafts), 4, dtype=torch.float64, device=drafts.device)
        size = CPU_ROWS if drafts.device.type == "cpu" else GPU_ROWS
        for chunk, start in enumerate(range(0, drafts.shape[1], size)):
            part = slice(start, start + size)
            p = functional.linear(target[part].to(rows), rows).to(gradient).softmax(-1)
            for k in range(len(drafts)):
                w = weights[k, part, None]
                logits = functional.linear(drafts[k, part].to(rows), rows).to(gradient)
                if chunk % measure_every == 0:
                    sums[k] += _sums(p, logits, w[:, 0] > 0)
                slope = logits.softmax(-1)
                if tv:  # d(1 - sum min(p, q)) / d logits = q (sum of q where q < p - [q < p])
                    q = slope
                    below = (q < p).to(q.dtype)
                    slope = q - p + tv * q * ((q * below).sum(-1, keepdim=True) - below)
                else:
                    slope.sub_(p)
                gradient[k, part] = (slope.mul_(w).to(rows) @ rows).to(gradient)
        context.save_for_backward(gradient)
        means = sums[:, :3] / sums[:, 3:].clamp(min=1)
        total = weights.sum(-1)
        loss = (means[:, 0] * total).sum() + tv * ((1 - means[:, 1]) * total).sum()
        context.mark_non_differentiable(means)
        return loss.to(drafts.dtype), means

    @staticmethod
    def backward(context: Any, *slopes: torch.Tensor) -> tuple[Any, ...]:
        (gradient,) = context.saved_tensors
        return gradient * slopes[0], None, None, None, None, None


def overlap_loss(
    drafts: torch.Tensor,
    target: torch.Tensor,
    rows: torch.Tensor,
    *,
    weights: torch.Tensor,
    tv: float,
    measure_every: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, means float64[steps, 3]): sum over rows of weight x (KL(p || q) + tv x (1 - sum min(p, q))), and mean KL, sum min(p, q),
    equal argmax.

    drafts: `[steps, n, hidden]`, normed; target: `[n, hidden]`, normed; rows: `[draft vocabulary, hidden]`, frozen, in the type that
    matrices are multiplied in; weights: `[steps, n]`, constant in a step but for zeros, which leave a row out. measure_every: value and
    means (not the gradient) come from every n-th chunk of rows.
    """
    return _Loss.apply(drafts, target, rows, weights, tv, measure_every)


def _sums(p: torch.Tensor, logits: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """float64[4]: sums over counted rows of KL(p || q), sum min(p, q), equal argmax, and 1."""
    log_q = logits.log_softmax(-1)
    kl = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    equal = log_q.argmax(-1) == p.argmax(-1)
    return torch.stack([kl, overlap, equal.to(kl.dtype), torch.ones_like(kl)], 1)[counted].double().sum(0)
