"""Tree attention over paged keys and values, as an attention implementation of transformers.

Registered through the public interfaces of transformers and chosen by the load probe: the Triton kernel on a GPU, `cpu_attention` on a CPU.
Soft caps and sinks are supported; other arguments are refused.

Legend: B entries, H query heads, H_kv heads of K and V, Q rows, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from rootward.engine.cpu_attention import attend
from rootward.engine.kv_cache import running
from rootward.engine.triton_attention import is_available, tree_attention

NAME = "rootward_sdpa"  # "sdpa" in the name makes transformers ask whether the network supports it
OTHER_NAME = "rootward"  # for networks that support no sdpa because of their sinks or soft caps
NAMES = (NAME, OTHER_NAME)


def serves(device: torch.device) -> bool:
    """Whether it can be computed on this device."""
    return device.type == "cpu" or is_available(device)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, Q, D]; key and value the new rows' [B, H_kv, Q, D]. Returns [B, Q, H, D]."""
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{NAME} knows no position_bias; use eager")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    now = running.get()
    assert now is not None, (
        "attention outside of a step; choose another implementation for a forward without the engine's cache"
    )
    layer = now.layer
    assert layer is not None, "attention without keys and values of its own"
    if is_available(query.device):
        context, buffers = now.step.paged, layer.buffers
        options: dict[str, Any] = {"window": layer.window, "softcap": softcap, "sinks": s_aux, "buffers": buffers}
        return tree_attention(query, layer.keys, layer.values, context, scaling=scale, **options), None
    rows = query.transpose(1, 2).flatten(0, 1)
    out = attend(rows, layer, now.step.visible(layer.window), scale, softcap=softcap, sinks=s_aux)
    return out.to(query.dtype).view(query.shape[0], query.shape[2], query.shape[1], -1), None


for _name in NAMES:
    AttentionInterface.register(_name, attention)
    AttentionMaskInterface.register(_name, sdpa_mask)
