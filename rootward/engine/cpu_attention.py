"""sdpa for the CPU that shares K and V among grouped query heads.

transformers' own `sdpa` copies K and V once per group for more than one row, which on a CPU costs several times the
attention itself; torch's kernel needs no copy. Registered as `rootward_sdpa` through the public interfaces and chosen by
the load probe.

Legend: B entries, H query heads, Q rows, D head dimension, KV cells.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rootward_sdpa"  # "sdpa" in the name makes transformers ask whether the model supports it


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of [B, H, Q, D] over KV cells under an additive mask: [B, Q, H, D]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{NAME} knows no {name}; use eager")
    if attention_mask is None:  # a forward without a cache
        passed = dict(kwargs, dropout=dropout, scaling=scaling)
        out: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **passed)
        return out
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_sdpa)
AttentionMaskInterface.register(NAME, sdpa_mask)
