"""Linear layers for a CPU, and on top of them a decoder layer of the Llama family, and a network of such layers, in few operations.

Every row has the same bits whatever is computed beside it: `cpu_kernels`.

What a short probe cannot see (a scale that only long texts get) is excluded by name: KINDS are the architectures of transformers that
compute what is written here. Their modules must be those that are expected, as they were published, and the load probe compares with the
network itself. Queries, keys and values are one product, gate and up another; the residual stream is in float32. The network's own layers
become slices of the joined ones, so weights are there once.

Legend: N rows of all entries, T wanted rows, V vocabulary, H query heads, S heads of K and V, D head dimension, E hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch.nn import functional

from rootward.engine import cpu_kernels
from rootward.engine.batch import Step
from rootward.engine.cpu_attention import no_sinks
from rootward.engine.cpu_kernels import Arithmetic
from rootward.engine.cpu_tiles import AMX_PAIRS
from rootward.engine.kv_cache import PagedLayer

KINDS = {"llama", "mistral", "qwen2", "qwen3"}
# Their modules, by name. One more, and something has been added.
BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}  # of each head: Qwen3
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
FIXED_ROPE = {"default", "linear", "llama3", "yarn"}  # rotations that depend on the position alone


class Linear(torch.nn.Module):
    """`torch.nn.Linear` for inference on a CPU: a row's result does not depend on the other rows. The plain weight is not kept.

    arithmetic  of a layer in bfloat16; None: the fastest here
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, arithmetic: Arithmetic | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed, self.bias = cpu_kernels.packed(weight), cpu_kernels.packed_bias(bias, self.out_features)
        is_bfloat16 = self.dtype == torch.bfloat16
        self.arithmetic = (arithmetic or cpu_kernels.bf16_arithmetic()) if is_bfloat16 else Arithmetic.FLOAT32
        if self.arithmetic is Arithmetic.AMX and self.in_features % (2 * AMX_PAIRS):
            self.arithmetic = Arithmetic.DOT
        self.rounds_inputs = self.arithmetic is not Arithmetic.FLOAT32
        self._padding = self.in_features % 2 if is_bfloat16 else 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., out] of [..., in], in the type of the rows."""
        cpu_kernels.use_threads(torch.get_num_threads())
        return self.product(self.array_of(rows)).to(rows.dtype).view(*rows.shape[:-1], self.out_features)

    def product(self, inputs: Any) -> torch.Tensor:
        """float32[N, out] of inputs as `new_inputs` and `array_of` make them."""
        out = torch.empty(len(inputs), self.out_features)
        self.multiply(inputs, out.numpy())
        return out

    def multiply(self, inputs: Any, out: Any) -> None:
        """The same, to out float32[N, out]."""
        multiply = cpu_kernels.linear_amx if self.arithmetic is Arithmetic.AMX else cpu_kernels.linear
        inputs = inputs.view(np.int32) if self.rounds_inputs else inputs
        multiply(inputs, self.packed, self.bias, out, numba.get_num_threads())

    def new_inputs(self, num_rows: int) -> Any:
        """An array [N, in] in the type of its inputs, for kernels to fill: bfloat16 as int16, or float32. `in` must be even for a weight in
        bfloat16."""
        return np.empty((num_rows, self.in_features), np.int16 if self.rounds_inputs else np.float32)

    def array_of(self, rows: torch.Tensor) -> Any:
        """Rows [..., in] in the type of its inputs."""
        flat = rows.reshape(-1, self.in_features)
        if self._padding:
            flat = functional.pad(flat, (0, self._padding))
        return cpu_kernels.array_of(flat.to(torch.bfloat16 if self.rounds_inputs else torch.float32).contiguous())

    def weight_of(self, outputs: torch.Tensor) -> torch.Tensor:
        """Rows [n, in] of the weight, for these outputs int64[n]."""
        return cpu_kernels.unpacked(self.packed, outputs, self.in_features, self.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}"


class Slice(torch.nn.Module):
    """Some outputs of a joined layer: what the network's own module computes."""

    def __init__(self, joined: Linear, start: int, num: int):
        super().__init__()
        self.joined, self.start, self.out_features = joined, start, num

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.joined(rows)
        return out.narrow(-1, self.start, self.out_features)


