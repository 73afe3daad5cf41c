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
from rootward.rpc.columns import (
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
from rootward.v1 import drafter_pb2

TOKEN_WIDTH = 3  # fixed: when a node arrives must not depend on which token it is

Rows = dict[int, tuple[Ints, Ints]]


def grows_to_pb(grows: Sequence[Grow]) -> list[drafter_pb2.Grow]:
    """One message each."""
    if not grows:
        return []
    for grow in grows:
        _check_columns(grow)
    parents = [pack_refs(grow.parent, "grow.parent") for grow in grows]
    tokens = pack_each([grow.token for grow in grows], "grow.token", TOKEN_WIDTH)
    rows = iter(_rows_to_pb([grow.rows for grow in grows if grow.rows]))
    return [
        drafter_pb2.Grow(
            slot=grow.slot,
            base_len=grow.base_len,
            base_hash=grow.base_hash,
            first_node=grow.first_node,
            num_nodes=len(grow.token),
            parent_base=base,
            parent=parent,
            token=token,
            sampled=pack_bits(grow.sampled),
            rows=next(rows) if grow.rows else None,
            at_rest=grow.at_rest,
            draft_us=grow.draft_us,
            queue_us=grow.queue_us,
            guess=b"" if grow.guess is None else pack_bits(grow.guess),
        )
        for grow, (base, parent), token in zip(grows, parents, tokens, strict=True)
    ]


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


def _rows_to_pb(of_grows: Sequence[Rows]) -> list[drafter_pb2.GrowRows]:
    if not of_grows:
        return []
    lengths = [_lengths(rows) for rows in of_grows]
    totals = [sum(some) for some in lengths]
    every = [row for rows in of_grows for row in rows.values()]
    ids = cut(pack_column(np.concatenate([ids for ids, _ in every]), "grow.rows.ids"), totals)
    weights = cut(pack_column(np.concatenate([weights for _, weights in every]), "grow.rows.weights"), totals)
    nodes = [pack_refs(list(rows), "grow.rows.node") for rows in of_grows]
    return [
        drafter_pb2.GrowRows(
            num_rows=len(length),
            node_base=base,
            node=node,
            length=pack_column(length, "grow.rows.length"),
            ids=its_ids,
            weights=its_weights,
        )
        for length, (base, node), its_ids, its_weights in zip(lengths, nodes, ids, weights, strict=True)
    ]


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
