"""Grow, the hottest message: numpy arrays ↔ packed columns.

Checked here is only what makes a frame readable (lengths, widths, one row per node). Whether its nodes make a tree is
the verifier's to judge, so that a drafter's bad tree costs that one slot and not the stream.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from rootward.core.frames import Grow
from rootward.rpc.columns import Ints, pack_bits, pack_column, pack_refs, unpack_bits, unpack_column, unpack_refs
from rootward.v1 import drafter_pb2

TOKEN_WIDTH = 3  # fixed: when a node arrives must not depend on which token it is

Rows = dict[int, tuple[Ints, Ints]]


def grow_to_pb(value: Grow) -> drafter_pb2.Grow:
    num_nodes = len(value.token)
    guess = value.sampled if value.guess is None else value.guess
    sizes = {len(value.parent), len(value.sampled), len(guess)}
    if sizes != {num_nodes}:
        raise ValueError(f"grow: {num_nodes} tokens, but columns of {sorted(sizes)}; give one entry per node")
    parent_base, parent = pack_refs(value.parent, "grow.parent")
    return drafter_pb2.Grow(
        slot=value.slot,
        base_len=value.base_len,
        base_hash=value.base_hash,
        first_node=value.first_node,
        num_nodes=num_nodes,
        parent_base=parent_base,
        parent=parent,
        token=pack_column(value.token, "grow.token", TOKEN_WIDTH),
        sampled=pack_bits(value.sampled),
        rows=_rows_to_pb(value.rows) if value.rows else None,
        at_rest=value.at_rest,
        draft_us=value.draft_us,
        queue_us=value.queue_us,
        guess=b"" if value.guess is None else pack_bits(value.guess),
    )


def grow_from_pb(pb: drafter_pb2.Grow) -> Grow:
    """What cannot be read is a malformed frame of its slot, and costs no other slot of the stream anything."""
    try:
        return _readable(pb)
    except ValueError as fault:
        none = np.empty(0, dtype=np.int64)
        return Grow(pb.slot, pb.base_len, pb.base_hash, pb.first_node, none, none, none.astype(bool), fault=str(fault))


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


def _rows_to_pb(rows: Rows) -> drafter_pb2.GrowRows:
    for node, (ids, weights) in rows.items():
        if len(ids) != len(weights):
            raise ValueError(f"grow.rows: node {node} has {len(ids)} ids and {len(weights)} weights")
    node_base, node_column = pack_refs(list(rows), "grow.rows.node")
    return drafter_pb2.GrowRows(
        num_rows=len(rows),
        node_base=node_base,
        node=node_column,
        length=pack_column([len(ids) for ids, _ in rows.values()], "grow.rows.length"),
        ids=pack_column(_joined([ids for ids, _ in rows.values()]), "grow.rows.ids"),
        weights=pack_column(_joined([weights for _, weights in rows.values()]), "grow.rows.weights"),
    )


def _joined(columns: list[Ints]) -> Ints:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _rows_from_pb(pb: drafter_pb2.GrowRows) -> Rows:
    nodes = unpack_refs(pb.node_base, pb.node, pb.num_rows, "grow.rows.node").tolist()
    ends = list(accumulate(unpack_column(pb.length, pb.num_rows, "grow.rows.length").tolist()))
    total = ends[-1] if ends else 0
    ids = unpack_column(pb.ids, total, "grow.rows.ids")
    weights = unpack_column(pb.weights, total, "grow.rows.weights")
    if len(set(nodes)) != len(nodes):
        raise ValueError("grow.rows.node: a node appears twice; send the row of a node once")
    spans = zip(nodes, [0, *ends], ends, strict=False)
    return {node: (ids[start:end], weights[start:end]) for node, start, end in spans}
