"""A network whose attention is the kernel: its trees equal cache-free forwards, and the probe sees what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from interpreted.paged_cases import DEVICE
from unit.engine.networks import FAMILIES, VOCAB, tiny
from unit.engine.test_graphs import Replays, tree

from rootward.engine import tree_attention
from rootward.engine.attention import layer_windows
from rootward.engine.model import HuggingFaceModel
from rootward.engine.paged import PagedContext
from rootward.engine.passes import PathPass, TreePass
from rootward.engine.probe import eager
from rootward.engine.slots import Size, Slots, kept_rows
from rootward.ports import Rows


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


@torch.inference_mode()
def test_recorded_steps_on_the_kernel_are_right(kernel: list[int]) -> None:
    """Block tables, lengths and visibility in buffers that stay: every replay reads what the step before it did not have."""
    network = tiny("LlamaConfig", num_hidden_layers=1).to(DEVICE)
    network.set_attn_implementation(tree_attention.NAME)
    size = Size.of(2, 64, 32, 16, None)
    replays, slots = Replays(), Slots(size, VOCAB, "")
    own = TreePass(network, size, layer_windows(network.config), capture=replays)
    alone, rng = PathPass(network, size), np.random.default_rng(0)
    prompts = [Rows.chain(slots.open(), 0, rng.integers(2, VOCAB, num).tolist()) for num in (19, 33)]
    steps = [(prompts, [1, 1])] + [([tree(slot, 2 + step % 2, rng) for slot in (1, 0)], None) for step in range(4)]
    for batch, num_logits in steps:
        kept = kept_rows(batch, num_logits)
        with slots.placed(batch) as entries:
            got = own.run(entries, kept)
            with eager(network):
                torch.testing.assert_close(got, alone.run(entries, kept), atol=1e-5, rtol=1e-5)
        for rows in batch:
            moves = slots.commit_cells(rows.slot, int(rows.node[-1]), keep_below=False)
            own.move(moves)
            alone.move(moves)
    assert own.graphs is not None
    assert own.graphs.num_replayed >= 2
    assert kernel[0] >= len(steps)
