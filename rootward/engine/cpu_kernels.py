"""CPU kernels of the networks of the Llama family: linear layers, norms, rotation, attention. Compiled by numba for this processor.

Rows are independent of one another: each output of a row is a sum in a fixed order, and attention reads the keys of a row in the order of
their positions. So a row has the same bits alone, in a tree, in a chunk of a prompt and in a batch. Sums are float32; weights, KV cells and
inputs of linear layers may be bfloat16, a type that numba does not have: these arrays are passed as int16.

The first call of a kernel compiles it, which takes seconds; the result is kept in the user's cache directory.

Legend: N rows, E hidden, H query heads, S heads of K and V, D head dimension, C cells,
I intermediate, T float32 or bfloat16.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator"
from __future__ import annotations

import ctypes
import logging
import threading
import time
from contextlib import suppress
from enum import Enum
from functools import cache
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba.extending import intrinsic, overload
from torch.nn import functional

from rootward.engine.cpu_tiles import (
    AMX_KEYS,
    AMX_PAIRS,
    AMX_PREFETCH_BYTES,
    AMX_ROWS,
    AMX_VALUES,
    CACHE_LINE,
    CHUNK,
    COMPACT_BLOCK,
    COMPACT_CODES,
    COMPACT_PAIRS,
    COMPACT_START,
    DOT_KEYS,
    DOT_ROWS,
    END_OF_OUTLIERS,
    GROUP,
    LANES,
    LINEAR_ROWS,
    LINEAR_STEPS,
    LONG,
    NUM_EXPONENTS,
    PREFETCH_BYTES,
    SUM_ROWS,
    Code,
    amx_add,
    amx_clear,
    amx_scores,
    amx_store,
    amx_tile,
    column_max_tile,
    configure_amx,
    dot_tile,
    expand_tile,
    generated,
    linear_tile,
    pairs_tile,
    release_amx,
    sum_tile,
    transpose_tile,
    weight_tile,
)
from rootward.host import folder_of_kernels

log = logging.getLogger(__name__)

# Gain in speed from which on products of bfloat16 are used. They round the inputs of layers, which products in float32 do not.
LEAST_DOT_GAIN = 1.15
SERVED = (torch.float32, torch.bfloat16)
WEIGHTS_PER_OUTLIER = 512  # at least: one of so many may have an exponent without a code; of SmolLM2, one in 35,000 has
# Linux on x86-64 (arch/x86/include/uapi/asm/prctl.h)
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
# The folder of compiled kernels is named by all of their sources: numba itself compares the file of each kernel only
sources = b"".join(
    Path(__file__).with_name(name).read_bytes()
    for name in ("cpu_decoder.py", "cpu_kernels.py", "cpu_tiles.py", "head_growth.py", "verify_kernels.py")
)
numba.config.CACHE_DIR = numba.config.CACHE_DIR or str(folder_of_kernels(blake2b(sources, digest_size=8).hexdigest()))
ANY_ORDER = {"contract", "reassoc", "nsz"}  # sums may be split among lanes: the same way for every row


def _choose_threading_layer() -> bool:
    """Make numba use oneTBB or, where that cannot be loaded, OpenMP. False: it has neither, and kernels use one thread.

    With oneTBB the caller of a kernel does the work of threads that get no core, so that a busy process beside this one takes its share of
    the cores and no more. OpenMP waits for every thread (benchmarks/results/2026-11-27-busy-machine). The third layer, "workqueue", takes
    0.1 ms to start and ends the process if two of its threads use it.
    """
    # numba uses libraries that are loaded: oneTBB of its wheel, and torch's OpenMP, since a second one would have threads of its own
    with suppress(PackageNotFoundError, OSError):
        for file in files("tbb") or ():
            if file.name == "libtbb.so.12":
                ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
    for library in Path(torch.__file__).parent.glob("lib/libgomp*.so*"):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    for layer in ("tbbpool", "omppool"):
        with suppress(ImportError):
            import_module(f"numba.np.ufunc.{layer}")
            if numba.config.THREADING_LAYER == "default":  # NUMBA_THREADING_LAYER is not set
                numba.config.THREADING_LAYER = "threadsafe"
            return True
    return False


HAS_THREADS = _choose_threading_layer()
calling_thread = threading.local()
kernel = numba.njit(nogil=True, cache=True, fastmath=ANY_ORDER, error_model="numpy")
parallel_kernel = numba.njit(nogil=True, cache=True, fastmath=ANY_ORDER, error_model="numpy", parallel=HAS_THREADS)
# A function that kernels call. It is inlined: otherwise the process that compiles a kernel would call the function as compiled alone, and
# processes that load the kernel from the cache as compiled with the kernel, where its sums may have another order.
part = numba.njit(nogil=True, fastmath=ANY_ORDER, error_model="numpy", forceinline=True)


class Arithmetic(Enum):
    """How the products of layers in bfloat16 are computed. All but the first round the inputs of a layer to bfloat16."""

    FLOAT32 = "float32"
    DOT = "vdpbf16ps"
    AMX = "amx"


def follow_torch_threads() -> int:
    """Let kernels that the calling thread runs use as many threads as torch does there. Returns their number."""
    num = torch.get_num_threads()
    if getattr(calling_thread, "num_threads", 0) != num:
        numba.set_num_threads(min(num, numba.config.NUMBA_NUM_THREADS))
        if torch.get_num_threads() != num:  # numba begins by setting OpenMP to all processors, for torch too
            torch.set_num_threads(num)
        calling_thread.num_threads = num
    return num


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


@part
def _rounded(number):
    """uint32 whose upper half is the nearest bfloat16 of a float32, and an even one of two."""
    bits = _as_bits(np.float32(number))
    return bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))


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
        array[i, j] = np.int16(_rounded(number) >> np.uint32(16))

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


@part
def norm_rows(x, delta, weight, eps, out):
    """x float32[N, E] += delta float32[N, E], unless that is None; out T[N, E] = x · weight / √(mean x² + eps)."""
    num, size = x.shape
    for n in range(num):
        total = np.float32(0)
        for e in range(size):
            if delta is not None:
                x[n, e] += delta[n, e]
            total += x[n, e] * x[n, e]
        scale = np.float32(1 / np.sqrt(np.float64(total) / size + eps))
        for e in range(size):
            store(out, n, e, x[n, e] * scale * weight[e])


@kernel
def norm(x: Any, delta: Any, weight: Any, eps: float, out: Any) -> None:
    """`norm_rows`, for callers in Python."""
    norm_rows(x, delta, weight, eps, out)


@kernel
def head_inputs(
    ids: Any,
    embedding: Any,
    features: Any,
    token_norm: Any,
    feature_norm: Any,
    eps: float,
    normed_residual: bool,
    residual: Any,
    read: Any,
) -> None:
    """Of an EAGLE-3 head: read T[N, 2E] = [norm(embedding of ids); norm(features)], residual float32[N, E] = features, or their norm.

    ids int64[N]; embedding T[V, E]; features float32[N, E]; weights of norms float32[E]."""
    num, size = features.shape
    tokens = np.empty((num, size), np.float32)
    for n in range(num):
        for e in range(size):
            tokens[n, e] = load(embedding[ids[n], e])
    norm_rows(tokens, None, token_norm, eps, read[:, :size])
    norm_rows(features, None, feature_norm, eps, read[:, size:])
    if normed_residual:
        norm_rows(features, None, feature_norm, eps, residual)
    else:
        for n in range(num):  # an assignment of an array takes seconds to compile
            for e in range(size):
                residual[n, e] = features[n, e]


@part
def rotate_rows(qkv, cos, sin, positions, cells, head_norms, eps, query, keys, values):
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
def _linear_rows(num, x, n, j, weight, g, k, steps, prefetched, pace, out, m, o):
    """`linear_tile` of a number of rows that is known only now."""
    if num >= 8:
        linear_tile(8, x, n, j, weight, g, k, steps, prefetched, pace, out, m, o)
    elif num == 7:
        linear_tile(7, x, n, j, weight, g, k, steps, prefetched, pace, out, m, o)
    elif num == 6:
        linear_tile(6, x, n, j, weight, g, k, steps, prefetched, pace, out, m, o)
    elif num == 5:
        linear_tile(5, x, n, j, weight, g, k, steps, prefetched, pace, out, m, o)
    elif num == 4:
        linear_tile(4, x, n, j, weight, g, k, steps, prefetched, pace, out, m, o)
    elif num == 3:
        linear_tile(3, x, n, j, weight, g, k, steps, prefetched, pace, out, m, o)
    elif num == 2:
        linear_tile(2, x, n, j, weight, g, k, steps, prefetched, pace, out, m, o)
    else:
        linear_tile(1, x, n, j, weight, g, k, steps, prefetched, pace, out, m, o)


@part
def _shares_of_threads(num, threads):
    """int64[threads, ·] for `_next_item`: what each thread takes next of its share of `num` items, and where the share ends."""
    shares = np.empty((threads, CACHE_LINE // 8), np.int64)
    for thread in range(threads):
        shares[thread, 0] = num * thread // threads
        shares[thread, 1] = num * (thread + 1) // threads
    return shares


@part
def _next_item(shares, thread):
    """An item that no thread has taken: of this thread's share, and when that is empty of another's; -1 if all are taken. So a thread whose
    core is slower, or is shared with another process, does less, and the others hardly wait for it."""
    threads = len(shares)
    for turn in range(threads):
        owner = (thread + turn) % threads
        item = _fetch_and_increment(shares, owner)
        if item < shares[owner, 1]:
            return item
    return -1


@generated("shares owner", returns=numba.intp)
def _fetch_and_increment(code: Code) -> Any:
    """shares[owner, 0] before it is increased by one: atomic among threads."""
    place = code.builder.inttoptr(code.address("shares", code.value["owner"]), ir.PointerType(LONG))
    return code.builder.atomic_rmw("add", place, LONG(1), "monotonic")


@parallel_kernel
def linear(x: Any, weight: Any, bias: Any, out: Any, threads: int) -> None:
    """out float32[N, O] = bias + weight · x, for a weight and a bias as `packed` and `packed_bias` make them. x is float32[N, I], with an
    even I for a weight in bfloat16; or, for such a weight, which may be `compact`, pairs of bfloat16 as int32[N, I / 2]. I >= 1.

    More rows than a tile has take their weights in parts that stay in the cache for all tiles; each tile asks for a share of the next
    part, so that the memory is busy all the time. So many threads take the groups of outputs, `threads` >= 1."""
    num, num_out = out.shape
    shares = _shares_of_threads(len(weight), threads)
    for thread in numba.prange(threads):
        # Allocated once a thread: a group may take only microseconds
        spare = np.empty((num if num_out % GROUP else 0, GROUP), np.float32)
        words = _aligned_words(LINEAR_STEPS if num > LINEAR_ROWS else 0)
        while True:
            g = _next_item(shares, thread)
            if g < 0:
                break
            _linear_group(x, weight, bias, g, out, spare, words)


@part
def _aligned_words(steps):
    """int32[1, steps, GROUP] that begins with a cache line: a vector over two of them takes longer."""
    memory = np.empty(steps * GROUP + CACHE_LINE // 4, np.int32)
    first = -(np.int64(memory.ctypes.data) // 4) % (CACHE_LINE // 4)
    return memory[first : first + steps * GROUP].reshape(1, steps, GROUP)


@part
def _linear_group(x, weight, bias, g, out, spare, words):
    """`linear` of the outputs g · GROUP to (g + 1) · GROUP.

    Memory for it: spare float32[N, GROUP], if they are not whole; words int32[1, LINEAR_STEPS, GROUP], for decoded weights."""
    num, num_out = out.shape
    whole = min(GROUP, num_out - g * GROUP)
    for n in range(num):
        for i in range(whole):
            out[n, g * GROUP + i] = bias[g, i]
        for i in range(GROUP if whole < GROUP else 0):
            spare[n, i] = bias[g, i]
    target, column = (out, g * GROUP) if whole == GROUP else (spare, 0)
    add_products(x, weight, g, target, column, words)
    for n in range(num if whole < GROUP else 0):
        for i in range(whole):
            out[n, g * GROUP + i] = spare[n, i]


def add_products(x, weight, g, out, o, words):
    """out[n, o + i] += Σ_j x[n, j] · weight[g, j, i] for all rows n and i < GROUP."""


@overload(add_products, inline="always")
def _add_products(x, weight, g, out, o, words):
    if weight.dtype == numba.uint8:
        return lambda x, weight, g, out, o, words: _add_products_of_compact(x, weight, g, out, o, words)
    return lambda x, weight, g, out, o, words: _add_products_of_words(x, weight, g, out, o)


@part
def _add_products_of_words(x, weight, g, out, o):
    num, depth = len(out), weight.shape[1]
    tiles = -(-num // LINEAR_ROWS)
    steps = depth if tiles == 1 else LINEAR_STEPS
    for k in range(0, depth, steps):
        here = np.int64(weight.ctypes.data) + 4 * GROUP * (g * depth + k)
        for tile in range(tiles):
            n = tile * LINEAR_ROWS
            rows, num_steps = min(LINEAR_ROWS, num - n), min(steps, depth - k)
            ahead = PREFETCH_BYTES if tiles == 1 else 4 * GROUP * (steps + steps * tile // tiles)
            _linear_rows(rows, x, n, k, weight, g, k, num_steps, here + ahead, 4 * GROUP // tiles, out, n, o)


@part
def _add_products_of_compact(x, weight, g, out, o, words):
    """The same sums as of words. One tile decodes the weights as it goes; for more, parts that stay in the cache are decoded before."""
    num, depth = x.shape
    tiles, size = -(-num // LINEAR_ROWS), COMPACT_BLOCK // COMPACT_PAIRS  # bytes of a pair of inputs
    first = np.int64(weight.ctypes.data) + g * weight.shape[1] + COMPACT_START
    if tiles == 1:
        _linear_rows(num, x, 0, 0, weight, g, 0, depth, first + PREFETCH_BYTES, size, out, 0, o)
    outlier = COMPACT_START + size * depth
    for k in range(0, depth if tiles > 1 else 0, LINEAR_STEPS):
        steps = min(LINEAR_STEPS, depth - k)
        outlier = expand_tile(weight, g, k, steps, outlier, words)
        for tile in range(tiles):
            n = tile * LINEAR_ROWS
            rows, prefetched = min(LINEAR_ROWS, num - n), first + size * (k + steps + steps * tile // tiles)
            _linear_rows(rows, x, n, k, words, 0, 0, steps, prefetched, size // tiles, out, n, o)


@part
def _amx_rows(x, weight, bias, g, out, o):
    """`amx_tile` of all rows, in parts of up to two matrix registers."""
    num, depth = len(x), weight.shape[1]
    parts, configured = -(-num // (2 * AMX_ROWS)), 0
    for index in range(parts):
        n = index * 2 * AMX_ROWS
        ahead = AMX_PREFETCH_BYTES if parts == 1 else 4 * GROUP * (depth + depth * index // parts)
        left = min(2 * AMX_ROWS, num - n)
        rows = left if left <= AMX_ROWS else (left + 1) // 2
        if rows != configured:
            configure_amx(rows)
            configured = rows
        if left <= AMX_ROWS:
            amx_tile(1, x, n, n, weight, bias, g, ahead, 4 * GROUP // parts, out, o)
        else:
            amx_tile(2, x, n, n + left - rows, weight, bias, g, ahead, 4 * GROUP // parts, out, o)
    release_amx()


@parallel_kernel
def linear_amx(x: Any, weight: Any, bias: Any, out: Any, threads: int) -> None:
    """`linear` of pairs of bfloat16, by AMX: x int32[N, I / 2], I a multiple of 2 · AMX_PAIRS. Needs `has_amx`.

    Of more rows than two matrix registers hold, each part asks for a share of the weights of the next group of outputs."""
    num, num_out = out.shape
    shares = _shares_of_threads(len(weight), threads)
    for thread in numba.prange(threads):
        while True:
            g = _next_item(shares, thread)
            if g < 0:
                break
            whole = min(GROUP, num_out - g * GROUP)
            if whole == GROUP:
                _amx_rows(x, weight, bias, g, out, g * GROUP)
            else:
                spare = np.empty((num, GROUP), np.float32)
                _amx_rows(x, weight, bias, g, spare, 0)
                for n in range(num):
                    for i in range(whole):
                        out[n, g * GROUP + i] = spare[n, i]


class VisibleKeys(NamedTuple):
    """What the rows of a step see, as `attention_float32` says."""

    part_entry: Any
    part_start: Any
    first: Any
    length: Any
    blocks: Any
    block_size: int
    node_start: Any
    nodes: Any


@part
def _scores(x, first, last, keys, cells, h, out, j):
    """out[m, j + i] = x[m] · keys[cells[i], h] for first <= m < last. `cells` are filled up to a multiple of DOT_KEYS, and so is `out`."""
    dim = x.shape[1]
    whole = dim // LANES * LANES
    for k in range(0, len(cells), DOT_KEYS):
        m = first
        while whole > 0 and m < last:
            rows = min(DOT_ROWS, last - m)
            if rows >= 6:
                dot_tile(6, x, m, keys, cells, k, h, out, j + k)
                m += 6
            elif rows >= 4:
                dot_tile(4, x, m, keys, cells, k, h, out, j + k)
                m += 4
            elif rows == 3:
                dot_tile(3, x, m, keys, cells, k, h, out, j + k)
                m += 3
            elif rows == 2:
                dot_tile(2, x, m, keys, cells, k, h, out, j + k)
                m += 2
            else:
                dot_tile(1, x, m, keys, cells, k, h, out, j + k)
                m += 1
        if whole < dim:
            for m in range(first, last):
                for i in range(k, k + DOT_KEYS):
                    total = np.float32(0) if whole == 0 else out[m, j + i]
                    for d in range(whole, dim):
                        total += x[m, d] * load(keys[cells[i], h, d])
                    out[m, j + i] = total


@part
def _weighted(x, first, last, j, values, cells, h, out):
    """out[m] += Σ_i x[m, j + i] · values[cells[i], h] for first <= m < last."""
    dim = out.shape[1]
    whole = dim // CHUNK * CHUNK
    if len(cells) == 0:
        return
    for d in range(0, whole, CHUNK):
        m = first
        while m < last:
            rows = min(SUM_ROWS, last - m)
            if rows >= 8:
                sum_tile(8, x, m, j, values, cells, h, out, d)
                m += 8
            elif rows >= 6:
                sum_tile(6, x, m, j, values, cells, h, out, d)
                m += 6
            elif rows >= 4:
                sum_tile(4, x, m, j, values, cells, h, out, d)
                m += 4
            elif rows == 3:
                sum_tile(3, x, m, j, values, cells, h, out, d)
                m += 3
            elif rows == 2:
                sum_tile(2, x, m, j, values, cells, h, out, d)
                m += 2
            else:
                sum_tile(1, x, m, j, values, cells, h, out, d)
                m += 1
    for i in range(len(cells) if whole < dim else 0):
        for m in range(first, last):
            for d in range(whole, dim):
                out[m, d] += x[m, j + i] * load(values[cells[i], h, d])


@parallel_kernel
def attention_float32(
    query: Any,
    keys: Any,
    values: Any,
    seen: VisibleKeys,
    scaling: float,
    softcap: float,
    sinks: Any,
    out: Any,
    threads: int,
) -> None:
    """Attention of row n of query float32[N, H, D] over keys and values T[C, S, D]: out[N, H · D], float32 or bfloat16.

    Rows part_start[i] to part_start[i + 1] belong to entry b = part_entry[i]. Each sees positions first[n] to length[b] of it, whose cell i
    is cell i mod block_size of block i div block_size of blocks int64[B, M]; and behind them the cells
    nodes[node_start[n] : node_start[n + 1]], whose positions follow, from first[n] on. Rows of no entry (-1) are padding and get 0.
    Scores s become softcap · tanh(s / softcap), if that is above 0. sinks float32[H]: one more score a head, whose weight nobody gets; -inf
    if there is none.
    """
    part_entry, part_start, first, length, blocks, block_size, node_start, nodes = seen
    heads, shared = query.shape[1], keys.shape[1]
    group, dim, dim_v = heads // shared, query.shape[2], values.shape[2]
    shares = _shares_of_threads(len(part_entry) * shared, threads)
    for thread in numba.prange(threads):
        while True:
            item = _next_item(shares, thread)
            if item < 0:
                break
            p, h = item // shared, item % shared
            b, low, high = part_entry[p], part_start[p], part_start[p + 1]
            if b < 0:
                out[low:high, h * group * dim_v : (h + 1) * group * dim_v] = 0
                continue
            start, most = length[b], 0
            for n in range(low, high):
                start, most = min(start, first[n]), max(most, node_start[n + 1] - node_start[n])
            num = length[b] - start
            cells = np.empty(num + DOT_KEYS, np.int64)
            i = 0
            while i < num:
                block, offset = (start + i) // block_size, (start + i) % block_size
                here = blocks[b, block] * block_size + offset
                for k in range(min(block_size - offset, num - i)):
                    cells[i + k] = here + k
                i += block_size - offset
            padded = -(-num // DOT_KEYS) * DOT_KEYS
            for i in range(num, padded):
                cells[i] = cells[0]
            num_heads = (high - low) * group
            x = np.empty((num_heads, dim), np.float32)
            for n in range(low, high):
                for g in range(group):
                    for d in range(dim):
                        x[(n - low) * group + g, d] = query[n, h * group + g, d] * np.float32(scaling)
            weight = np.empty((num_heads, num + most + DOT_KEYS), np.float32)
            found = np.zeros((num_heads, dim_v), np.float32)
            own = np.empty(most + DOT_KEYS, np.int64)
            # The committed keys for all rows, then the nodes of each row: in one loop, since each call of `_scores` and `_weighted` is
            # inlined, and takes seconds to compile.
            begin, end, their_cells, column = 0, num_heads, cells[:padded], 0
            for n in range(low - 1, high):
                if n >= low:
                    begin, end, column = (n - low) * group, (n - low + 1) * group, num
                    count = node_start[n + 1] - node_start[n]
                    for i in range(count):
                        own[i] = nodes[node_start[n] + i]
                    padded = -(-count // DOT_KEYS) * DOT_KEYS
                    for i in range(count, padded):
                        own[i] = own[0]
                    their_cells = own[:padded]
                _scores(x, begin, end, keys, their_cells, h, weight, column)
            for n in range(low, high):
                count, m = node_start[n + 1] - node_start[n], (n - low) * group
                skipped = min(first[n], length[b]) - start
                for g in range(group):
                    score = weight[m + g, skipped : num + count]
                    if softcap > 0:
                        for j in range(len(score)):
                            score[j] = np.float32(softcap * np.tanh(score[j] / softcap))
                    _softmax(score, len(score), sinks[h * group + g])
                    weight[m + g, :skipped] = 0
            begin, end, their_cells, column = 0, num_heads, cells[:num], 0
            for n in range(low - 1, high):
                if n >= low:
                    begin, end, column = (n - low) * group, (n - low + 1) * group, num
                    their_cells = nodes[node_start[n] : node_start[n + 1]]
                _weighted(weight, begin, end, column, values, their_cells, h, found)
            for n in range(low, high):
                for g in range(group):
                    for d in range(dim_v):
                        store(out, n, (h * group + g) * dim_v + d, found[(n - low) * group + g, d])


class Workspace(NamedTuple):
    """Arrays that one thread of `attention_amx` works in: for n positions, keys of D and values of D' dimensions."""

    cells: Any  # int64[n]
    score: Any  # float32[n, AMX_ROWS]
    query: Any  # int16[AMX_ROWS, D]
    query_pairs: Any  # int32[D / 2, AMX_ROWS]
    keys: Any  # int32[AMX_ROWS, 1, D / 2]
    values: Any  # int32[2, AMX_PAIRS, AMX_VALUES]
    none: Any  # int16[D'], zeros
    own_cells: Any  # int64[AMX_KEYS]
    own_weight: Any  # int32[2, AMX_ROWS, AMX_PAIRS]
    most: Any  # float32[AMX_ROWS]
    total: Any  # float32[AMX_ROWS]
    found: Any  # float32[AMX_ROWS, D']


