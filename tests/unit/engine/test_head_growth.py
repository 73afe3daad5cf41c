"""Trees of compiled growth are those that `core.growth` makes of the same rows and random words, and the rows are those of the head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.heads import eagle3
from unit.engine import networks

from rootward.core.distribution import DraftDistribution
from rootward.core.frames import Open
from rootward.core.growth import BestFirst, growth_of
from rootward.core.living_tree import LivingTree, Snapshot
from rootward.core.requests import DraftMode, DraftStrategy, Sampling
from rootward.core.rng import DrawWords, Key
from rootward.engine import head_growth
from rootward.engine.head_growth import compiled_trees
from rootward.engine.head_model import HeadModel
from rootward.engine.heads import load_head
from rootward.engine.model import HuggingFaceModel
from rootward.ports import TreeToGrow
from verifier_service.head_drafts import HeadDrafts

SHAPE = BestFirst(least_levels=3)
OPENING = Open(
    0, 0, (), Sampling(), DraftMode.SAMPLED, 5, 0, num_atoms=6, node_cap=16, max_depth=4, topk=3, eos_ids=(7, 11)
)


def a_target(dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    network = networks.tiny("LlamaConfig", num_hidden_layers=6).to(dtype)
    return HuggingFaceModel(network, name="target", max_slots=2, max_len=64)


def a_head(folder: Path, target: HuggingFaceModel, *, slots: int = 3, **more: Any) -> HeadModel:
    head = load_head(str(eagle3(folder, target.network, **more)), target.network)
    return HeadModel(head, target.info, name="head", max_slots=slots)


class Captured:
    """The last trees, and the numbers of their draws."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trees: Any = None
        self.numbers: Any = None
        grow = head_growth.next_level

        def grown(*given: Any) -> Any:
            *_, limits, _, self.trees = given
            self.numbers = limits.draw_number
            return grow(*given)

        monkeypatch.setattr(head_growth, "next_level", grown)


def by_core(opening: Open, text: list[int], nodes: int, trees: Any, b: int, number: int, positions: int) -> Snapshot:
    """The tree that `core.growth` makes of the rows of tree b."""
    settings = replace(SHAPE, mode=opening.law, max_depth=opening.max_depth, topk=opening.topk)
    tree = LivingTree(len(text), 0, vocab_size=1000, node_cap=16, eos_ids=opening.eos_ids, restarts=True)
    growth = growth_of(tree, settings, node_cap=nodes, max_positions=positions)
    words = DrawWords(Key(opening.seed, opening.choice), 9, number)

    def row_of(node: int) -> DraftDistribution:
        held = trees.weight[b, node] > 0
        return DraftDistribution(trees.ids[b, node][held], trees.weight[b, node][held])

    growth.expand(tree.root_id, row_of(0))
    growth.draw(words)
    while not growth.at_rest:
        for node in growth.frontier(100):
            growth.expand(node, row_of(node))
        growth.draw(words)
    return tree.snapshot(nodes)


