"""The shipped draft head for SmolLM2-135M-Instruct: an EAGLE-3 file as published, and a card that says what was measured."""

import json

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

from rootward import demo

FOLDER = demo.smollm2_head()
CONFIG = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
MEASURED = json.loads((FOLDER / "measured.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return load_file(FOLDER / "model.safetensors")


def test_tensors_are_those_of_the_format(tensors):
    layer = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    own = {f"midlayer.{name}.weight" for name in (*layer, *projections)}
    assert set(tensors) == own | {"fc.weight", "norm.weight", "d2t", "t2d"}
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in tensors.items() if name not in {"d2t", "t2d"})
    hidden = CONFIG["hidden_size"]
    assert tensors["fc.weight"].shape == (hidden, 3 * hidden)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * hidden
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_draft_vocabulary_maps_to_ascending_target_tokens(tensors):
    ids = tensors["d2t"] + torch.arange(CONFIG["draft_vocab_size"])
    assert tensors["t2d"].shape == (CONFIG["vocab_size"],)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()


def test_the_card_states_what_was_measured():
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    for row in [*MEASURED["held_out"], *MEASURED["prompts"]]:
        assert f"| {row['tokens_per_pass']:.2f} |" in card
