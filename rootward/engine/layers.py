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
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from rootward.engine import cpu_kernels
from rootward.engine.batch import Step
from rootward.engine.cpu_attention import no_sinks
from rootward.engine.cpu_decoder import (
    LayerArrays,
    LayerRows,
    LayerScratch,
    LayerSettings,
    address_table,
    decoder_layers,
)
from rootward.engine.cpu_kernels import Arithmetic
from rootward.engine.cpu_tiles import AMX_PAIRS

if TYPE_CHECKING:
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
    compact     hold the weights of a layer by `vdpbf16ps` in 12 bits each, if they allow it; None: if several threads, which share the
                memory's bandwidth, run it: decoding takes longer than it saves where one thread has all of it
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        arithmetic: Arithmetic | None = None,
        compact: bool | None = None,
    ):
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
        self.is_compact = False
        if self.arithmetic is Arithmetic.DOT and (torch.get_num_threads() > 1 if compact is None else compact):
            smaller = cpu_kernels.compact(self.packed)
            if smaller is not None:
                self.packed, self.is_compact = smaller, True

    def expand(self) -> None:
        """Hold the weights as they are."""
        if self.is_compact:
            self.packed, self.is_compact = cpu_kernels.expanded(self.packed, self.in_features), False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., out] of [..., in], in the type of the rows."""
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
        multiply(inputs, self.packed, self.bias, out, cpu_kernels.follow_torch_threads())

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
        words = cpu_kernels.expanded(self.packed, self.in_features) if self.is_compact else self.packed
        return cpu_kernels.unpacked(words, outputs, self.in_features, self.dtype)


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
            setattr(parent, name, Linear(child.weight, child.bias))
    linears = [module for module in network.modules() if isinstance(module, Linear)]
    if not all(linear.is_compact for linear in linears):  # all or none: layers have equal forms
        for linear in linears:
            linear.expand()
    if _is_near(sample, expected):
        return True
    for (parent, name), child in before.items():
        setattr(parent, name, child)
    return False


def _join(parent: Any, names: Sequence[str]) -> None:
    own = [getattr(parent, name) for name in names]
    bias = None if own[0].bias is None else torch.cat([linear.bias for linear in own])
    joined, at = Linear(torch.cat([linear.weight for linear in own]), bias), 0
    for name, part in zip(names, own, strict=True):
        setattr(parent, name, Slice(joined, at, part.out_features))
        at += part.out_features


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


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A decoder layer without the norm of its input. The linear layers are `Linear` where kernels compute it."""

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

    @property
    def settings(self) -> LayerSettings:
        return LayerSettings(self.before_mlp.eps, self.head_eps, float(self.scaling), no_sinks(self.num_q))

    @property
    def amx(self) -> tuple[bool | None, ...]:
        """The arguments `amx_...` of `decoder_layers`."""
        qkv, out, gate_up, down = (
            linear.arithmetic is Arithmetic.AMX for linear in (self.qkv, self.out, self.gate_up, self.down)
        )
        fits = cpu_kernels.fits_amx(self.num_q, self.num_kv, self.dim, self.dim)
        attention = fits and self.qkv.dtype == torch.bfloat16 and cpu_kernels.bf16_arithmetic() is Arithmetic.AMX
        return tuple(flag or None for flag in (qkv, attention, out, gate_up, down))


