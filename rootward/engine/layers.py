"""Linear layers for a CPU, and a network of the Llama family in few operations on top of them.

**Linear layers.** A product of some numbers of rows takes another kernel than one of others: the same row then differs in its last bits.
So each shape is tried at load, on this machine and with its threads: the numbers of rows whose results equal those of blocks of
REFERENCE_ROWS bit by bit are the ones that are used, other numbers are padded or cut. Weights lie in oneDNN's packed layout where that
gives equal bits, else as they are; times decide nothing, so that replicas on equal machines compute equal bits.

**The network.** What a short probe cannot see (a scale that only long texts get) is excluded by name: KINDS are the architectures of
transformers that compute what is written here. Their modules must be those that are expected, as they were published, and the load probe
compares with the network itself. Queries, keys and values are one product, gate and up another; between the products stand the kernels of
`cpu_kernels`, and the residual stream is in float32. The network's own layers become slices of the joined ones, so weights are there once.

Legend: N rows of all entries, P >= N with padding, T wanted rows, V vocabulary, H query heads, S heads of K and V, D head dimension,
E hidden.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from rootward.engine import cpu_kernels
from rootward.engine.batch import Step
from rootward.engine.cpu_attention import no_sinks
from rootward.engine.cpu_kernels import array_of
from rootward.engine.kv_cache import PagedLayer

log = logging.getLogger(__name__)

REFERENCE_ROWS = 16
TRIED_ROWS = (1, 2, 4, 8, 32, 64, 3, 6, 12, 24, 48, 128, 256, 5, 7, *range(9, 32))  # the first ones matter most
SECONDS_A_SHAPE = 0.25

KINDS = {"llama", "mistral", "qwen2", "qwen3"}
# Their modules, by name. One more, and something has been added.
BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}  # of each head: Qwen3
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
FIXED_ROPE = {"default", "linear", "llama3", "yarn"}  # rotations that depend on the position alone


@dataclass(frozen=True, slots=True)
class Choice:
    """How products with weights of one shape are computed.

    counts     numbers of rows that give the same bits, ascending
    invariant  a row has the same bits wherever it stands among REFERENCE_ROWS, and whatever stands beside it
    """

    packed: bool
    counts: tuple[int, ...]
    invariant: bool

    def padded(self, num: int) -> int:
        """The smallest number of rows that is used for `num`; the largest one if all are smaller."""
        return next((count for count in self.counts if count >= num), self.counts[-1])


class Linear(torch.nn.Module):
    """`torch.nn.Linear` for inference on a CPU: a row's result does not depend on the other rows. The plain weight is not kept if it is
    packed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.choice = _choice(weight, bias)
        self.weight = _pack(weight) if self.choice.packed else weight
        self.bias = bias
        self._counts = frozenset(self.choice.counts)
        self._most = self.choice.counts[-1]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., out] of [..., in]."""
        flat = rows if rows.ndim == 2 else rows.reshape(-1, self.in_features)
        num = len(flat)
        if num in self._counts:
            out = self._product(flat)
        elif num <= self._most:
            more = self.choice.padded(num) - num
            out = self._product(functional.pad(flat, (0, 0, 0, more))).narrow(0, 0, num)
        else:
            out = torch.cat([self.forward(part) for part in torch.split(flat, self._most)])
        return out if rows.ndim == 2 else out.view(*rows.shape[:-1], self.out_features)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return (
            _packed_linear(rows, self.weight, self.bias)
            if self.choice.packed
            else functional.linear(rows, self.weight, self.bias)
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, packed={self.choice.packed}"


class Slice(torch.nn.Module):
    """Some outputs of a joined layer: what the network's own module computes."""

    def __init__(self, joined: Linear, start: int, num: int):
        super().__init__()
        self.joined, self.start, self.out_features = joined, start, num

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.joined(rows)
        return out.narrow(-1, self.start, self.out_features)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous())
    return packed


