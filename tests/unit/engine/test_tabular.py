"""The table as a language model: each row of a forward is the exact law of its path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kv import blocks_needed
from support.tabular import perturbed

from rootward.engine.tabular import TabularModel
from rootward.errors import KvFull
from rootward.ports import COMMITTED, Rows


def committed(model: TabularModel, tokens: list[int]) -> int:
    """A slot that holds these tokens."""
    slot = model.open()
    model.forward([Rows.chain(slot, 0, tokens)], num_logits=[1])
    model.commit(slot, len(tokens) - 1, keep_below=False)
    return slot


@settings(max_examples=60, deadline=None)
@given(data=st.data(), order=st.integers(0, 4), zeros=st.sampled_from([0.0, 0.4]))
def test_rows_equal_the_law_of_their_context(data: st.DataObject, order: int, zeros: float) -> None:
    """Over several rounds of trees, commits with and without the subtree, in two slots."""
    model = TabularModel(6, seed=3, order=order, zeros=zeros, max_positions=200)
    tokens = st.integers(0, 5)
    texts = [data.draw(st.lists(tokens, min_size=1, max_size=5)) for _ in range(2)]
    slots = [committed(model, text) for text in texts]
    for _ in range(data.draw(st.integers(1, 4))):
        batch, paths = [], []
        for slot in slots:
            num = data.draw(st.integers(1, 7))
            parent = [COMMITTED, *(data.draw(st.integers(-1, i - 1)) for i in range(1, num))]
            token = data.draw(st.lists(tokens, min_size=num, max_size=num))
            batch.append(Rows(slot, np.arange(num), np.array(parent), np.array(token)))
            paths.append([_path(parent, token, i) for i in range(num)])
        logits = model.forward(batch)
        assert logits.dtype == torch.float64
        contexts = [text + path for text, own in zip(texts, paths, strict=True) for path in own]
        expected = np.stack([model.law(context) for context in contexts])
        np.testing.assert_allclose(logits.exp().numpy(), expected, atol=1e-15)
        for i, slot in enumerate(slots):
            stop = data.draw(st.integers(0, len(paths[i]) - 1))
            model.commit(slot, stop, keep_below=False)
            texts[i] = texts[i] + paths[i][stop]
            assert model.length(slot) == len(texts[i])
    model.check_idle()


def _path(parent: list[int], token: list[int], node: int) -> list[int]:
    above = [] if parent[node] == COMMITTED else _path(parent, token, parent[node])
    return [*above, token[node]]


def test_nodes_below_a_commit_stay_usable() -> None:
    model = TabularModel(5, seed=1, order=3)
    slot = committed(model, [1, 2])
    model.forward([Rows(slot, np.array([10, 11, 12]), np.array([COMMITTED, 10, 10]), np.array([3, 4, 0]))])
    model.commit(slot, 10, keep_below=True)
    assert (model.length(slot), model.tree(slot).num_uncommitted) == (3, 2)
    row = model.forward([Rows(slot, np.array([13]), np.array([12]), np.array([2]))])[0]
    np.testing.assert_allclose(row.exp(), model.law([1, 2, 3, 0, 2]))
    model.release(slot)
    assert model.tree(slot).num_uncommitted == 0


def test_laws_are_a_function_of_the_arguments() -> None:
    a, b = TabularModel(7, seed=5), TabularModel(7, seed=5)
    np.testing.assert_array_equal(a.law([1, 2, 3]), b.law([6, 2, 3]))
    assert not np.array_equal(a.law([2, 3]), a.law([3, 2]))
    assert not np.array_equal(a.law([2, 3]), TabularModel(7, seed=6).law([2, 3]))
    assert a.law([2, 3]).sum() == pytest.approx(1, abs=1e-14)
    assert a.info == b.info


def test_zeros_sharpness_and_noise() -> None:
    target = TabularModel(10, seed=2, zeros=0.5, sharpness=3.0)
    law = target.law([1, 1])
    assert (law == 0).sum() == 5
    draft = perturbed(target, 0.7, seed=9)
    assert ((draft.law([1, 1]) == 0) == (law == 0)).all()
    assert 0.01 < np.abs(draft.law([1, 1]) - law).sum() < 2
    np.testing.assert_array_equal(perturbed(target, 0.0, seed=9).law([4]), target.law([4]))
    np.testing.assert_allclose(TabularModel(4, sharpness=0).law([0]), 0.25)
    assert TabularModel(4, zeros=1.0).law([0]).max() == 1.0


def test_wanted_logits_and_slots() -> None:
    model = TabularModel(5, max_slots=2, eos=4)
    assert model.info.eos_ids == (4,)
    a, b = model.open(), model.open()
    both = [Rows.chain(b, 0, [1, 2, 3]), Rows.chain(a, 0, [0, 4])]
    logits = model.forward(both, num_logits=[1, 2])
    np.testing.assert_allclose(logits.exp(), [model.law([1, 2, 3]), model.law([0]), model.law([0, 4])])
    assert model.num_free_slots == 0
    model.close(a)
    model.close(b)
    assert (model.open(), model.length(0)) == (0, 0)


def test_a_known_text_is_held_at_once_until_its_memory_is_needed() -> None:
    model = TabularModel(
        5, seed=1, order=9, max_positions=40, tree_room=8, max_slots=3, kv_cache_tokens=96, block_size=8
    )
    text = np.random.default_rng(0).integers(0, 5, 24).tolist()
    model.close(committed(model, text))
    for tokens, salt, held in ((text, "", 16), ([*text, 1], "", 24), (text, "salt", 0), ([4 - text[0], *text], "", 0)):
        slot = model.open(tokens, salt=salt)
        assert model.length(slot) == held
        row = model.forward([Rows.chain(slot, 0, tokens[held:])], num_logits=[1])[0]
        np.testing.assert_allclose(row.exp(), model.law(tokens))
        model.close(slot)
    assert model.num_free_blocks == model.num_blocks == 12
    others = [committed(model, [i] * 40) for i in range(2)]  # ten blocks: some of the text's are forgotten
    assert model.length(model.open(text)) < 16
    for slot in others:
        model.close(slot)
    model.check_idle()


def test_kv_memory_is_bounded_as_of_a_real_model() -> None:
    model = TabularModel(5, max_positions=16, tree_room=8, max_slots=4, kv_cache_tokens=32, block_size=8)
    a, b = committed(model, [1] * 16), model.open()
    assert (model.num_free_blocks, blocks_needed(model, b, 16)) == (2, 2)
    assert blocks_needed(model, b, 17) == 3
    with pytest.raises(KvFull):
        model.forward([Rows.chain(b, 0, [2] * 17)])
    assert model.tree(b).num_uncommitted == 0
    model.close(a)
    model.forward([Rows.chain(b, 0, [2] * 17)])
    model.check_idle()


@pytest.mark.parametrize(
    "wrong",
    [dict(vocab=0), dict(order=-1), dict(zeros=1.5), dict(sharpness=-1.0), dict(eos=5), dict(noise=-0.1)],
)
def test_bad_arguments_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TabularModel(**{"vocab": 5, **wrong})
