"""A network whose attention is the kernel: its trees equal cache-free forwards, and the probe sees what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreted.paged_cases import DEVICE
from unit.engine.networks import FAMILIES, tiny

from rootward.engine import tree_attention
from rootward.engine.model import HuggingFaceModel
from rootward.engine.paged import PagedContext


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel is used on any device; counts its calls."""
    calls = [0]
    right = tree_attention.tree_attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += 1
        return right(*args, **kwargs)

    monkeypatch.setattr(tree_attention, "is_available", lambda device: True)
    monkeypatch.setattr(tree_attention, "tree_attention", counted)
    return calls


LONG = pytest.mark.long  # the interpreter takes its time


@pytest.mark.parametrize(
    "family", [pytest.param("llama", marks=LONG), pytest.param("mistral", marks=LONG), "gemma2", "gpt_oss"]
)
def test_the_probe_finds_it_right(family: str, kernel: list[int]) -> None:
    """Grouped heads, sliding windows, soft caps, sinks."""
    config, changes = FAMILIES[family]
    report = HuggingFaceModel(tiny(config, **changes).to(DEVICE), name="tiny", max_slots=2).probe_report
    assert report.attention in tree_attention.NAMES
    assert kernel[0] >= 8  # layers times steps of the probe
    assert report.max_error < 1e-5


@LONG
def test_the_probe_refuses_a_kernel_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tree_attention.tree_attention

    def shifted(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: PagedContext, **more: Any
    ) -> Any:
        return right(query, keys, values, _short(context), **more)

    monkeypatch.setattr(tree_attention, "tree_attention", shifted)
    report = HuggingFaceModel(tiny("LlamaConfig").to(DEVICE), name="tiny", max_slots=2).probe_report
    assert report.attention not in tree_attention.NAMES
    assert report.ok


def _short(context: PagedContext) -> PagedContext:
    from dataclasses import replace

    return replace(context, length=(context.length - 1).clamp(min=0))