def _packed_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return out


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the two operators (they are private), and they agree with a plain linear."""
    rows, weight = (
        torch.linspace(-1, 1, 3 * 48).view(3, 48).to(dtype),
        torch.linspace(-1, 1, 32 * 48).view(32, 48).to(dtype),
    )
    try:
        with torch.inference_mode():
            near = 1e-5 if dtype == torch.float32 else 2e-2
            got, expected = _packed_linear(rows, _pack(weight), None), functional.linear(rows, weight)
            return bool(torch.allclose(got, expected, atol=near, rtol=near))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


_choices: dict[Any, Choice] = {}  # by shape, type, bias and threads


def _choice(weight: torch.Tensor, bias: torch.Tensor | None) -> Choice:
    key = (*weight.shape, weight.dtype, bias is not None, torch.get_num_threads())
    if key not in _choices:
        _choices[key] = _measured(weight, bias)
    return _choices[key]


@torch.inference_mode()
def _measured(weight: torch.Tensor, bias: torch.Tensor | None) -> Choice:
    """The layout, with the numbers of rows that agree in it."""
    sample, zero = _cancelling_weight(weight), None if bias is None else torch.zeros_like(bias)
    packed = None
    if can_pack(weight.dtype):
        layout = _pack(sample)
        packed = _tried(True, lambda rows: _packed_linear(rows, layout, zero), weight)
        if packed.invariant:
            return packed
    plain = _tried(False, lambda rows: functional.linear(rows, sample, zero), weight)
    return plain if packed is None or plain.invariant else packed


def _cancelling_weight(weight: torch.Tensor) -> torch.Tensor:
    """Of the same shape and type, for inputs of `_cancelling_rows`: the exact products are 0, so only the rounding errors of the sums are
    left, and they show any other order of summation. Results of ordinary size hide most of them when they are rounded to bfloat16."""
    num_out, num_in = weight.shape
    some = torch.randn(min(num_out, 256), num_in // 2, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    both = torch.cat([some, some, some.new_ones(len(some), num_in % 2)], 1)
    return both.repeat(-(-num_out // len(some)), 1)[:num_out].contiguous()


def _cancelling_rows(num: int, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    half = torch.randn(num, num_in // 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.cat([half, -half, half.new_zeros(num, num_in % 2)], 1)


def _tried(packed: bool, product: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor) -> Choice:
    started = time.perf_counter()
    rows = _cancelling_rows(max(TRIED_ROWS), weight.shape[1], weight.dtype)
    block = rows[:REFERENCE_ROWS].contiguous()
    expected = product(block)
    # wherever a row stands, and whatever stands beside it
    turned = product(block.roll(5, 0)).roll(-5, 0)
    mixed = product(torch.cat([block[:3], rows[20 : 20 + REFERENCE_ROWS - 3]]))
    invariant = torch.equal(expected, turned) and torch.equal(mixed[:3], expected[:3])
    counts = [REFERENCE_ROWS]
    for num in TRIED_ROWS:
        if time.perf_counter() - started > SECONDS_A_SHAPE:
            break
        reference = _blocks(product, rows, num) if num > REFERENCE_ROWS else expected[:num]
        if torch.equal(product(rows[:num].contiguous()), reference):
            counts.append(num)
    return Choice(packed, tuple(sorted(counts)), invariant)


def _blocks(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, num: int) -> torch.Tensor:
    padded = -(-num // REFERENCE_ROWS) * REFERENCE_ROWS
    return torch.cat([product(part.contiguous()) for part in torch.split(rows[:padded], REFERENCE_ROWS)])[:num]


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
    for name, linear in zip(names, own, strict=True):
        setattr(parent, name, Slice(joined, at, linear.out_features))
        at += linear.out_features


def _detached(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()


def _is_near(sample: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    try:
        return bool((sample() - expected).abs().max() <= tolerance * expected.abs().max())
    except (AttributeError, RuntimeError, TypeError):
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Root mean square norm over the hidden dimension."""

    weight: Any  # float32[E]
    eps: float

    def __call__(self, x: Any, delta: torch.Tensor | None, out: Any) -> None:
        """x float32[N, E] += delta [P, E]; its norm goes to out [P, E]."""
        cpu_kernels.norm(x, None if delta is None else array_of(delta), self.weight, self.eps, out)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    before_attention: Norm
    qkv: Linear
    head_norms: Any  # float32[H + S, D], or None
    head_eps: float
    out: Linear
    scaling: float
    before_mlp: Norm
    gate_up: Linear
    down: Linear


