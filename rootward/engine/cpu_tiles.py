"""The inner loops of products on a CPU, written for its vector registers; `cpu_kernels` calls them.

Each function is inlined where numba compiles a call of it. A *tile* is some rows and some vectors of results, which stay in registers while
what is added up passes by. Every number is one chain of multiplications and additions in a fixed order, so a row has the same bits in
whatever tile it is computed, and the number of rows decides nothing but how often the other operand is loaded.

Types T are float32 and bfloat16; numba does not know the second, which comes as int16, or as int32 in pairs of which the lower half is the
first. Weights in pairs become float32 in registers where the inputs of a layer are float32; inputs in pairs are multiplied as they are, by
the instruction `vdpbf16ps`, or by `tdpbf16ps` of Intel's matrix extension AMX, whose registers hold 16 rows of 64 bytes.
`cpu_kernels.bf16_arithmetic` says which is the fastest.

Compact weights are bfloat16 in 12 bits, as uint8[groups, bytes]. Nearly all weights of a group of outputs have one of 16 exponents, so a
weight is its sign, its 7 bits of mantissa and a code of 4 bits for the exponent. A group: two tables of 16 bytes, by code the lower and the
upper byte of a bfloat16 that has this exponent; from byte COMPACT_START blocks of COMPACT_PAIRS pairs of inputs; then the outliers, weights
that have another exponent, each as two int32, its place in uint16[I / 2, 2 · GROUP] and its bits, by increasing place; END_OF_OUTLIERS is
the last place. The vectors of a block, three for each pair, are decoded two at a time: a block begins with a vector of codes for every four
of them, then has one of signs and mantissas for every two.
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,untyped-decorator,misc,no-any-return"
from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import reduce, wraps
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core.cgutils import alloca_once, alloca_once_value, get_or_insert_function, unpack_tuple
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

# numbers in a vector, and rows of a tile with three, two and four vectors: what the registers hold (32, or 16 with AVX2)
if get_host_cpu_features().get("avx512f"):
    LANES, LINEAR_ROWS, SUM_ROWS, DOT_ROWS = 16, 8, 8, 6
elif platform.machine() in ("aarch64", "arm64"):
    LANES, LINEAR_ROWS, SUM_ROWS, DOT_ROWS = 4, 8, 8, 6
else:
    LANES, LINEAR_ROWS, SUM_ROWS, DOT_ROWS = 8, 4, 6, 2
LINEAR_VECTORS, SUM_VECTORS, DOT_KEYS = 3, 2, 4
LINEAR_STEPS = 64  # of a part of the weights that tiles of a step with many rows share
GROUP = LANES * LINEAR_VECTORS  # outputs of a linear layer that lie side by side
COMPACT_PAIRS = 4  # pairs of inputs in a block of compact weights, which needs vectors of 64 bytes
COMPACT_START = 64  # bytes before the first block of a group
COMPACT_CODES = COMPACT_PAIRS * GROUP  # bytes of codes in a block; twice as many of signs and mantissas follow
COMPACT_BLOCK = 3 * COMPACT_CODES
NUM_EXPONENTS = 16  # that have a code
END_OF_OUTLIERS = (1 << 31) - 1
AMX_ROWS = 16  # of a matrix register
AMX_PAIRS = 16  # pairs of bfloat16 in a row of a matrix register
AMX_KEYS = 2 * AMX_PAIRS  # that one product of weights and values adds up; also the dimensions of a block of values
AMX_VALUES = 2 * AMX_KEYS  # dimensions of values whose sums the matrix registers hold
SOFTMAX_KEYS = 8  # whose weights are computed together, and added up to as many sums
CHUNK = LANES * SUM_VECTORS
# How far weights are asked for ahead of their use. Without it a step of few rows takes twice as long; 4 KiB to 54 KiB are about the same.
# They are read once in a step, so they wait in the nearest cache alone, which may have 32 KiB; with AMX, where this is not measured, in
# all caches.
PREFETCH_BYTES, AMX_PREFETCH_BYTES = 4 << 10, 16 << 10
CACHE_LINE = 64  # bytes
PREFETCH_CELLS = 16  # the same for keys and values, most of which lie in the order of positions

BYTE, HALF, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
HALVES, INTS, FLOATS = (ir.VectorType(kind, LANES) for kind in (HALF, INT, FLOAT))
BYTES = ir.VectorType(BYTE, 4 * LANES)
SIXTEEN, LOWER, UPPER = (ir.Constant(INTS, [number] * LANES) for number in (16, 0xFFFF, 0xFFFF0000))
Value = Any  # of LLVM


class Code:
    """What is generated in one call of a tile: its arguments by name, and the operations on them."""

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any, names: str, values: Sequence[Value]):
        self.context, self.builder = context, builder
        self.kind = dict(zip(names.split(), signature.args, strict=True))
        self.value = dict(zip(self.kind, values, strict=True))

    def array(self, name: str) -> Any:
        return make_array(self.kind[name])(self.context, self.builder, self.value[name])

    def stride(self, name: str, axis: int) -> Value:
        """In bytes."""
        return unpack_tuple(self.builder, self.array(name).strides, self.kind[name].ndim)[axis]

    def size(self, name: str, axis: int) -> Value:
        return unpack_tuple(self.builder, self.array(name).shape, self.kind[name].ndim)[axis]

    def address(self, name: str, *index: Value) -> Value:
        found = self.builder.ptrtoint(self.array(name).data, LONG)
        for axis, i in enumerate(index):
            found = self.moved(found, i, self.stride(name, axis))
        return found

    def moved(self, address: Value, num: Value, stride: Value) -> Value:
        return self.builder.add(address, self.builder.mul(num, stride))

    def load(self, address: Value, kind: ir.Type) -> Value:
        loaded = self.builder.load(self.builder.inttoptr(address, ir.PointerType(kind)))
        loaded.align = 2
        return loaded

    def store(self, number: Value, address: Value) -> None:
        self.builder.store(number, self.builder.inttoptr(address, ir.PointerType(number.type))).align = 4

    def floats(self, address: Value, kind: Any) -> Value:
        """LANES numbers of numba's type `kind` as float32."""
        if kind != types.int16:
            return self.load(address, FLOATS)
        wide = self.builder.zext(self.load(address, HALVES), INTS)
        return self.builder.bitcast(self.builder.shl(wide, SIXTEEN), FLOATS)

    def prefetch(self, address: Value, *, used_once: bool = False) -> None:
        """Into the nearest cache; what is `used_once`, into that one only, without displacing anything from the others. An address of no
        memory costs nothing."""
        pointer = ir.PointerType(ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer, INT, INT, INT])
        fetch = get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(fetch, [self.builder.inttoptr(address, pointer), INT(0), INT(0 if used_once else 3), INT(1)])

    def compiler_barrier(self) -> None:
        """Loads after it read memory, not a register that holds the same value. No instruction is generated."""
        self.builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)

    def amx(self, instruction: str, *registers: int, memory: tuple[Value, Value] | None = None) -> None:
        """Of AMX, with these matrix registers; `memory`: the address of the first row, and the bytes from row to row."""
        kinds, values = [BYTE] * len(registers), [BYTE(register) for register in registers]
        if memory is not None:
            address, stride = memory
            kinds += [ir.PointerType(BYTE), LONG]
            values += [self.builder.inttoptr(address, ir.PointerType(BYTE)), stride]
        kind = ir.FunctionType(ir.VoidType(), kinds)
        self.builder.call(get_or_insert_function(self.builder.module, kind, f"llvm.x86.{instruction}"), values)

    def everywhere(self, number: Value) -> Value:
        none = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
        one = self.builder.insert_element(none, number, INT(0))
        return self.builder.shuffle_vector(one, none, ir.Constant(INTS, [0] * LANES))

    def multiply_add(self, x: Value, y: Value, total: Value) -> Value:
        kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
        return self.builder.call(
            get_or_insert_function(self.builder.module, kind, f"llvm.fma.v{LANES}f32"), [x, y, total]
        )

    def joined(self, parts: Sequence[Value]) -> Value:
        """One vector of all."""
        while len(parts) > 1:
            width = ir.Constant(ir.VectorType(INT, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
            parts = [self.builder.shuffle_vector(parts[i], parts[i + 1], width) for i in range(0, len(parts), 2)]
        return parts[0]

    def parts(self, vector: Value, num: int) -> list[Value]:
        """Vectors of `num` numbers each."""
        return [
            self.builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT, num), list(range(i, i + num))))
            for i in range(0, vector.type.count, num)
        ]

    def exponential(self, x: Value) -> Value:
        """e^x of FLOATS to 1e-7 for -87 <= x <= 88, and that of the nearer bound elsewhere: `cpu_kernels._exp`."""
        builder = self.builder

        def of(number: float) -> Value:
            return ir.Constant(FLOATS, [number] * LANES)

        for sign, bound in ((">", of(-87.0)), ("<", of(88.0))):
            x = builder.select(builder.fcmp_ordered(sign, x, bound), x, bound)
        shifted = self.multiply_add(x, of(1.44269504), of(12582912.0))
        power = builder.fsub(shifted, of(12582912.0))
        r = self.multiply_add(power, of(2.12194440e-4), self.multiply_add(power, of(-0.693359375), x))
        p = of(1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.multiply_add(p, r, of(coefficient))
        p = builder.fadd(self.multiply_add(builder.fmul(p, r), r, r), of(1.0))
        exponent = builder.shl(builder.bitcast(shifted, INTS), ir.Constant(INTS, [23] * LANES))
        return builder.bitcast(builder.add(builder.bitcast(p, INTS), exponent), FLOATS)

    def rounded(self, numbers: Value) -> Value:
        """INTS whose upper halves are the nearest bfloat16 of FLOATS, and an even one of two."""
        builder, bits = self.builder, self.builder.bitcast(numbers, INTS)
        odd = builder.and_(builder.lshr(bits, SIXTEEN), ir.Constant(INTS, [1] * LANES))
        return builder.add(builder.add(bits, ir.Constant(INTS, [0x7FFF] * LANES)), odd)

    def add_products_of_pairs(self, x: Value, y: Value, total: Value) -> Value:
        """total + x₀y₀ + x₁y₁ in every lane, of pairs of bfloat16 in INTS (`vdpbf16ps`)."""
        kind = ir.FunctionType(FLOATS, [FLOATS, INTS, INTS])
        return self.builder.call(
            get_or_insert_function(self.builder.module, kind, f"llvm.x86.avx512bf16.dpbf16ps.{32 * LANES}"),
            [total, x, y],
        )

    def loop(
        self, num: Value, first: dict[Any, Value], step: Callable[[Value, dict[Any, Value]], dict[Any, Value]]
    ) -> dict[Any, Value]:
        """What `first` has become after step(0, ·), ..., step(num - 1, ·); num >= 1."""
        builder, before = self.builder, self.builder.block
        body, after = builder.append_basic_block("step"), builder.append_basic_block("after")
        builder.branch(body)
        builder.position_at_end(body)
        k, total = builder.phi(LONG), {place: builder.phi(value.type) for place, value in first.items()}
        found = step(k, total)
        following = builder.add(k, LONG(1))
        k.add_incoming(LONG(0), before)
        last = builder.block  # `step` may have appended some
        k.add_incoming(following, last)
        for place, phi in total.items():
            phi.add_incoming(first[place], before)
            phi.add_incoming(found[place], last)
        builder.cbranch(builder.icmp_signed("<", following, num), body, after)
        builder.position_at_end(after)
        return found


def generated(names: str, *, sized: bool = False, returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Makes an intrinsic function of numba with these arguments of the function that generates its code. sized: the first argument is an
    integer that is known at compile time, and the generating function gets it, too."""

    def decorate(generate: Callable[..., Any]) -> Any:
        @wraps(generate)
        def typed(context: Any, *kinds: Any) -> Any:
            if sized and not isinstance(kinds[0], types.IntegerLiteral):
                return None
            literals = kinds[: int(sized)]
            others = (types.intp if isinstance(kind, types.Integer) else kind for kind in kinds[len(literals) :])

            def code(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[Value]) -> Any:
                sizes = (kind.literal_value for kind in literals)
                result = generate(Code(context, builder, signature, names, values), *sizes)
                return context.get_dummy_value() if result is None else result

            return returns(*literals, *others), code

        arguments = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in ("context", *names.split())]
        typed.__signature__ = Signature(arguments)  # type: ignore[attr-defined]  # which numba reads
        return intrinsic(prefer_literal=sized)(typed)

    return decorate


@generated("rows x n j weight g k num prefetched pace out m o", sized=True)
def linear_tile(code: Code, rows: int) -> None:
    """out[m + r, o + i] += Σ_s x[n + r, j + s] · weight[g, k + s, i] over 0 <= s < num, num >= 1, for r < rows and i < GROUP.

    out float32; x and weight float32, x float32 and weight pairs, or both pairs; or x pairs and weight compact, with k = 0 and all inputs.
    Meanwhile weights are prefetched from the address `prefetched` on, and from `pace` bytes further on after each k."""
    generate = _linear_compact if code.kind["weight"].dtype == types.uint8 else _linear
    generate(code, rows)


def _linear(code: Code, rows: int) -> None:
    builder, vectors, step = code.builder, range(LINEAR_VECTORS), 4 * LANES
    weight_pairs, input_pairs = (code.kind[name].dtype == types.int32 for name in ("weight", "x"))
    inputs_of_step = (
        2 if weight_pairs and not input_pairs else 1
    )  # elements of x that one k of the weight is multiplied with
    x = code.address("x", code.value["n"], builder.mul(code.value["j"], LONG(inputs_of_step)))
    weight = code.address("weight", code.value["g"], code.value["k"])
    x_stride, prefetched = code.stride("x", 0), code.value["prefetched"]
    add_product = code.add_products_of_pairs if input_pairs else code.multiply_add

    def add(k: Value, total: dict[Any, Value]) -> dict[Any, Value]:
        total = dict(total)
        here, there = code.moved(weight, k, LONG(4 * GROUP)), code.moved(prefetched, k, code.value["pace"])
        for vector in vectors:
            code.prefetch(builder.add(there, LONG(step * vector)), used_once=True)
        for i in range(inputs_of_step):
            if i > 0:
                code.compiler_barrier()  # words that stay for the second half of a pair leave too few registers with AVX2
            weights = [code.load(builder.add(here, LONG(step * v)), INTS if weight_pairs else FLOATS) for v in vectors]
            if inputs_of_step == 2:
                half = [builder.and_(word, UPPER) if i > 0 else builder.shl(word, SIXTEEN) for word in weights]
                weights = [builder.bitcast(word, FLOATS) for word in half]
            address = builder.add(code.moved(x, k, LONG(4 * inputs_of_step)), LONG(4 * i))
            for row in range(rows):
                number = code.load(code.moved(address, LONG(row), x_stride), INT if input_pairs else FLOAT)
                everywhere = code.everywhere(number)
                for vector in vectors:
                    total[row, vector] = add_product(everywhere, weights[vector], total[row, vector])
        return total

    _add_to_results(code, rows, LINEAR_VECTORS, code.value["o"], code.value["num"], add)


def _linear_compact(code: Code, rows: int) -> None:
    """Each block is decoded to a buffer: the results and the decoding together need more registers than there are."""
    builder, step = code.builder, 4 * LANES
    x, x_stride = code.address("x", code.value["n"], code.value["j"]), code.stride("x", 0)
    buffer = alloca_once(builder, ir.ArrayType(BYTES, COMPACT_PAIRS * LINEAR_VECTORS))
    buffer.align = step
    decoded, blocks, num_lines = builder.ptrtoint(buffer, LONG), CompactBlocks(code), COMPACT_BLOCK // CACHE_LINE

    def add(block: Value, total: dict[Any, Value]) -> dict[Any, Value]:
        total = dict(total)
        there = code.moved(code.value["prefetched"], block, builder.mul(code.value["pace"], LONG(COMPACT_PAIRS)))
        total["outlier"] = blocks.decode(block, total["outlier"], decoded)
        code.compiler_barrier()
        for pair in range(COMPACT_PAIRS):
            # a few at a time: a core has few loads from memory under way
            for line in range(num_lines * pair // COMPACT_PAIRS, num_lines * (pair + 1) // COMPACT_PAIRS):
                code.prefetch(builder.add(there, LONG(CACHE_LINE * line)), used_once=True)
            places = [LONG(step * (LINEAR_VECTORS * pair + vector)) for vector in range(LINEAR_VECTORS)]
            weights = [code.load(builder.add(decoded, place), INTS) for place in places]
            address = builder.add(code.moved(x, block, LONG(4 * COMPACT_PAIRS)), LONG(4 * pair))
            for row in range(rows):
                everywhere = code.everywhere(code.load(code.moved(address, LONG(row), x_stride), INT))
                for vector, own in enumerate(weights):
                    total[row, vector] = code.add_products_of_pairs(everywhere, own, total[row, vector])
            code.compiler_barrier()
        return total

    num = builder.sdiv(code.value["num"], LONG(COMPACT_PAIRS))
    _add_to_results(code, rows, LINEAR_VECTORS, code.value["o"], num, add, outlier=blocks.address(num))


def _add_to_results(
    code: Code,
    rows: int,
    vectors: int,
    column: Value,
    num: Value,
    add: Callable[[Value, dict[Any, Value]], dict[Any, Value]],
    **more: Value,
) -> None:
    """add(0, ·), ..., add(num - 1, ·), by row and vector, to the results at out[m, column]. `more` changes with them."""
    out, stride, step = code.address("out", code.value["m"], column), code.stride("out", 0), 4 * LANES
    places = {
        (row, vector): code.builder.add(code.moved(out, LONG(row), stride), LONG(step * vector))
        for row in range(rows)
        for vector in range(vectors)
    }
    found = code.loop(num, {**{place: code.load(at, FLOATS) for place, at in places.items()}, **more}, add)
    for place, at in places.items():
        code.store(found[place], at)


class CompactBlocks:
    """The blocks of weight[g], compact."""

    def __init__(self, code: Code):
        self._code, builder = code, code.builder
        group = code.address("weight", code.value["g"])
        self._lower, self._upper = (self._table(builder.add(group, LONG(at))) for at in (0, 16))
        self._first = builder.add(group, LONG(COMPACT_START))

    def address(self, block: Value) -> Value:
        """Of a block, or of the outliers, which follow the last block."""
        return self._code.moved(self._first, block, LONG(COMPACT_BLOCK))

    def decode(self, block: Value, outlier: Value, out: Value) -> Value:
        """Write the words of a block, int32[COMPACT_PAIRS, GROUP], to an address.

        outlier: address of the first outlier that is not before the block. Returns that of the first one after the block."""
        code, builder, step = self._code, self._code.builder, 4 * LANES
        here = self.address(block)
        for i in range(COMPACT_PAIRS * LINEAR_VECTORS // 2):
            codes = code.load(builder.add(here, LONG(step * (i // 2))), BYTES)
            if i % 2:  # of which every byte has two
                shorts = ir.VectorType(HALF, 2 * LANES)
                shifted = builder.lshr(builder.bitcast(codes, shorts), ir.Constant(shorts, [4] * 2 * LANES))
                codes = builder.bitcast(shifted, BYTES)
            codes = builder.and_(codes, _all_bytes(0x0F))
            rest = code.load(builder.add(here, LONG(COMPACT_CODES + step * i)), BYTES)
            lower = builder.or_(self._looked_up(self._lower, codes), builder.and_(rest, _all_bytes(0x7F)))
            upper = builder.or_(self._looked_up(self._upper, codes), builder.and_(rest, _all_bytes(0x80)))
            for half in range(2):
                # `vpunpcklbw` or `vpunpckhbw`: eight bytes of every sixteen
                order = [16 * (j // 16) + 8 * half + j % 16 // 2 + 4 * LANES * (j % 2) for j in range(4 * LANES)]
                words = builder.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(INT, 4 * LANES), order))
                code.store(builder.bitcast(words, INTS), builder.add(out, LONG(step * (2 * i + half))))
        return self._put_outliers(block, outlier, out)

    def _put_outliers(self, block: Value, outlier: Value, out: Value) -> Value:
        code, builder, before = self._code, self._code.builder, self._code.builder.block
        test, put, after = (
            builder.append_basic_block(name) for name in ("test_outlier", "put_outlier", "after_outliers")
        )
        width = 2 * GROUP * COMPACT_PAIRS
        first = builder.mul(block, LONG(width))
        builder.branch(test)
        builder.position_at_end(test)
        here = builder.phi(LONG)
        here.add_incoming(outlier, before)
        place = builder.sub(builder.sext(code.load(here, INT), LONG), first)
        builder.cbranch(builder.icmp_signed("<", place, LONG(width)), put, after)
        builder.position_at_end(put)
        bits = code.load(builder.add(here, LONG(4)), HALF)
        target = builder.inttoptr(code.moved(out, place, LONG(2)), ir.PointerType(HALF))
        builder.store(bits, target)
        here.add_incoming(builder.add(here, LONG(8)), put)
        builder.branch(test)
        builder.position_at_end(after)
        return here

    def _table(self, address: Value) -> Value:
        """16 bytes, in every part of a vector that `_looked_up` looks up in."""
        table = self._code.load(address, ir.VectorType(BYTE, 16))
        order = ir.Constant(ir.VectorType(INT, 4 * LANES), [i % 16 for i in range(4 * LANES)])
        return self._code.builder.shuffle_vector(table, table, order)

    def _looked_up(self, table: Value, index: Value) -> Value:
        function = ir.FunctionType(BYTES, [BYTES, BYTES])
        name = "llvm.x86.avx512.pshuf.b.512"
        return self._code.builder.call(
            get_or_insert_function(self._code.builder.module, function, name), [table, index]
        )


def _all_bytes(number: int) -> ir.Constant:
    return ir.Constant(BYTES, [number] * 4 * LANES)


@generated("weight g k num outlier out", returns=types.intp)
def expand_tile(code: Code) -> Value:
    """out int32[>= num, GROUP], contiguous: the words of weight[g, k : k + num >= 1], compact; k and num are multiples of COMPACT_PAIRS.

    outlier: byte of weight[g] at which the first outlier is that is not before k. Returns that of the first one after these words."""
    builder = code.builder
    blocks, out, group = CompactBlocks(code), code.address("out"), code.address("weight", code.value["g"])
    first, num = (builder.sdiv(code.value[name], LONG(COMPACT_PAIRS)) for name in ("k", "num"))

    def decode(i: Value, found: dict[Any, Value]) -> dict[Any, Value]:
        to = code.moved(out, i, LONG(4 * COMPACT_PAIRS * GROUP))
        return {"outlier": blocks.decode(builder.add(first, i), found["outlier"], to)}

    found = code.loop(num, {"outlier": builder.add(group, code.value["outlier"])}, decode)
    return builder.sub(found["outlier"], group)


@generated("rows")
def configure_amx(code: Code) -> None:
    """Before `amx_tile`, on the same thread: how many rows <= AMX_ROWS the matrix registers of inputs and results have."""
    # 64 bytes: palette 1; from byte 16 the bytes in a row of each register, from byte 48 its rows
    layout = bytearray(64)
    layout[0] = 1
    layout[16 : 16 + 2 * AMX_REGISTERS : 2] = [4 * AMX_PAIRS] * AMX_REGISTERS
    layout[48 : 48 + AMX_REGISTERS] = [AMX_PAIRS] * AMX_REGISTERS
    builder = code.builder
    place = alloca_once_value(builder, ir.Constant(ir.ArrayType(BYTE, 64), layout))
    rows = builder.trunc(code.value["rows"], BYTE)
    for register in range(AMX_REGISTERS):
        if register != AMX_WEIGHT:
            builder.store(rows, builder.gep(place, [INT(0), INT(48 + register)]))
    pointer = ir.PointerType(BYTE)
    kind = ir.FunctionType(ir.VoidType(), [pointer])
    load = get_or_insert_function(builder.module, kind, "llvm.x86.ldtilecfg")
    builder.call(load, [builder.bitcast(place, pointer)])


@generated("")
def release_amx(code: Code) -> None:
    """After `amx_tile`: the matrix registers are empty, and switching between threads need not keep them."""
    code.amx("tilerelease")


AMX_REGISTERS, AMX_INPUT, AMX_WEIGHT = 8, 6, 7  # the first six hold results


@generated("blocks x n second weight bias g ahead pace out o", sized=True)
def amx_tile(code: Code, blocks: int) -> None:
    """out[r, o + i] = bias[g, i] + Σ_j x[r, j] · weight[g, j, i] for i < GROUP and as many rows r as `configure_amx` was told, from n on
    and, if `blocks` is 2, from `second` on.

    bias and out float32; x and weight pairs, as many as a multiple of AMX_PAIRS. Meanwhile weights are prefetched that lie `ahead` bytes
    further on, and `pace` bytes more after each pair."""
    builder, vectors, row_bytes = code.builder, range(LINEAR_VECTORS), 4 * AMX_PAIRS
    first_rows = [code.value["n"], code.value["second"]][:blocks]
    x, x_stride = [code.address("x", row) for row in first_rows], code.stride("x", 0)
    weight, weight_stride = code.address("weight", code.value["g"]), 4 * GROUP  # from pair to pair
    out, out_stride = [code.address("out", row, code.value["o"]) for row in first_rows], code.stride("out", 0)
    result = {(block, v): block * LINEAR_VECTORS + v for block in range(blocks) for v in vectors}
    places = {(block, v): builder.add(out[block], LONG(row_bytes * v)) for block, v in result}
    lines = AMX_PAIRS * weight_stride // CACHE_LINE  # of the weights that one step reads
    prefetched = builder.add(weight, code.value["ahead"])
    line_stride = builder.sdiv(builder.mul(code.value["pace"], LONG(AMX_PAIRS)), LONG(lines))

    def add(k: Value, total: dict[Any, Value]) -> dict[Any, Value]:
        there = code.moved(prefetched, k, builder.mul(line_stride, LONG(lines)))
        for line in range(lines):
            code.prefetch(code.moved(there, LONG(line), line_stride))
        weights = code.moved(weight, k, LONG(AMX_PAIRS * weight_stride))
        for block in range(blocks):
            code.amx("tileloadd64", AMX_INPUT, memory=(code.moved(x[block], k, LONG(row_bytes)), x_stride))
            for v in vectors:
                here = builder.add(weights, LONG(row_bytes * v))
                code.amx("tileloadd64", AMX_WEIGHT, memory=(here, LONG(weight_stride)))
                code.amx("tdpbf16ps", result[block, v], AMX_INPUT, AMX_WEIGHT)
        return total

    bias = code.address("bias", code.value["g"])
    for (_, v), register in result.items():  # the same for every row
        code.amx("tileloadd64", register, memory=(builder.add(bias, LONG(row_bytes * v)), LONG(0)))
    code.loop(builder.sdiv(code.size("weight", 1), LONG(AMX_PAIRS)), {}, add)
    for place, register in result.items():
        code.amx("tilestored64", register, memory=(places[place], out_stride))


@generated("keys cell h query out k")
def amx_scores(code: Code) -> None:
    """out[k + i, r] = Σ_d query[d, r] · keys[cell + i, h, d] for i, r < AMX_ROWS, after `configure_amx(AMX_ROWS)`.

    out float32[·, AMX_ROWS]; query pairs int32[D, AMX_ROWS]; keys pairs int32[C, S, D], D a multiple of AMX_PAIRS."""
    here, stride = code.address("keys", code.value["cell"], code.value["h"]), code.stride("keys", 0)
    query, row_bytes = code.address("query"), LONG(4 * AMX_PAIRS)

    def add(step: Value, total: dict[Any, Value]) -> dict[Any, Value]:
        code.amx("tileloadd64", AMX_INPUT, memory=(code.moved(here, step, row_bytes), stride))
        part = code.moved(query, step, LONG(4 * AMX_PAIRS * AMX_ROWS))
        code.amx("tileloadd64", AMX_WEIGHT, memory=(part, row_bytes))
        code.amx("tdpbf16ps", 0, AMX_INPUT, AMX_WEIGHT)
        return total

    code.amx("tilezero", 0)
    code.loop(code.builder.sdiv(code.size("keys", 2), LONG(AMX_PAIRS)), {}, add)
    code.amx("tilestored64", 0, memory=(code.address("out", code.value["k"]), row_bytes))


@generated("blocks", sized=True)
def amx_clear(code: Code, blocks: int) -> None:
    """Begin sums of `amx_add`, after `configure_amx(rows)`: they stay in registers of the thread, two for each block."""
    for register in range(2 * blocks):
        code.amx("tilezero", register)


@generated("blocks weight i values j", sized=True)
def amx_add(code: Code, blocks: int) -> None:
    """Sums[r, d] += Σ_k weight[i, r, k] · values[j, k, d] for the rows r that are configured and d < blocks · AMX_KEYS.

    weight pairs int32[·, AMX_ROWS, AMX_PAIRS]; values pairs int32[·, AMX_PAIRS, ·]."""
    row_bytes = LONG(4 * AMX_PAIRS)
    code.amx("tileloadd64", AMX_INPUT, memory=(code.address("weight", code.value["i"]), row_bytes))
    values, stride = code.address("values", code.value["j"]), code.stride("values", 1)
    for register in range(2 * blocks):
        here = code.builder.add(values, LONG(4 * AMX_ROWS * register))
        code.amx("tileloadd64", AMX_WEIGHT, memory=(here, stride))
        code.amx("tdpbf16ps", register, AMX_INPUT, AMX_WEIGHT)


@generated("blocks out d", sized=True)
def amx_store(code: Code, blocks: int) -> None:
    """out[r, d + i] = the sums of `amx_add`: float32, in the order of `values`."""
    out, stride = code.address("out", LONG(0), code.value["d"]), code.stride("out", 0)
    for register in range(2 * blocks):
        here = code.builder.add(out, LONG(4 * AMX_ROWS * register))
        code.amx("tilestored64", register, memory=(here, stride))


@generated("score most")
def column_max_tile(code: Code) -> None:
    """most[r] becomes the largest of score[:, r] and itself: float32[n, AMX_ROWS], n a multiple of SOFTMAX_KEYS, and float32[AMX_ROWS]."""
    builder = code.builder
    score, place, keys = code.address("score"), code.address("most"), range(SOFTMAX_KEYS)

    def larger(a: Value, b: Value) -> Value:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def add(k: Value, most: dict[Any, Value]) -> dict[Any, Value]:
        here = code.moved(score, k, LONG(4 * AMX_ROWS * SOFTMAX_KEYS))
        return {i: larger(code.load(builder.add(here, LONG(4 * AMX_ROWS * i)), FLOATS), most[i]) for i in keys}

    before = code.load(place, FLOATS)
    num = builder.sdiv(code.size("score", 0), LONG(SOFTMAX_KEYS))
    code.store(reduce(larger, code.loop(num, dict.fromkeys(keys, before), add).values()), place)


@generated("columns score scaling most total weight", sized=True)
def weight_tile(code: Code, columns: int) -> None:
    """Weights e^(scaling · (score[k, r] - most[r])), 0 for a score of -inf, in weight int32[n / 2, AMX_ROWS]: pairs of bfloat16, of two k.
    Their sums are added to total[r]. For r < columns, which is 4, 8 or 16; the bits do not depend on it.

    score float32[n, AMX_ROWS], n a multiple of SOFTMAX_KEYS; most and total float32[AMX_ROWS]. weight may begin where score does."""
    builder, keys_of_vector = code.builder, LANES // columns
    score, weight, row_bytes = code.address("score"), code.address("weight"), 4 * AMX_ROWS
    kind = ir.VectorType(FLOAT, columns)
    zero, lowest = (ir.Constant(FLOATS, [number] * LANES) for number in (0.0, float("-inf")))
    scaling = code.everywhere(code.value["scaling"])
    most = code.joined([code.load(code.address("most"), kind)] * keys_of_vector)
    vectors = range(SOFTMAX_KEYS // 2 // keys_of_vector)  # of every second key
    place = {  # of the keys of a vector
        (vector, odd): [2 * (vector * keys_of_vector + i) + odd for i in range(keys_of_vector)]
        for vector in vectors
        for odd in range(2)
    }

    def add(k: Value, total: dict[Any, Value]) -> dict[Any, Value]:
        here = code.moved(score, k, LONG(row_bytes * SOFTMAX_KEYS))
        there = code.moved(weight, k, LONG(row_bytes * SOFTMAX_KEYS // 2))
        powers = {}
        for at, keys in place.items():
            number = code.joined([code.load(builder.add(here, LONG(row_bytes * key)), kind) for key in keys])
            power = code.exponential(builder.fmul(builder.fsub(number, most), scaling))
            powers[at] = builder.select(builder.fcmp_ordered(">", number, lowest), power, zero)
        for vector in vectors:
            lower, upper = (code.rounded(powers[vector, odd]) for odd in range(2))
            pairs = builder.or_(builder.lshr(lower, SIXTEEN), builder.and_(upper, UPPER))
            for i, part in enumerate(code.parts(pairs, columns)):
                code.store(part, builder.add(there, LONG(row_bytes * (vector * keys_of_vector + i))))
        return {at: builder.fadd(total[at], power) for at, power in powers.items()}

    num = builder.sdiv(code.size("score", 0), LONG(SOFTMAX_KEYS))
    found = code.loop(num, dict.fromkeys(place, zero), add)
    sums = {
        key: part for at, keys in place.items() for key, part in zip(keys, code.parts(found[at], columns), strict=True)
    }
    total = code.load(code.address("total"), kind)
    for key in range(SOFTMAX_KEYS):
        total = builder.fadd(total, sums[key])
    code.store(total, code.address("total"))


@generated("blocks values none cells j h d out i k", sized=True)
def pairs_tile(code: Code, blocks: int) -> None:
    """Pairs of values of cells[j] and cells[j + 1]: out[i, k] = those of every second of blocks · 2 · LANES dimensions from d on, in each
    block first the even ones and then the odd ones. values and none are bfloat16; the cell -1 has the values `none`."""
    builder = code.builder
    there, none, rows = code.address("out", code.value["i"], code.value["k"]), code.address("none"), []
    for one in range(2):
        cell = code.load(code.address("cells", builder.add(code.value["j"], LONG(one))), LONG)
        row = code.address("values", cell, code.value["h"], code.value["d"])
        ahead = code.moved(row, LONG(PREFETCH_CELLS), code.stride("values", 0))
        for line in range(0, 4 * LANES * blocks, CACHE_LINE):
            code.prefetch(builder.add(ahead, LONG(line)))
        rows.append(builder.select(builder.icmp_signed("<", cell, LONG(0)), none, row))
    for block in range(blocks):
        place = LONG(4 * LANES * block)
        first, second = (code.load(builder.add(row, place), INTS) for row in rows)
        even = builder.or_(builder.and_(first, LOWER), builder.shl(second, SIXTEEN))
        odd = builder.or_(builder.lshr(first, SIXTEEN), builder.and_(second, UPPER))
        for vector, pair in enumerate((even, odd)):
            code.store(pair, builder.add(there, LONG(4 * LANES * (2 * block + vector))))


@generated("x i j out k")
def transpose_tile(code: Code) -> None:
    """out[k + c, r] = x[i + r, j + c] for r, c < AMX_ROWS: int32, out with rows of AMX_ROWS numbers."""
    builder = code.builder
    here, stride = code.address("x", code.value["i"], code.value["j"]), code.stride("x", 0)
    rows = [code.load(code.moved(here, LONG(r), stride), INTS) for r in range(AMX_ROWS)]
    distance = 1
    while distance < AMX_ROWS:  # swap the blocks beside the diagonal, of twice the size each time
        first = [(c // distance % 2) * (AMX_ROWS - distance) + c for c in range(AMX_ROWS)]
        second = [(1 - c // distance % 2) * distance + (c // distance % 2) * AMX_ROWS + c for c in range(AMX_ROWS)]
        for r in range(AMX_ROWS):
            if r & distance == 0:
                a, b = rows[r], rows[r + distance]
                rows[r] = builder.shuffle_vector(a, b, ir.Constant(INTS, first))
                rows[r + distance] = builder.shuffle_vector(a, b, ir.Constant(INTS, second))
        distance *= 2
    there = code.address("out", code.value["k"])
    for c, row in enumerate(rows):
        code.store(row, code.moved(there, LONG(c), LONG(4 * AMX_ROWS)))


@generated("rows x m j rows_of cells h out d", sized=True)
def sum_tile(code: Code, rows: int) -> None:
    """out[m + r, d + i] += Σ_k x[m + r, j + k] · rows_of[cells[k], h, d + i] for r < rows, k < len(cells) > 0 and i < CHUNK.

    x and out float32; rows_of T[C, S, D]; cells int64."""
    builder, kind = code.builder, code.kind["rows_of"].dtype
    width = kind.bitwidth // 8 * LANES
    x, x_stride = code.address("x", code.value["m"], code.value["j"]), code.stride("x", 0)
    base, cell_stride = code.address("rows_of", LONG(0), code.value["h"], code.value["d"]), code.stride("rows_of", 0)
    cells = code.address("cells")

    def add(k: Value, total: dict[Any, Value]) -> dict[Any, Value]:
        total = dict(total)
        here = code.moved(base, code.load(code.moved(cells, k, LONG(8)), LONG), cell_stride)
        values = [code.floats(builder.add(here, LONG(width * vector)), kind) for vector in range(SUM_VECTORS)]
        code.prefetch(code.moved(here, LONG(PREFETCH_CELLS), cell_stride))
        weights = code.moved(x, k, LONG(4))
        for row in range(rows):
            number = code.everywhere(code.load(code.moved(weights, LONG(row), x_stride), FLOAT))
            for vector in range(SUM_VECTORS):
                total[row, vector] = code.multiply_add(number, values[vector], total[row, vector])
        return total

    _add_to_results(code, rows, SUM_VECTORS, code.value["d"], code.size("cells", 0), add)


@generated("rows x m rows_of cells k h out j", sized=True)
def dot_tile(code: Code, rows: int) -> None:
    """out[m + r, j + i] = Σ_d x[m + r, d] · rows_of[cells[k + i], h, d] for r < rows and i < DOT_KEYS.

    The first ⌊D / LANES⌋ · LANES >= LANES of the dimensions; x and out float32; rows_of T[C, S, D]; cells int64."""
    builder, kind, keys = code.builder, code.kind["rows_of"].dtype, range(DOT_KEYS)
    step, width = 4 * LANES, kind.bitwidth // 8 * LANES
    x, x_stride, cell_stride = code.address("x", code.value["m"]), code.stride("x", 0), code.stride("rows_of", 0)
    base, cells = code.address("rows_of", LONG(0), code.value["h"]), code.address("cells", code.value["k"])
    key = [code.moved(base, code.load(builder.add(cells, LONG(8 * i)), LONG), cell_stride) for i in keys]

    def add(vector: Value, total: dict[Any, Value]) -> dict[Any, Value]:
        total = dict(total)
        places = [code.moved(key[i], vector, LONG(width)) for i in keys]
        there = [code.floats(place, kind) for place in places]
        for place in places:
            code.prefetch(code.moved(place, LONG(PREFETCH_CELLS), cell_stride))
        for row in range(rows):
            here = code.load(code.moved(code.moved(x, LONG(row), x_stride), vector, LONG(step)), FLOATS)
            for i in keys:
                total[row, i] = code.multiply_add(here, there[i], total[row, i])
        return total

    zero = ir.Constant(FLOATS, [0.0] * LANES)
    num = builder.sdiv(code.size("x", 1), LONG(LANES))
    found = code.loop(num, {(row, i): zero for row in range(rows) for i in keys}, add)
    out, out_stride = code.address("out", code.value["m"], code.value["j"]), code.stride("out", 0)
    for row in range(rows):
        code.store(_sums(builder, [found[row, i] for i in keys]), code.moved(out, LONG(row), out_stride))


def _sums(builder: ir.IRBuilder, vectors: Sequence[Value]) -> Value:
    """The sum of each vector, in one vector: neighbours are added, and two vectors with half as many numbers become one."""
    while len(vectors) > 1 or vectors[0].type.count > DOT_KEYS:
        pairs = (
            [(vectors[i], vectors[i + 1]) for i in range(0, len(vectors), 2)]
            if len(vectors) > 1
            else [(vectors[0],) * 2]
        )
        vectors = [_neighbours(builder, *pair, twice=len(vectors) > 1) for pair in pairs]
    return vectors[0]


def _neighbours(builder: ir.IRBuilder, first: Value, second: Value, *, twice: bool) -> Value:
    """Sums of neighbours in the first vector, and behind them in the second, if that is another one."""
    num = first.type.count * (2 if twice else 1)
    even, odd = (ir.Constant(ir.VectorType(INT, num // 2), list(range(i, num, 2))) for i in (0, 1))
    return builder.fadd(builder.shuffle_vector(first, second, even), builder.shuffle_vector(first, second, odd))
