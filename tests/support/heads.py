"""Random draft heads in the formats in which they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rootward.core.requests import DraftStrategy, Rule
from rootward.engine.slots import Entry
from rootward.engine.tabular import TabularModel

STRATEGIES = {  # that a head grows by, and rules that verify its trees
    "best_first": (None, {"rule": Rule.TOKEN}),
    "chain:3": (DraftStrategy("chain", (3,)), {"rule": Rule.BLOCK}),
    "iid:2,2": (DraftStrategy("iid", (2, 2)), {"rule": Rule.MULTI_STEP}),
    "rsd_c:3,2": (DraftStrategy("rsd_c", (3, 2)), {}),
    "rsd_s:3,3": (DraftStrategy("rsd_s", (3, 3)), {}),
    "marginals:4": (DraftStrategy("marginals", (4,)), {}),
}


def head_config(network: Any, **more: Any) -> dict[str, Any]:
    own = network.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.num_key_value_heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": own.vocab_size,
        **more,
    }


def layer_tensors(config: dict[str, Any], *, prefix: str, wide: int, random: Any) -> dict[str, torch.Tensor]:
    """Of one decoder layer. wide: size of what queries, keys and values are made of."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or size // config["num_attention_heads"]
    num_q, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (num_q * dim, wide),
        "self_attn.k_proj": (num_kv * dim, wide),
        "self_attn.v_proj": (num_kv * dim, wide),
        "self_attn.o_proj": (size, num_q * dim),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    found = {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}
    found[f"{prefix}post_attention_layernorm.weight"] = random(size) + 1
    return found


def eagle3(
    folder: Path,
    network: Any,
    *,
    draft_ids: list[int] | None,
    seed: int = 0,
    prefix: str = "midlayer.",
    with_output: bool = True,
    scale: float = 0.1,
    dtype: torch.dtype = torch.float32,
    more_tensors: tuple[str, ...] = (),
    **more: Any,
) -> Path:
    """Write a head. draft_ids: its vocabulary; None: that of the target. more_tensors: `input_norm`, `fc_norm` or `qk_norm`."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    num = network.config.vocab_size if draft_ids is None else len(draft_ids)
    config = head_config(network, draft_vocab_size=num, **more)
    size, layers = config["hidden_size"], len(more.get("eagle_aux_hidden_state_layer_ids", range(3)))
    tensors = layer_tensors(config, prefix=prefix, wide=2 * size, random=random)
    tensors |= {f"{prefix}{name}.weight": random(size) + 1 for name in ("input_layernorm", "hidden_norm")}
    tensors |= {"fc.weight": random(size, layers * size), "norm.weight": random(size) + 1}
    if with_output:
        tensors["lm_head.weight"] = random(num, size)
    if draft_ids is not None:
        tensors["d2t"] = torch.tensor(draft_ids) - torch.arange(num)
        tensors["t2d"] = torch.zeros(network.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][draft_ids] = True
    if "input_norm" in more_tensors:
        tensors["input_norm.weight"] = random(layers * size) + 1
    if "fc_norm" in more_tensors:
        tensors |= {f"fc_norm.{i}.weight": random(size) + 1 for i in range(layers)}
    if "qk_norm" in more_tensors:
        dim = config.get("head_dim") or size // config["num_attention_heads"]
        tensors |= {f"{prefix}self_attn.{name}.weight": random(dim) + 1 for name in ("q_norm", "k_norm")}
    return write(folder, config, tensors, dtype)


def eagle1(
    folder: Path, network: Any, *, seed: int = 0, bias: bool = True, scale: float = 0.1, speculators: bool = False
) -> Path:
    """Write a head as EAGLE-1 publishes them, or as speculators does."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    config = head_config(network, architectures=["EagleLlamaForCausalLM"], bias=bias)
    size = config["hidden_size"]
    prefix, fc = ("transformer.", "fusion_fc") if speculators else ("layers.0.", "fc")
    tensors = layer_tensors(config, prefix=prefix, wide=size, random=random)
    tensors[f"{fc}.weight"] = random(size, 2 * size)
    if bias:
        tensors[f"{fc}.bias"] = random(size)
    if speculators:
        tensors["lm_head.weight"] = network.get_output_embeddings().weight.detach().clone()
        config = {
            "architectures": ["EagleSpeculator"],
            "speculators_model_type": "eagle",
            "fusion_bias": bias,
            "layernorms": False,
            "transformer_layer_config": config,
        }
    else:
        tensors["embed_tokens.weight"] = network.get_input_embeddings().weight.detach().clone()
    return write(folder, config, tensors)


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: t.contiguous().to(dtype if t.is_floating_point() else t.dtype) for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