@part
def _scores_amx(keys, h, first, last, workspace):
    """score[i, r] = Σ_d query[r, d] · keys[cells[i], h, d] for first <= i < last by AMX. last - first: a multiple of AMX_ROWS; the cell -1
    gives any result."""
    cells, query, score, copied = workspace.cells, workspace.query_pairs, workspace.score, workspace.keys
    for k in range(first, last, AMX_ROWS):
        is_run = cells[k] >= 0
        for i in range(AMX_ROWS):
            is_run &= cells[k + i] == cells[k] + i
        if is_run:
            amx_scores(keys, cells[k], h, query, score, k)
        else:
            for i in range(AMX_ROWS):
                cell = max(cells[k + i], 0)
                for d in range(keys.shape[2]):
                    copied[i, 0, d] = keys[cell, h, d]
            amx_scores(copied, 0, 0, query, score, k)


@numba.njit(fastmath=False, forceinline=True)  # else as around it, in an order that depends on the number of heads
def _weights_amx(num_heads, score, scaling, most, total, weight):
    """`weight_tile` of so many columns."""
    if num_heads <= 4:
        weight_tile(4, score, scaling, most, total, weight)
    elif num_heads <= 8:
        weight_tile(8, score, scaling, most, total, weight)
    else:
        weight_tile(16, score, scaling, most, total, weight)


