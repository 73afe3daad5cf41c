"""What stands between the linear layers of a network of the Llama family, compiled for this processor by numba.

Each row is computed on its own, and its keys are read from a list in the order of positions. So a row has the same bits alone, in a tree,
in a chunk of a prompt and in a batch, whatever the compiler makes of the loops. Everything is computed in float32; weights and cells may be
bfloat16, which numba does not know: such arrays come as int16.

The first call of a kernel compiles it, which takes seconds; the result is kept in the user's cache directory.

Legend: N rows, E hidden, H query heads, S heads of K and V, D head dimension, C cells,
I intermediate, T float32 or bfloat16.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from rootward.settings import keep_compiled_kernels

keep_compiled_kernels()

import numba  # noqa: E402  # reads the variable when it is imported
from numba.extending import intrinsic, overload  # noqa: E402

SERVED = (torch.float32, torch.bfloat16)
ANY_ORDER = {"contract", "reassoc", "nsz"}  # sums may be split among lanes: the same way for every row
try:  # numba's other threads take 0.1 ms to start, and end the process if two threads of it use them
    # torch brings its own OpenMP: with a second one, the threads of each would wait for work on the processors that the other's need
    for library in Path(torch.__file__).parent.glob("lib/libgomp*.so*"):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import numba.np.ufunc.omppool

    HAS_OPENMP = True
    numba.config.THREADING_LAYER = "omp"
except ImportError:
    HAS_OPENMP = False
kernel = numba.njit(nogil=True, cache=True, fastmath=ANY_ORDER, error_model="numpy")
parallel_kernel = numba.njit(nogil=True, cache=True, fastmath=ANY_ORDER, error_model="numpy", parallel=HAS_OPENMP)
part = numba.njit(nogil=True, fastmath=ANY_ORDER, error_model="numpy")  # of a kernel


def use_threads(num: int) -> None:
    """For kernels that the calling thread runs."""
    numba.set_num_threads(min(num, numba.config.NUMBA_NUM_THREADS))


def array_of(tensor: torch.Tensor) -> Any:
    """A view of a tensor on the CPU, as kernels take it."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.int16)).numpy()