@torch.inference_mode()
def replace_linears(network: Any, sample: Callable[[], torch.Tensor]) -> bool:
    """Replace the plain linear layers of a network on a CPU by `Linear`, joined where it is of the Llama family; whether it has them now.

    `sample` runs the network. If that fails or changes (some networks read a layer's weight directly), the own ones are put back. A tied
    embedding keeps its own weight.
    """
    joined = is_llama(network)
    before = {
        (parent, name): child
        for parent in network.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear and _is_plain(child)
    }
    if not before:
        return any(isinstance(module, Linear) for module in network.modules())
    expected = sample()
    if joined:
        for layer in network.model.layers:
            _join(layer.self_attn, ("q_proj", "k_proj", "v_proj"))
            _join(layer.mlp, ("gate_proj", "up_proj"))
    for (parent, name), child in before.items():
        if getattr(parent, name) is child:
            setattr(parent, name, Linear(child.weight.detach(), _detached(child.bias)))
    if _is_near(sample, expected):
        return True
    for (parent, name), child in before.items():
        setattr(parent, name, child)
    return False


def _join(parent: Any, names: Sequence[str]) -> None:
    own = [getattr(parent, name) for name in names]
    bias = None
    if any(linear.bias is not None for linear in own):
        bias = torch.cat(
            [
                linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                for linear in own
            ]
        )
    joined, at = Linear(torch.cat([linear.weight.detach() for linear in own]), bias), 0
    for name, part in zip(names, own, strict=True):
        setattr(parent, name, Slice(joined, at, part.out_features))
        at += part.out_features


