"""drafter.proto: frames between verifier and drafter (`rootward.core.frames`).

`Grow` is the most frequent message: a frame has one for every tree that grew, with a handful of nodes each, and the next level of
growth waits until it is encoded. Decoding checks only that a frame can be read (lengths, widths, one distribution per node). The verifier
checks that its nodes make a tree, so that a malformed tree costs its slot and not the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

from rootward.core.frames import (
    Close,
    Commit,
    DraftHead,
    Features,
    FromDrafter,
    Grow,
    Hello,
    HelloAck,
    Launch,
    Load,
    NeedSync,
    Open,
    OpenFeatures,
    Reject,
    ToDrafter,
)
from rootward.core.requests import BEST_FIRST, DraftMode, DraftStrategy
from rootward.ports import DrafterInfo
from rootward.v1 import drafter_pb2
from rootward.wire.columns import (
    Ints,
    pack_bits,
    pack_column,
    pack_references,
    pack_small,
    unpack_bits,
    unpack_column,
    unpack_references,
    unpack_small,
)
from rootward.wire.public_codec import processors_to_pb, sampling_from_pb
from rootward.wire.records import Conversion, Record, enum, numbers_of, u32
from rootward.wire.values_codec import MODEL

MOST_NUMBERS = 1 << 20  # of the features in one message
MOST_ANSWERS = 1 << 15  # in one message of a drafter: an empty one has two bytes, and takes microseconds to read
MOST_NODES = 1 << 18  # new nodes and draft rows in one message of a drafter, of all trees together
LARGEST_FEATURE = 1e6
TOKEN_WIDTH = 3  # bytes, fixed: when a node arrives must not depend on which token it is

V = TypeVar("V")
Distributions = dict[int, tuple[Ints, Ints]]  # node -> token ids and their weights

LAWS = numbers_of(DraftMode, drafter_pb2.Law, "LAW_")
STRATEGY = Conversion(str, lambda text: DraftStrategy.parse(text) if text else BEST_FIRST)
_LAW_OF_NUMBER = {number: law for law, number in LAWS.items()}


def _features_to_pb(value: Features) -> drafter_pb2.Features:
    rows = np.ascontiguousarray(value.rows, dtype="<f4")
    if not value.int8:
        bits = rows.view("<u4")
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest bfloat16, ties to even
        return drafter_pb2.Features(num_rows=len(rows), values=rounded.astype("<u2").tobytes())
    scale = np.abs(rows).max(1, initial=0.0, keepdims=True) / 127
    whole = np.rint(rows / np.where(scale > 0, scale, 1)).astype(np.int8)
    return drafter_pb2.Features(num_rows=len(rows), values=whole.tobytes(), scale=scale.astype("<f4").tobytes())


def _features_from_pb(pb: drafter_pb2.Features) -> Features:
    width = 1 if pb.scale else 2
    size, rest = divmod(len(pb.values), pb.num_rows * width) if pb.num_rows else (0, 1)
    if rest or not size:
        raise ValueError(
            f"features.values: {len(pb.values)} bytes for {pb.num_rows} rows; send at least one row, all of one size"
        )
    if len(pb.values) > width * MOST_NUMBERS:
        raise ValueError(
            f"features.values: {len(pb.values) // width} numbers; send at most {MOST_NUMBERS} in a message"
        )
    if pb.scale and len(pb.scale) != 4 * pb.num_rows:
        raise ValueError(f"features.scale: {len(pb.scale)} bytes for {pb.num_rows} rows; send 4 per row, or none")
    if pb.scale:
        whole = np.frombuffer(pb.values, np.int8).reshape(pb.num_rows, size)
        with np.errstate(over="ignore", invalid="ignore"):
            rows = whole * np.frombuffer(pb.scale, "<f4")[:, None]
    else:
        bits = np.frombuffer(pb.values, "<u2").astype(np.uint32) << 16
        rows = bits.view(np.float32).reshape(pb.num_rows, size)
    if not (np.abs(rows) <= LARGEST_FEATURE).all():  # a head would overflow
        raise ValueError(
            f"features.values: a number is above {LARGEST_FEATURE} or none; send hidden states of the target"
        )
    return Features(rows, bool(pb.scale))


def _distributions_to_pb(rows: Distributions) -> drafter_pb2.GrowRows:
    for node, (ids, weights) in rows.items():
        if len(ids) != len(weights):
            raise ValueError(f"grow.rows: node {node} has {len(ids)} ids and {len(weights)} weights")
    node_base, nodes = pack_references(list(rows), "grow.rows.node")
    return drafter_pb2.GrowRows(
        num_rows=len(rows),
        node_base=node_base,
        node=nodes,
        length=pack_small([len(ids) for ids, _ in rows.values()], "grow.rows.length"),
        ids=pack_column(np.concatenate([ids for ids, _ in rows.values()]), "grow.rows.ids"),
        weights=pack_column(np.concatenate([weights for _, weights in rows.values()]), "grow.rows.weights"),
    )


def _distributions_from_pb(pb: drafter_pb2.GrowRows) -> Distributions:
    nodes = unpack_references(pb.node_base, pb.node, pb.num_rows, "grow.rows.node")
    ends = list(accumulate(unpack_small(pb.length, pb.num_rows, "grow.rows.length"), initial=0))
    ids = unpack_column(pb.ids, ends[-1], "grow.rows.ids")
    weights = unpack_column(pb.weights, ends[-1], "grow.rows.weights")
    rows = {
        node: (ids[start:end], weights[start:end]) for node, (start, end) in zip(nodes, pairwise(ends), strict=True)
    }
    if len(rows) != len(nodes):
        raise ValueError("grow.rows.node: a node appears twice; send the distribution of a node once")
    return rows


def _grow_to_pb(grow: Grow) -> drafter_pb2.Grow:
    num_nodes = len(grow.token)
    guess = grow.sampled if grow.guess is None else grow.guess
    if not num_nodes == len(grow.parent) == len(grow.sampled) == len(guess):
        sizes = sorted({len(grow.parent), len(grow.sampled), len(guess)})
        raise ValueError(f"grow: {num_nodes} tokens, but columns of {sizes}; give one entry per node")
    parent_base, parent = pack_references(grow.parent.tolist(), "grow.parent")
    return drafter_pb2.Grow(
        slot=grow.slot,
        base_len=grow.base_len,
        base_hash=grow.base_hash,
        first_node=grow.first_node,
        num_nodes=num_nodes,
        parent_base=parent_base,
        parent=parent,
        token=pack_small(grow.token.tolist(), "grow.token", TOKEN_WIDTH),
        sampled=pack_bits(grow.sampled),
        rows=_distributions_to_pb(grow.rows) if grow.rows else None,
        at_rest=grow.at_rest,
        draft_us=grow.draft_us,
        queue_us=grow.queue_us,
        guess=b"" if grow.guess is None else pack_bits(grow.guess),
    )


def _grow_from_pb(pb: drafter_pb2.Grow) -> Grow:
    """A message that cannot be read is a malformed frame of its slot, without effect on the other slots of the stream."""
    try:
        return Grow(
            slot=pb.slot,
            base_len=pb.base_len,
            base_hash=pb.base_hash,
            first_node=pb.first_node,
            parent=np.array(unpack_references(pb.parent_base, pb.parent, pb.num_nodes, "grow.parent"), dtype=np.int64),
            token=np.array(unpack_small(pb.token, pb.num_nodes, "grow.token"), dtype=np.int64),
            sampled=unpack_bits(pb.sampled, pb.num_nodes, "grow.sampled"),
            rows=_distributions_from_pb(pb.rows) if pb.HasField("rows") else {},
            at_rest=pb.at_rest,
            draft_us=pb.draft_us,
            queue_us=pb.queue_us,
            guess=unpack_bits(pb.guess, pb.num_nodes, "grow.guess") if pb.guess else None,
        )
    except ValueError as fault:
        none = np.empty(0, dtype=np.int64)
        return Grow(pb.slot, pb.base_len, pb.base_hash, pb.first_node, none, none, none.astype(bool), fault=str(fault))


HELLO = Record(Hello, drafter_pb2.Hello)
ACK = Record(
    HelloAck,
    drafter_pb2.HelloAck,
    laws=Conversion(
        lambda laws: [LAWS[law] for law in laws],
        # A verifier never asks for a law that it does not know.
        lambda numbers: tuple(_LAW_OF_NUMBER[number] for number in numbers if number in _LAW_OF_NUMBER),
    ),
    strategy=STRATEGY,
    head=Record(DraftHead, drafter_pb2.DraftHead).optional,
)
LOAD = Record(Load, drafter_pb2.Load)
OPEN = Record(
    Open,
    drafter_pb2.Open,
    custom=("sampling",),
    prefix=u32("open.prefix"),
    law=enum(LAWS, "open.law"),
    prediction=u32("open.prediction"),
    strategy=STRATEGY,
)
COMMIT = Record(Commit, drafter_pb2.Commit, ("features",), tokens=u32("commit.tokens"))
OPEN_FEATURES = Record(OpenFeatures, drafter_pb2.OpenFeatures, features=Conversion(_features_to_pb, _features_from_pb))
TO_DRAFTER = Record(
    ToDrafter,
    drafter_pb2.ToDrafter,
    custom=("opens", "commits", "features", "unreadable"),
    hello=HELLO.optional,
    closes=Record(Close, drafter_pb2.Close).each,
    launches=Record(Launch, drafter_pb2.Launch).each,
)
FROM_DRAFTER = Record(
    FromDrafter,
    drafter_pb2.FromDrafter,
    ack=ACK.optional,
    grows=Conversion(
        lambda grows: [_grow_to_pb(grow) for grow in grows], lambda pbs: tuple(_grow_from_pb(pb) for pb in pbs)
    ),
    need_syncs=Record(NeedSync, drafter_pb2.NeedSync).each,
    rejects=Record(Reject, drafter_pb2.Reject).each,
    load=LOAD.optional,
)
INFO = Record(DrafterInfo, drafter_pb2.DrafterInfo, model=MODEL.one, ack=ACK.one, load=LOAD.one)


def to_drafter_to_pb(value: ToDrafter) -> drafter_pb2.ToDrafter:
    return TO_DRAFTER.to_pb(
        value,
        opens=[OPEN.to_pb(message, **processors_to_pb(message.sampling)) for message in value.opens],
        commits=[
            COMMIT.to_pb(message, features=None if message.features is None else _features_to_pb(message.features))
            for message in value.commits
        ],
        features=[OPEN_FEATURES.to_pb(message) for message in value.features],
    )


def from_drafter_from_pb(pb: drafter_pb2.FromDrafter) -> FromDrafter:
    """Growth that cannot be read costs its slot; anything else that cannot is a ValueError."""
    num_answers = len(pb.grows) + len(pb.need_syncs) + len(pb.rejects)
    if num_answers > MOST_ANSWERS:
        raise ValueError(
            f"grows, need_syncs, rejects: {num_answers} are more than {MOST_ANSWERS}; send several messages"
        )
    num_nodes = sum(grow.num_nodes + grow.rows.num_rows for grow in pb.grows)
    if num_nodes > MOST_NODES:
        raise ValueError(f"grows: {num_nodes} nodes and rows are more than {MOST_NODES}; send several messages")
    return FROM_DRAFTER.from_pb(pb)


def to_drafter_from_pb(pb: drafter_pb2.ToDrafter) -> ToDrafter:
    """An Open, or features, that cannot be read cost their slot; anything else that cannot is a ValueError."""
    opens = [_or_reject(_open_from_pb, message) for message in pb.opens]
    commits = [_commit_from_pb(message) for message in pb.commits]
    features = [_or_reject(OPEN_FEATURES.from_pb, message) for message in pb.features]
    return TO_DRAFTER.from_pb(
        pb,
        opens=tuple(message for message in opens if isinstance(message, Open)),
        commits=tuple(message for message in commits if isinstance(message, Commit)),
        features=tuple(message for message in features if isinstance(message, OpenFeatures)),
        unreadable=tuple(message for message in (*opens, *commits, *features) if isinstance(message, Reject)),
    )


def _or_reject(read: Callable[[Any], V], pb: Any) -> V | Reject:
    try:
        return read(pb)
    except ValueError as error:
        return Reject(pb.slot, str(error))


def _open_from_pb(pb: drafter_pb2.Open) -> Open:
    return OPEN.from_pb(pb, sampling=sampling_from_pb(pb.sampling, pb.decoding))


def _commit_from_pb(pb: drafter_pb2.Commit) -> Commit | Reject:
    features = _or_reject(lambda pb: _features_from_pb(pb.features), pb) if pb.HasField("features") else None
    if isinstance(features, Reject):
        return features
    commit = COMMIT.from_pb(pb, features=features)
    runs = commit.runs
    num_tokens = len(commit.tokens)
    if runs and (sum(runs) != num_tokens or min(runs) < 1):
        raise ValueError(f"commit.runs: {runs} for {num_tokens} tokens; give lengths of at least 1 that add up")
    return commit
