"""Counts what makes a host wait for a device, on a machine without one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique")  # operators whose result the host has to see

MASKED = ("index", "index_put", "index_put_")  # with a mask: how many places does it have?


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


class Waits(TorchDispatchMode):
    """Copies to the host (`count["cpu"]`, `values` in all), and operators whose result the host has to see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.values = 0
        honest = torch.Tensor.cpu

        def cpu(tensor: torch.Tensor) -> torch.Tensor:
            self.count["cpu"] += 1
            self.values += tensor.numel()
            return honest(tensor)

        monkeypatch.setattr(torch.Tensor, "cpu", cpu)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or (name in MASKED and any(_is_mask(index) for index in args[1])):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))
