"""Planted defects show: in what the kernel is told, and in the kernel itself. So the comparisons have the power they need."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted.paged_cases import DEVICE, Case, build, error

import rootward.engine
from rootward.engine import triton_kernels
from rootward.engine.paged import PagedContext
from rootward.engine.triton_attention import Plan

SMALL = Plan(tile_rows=32, tile_cells=16, num_pieces=3)
WRONG = 1e-3  # rounding stays below 1e-5
CASE = Case(lengths=(37, 20), old=(0, 36), new=(9, 8), padding=0, dim=16, block_size=8)
WINDOW = {"window": 5}
EVERYTHING: list[dict[str, Any]] = [
    {},
    WINDOW,
    {"softcap": 1.5},
    {"sinks": torch.linspace(-1.0, 2.0, CASE.heads, device=DEVICE)},
]


def changed(field: str, change: Callable[[torch.Tensor], Any]) -> Callable[[PagedContext], PagedContext]:
    """A mutation of one tensor, in place on a copy."""

    def mutate(context: PagedContext) -> PagedContext:
        tensor = getattr(context, field).clone()
        change(tensor)
        return dataclasses.replace(context, **{field: tensor})

    return mutate


def drop_an_ancestor(sees: torch.Tensor) -> None:
    """The row furthest down no longer sees its topmost ancestor."""
    row = int(torch.tensor([bin(int(word)).count("1") for word in sees[0, :9, 0]]).argmax())
    sees[0, row, 0] &= sees[0, row, 0] - 1


def see_the_next_node(sees: torch.Tensor) -> None:
    sees[0, 0, 0] |= 2


CONTEXTS = {
    "row positions one up": (changed("position", lambda x: x.add_(1)), WINDOW),
    "row positions one down": (changed("position", lambda x: x.sub_(1)), WINDOW),
    "node positions one up": (changed("scratch_position", lambda x: x.add_(1)), WINDOW),
    "positions by index instead of depth": (changed("position", lambda x: x[0].copy_(37 + torch.arange(9))), WINDOW),
    "an ancestor missing": (changed("sees", drop_an_ancestor), {}),
    "a stranger visible": (changed("sees", see_the_next_node), {}),
    "bits one to the left": (changed("sees", lambda x: x.mul_(2)), {}),
    "prefix one short": (changed("length", lambda x: x.sub_(1)), {}),
    "prefix one long": (changed("length", lambda x: x[:1].add_(1)), {}),
    "cells one up": (changed("scratch", lambda x: x.add_(x >= 0)), {}),
    "two blocks swapped": (changed("block_table", lambda x: x[0, 3:5].copy_(x[0, 3:5].flip(0))), WINDOW),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_that_is_off_shows(name: str) -> None:
    mutate, options = CONTEXTS[name]
    batch = build(CASE)
    assert error(batch, mutate(batch.context), plan=SMALL, **options) > WRONG


KERNELS = [
    ("real = place < end", "real = place <= end"),
    ("real = place < end", "real = place < end - 1"),
    ("- window + 1, 0)", "- window + 2, 0)"),
    ("place[None, :] < window", "place[None, :] <= window"),
    ("there[None, :] < window", "there[None, :] <= window"),
    ("node % 32", "(node + 1) % 32"),
    ("node // 32", "0 * node"),
    ("place // BLOCK_SIZE", "(place + 1) // BLOCK_SIZE"),
    ("place % BLOCK_SIZE", "(place + 1) % BLOCK_SIZE"),
    ("kv_head * GROUP + row % GROUP", "kv_head * GROUP + row // GROUP % GROUP"),
    ("exists, q = row < num_rows, row // GROUP", "exists, q = row < num_rows, row % GROUP"),
    ("first += piece * share", "first += piece * (share - 1)"),
    ("keys += kv_head * key_head", "keys += 0"),
    ("values += kv_head * value_head", "values += 0"),
    ('tl.where(new_top == -float("inf"), 0.0, new_top)', "new_top"),
    ("acc * fade[:, None]", "acc"),
    ("total * fade", "total"),
    ("top + tl.log2(some)", "tl.log2(some)"),
    ("cap * _tanh(score)", "_tanh(score)"),
    ("total += tl.exp2(sink - top)", "pass"),
    ("part < num_parts", "part < num_parts - 1"),
]


@pytest.mark.parametrize(("right", "wrong"), KERNELS, ids=[wrong for _, wrong in KERNELS])
def test_a_kernel_that_is_off_shows(right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(str(triton_kernels.__file__)).read_text(encoding="utf-8")
    assert right in source, "the kernel has changed; change the mutant too"
    file = tmp_path / "mutant_kernels.py"
    file.write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, mutant)
    spec.loader.exec_module(mutant)
    monkeypatch.setattr(rootward.engine, "triton_kernels", mutant)
    batch = build(CASE)
    assert any(error(batch, plan=SMALL, **options) > WRONG for options in EVERYTHING)


def test_the_kernel_passes_where_its_mutants_fail() -> None:
    batch = build(CASE)
    assert max(error(batch, plan=SMALL, **options) for options in EVERYTHING) < 1e-5