class TabularHead(TabularModel):
    """A draft head of a `TabularModel` that looks at two tokens. A row of text sees its own token and, as its feature, the target's token
    before it; a drafted row its own token and that of its parent.

    noise: of its logits against the target's; wrong: features are taken for those of other tokens, so far away; beside: a number that every
    feature has beside the token, so large that int8 leaves little of the token.
    """

    num_marginals = 0
    window: int | None = None
    reads, feature_size = (0,), 2

    def __init__(
        self, target: TabularModel, *, noise: float = 0.5, wrong: int = 0, beside: float = 0.0, max_slots: int = 8
    ) -> None:
        law = {"sharpness": target.sharpness, "zeros": target.zeros, "noise": noise, "noise_seed": 5}
        super().__init__(target.vocab, target.seed, 2, max_slots=max_slots, **law)
        self.wrong, self.beside = wrong, beside

    def fuse(self, states_NS: torch.Tensor) -> torch.Tensor:
        tokens = (states_NS.float() + self.wrong) % self.vocab
        return torch.cat([tokens, torch.full_like(tokens, self.beside)], 1)

    def _context(self, entry: Entry, row: int) -> list[int]:
        context = super()._context(entry, row)
        features = entry.rows.features
        return context if features is None else [round(float(features[row, 0])) % self.vocab, context[-1]]


def dflash(
    folder: Path,
    network: Any,
    *,
    layer_ids: tuple[int, ...] = (0, 2, 4),
    num_layers: int = 2,
    block_size: int = 4,
    mask_token: int = 2,
    draft_ids: list[int] | None = None,
    speculators: bool = False,
    bias: bool = False,
    seed: int = 0,
    scale: float = 0.1,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Path:
    """Write a block head as z-lab publishes them, or as speculators does. more: of the configuration of its layers."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    layers = head_config(
        network,
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        num_hidden_layers=num_layers,
        head_dim=network.config.hidden_size // network.config.num_attention_heads,
        **more,
    )
    layers = {name: value for name, value in layers.items() if value is not None}
    size, dim = layers["hidden_size"], layers["head_dim"]
    tensors = {"fc.weight": random(size, len(layer_ids) * size)}
    for i in range(num_layers):
        prefix = f"layers.{i}."
        tensors |= layer_tensors(layers, prefix=prefix, wide=size, random=random)
        tensors[f"{prefix}input_layernorm.weight"] = random(size) + 1
        tensors |= {f"{prefix}self_attn.{name}.weight": random(dim) + 1 for name in ("q_norm", "k_norm")}
        if bias:
            names = ("q_proj", "k_proj", "v_proj", "o_proj")
            outputs = {name: len(tensors[f"{prefix}self_attn.{name}.weight"]) for name in names}
            tensors |= {f"{prefix}self_attn.{name}.bias": random(num) for name, num in outputs.items()}
    tensors |= {f"{name}.weight": random(size) + 1 for name in ("hidden_norm", "norm")}
    if draft_ids is not None:
        tensors["lm_head.weight"] = random(len(draft_ids), size)
        tensors["d2t"] = torch.tensor(draft_ids) - torch.arange(len(draft_ids))
    if not speculators:
        config = {**layers, "block_size": block_size, "num_target_layers": network.config.num_hidden_layers}
        config["dflash_config"] = {"mask_token_id": mask_token, "target_layer_ids": list(layer_ids)}
        return write(folder, config, tensors, dtype)
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers,
        "draft_vocab_size": network.config.vocab_size if draft_ids is None else len(draft_ids),
        "block_size": block_size,
        "mask_token_id": mask_token,
        "aux_hidden_state_layer_ids": list(layer_ids),
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
    }
    return write(folder, config, tensors, dtype)
