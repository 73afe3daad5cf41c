"""Linear layers on a CPU: the same bits for a row whatever is computed beside it, compiled for this processor by numba.

Libraries take other kernels for other numbers of rows, and these add up in other orders. Here every output is one chain of
multiplications and additions over the inputs in their order, so the number of rows decides nothing but how often weights are loaded: a
tile of some rows and some vectors of outputs stays in registers while the inputs pass by. Few rows are as fast as the weights come from
memory.

Weights lie in the order in which they are read: groups of `GROUP` outputs, in each the inputs in order. Weights in bfloat16 come in pairs
of inputs, each pair an int32, and become float32 on the way: the instruction for such pairs (`vdpbf16ps`) does half as much on the Intel
Xeon where it was measured, and rounds the inputs.

Legend: N rows, I inputs, K = I, or ⌈I / 2⌉ for bfloat16, O outputs, G groups of outputs.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator,misc,no-any-return"
from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import prange, types
from numba.core.cgutils import get_or_insert_function, unpack_tuple
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from torch.nn import functional

from rootward.engine.cpu_kernels import parallel_kernel, part

FEATURES = get_host_cpu_features()
# numbers in a vector, rows and vectors of a tile: what the registers hold (32, or 16 with AVX2)
if FEATURES.get("avx512f"):
    LANES, TILE_ROWS, TILE_VECTORS = 16, 8, 3
elif platform.machine() in ("aarch64", "arm64"):
    LANES, TILE_ROWS, TILE_VECTORS = 4, 6, 4
else:
    LANES, TILE_ROWS, TILE_VECTORS = 8, 6, 2
GROUP = LANES * TILE_VECTORS
BYTES = 4  # of a float32, and of a pair of bfloat16


INT, LONG, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
INTS, FLOATS = ir.VectorType(INT, LANES), ir.VectorType(FLOAT, LANES)


@intrinsic(prefer_literal=True)
def _tile(context: Any, rows: Any, x: Any, n: Any, weight: Any, g: Any, bias: Any, out: Any, m: Any, o: Any) -> Any:
    """out[m + r, o + i] = bias[g, i] + Σ_k weight[g, k, i] · x[n + r, k] for `rows` (a literal) rows r and i < GROUP."""
    if not isinstance(rows, types.IntegerLiteral):
        return None

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        kinds = dict(zip(("rows", "x", "n", "weight", "g", "bias", "out", "m", "o"), signature.args, strict=True))
        value = dict(zip(kinds, values, strict=True))
        pairs = kinds["weight"].dtype == types.int32
        num_rows, vectors = kinds["rows"].literal_value, range(TILE_VECTORS)
        tile = [(row, vector) for row in range(num_rows) for vector in vectors]
        none, zeros = ir.Constant(FLOATS, ir.Undefined), ir.Constant(INTS, [0] * LANES)
        fma_type = ir.FunctionType(FLOATS, [FLOATS] * 3)
        fma = get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{LANES}f32")

        def array_of(name: str) -> Any:
            return make_array(kinds[name])(context, builder, value[name])

        def stride(name: str, axis: int) -> Any:
            return unpack_tuple(builder, array_of(name).strides, kinds[name].ndim)[axis]

        def address(name: str, *index: Any) -> Any:
            found = builder.ptrtoint(array_of(name).data, LONG)
            for axis, i in enumerate(index):
                found = builder.add(found, builder.mul(i, stride(name, axis)))
            return found

        def at(base: Any, offset: Any, of: ir.Type) -> Any:
            return builder.inttoptr(builder.add(base, offset), ir.PointerType(of))

        def load(base: Any, offset: Any, of: ir.Type) -> Any:
            loaded = builder.load(at(base, offset, of))
            loaded.align = BYTES
            return loaded

        def everywhere(number: Any) -> Any:
            return builder.shuffle_vector(builder.insert_element(none, number, INT(0)), none, zeros)

        x, weight, bias = address("x", value["n"]), address("weight", value["g"]), address("bias", value["g"])
        out, out_stride, x_stride = address("out", value["m"], value["o"]), stride("out", 0), stride("x", 0)
        num = unpack_tuple(builder, array_of("weight").shape, 3)[1]
        first = [load(bias, LONG(BYTES * LANES * vector), FLOATS) for vector in vectors]
        before, loop, after = builder.block, builder.append_basic_block("inputs"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        k, total = builder.phi(LONG), {place: builder.phi(FLOATS) for place in tile}
        here = builder.add(weight, builder.mul(k, LONG(BYTES * GROUP)))
        words = [load(here, LONG(BYTES * LANES * vector), INTS if pairs else FLOATS) for vector in vectors]
        inputs = builder.add(x, builder.mul(k, LONG(2 * BYTES if pairs else BYTES)))
        steps = [words]
        if pairs:
            sixteen, upper = ir.Constant(INTS, [16] * LANES), ir.Constant(INTS, [0xFFFF0000] * LANES)
            steps = [
                [builder.bitcast(builder.shl(word, sixteen), FLOATS) for word in words],
                [builder.bitcast(builder.and_(word, upper), FLOATS) for word in words],
            ]
        found = dict(total)
        for i, weights in enumerate(steps):
            for row in range(num_rows):
                offset = builder.add(builder.mul(x_stride, LONG(row)), LONG(BYTES * i))
                one = everywhere(load(inputs, offset, FLOAT))
                for vector in vectors:
                    found[row, vector] = builder.call(fma, [one, weights[vector], found[row, vector]])
        following = builder.add(k, LONG(1))
        k.add_incoming(LONG(0), before)
        k.add_incoming(following, loop)
        for row, vector in tile:
            total[row, vector].add_incoming(first[vector], before)
            total[row, vector].add_incoming(found[row, vector], loop)
        builder.cbranch(builder.icmp_signed("<", following, num), loop, after)
        builder.position_at_end(after)
        for row, vector in tile:
            offset = builder.add(builder.mul(out_stride, LONG(row)), LONG(BYTES * LANES * vector))
            builder.store(found[row, vector], at(out, offset, FLOATS)).align = BYTES
        return context.get_dummy_value()

    return types.void(rows, x, types.intp, weight, types.intp, bias, out, types.intp, types.intp), generate


@part
def _rows(num, x, n, weight, g, bias, out, m, o):
    """`_tile` of a number of rows that is known only now."""
    if num == 8 and TILE_ROWS >= 8:
        _tile(8, x, n, weight, g, bias, out, m, o)
    elif num == 7 and TILE_ROWS >= 7:
        _tile(7, x, n, weight, g, bias, out, m, o)
    elif num == 6:
        _tile(6, x, n, weight, g, bias, out, m, o)
    elif num == 5:
        _tile(5, x, n, weight, g, bias, out, m, o)
    elif num == 4:
        _tile(4, x, n, weight, g, bias, out, m, o)
    elif num == 3:
        _tile(3, x, n, weight, g, bias, out, m, o)
    elif num == 2:
        _tile(2, x, n, weight, g, bias, out, m, o)
    else:
        _tile(1, x, n, weight, g, bias, out, m, o)


@parallel_kernel
def linear(x, weight, bias, out):
    """out float32[N, O] = bias float32[G, GROUP] + x float32[N, I] · weight [G, K >= 1, GROUP], float32 or pairs (then I is even)."""
    num, num_out = out.shape
    for g in prange(len(weight)):
        whole = min(GROUP, num_out - g * GROUP)
        spare = np.empty((TILE_ROWS if whole < GROUP else 0, GROUP), np.float32)
        for n in range(0, num, TILE_ROWS):
            rows = min(TILE_ROWS, num - n)
            if whole == GROUP:
                _rows(rows, x, n, weight, g, bias, out, n, g * GROUP)
            else:
                _rows(rows, x, n, weight, g, bias, spare, 0, 0)
                out[n : n + rows, g * GROUP :] = spare[:rows, :whole]


def packed(weight: torch.Tensor) -> Any:
    """A layer's weight [O, I], float32 or bfloat16, as `linear` takes it."""
    num_out, num_in = weight.shape
    groups = -(-num_out // GROUP)
    even = num_in % 2 if weight.dtype == torch.bfloat16 else 0
    filled = functional.pad(weight.detach(), (0, even, 0, groups * GROUP - num_out))
    words = filled if weight.dtype == torch.float32 else filled.view(torch.int32)
    return words.view(groups, GROUP, -1).transpose(1, 2).contiguous().numpy()


def packed_bias(bias: torch.Tensor | None, num_out: int) -> Any:
    groups = -(-num_out // GROUP)
    found = torch.zeros(groups * GROUP)
    if bias is not None:
        found[:num_out] = bias.detach().float()
    return found.view(groups, GROUP).numpy()


def unpacked(weight: Any, outputs: torch.Tensor, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [n, I] of a layer's weight that `packed` has put into order, for these outputs int64[n]."""
    words = torch.from_numpy(weight)[outputs // GROUP, :, outputs % GROUP]
    return words.view(dtype).narrow(1, 0, num_in)
