"""Decoder layers of the Llama family on a CPU, all of a network in one call of compiled code.

Between two kernels that Python calls, one thread works, and it first needs the interpreter's lock, which the thread of the streams may
hold. A model of thirty layers has 270 kernels a forward.

Layers have equal sizes. The arrays of all but the first are known by their addresses, so that the code depends on neither their number nor
their values: it is compiled once for a type of weights.

Legend: L layers, N rows, E hidden, H query heads, S heads of K and V, D head dimension, C cells, I intermediate, T float32 or bfloat16.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from rootward.engine.cpu_kernels import (
    VisibleKeys,
    attention_amx,
    attention_float32,
    gate,
    kernel,
    linear,
    linear_amx,
    norm_rows,
    rotate_rows,
)


class LayerArrays(NamedTuple):
    """Of a layer. Weights of linear layers are as `cpu_kernels.packed` or `compact` makes them, biases as `packed_bias` does."""

    qkv: Any
    qkv_bias: Any
    out: Any
    out_bias: Any
    gate_up: Any
    gate_up_bias: Any
    down: Any
    down_bias: Any
    before_attention: Any  # float32[E], as the next one
    before_mlp: Any
    head_norms: Any  # float32[H + S, D], or None
    keys: Any  # T[C, S, D]
    values: Any


class LayerSettings(NamedTuple):
    """Of all layers. sinks float32[H]: of attention."""

    eps: float  # of the norms before attention and before the MLP
    head_eps: float
    scaling: float
    sinks: Any


class LayerRows(NamedTuple):
    """Of the rows of a step, the same for all layers; cos and sin float32[positions, D / 2]."""

    cos: Any
    sin: Any
    positions: Any  # int64[N]
    cells: Any  # int64[N]: where keys and values go


class LayerScratch(NamedTuple):
    """Results on the way through a layer: what linear layers read, [N, ·] in the type of their inputs, twice, as kernels fill it and as
    `linear` takes it; and float32[N, ·]."""

    before_attention: Any
    before_attention_words: Any
    attended: Any
    attended_words: Any
    before_mlp: Any
    before_mlp_words: Any
    gated: Any
    gated_words: Any
    qkv: Any
    query: Any  # float32[N, H, D]
    gate_up: Any
    delta: Any  # float32[N, E]: what the layer adds to the residual stream


ADDRESSES = np.dtype([(name, np.int64) for name in LayerArrays._fields])


def address_table(layers: Sequence[LayerArrays]) -> Any:
    """ADDRESSES[L]: where the arrays of each layer are, 0 for None. ValueError if their types or shapes are not those of the first."""
    like = [None if array is None else (array.shape, array.dtype) for array in layers[0]]
    for i, own in enumerate(layers):
        if [None if array is None else (array.shape, array.dtype) for array in own] != like:
            raise ValueError(f"layer {i} has other sizes than layer 0")
        if any(array is not None and not array.flags.c_contiguous for array in own):
            raise ValueError(f"layer {i} has an array that is not contiguous; its address does not describe it")
    return np.array([tuple(0 if array is None else array.ctypes.data for array in own) for own in layers], ADDRESSES)


@intrinsic
def _array_at(typing: Any, address: Any, like: Any) -> Any:
    """An array at an address, with the type and the shape of another one; None for None."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        if like == numba.types.none:
            return context.get_dummy_value()
        array = make_array(like)(context, builder, values[1])
        array.data = builder.inttoptr(values[0], array.data.type)
        for owner in ("meminfo", "parent"):  # nobody counts references to it
            setattr(array, owner, cgutils.get_null_value(getattr(array, owner).type))
        return array._getvalue()

    return like(numba.int64, like), code


@kernel
def decoder_layers(
    x: Any,
    first: int,
    last: int,
    addresses: Any,
    like: LayerArrays,
    settings: LayerSettings,
    rows: LayerRows,
    seen: VisibleKeys,
    scratch: LayerScratch,
    norms_input: bool,
    place_of_state: Any,
    states: Any,
    amx_qkv: Any,
    amx_attention: Any,
    amx_out: Any,
    amx_gate_up: Any,
    amx_down: Any,
    threads: int,
) -> None:
    """Layers first to last - 1, of x + scratch.delta float32[N, E], which is where their result is too.

    addresses       `address_table`
    like            the arrays of any layer
    norms_input     whether queries, keys and values are made of the norm of that; otherwise of scratch.before_attention as it is
    place_of_state  int64[L]: the input of layer i goes to states[place_of_state[i]], float32[·, N, E], unless that is -1
    amx_...         whether this is computed by AMX: True or None, which are two types to the compiler
    """
    for i in range(first, last):
        at = addresses[i]
        keys, values = _array_at(at.keys, like.keys), _array_at(at.values, like.values)
        if norms_input:
            norm = _array_at(at.before_attention, like.before_attention)
            norm_rows(x, scratch.delta, norm, settings.eps, scratch.before_attention)
        place = place_of_state[i]
        for n in range(len(x) if place >= 0 else 0):
            for e in range(x.shape[1]):
                states[place, n, e] = x[n, e]
        weight, bias = _array_at(at.qkv, like.qkv), _array_at(at.qkv_bias, like.qkv_bias)
        if amx_qkv is None:
            linear(scratch.before_attention_words, weight, bias, scratch.qkv, threads)
        else:
            linear_amx(scratch.before_attention_words, weight, bias, scratch.qkv, threads)
        head_norms = _array_at(at.head_norms, like.head_norms)
        rotate_rows(
            scratch.qkv,
            rows.cos,
            rows.sin,
            rows.positions,
            rows.cells,
            head_norms,
            settings.head_eps,
            scratch.query,
            keys,
            values,
        )
        if amx_attention is None:
            attention_float32(
                scratch.query, keys, values, seen, settings.scaling, 0.0, settings.sinks, scratch.attended, threads
            )
        else:
            attention_amx(
                scratch.query, keys, values, seen, settings.scaling, 0.0, settings.sinks, scratch.attended, threads
            )
        weight, bias = _array_at(at.out, like.out), _array_at(at.out_bias, like.out_bias)
        if amx_out is None:
            linear(scratch.attended_words, weight, bias, scratch.delta, threads)
        else:
            linear_amx(scratch.attended_words, weight, bias, scratch.delta, threads)
        norm_rows(x, scratch.delta, _array_at(at.before_mlp, like.before_mlp), settings.eps, scratch.before_mlp)
        weight, bias = _array_at(at.gate_up, like.gate_up), _array_at(at.gate_up_bias, like.gate_up_bias)
        if amx_gate_up is None:
            linear(scratch.before_mlp_words, weight, bias, scratch.gate_up, threads)
        else:
            linear_amx(scratch.before_mlp_words, weight, bias, scratch.gate_up, threads)
        gate(scratch.gate_up, scratch.gated)
        weight, bias = _array_at(at.down, like.down), _array_at(at.down_bias, like.down_bias)
        if amx_down is None:
            linear(scratch.gated_words, weight, bias, scratch.delta, threads)
        else:
            linear_amx(scratch.gated_words, weight, bias, scratch.delta, threads)
