"""Token trees on real architectures: every row of a batched tree forward against one cache-free forward of its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from unit.engine.networks import FAMILIES, VOCAB, WINDOW, tiny, truth

from rootward.engine import cpu_attention
from rootward.engine.batch import split
from rootward.engine.kv_tree import KvTree, Placement
from rootward.engine.model import HuggingFaceModel
from rootward.engine.slots import Entry
from rootward.ports import COMMITTED, Rows

TOLERANCE = 1e-5
PREFIXES = ([7, 3, 9, 11, 2, 8, 5, 6], [4, 4, 13], [21, 9, 1, 30, 2, 17, 5, 5, 9, 40, 3])
PARENTS = ([-1, 0, 0, 1, 1, 2, 4], [-1], [-1, 0, 1, 1, 0])


class Text:
    """What one slot holds, as the test sees it: committed tokens, and the path of every node."""

    def __init__(self, model: HuggingFaceModel, prefix: list[int]):
        self.model, self.slot = model, model.open()
        self.tokens: list[int] = []
        self.paths: dict[int, list[int]] = {COMMITTED: []}
        self.chain(prefix)

    def rows(self, parents: list[int], tokens: list[int], first: int = 0) -> Rows:
        nodes = list(range(first, first + len(tokens)))
        for node, parent, token in zip(nodes, parents, tokens, strict=True):
            self.paths[node] = [*self.paths[parent], token]
        return Rows(self.slot, np.array(nodes), np.array(parents), np.array(tokens))

    def chain(self, tokens: list[int]) -> torch.Tensor:
        logits = self.model.forward([Rows.chain(self.slot, 500, tokens)], num_logits=[1])
        self.model.commit(self.slot, 499 + len(tokens), keep_below=False)
        self.tokens += tokens
        return logits[0]

    def commit(self, node: int, *, keep_below: bool = False) -> None:
        self.model.commit(self.slot, node, keep_below=keep_below)
        path = self.paths[node]
        self.tokens += path
        below = {n: p[len(path) :] for n, p in self.paths.items() if p[: len(path)] == path and n != node}
        self.paths = {COMMITTED: [], **{n: p for n, p in below.items() if keep_below and n >= 0}}

    def expected(self, rows: Rows) -> list[torch.Tensor]:
        return [truth(self.model.network, self.tokens + self.paths[int(n)]) for n in rows.node]


def error(logits: torch.Tensor, expected: list[torch.Tensor]) -> float:
    return float((logits - torch.stack(expected)).abs().max())


def tokens(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, num).tolist()


def load(family: str, **options: Any) -> HuggingFaceModel:
    config, changes = FAMILIES[family]
    return HuggingFaceModel(tiny(config, **changes), name=family, **{"max_slots": 4, **options})


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_equal_paths(family: str) -> None:
    """A ragged batch of slots in arbitrary order; then commits, a tree on kept nodes, a plain token, and a reused slot."""
    model = load(family)
    assert model.info.supports_trees, model.probe_report
    texts = [Text(model, prefix) for prefix in PREFIXES]
    order = [texts[2], texts[0], texts[1]]

    trees = [t.rows(PARENTS[i], tokens(len(PARENTS[i]), 10 + i)) for i, t in zip((2, 0, 1), order, strict=True)]
    logits = model.forward(trees)
    assert (logits.dtype, logits.shape) == (torch.float32, (13, VOCAB))
    assert error(logits, [e for t, rows in zip(order, trees, strict=True) for e in t.expected(rows)]) < TOLERANCE

    texts[0].commit(1, keep_below=True)  # nodes 3 and 4 stay, and 6 below 4
    texts[1].commit(0)
    texts[2].commit(3)
    second = [
        texts[1].rows([-1, 0, 0], [5, 6, 7]),
        texts[0].rows([4, -1, 6, 7], [8, 9, 10, 11], first=7),
        texts[2].rows([-1], [12]),
    ]
    logits = model.forward(second)
    assert error(
        logits, [e for t, r in zip((texts[1], texts[0], texts[2]), second, strict=True) for e in t.expected(r)]
    ) < (TOLERANCE)

    texts[0].commit(9)
    assert error(texts[0].chain([3])[None], [truth(model.network, texts[0].tokens)]) < TOLERANCE
    for text in texts:
        assert model.length(text.slot) == len(text.tokens)
        model.close(text.slot)
    fresh = Text(model, [50, 51])
    rows = fresh.rows([-1, 0, 0], [1, 2, 3])
    assert error(model.forward([rows]), fresh.expected(rows)) < TOLERANCE
    model.check_idle()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_networks_without_sdpa_take_ours_too(family: str) -> None:
    assert load(family).probe_report.attention == "rootward"


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_eager_equals_sdpa(family: str) -> None:
    rows = [Rows(0, np.arange(7), np.array(PARENTS[0]), np.array(tokens(7, 0)))]
    outs = []
    for attn in ("sdpa", "eager"):
        model = load(family, attn=attn)
        Text(model, PREFIXES[0])
        outs.append(model.forward(rows))
    assert float((outs[0] - outs[1]).abs().max()) < TOLERANCE


def as_chain(tree: KvTree, node: Any, parent: Any, token: Any) -> Placement:
    placement = right_plan(tree, node, parent, token)
    placement.ancestors[:] = np.tri(len(placement.ancestors), dtype=bool)
    return placement


def by_index(tree: KvTree, node: Any, parent: Any, token: Any) -> Placement:
    placement = right_plan(tree, node, parent, token)
    placement.position[:] = tree.length + np.arange(len(placement.position))
    return placement


def window_by_cell(entries: Sequence[Entry], *args: Any) -> Any:
    """Positions of nodes taken for their cells."""
    plans = [dataclasses.replace(entry.plan, position=entry.plan.scratch) for entry in entries]
    return right_visible([dataclasses.replace(e, plan=plan) for e, plan in zip(entries, plans, strict=True)], *args)


right_plan, right_visible = KvTree.plan, cpu_attention.visible_keys
WRONG = {
    "chain instead of tree": (KvTree, "plan", as_chain),
    "positions by index": (KvTree, "plan", by_index),
    "window by cell": (cpu_attention, "visible_keys", window_by_cell),
}


@pytest.mark.parametrize(
    ("family", "wrong"),
    [(f, w) for f in ("llama", "qwen3", "gpt2", "mistral", "gemma3") for w in list(WRONG)[:2]]
    + [(f, "window by cell") for f in ("mistral", "gemma3")],
)
def test_wrong_masks_and_positions_show(family: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: the comparison above has the power to see what it is there to see."""
    model = load(family)
    text = Text(model, PREFIXES[0])
    for seed in range(3):
        model.forward([text.rows(PARENTS[0], tokens(7, seed))])
        text.commit(6)
    rows = text.rows(PARENTS[0], tokens(7, 3))
    assert error(model.forward([rows]), text.expected(rows)) < TOLERANCE
    model.release(text.slot)
    monkeypatch.setattr(*WRONG[wrong])
    assert error(model.forward([rows]), text.expected(rows)) > 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_prefill_in_chunks_equals_prefill_at_once(family: str) -> None:
    prompt = tokens(40, 5)
    model = load(family)
    whole = Text(model, prompt)
    chunked = Text(model, prompt[:3])
    for at in range(3, 40, 9):
        last = chunked.chain(prompt[at : at + 9])
    assert error(last[None], [truth(model.network, prompt)]) < TOLERANCE
    rows = [whole.rows([-1, 0], [1, 2]), chunked.rows([-1, 0], [1, 2])]
    logits = model.forward(rows)
    assert float((logits[:2] - logits[2:]).abs().max()) < TOLERANCE
    assert WINDOW < 40


