"""Block heads (DFlash, 2602.06036): decoder layers that read a block of mask tokens in one pass, loaded as they are published.

The block is the last committed token and `block_size - 1` mask tokens. The output at a mask is the distribution of the token at that
position given the text before the block, whatever the tokens between are: a marginal. Queries are made of the block alone; keys and values
of the block and, at the positions before it, of features of the target's hidden states. So a committed position costs its keys and values
once, and the text itself is never embedded. Embedding and output matrix are the target's where the file has none.

    z-lab         `dflash_config.target_layer_ids`: layers whose *outputs* are read
    speculators   `aux_hidden_state_layer_ids`: layers whose *inputs* are read; often a reduced vocabulary

Layers see everything, but for those with a sliding window, which are causal unless the file says otherwise.

Legend: N context rows, A blocks, B block size, M marginals of a block, C context cells of a block (padded), E hidden size, H query heads,
S heads of keys and values, D head dimension, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from rootward.core.requests import MAX_LEVELS
from rootward.engine.attention import FULL, SLIDING
from rootward.engine.head_weights import (
    HeadWeights,
    TorchRotations,
    check_attention,
    layer_config,
    product,
    read_tensors,
    refusal,
    rotations,
)
from rootward.engine.kv_cache import PagedLayer, gathered

ARCHITECTURES = {"DFlashDraftModel", "DFlashSpeculator", "QwenDFlashDraftModel"}  # of z-lab, speculators, AngelSlim
KNOWN = {
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "causal",
    "use_swa",
    "swa_window_size",
}  # in `dflash_config`
# Options of kin, by the value that leaves a head as it is computed here.
PLAIN: dict[str, Any] = {
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": None,
    "fc_layernorm": False,
    "final_logit_softcapping": None,
    "hidden_act": "silu",
    "input_embedding_scale": 1.0,
    "is_neox_style": True,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "projector_type": "dflash",
    "quantization_config": None,
    "sample_from_anchor": False,
    "shift_label": False,
    "use_aux_hidden_state": True,
}


class BlockLayer:
    """A decoder layer of a block head.

    window  its sliding window, or None
    causal  whether no position of the block sees later ones
    """

    def __init__(self, weights: HeadWeights, config: Any, prefix: str, *, window: int | None, causal: bool):
        self.window, self.causal = window, causal
        size, inner, dim, eps = config.hidden_size, config.intermediate_size, config.head_dim, config.rms_norm_eps
        num_q, num_kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        self.before_attention = weights.torch_norm(f"{prefix}input_layernorm", size, eps)
        self.query = weights.linear({f"{attention}q_proj": num_q}, size)
        self.keys_values = weights.linear({f"{attention}k_proj": num_kv, f"{attention}v_proj": num_kv}, size)
        self.query_norm = weights.torch_norm(f"{attention}q_norm", dim, eps)
        self.key_norm = weights.torch_norm(f"{attention}k_norm", dim, eps)
        self.out = weights.linear({f"{attention}o_proj": size}, num_q)
        self.before_mlp = weights.torch_norm(f"{prefix}post_attention_layernorm", size, eps)
        self.gate_up = weights.linear({f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}, size)
        self.down = weights.linear({f"{mlp}down_proj": size}, inner)


class BlockHead:
    """Call it with blocks, when the keys and values of what is before them have been written: logits [A, M, V'] of their marginals.

    depth     M: marginals that a pass computes; those of a whole block, unless trees are never so deep
    states    which hidden states of the target it reads: i is the input of layer i; the number of layers stands for the last one's output
              after the final norm
    readings  what else they may be, with them, the published meaning first
    """

    def __init__(
        self,
        weights: HeadWeights,
        config: Any,
        layers: Sequence[BlockLayer],
        *,
        readings: Sequence[tuple[int, ...]],
        block_size: int,
        mask_token: int,
    ):
        self.dtype, self.device, self.layers = weights.dtype, weights.device, layers
        self.windows = tuple(layer.window for layer in layers)
        self.states, self.readings = readings[0], readings
        self.block_size, self.mask_token, self.depth = block_size, mask_token, block_size - 1
        self.hidden_size, self.dim = config.hidden_size, config.head_dim
        check_attention(config.num_attention_heads, config.num_key_value_heads)
        self.has_groups = config.num_attention_heads != config.num_key_value_heads
        size, eps = self.hidden_size, config.rms_norm_eps
        self.embedding_scale, self.embedding = weights.embedding_scale, weights.embedding(size)
        self.fc = weights.linear({"fc": size}, len(self.states) * weights.target_size)
        self.hidden_norm, self.norm = (weights.torch_norm(name, size, eps) for name in ("hidden_norm", "norm"))
        self.output = weights.output(size)
        weights.finish()
        self.rotations = TorchRotations(rotations(config, weights.context + block_size, self.dim), self.device)

    def fuse(self, states_NS: torch.Tensor) -> torch.Tensor:
        """float32[N, E]: features of positions by the target's hidden states there, side by side."""
        return self.hidden_norm.of(product(self.fc, states_NS, self.dtype))

    def write(
        self, feature_NE: torch.Tensor, position_N: torch.Tensor, cells_N: torch.Tensor, kept: Sequence[PagedLayer]
    ) -> None:
        """Keys and values of context positions go to their cells in every layer."""
        for layer, own in zip(self.layers, kept, strict=True):
            keys, values = self._keys_values(layer, feature_NE, position_N)
            own.write(cells_N, keys, values)

    def __call__(
        self, token_A: torch.Tensor, length_A: torch.Tensor, cells_AC: torch.Tensor, kept: Sequence[PagedLayer]
    ) -> torch.Tensor:
        """Of blocks by their first tokens and the positions of these. cells: of the positions before, and for padding any that have been
        written."""
        ids_AB = token_A[:, None].repeat(1, self.block_size)
        ids_AB[:, 1:] = self.mask_token
        position_AB = length_A[:, None] + torch.arange(self.block_size, device=self.device)
        x = functional.embedding(ids_AB, self.embedding).float() * self.embedding_scale
        masks: dict[tuple[int | None, bool], torch.Tensor] = {}
        for layer, own in zip(self.layers, kept, strict=True):
            kind = layer.window, layer.causal
            if kind not in masks:
                masks[kind] = _visible(position_AB, cells_AC.shape[1], window=layer.window, causal=layer.causal)
            read = layer.before_attention.of(x)
            query = layer.query_norm.of(self._by_head(product(layer.query, read, self.dtype)))
            keys, values = self._keys_values(layer, read, position_AB)
            attended = functional.scaled_dot_product_attention(
                self.rotations.of(query, position_AB).to(self.dtype).transpose(1, 2),
                torch.cat([gathered(own.keys, cells_AC), keys.transpose(1, 2)], 2),
                torch.cat([gathered(own.values, cells_AC), values.transpose(1, 2)], 2),
                masks[kind][:, None],
                enable_gqa=self.has_groups,
            )
            x = x + product(layer.out, attended.transpose(1, 2).flatten(2).float(), self.dtype)
            gate, up = product(layer.gate_up, layer.before_mlp.of(x), self.dtype).chunk(2, -1)
            x = x + product(layer.down, functional.silu(gate) * up, self.dtype)
        return self.output.logits(self.norm.of(x[:, 1 : 1 + self.depth]))

    def _keys_values(
        self, layer: BlockLayer, read: torch.Tensor, position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., S, D] of [..., E]."""
        both = self._by_head(product(layer.keys_values, read, self.dtype))
        keys, values = both.chunk(2, -2)
        return self.rotations.of(layer.key_norm.of(keys), position).to(self.dtype), values.to(self.dtype)

    def _by_head(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., H, D] of [..., H · D]."""
        return rows.view(*rows.shape[:-1], -1, self.dim)


def _visible(position_AB: torch.Tensor, num_cells: int, *, window: int | None, causal: bool) -> torch.Tensor:
    """bool[A, B, C + B]: what each position of a block sees, of the context and of the block."""
    place = torch.arange(num_cells, device=position_AB.device).expand(len(position_AB), -1)
    before = position_AB[:, :, None] - torch.cat([place, position_AB], 1)[:, None]
    there = torch.cat([place < position_AB[:, :1], torch.ones_like(position_AB, dtype=torch.bool)], 1)[:, None]
    visible = there & (before >= 0) if causal else there.expand_as(before)
    return visible if window is None else visible & (before.abs() < window)


# -- files ------------------------------------------------------------------------------------------------------------


def is_block_head(raw: dict[str, Any]) -> bool:
    """Whether this config.json is that of a block head."""
    names = [raw.get("speculators_model_type") or "", *(raw.get("architectures") or ())]
    return "dflash_config" in raw or any("dflash" in str(name).lower() for name in names)


def load_block_head(folder: Path, raw: dict[str, Any], network: Any) -> BlockHead:
    """The block head in a folder whose config.json is `raw`, for this target. ConfigurationError: see `heads.load_head`."""
    from transformers import Qwen3Config

    options = {**raw, **(raw.get("dflash_config") or {})}
    _refuse_kin(raw, options)
    if (folder / "mask_embedding.pt").exists():
        raise refusal("mask_embedding.pt: heads with an embedding of their own for the mask are not supported")
    config = Qwen3Config(**{key: value for key, value in layer_config(raw).items() if key != "model_type"})
    weights = HeadWeights(read_tensors(folder, prefixes=("model.",)), network)
    block_size, mask_token = options.get("block_size"), options.get("mask_token_id")
    if not isinstance(block_size, int) or not 2 <= block_size <= MAX_LEVELS:
        raise refusal(f"block_size: {block_size!r}; a block has between 2 and {MAX_LEVELS} positions")
    vocab = weights.vocab_size
    if not isinstance(mask_token, int) or not 0 <= mask_token < vocab:
        raise refusal(f"mask_token_id: {mask_token!r} is no token of the target's vocabulary of {vocab}")
    layers = _layers(raw, options, config, weights)
    readings = _readings(options, weights.num_target_layers)
    return BlockHead(weights, config, layers, readings=readings, block_size=block_size, mask_token=mask_token)


def _refuse_kin(raw: dict[str, Any], options: dict[str, Any]) -> None:
    kind = raw.get("speculators_model_type")
    if kind not in (None, "dflash"):
        raise refusal(f"speculators_model_type: {kind!r}; of block heads dflash is supported")
    if wrong := set(raw.get("architectures") or ()) - ARCHITECTURES:
        raise refusal(f"architectures: {', '.join(sorted(wrong))}; of block heads DFlashDraftModel is supported")
    if unknown := set(raw.get("dflash_config") or ()) - KNOWN - set(PLAIN):
        raise refusal(f"dflash_config: {', '.join(sorted(unknown))} are unknown; a head with them is another head")
    for name, plain in PLAIN.items():
        if options.get(name) not in (None, plain):
            raise refusal(f"{name}: {options[name]!r} is not supported; heads with {plain!r} are")


def _layers(raw: dict[str, Any], options: dict[str, Any], config: Any, weights: HeadWeights) -> list[BlockLayer]:
    kinds = list(config.layer_types)
    if not set(kinds) <= {FULL, SLIDING}:
        raise refusal(f"layer_types: {', '.join(sorted(set(kinds) - {FULL, SLIDING}))}; {FULL} and {SLIDING} are known")
    if SLIDING in kinds and config.sliding_window is None:
        raise refusal(f"sliding_window: missing, and layer_types has {SLIDING}")
    window = config.sliding_window
    if options.get("use_swa"):  # of Model-Optimizer and MiMo: a window of all layers, which `layer_types` calls full
        window = options.get("swa_window_size") or raw.get("sliding_window")
        if SLIDING in kinds or not isinstance(window, int) or window < 1:
            raise refusal(
                f"use_swa: True needs a number as swa_window_size, not {window!r}, and layer_types of {FULL} alone"
            )
    whole = options.get("is_causal", options.get("causal"))  # of all layers
    sliding = not raw.get("sliding_window_non_causal", False)
    return [
        BlockLayer(
            weights,
            config,
            f"layers.{i}.",
            window=window if kind == SLIDING or options.get("use_swa") else None,
            causal=bool(whole) if whole is not None else kind == SLIDING and sliding,
        )
        for i, kind in enumerate(kinds)
    ]


def _readings(options: dict[str, Any], num_layers: int) -> list[tuple[int, ...]]:
    name = "aux_hidden_state_layer_ids" if "aux_hidden_state_layer_ids" in options else "target_layer_ids"
    ids = options.get(name)
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise refusal(f"{name}: {ids!r}; give the layers of the target that it reads")
    inputs, outputs = tuple(ids), tuple(i + 1 for i in ids)
    readings = [inputs, outputs] if name == "aux_hidden_state_layer_ids" else [outputs, inputs]
    if min(ids) < 0 or max(readings[0]) > num_layers:
        raise refusal(f"{name}: {ids}; the target has {num_layers} layers")
    return [states for states in readings if max(states) <= num_layers]
