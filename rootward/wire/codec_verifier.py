"""The gateway → verifier hop (`rootward.core.requests`, `ports.VerifierInfo`) ↔ protobuf."""

from __future__ import annotations

import math

from rootward.core.requests import (
    Committed,
    Finish,
    Prefilled,
    Speculation,
    SpeculationMode,
    Stopping,
    VerifiedTree,
    VerifierRequest,
)
from rootward.ports import VerifierInfo
from rootward.v1 import drafter_pb2, verifier_pb2
from rootward.wire.codec_common import (
    LAWS,
    MODES,
    REASONS,
    RULES,
    from_enum,
    model_from_pb,
    model_to_pb,
    stats_from_pb,
    stats_to_pb,
)
from rootward.wire.codec_sampling import (
    decoding_to_pb,
    logprobs_from_pb,
    logprobs_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    structure_from_pb,
)
from rootward.wire.columns import pack_u32, unpack_u32


def request_to_pb(value: VerifierRequest) -> verifier_pb2.VerifierRequest:
    return verifier_pb2.VerifierRequest(
        request_id=value.request_id,
        prompt=pack_u32(value.prompt, "prompt"),
        sampling=sampling_to_pb(value.sampling),
        stopping=verifier_pb2.VerifierRequest.Stopping(
            max_tokens=value.stopping.max_tokens,
            stop_token_ids=pack_u32(value.stopping.stop_token_ids, "stop_token_ids"),
            ignore_eos=value.stopping.ignore_eos,
            min_tokens=value.stopping.min_tokens,
        ),
        speculation=_policy_to_pb(value.speculation),
        committed=pack_u32(value.committed, "committed"),
        epoch=value.epoch,
        seed=value.seed,
        choice=value.choice,
        deadline_s=value.deadline_s,
        decoding=decoding_to_pb(value.sampling, value.structure),
        logprobs=value.logprobs,
        priority=value.priority,
        tenant=value.tenant,
        prediction=pack_u32(value.prediction, "prediction"),
        trees=value.trees,
        prompt_logprobs=value.prompt_logprobs,
        cache_salt=value.cache_salt,
        traceparent=value.traceparent,
    )


def request_from_pb(pb: verifier_pb2.VerifierRequest) -> VerifierRequest:
    deadline_s = pb.deadline_s if pb.HasField("deadline_s") else None
    if deadline_s is not None and not math.isfinite(deadline_s):
        raise ValueError(f"deadline_s: {deadline_s} is not finite; leave it unset for no deadline")
    stop_token_ids = unpack_u32(pb.stopping.stop_token_ids, "stop_token_ids")
    return VerifierRequest(
        request_id=pb.request_id,
        prompt=unpack_u32(pb.prompt, "prompt"),
        sampling=sampling_from_pb(pb.sampling, pb.decoding),
        stopping=Stopping(pb.stopping.max_tokens, stop_token_ids, pb.stopping.ignore_eos, pb.stopping.min_tokens),
        speculation=_policy_from_pb(pb.speculation),
        committed=unpack_u32(pb.committed, "committed"),
        epoch=pb.epoch,
        seed=pb.seed,
        choice=pb.choice,
        deadline_s=deadline_s,
        structure=structure_from_pb(pb.decoding),
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        priority=pb.priority,
        tenant=pb.tenant,
        prediction=unpack_u32(pb.prediction, "prediction"),
        trees=pb.trees,
        prompt_logprobs=pb.prompt_logprobs if pb.HasField("prompt_logprobs") else None,
        cache_salt=pb.cache_salt,
        traceparent=pb.traceparent,
    )


def _policy_to_pb(value: Speculation) -> verifier_pb2.VerifierRequest.Policy:
    return verifier_pb2.VerifierRequest.Policy(
        mode=MODES[value.mode],
        rule=RULES[value.rule] if value.rule else verifier_pb2.RULE_UNSPECIFIED,
        law=LAWS[value.law] if value.law else drafter_pb2.LAW_UNSPECIFIED,
        num_draft_tokens=value.num_draft_tokens,
        max_depth=value.max_depth,
        topk=value.topk,
        drafter=value.drafter,
    )


def _policy_from_pb(pb: verifier_pb2.VerifierRequest.Policy) -> Speculation:
    return Speculation(
        mode=from_enum(MODES, pb.mode, "speculation.mode") if pb.mode else SpeculationMode.AUTO,
        rule=from_enum(RULES, pb.rule, "speculation.rule") if pb.rule else None,
        law=from_enum(LAWS, pb.law, "speculation.law") if pb.law else None,
        num_draft_tokens=pb.num_draft_tokens if pb.HasField("num_draft_tokens") else None,
        max_depth=pb.max_depth if pb.HasField("max_depth") else None,
        topk=pb.topk if pb.HasField("topk") else None,
        drafter=pb.drafter,
    )


