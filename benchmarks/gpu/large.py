"""Random-weight Llama models of an 8 B and a 1 B shape, made on the device where they run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rootward.engine.layers import Linear

Network = Any


@dataclass(frozen=True)
class Shape:
    """Of a Llama, in the names of its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


LARGE = Shape(4096, 14336, 32, 32, 8, 128, 128256)
DRAFT = Shape(2048, 8192, 16, 32, 8, 64, 128256)  # of a 1 B Llama
TINY = Shape(64, 96, 2, 4, 2, 16, 256)


def random_network(shape: Shape, device: str, dtype: torch.dtype, max_positions: int, **more: Any) -> Network:
    """A Llama of this shape; no copy of it is ever on the host."""
    config = LlamaConfig(
        **{**asdict(shape), "max_position_embeddings": max_positions, "tie_word_embeddings": False, **more}
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def bytes_read(network: Network) -> int:
    """Weights that one step reads: all but the table of input embeddings, where that is not the output's."""
    tied = network.config.tie_word_embeddings
    table = 0 if tied else network.get_input_embeddings().weight.nbytes
    replaced = [m for m in network.modules() if isinstance(m, Linear)]  # on a CPU: no parameters any more
    linears = sum(m.in_features * m.out_features * m.dtype.itemsize for m in replaced)
    return linears + sum(p.nbytes for p in network.parameters()) - table
