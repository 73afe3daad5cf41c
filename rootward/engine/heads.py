"""Draft heads: one decoder layer that reads hidden states of the target, loaded as they are published.

A head predicts the token after x_j from the embedding of x_j and a *feature* of everything before it. For committed text the feature is
made of the target's hidden states at position j - 1 (`fuse`); for a drafted token it is the head's own output at the node above.

    EAGLE-3 (2503.01840)   feature = fc(inputs of three layers); q, k, v read [norm(embedding); norm(feature)]; own norm and output matrix,
                           often over a reduced vocabulary: target id = i + d2t[i]
    EAGLE-1/2 (2401.15077) feature = last hidden state after the final norm; the layer reads fc([embedding; feature]); the target's output

EAGLE-3 comes in two spellings, that of EAGLE and SpecForge (`midlayer.*`) and that of speculators (`layers.0.*`), and EAGLE-1 in two,
that of EAGLE (`layers.0.*`) and that of speculators (`transformer.*`). A file with any other tensor is refused: it would be another head.

Where the kernels of `cpu_kernels` serve, a head is computed by them, as the target is; elsewhere by torch, on padded rows.

Legend: N rows, T wanted rows, E hidden size of the head, D head dimension, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from rootward.engine.attention import FULL, SLIDING, DenseView
from rootward.engine.batch import Step
from rootward.engine.block_head import BlockHead, is_block_head, load_block_head
from rootward.engine.cpu_kernels import array_of, head_inputs
from rootward.engine.head_weights import (
    HeadWeights,
    TorchRotations,
    check_attention,
    layer_config,
    product,
    read_config,
    read_tensors,
    refusal,
    rotations,
)
from rootward.engine.kv_cache import PagedLayer, gathered
from rootward.engine.layers import DecoderLayers, Layer
from rootward.errors import ConfigurationError

# The layer in three spellings, and `fc`, which is `fusion_fc` in heads of EAGLE-1 by speculators.
PREFIXES = ("model.", "layers.0.", "midlayer.", "transformer.", "fusion_")


class Head:
    """Call it with a step, its cells and the features of its rows: logits [T, V'], and the feature that each of the N rows passes on.

    states    which hidden states of the target it reads: i is the input of layer i; the number of layers stands for the last one's
              output after the final norm
    readings  what else they may be, with them: layer ids mean inputs of layers in some files and outputs in others
    windows   the sliding window of its layer, or None
    """

    depth = 0  # no marginals

    def __init__(self, weights: HeadWeights, config: Any, states: Sequence[int]):
        self.dtype, self.device, self.has_kernels = weights.dtype, weights.device, weights.has_kernels
        self.states, num_layers = tuple(states), weights.num_target_layers
        self.hidden_size, eps = config.hidden_size, config.rms_norm_eps
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_q, num_kv = config.num_attention_heads, config.num_key_value_heads
        check_attention(num_q, num_kv)
        self.windows = (_window(config),)
        self.is_eagle3 = "hidden_norm.weight" in weights
        self.readings = [self.states]
        if self.is_eagle3 and max(self.states) + 1 < num_layers:
            self.readings.append(tuple(i + 1 for i in self.states))
        size, inner, of_target = config.hidden_size, config.intermediate_size, weights.target_size
        if not self.is_eagle3 and size != of_target:
            raise refusal(f"hidden_size: {size}, the target has {of_target}; heads of EAGLE-1 and 2 are as wide as it")
        self.embedding = weights.embedding(size)
        self.fc = weights.linear({"fc": size}, len(states) * of_target if self.is_eagle3 else 2 * size)
        has_norms = "fc_norm.0.weight" in weights  # of each state, or of none
        self.norm_of_state = [weights.norm(f"fc_norm.{i}", eps, of_target) for i in range(len(states)) if has_norms]
        whole = len(states) * of_target
        self.norm_before_fc = weights.norm("input_norm", eps, whole) if "input_norm.weight" in weights else None
        self.before_attention: Any = weights.norm("input_layernorm", eps, size) if self.is_eagle3 else None
        self.hidden_norm: Any = weights.norm("hidden_norm", eps, size) if self.is_eagle3 else None
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))
        self.norm_output = bool(getattr(config, "norm_output", False))
        heads = {"q_proj": num_q, "k_proj": num_kv, "v_proj": num_kv}
        norms = {"q_norm": num_q, "k_norm": num_kv}  # of each head; layers like those of Qwen3 have them
        has_head_norms = any(f"self_attn.{name}.weight" in weights for name in norms)
        read = 2 * size if self.is_eagle3 else size
        self.layer = Layer(
            dim=dim,
            num_q=num_q,
            num_kv=num_kv,
            qkv=weights.linear({f"self_attn.{name}": num * dim for name, num in heads.items()}, read),
            head_norms=weights.head_norms({f"self_attn.{n}": num for n, num in norms.items()}, dim)
            if has_head_norms
            else None,
            head_eps=eps if has_head_norms else 0.0,
            out=weights.linear({"self_attn.o_proj": size}, num_q * dim),
            scaling=dim**-0.5,
            before_mlp=weights.norm("post_attention_layernorm", eps, size),
            gate_up=weights.linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, size),
            down=weights.linear({"mlp.down_proj": size}, inner),
        )
        self.norm = weights.norm("norm", eps, size) if "norm.weight" in weights else None
        self.output = weights.output(size)
        weights.finish()
        own = rotations(config, config.max_position_embeddings, dim)
        self.rotations = TorchRotations(own, self.device)
        self.by_kernels = DecoderLayers([self.layer], (), own) if self.has_kernels else None

    # -- computing ----------------------------------------------------------------------------------------------------

    def fuse(self, states_NS: torch.Tensor) -> torch.Tensor:
        """float32[N, E]: features of positions by the target's hidden states there, side by side."""
        if not self.is_eagle3:
            return states_NS.float()
        if self.norm_of_state:
            parts = states_NS.chunk(len(self.norm_of_state), -1)
            states_NS = torch.cat([norm.of(part) for norm, part in zip(self.norm_of_state, parts, strict=True)], -1)
        if self.norm_before_fc is not None:
            states_NS = self.norm_before_fc.of(states_NS)
        return product(self.fc, states_NS, self.dtype)

    def __call__(self, step: Step, cells: PagedLayer, feature_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._layer_by_torch if self.by_kernels is None else self._layer_by_kernels
        x_NE, normed = layer(feature_NE, step, cells)
        wanted = normed if step.wanted is None else normed.index_select(0, step.wanted)
        return self.output.logits(wanted), normed if self.norm_output else x_NE

    def _layer_by_kernels(
        self, feature_NE: torch.Tensor, step: Step, cells: PagedLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of the layer, float32[N, E], before and after the norm."""
        assert self.by_kernels is not None
        qkv = self.layer.qkv
        if self.is_eagle3:
            x_NE, read = torch.empty_like(feature_NE), qkv.new_inputs(len(feature_NE))
            head_inputs(
                step.ids.numpy(),
                array_of(self.embedding),
                feature_NE.numpy(),
                self.before_attention.weight,
                self.hidden_norm.weight,
                self.hidden_norm.eps,
                self.norm_before_residual,
                x_NE.numpy(),
                read,
            )
        else:
            x_NE = self._eagle1_input(feature_NE, step)
            read = qkv.array_of(x_NE)
        delta, _ = self.by_kernels(x_NE.numpy(), step, [cells], read=read)
        if self.norm is None:
            x_NE += torch.from_numpy(delta)
            return x_NE, x_NE
        normed = torch.empty_like(x_NE)
        self.norm(x_NE.numpy(), delta, normed.numpy())
        return x_NE, normed

    def _eagle1_input(self, feature_NE: torch.Tensor, step: Step) -> torch.Tensor:
        """float32[N, E]: what the layer of EAGLE-1/2 reads."""
        embedded = functional.embedding(step.ids.reshape(-1), self.embedding)
        return product(self.fc, torch.cat([embedded, feature_NE.to(self.dtype)], -1), self.dtype)

    def _layer_by_torch(
        self, feature_NE: torch.Tensor, step: Step, cells: PagedLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same on other devices."""
        if self.is_eagle3:
            normed = self.hidden_norm.of(feature_NE)
            embedded = functional.embedding(step.ids.reshape(-1), self.embedding)
            read = torch.cat([self.before_attention.of(embedded), normed], -1)
            x_NE = normed if self.norm_before_residual else feature_NE
        else:
            x_NE = read = self._eagle1_input(feature_NE, step)
        layer, positions = self.layer, step.positions.reshape(-1)
        heads = layer.qkv(read.to(self.dtype)).float().view(len(read), -1, layer.dim)
        qk, values = torch.split(heads, [layer.num_q + layer.num_kv, layer.num_kv], 1)
        if layer.head_norms is not None:
            qk = functional.rms_norm(qk, (layer.dim,), eps=layer.head_eps) * layer.head_norms
        query, keys = torch.split(self.rotations.of(qk, positions), [layer.num_q, layer.num_kv], 1)
        cells.write(step.write, keys, values)
        x_NE = x_NE + layer.out(self._attended(query, step, cells).to(self.dtype))
        gate, up = layer.gate_up(layer.before_mlp.of(x_NE).to(self.dtype)).chunk(2, -1)
        x_NE += layer.down(functional.silu(gate) * up)
        return x_NE, x_NE if self.norm is None else self.norm.of(x_NE)

    def _attended(self, query: torch.Tensor, step: Step, cells: PagedLayer) -> torch.Tensor:
        """[N, H · D]."""
        layer, view = self.layer, DenseView(step.paged)
        query = query.view(len(step.entries), step.width, layer.num_q, layer.dim).transpose(1, 2)
        keys, values = gathered(cells.keys, view.cells), gathered(cells.values, view.cells)
        out = functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            view.mask(self.windows[0], query.dtype),
            scale=layer.scaling,
            enable_gqa=layer.num_q != layer.num_kv,
        )
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


def load_head(path: str, network: Any) -> Head | BlockHead:
    """The head in a folder with config.json and its weights, for this target. Layer ids mean what they do where the file comes from.

    ConfigurationError: the file is no head that is known, does not fit the target, or asks for what is not lossless.
    """
    folder = Path(path).expanduser()
    try:
        return _load(folder, network)
    except ConfigurationError:
        raise
    except Exception as wrong:  # settings of wrong types and values raise many types, most of them in transformers
        why = " ".join(f"{type(wrong).__name__}: {wrong}".split())[:400]
        raise refusal(f"{folder}: config.json and the tensors make no head ({why})") from wrong


def _load(folder: Path, network: Any) -> Head | BlockHead:
    from transformers import LlamaConfig

    raw = read_config(folder)
    if is_block_head(raw):
        return load_block_head(folder, raw, network)
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise refusal(f"speculators_model_type: {kind!r}; dflash, eagle and eagle3 are supported")
    if raw.get("layernorms"):
        raise refusal("layernorms: True is not supported; heads of EAGLE-1 and 2 without norms of their own are")
    if (raw.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise refusal(
            "use_aux_hidden_state: False is not supported; heads that read three hidden states of the target are"
        )
    weights = HeadWeights(read_tensors(folder, prefixes=PREFIXES), network)
    config = LlamaConfig(**{**layer_config(raw), "max_position_embeddings": weights.context})
    if int(getattr(config, "num_hidden_layers", 1)) != 1:
        raise refusal(f"num_hidden_layers: {config.num_hidden_layers}; heads of one layer are supported")
    if config.hidden_act != "silu":
        raise refusal(f"hidden_act: {config.hidden_act!r}; heads with silu are supported")
    return Head(weights, config, _states(raw, weights))


def _window(config: Any) -> int | None:
    """Positions that the layer sees, its own included; None: all. Without `layer_types`, as in a Llama, `sliding_window` says nothing."""
    kinds = set(getattr(config, "layer_types", None) or (FULL,))
    if kinds == {FULL}:
        return None
    if kinds != {SLIDING}:
        raise refusal(f"layer_types: {', '.join(sorted(kinds))}; a head has one layer, of {FULL} or {SLIDING}")
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window < 1:
        raise refusal(f"sliding_window: {window!r}; layer_types has {SLIDING}, give a number of positions")
    return window


def _states(raw: dict[str, Any], weights: HeadWeights) -> tuple[int, ...]:
    num_layers = weights.num_target_layers
    if "hidden_norm.weight" not in weights:
        return (num_layers,)
    name, outputs = (
        "eagle_aux_hidden_state_layer_ids",
        "aux_hidden_states_layer_ids",
    )  # the second, of AngelSlim, are outputs
    found = raw.get(name) or (raw.get("eagle_config") or {}).get(name)
    if not found and raw.get(outputs):
        name, found = outputs, [int(i) + 1 for i in raw[outputs]]
    layers = tuple(int(i) for i in found or (2, num_layers // 2, num_layers - 3))
    if min(layers) < 0 or max(layers) >= num_layers:
        raise refusal(f"{name}: {raw.get(name, list(layers))}; the target has {num_layers} layers")
    return layers
