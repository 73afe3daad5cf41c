"""Attention on the CPU over paged keys and values, with results that do not depend on the rows beside a row.

A row's result is a sum over the keys that it sees. The sum is taken in the order of positions, in blocks of BLOCK positions that start at
multiples of BLOCK, whatever part of the context is committed and whichever nodes of a tree lie between. Within a block it is one matrix
product: a product of few keys adds them up one after the other, so the zero weight of a key that is not seen changes no bit. Scores and
exponentials are made element by element, and the maximum of a row is exact. `sums_in_order` checks the products on this machine.

All of it is in float32. Query heads that share K and V are rows of one product.

Legend: N rows of all entries, q rows of a chunk, H query heads, H_kv heads of K and V, G = H / H_kv, R = q · G, D head dimension, n keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from rootward.engine.block_table import Extent
from rootward.engine.kv_tree import Ints
from rootward.engine.slots import Entry

if TYPE_CHECKING:
    from rootward.engine.kv_cache import PagedLayer

MOST_KEYS = 384  # of one product, which adds them up in order
BLOCK = 256  # positions; leaves room for the siblings of a tree
MOST_ROWS = 64  # of a chunk: what bounds the memory for scores
LEAST_ROWS = 4  # of a product; fewer take another kernel,
LEAST_KEYS = 4  # likewise
LEAST_SIZE = 400  # as do batched products of fewer multiplications in torch
LANES = 8  # columns of ones


@dataclass(frozen=True, slots=True)
class Part:
    """Keys of a chunk, in the order of positions: cells that follow one another, or cells int64[n] of the storage."""

    num: int
    extent: Extent | None
    cells: torch.Tensor | None
    blocks: list[tuple[int, int]]  # keys of each product, in the order of positions

    def read(self, storage: torch.Tensor) -> torch.Tensor:
        """[H_kv, n, D] of storage [C, H_kv, D]."""
        if self.extent is not None:
            return storage.narrow(0, *self.extent).transpose(0, 1).float()
        assert self.cells is not None
        return storage.index_select(0, self.cells).transpose(0, 1).float()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `first` to `first + num` of a step, the keys that any of them sees, and what each does not: bias float32[q, 1, m] of
    the last m keys, None if every row sees all."""

    first: int
    num: int
    parts: list[Part]
    bias: torch.Tensor | None


def plan(entries: Sequence[Entry], offsets: Sequence[int], window: int | None) -> list[Chunk]:
    """The chunks of a step whose entries' rows begin at `offsets`. `window`: None if rows see all that is behind them."""
    return [
        chunk
        for entry, offset in zip(entries, offsets, strict=True)
        for start in range(0, entry.plan.num_rows, MOST_ROWS)
        for chunk in _chunks(entry, offset, start, min(start + MOST_ROWS, entry.plan.num_rows), window)
    ]


