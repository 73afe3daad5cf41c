"""Llama networks with random weights in the sizes of the 8 B and 1 B models, created on the device where they run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rootward.engine.layers import Linear

Network = Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama network, named as in `LlamaConfig`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


LARGE = Shape(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
)
DRAFT = Shape(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128256,
)
TINY = Shape(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
)


def random_network(shape: Shape, device: str, dtype: torch.dtype, max_positions: int, **more: Any) -> Network:
    """A Llama network of this shape, allocated on `device` only. more: further settings of `LlamaConfig`."""
    config = LlamaConfig(
        **{**asdict(shape), "max_position_embeddings": max_positions, "tie_word_embeddings": False, **more}
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def weight_bytes_per_step(network: Network) -> int:
    """Bytes of weights that one forward reads: all but the input embeddings, unless they are also the output layer."""
    tied = network.config.tie_word_embeddings
    embeddings = 0 if tied else network.get_input_embeddings().weight.nbytes
    packed = [m for m in network.modules() if isinstance(m, Linear)]  # on a CPU: weights that are no parameters
    linears = sum(m.in_features * m.out_features * m.dtype.itemsize for m in packed)
    return linears + sum(p.nbytes for p in network.parameters()) - embeddings