@part
def _attended_amx(blocks, values, h, d, low, high, group, length, num_common, start, seen, weight, workspace):
    """found[r, d : d + blocks · AMX_KEYS] = Σ_k weight of k and r · values[k], as `pairs_tile` orders them: first the products that all
    rows have in common, then those of each row, in the order of positions.

    A product follows when the values of the next one have been read: matrix registers wait for memory that has just been written."""
    # names for them here: each access to a field would count a reference
    cells, pairs, none, own_cells, own_weight = (
        workspace.cells,
        workspace.values,
        workspace.none,
        workspace.own_cells,
        workspace.own_weight,
    )
    first, node_start, nodes = seen.first, seen.node_start, seen.nodes
    whole, num = num_common // AMX_KEYS, 0
    amx_clear(blocks)
    for i in range(whole):
        for k in range(AMX_PAIRS):
            pairs_tile(blocks, values, none, cells, i * AMX_KEYS + 2 * k, h, d, pairs, i % 2, k)
        if i > 0:
            amx_add(blocks, weight, i - 1, pairs, (i - 1) % 2)
    if whole > 0:
        amx_add(blocks, weight, whole - 1, pairs, (whole - 1) % 2)
    for n in range(low, high):
        begin = max(first[n], length) - start
        end = begin + node_start[n + 1] - node_start[n]
        for i in range(max(whole, begin // AMX_KEYS), -(-end // AMX_KEYS)):
            own = num % 2
            for k in range(AMX_KEYS):
                position = i * AMX_KEYS + k
                own_cells[k] = cells[position] if position < num_common else -1
                if max(begin, num_common) <= position < end:
                    own_cells[k] = nodes[node_start[n] + position - begin]
            for r in range(AMX_ROWS):
                is_own = (n - low) * group <= r < (n - low + 1) * group
                for k in range(AMX_PAIRS):
                    own_weight[own, r, k] = weight[i, r, k] if is_own else 0
            for k in range(AMX_PAIRS):
                pairs_tile(blocks, values, none, own_cells, 2 * k, h, d, pairs, own, k)
            if num > 0:
                amx_add(blocks, own_weight, 1 - own, pairs, 1 - own)
            num += 1
    if num > 0:
        amx_add(blocks, own_weight, (num - 1) % 2, pairs, (num - 1) % 2)
    amx_store(blocks, workspace.found, d)


@part
def _attend_amx(low, high, b, h, query, keys, values, seen, scaling, softcap, sinks, out, workspace):
    """`attention_amx` of rows low to high of entry b, for the heads that share keys and values h: at most AMX_ROWS in all."""
    dim, dim_v, group = query.shape[2], values.shape[2], query.shape[1] // values.shape[1]
    first, nodes, node_start, blocks, block_size = seen.first, seen.nodes, seen.node_start, seen.blocks, seen.block_size
    length, cells, score, found, rounded = (
        seen.length[b],
        workspace.cells,
        workspace.score,
        workspace.found,
        workspace.query,
    )
    most, total, query_pairs = workspace.most, workspace.total, workspace.query_pairs
    # In positions: all rows see `begin` to `common`, and each its own behind that; `start` is where products of AMX_KEYS begin
    begin, end, least, alike = first[low], length, node_start[low + 1] - node_start[low], True
    for n in range(low, high):
        count = node_start[n + 1] - node_start[n]
        begin, least, end = min(begin, first[n]), min(least, count), max(end, max(first[n], length) + count)
        alike &= first[n] <= length
    num_shared = 0  # nodes that all rows see
    for i in range(least if alike else 0):
        for n in range(low + 1, high):
            alike &= nodes[node_start[n] + i] == nodes[node_start[low] + i]
        if not alike:
            break
        num_shared += 1
    common, start = max(begin, length) + num_shared, begin // AMX_KEYS * AMX_KEYS
    num_common, span = common - start, -(-(end - start) // AMX_KEYS) * AMX_KEYS
    cells[: begin - start] = -1
    position = begin
    while position < length:
        offset = position % block_size
        here = blocks[b, position // block_size] * block_size + offset
        steps = min(block_size - offset, length - position)
        for i in range(steps):
            cells[position - start + i] = here + i
        position += steps
    for i in range(num_shared):
        cells[length - start + i] = nodes[node_start[low] + i]
    cells[num_common:span] = -1
    # Behind `span`: the nodes that not all rows see, one row after the other
    last = span
    for n in range(low, high):
        for i in range(node_start[n] + num_shared, node_start[n + 1]):
            cells[last] = nodes[i]
            last += 1
    rounded[:] = 0
    for n in range(low, high):
        for g in range(group):
            for d in range(dim):
                store(rounded, (n - low) * group + g, d, query[n, h * group + g, d])
    words = rounded.view(np.int32)
    for d in range(0, dim // 2, AMX_PAIRS):
        transpose_tile(words, 0, d, query_pairs, d)
    configure_amx(AMX_ROWS)
    scored, all_scored = -(-num_common // AMX_ROWS) * AMX_ROWS, span + -(-(last - span) // AMX_ROWS) * AMX_ROWS
    cells[last:all_scored] = -1
    _scores_amx(keys, h, 0, scored, workspace)
    _scores_amx(keys, h, span, all_scored, workspace)
    score[: begin - start] = -np.inf
    score[num_common:span] = -np.inf
    last = span
    for n in range(low, high):
        position = max(first[n], common) - start
        for r in range((n - low) * group, (n - low + 1) * group):
            for i in range(max(0, first[n] - begin)):
                score[begin - start + i, r] = -np.inf
            for i in range(node_start[n + 1] - node_start[n] - num_shared):
                score[position + i, r] = score[last + i, r]
        last += node_start[n + 1] - node_start[n] - num_shared
    num_heads = (high - low) * group
    if softcap > 0:
        for i in range(span):
            for r in range(num_heads):
                if score[i, r] > -np.inf:
                    score[i, r] = np.float32(softcap * np.tanh(score[i, r] * scaling / softcap))
        scaling = 1.0
    total[:] = 0
    most[:] = -np.inf
    for r in range(num_heads):
        most[r] = sinks[h * group + r % group] / scaling
    # The weights take the place of the scores, and then of what they are transposed from
    found_scores, weight = score[:span], score.view(np.int32)[: span // 2]
    column_max_tile(found_scores, most)
    _weights_amx(num_heads, found_scores, np.float32(scaling), most, total, weight)
    for i in range(0, span // 2, AMX_PAIRS):
        transpose_tile(weight, i, 0, weight, i)
    products = weight.reshape(span // AMX_KEYS, AMX_ROWS, AMX_PAIRS)
    configure_amx(num_heads)
    d = 0
    while d < dim_v:
        if dim_v - d >= AMX_VALUES:
            _attended_amx(2, values, h, d, low, high, group, length, num_common, start, seen, products, workspace)
            d += AMX_VALUES
        else:
            _attended_amx(1, values, h, d, low, high, group, length, num_common, start, seen, products, workspace)
            d += AMX_KEYS
    release_amx()
    for n in range(low, high):
        for g in range(group):
            r, sink = (n - low) * group + g, sinks[h * group + g]
            scale = total[r] + (_exp(np.float32(sink - most[r] * scaling)) if sink > -np.inf else np.float32(0))
            scale = np.float32(1) / scale
            for d in range(0, dim_v, AMX_KEYS):
                for i in range(AMX_PAIRS):
                    store(out, n, (h * group + g) * dim_v + d + 2 * i, found[r, d + i] * scale)
                    store(out, n, (h * group + g) * dim_v + d + 2 * i + 1, found[r, d + AMX_PAIRS + i] * scale)


@parallel_kernel
def attention_amx(
    query: Any,
    keys: Any,
    values: Any,
    seen: VisibleKeys,
    scaling: float,
    softcap: float,
    sinks: Any,
    out: Any,
    threads: int,
) -> None:
    """`attention_float32` by AMX, of keys and values in bfloat16 whose dimensions are as `fits_amx` says. Needs `has_amx`.

    Queries are rounded to bfloat16, and so are the weights of the values, before they are divided by their sum. A product of weights and
    values takes AMX_KEYS positions, from a multiple of AMX_KEYS on, whether they are committed or nodes of a tree: so the sums of a row do
    not depend on that."""
    part_entry, part_start, first, length, _, _, node_start, _ = seen
    shared, dim, dim_v = keys.shape[1], query.shape[2], values.shape[2]
    group = query.shape[1] // shared
    key_pairs, at_once = keys.view(np.int32), AMX_ROWS // group
    num_positions = 0  # positions of a part, and its nodes
    for p in range(len(part_entry)):
        for n in range(part_start[p], part_start[p + 1] if part_entry[p] >= 0 else 0):
            end = max(first[n], length[part_entry[p]]) + node_start[n + 1] - node_start[n]
            num_positions = max(num_positions, end + node_start[part_start[p + 1]] - node_start[part_start[p]])
    num_positions += 2 * AMX_KEYS  # incomplete products
    shares = _shares_of_threads(len(part_entry) * shared, threads)
    for thread in numba.prange(threads):
        workspace = Workspace(
            cells=np.empty(num_positions, np.int64),
            score=np.empty((num_positions, AMX_ROWS), np.float32),
            query=np.empty((AMX_ROWS, dim), np.int16),
            query_pairs=np.empty((dim // 2, AMX_ROWS), np.int32),
            keys=np.empty((AMX_ROWS, 1, dim // 2), np.int32),
            values=np.empty((2, AMX_PAIRS, AMX_VALUES), np.int32),
            none=np.zeros(dim_v, np.int16),
            own_cells=np.empty(AMX_KEYS, np.int64),
            own_weight=np.empty((2, AMX_ROWS, AMX_PAIRS), np.int32),
            most=np.empty(AMX_ROWS, np.float32),
            total=np.empty(AMX_ROWS, np.float32),
            found=np.empty((AMX_ROWS, dim_v), np.float32),
        )
        while True:
            item = _next_item(shares, thread)
            if item < 0:
                break
            p, h = item // shared, item % shared
            b = part_entry[p]
            if b < 0:
                out[part_start[p] : part_start[p + 1], h * group * dim_v : (h + 1) * group * dim_v] = 0
                continue
            for low in range(part_start[p], part_start[p + 1], at_once):
                high = min(low + at_once, part_start[p + 1])
                _attend_amx(low, high, b, h, query, key_pairs, values, seen, scaling, softcap, sinks, out, workspace)


def fits_amx(heads: int, shared: int, dim: int, dim_v: int) -> bool:
    """Whether `attention_amx` takes queries [·, heads, dim] of keys [·, shared, dim] and values [·, shared, dim_v]."""
    return dim % (2 * AMX_PAIRS) == 0 and dim_v % AMX_KEYS == 0 and heads // shared <= AMX_ROWS


def attention(
    query: Any, keys: Any, values: Any, seen: VisibleKeys, *, scaling: float, softcap: float, sinks: Any, out: Any
) -> None:
    """`attention_float32`, or `attention_amx` where layers in bfloat16 use AMX too."""
    arguments = query, keys, values, seen, scaling, softcap, sinks, out, follow_torch_threads()
    dims = (query.shape[1], keys.shape[1], query.shape[2], values.shape[2])
    if keys.dtype == np.int16 and bf16_arithmetic() is Arithmetic.AMX and fits_amx(*dims):
        attention_amx(*arguments)
    else:
        attention_float32(*arguments)


@parallel_kernel
def gate(gate_up: Any, out: Any) -> None:
    """SiLU of the first half of gate_up float32[N, 2I] times its second half: out T[N, I]."""
    num, size = out.shape
    for n in numba.prange(num):
        for i in range(size):
            x = gate_up[n, i]
            store(out, n, i, x / (np.float32(1) + _exp(-x)) * gate_up[n, size + i])


@cache
def has_amx() -> bool:
    """Whether this processor has AMX for bfloat16, and `vdpbf16ps`, which all with AMX have, and whether the operating system lets this
    process use it: Linux grants it to each process that asks."""
    features = get_host_cpu_features()
    if LANES != 16 or not all(features.get(one) for one in ("amx-tile", "amx-bf16", "avx512bf16")):
        return False
    denied: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return denied == 0


@cache
def bf16_arithmetic() -> Arithmetic:
    """The fastest way to multiply layers in bfloat16 on this machine."""
    if has_amx():
        log.info("bfloat16 layers: AMX")
        return Arithmetic.AMX
    return Arithmetic.DOT if has_fast_bf16_dot() else Arithmetic.FLOAT32


@cache
def has_fast_bf16_dot() -> bool:
    """Whether products of bfloat16 inputs and weights by `vdpbf16ps` are faster here than those in float32.

    Measured once per machine and kept beside the compiled kernels: processes that take sessions over from one another must agree, because
    the two differ in the last bits. On AMD EPYCs of Zen 4 and Zen 5 the instruction is 1.8 times as fast, on an Intel Xeon without AMX half
    as fast."""
    features = get_host_cpu_features()
    if LANES != 16 or not features.get("avx512bf16"):
        return False
    kept = Path(numba.config.CACHE_DIR) / f"bf16-dot-{get_host_cpu_name()}.txt"
    try:
        gain = float(kept.read_text())
    except (OSError, ValueError):
        gain = _gain_of_bf16_dot()
        with suppress(OSError):
            kept.write_text(f"{gain:.2f}\n")
    fast = gain >= LEAST_DOT_GAIN
    log.info("bfloat16 layers: %s (vdpbf16ps is %.2f times as fast)", "vdpbf16ps" if fast else "float32 products", gain)
    return fast


def _gain_of_bf16_dot(rows: int = 16, num_in: int = 576, num_out: int = 1536, repeats: int = 40) -> float:
    """Time of one layer of 16 rows by float32 products over that by `vdpbf16ps`: each the best of some runs on one thread, in turn.

    Threads would wait for one another where something else runs on the machine."""
    weight, bias = packed(torch.zeros(num_out, num_in, dtype=torch.bfloat16)), packed_bias(None, num_out)
    inputs = np.zeros((rows, num_in), np.float32), np.zeros((rows, num_in // 2), np.int32)
    out, best = np.empty((rows, num_out), np.float32), [np.inf, np.inf]
    num_threads = numba.get_num_threads()
    numba.set_num_threads(1)
    for repeat in range(repeats + 1):
        for i, x in enumerate(inputs):
            begun_s = time.perf_counter()
            linear(x, weight, bias, out, 1)
            if repeat:  # the first call compiles
                best[i] = min(best[i], time.perf_counter() - begun_s)
    numba.set_num_threads(num_threads)
    return best[0] / best[1]


def packed(weight: torch.Tensor) -> Any:
    """A layer's weight [O, I], float32 or bfloat16, as `linear` takes it: [⌈O / GROUP⌉, I, GROUP], or with half as many pairs."""
    num_out, num_in = weight.shape
    odd = num_in % 2 if weight.dtype == torch.bfloat16 else 0
    filled = functional.pad(weight.detach(), (0, odd, 0, -num_out % GROUP))
    words = filled if weight.dtype == torch.float32 else filled.view(torch.int32)
    return words.view(-1, GROUP, words.shape[1]).transpose(1, 2).contiguous().numpy()


def compact(words: Any) -> Any:
    """Weights in bfloat16 that `packed` has put into order, in three quarters of the bytes and as exact (`cpu_tiles`); None: the number of
    inputs is no multiple of 2 · COMPACT_PAIRS, or there are too many outliers.

    That the exponents of trained weights hold fewer than three bits of information is known: Zhang et al. 2025 (arXiv:2504.11651), who code
    them in a varying number of bits for GPUs. A fixed number is decoded as fast as it is read from memory."""
    num_groups, depth, _ = words.shape
    if depth % COMPACT_PAIRS:
        return None
    most = GROUP * 2 * depth // WEIGHTS_PER_OUTLIER
    size = COMPACT_START + depth // COMPACT_PAIRS * COMPACT_BLOCK + 4 * (1 + 2 * most)
    out = torch.empty(num_groups, -(-size // CACHE_LINE) * CACHE_LINE, dtype=torch.uint8).numpy()
    num_outliers = np.empty(num_groups, np.int64)
    _compact_groups(words.view(np.uint16), most, out, num_outliers)
    return out if num_outliers.max() <= most else None


@parallel_kernel
def _compact_groups(halves: Any, most: int, out: Any, num_outliers: Any) -> None:
    """halves uint16[groups, pairs of inputs, 2 · GROUP]; num_outliers int64[groups]: of which `most` are kept."""
    for g in numba.prange(len(halves)):
        num_outliers[g] = _compact_group(halves, g, most, out)


@part
def _compact_group(halves, g, most, out):
    depth, width = halves.shape[1:]
    count = np.zeros(256, np.int64)
    for k in range(depth):
        for i in range(width):
            count[(halves[g, k, i] >> 7) & 255] += 1
    out[g] = 0
    code_of = np.full(256, NUM_EXPONENTS, np.uint8)
    for code in range(NUM_EXPONENTS):
        exponent = np.argmax(count)
        count[exponent] = -1
        code_of[exponent] = code
        out[g, code], out[g, 16 + code] = (exponent & 1) << 7, exponent >> 1
    outliers, first, num = out.view(np.int32), (COMPACT_START + depth // COMPACT_PAIRS * COMPACT_BLOCK) // 4, 0
    for k in range(depth):
        block = COMPACT_START + k // COMPACT_PAIRS * COMPACT_BLOCK
        for i in range(width):
            bits = halves[g, k, i]
            code = code_of[(bits >> 7) & 255]
            if code == NUM_EXPONENTS:
                if num < most:
                    outliers[g, first + 2 * num], outliers[g, first + 2 * num + 1] = k * width + i, bits
                num += 1
                continue
            # two vectors of 2 · LANES numbers share 4 · LANES bytes
            number = k % COMPACT_PAIRS * width + i  # in the block
            vectors, at = number // (4 * LANES), number % (4 * LANES)
            half, at = at // (2 * LANES), at % (2 * LANES)
            place = at // 8 * 16 + half * 8 + at % 8
            out[g, block + vectors // 2 * 4 * LANES + place] |= code << (4 * (vectors % 2))
            out[g, block + COMPACT_CODES + vectors * 4 * LANES + place] = (bits & 0x7F) | ((bits >> 8) & 0x80)
    outliers[g, first + 2 * min(num, most)] = END_OF_OUTLIERS
    return num


def expanded(weight: Any, num_in: int) -> Any:
    """The words that `compact` was given, for a number of inputs."""
    words = torch.empty(len(weight), (num_in + 1) // 2, GROUP, dtype=torch.int32).numpy()
    _expand_groups(weight, words)
    return words


@parallel_kernel
def _expand_groups(weight: Any, words: Any) -> None:
    """words int32[groups, pairs of inputs, GROUP]."""
    for g in numba.prange(len(weight)):
        depth = words.shape[1]
        expand_tile(weight, g, 0, depth, COMPACT_START + depth // COMPACT_PAIRS * COMPACT_BLOCK, words[g])


def packed_bias(bias: torch.Tensor | None, num_out: int) -> Any:
    """float32[⌈O / GROUP⌉, GROUP]; 0 where there is none."""
    own = torch.zeros(num_out) if bias is None else bias.detach().float()
    return functional.pad(own, (0, -num_out % GROUP)).view(-1, GROUP).numpy()


def unpacked(weight: Any, outputs: torch.Tensor, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [n, I] of a layer's weight that `packed` has put into order, for these outputs int64[n]."""
    words = torch.from_numpy(weight)[outputs // GROUP, :, outputs % GROUP]
    return words.view(dtype).narrow(1, 0, num_in)
