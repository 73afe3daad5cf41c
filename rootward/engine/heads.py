"""Draft heads: one decoder layer that reads hidden states of the target, loaded as they are published.

A head predicts the token after x_j from the embedding of x_j and a *feature* of everything before it. For committed text the feature is
made of the target's hidden states at position j - 1 (`fuse`); for a drafted token it is the head's own output at the node above.

    EAGLE-3 (2503.01840)   feature = fc(inputs of three layers); q, k, v read [norm(embedding); norm(feature)]; own norm and output matrix,
                           often over a reduced vocabulary: target id = i + d2t[i]
    EAGLE-1/2 (2401.15077) feature = last hidden state after the final norm; the layer reads fc([embedding; feature]); the target's output

EAGLE-3 comes in two spellings, that of EAGLE and SpecForge (`midlayer.*`) and that of speculators (`layers.0.*`). A matrix that the file
lacks is the target's. A file with any other tensor is refused: it would be another head.

Where the kernels of `cpu_kernels` serve, a head is computed by them, as the target is; elsewhere by torch, on padded rows.

Legend: N rows, T wanted rows, E hidden size of the head, D head dimension, V' draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from rootward.engine.attention import DenseView
from rootward.engine.batch import Step
from rootward.engine.cpu_kernels import SERVED, use_threads
from rootward.engine.kv_cache import PagedLayer, gathered
from rootward.engine.layers import Layer, Linear, Norm, Rotations, Scratch
from rootward.errors import ConfigurationError

EAGLE_3 = {
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
}
PER_STEP = ("layers.0.", "midlayer.")  # the same layer in two spellings


@dataclass(frozen=True, slots=True)
class Target:
    """What a head needs to know of its target. `network`: of transformers, its layers replaced or not."""

    network: Any

    @property
    def embedding(self) -> torch.Tensor:
        weight: torch.Tensor = self.network.get_input_embeddings().weight
        return weight

    @property
    def num_layers(self) -> int:
        return int(self.network.config.get_text_config().num_hidden_layers)

    def output_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the output matrix [n, E]."""
        head = self.network.get_output_embeddings()
        if isinstance(head, Linear):
            return head.weight_of(ids)
        weight = head.weight
        if self.network.config.get_text_config().tie_word_embeddings:
            weight = self.embedding
        rows: torch.Tensor = weight.index_select(0, ids)
        return rows


