"""HuggingFaceModel as a port: loading, refusing, generating."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.kv import blocks_needed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from unit.engine.networks import SHAPE, VOCAB, own_attention, tiny, truth

from rootward.engine import cpu_attention
from rootward.engine import model as model_module
from rootward.engine import probe as probe_module
from rootward.engine.attention import DenseView
from rootward.engine.checkpoint import read_network
from rootward.engine.layers import LlamaNetwork
from rootward.engine.loading import load_model
from rootward.engine.model import HuggingFaceModel
from rootward.engine.passes import PathPass, TreePass
from rootward.engine.sampling import greedy_choice
from rootward.errors import ConfigurationError, KvFull
from rootward.ports import COMMITTED, LosslessLevel, Rows

LLAMA = "LlamaConfig"


def decode_greedily(model: HuggingFaceModel, prompt: list[int], num: int) -> list[int]:
    slot = model.open()
    logits = model.forward([Rows.chain(slot, 0, prompt)], num_logits=[1])
    model.commit(slot, len(prompt) - 1, keep_below=False)
    out = [int(greedy_choice(logits)[0])]
    while len(out) < num:
        logits = model.forward([Rows(slot, np.array([0]), np.array([COMMITTED]), np.array(out[-1:]))])
        model.commit(slot, 0, keep_below=False)
        out.append(int(greedy_choice(logits)[0]))
    model.close(slot)
    return out


def test_plain_decoding_equals_generate() -> None:
    network = tiny(LLAMA)
    model = HuggingFaceModel(network, name="tiny", max_slots=1)
    prompt = [5, 9, 2, 44, 17]
    with torch.inference_mode(), own_attention(network):
        ids = torch.tensor([prompt])
        reference = network.generate(ids, do_sample=False, max_new_tokens=50, min_new_tokens=50, eos_token_id=None)
    assert decode_greedily(model, prompt, 50) == reference[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        ("MambaConfig", {"state_size": 4}, "recurrent"),
        ("BloomConfig", {"n_layer": 2, "n_head": 4}, "ALiBi"),
        ("FalconConfig", {"alibi": True}, "ALiBi"),
        (LLAMA, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, ""),
    ],
)
def test_what_cannot_run_trees_decodes_plainly(config: str, changes: dict[str, object], why: str) -> None:
    """Refused with a reason, and still right: chains, commits and even trees go path by path."""
    model = HuggingFaceModel(tiny(config, **changes), name="tiny", max_slots=2)
    assert model.info.supports_trees is (not why)
    assert why in model.probe_report.reason
    assert isinstance(model._pass, PathPass if why else TreePass)
    slot = model.open()
    model.forward([Rows.chain(slot, 0, [3, 4, 5])], num_logits=[1])
    model.commit(slot, 2, keep_below=False)
    logits = model.forward([Rows(slot, np.arange(3), np.array([COMMITTED, 0, 0]), np.array([6, 7, 8]))])
    paths = ([6], [6, 7], [6, 8])
    expected = torch.stack([truth(model.network, [3, 4, 5, *path]) for path in paths])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    model.commit(slot, 2, keep_below=False)
    logits = model.forward([Rows.chain(slot, 0, [9])])
    torch.testing.assert_close(logits[0], truth(model.network, [3, 4, 5, 6, 8, 9]), atol=1e-5, rtol=1e-5)
    model.close(slot)
    assert model.length(model.open()) == 0


def test_positions_that_depend_on_the_batch_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    network = tiny(LLAMA, rope_parameters=rope)
    long = HuggingFaceModel(network, name="tiny", max_slots=1)
    assert "set max_len to at most 64" in long.probe_report.reason
    assert HuggingFaceModel(network, name="tiny", max_slots=1, max_len=64).info.supports_trees


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_network_that_reads_trees_wrongly_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The probe measures: break the mask and it refuses, naming model, error and fix."""
    save(tmp_path)
    right = cpu_attention.visible_keys

    def broken(*args: Any) -> cpu_attention.VisibleKeys:
        """Every row sees the nodes of another."""
        seen = right(*args)
        return replace(seen, nodes=np.roll(seen.nodes, 1))

    monkeypatch.setattr(cpu_attention, "visible_keys", broken)
    dense = DenseView.mask
    monkeypatch.setattr(DenseView, "mask", lambda *args: torch.zeros_like(dense(*args)))
    with pytest.raises(ConfigurationError, match=r"off by \d") as caught:
        load_model(str(tmp_path), dtype=dtype, require_trees=True)
    assert caught.value.exit_code == 3
    assert str(tmp_path) in str(caught.value)
    assert "without speculation" in str(caught.value)
    assert not load_model(str(tmp_path)).info.supports_trees


