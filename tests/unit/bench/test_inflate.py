"""Inflated models compute the same function with the requested number of parameters."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.inflate import check_same_function, inflated, width_for

SHAPE = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 96}


def network(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPE, intermediate_size=64, num_hidden_layers=2, initializer_range=0.2)
    return LlamaForCausalLM(config).eval()


def test_computes_the_same_function():
    assert check_same_function(network(0), inflated(network(0), 4, 128)) < 1e-3


def test_refuses_a_different_function():
    with pytest.raises(ValueError, match="differs"):
        check_same_function(network(0), inflated(network(1), 4, 128))


@pytest.mark.parametrize("num_layers", [3, 24])
@pytest.mark.parametrize("wanted", [400_000, 3_000_000])
@pytest.mark.parametrize("tied", [True, False])
def test_width_gives_the_requested_number_of_parameters(num_layers, wanted, tied):
    shape = {**SHAPE, "tie_word_embeddings": tied}
    width = width_for({**shape, "intermediate_size": 64}, num_layers, wanted)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=width, num_hidden_layers=num_layers))
    found = sum(p.numel() for p in model.parameters())
    assert wanted <= found <= wanted + 64 * 3 * 32 * num_layers