class LlamaNetwork:
    """Call it with a step and the cells of each layer: logits [T, V] of the wanted rows.

    exposed  hidden states that each call leaves in `states`, float32[N, E] by number: i is the input of layer i; the number of layers
             stands for the last one's output after the final norm
    """

    def __init__(self, network: Any, max_positions: int):
        """`network`: one whose linear layers have been replaced."""
        self.exposed: frozenset[int] = frozenset()
        self.states: dict[int, torch.Tensor] = {}
        body, attention = network.model, network.model.layers[0].self_attn
        self.dtype = body.embed_tokens.weight.dtype
        self.dim = attention.head_dim
        self.num_q, self.num_kv = (p.out_features // self.dim for p in (attention.q_proj, attention.k_proj))
        self.embedding, self.norm, self.head = body.embed_tokens.weight, _norm(body.norm), network.lm_head
        self.layers = [self._layer(layer) for layer in body.layers]
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        # numbers of rows that need no padding in any layer
        self._counts = sorted(set.intersection(*(set(linear.choice.counts) for linear in linears)))
        self.invariant = all(linear.choice.invariant for linear in (*linears, self.head))
        cos, sin = body.rotary_emb(self.embedding[:1, None].float(), torch.arange(max_positions)[None])
        self.cos, self.sin = (of[0, :, : self.dim // 2].float().contiguous().numpy() for of in (cos, sin))

    def _layer(self, layer: Any) -> Layer:
        attention, mlp, head_norms, head_eps = layer.self_attn, layer.mlp, None, 0.0
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm, attention.k_norm
            weights = [q.weight.expand(self.num_q, -1), k.weight.expand(self.num_kv, -1)]
            head_norms, head_eps = torch.cat(weights).detach().float().numpy(), q.variance_epsilon
        return Layer(
            before_attention=_norm(layer.input_layernorm),
            qkv=attention.q_proj.joined,
            head_norms=head_norms,
            head_eps=head_eps,
            out=attention.o_proj,
            scaling=attention.scaling,
            before_mlp=_norm(layer.post_attention_layernorm),
            gate_up=mlp.gate_proj.joined,
            down=mlp.down_proj,
        )

    def __call__(self, step: Step, cells: Sequence[PagedLayer]) -> torch.Tensor:
        x_NE = functional.embedding(step.ids, self.embedding).float()
        num, size = x_NE.shape
        cpu_kernels.use_threads(torch.get_num_threads())
        rows = next((count for count in self._counts if count >= num), num)  # a linear layer pads or cuts what is more
        normed, attended, gated = (
            x_NE.new_zeros(rows, width, dtype=self.dtype)
            for width in (size, self.num_q * self.dim, self.layers[0].down.in_features)
        )
        query = np.empty((num, self.num_q, self.dim), np.float32)
        x, to_linear, from_attention, from_gate = (array_of(own) for own in (x_NE, normed, attended, gated))
        positions, write, sinks, delta = step.positions.numpy(), step.write.numpy(), no_sinks(self.num_q), None
        for i, (layer, own) in enumerate(zip(self.layers, cells, strict=True)):
            if not own.is_initialized:
                own.lazy_initialization(*(normed.new_empty(1, self.num_kv, 1, self.dim) for _ in "kv"))
            keys, values = own.arrays
            layer.before_attention(x, delta, to_linear)
            if i in self.exposed:
                self.states[i] = x_NE.clone()
            qkv, norms, eps = array_of(layer.qkv(normed)), layer.head_norms, layer.head_eps
            cpu_kernels.rotate(qkv, self.cos, self.sin, positions, write, norms, eps, query, keys, values)
            seen = step.visible(own.window)
            cpu_kernels.attention(query, keys, values, *seen.arguments, layer.scaling, 0.0, sinks, from_attention)
            layer.before_mlp(x, layer.out(attended), to_linear)
            cpu_kernels.gate(array_of(layer.gate_up(normed)), num, from_gate)
            delta = layer.down(gated)
        self.norm(x, delta, to_linear)
        if len(self.layers) in self.exposed:
            self.states[len(self.layers)] = normed.narrow(0, 0, num).float()
        logits: torch.Tensor = self.head(normed.narrow(0, 0, num) if step.wanted is None else normed[step.wanted])
        return logits


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
