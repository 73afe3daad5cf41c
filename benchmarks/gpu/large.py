"""Targets of an 8 B shape, made where they run: random weights, or the demo target inflated in every direction.

The residual stream of the inflated one is the small one's and zeros. RMSNorm averages over it, so norm weights carry √(d / D) and epsilon
d / D; the last matrix of every branch writes to the first d dimensions only, and nothing for added heads, units and layers; all other
added weights are random. Head size stays, so heads are more and narrower (64 of 64 for 32 of 128: the same bytes). Ids beyond the
tokenizer are masked by the engine. Acceptance and text are those of the small pair, time is that of the large shape: every figure made
with it must say so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

Network = Any
TOLERANCE = {
    torch.float32: 2e-3,
    torch.bfloat16: 5e-2,
    torch.float16: 2e-2,
}  # of the largest logit: GEMMs of other widths round differently


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
TINY_INFLATED = Shape(320, 768, 8, 8, 2, 64, 2304)  # above the demo target in every direction


def random_network(shape: Shape, device: str, dtype: torch.dtype, max_positions: int, **more: Any) -> Network:
    """A Llama of this shape; no copy of it is ever on the host."""
    config = LlamaConfig(
        **{**asdict(shape), "max_position_embeddings": max_positions, "tie_word_embeddings": False, **more}
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def widened(shape: Shape, small: Network) -> Shape:
    """The shape with the small model's head size and as many bytes in heads."""
    size = small.config.head_dim
    heads, kv_heads = (n * shape.head_dim // size for n in (shape.num_attention_heads, shape.num_key_value_heads))
    return replace(shape, head_dim=size, num_attention_heads=heads, num_key_value_heads=kv_heads)


@torch.no_grad()
def inflated_network(small: Network, shape: Shape, device: str, dtype: torch.dtype) -> Network:
    """The function of `small` at the cost of `widened(shape, small)`. ValueError if the small one is larger in some direction."""
    old, shape = small.config, widened(shape, small)
    for name, size in asdict(shape).items():
        if size < getattr(old, name):
            raise ValueError(f"{name}: {size} is less than the {getattr(old, name)} of the model to inflate; give more")
    ratio = old.hidden_size / shape.hidden_size
    same = {
        "rope_parameters": old.rope_parameters,
        "rms_norm_eps": old.rms_norm_eps * ratio,
        "eos_token_id": old.eos_token_id,
    }
    large = random_network(shape, device, dtype, old.max_position_embeddings, **same)
    large.generation_config.eos_token_id = old.eos_token_id
    for name, weight in large.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith("embed_tokens.weight"):
            weight[:, old.hidden_size :] = 0.0
    heads = head_rows(old, large.config)
    tied = {"lm_head.weight": small.get_output_embeddings().weight}
    for name, weight in (dict(small.named_parameters()) | tied).items():
        there, here = large.get_parameter(name), weight.to(device, dtype)
        if name.endswith("norm.weight"):
            there[: len(here)] = (weight.to(device, torch.float32) * ratio**0.5).to(dtype)
        elif name.endswith("q_proj.weight"):
            there[heads.to(device), : here.shape[1]] = here
        elif name.endswith("o_proj.weight"):
            there[: len(here), heads.to(device)] = here
        else:
            there[: here.shape[0], : here.shape[1]] = here
    return large


def head_rows(old: LlamaConfig, new: LlamaConfig) -> torch.Tensor:
    """int64[H · D]: where the rows of the small model's query heads go; each stays with its head of K and V."""
    group, more = (c.num_attention_heads // c.num_key_value_heads for c in (old, new))
    if more < group:
        raise ValueError(
            f"num_attention_heads: {more} to a head of K and V, the model to inflate has {group}; give more"
        )
    head = torch.arange(old.num_attention_heads)
    place = head // group * more + head % group
    return (place[:, None] * old.head_dim + torch.arange(old.head_dim)).flatten()


@torch.inference_mode()
def difference(small: Network, large: Network) -> float:
    """Largest difference of logits on random tokens, as a share of the largest logit. ValueError if it is more than rounding."""
    vocab = small.config.vocab_size
    tokens = torch.randint(0, vocab, (2, 64), generator=torch.Generator().manual_seed(1))
    expected = small(tokens.to(small.device), use_cache=False).logits.float().cpu()
    got = large(tokens.to(large.device), use_cache=False).logits[..., :vocab].float().cpu()
    error = float((expected - got).abs().max() / expected.abs().max())
    if not error < TOLERANCE[large.dtype]:
        raise ValueError(f"the inflated model differs by {error} of the largest logit")
    return error


def bytes_read(network: Network) -> int:
    """Weights that one step reads: all but the table of input embeddings, where that is not the output's."""
    table = network.get_input_embeddings().weight
    own = table is not network.get_output_embeddings().weight
    return sum(p.nbytes for p in network.parameters()) - own * table.nbytes