class Head:
    """Call it with a step, its cells and the features of its rows: logits [T, V'], and the feature that each of the N rows passes on.

    states  which hidden states of the target it reads: i is the input of layer i; the number of layers stands for the last one's output
            after the final norm
    ids     int64[V'] target ids of the draft vocabulary, ascending; None: all of them
    """

    def __init__(self, weights: dict[str, torch.Tensor], config: Any, target: Target, states: Sequence[int]):
        embedding = target.embedding
        self.dtype, self.device = embedding.dtype, embedding.device
        self.has_kernels = embedding.device.type == "cpu" and embedding.dtype in SERVED
        self.states, self.vocab_size = tuple(states), len(embedding)
        self.hidden_size, eps = config.hidden_size, config.rms_norm_eps
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_q, num_kv = config.num_attention_heads, config.num_key_value_heads
        self._weights = weights
        self.is_eagle3 = "hidden_norm.weight" in weights
        size, inner, of_target = config.hidden_size, config.intermediate_size, embedding.shape[1]
        self.embedding = embedding
        if "embed_tokens.weight" in weights:
            self.embedding = self._take("embed_tokens.weight", self.vocab_size, size)
        elif of_target != size:
            raise _refusal(f"hidden_size: {size}, the target has {of_target}, and embed_tokens.weight is missing")
        self.fc = self._linear({"fc": size}, len(states) * of_target if self.is_eagle3 else 2 * size)
        self.norm_of_state = [
            self._norm(f"fc_norm.{i}", eps) for i in range(len(states)) if f"fc_norm.{i}.weight" in weights
        ]
        self.norm_before_fc = self._norm("input_norm", eps) if "input_norm.weight" in weights else None
        self.before_attention = self._norm("input_layernorm", eps) if self.is_eagle3 else None
        self.hidden_norm = self._norm("hidden_norm", eps) if self.is_eagle3 else None
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))
        self.norm_output = bool(getattr(config, "norm_output", False))
        heads = {"q_proj": num_q, "k_proj": num_kv, "v_proj": num_kv}
        read = 2 * size if self.is_eagle3 else size
        self.layer = Layer(
            dim=dim,
            num_q=num_q,
            num_kv=num_kv,
            qkv=self._linear({f"self_attn.{name}": num * dim for name, num in heads.items()}, read),
            head_norms=None,
            head_eps=0.0,
            out=self._linear({"self_attn.o_proj": size}, num_q * dim),
            scaling=dim**-0.5,
            before_mlp=self._norm("post_attention_layernorm", eps),
            gate_up=self._linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, size),
            down=self._linear({"mlp.down_proj": size}, inner),
        )
        self.norm = self._norm("norm", eps) if "norm.weight" in weights else None
        self.ids, self.output = self._outputs(target)
        if weights:
            raise _refusal(f"tensors {', '.join(sorted(weights)[:4])} belong to no head known here")
        self.rotations = _rotations(config, dim)
        if not self.has_kernels:
            self.rotations = Rotations(
                *(torch.from_numpy(of).to(self.device) for of in (self.rotations.cos, self.rotations.sin))
            )

    # -- loading ------------------------------------------------------------------------------------------------------

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._weights:
            raise _refusal(f"tensor {name} is missing")
        found = self._weights.pop(name)
        if shape and found.shape != shape:
            raise _refusal(f"{name}: shape {list(found.shape)}; config.json and the target make it {list(shape)}")
        return found.to(self.device, self.dtype)

    def _linear(self, sizes: dict[str, int], num_inputs: int) -> Any:
        """One layer for all of them, side by side; their numbers of outputs by name."""
        weight = torch.cat([self._take(f"{name}.weight", size, num_inputs) for name, size in sizes.items()])
        names = list(sizes)
        biases = [
            self._take(f"{name}.bias", sizes[name]) if f"{name}.bias" in self._weights else None for name in names
        ]
        bias = None
        if any(one is not None for one in biases):
            if any(one is None for one in biases):
                raise _refusal(f"some of {', '.join(names)} have a bias and some have none")
            bias = torch.cat([one for one in biases if one is not None])
        return self._linear_of(weight, bias)

    def _linear_of(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return (
            Linear(weight.contiguous(), bias)
            if self.has_kernels
            else partial(functional.linear, weight=weight, bias=bias)
        )

    def _norm(self, name: str, eps: float) -> Any:
        weight = self._take(f"{name}.weight").float()
        return Norm(weight.numpy(), eps) if self.has_kernels else TorchNorm(weight, eps)

    def _outputs(self, target: Target) -> tuple[torch.Tensor | None, Any]:
        """Target ids of the draft vocabulary, and the output matrix; the rows in ascending order of the ids."""
        weights = self._weights
        d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
        ids = None if d2t is None else torch.arange(len(d2t)) + d2t.long()
        own = self._take("lm_head.weight") if "lm_head.weight" in weights else None
        if own is not None and len(own) != (self.vocab_size if ids is None else len(ids)):
            missing = "d2t is missing" if ids is None else f"d2t has {len(ids)}"
            raise _refusal(f"lm_head.weight has {len(own)} rows, the target {self.vocab_size} tokens, and {missing}")
        if ids is None:
            return None, target.network.get_output_embeddings() if own is None else self._linear_of(own)
        distinct = set(ids.tolist())
        known = len(distinct) == len(ids) and distinct <= set(range(self.vocab_size))
        if not known or (t2d is not None and t2d.nonzero().flatten().tolist() != sorted(distinct)):
            raise _refusal(
                f"d2t: i + d2t[i] are not {len(ids)} different tokens of t2d and a vocabulary of {self.vocab_size}; "
                "it must hold offsets"
            )
        order = ids.argsort()
        ids = ids[order].to(self.device)
        rows = target.output_rows(ids) if own is None else own.index_select(0, order.to(self.device))
        return ids, self._linear_of(rows)

    # -- computing ----------------------------------------------------------------------------------------------------

    @property
    def num_outputs(self) -> int:
        """V'."""
        return self.vocab_size if self.ids is None else len(self.ids)

    def fuse(self, states_NS: torch.Tensor) -> torch.Tensor:
        """float32[N, E]: features of positions by the target's hidden states there, side by side."""
        if not self.is_eagle3:
            return states_NS.float()
        if self.norm_of_state:
            parts = states_NS.chunk(len(self.norm_of_state), -1)
            states_NS = torch.cat([norm.of(part) for norm, part in zip(self.norm_of_state, parts, strict=True)], -1)
        if self.norm_before_fc is not None:
            states_NS = self.norm_before_fc.of(states_NS)
        fused: torch.Tensor = self.fc(states_NS.to(self.dtype))
        return fused.float()

    def __call__(self, step: Step, cells: PagedLayer, feature_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = functional.embedding(step.ids.reshape(-1), self.embedding)
        x_NE, read = self._inputs(embedded, feature_NE)
        if self.has_kernels:
            use_threads(torch.get_num_threads())
            x_NE, scratch = x_NE.clone(), Scratch(self.layer, len(x_NE))
            x, read_by = x_NE.numpy(), read.float().contiguous().numpy()
            self.layer(x, read_by, step, cells=cells, rotations=self.rotations, scratch=scratch)
            x_NE += torch.from_numpy(scratch.delta)
        else:
            x_NE = self._layer_by_torch(x_NE, read, step, cells)
        normed = x_NE if self.norm is None else self.norm.of(x_NE)
        wanted = normed if step.wanted is None else normed.index_select(0, step.wanted)
        if not isinstance(self.output, Linear):  # which takes and gives float32
            wanted = wanted.to(self.dtype)
        return self.output(wanted), normed if self.norm_output else x_NE

    def _inputs(self, embedded: torch.Tensor, feature_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the residual stream starts, float32, and what queries, keys and values are made of."""
        if self.before_attention is None or self.hidden_norm is None:
            x_NE = self.fc(torch.cat([embedded, feature_NE.to(self.dtype)], -1))
            return x_NE.float(), x_NE
        normed = self.hidden_norm.of(feature_NE)
        read = torch.cat([self.before_attention.of(embedded), normed], -1)
        return normed if self.norm_before_residual else feature_NE, read

    def _layer_by_torch(self, x_NE: torch.Tensor, read: torch.Tensor, step: Step, cells: PagedLayer) -> torch.Tensor:
        layer, positions = self.layer, step.positions.reshape(-1)
        heads = layer.qkv(read.to(self.dtype)).float().view(len(read), -1, layer.dim)
        qk, values = torch.split(heads, [layer.num_q + layer.num_kv, layer.num_kv], 1)
        cos, sin = (of[positions, None] for of in (self.rotations.cos, self.rotations.sin))
        left, right = qk.chunk(2, -1)
        qk = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        query, keys = torch.split(qk, [layer.num_q, layer.num_kv], 1)
        cells.write(step.write, keys, values)
        x_NE = x_NE + layer.out(self._attended(query, step, cells).to(self.dtype))
        gate, up = layer.gate_up(layer.before_mlp.of(x_NE).to(self.dtype)).chunk(2, -1)
        x_NE += layer.down(functional.silu(gate) * up)
        return x_NE

    def _attended(self, query: torch.Tensor, step: Step, cells: PagedLayer) -> torch.Tensor:
        """[N, H · D]."""
        layer, view = self.layer, DenseView(step.paged)
        query = query.view(len(step.entries), step.width, layer.num_q, layer.dim).transpose(1, 2)
        keys, values = gathered(cells.keys, view.cells), gathered(cells.values, view.cells)
        out = functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            view.mask(None, query.dtype),
            scale=layer.scaling,
            enable_gqa=layer.num_q != layer.num_kv,
        )
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class TorchNorm:
    """`layers.Norm` on other devices."""

    weight: torch.Tensor  # float32[E]
    eps: float

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[N, E] of [N, E]."""
        return functional.rms_norm(rows.float(), rows.shape[-1:], self.weight, self.eps)


def _rotations(config: Any, dim: int) -> Rotations:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return Rotations.of(LlamaRotaryEmbedding(config), config.max_position_embeddings, dim)


# -- files ------------------------------------------------------------------------------------------------------------


def load_head(path: str, network: Any) -> Head:
    """The head in a folder with config.json and its weights, for this target. Layer ids are read as inputs of layers.

    ConfigurationError: the file is no head that is known, does not fit the target, or asks for what is not lossless.
    """
    from transformers import LlamaConfig

    folder, target = Path(path).expanduser(), Target(network)
    raw = _config(folder)
    _refuse_lossy(raw)
    layer = dict(raw.get("transformer_layer_config") or {})
    own = {key: value for key, value in raw.items() if key not in ("transformer_layer_config", "speculators_config")}
    config = LlamaConfig(**{**own, **layer, "max_position_embeddings": _context(network)})
    if int(getattr(config, "num_hidden_layers", 1)) != 1:
        raise _refusal(f"num_hidden_layers: {config.num_hidden_layers}; heads of one layer are supported")
    if config.hidden_act != "silu":
        raise _refusal(f"hidden_act: {config.hidden_act!r}; heads with silu are supported")
    if layer_types := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise _refusal(f"layer_types: {', '.join(sorted(layer_types))}; heads with full attention are supported")
    weights = _weights(folder)
    return Head(weights, config, target, _states(raw, weights, target.num_layers))


def _states(raw: dict[str, Any], weights: dict[str, torch.Tensor], num_layers: int) -> tuple[int, ...]:
    if "hidden_norm.weight" not in weights:
        return (num_layers,)
    found = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    layers = tuple(int(i) for i in found or (2, num_layers // 2, num_layers - 3))
    if min(layers) < 0 or max(layers) >= num_layers:
        raise _refusal(f"eagle_aux_hidden_state_layer_ids: {list(found or layers)}; the target has {num_layers} layers")
    return layers


def _config(folder: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as wrong:
        raise _refusal(f"{folder}: config.json cannot be read ({wrong})") from wrong
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise _refusal(f"speculators_model_type: {kind!r}; eagle and eagle3 are supported")
    return raw


def _refuse_lossy(raw: dict[str, Any]) -> None:
    """Acceptance rules beyond the target's own distribution are nothing that may be configured here."""
    for method in (raw.get("speculators_config") or {}).get("proposal_methods") or ():
        for name, lossless in (("verifier_accept_k", 1), ("accept_tolerance", 0.0)):
            if method.get(name, lossless) != lossless:
                raise _refusal(f"{name}: {method[name]} is lossy, verification here never is; set it to {lossless}")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """By name, in one spelling."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    found: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            found.update(load_file(file))
        if not files:  # early heads: tensors in an archive of torch, of which nothing but tensors is read
            found = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    except Exception as wrong:  # whatever the readers make of a file
        raise _refusal(f"{folder}: no weights that can be read ({type(wrong).__name__}: {wrong})") from wrong
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        plain = name.removeprefix("model.")
        for prefix in PER_STEP:
            plain = plain.removeprefix(prefix)
        if not plain.endswith("rotary_emb.inv_freq"):  # follows from the configuration
            weights[plain] = tensor
    return weights


def _context(network: Any) -> int:
    return int(getattr(network.config.get_text_config(), "max_position_embeddings", 0) or 8192)


def _refusal(why: str) -> ConfigurationError:
    return ConfigurationError(f"head: {why}")
