"""Grow, the hottest message: numpy arrays ↔ packed columns.

A frame has one for every tree that grew, with a handful of nodes each. Who makes it waits for the next level meanwhile, so their columns
are made as one and cut apart: numpy's fixed costs come once a frame.

Checked here is only what makes a frame readable (lengths, widths, one row per node). Whether its nodes make a tree is
the verifier's to judge, so that a drafter's bad tree costs that one slot and not the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from rootward.core.frames import Grow
from rootward.v1 import drafter_pb2
from rootward.wire.columns import (
    Ints,
    cut,
    pack_bits,
    pack_column,
    pack_each,
    pack_refs,
    unpack_bits,
    unpack_column,
    unpack_few,
    unpack_few_refs,
    unpack_refs,
)

TOKEN_WIDTH = 3  # fixed: when a node arrives must not depend on which token it is

Rows = dict[int, tuple[Ints, Ints]]


def add_grows(pb: drafter_pb2.FromDrafter, grows: Sequence[Grow]) -> None:
    """Into the frame, one message each."""
    if not grows:
        return
    for grow in grows:
        _check_columns(grow)
    tokens = pack_each([grow.token for grow in grows], "grow.token", TOKEN_WIDTH)
    for grow, token in zip(grows, tokens, strict=True):
        message = pb.grows.add()
        message.slot, message.base_len, message.base_hash = grow.slot, grow.base_len, grow.base_hash
        message.first_node, message.num_nodes = grow.first_node, len(grow.token)
        message.parent_base, message.parent = pack_refs(grow.parent, "grow.parent")
        message.token, message.sampled = token, pack_bits(grow.sampled)
        if grow.guess is not None:
            message.guess = pack_bits(grow.guess)
        message.at_rest, message.draft_us, message.queue_us = grow.at_rest, grow.draft_us, grow.queue_us
    _add_rows([(message.rows, grow.rows) for message, grow in zip(pb.grows, grows, strict=True) if grow.rows])


def grow_from_pb(pb: drafter_pb2.Grow) -> Grow:
    """What cannot be read is a malformed frame of its slot, and costs no other slot of the stream anything."""
    try:
        return _readable(pb)
    except ValueError as fault:
        none = np.empty(0, dtype=np.int64)
        return Grow(pb.slot, pb.base_len, pb.base_hash, pb.first_node, none, none, none.astype(bool), fault=str(fault))


def _check_columns(grow: Grow) -> None:
    num_nodes = len(grow.token)
    guess = grow.sampled if grow.guess is None else grow.guess
    if not num_nodes == len(grow.parent) == len(grow.sampled) == len(guess):
        sizes = sorted({len(grow.parent), len(grow.sampled), len(guess)})
        raise ValueError(f"grow: {num_nodes} tokens, but columns of {sizes}; give one entry per node")


def _readable(pb: drafter_pb2.Grow) -> Grow:
    return Grow(
        slot=pb.slot,
        base_len=pb.base_len,
        base_hash=pb.base_hash,
        first_node=pb.first_node,
        parent=unpack_refs(pb.parent_base, pb.parent, pb.num_nodes, "grow.parent"),
        token=unpack_column(pb.token, pb.num_nodes, "grow.token"),
        sampled=unpack_bits(pb.sampled, pb.num_nodes, "grow.sampled"),
        rows=_rows_from_pb(pb.rows) if pb.HasField("rows") else {},
        at_rest=pb.at_rest,
        draft_us=pb.draft_us,
        queue_us=pb.queue_us,
        guess=unpack_bits(pb.guess, pb.num_nodes, "grow.guess") if pb.guess else None,
    )


def _add_rows(of_grows: Sequence[tuple[drafter_pb2.GrowRows, Rows]]) -> None:
    if not of_grows:
        return
    lengths = [_lengths(rows) for _, rows in of_grows]
    totals = [sum(some) for some in lengths]
    every = [row for _, rows in of_grows for row in rows.values()]
    ids, weights = _packed([ids for ids, _ in every], [weights for _, weights in every], sum(totals))
    of_grow = zip(of_grows, lengths, cut(ids, totals), cut(weights, totals), strict=True)
    for (pb, rows), length, its_ids, its_weights in of_grow:
        pb.num_rows = len(length)
        pb.node_base, pb.node = pack_refs(list(rows), "grow.rows.node")
        pb.length = pack_column(length, "grow.rows.length")
        pb.ids, pb.weights = its_ids, its_weights


def _packed(ids: list[Ints], weights: list[Ints], total: int) -> tuple[bytes, bytes]:
    """Two columns, made as one where the ids need no more bytes than weights do."""
    both = np.concatenate([*ids, *weights])
    data = pack_column(both, "grow.rows.ids and weights")
    end = len(data) // 2
    return data[:end], data[end:] if end <= 2 * total else pack_column(both[total:], "grow.rows.weights")


def _lengths(rows: Rows) -> list[int]:
    lengths = [len(ids) for ids, _ in rows.values()]
    if lengths != [len(weights) for _, weights in rows.values()]:
        node = next(node for node, (ids, weights) in rows.items() if len(ids) != len(weights))
        raise ValueError(f"grow.rows: node {node} has {len(rows[node][0])} ids and {len(rows[node][1])} weights")
    return lengths


def _rows_from_pb(pb: drafter_pb2.GrowRows) -> Rows:
    nodes = unpack_few_refs(pb.node_base, pb.node, pb.num_rows, "grow.rows.node")
    ends = list(accumulate(unpack_few(pb.length, pb.num_rows, "grow.rows.length"), initial=0))
    ids = unpack_column(pb.ids, ends[-1], "grow.rows.ids")
    weights = unpack_column(pb.weights, ends[-1], "grow.rows.weights")
    rows = {
        node: (ids[start:end], weights[start:end]) for node, (start, end) in zip(nodes, pairwise(ends), strict=True)
    }
    if len(rows) != len(nodes):
        raise ValueError("grow.rows.node: a node appears twice; send the row of a node once")
    return rows