def _chunks(entry: Entry, offset: int, start: int, stop: int, window: int | None) -> list[Chunk]:
    """Of rows `start` to `stop` of an entry: one, or several if their keys are too many for a product."""
    rows = entry.plan
    sees, at = rows.sees[start:stop], rows.positions[start:stop]
    nodes = np.flatnonzero(sees.any(0))
    nodes = nodes[np.argsort(rows.position[nodes], kind="stable")]
    first = 0 if window is None else max(0, int(at.min()) - window + 1) // BLOCK * BLOCK
    first = min(first, rows.length // BLOCK * BLOCK)
    tail = rows.length // BLOCK * BLOCK  # what is before it consists of whole blocks
    committed = np.arange(tail, rows.length)
    position = np.concatenate([committed, rows.position[nodes]])
    ends = np.append(np.flatnonzero(np.diff(position // BLOCK)) + 1, len(position))
    blocks = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
    if max(j - i for i, j in blocks) > MOST_KEYS:  # a single row never sees more than BLOCK of them
        middle = (start + stop) // 2
        return _chunks(entry, offset, start, middle, window) + _chunks(entry, offset, middle, stop, window)
    visible = np.concatenate([np.ones((len(at), len(committed)), np.bool_), sees[:, nodes]], axis=1)
    if window is not None and int(at.max()) - first >= window:
        position = np.concatenate([np.arange(first, tail), position])
        visible = np.concatenate([np.ones((len(at), tail - first), np.bool_), visible], axis=1)
        visible &= at[:, None] - position < window
    cells = np.concatenate([committed, rows.scratch[nodes]])
    missing = LEAST_KEYS - len(cells)
    if missing > 0:  # the first cell again, which nobody sees
        cells = np.append(cells, np.repeat(cells[:1], missing))
        visible = np.pad(visible, ((0, 0), (0, missing)))
        blocks[-1] = (blocks[-1][0], LEAST_KEYS)
    bias = None
    if not visible.all():
        bias = torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf)[:, None]
    return [Chunk(offset + start, stop - start, _parts(entry, first, tail, cells, blocks), bias)]


def _parts(entry: Entry, first: int, tail: int, cells: Ints, blocks: list[tuple[int, int]]) -> list[Part]:
    """The whole blocks from `first` to `tail`, and the cells of the session behind them; in place where they follow one another."""
    whole = [(i, i + BLOCK) for i in range(0, tail - first, BLOCK)]
    behind = [(i + tail - first, j + tail - first) for i, j in blocks]
    in_place = bool((cells == np.arange(tail, tail + len(cells))).all())
    pieces = entry.table.extents(first, tail + len(cells) if in_place else tail)
    if in_place and len(pieces) == 1:
        return [Part(pieces[0][1], pieces[0], None, whole + behind)]
    own = torch.from_numpy(entry.table.cells(cells))
    if not pieces or not whole:
        return [Part(len(cells), None, own, blocks)]
    pieces = entry.table.extents(first, tail)
    if len(pieces) == 1:
        return [Part(tail - first, pieces[0], None, whole), Part(len(cells), None, own, blocks)]
    every = torch.from_numpy(entry.table.cells(np.concatenate([np.arange(first, tail), cells])))
    return [Part(len(every), None, every, whole + behind)]


def attend(
    query: torch.Tensor,
    layer: PagedLayer,
    chunks: Sequence[Chunk],
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32[N, H, D]: what `paged_reference` says. query float32[N, H, D]; rows of no chunk are padding and become 0."""
    total, heads, dim = query.shape
    shared = layer.keys.shape[1]
    group = heads // shared
    if sinks is not None:
        sinks = sinks.float().view(shared, 1, group, 1)
    if softcap is None and sinks is None and _are_alike(chunks, total):
        return _attend_together(query, layer, chunks, scaling)
    outs = []
    for chunk in chunks:
        rows = query.narrow(0, chunk.first, chunk.num).view(chunk.num, shared, group, dim).transpose(0, 1)
        rows = rows.reshape(shared, chunk.num * group, dim)
        out = _attend(rows, layer, chunk, scaling, softcap, sinks)
        out = out.view(shared, chunk.num, group, -1).transpose(0, 1).reshape(chunk.num, heads, -1)
        if chunk.num == total:
            return out
        outs.append(out)
    if sum(chunk.num for chunk in chunks) == total:
        return torch.cat(outs)
    found = query.new_zeros(total, heads, layer.values.shape[2])
    for chunk, out in zip(chunks, outs, strict=True):
        found[chunk.first : chunk.first + chunk.num] = out
    return found


def _are_alike(chunks: Sequence[Chunk], total: int) -> bool:
    """Several, of equally many rows, without padding between them, and each with keys for a single product."""
    num = chunks[0].num
    return (
        len(chunks) > 1
        and num * len(chunks) == total
        and all(c.num == num and len(c.parts) == 1 and len(c.parts[0].blocks) == 1 for c in chunks)
    )


def _attend_together(query: torch.Tensor, layer: PagedLayer, chunks: Sequence[Chunk], scaling: float) -> torch.Tensor:
    """`attend` with few calls for many sessions: two products for each, everything else for all of them."""
    _, heads, dim = query.shape
    count, num, shared = len(chunks), chunks[0].num, layer.keys.shape[1]
    rows = query.view(count, num, shared, -1, dim).transpose(1, 2).reshape(count, shared, -1, dim)
    num_rows, least = rows.shape[2], least_rows(min(dim, layer.values.shape[-1]))
    if num_rows < least:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, least - num_rows))
    longest = max(chunk.parts[0].num for chunk in chunks)
    score = rows.new_full((*rows.shape[:3], longest), -torch.inf)
    zero = _constant(0.0, 1, 1)
    for chunk, mine, own in zip(chunks, rows, score, strict=True):
        part = chunk.parts[0]
        key = part.read(layer.keys).transpose(1, 2)
        torch.baddbmm(zero, mine, key, beta=0, alpha=scaling, out=own.narrow(2, 0, part.num))
        if chunk.bias is not None:
            hidden = chunk.bias.shape[-1]
            some = own.narrow(1, 0, num_rows).narrow(2, part.num - hidden, hidden)
            some.unflatten(1, (num, -1)).add_(chunk.bias)
    weight = score.sub_(score.amax(-1, keepdim=True)).exp_()
    mass = torch.mm(weight.view(-1, longest), _constant(1.0, longest, LANES)).view(*weight.shape[:3], LANES)
    out = rows.new_empty(*weight.shape[:3], layer.values.shape[-1])
    for chunk, own, found in zip(chunks, weight, out, strict=True):
        part = chunk.parts[0]
        torch.bmm(own.narrow(2, 0, part.num), part.read(layer.values), out=found)
    out = (out / mass.narrow(3, 0, 1)).narrow(2, 0, num_rows)
    return out.reshape(count, shared, num, heads // shared, -1).transpose(1, 2).reshape(count * num, heads, -1)


def _attend(
    query: torch.Tensor,
    layer: PagedLayer,
    chunk: Chunk,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[H_kv, R, D] of query [H_kv, R, D]."""
    shared, num_rows, _ = query.shape
    least = least_rows(min(query.shape[-1], layer.values.shape[-1]))
    if num_rows < least:
        query = torch.nn.functional.pad(query, (0, 0, 0, least - num_rows))
    zero = _constant(0.0, 1, 1)
    parts = [
        torch.baddbmm(zero, query, part.read(layer.keys).transpose(1, 2), beta=0, alpha=scaling) for part in chunk.parts
    ]
    score = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    own = score.narrow(1, 0, num_rows).view(shared, chunk.num, -1, score.shape[-1])
    if chunk.bias is not None:
        num = chunk.bias.shape[-1]
        own.narrow(3, own.shape[3] - num, num).add_(chunk.bias)
    most = score.amax(-1, keepdim=True)
    if sinks is not None:
        seen = most.narrow(1, 0, num_rows).view(shared, chunk.num, -1, 1)
        torch.maximum(seen, sinks, out=seen)
    weight = score.sub_(most).exp_()
    out, mass = _weighted(weight, layer, chunk)
    out, mass = out.narrow(1, 0, num_rows), mass.narrow(1, 0, num_rows)
    if sinks is not None:
        mass = mass + (sinks - seen).exp().view(shared, num_rows, 1)
    return out / mass


def least_rows(dim: int) -> int:
    """Rows of a batched product with heads of this dimension, whatever the number of keys."""
    return max(LEAST_ROWS, -(-LEAST_SIZE // dim))


def _weighted(weight: torch.Tensor, layer: PagedLayer, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """The values [H_kv, R, D] summed with weight [H_kv, R, n], and the sums [H_kv, R, 1] of the weights."""
    shared, num_rows, _ = weight.shape
    flat = weight.view(shared * num_rows, -1)
    outs, masses, at = [], [], 0
    for part in chunk.parts:
        value, mine = part.read(layer.values), weight.narrow(2, at, part.num)
        whole = part.blocks[:-1]
        if len(whole) > shared and whole[-1][1] == len(whole) * BLOCK:  # a product for each head instead of each block
            num = whole[-1][1]
            weights = mine.narrow(2, 0, num).reshape(shared, num_rows, -1, BLOCK).transpose(1, 2)
            values = value.narrow(1, 0, num).view(shared, -1, BLOCK, value.shape[2])
            outs.append(torch.stack([torch.bmm(w, v) for w, v in zip(weights, values, strict=True)], 1))
            ones = _constant(1.0, BLOCK, LANES)
            masses.append(torch.matmul(weights, ones).transpose(0, 1))
            rest = part.blocks[-1:]
        else:
            rest = part.blocks
        for i, j in rest:
            outs.append(torch.bmm(mine.narrow(2, i, j - i), value.narrow(1, i, j - i))[None])
            ones = _constant(1.0, j - i, LANES)
            masses.append(torch.mm(flat.narrow(1, at + i, j - i), ones).view(1, shared, num_rows, LANES))
        at += part.num
    return _in_order(outs), _in_order(masses).narrow(2, 0, 1)


def _in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum over the first dimension of all of them, one after the other."""
    if len(parts) == 1 and len(parts[0]) == 1:
        return parts[0][0]
    every = torch.cat(parts)
    total = every[0]
    for k in range(1, len(every), MOST_KEYS):  # a product of few rows adds up in order
        some = torch.cat([total[None], every[k : k + MOST_KEYS - 1]])
        total = torch.mm(_constant(1.0, LEAST_ROWS, len(some)), some.flatten(1))[0].view(total.shape)
    return total


@cache
def _constant(value: float, *shape: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.full(shape, value)


@cache
def sums_in_order() -> bool:
    """Whether this machine's matrix products are what equal bits need: no element depends on the number of rows, nor on keys of
    weight 0 between the others, up to MOST_KEYS of them."""
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=rng)

    def products(weight: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mass = torch.mm(weight.flatten(0, 1), torch.ones(weight.shape[2], LANES))
        return torch.bmm(weight, value), mass.view(*weight.shape[:2], LANES)

    counts = (least_rows(64), 9, 20, 48)
    for num in (2, 17, BLOCK, MOST_KEYS):
        few = max(1, num * 2 // 3)
        weight, value = random(2, 96, few), random(2, few, 64)
        expected = products(weight[:, :48].contiguous(), value)
        place = torch.randperm(num, generator=rng)[:few].sort().values
        spread, between = torch.zeros(2, 96, num), random(2, num, 64)
        spread[:, :, place], between[:, place] = weight, value
        for rows in counts:
            for w, v in ((weight, value), (spread, between)):
                for got, right in zip(products(w[:, :rows].contiguous(), v), expected, strict=True):
                    if not torch.equal(got, right[:, :rows]):
                        return False
    query, key = random(2, 96, 64), random(2, MOST_KEYS, 64).transpose(1, 2)
    whole = torch.bmm(query, key)
    return all(
        torch.equal(torch.bmm(query[:, :rows].contiguous(), key[:, :, :num]), whole[:, :rows, :num])
        for rows in counts
        for num in (LEAST_KEYS, 5, 100, BLOCK + 1)
    )