def same(found: Snapshot, expected: Snapshot) -> bool:
    rows = [None if row is None else (row[0].tolist(), row[1].tolist()) for row in found.rows]
    declared = [None if row is None else (row[0].tolist(), row[1].tolist()) for row in expected.rows]
    trees = [
        (tree.token[1:].tolist(), tree.parent.tolist(), tree.sampled[1:].tolist())
        for tree in (found.tree, expected.tree)
    ]
    return trees[0] == trees[1] and rows == declared


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.TOP_K, DraftMode.GREEDY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [3, 4])
def test_trees_are_those_of_core_growth(
    law: DraftMode, dtype: torch.dtype, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rounds of three sessions at once, with trees of other sizes each round; texts end in the middle of blocks and parts."""
    rng, target = np.random.default_rng(seed), a_target(dtype)
    model = a_head(tmp_path, target, draft_ids=None, scale=1.0)
    trees = compiled_trees(model, incarnation=9, best_first=SHAPE)
    assert trees is not None
    captured = Captured(monkeypatch)
    texts = {one: rng.integers(0, 60, 3 + 5 * one).tolist() for one in (1, 2, 3)}
    read = dict.fromkeys(texts, 1)
    sizes = set()
    for round_ in range(18):
        nodes = {one: int(rng.integers(1, 17)) for one in texts}
        opening = {one: replace(OPENING, law=law, seed=one, max_depth=2 + one) for one in texts}
        requests = []
        for one, text in texts.items():
            features = rng.normal(size=(len(text) - read[one], model.feature_size)).astype(np.float32)
            requests.append((TreeToGrow(one, text, opening[one], nodes[one]), features))
            read[one] = len(text)
        found = trees.grow(requests)
        for b, (one, text) in enumerate(texts.items()):
            number = int(captured.numbers[b])
            expected = by_core(opening[one], text, nodes[one], captured.trees, b, number, target.info.max_positions)
            assert same(found[one], expected), (round_, one)
            sizes.add(len(found[one].ids))
            text += rng.integers(0, 60, int(rng.integers(1, 5))).tolist()
    assert max(sizes) > 12
    for one in texts:
        trees.forget(one)
    model.check_idle()
    assert model.num_free_slots == 3


def test_a_family_of_which_no_child_is_drawn_takes_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row has no more atoms than are chosen. The next nodes were drawn with other words than in `core.growth`."""
    target = a_target()
    model = a_head(tmp_path, target, draft_ids=None, scale=1.0)
    trees = compiled_trees(model, incarnation=9, best_first=SHAPE)
    assert trees is not None
    captured, features = Captured(monkeypatch), np.zeros((1, model.feature_size), np.float32)
    for seed in range(1, 9):
        opening, text = replace(OPENING, law=DraftMode.GREEDY, num_atoms=2, seed=seed), [3, seed + 20]
        found = trees.grow([(TreeToGrow(seed, text, opening, 16), features)])[seed]
        number = int(captured.numbers[0])
        assert same(found, by_core(opening, text, 16, captured.trees, 0, number, target.info.max_positions)), seed
        assert found.tree.sampled[1:].any()
        trees.forget(seed)


def chosen(heads: HeadDrafts, texts: dict[int, list[int]], nodes: int) -> list[Snapshot | None]:
    """Chosen trees, which are a function of the rows."""
    opening = replace(OPENING, law=DraftMode.TOP_K)
    return heads.grow([TreeToGrow(one, text, opening, nodes) for one, text in texts.items()])


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("draft_ids", [None, [1, 3, 4, 7, 11, 12, 20, 33, 40, 41]])
def test_chosen_trees_are_those_of_the_grower(
    window: int | None, draft_ids: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window, with texts longer than it, with a vocabulary of the draft, and in rounds of one and of two sessions."""
    target = a_target()
    more: dict[str, Any] = {} if window is None else {"layer_types": ["sliding_attention"], "sliding_window": window}
    model = a_head(tmp_path, target, draft_ids=draft_ids, scale=0.5, slots=4, **more)
    assert model.window == window
    compiled = HeadDrafts(model, incarnation=1)
    assert compiled._compiled is not None
    general = HeadDrafts(model, incarnation=1)
    general._compiled = None
    rng = np.random.default_rng(1)
    texts = {1: [2], 2: [3]}
    for round_ in range(8):
        for one, text in texts.items():
            new = rng.integers(0, 60, int(rng.integers(1, 6)) + 10 * (round_ == 0)).tolist()
            states = torch.from_numpy(rng.normal(size=(len(new), 3 * target.network.config.hidden_size))).float()
            for heads in (compiled, general):
                heads.observe(one, len(text) - 1, states)
            text += new
        asked = texts if round_ % 2 else {1: texts[1]}
        pairs = zip(chosen(compiled, asked, 9), chosen(general, asked, 9), strict=True)
        for found, expected in pairs:
            assert found is not None
            assert expected is not None
            assert len(expected.ids) > 5
            assert same(found, expected), round_
    for heads in (compiled, general):
        for one in texts:
            heads.forget(one)
    model.check_idle()


@pytest.mark.parametrize(
    "change",
    [
        {"law": DraftMode.COUPLED},
        {"law": DraftMode.IID, "strategy": DraftStrategy("iid", (2, 2))},
        {"strategy": DraftStrategy("rsd_c", (2, 2))},
        {"law": DraftMode.TOP_K, "strategy": DraftStrategy("marginals", (3,))},
        {"sampling": Sampling(top_p=0.5)},
        {"sampling": Sampling(top_k=3)},
        {"sampling": Sampling(min_p=0.1)},
        {"sampling": Sampling(repetition_penalty=1.5)},
        {"sampling": Sampling(logit_bias=((3, 1.0),))},
        {"prediction": (1, 2)},
        {"num_atoms": 65},
        {"eos_ids": tuple(range(65))},
    ],
)
def test_other_trees_are_left_to_the_grower(change: dict[str, Any], tmp_path: Path) -> None:
    target = a_target()
    trees = compiled_trees(a_head(tmp_path, target, draft_ids=None), incarnation=1, best_first=SHAPE)
    assert trees is not None
    assert trees.takes(1, OPENING)
    assert not trees.takes(1, replace(OPENING, **change))


def test_there_is_no_tree_without_a_slot_or_behind_a_full_context(tmp_path: Path) -> None:
    target = a_target()
    model = a_head(tmp_path, target, draft_ids=None, slots=1)
    trees = compiled_trees(model, incarnation=1, best_first=SHAPE)
    assert trees is not None

    def grown(session: int, text: list[int], num: int) -> dict[int, Snapshot]:
        return trees.grow([(TreeToGrow(session, text, OPENING, 3), np.zeros((num, model.feature_size), np.float32))])

    text = [1] * 60
    assert len(grown(1, text, 4)[1].ids) == 4
    assert grown(2, text, 4) == {}
    text += [2] * 2
    assert [int(d) for d in grown(1, text, 2)[1].tree.depth] == [
        0,
        1,
        1,
        1,
    ]  # a deeper token would be outside of the context
    text += [3]
    assert len(grown(1, text, 1)[1].ids) == 1
    text += [3]
    assert grown(1, text, 1) == {}
    trees.forget(1)
    model.check_idle()