@intrinsic
def _as_float(typing: Any, bits: Any) -> Any:
    return numba.float32(numba.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _as_bits(typing: Any, number: Any) -> Any:
    return numba.uint32(numba.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


# numba compares the names and annotations of an overload with those of its implementation: so there are none
def load(number):
    """float32 of an element of an array."""


def store(array, i, j, number):
    """array[i, j] = number, a float32: rounded to the nearest, and to even, where the array has another type."""


@overload(load, inline="always")
def _load(number):
    if number == numba.int16:
        return lambda number: _as_float(np.uint32(number) << np.uint32(16))
    return lambda number: number


@overload(store, inline="always")
def _store(array, i, j, number):
    if array.dtype != numba.int16:

        def as_it_is(array, i, j, number):
            array[i, j] = number

        return as_it_is

    def rounded(array, i, j, number):
        bits = _as_bits(np.float32(number))
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        array[i, j] = np.int16(bits >> np.uint32(16))

    return rounded


@numba.njit(
    fastmath={"contract"}, forceinline=True
)  # not by numba: what is around it may sum in any order, this may not
def _exp(x: Any) -> Any:
    """e^x to 1e-7 for -87 <= x <= 88, and that of the nearer bound elsewhere; in operations that the compiler makes vectors of (Cody and
    Waite; coefficients of Cephes `expf`)."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    shifted = x * np.float32(1.44269504) + np.float32(12582912.0)  # its lowest bits are the power of two
    power = shifted - np.float32(12582912.0)
    r = x - power * np.float32(0.693359375)
    r = r + power * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return _as_float(_as_bits(p) + (_as_bits(shifted) << np.uint32(23)))


@kernel
def norm(x: Any, delta: Any, weight: Any, eps: float, out: Any) -> None:
    """x float32[N, E] += delta float32[N, E], unless that is None; out float32[N, E] = x · weight / √(mean x² + eps)."""
    num, size = x.shape
    for n in range(num):
        total = np.float32(0)
        for e in range(size):
            if delta is not None:
                x[n, e] += delta[n, e]
            total += x[n, e] * x[n, e]
        scale = np.float32(1 / np.sqrt(np.float64(total) / size + eps))
        for e in range(size):
            out[n, e] = x[n, e] * scale * weight[e]


@kernel
def rotate(
    qkv: Any,
    cos: Any,
    sin: Any,
    positions: Any,
    cells: Any,
    head_norms: Any,
    eps: float,
    query: Any,
    keys: Any,
    values: Any,
) -> None:
    """Queries, keys and values of qkv float32[N, (H + 2S) · D], one after the other: to query float32[N, H, D], and to cells int64[N] of
    keys and values T[C, S, D].

    Queries and keys are multiplied by the norms float32[H + S, D] of their heads, unless these are None, and rotated as transformers'
    `rotate_half` does: x · cos + (−x₂, x₁) · sin for the halves x₁ and x₂ of a head; cos and sin float32[positions, D / 2].
    """
    num, heads, dim = query.shape
    shared, half = keys.shape[1], dim // 2
    flat_keys = keys.reshape(keys.shape[0], shared * dim)
    flat_values = values.reshape(values.shape[0], shared * dim)
    row = np.empty(dim, np.float32)
    for n in range(num):
        at, cell = positions[n], cells[n]
        for h in range(heads + shared):
            scale = np.float32(1)
            for d in range(dim):
                row[d] = qkv[n, h * dim + d]
            if head_norms is not None:
                total = np.float32(0)
                for d in range(dim):
                    total += row[d] * row[d]
                scale = np.float32(1 / np.sqrt(np.float64(total) / dim + eps))
                for d in range(dim):
                    row[d] *= scale * head_norms[h, d]
            if h < heads:
                for d in range(half):
                    query[n, h, d] = row[d] * cos[at, d] - row[half + d] * sin[at, d]
                    query[n, h, half + d] = row[half + d] * cos[at, d] + row[d] * sin[at, d]
            else:
                first = (h - heads) * dim
                for d in range(half):
                    store(flat_keys, cell, first + d, row[d] * cos[at, d] - row[half + d] * sin[at, d])
                    store(flat_keys, cell, first + half + d, row[half + d] * cos[at, d] + row[d] * sin[at, d])
        first = (heads + shared) * dim
        for i in range(shared * dim):
            store(flat_values, cell, i, qkv[n, first + i])


@part
def _scores(query: Any, keys: Any, cells: Any, num: int, n: int, h: int, scaling: float, out: Any) -> None:
    """out[g, j] = scaling · query[n, h · G + g] · keys[cells[j], h], four keys at a time."""
    group, dim = out.shape[0], query.shape[2]
    fours = num // 4 * 4
    for j in range(0, fours, 4):
        a, b, c, d = cells[j], cells[j + 1], cells[j + 2], cells[j + 3]
        for g in range(group):
            head = h * group + g
            p, q, r, s = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(dim):
                x = query[n, head, i]
                p += x * load(keys[a, h, i])
                q += x * load(keys[b, h, i])
                r += x * load(keys[c, h, i])
                s += x * load(keys[d, h, i])
            out[g, j], out[g, j + 1], out[g, j + 2], out[g, j + 3] = scaling * p, scaling * q, scaling * r, scaling * s
    for j in range(fours, num):
        for g in range(group):
            p = np.float32(0)
            for i in range(dim):
                p += query[n, h * group + g, i] * load(keys[cells[j], h, i])
            out[g, j] = scaling * p


@part
def _softmax(score: Any, num: int, sink: float) -> None:
    """In place, of the first `num`. `sink`: one more score, whose weight nobody gets; -inf if there is none."""
    most = sink
    for j in range(num):
        most = max(most, score[j])
    total = np.float32(0)
    for j in range(num):
        score[j] = _exp(score[j] - most)
        total += score[j]
    if sink > -np.inf:
        total += _exp(sink - most)
    for j in range(num):
        score[j] /= total


@part
def _weighted(weight: Any, values: Any, cells: Any, num: int, h: int, out: Any) -> None:
    """out[g] = Σ weight[g, j] · values[cells[j], h], eight values at a time."""
    group, dim = out.shape
    eights = num // 8 * 8
    out[:] = np.float32(0)
    for j in range(0, eights, 8):
        a, b, c, d = cells[j], cells[j + 1], cells[j + 2], cells[j + 3]
        e, f, k, m = cells[j + 4], cells[j + 5], cells[j + 6], cells[j + 7]
        for g in range(group):
            p, q, r, s = weight[g, j], weight[g, j + 1], weight[g, j + 2], weight[g, j + 3]
            t, u, v, w = weight[g, j + 4], weight[g, j + 5], weight[g, j + 6], weight[g, j + 7]
            for i in range(dim):
                out[g, i] += (
                    (p * load(values[a, h, i]) + q * load(values[b, h, i]))
                    + (r * load(values[c, h, i]) + s * load(values[d, h, i]))
                ) + (
                    (t * load(values[e, h, i]) + u * load(values[f, h, i]))
                    + (v * load(values[k, h, i]) + w * load(values[m, h, i]))
                )
    for j in range(eights, num):
        for g in range(group):
            for i in range(dim):
                out[g, i] += weight[g, j] * load(values[cells[j], h, i])


@parallel_kernel
def attention(
    query: Any,
    keys: Any,
    values: Any,
    entry: Any,
    first: Any,
    length: Any,
    blocks: Any,
    block_size: int,
    node_start: Any,
    nodes: Any,
    scaling: float,
    softcap: float,
    sinks: Any,
    out: Any,
) -> None:
    """What row n of query float32[N, H, D] reads of keys and values T[C, S, D]: out float32[N, H · D].

    It sees positions first[n] to length[b] of its entry b = entry[n], whose cell i is cell i mod block_size of block i div block_size of
    blocks int64[B, M]; and behind them the cells nodes[node_start[n] : node_start[n + 1]]. Rows of entry -1 are padding and get 0.
    Scores s become softcap · tanh(s / softcap), if that is above 0. sinks float32[H]: one more score a head, whose
    weight nobody gets; -inf if there is none.
    """
    num, heads, _ = query.shape
    shared, dim = values.shape[1], values.shape[2]
    group = heads // shared
    for item in numba.prange(num * shared):
        n, h = item // shared, item % shared
        b, seen = entry[n], 0
        if b < 0:
            out[n, h * group * dim : (h + 1) * group * dim] = 0
            continue
        start = first[n]
        most = length[b] - start + node_start[n + 1] - node_start[n]
        cells = np.empty(most, np.int64)
        for i in range(start, length[b]):
            cells[seen] = blocks[b, i // block_size] * block_size + i % block_size
            seen += 1
        for i in range(node_start[n], node_start[n + 1]):
            cells[seen] = nodes[i]
            seen += 1
        weight = np.empty((group, most), np.float32)
        found = np.empty((group, dim), np.float32)
        _scores(query, keys, cells, seen, n, h, np.float32(scaling), weight)
        for g in range(group):
            if softcap > 0:
                for j in range(seen):
                    weight[g, j] = np.float32(softcap * np.tanh(weight[g, j] / softcap))
            _softmax(weight[g], seen, sinks[h * group + g])
        _weighted(weight, values, cells, seen, h, found)
        for g in range(group):
            for i in range(dim):
                out[n, (h * group + g) * dim + i] = found[g, i]


@parallel_kernel
def gate(gate_up: Any, out: Any) -> None:
    """SiLU of the first half of gate_up float32[N, 2I] times its second half: out float32[N, I]."""
    num, size = out.shape
    for n in numba.prange(num):
        for i in range(size):
            x = gate_up[n, i]
            out[n, i] = x / (np.float32(1) + _exp(-x)) * gate_up[n, size + i]