class DecoderLayers:
    """Layers by kernels, all of them in one call.

    norms  of the inputs of the layers; none: the caller gives what queries, keys and values of the only layer are made of
    """

    def __init__(self, layers: Sequence[Layer], norms: Sequence[Norm], rotations: Rotations):
        """ValueError: the layers differ in sizes, or in anything else but their weights."""
        self._layers, self._norms, self._rotations = layers, norms, rotations
        self._settings, self._amx = layers[0].settings, layers[0].amx
        for layer in layers:
            if layer.amx != self._amx or layer.settings[:-1] != self._settings[:-1] or layer.num_q != layers[0].num_q:
                raise ValueError("layers differ in the scale of attention, in a norm's eps or in their arithmetic")
        self._cells: list[PagedLayer] = []
        self._exposed: tuple[int, ...] = ()
        self._place_of_state = np.full(len(layers), -1)

    def __call__(
        self, x: Any, step: Step, cells: Sequence[PagedLayer], *, read: Any = None, exposed: Sequence[int] = ()
    ) -> tuple[Any, Any]:
        """Returns (delta float32[N, E], with which x + delta is the result of the last layer; inputs of the layers `exposed`,
        float32[·, N, E]).

        x      float32[N, E]: the input of the first layer, changed in place
        cells  of each layer
        read   see `norms`; as `Linear.array_of` makes it
        """
        if self._cells != list(cells):
            self._read_from(cells)
        scratch = self._scratch(len(x), read)
        rows = LayerRows(self._rotations.cos, self._rotations.sin, step.positions.numpy(), step.write.numpy())
        states = np.empty((len(exposed), *x.shape), np.float32)
        if tuple(exposed) != self._exposed:
            self._exposed, self._place_of_state = tuple(exposed), np.full(len(cells), -1)
            self._place_of_state[list(exposed)] = np.arange(len(exposed))
        for first, last in self._runs:
            decoder_layers(
                x,
                first,
                last,
                self._addresses,
                self._like,
                self._settings,
                rows,
                step.visible(cells[first].window),
                scratch,
                read is None,
                self._place_of_state,
                states,
                *self._amx,
                cpu_kernels.follow_torch_threads(),
            )
        return scratch.delta, states

    def _read_from(self, cells: Sequence[PagedLayer]) -> None:
        """Let the layers read and write these cells."""
        self._arrays = [self._arrays_of(i, own) for i, own in enumerate(cells)]
        self._cells, self._like, self._addresses = list(cells), self._arrays[0], address_table(self._arrays)
        starts = [i for i, own in enumerate(cells) if i == 0 or own.window != cells[i - 1].window]
        self._runs = list(pairwise([*starts, len(cells)]))  # of layers with one window

    def _arrays_of(self, index: int, cells: PagedLayer) -> LayerArrays:
        layer = self._layers[index]
        if not cells.is_initialized:
            new = torch.empty(1, layer.num_kv, 1, layer.dim, dtype=layer.qkv.dtype)
            cells.lazy_initialization(new, new)
        linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
        before_attention = self._norms[index] if self._norms else layer.before_mlp  # a substitute that nothing reads
        norms = before_attention.weight, layer.before_mlp.weight, layer.head_norms
        return LayerArrays._make([*(part for one in linears for part in (one.packed, one.bias)), *norms, *cells.arrays])

    def _scratch(self, num_rows: int, read: Any) -> LayerScratch:
        layer = self._layers[0]
        inputs = [one.new_inputs(num_rows) for one in (layer.out, layer.gate_up, layer.down)]
        inputs = [layer.qkv.new_inputs(num_rows) if read is None else read, *inputs]
        words = (one.view(np.int32) if one.dtype == np.int16 else one for one in inputs)
        twice = [array for both in zip(inputs, words, strict=True) for array in both]
        qkv, gate_up = (np.empty((num_rows, one.out_features), np.float32) for one in (layer.qkv, layer.gate_up))
        query = np.empty((num_rows, layer.num_q, layer.dim), np.float32)
        delta = np.zeros((num_rows, layer.down.out_features), np.float32)
        return LayerScratch._make([*twice, qkv, query, gate_up, delta])


class LlamaNetwork:
    """Call it with a step and the cells of each layer: logits [T, V] of the wanted rows.

    exposed  hidden states that each call leaves in `states`, float32[N, E] by number: i is the input of layer i; the number of layers
             stands for the last one's output after the final norm
    """

    def __init__(self, network: Any, max_positions: int):
        """`network`: one whose linear layers have been replaced. ValueError: its layers differ from one another."""
        self.exposed: frozenset[int] = frozenset()
        self.states: dict[int, Any] = {}
        body = network.model
        self.embedding, self.head = body.embed_tokens.weight, network.lm_head
        layers = [_layer(layer) for layer in body.layers]
        rotations = Rotations.of(body.rotary_emb, max_positions, layers[0].dim)
        self.num_layers = len(layers)
        self.layers = DecoderLayers(layers, [_norm(layer.input_layernorm) for layer in body.layers], rotations)
        self.norm = _norm(body.norm)

    def __call__(self, step: Step, cells: Sequence[PagedLayer]) -> torch.Tensor:
        x = functional.embedding(step.ids, self.embedding).float().numpy()
        inputs = sorted(self.exposed - {self.num_layers})
        delta, states = self.layers(x, step, cells, exposed=inputs)
        self.states = dict(zip(inputs, states, strict=True))
        final = self.head.new_inputs(len(x))
        self.norm(x, delta, final)
        if self.num_layers in self.exposed:
            normed = torch.from_numpy(final)
            normed = normed.view(torch.bfloat16) if self.head.rounds_inputs else normed
            self.states[self.num_layers] = normed.float().numpy()
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
    if _names(network) != {"model", "lm_head"} or _names(body := network.model) != BODY:
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
    if _names(layer) != LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if _names(attention) not in (ATTENTION, ATTENTION | HEAD_NORMS) or _names(mlp) != MLP:
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


def _names(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}
