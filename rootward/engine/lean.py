"""A small network of the Llama kind in about half of the operations, for float32 on a CPU.

A forward of a network whose weights are small takes as long as its operations take to call, and a draft model is called once per level
of a tree. Two layers are 170 operations in transformers and 93 here: one product for queries, keys
and values and one for gate and up, normalisation in one call, rotations from a table, keys and values written as they come.

What a short probe cannot see (a scale that only long texts get) is excluded by name: KINDS are the architectures of transformers that
compute what is written here. Their modules must be those that are expected, as they were published, and the load probe compares with
the network itself. Its layers become views of the joined weights; joined biases and norms of heads are copies, so nothing may be
changed after loading.

Legend: T wanted rows, V vocabulary, N rows of all entries (B entries of Q each, padded), H query heads, H_kv heads of K and V, D head
dimension, E hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from rootward.engine.batch import Step
from rootward.engine.cpu_attention import paged
from rootward.engine.kv_cache import PagedLayer
from rootward.engine.packed import MIN_ELEMENTS

KINDS = {"llama", "mistral", "qwen2", "qwen3"}
# Their modules, by name. One more, and something has been added.
BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}  # of each head: Qwen3
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
FIXED_ROPE = {"default", "linear", "llama3", "yarn"}  # rotations that depend on the position alone


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Root mean square over the last dimension."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Linear layers on the same input as one: weight [all their outputs, E]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """head_scale [H + H_kv, D] and head_eps: the norms of query and key heads, if there are any."""

    before_attention: Norm
    qkv: Joined
    head_scale: torch.Tensor | None
    head_eps: float
    out: Joined
    scaling: float
    before_mlp: Norm
    gate_up: Joined
    act: Any
    down: Joined


class LeanNetwork:
    """Call it with a step and the cells of each layer: logits [T, V] of the wanted rows."""

    def __init__(self, network: Any, max_positions: int):
        body, attention = network.model, network.model.layers[0].self_attn
        self.dim = attention.head_dim
        self.num_q, self.num_kv = (p.out_features // self.dim for p in (attention.q_proj, attention.k_proj))
        self.embedding, self.norm, self.head = body.embed_tokens.weight, _norm(body.norm), network.lm_head
        self.layers = [_layer(layer, self.num_q, self.num_kv) for layer in body.layers]
        # x · cos + rotate_half(x) · sin, where rotate_half swaps the halves and negates the first
        cos, sin = body.rotary_emb(self.embedding[:1, None], torch.arange(max_positions)[None])
        self.cos, self.sin = cos[0, :, None], sin[0, :, None].clone()
        self.sin[..., : self.dim // 2].neg_()

    def __call__(self, step: Step, cells: Sequence[PagedLayer]) -> torch.Tensor:
        x_NE = functional.embedding(step.ids.reshape(-1), self.embedding)
        position = step.positions.reshape(-1)
        turn = self.cos.index_select(0, position), self.sin.index_select(0, position)
        for layer, own in zip(self.layers, cells, strict=True):
            x_NE = self._attended(x_NE, layer, own, step, turn)
            gate, up = layer.gate_up(layer.before_mlp(x_NE)).chunk(2, -1)
            x_NE = x_NE + layer.down(layer.act(gate) * up)
        if step.wanted is not None:
            x_NE = x_NE.index_select(0, step.wanted)
        logits: torch.Tensor = self.head(self.norm(x_NE))
        return logits

    def _attended(
        self, x_NE: torch.Tensor, layer: Layer, own: PagedLayer, step: Step, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        cos, sin = turn
        heads = layer.qkv(layer.before_attention(x_NE)).view(len(x_NE), -1, self.dim)
        qk, value = heads.split_with_sizes([self.num_q + self.num_kv, self.num_kv], 1)
        if layer.head_scale is not None:
            qk = functional.rms_norm(qk, (self.dim,), None, layer.head_eps) * layer.head_scale
        qk = torch.addcmul(qk * cos, qk.roll(self.dim // 2, -1), sin)
        query, key = qk.split_with_sizes([self.num_q, self.num_kv], 1)
        own.write(step.write, key, value)
        q, k, v = (
            rows.view(*step.ids.shape, -1, self.dim).transpose(1, 2) for rows in (query, key, value)
        )  # [B, heads, Q, D]
        out = paged(q, k, v, own, step.reach(own.window), layer.scaling)
        return x_NE + layer.out(out.view(len(x_NE), -1))


def lean(network: Any, max_positions: int) -> LeanNetwork | None:
    """None: the network is of another kind, or its layers are so large that nothing is gained. The probe has the last word."""
    return LeanNetwork(network, max_positions) if _is_of_the_kind(network) else None


def _is_of_the_kind(network: Any) -> bool:
    published = type(network).__module__
    if network.config.model_type not in KINDS or not published.startswith("transformers.models."):
        return False
    body: Any = getattr(network, "model", None)
    if {*_names(network)} != {"model", "lm_head"} or {*_names(body)} != BODY:
        return False
    if getattr(body.rotary_emb, "rope_type", "") not in FIXED_ROPE:
        return False
    as_published = all(_is_as_published(part, published) for part in (network, *body.modules()))
    return as_published and all(map(_is_small_layer, body.layers))


def _is_as_published(part: Any, published: str) -> bool:
    """Nobody has put code of their own in its place, or around it."""
    code = type(part).__module__
    known = code == published or code.startswith(("torch.nn.", "transformers.activations"))
    return known and "forward" not in vars(part) and not (part._forward_hooks or part._forward_pre_hooks)


def _is_small_layer(layer: Any) -> bool:
    if {*_names(layer)} != LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if {*_names(attention)} not in (ATTENTION, ATTENTION | HEAD_NORMS) or {*_names(mlp)} != MLP:
        return False
    joined = ((attention, ATTENTION), (mlp, MLP - {"act_fn"}))
    return all(_is_small(getattr(of, name)) for of, names in joined for name in names)


def _is_small(part: torch.nn.Module) -> bool:
    """A plain linear layer that would not be packed either."""
    if type(part) is not torch.nn.Linear or part.weight.numel() >= MIN_ELEMENTS:
        return False
    return part.weight.dtype == torch.float32 and part.weight.device.type == "cpu"


def _names(module: Any) -> list[str]:
    return [] if module is None else [name for name, _ in module.named_children()]


def _layer(layer: Any, num_q: int, num_kv: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    scale, eps = None, 0.0
    if hasattr(attention, "q_norm"):
        q, k, eps = attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon
        scale = torch.cat([q.expand(num_q, -1), k.expand(num_kv, -1)])
    return Layer(
        _norm(layer.input_layernorm),
        _joined(attention.q_proj, attention.k_proj, attention.v_proj),
        scale,
        eps,
        _joined(attention.o_proj),
        attention.scaling,
        _norm(layer.post_attention_layernorm),
        _joined(mlp.gate_proj, mlp.up_proj),
        mlp.act_fn,
        _joined(mlp.down_proj),
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _joined(*linears: torch.nn.Linear) -> Joined:
    if len(linears) == 1:
        return Joined(linears[0].weight, linears[0].bias)
    weight, at = torch.cat([linear.weight for linear in linears]), 0
    for linear in linears:
        linear.weight = torch.nn.Parameter(weight[at : at + linear.out_features], requires_grad=False)
        at += linear.out_features
    if all(linear.bias is None for linear in linears):
        return Joined(weight, None)
    none = [weight.new_zeros(linear.out_features) for linear in linears]
    return Joined(
        weight, torch.cat([n if linear.bias is None else linear.bias for linear, n in zip(linears, none, strict=True)])
    )
