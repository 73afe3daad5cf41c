"""Triton kernels of paged tree attention: partial results over pieces of what a row sees, and their merge.

The rows of one program are the query heads that share a KV head, for several rows of the entry: row r is head r mod G of row
r div G. So each key and value read serves the whole group and the whole tree, and the products are wide enough for tensor cores.
Sums and softmax are float32; exponentials are powers of two, since that is what the hardware has.

This module imports triton, which decides at import whether kernels are compiled or interpreted; import it only to run them.

Legend: B entries, G query heads per KV head, R = Q · G rows of an entry and KV head, S pieces of the prefix, D head dimension.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (a kernel's arguments take no annotation but constexpr)

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(1 << 30)  # position of a row that does not exist
# triton compiles a kernel anew for integers that are 1 or divisible by 16, and for pointers that are; these differ from step to step, and a
# compilation takes as long as a hundred steps. Strides of queries, keys and values stay out of the list: their loads are wide.
VARYING = (
    "block_table", "length", "scratch", "scratch_position", "sees", "position", "window", "num_rows", "num_nodes", "num_pieces",
    "table_entry", "scratch_entry", "scratch_position_entry", "sees_entry", "sees_row", "position_entry",
)  # fmt: skip


@triton.jit
def _tanh(x):
    """Exact to float32 rounding also near 0, where 1 − 2 / (e^2x + 1) cancels."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return tl.where(square < 0.0625, near, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def _attend(
    acc, top, total, query, keys, values, cell, real, visible, scale, cap, key_cell, value_cell,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Take one tile of cells into the running softmax: weighted sum, largest score and sum of weights per row."""
    d, dv = tl.arange(0, TILE_D), tl.arange(0, TILE_DV)
    at = cell.to(tl.int64)[:, None]
    key = tl.load(keys + at * key_cell + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if CAPPED:
        score = cap * _tanh(score)
    score = tl.where(visible, score, -float("inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet: no inf − inf
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(top - base)
    value = tl.load(values + at * value_cell + dv[None, :], mask=real[:, None] & (dv < DIM_V)[None, :], other=0.0)
    acc = acc * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return acc, new_top, total * fade + tl.sum(weight, 1)


@triton.jit(do_not_specialize=VARYING)
def partial_attention(
    query, keys, values, partial, lse,
    block_table, length, scratch, scratch_position, sees, position,
    scale, cap, window, num_rows, num_nodes, num_pieces,
    query_entry, query_head, query_row, key_cell, key_head, value_cell, value_head,
    table_entry, scratch_entry, scratch_position_entry, sees_entry, sees_row, position_entry,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    TILE_R: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, B · H_kv, S + 1): pieces 0 … S − 1 are equal parts of the prefix, piece S is the tree.

    Writes partial float32[S + 1, B · H_kv, R, D], each piece normalised by itself, and lse float32[S + 1, B · H_kv, R], the
    binary logarithm of its sum of weights; −inf where a row sees nothing of the piece.
    """
    pair, piece = tl.program_id(1), tl.program_id(2)
    b, kv_head = pair // KV_HEADS, pair % KV_HEADS
    row = tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)
    exists, q = row < num_rows, row // GROUP
    head = kv_head * GROUP + row % GROUP
    d, dv, n = tl.arange(0, TILE_D), tl.arange(0, TILE_DV), tl.arange(0, TILE_N)
    mine = query + b.to(tl.int64) * query_entry + head * query_head + q * query_row
    tile = tl.load(mine[:, None] + d[None, :], mask=exists[:, None] & (d < DIM)[None, :], other=0.0)
    stands = tl.load(position + b * position_entry + q, mask=exists, other=FAR)
    keys += kv_head * key_head
    values += kv_head * value_head
    acc = tl.zeros([TILE_R, TILE_DV], tl.float32)
    top = tl.full([TILE_R], -float("inf"), tl.float32)
    total = tl.zeros([TILE_R], tl.float32)

    if piece < num_pieces:
        end = tl.load(length + b)
        first = 0
        if WINDOWED:  # cells that no row of the tile sees are not read
            first = tl.maximum(tl.min(stands, 0) - window + 1, 0)
        share = tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), num_pieces), TILE_N) * TILE_N
        first += piece * share
        for start in range(first, tl.minimum(first + share, end), TILE_N):
            place = start + n
            real = place < end
            block = tl.load(block_table + b * table_entry + place // BLOCK_SIZE, mask=real, other=0)
            visible = real[None, :]
            if WINDOWED:
                visible = visible & (stands[:, None] - place[None, :] < window)
            acc, top, total = _attend(
                acc, top, total, tile, keys, values, block * BLOCK_SIZE + place % BLOCK_SIZE, real, visible, scale, cap,
                key_cell, value_cell, DIM, DIM_V, TILE_D, TILE_DV, CAPPED,
            )  # fmt: skip
    else:
        for start in range(0, num_nodes, TILE_N):
            node = start + n
            inside = node < num_nodes
            # Triton 3.2 pipelines no other than 0.
            cell = tl.load(scratch + b * scratch_entry + node, mask=inside, other=0)
            real = inside & (cell >= 0)
            word = sees + b * sees_entry + q[:, None] * sees_row + (node // 32)[None, :]
            bits = tl.load(word, mask=exists[:, None] & real[None, :], other=0)
            visible = ((bits >> (node % 32)[None, :]) & 1) != 0
            if WINDOWED:
                there = tl.load(scratch_position + b * scratch_position_entry + node, mask=real, other=0)
                visible = visible & (stands[:, None] - there[None, :] < window)
            acc, top, total = _attend(
                acc, top, total, tile, keys, values, cell, real, visible, scale, cap,
                key_cell, value_cell, DIM, DIM_V, TILE_D, TILE_DV, CAPPED,
            )  # fmt: skip

    some = tl.where(total == 0.0, 1.0, total)
    at = (piece * tl.num_programs(1) + pair).to(tl.int64) * num_rows + row
    tl.store(lse + at, tl.where(total == 0.0, -float("inf"), top + tl.log2(some)), mask=exists)
    tl.store(
        partial + at[:, None] * DIM_V + dv[None, :], acc / some[:, None], mask=exists[:, None] & (dv < DIM_V)[None, :]
    )


@triton.jit(do_not_specialize=("num_parts",))
def merge_partials(
    out, partial, lse, sinks, num_parts, out_entry, out_row, out_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM_V: tl.constexpr,
    TILE_P: tl.constexpr, TILE_DV: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (R, B · H_kv): one row from its pieces, each weighted by its sum of weights. A row that sees nothing gets zeros."""
    row, pair = tl.program_id(0), tl.program_id(1)
    b, head = pair // KV_HEADS, pair % KV_HEADS * GROUP + row % GROUP
    part, dv = tl.arange(0, TILE_P), tl.arange(0, TILE_DV)
    at = (part * tl.num_programs(1) + pair).to(tl.int64) * tl.num_programs(0) + row
    weight = tl.load(lse + at, mask=part < num_parts, other=-float("inf"))
    top = tl.max(weight, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp2(weight - top)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    used = (weight > 0.0)[:, None] & (dv < DIM_V)[None, :]
    piece = tl.load(partial + at[:, None] * DIM_V + dv[None, :], mask=used, other=0.0)
    mixed = tl.sum(piece * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    place = out + b.to(tl.int64) * out_entry + row // GROUP * out_row + head * out_head
    tl.store(place + dv, mixed.to(out.dtype.element_ty), mask=dv < DIM_V)
