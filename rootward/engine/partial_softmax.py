"""Attention over a part of the keys, and the merging of parts: exact, whatever the cut.

A part gives its softmax-weighted values and the logarithm of its weights' sum. Two parts merge by the weight of one against the other,
the sigmoid of the difference of their logarithms.

Legend: B entries, H heads, R rows, N keys, D head dimension.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """out [B, H, R, D] and log-sum-exp [B, H, R], the latter in float32 or better."""

    out: torch.Tensor
    lse: torch.Tensor


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Part:
    """query [B, H, R, D] over key and value [B, H, N, D]; `bias` [B, 1, R or 1, N] is added to the (capped) scores."""
    if softcap is None and query.shape[-1] == value.shape[-1] and has_flash(query.dtype):
        return Part(*_flash(query, key, value, attn_mask=bias, scale=scaling))
    return _plain(query, key, value, scaling, bias, softcap)


def attend_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The values alone, where nothing is to be merged."""
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)


def merged(a: Part, b: Part) -> Part:
    """Over the keys of both. Either may have seen nothing (a log-sum-exp of −∞ or near the lowest number), not both."""
    weight = torch.sigmoid(b.lse - a.lse)[..., None].to(a.out.dtype)
    return Part(torch.lerp(a.out, b.out, weight), torch.logaddexp(a.lse, b.lse))


def with_sinks(part: Part, sinks: torch.Tensor) -> torch.Tensor:
    """The values when a logit of its own, sinks [1, H, R], takes part in every row's softmax and carries no value."""
    return part.out * torch.sigmoid(part.lse - sinks.float())[..., None].to(part.out.dtype)


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    bias: torch.Tensor | None,
    softcap: float | None = None,
) -> Part:
    """In float32 at least."""
    kind = torch.promote_types(query.dtype, torch.float32)
    score = query.to(kind) @ key.to(kind).transpose(-1, -2) * scaling
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    lse = torch.logsumexp(score, -1)
    return Part((torch.exp(score - lse[..., None]) @ value.to(kind)).to(query.dtype), lse)


def _flash(*args: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out: tuple[torch.Tensor, torch.Tensor] = kernel(*args, **kwargs)
    return out


@cache
def has_flash(dtype: torch.dtype) -> bool:
    """Whether this build of torch has its kernel for the CPU (a private operator) in this type, with a mask, and it agrees."""
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 8, generator=rng).to(dtype) for n in (4, 5, 5))
    bias = torch.zeros(2, 1, 1, 5, dtype=dtype)
    bias[0, :, :, 3:] = torch.finfo(dtype).min
    try:
        found = _flash(query, key, value, attn_mask=bias, scale=0.3)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    expected = _plain(query, key, value, 0.3, bias)
    near = 1e-5 if dtype in (torch.float32, torch.float64) else 5e-2
    return all(torch.allclose(a.float(), b.float(), atol=near) for a, b in zip(found, expected, strict=True))
