"""Small networks in fewer operations: the same logits, for those architectures alone whose code is known, and never unprobed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from contract.families import SUPPORTED, Family

from rootward.engine import lean as lean_module
from rootward.engine import reach
from rootward.engine.lean import LeanNetwork, lean
from rootward.engine.model import HuggingFaceModel
from rootward.engine.passes import TreePass
from rootward.ports import COMMITTED, Rows

KINDS = ["llama", "mistral", "qwen2", "qwen3"]
OTHERS = ["gemma", "granite", "olmo2", "phi3", "cohere", "qwen3_moe"]


def network_of(family: Family, seed: int = 3) -> Any:
    """Nothing in it is one or zero by default: norms and biases as well are random."""
    network = family.network(seed)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim == 1:
                weight.add_(torch.rand_like(weight) - 0.3)
    return network


def model_of(network: Any, lean: bool = True) -> HuggingFaceModel:
    return HuggingFaceModel(network, name="small", max_slots=3, max_len=64, lean=lean)


def logits_of(model: HuggingFaceModel) -> torch.Tensor:
    """Two sessions, of unequal length, with trees of unequal width; some rows are wanted."""
    first, second, rng = model.open(), model.open(), np.random.default_rng(0)
    prompts = [Rows.chain(first, 1, rng.integers(2, 90, 17)), Rows.chain(second, 1, rng.integers(2, 90, 5))]
    found = [model.forward(prompts, num_logits=[1, 2])]
    for slot, last in ((first, 17), (second, 5)):
        model.commit(slot, last, keep_below=False)
    parents = np.array([COMMITTED, 100, 100, 101, 103])
    trees = [Rows(first, np.arange(100, 105), parents, np.arange(20, 25)), Rows.chain(second, 100, [7, 8])]
    found.append(model.forward(trees, num_logits=[5, 2]))
    model.commit(first, 103, keep_below=True)
    found.append(model.forward([Rows.chain(first, 200, [9])], num_logits=[1]))
    return torch.cat(found)


ROPE = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MORE = {
    "yarn": Family("LlamaConfig", {"rope_parameters": {**ROPE, "rope_type": "yarn"}, "head_dim": 12}),
    "llama3 rope": Family("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "biases": Family("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "two windows": Family(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
FAMILIES = {kind: SUPPORTED[kind] for kind in KINDS} | MORE


@pytest.mark.parametrize("at_once", [True, False], ids=["short contexts at once", "prefix and tail"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_it_computes_what_the_network_computes(kind: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        monkeypatch.setattr(reach, "CALL_CELLS", 0)
    short, whole = model_of(network_of(FAMILIES[kind])), model_of(network_of(FAMILIES[kind]), lean=False)
    assert short.lean is not None
    assert whole.lean is None
    torch.testing.assert_close(logits_of(short), logits_of(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_are_left_alone(kind: str) -> None:
    assert lean(SUPPORTED[kind].network(), 64) is None


def test_where_another_scale_or_code_is_at_work_it_is_left_alone() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert lean(Family("LlamaConfig", {"rope_parameters": rope}).network(), 64) is None
    network = SUPPORTED["llama"].network()
    network.model.layers[1].mlp.extra = torch.nn.Linear(2, 2)
    assert lean(network, 64) is None
    elsewhere = type("Other", (type(SUPPORTED["llama"].network()),), {"__module__": "somebody.modeling_llama"})
    assert lean(elsewhere(SUPPORTED["llama"].network().config), 64) is None


def test_code_of_somebody_else_is_run_as_it_is() -> None:
    """A short probe does not see all that it may do."""
    changed = SUPPORTED["llama"].network()
    own = type(changed.model.layers[0].self_attn)
    changed.model.layers[1].self_attn.__class__ = type("Longer", (own,), {"__module__": __name__})
    watched, patched, odd = (SUPPORTED["llama"].network() for _ in range(3))
    watched.model.layers[0].register_forward_hook(lambda *_: None)
    patched.model.norm.forward = patched.model.norm.forward
    odd.model.layers[0].mlp.down_proj = torch.nn.Identity()
    for network in (changed, watched, patched, odd):
        assert lean(network, 64) is None


def test_what_fails_on_the_way_costs_nothing_but_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LeanNetwork, "__init__", lambda *_: 1 / 0)
    model = model_of(network_of(SUPPORTED["llama"]))
    assert model.lean is None
    assert model.info.supports_trees
    assert "runs as it is" in caplog.text


def test_large_layers_and_other_types_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lean(SUPPORTED["llama"].network().bfloat16(), 64) is None
    monkeypatch.setattr(lean_module, "MIN_ELEMENTS", 32 * 48)
    assert lean(SUPPORTED["llama"].network(), 64) is None


@pytest.mark.parametrize("what", ["sin", "cos", "error"])
def test_a_wrong_one_is_not_used(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = LeanNetwork.__call__

    def wrong(self: LeanNetwork, *args: Any) -> torch.Tensor:
        if what == "error":
            raise RuntimeError("no such operator")
        if what == "sin":
            self.sin.abs_()
        else:
            self.cos.mul_(1.01)
        return right(self, *args)

    monkeypatch.setattr(LeanNetwork, "__call__", wrong)
    model = model_of(network_of(SUPPORTED["llama"]))
    assert model.lean is None
    assert model.info.supports_trees
    assert isinstance(model._pass, TreePass)


def test_weights_are_there_once() -> None:
    network = network_of(SUPPORTED["llama"])
    short = lean(network, 64)
    assert short is not None
    attention, mlp = network.model.layers[0].self_attn, network.model.layers[0].mlp
    for joined, parts in (
        (short.layers[0].qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (short.layers[0].gate_up, (mlp.gate_proj, mlp.up_proj)),
    ):
        storage = {part.weight.untyped_storage().data_ptr() for part in parts}
        assert storage == {joined.weight.untyped_storage().data_ptr()}
        assert torch.equal(torch.cat([part.weight for part in parts]), joined.weight)