def test_prefill_and_trees_share_a_forward() -> None:
    """`num_logits` per entry, whatever the order of slots and however ragged."""
    model = load("llama")
    a, b = Text(model, PREFIXES[0]), Text(model, PREFIXES[1])
    c = model.open()
    batch = [Rows.chain(c, 0, tokens(20, 6)), b.rows([-1, 0, 0], [1, 2, 3]), a.rows([-1], [4])]
    logits = model.forward(batch, num_logits=[1, 3, 1])
    expected = [truth(model.network, tokens(20, 6)), *b.expected(batch[1]), *a.expected(batch[2])]
    assert logits.shape[0] == 5
    assert error(logits, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("widths", "parts"),
    [
        ([5], [[0]]),
        ([16, 9, 16, 12], [[0, 1, 2, 3]]),
        ([4, 100, 3, 1], [[3, 2, 0], [1]]),
        ([100, 100, 90], [[0, 1, 2]]),
        ([1, 200, 200, 60], [[0, 3], [1, 2]]),
    ],
)
def test_padding_is_weighed_against_another_forward(widths: list[int], parts: list[list[int]]) -> None:
    assert split(widths, overhead=32) == parts


def test_a_split_batch_keeps_the_order_of_its_rows() -> None:
    model = load("mistral")
    texts = [Text(model, tokens(4 + i, i)) for i in range(3)]
    batch = [
        texts[2].rows([-1, 0, 0], tokens(3, 1)),
        texts[0].rows([-1, *range(79)], tokens(80, 2)),
        texts[1].rows([-1, 0], tokens(2, 3)),
    ]
    assert len(split([len(rows.node) for rows in batch], model._pass.overhead)) == 2
    logits = model.forward(batch, num_logits=[3, 1, 2])
    expected = [*texts[2].expected(batch[0]), texts[0].expected(batch[1])[-1], *texts[1].expected(batch[2])]
    assert error(logits, expected) < TOLERANCE


def test_slots_apart_are_gathered() -> None:
    model = load("llama")
    texts = [Text(model, tokens(4 + i, i)) for i in range(4)]
    for pair in ((0, 3), (3, 1), (2, 0)):
        batch = [texts[i].rows([-1, 0, 0], tokens(3, i)) for i in pair]
        expected = [e for i, rows in zip(pair, batch, strict=True) for e in texts[i].expected(rows)]
        assert error(model.forward(batch), expected) < TOLERANCE
        for i in pair:
            model.release(texts[i].slot)