def committed_to_pb(value: Committed) -> verifier_pb2.Committed:
    if len(value.accepted) != len(value.tokens) or len(value.logprobs) not in (0, len(value.tokens)):
        counts = f"{len(value.accepted)} flags and {len(value.logprobs)} logprobs"
        raise ValueError(f"accepted, logprobs: {counts} for {len(value.tokens)} tokens")
    return verifier_pb2.Committed(
        epoch=value.epoch,
        offset=value.offset,
        tokens=pack_u32(value.tokens),
        accepted=bytes(value.accepted),
        finish=_finish_to_pb(value.finish) if value.finish else None,
        logprobs=logprobs_to_pb(value.logprobs) if value.logprobs else None,
        tree=_tree_to_pb(value.tree) if value.tree else None,
        prefilled=_prefilled_to_pb(value.prefilled) if value.prefilled is not None else None,
    )


def committed_from_pb(pb: verifier_pb2.Committed) -> Committed:
    tokens = unpack_u32(pb.tokens)
    if len(pb.accepted) != len(tokens) or any(flag > 1 for flag in pb.accepted):
        raise ValueError(f"accepted: send {len(tokens)} bytes, one per token, each 0 or 1")
    return Committed(
        epoch=pb.epoch,
        offset=pb.offset,
        tokens=tokens,
        accepted=tuple(flag == 1 for flag in pb.accepted),
        finish=_finish_from_pb(pb.finish) if pb.HasField("finish") else None,
        logprobs=logprobs_from_pb(pb.logprobs, len(tokens)) if pb.HasField("logprobs") else (),
        tree=_tree_from_pb(pb.tree) if pb.HasField("tree") else None,
        prefilled=_prefilled_from_pb(pb.prefilled) if pb.HasField("prefilled") else None,
    )


def _prefilled_to_pb(value: Prefilled) -> verifier_pb2.Committed.Prefilled:
    logprobs = logprobs_to_pb(value.logprobs) if value.logprobs else None
    return verifier_pb2.Committed.Prefilled(num_cached=value.num_cached, logprobs=logprobs)


def _prefilled_from_pb(pb: verifier_pb2.Committed.Prefilled) -> Prefilled:
    return Prefilled(pb.num_cached, logprobs_from_pb(pb.logprobs, len(pb.logprobs.emitted) // 4))


def _tree_to_pb(value: VerifiedTree) -> verifier_pb2.Committed.Tree:
    return verifier_pb2.Committed.Tree(
        tokens=pack_u32(value.tokens), parents=pack_u32(value.parents), path=pack_u32(value.path)
    )


def _tree_from_pb(pb: verifier_pb2.Committed.Tree) -> VerifiedTree:
    return VerifiedTree(unpack_u32(pb.tokens), unpack_u32(pb.parents, "tree.parents"), unpack_u32(pb.path, "tree.path"))


def _finish_to_pb(value: Finish) -> verifier_pb2.Committed.Finish:
    return verifier_pb2.Committed.Finish(
        reason=REASONS[value.reason], stop_token_id=value.stop_token_id, stats=stats_to_pb(value.stats)
    )


def _finish_from_pb(pb: verifier_pb2.Committed.Finish) -> Finish:
    return Finish(
        reason=from_enum(REASONS, pb.reason, "finish.reason"),
        stop_token_id=pb.stop_token_id if pb.HasField("stop_token_id") else None,
        stats=stats_from_pb(pb.stats),
    )


def verifier_info_to_pb(value: VerifierInfo) -> verifier_pb2.VerifierInfo:
    return verifier_pb2.VerifierInfo(
        model=model_to_pb(value.model),
        worker=value.worker,
        incarnation=value.incarnation,
        drafters=value.drafters,
        num_running=value.num_running,
        num_waiting=value.num_waiting,
        max_sessions=value.max_sessions,
        draining=value.draining,
        stats=value.stats,
    )


def verifier_info_from_pb(pb: verifier_pb2.VerifierInfo) -> VerifierInfo:
    return VerifierInfo(
        model=model_from_pb(pb.model),
        worker=pb.worker,
        incarnation=pb.incarnation,
        drafters=tuple(pb.drafters),
        num_running=pb.num_running,
        num_waiting=pb.num_waiting,
        max_sessions=pb.max_sessions,
        draining=pb.draining,
        stats=dict(pb.stats),
    )
