"""verifier.proto: requests of a gateway, and what a verifier commits."""

from __future__ import annotations

import math

from rootward.core.requests import (
    Committed,
    DraftStrategy,
    Finish,
    Prefilled,
    Rule,
    Speculation,
    SpeculationMode,
    Stopping,
    VerifiedTree,
    VerifierRequest,
)
from rootward.ports import VerifierInfo
from rootward.v1 import generate_pb2, verifier_pb2
from rootward.wire.columns import unpack_u32
from rootward.wire.drafter_codec import LAWS
from rootward.wire.public_codec import REASONS, processors_to_pb, sampling_from_pb, structure_from_pb
from rootward.wire.records import Conversion, Record, enum, numbers_of, u32
from rootward.wire.values_codec import MODEL, STATS, logprobs_to_pb, stats_to_pb, unpack_logprobs

RULES = numbers_of(Rule, verifier_pb2.Rule, "RULE_")
MODES = numbers_of(SpeculationMode, generate_pb2.Speculation.Mode)


def _finite(deadline_s: float) -> float:
    if not math.isfinite(deadline_s):
        raise ValueError(f"deadline_s: {deadline_s} is not finite; leave it unset for no deadline")
    return deadline_s


def _flags(accepted: bytes) -> tuple[bool, ...]:
    if any(flag > 1 for flag in accepted):
        raise ValueError("accepted: send one byte per token, each 0 or 1")
    return tuple(flag == 1 for flag in accepted)


STOPPING = Record(Stopping, verifier_pb2.VerifierRequest.Stopping, stop_token_ids=u32("stop_token_ids"))
POLICY = Record(
    Speculation,
    verifier_pb2.VerifierRequest.Policy,
    mode=enum(MODES, "speculation.mode", absent=SpeculationMode.AUTO, required=False),
    rule=enum(RULES, "speculation.rule", required=False),
    law=enum(LAWS, "speculation.law", required=False),
    strategy=Conversion(
        lambda strategy: "" if strategy is None else str(strategy),
        lambda text: DraftStrategy.parse(text) if text else None,
    ),
)
REQUEST = Record(
    VerifierRequest,
    verifier_pb2.VerifierRequest,
    custom=("sampling", "structure"),
    prompt=u32("prompt"),
    stopping=STOPPING.one,
    speculation=POLICY.one,
    committed=u32("committed"),
    prediction=u32("prediction"),
    deadline_s=Conversion(lambda seconds: seconds, _finite, present=True),
)
FINISH = Record(
    Finish,
    verifier_pb2.Committed.Finish,
    reason=enum(REASONS, "finish.reason"),
    stats=Conversion(stats_to_pb, STATS.from_pb),
)
TREE = Record(
    VerifiedTree,
    verifier_pb2.Committed.Tree,
    tokens=u32("tree.tokens"),
    parents=u32("tree.parents"),
    path=u32("tree.path"),
)
PREFILLED = Record(
    Prefilled,
    verifier_pb2.Committed.Prefilled,
    logprobs=Conversion(lambda values: logprobs_to_pb(values) if values else None, unpack_logprobs),
)
COMMITTED = Record(
    Committed,
    verifier_pb2.Committed,
    custom=("logprobs",),
    tokens=u32("tokens"),
    accepted=Conversion(bytes, _flags),
    finish=FINISH.optional,
    tree=TREE.optional,
    prefilled=PREFILLED.optional,
)
INFO = Record(VerifierInfo, verifier_pb2.VerifierInfo, model=MODEL.one)


def request_to_pb(value: VerifierRequest) -> verifier_pb2.VerifierRequest:
    return REQUEST.to_pb(value, **processors_to_pb(value.sampling, value.structure))


def request_from_pb(pb: verifier_pb2.VerifierRequest) -> VerifierRequest:
    sampling = sampling_from_pb(pb.sampling, pb.decoding)
    return REQUEST.from_pb(pb, sampling=sampling, structure=structure_from_pb(pb.decoding))


def committed_to_pb(value: Committed) -> verifier_pb2.Committed:
    if len(value.accepted) != len(value.tokens) or len(value.logprobs) not in (0, len(value.tokens)):
        counts = f"{len(value.accepted)} flags and {len(value.logprobs)} logprobs"
        raise ValueError(f"accepted, logprobs: {counts} for {len(value.tokens)} tokens")
    return COMMITTED.to_pb(value, logprobs=logprobs_to_pb(value.logprobs) if value.logprobs else None)


def committed_from_pb(pb: verifier_pb2.Committed) -> Committed:
    num_tokens = len(unpack_u32(pb.tokens))
    if len(pb.accepted) != num_tokens:
        raise ValueError(f"accepted: send {num_tokens} bytes, one per token, each 0 or 1")
    return COMMITTED.from_pb(pb, logprobs=unpack_logprobs(pb.logprobs, num_tokens) if pb.HasField("logprobs") else ())