def test_the_probe_leaves_the_network_as_it_was() -> None:
    network = tiny("MistralConfig", sliding_window=9)
    assert HuggingFaceModel(network, name="tiny", max_slots=1).info.supports_trees
    assert network.config.sliding_window == 9
    with probe_module.narrow_window(network.config):
        assert network.config.sliding_window == 4
    assert network.config.sliding_window == 9


def test_networks_that_slice_logits_their_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early transformers 5 knows no other tensors than positions for all entries; some networks know no `logits_to_keep` at all."""
    network = tiny(LLAMA)
    forward = type(network).forward

    def positions_only(self: object, *args: object, logits_to_keep: int | torch.Tensor = 0, **kwargs: object) -> object:
        if isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.ndim > 1:
            raise IndexError("too many indices")
        return forward(self, *args, logits_to_keep=logits_to_keep, **kwargs)

    def nothing(self: object, input_ids: object, **kwargs: object) -> object:
        assert "logits_to_keep" not in kwargs
        return forward(self, input_ids, **kwargs)

    for own in (forward, positions_only, nothing):
        monkeypatch.setattr(type(network), "forward", own)
        model = HuggingFaceModel(network, name="tiny", max_slots=2)
        assert model.info.supports_trees, model.probe_report
        a, b = model.open(), model.open()
        logits = model.forward([Rows.chain(b, 0, [1, 2, 3]), Rows.chain(a, 0, [4, 5])], num_logits=[1, 2])
        expected = torch.stack([truth(network, context) for context in ([1, 2, 3], [4], [4, 5])])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_the_fast_path_changes_nothing_but_speed() -> None:
    shape = {"hidden_size": 64, "intermediate_size": 8192, "num_hidden_layers": 1, "tie_word_embeddings": True}
    plain, fast = (HuggingFaceModel(tiny(LLAMA, **shape), name="x", max_slots=1, fast=f) for f in (False, True))
    assert (plain.llama is not None, fast.llama is not None) == (False, True)
    assert fast.info == replace(plain.info, lossless=LosslessLevel.BITWISE)
    outs = [m.forward([Rows.chain(m.open(), 0, [1, 2, 3])]) for m in (plain, fast)]
    torch.testing.assert_close(outs[0], outs[1], atol=2e-4, rtol=1e-4)


def test_half_precision_passes_the_probe() -> None:
    network = tiny(LLAMA).bfloat16()
    model = HuggingFaceModel(network, name="tiny", max_slots=2)
    assert model.info.supports_trees, model.probe_report
    slot = model.open()
    assert model.forward([Rows.chain(slot, 0, [1, 2])]).dtype == torch.float32


def save(folder: Path, num_words: int = 80, **changes: object) -> None:
    """A model folder whose tokenizer has fewer ids than the network."""
    network = tiny(LLAMA, **changes)
    network.generation_config.eos_token_id = [7, 1]
    network.save_pretrained(folder)
    raw = Tokenizer(WordLevel({f"w{i}": i for i in range(num_words)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)


def test_a_folder_is_read_and_described(tmp_path: Path) -> None:
    save(tmp_path)
    model = load_model(str(tmp_path), max_slots=2, max_len=64, require_trees=True)
    assert isinstance(model, HuggingFaceModel)
    info = model.info
    assert (info.name, info.vocab_size, info.max_positions) == (str(tmp_path), VOCAB, 64)
    assert info.eos_ids == (1, 7)
    assert info.num_parameters == sum(p.numel() for p in tiny(LLAMA).parameters())
    assert len(info.tokenizer_hash) == len(info.fingerprint) == 64
    again = load_model(str(tmp_path)).info
    assert (again.fingerprint, again.tokenizer_hash) == (info.fingerprint, info.tokenizer_hash)
    assert again.max_positions == SHAPE["max_position_embeddings"]
    slot = model.open()
    logits = model.forward([Rows.chain(slot, 0, [1, 2])])
    assert torch.isneginf(logits[:, 80:]).all()
    assert torch.isfinite(logits[:, :80]).all()


def test_fingerprints_distinguish_weights() -> None:
    one, same, other = (model_module.fingerprint(tiny(LLAMA, seed=s)) for s in (0, 0, 1))
    assert one == same != other


def test_a_model_without_a_tokenizer_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny("MambaConfig", state_size=4).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="rootward"):
        model = load_model(str(tmp_path), max_len=32)
    assert model.info.tokenizer_hash == ""
    assert "decodes plainly" in caplog.text
    with pytest.raises(ConfigurationError, match="recurrent") as caught:
        load_model(str(tmp_path), require_trees=True)
    assert caught.value.exit_code == 3


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dtype"):
        read_network(str(tmp_path), dtype="int3")


def test_bad_input_changes_nothing() -> None:
    model = HuggingFaceModel(tiny(LLAMA), name="tiny", max_slots=2, max_len=32, tree_room=8)
    a, b = model.open(), model.open()
    model.forward([Rows.chain(a, 0, [1, 2, 3])])
    good = Rows(a, np.array([5]), np.array([2]), np.array([4]))
    for bad in (
        Rows.chain(b, 0, [VOCAB]),
        Rows.chain(b, 0, [1] * 41),
        Rows(b, np.array([1]), np.array([9]), np.array([1])),
        Rows.chain(7, 0, [1]),
    ):
        with pytest.raises(ValueError):
            model.forward([good, bad])
    assert (model.tree(a).num_uncommitted, model.tree(b).num_uncommitted) == (3, 0)
    model.check_idle()
    logits = model.forward([good])
    torch.testing.assert_close(logits[0], truth(model.network, [1, 2, 3, 4]), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError):
        model.commit(b, 0, keep_below=True)


@pytest.mark.parametrize("fast", [False, True])
def test_a_forward_that_fails_changes_nothing(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = HuggingFaceModel(tiny(LLAMA), name="tiny", max_slots=1, fast=fast)
    slot = model.open()
    broken, name = (LlamaNetwork, "__call__") if fast else (TreePass, "_forward")
    monkeypatch.setattr(broken, name, lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.forward([Rows.chain(slot, 0, [1, 2])])
    assert model.tree(slot).num_uncommitted == 0
    monkeypatch.undo()
    logits = model.forward([Rows.chain(slot, 0, [1, 2])])
    torch.testing.assert_close(logits[1], truth(model.network, [1, 2]), atol=1e-5, rtol=1e-5)


def test_a_tree_may_hang_over_the_end_of_the_context() -> None:
    """Learned positions end; the rows inside are right, and nothing grows once the context is full."""
    shape = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    model = HuggingFaceModel(tiny("GPT2Config", **shape), name="tiny", max_slots=1, tree_room=8)
    slot = model.open()
    prompt = list(range(14))
    model.forward([Rows.chain(slot, 0, prompt)], num_logits=[1])
    model.commit(slot, 13, keep_below=False)
    logits = model.forward([Rows.chain(slot, 0, [50, 51, 52, 53])])
    expected = torch.stack([truth(model.network, [*prompt, 50]), truth(model.network, [*prompt, 50, 51])])
    torch.testing.assert_close(logits[:2], expected, atol=1e-5, rtol=1e-5)
    model.commit(slot, 2, keep_below=False)
    with pytest.raises(ValueError, match="outside a context of 16"):
        model.forward([Rows.chain(slot, 0, [1])])


def test_nan_of_one_session_stays_in_its_slot() -> None:
    """K and V of a broken session are hidden from its batch and wiped when the slot is closed."""
    model = HuggingFaceModel(tiny(LLAMA), name="tiny", max_slots=2)
    bad, good = model.open(), model.open()
    model.network.get_input_embeddings().weight[90] = torch.nan
    logits = model.forward([Rows.chain(bad, 0, [90, 1]), Rows.chain(good, 0, [1, 2, 3])], num_logits=[1, 1])
    assert torch.isnan(logits[0]).any()
    model.network.get_input_embeddings().weight[90] = 0.0
    torch.testing.assert_close(logits[1], truth(model.network, [1, 2, 3]), atol=1e-5, rtol=1e-5)
    model.close(bad)
    slot = model.open()
    logits = model.forward([Rows.chain(slot, 0, [4])])
    torch.testing.assert_close(logits[0], truth(model.network, [4]), atol=1e-5, rtol=1e-5)


def test_known_prefixes_are_not_computed_again() -> None:
    """A second session with the same text and salt holds whole blocks at once, and decodes the same from them."""
    model = HuggingFaceModel(tiny(LLAMA), name="tiny", max_slots=3)
    text = np.random.default_rng(0).integers(0, VOCAB, 48).tolist()
    first = model.open(text)
    assert model.length(first) == 0
    model.forward([Rows.chain(first, 0, text)], num_logits=[1])
    model.commit(first, 47, keep_below=False)
    for tokens, salt, held in [
        (text, "", 32),
        ([*text, 1], "", 48),
        (text[:17], "", 16),
        (text, "other", 0),
        (text[1:], "", 0),
    ]:
        slot = model.open(tokens, salt=salt)
        assert model.length(slot) == held
        logits = model.forward([Rows.chain(slot, 0, tokens[held:])], num_logits=[1])
        torch.testing.assert_close(logits[0], truth(model.network, tokens), atol=1e-5, rtol=1e-5)
        model.close(slot)
    model.close(first)
    assert model.length(model.open(text)) == 32
    model.check_idle()


def test_kv_memory_is_bounded() -> None:
    """Three sessions share room for one and a half; who is told of it closes one, and goes on later."""
    model = HuggingFaceModel(tiny(LLAMA), name="tiny", max_slots=3, max_len=64, tree_room=16, kv_cache_tokens=120)
    plan = "7 blocks of 16 tokens of 0.2 KiB; 112 tokens fit, 3 sessions at their longest take 240"
    assert plan in str(model.memory)
    text = np.random.default_rng(1).integers(0, 80, 40).tolist()
    a, b = model.open(), model.open()
    assert blocks_needed(model, a, 40) == 3
    for slot in (a, b):
        model.forward([Rows.chain(slot, 0, text)], num_logits=[1])
        model.commit(slot, 39, keep_below=False)
    assert model.num_free_blocks == 1
    trees = [Rows(slot, np.arange(9), np.full(9, COMMITTED), np.arange(9)) for slot in (a, b)]
    assert [blocks_needed(model, slot, 9) for slot in (a, b)] == [1, 1]
    with pytest.raises(KvFull, match="2 more blocks are needed and 1 are free"):
        model.forward(trees)
    model.check_idle()
    assert (model.tree(a).num_uncommitted, model.num_free_blocks) == (0, 1)
    model.close(b)
    logits = model.forward(trees[:1])
    torch.testing.assert_close(logits[8, :80], truth(model.network, [*text, 8])[:80], atol=1e-5, rtol=1e-5)
    model.close(a)
    b = model.open(text)
    assert model.length(b) == 32
    model.close(b)
    assert model.num_free_blocks == model.num_blocks
    with pytest.raises(ConfigurationError, match="kv_cache_tokens"):
        HuggingFaceModel(tiny(LLAMA), name="tiny", max_len=64, kv_cache_tokens=100)