def _detached(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()


def _is_near(sample: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    tolerance = 1e-4 if expected.dtype == torch.float32 else 0.25  # in bfloat16 every layer rounds in its own way
    try:
        return bool((sample() - expected).float().norm() <= tolerance * expected.float().norm())
    except (AttributeError, RuntimeError, TypeError):
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Root mean square norm over the hidden dimension."""

    weight: Any  # float32[E]
    eps: float

    def __call__(self, x: Any, delta: Any, out: Any) -> None:
        """x float32[N, E] += delta float32[N, E], unless that is None; its norm goes to out [N, E]."""
        cpu_kernels.norm(x, delta, self.weight, self.eps, out)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """float32[N, E] of [N, E], which stay as they are."""
        out = torch.empty(rows.shape)
        cpu_kernels.norm(rows.float().contiguous().numpy(), None, self.weight, self.eps, out.numpy())
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Rotations:
    """Of queries and keys by position: float32[positions, D / 2]."""

    cos: Any
    sin: Any

    @staticmethod
    def of(rotary: torch.nn.Module, num_positions: int, dim: int) -> Rotations:
        """By the module of transformers that computes them."""
        both = rotary(torch.zeros(1, 1), torch.arange(num_positions)[None])
        return Rotations(*(of[0, :, : dim // 2].float().contiguous().numpy() for of in both))


class Scratch:
    """Results on the way through decoder layers, which have the same sizes. delta float32[N, E]: of the layer."""

    def __init__(self, layer: Layer, num_rows: int):
        self.normed, self.attended, self.gated = (
            reader.new_inputs(num_rows) for reader in (layer.gate_up, layer.out, layer.down)
        )
        self.qkv, self.query, self.delta, self.gate_up = (
            np.empty((num_rows, width), np.float32)
            for width in (
                layer.qkv.out_features,
                layer.out.in_features,
                layer.down.out_features,
                layer.gate_up.out_features,
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A decoder layer without the norm of its input. The linear layers are `Linear`."""

    dim: int
    num_q: int
    num_kv: int
    qkv: Any
    head_norms: Any  # float32[H + S, D], or None
    head_eps: float
    out: Any
    scaling: float
    before_mlp: Any
    gate_up: Any
    down: Any

    def __call__(
        self, x: Any, read: Any, step: Step, *, cells: PagedLayer, rotations: Rotations, scratch: Scratch
    ) -> None:
        """Of the residual stream x float32[N, E], and the inputs of the layer of queries, keys and values. The result is
        x + scratch.delta."""
        if not cells.is_initialized:
            new = torch.empty(1, self.num_kv, 1, self.dim, dtype=self.qkv.dtype)
            cells.lazy_initialization(new, new)
        keys, values = cells.arrays
        self.qkv.multiply(read, scratch.qkv)
        query = scratch.query.reshape(len(x), self.num_q, self.dim)
        at, norms = (step.positions.numpy(), step.write.numpy()), (self.head_norms, self.head_eps)
        cpu_kernels.rotate(scratch.qkv, rotations.cos, rotations.sin, *at, *norms, query, keys, values)
        seen, sinks = step.visible(cells.window), no_sinks(self.num_q)
        cpu_kernels.attention(
            query, keys, values, seen, scaling=self.scaling, softcap=0.0, sinks=sinks, out=scratch.attended
        )
        self.out.multiply(scratch.attended, scratch.delta)
        self.before_mlp(x, scratch.delta, scratch.normed)
        self.gate_up.multiply(scratch.normed, scratch.gate_up)
        cpu_kernels.gate(scratch.gate_up, scratch.gated)
        self.down.multiply(scratch.gated, scratch.delta)


class LlamaNetwork:
    """Call it with a step and the cells of each layer: logits [T, V] of the wanted rows.

    exposed  hidden states that each call leaves in `states`, float32[N, E] by number: i is the input of layer i; the number of layers
             stands for the last one's output after the final norm
    """

    def __init__(self, network: Any, max_positions: int):
        """`network`: one whose linear layers have been replaced."""
        self.exposed: frozenset[int] = frozenset()
        self.states: dict[int, torch.Tensor] = {}
        body = network.model
        self.embedding, self.head = body.embed_tokens.weight, network.lm_head
        self.layers = [_layer(layer) for layer in body.layers]
        self.norms = [*(_norm(layer.input_layernorm) for layer in body.layers), _norm(body.norm)]
        self.rotations = Rotations.of(body.rotary_emb, max_positions, self.layers[0].dim)

    def __call__(self, step: Step, cells: Sequence[PagedLayer]) -> torch.Tensor:
        x_NE = functional.embedding(step.ids, self.embedding).float()
        cpu_kernels.use_threads(torch.get_num_threads())
        x, scratch, delta = x_NE.numpy(), Scratch(self.layers[0], len(x_NE)), None
        for i, (norm, layer, own) in enumerate(zip(self.norms, self.layers, cells, strict=False)):
            norm(x, delta, scratch.normed)
            if i in self.exposed:
                self.states[i] = x_NE.clone()
            layer(x, scratch.normed, step, cells=own, rotations=self.rotations, scratch=scratch)
            delta = scratch.delta
        final = self.head.new_inputs(len(x))
        self.norms[-1](x, delta, final)
        if len(self.layers) in self.exposed:
            rows = torch.from_numpy(final)
            self.states[len(self.layers)] = (rows.view(torch.bfloat16) if self.head.rounds_inputs else rows).float()
        logits: torch.Tensor = self.head.product(final if step.wanted is None else final[step.wanted.numpy()])
        return logits


def _layer(layer: Any) -> Layer:
    attention, mlp, head_norms, head_eps = layer.self_attn, layer.mlp, None, 0.0
    num_q, num_kv = (p.out_features // attention.head_dim for p in (attention.q_proj, attention.k_proj))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm, attention.k_norm
        head_norms = torch.cat([q.weight.expand(num_q, -1), k.weight.expand(num_kv, -1)]).detach().float().numpy()
        head_eps = q.variance_epsilon
    return Layer(
        dim=attention.head_dim,
        num_q=num_q,
        num_kv=num_kv,
        qkv=attention.q_proj.joined,
        head_norms=head_norms,
        head_eps=head_eps,
        out=attention.o_proj,
        scaling=attention.scaling,
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=mlp.gate_proj.joined,
        down=mlp.down_proj,
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach().float().numpy(), module.variance_epsilon)


def is_llama(network: Any) -> bool:
    """Whether `LlamaNetwork` computes what this network of transformers does. The load probe has the last word."""
    published = type(network).__module__
    if network.config.model_type not in KINDS or not published.startswith("transformers.models."):
        return False
    body: Any = getattr(network, "model", None)
    if {*_names(network)} != {"model", "lm_head"} or {*_names(body)} != BODY:
        return False
    if getattr(body.rotary_emb, "rope_type", "") not in FIXED_ROPE:
        return False
    as_published = all(_is_as_published(part, published) for part in (network, *body.modules()))
    plain = _is_plain(network.lm_head) and network.config.hidden_act in ("silu", "swish")
    return as_published and plain and all(map(_is_known_layer, body.layers))


def _is_as_published(part: Any, published: str) -> bool:
    """Nobody has put code of their own in its place, or around it."""
    code = type(part).__module__
    known = code in (published, __name__) or code.startswith(("torch.nn.", "transformers.activations"))
    return known and "forward" not in vars(part) and not (part._forward_hooks or part._forward_pre_hooks)


def _is_known_layer(layer: Any) -> bool:
    if {*_names(layer)} != LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if {*_names(attention)} not in (ATTENTION, ATTENTION | HEAD_NORMS) or {*_names(mlp)} != MLP:
        return False
    joined = ((attention, ATTENTION), (mlp, MLP - {"act_fn"}))
    return all(_is_plain(getattr(of, name)) for of, names in joined for name in names)


def _is_plain(part: torch.nn.Module) -> bool:
    """A linear layer in a type and on a device that are served here."""
    if type(part) in (Linear, Slice):
        return True
    if type(part) is not torch.nn.Linear:
        return False
    weight = part.weight.detach()
    known = weight.dtype in (torch.float32, torch.bfloat16) and weight.device.type == "cpu"
    return known and type(weight) is torch.Tensor  # a quantised or shared one is of another class


def _names(module: Any) -> list[str]:
    return [] if module is None else [name for name, _ in module.named_children()]
