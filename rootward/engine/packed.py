"""Linear layers whose weight lies in oneDNN's blocked layout, for float32 on a CPU.

A plain linear lays its weight out anew in every call with more than one row: a few rows become several times as dear as
one, and a tree hardly worth verifying. Packed once, 4 rows of a large layer cost little more than one. Every number of
rows takes the same implementation, so plain and verify steps round alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MIN_ELEMENTS = 1 << 19  # below this the call itself costs more than packing saves
LEAST_ROWS = 4  # fewer are padded: oneDNN's way for one to three rows reads the weight more slowly than that for four


class PackedLinear(torch.nn.Module):
    """`torch.nn.Linear` for inference. The plain weight is not kept."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        num = rows.numel() // self.in_features
        if num >= LEAST_ROWS:
            return self._linear(rows)
        padded = torch.nn.functional.pad(rows.reshape(num, self.in_features), (0, 0, 0, LEAST_ROWS - num))
        return self._linear(padded)[:num].reshape(*rows.shape[:-1], self.out_features)

    def _linear(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@torch.inference_mode()
def can_pack() -> bool:
    """Whether this build of torch has the two operators (they are private), and they agree with a plain linear."""
    linear, rows = torch.nn.Linear(48, 32), torch.linspace(-1, 1, 3 * 48).view(1, 3, 48)
    try:
        return bool(torch.allclose(PackedLinear(linear)(rows), linear(rows), atol=1e-5))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


@torch.inference_mode()
def pack_linears(network: torch.nn.Module, sample: Callable[[], torch.Tensor], min_elements: int = MIN_ELEMENTS) -> int:
    """Replace the large linear layers of a network in place; returns how many. A tied embedding keeps its own weight.

    `sample` runs the network. If that fails or changes with packed layers (some networks read a layer's weight directly), the
    plain ones are put back.
    """
    found = [
        (parent, name, child)
        for parent in network.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear
        and child.weight.numel() >= min_elements
        and child.weight.dtype == torch.float32
        and child.weight.device.type == "cpu"
    ]
    if not found or not can_pack():
        return 0
    before = sample()
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    if _unchanged(sample, before):
        return len(found)
    for parent, name, child in found:
        setattr(parent, name, child)
    return 0


def _unchanged(sample: Callable[[], torch.Tensor], before: torch.Tensor) -> bool:
    try:
        return bool((sample() - before).abs().max() <= 1e-4 * before.abs().max())
    except (AttributeError, RuntimeError, TypeError):
        return False
