"""Frames between verifier and drafter (`rootward.core.frames`) ↔ protobuf."""

from __future__ import annotations

from rootward.core.frames import (
    Close,
    Commit,
    FromDrafter,
    Hello,
    HelloAck,
    Load,
    NeedSync,
    Open,
    Reject,
    ToDrafter,
)
from rootward.v1 import drafter_pb2
from rootward.wire.codec_common import LAWS, from_enum, model_from_pb, model_to_pb
from rootward.wire.codec_grow import add_grows, grow_from_pb
from rootward.wire.codec_sampling import decoding_to_pb, sampling_from_pb, sampling_to_pb
from rootward.wire.columns import pack_u32, unpack_u32
from rootward.wire.info import DrafterInfo

_LAW_OF_NUMBER = {number: law for law, number in LAWS.items()}


def to_drafter_to_pb(value: ToDrafter) -> drafter_pb2.ToDrafter:
    return drafter_pb2.ToDrafter(
        hello=_hello_to_pb(value.hello) if value.hello else None,
        opens=[_open_to_pb(x) for x in value.opens],
        commits=[_commit_to_pb(x) for x in value.commits],
        closes=[drafter_pb2.Close(slot=x.slot, reason=x.reason) for x in value.closes],
        load=_load_to_pb(value.load) if value.load else None,
    )


def to_drafter_from_pb(pb: drafter_pb2.ToDrafter) -> ToDrafter:
    """An Open that cannot be read costs its slot; anything else that cannot is a ValueError."""
    opens = [_open_or_fault(x) for x in pb.opens]
    return ToDrafter(
        hello=_hello_from_pb(pb.hello) if pb.HasField("hello") else None,
        opens=tuple(x for x in opens if isinstance(x, Open)),
        commits=tuple(_commit_from_pb(x) for x in pb.commits),
        closes=tuple(Close(x.slot, x.reason) for x in pb.closes),
        load=_load_from_pb(pb.load) if pb.HasField("load") else None,
        unreadable=tuple(x for x in opens if isinstance(x, Reject)),
    )


def from_drafter_to_pb(value: FromDrafter) -> drafter_pb2.FromDrafter:
    pb = drafter_pb2.FromDrafter(
        ack=_ack_to_pb(value.ack) if value.ack else None,
        need_syncs=[_need_sync_to_pb(x) for x in value.need_syncs],
        rejects=[_reject_to_pb(x) for x in value.rejects],
        load=_load_to_pb(value.load) if value.load else None,
    )
    add_grows(pb, value.grows)
    return pb


def from_drafter_from_pb(pb: drafter_pb2.FromDrafter) -> FromDrafter:
    return FromDrafter(
        ack=_ack_from_pb(pb.ack) if pb.HasField("ack") else None,
        grows=tuple(grow_from_pb(x) for x in pb.grows),
        need_syncs=tuple(NeedSync(x.slot, x.have_len, x.have_hash) for x in pb.need_syncs),
        rejects=tuple(Reject(x.slot, x.reason, x.retry_after_ms) for x in pb.rejects),
        load=_load_from_pb(pb.load) if pb.HasField("load") else None,
    )


def drafter_info_to_pb(value: DrafterInfo) -> drafter_pb2.DrafterInfo:
    return drafter_pb2.DrafterInfo(
        model=model_to_pb(value.model), ack=_ack_to_pb(value.ack), load=_load_to_pb(value.load)
    )


def drafter_info_from_pb(pb: drafter_pb2.DrafterInfo) -> DrafterInfo:
    return DrafterInfo(model_from_pb(pb.model), _ack_from_pb(pb.ack), _load_from_pb(pb.load))


def _hello_to_pb(value: Hello) -> drafter_pb2.Hello:
    return drafter_pb2.Hello(
        protocol=value.protocol,
        worker=value.worker,
        incarnation=value.incarnation,
        tokenizer_hash=value.tokenizer_hash,
        vocab_size=value.vocab_size,
        max_positions=value.max_positions,
    )


def _hello_from_pb(pb: drafter_pb2.Hello) -> Hello:
    return Hello(
        worker=pb.worker,
        incarnation=pb.incarnation,
        tokenizer_hash=pb.tokenizer_hash,
        vocab_size=pb.vocab_size,
        max_positions=pb.max_positions,
        protocol=pb.protocol,
    )


def _ack_to_pb(value: HelloAck) -> drafter_pb2.HelloAck:
    return drafter_pb2.HelloAck(
        protocol=value.protocol,
        worker=value.worker,
        incarnation=value.incarnation,
        tokenizer_hash=value.tokenizer_hash,
        vocab_size=value.vocab_size,
        max_positions=value.max_positions,
        laws=[LAWS[law] for law in value.laws],
        capacity=value.capacity,
        max_atoms=value.max_atoms,
        refusal=value.refusal,
    )


def _ack_from_pb(pb: drafter_pb2.HelloAck) -> HelloAck:
    """Laws that this version does not know are left out: it would never ask for them."""
    return HelloAck(
        worker=pb.worker,
        incarnation=pb.incarnation,
        tokenizer_hash=pb.tokenizer_hash,
        vocab_size=pb.vocab_size,
        max_positions=pb.max_positions,
        laws=tuple(_LAW_OF_NUMBER[number] for number in pb.laws if number in _LAW_OF_NUMBER),
        capacity=pb.capacity,
        max_atoms=pb.max_atoms,
        refusal=pb.refusal,
        protocol=pb.protocol,
    )


def _open_to_pb(value: Open) -> drafter_pb2.Open:
    return drafter_pb2.Open(
        slot=value.slot,
        session=value.session,
        epoch=value.epoch,
        prefix=pack_u32(value.prefix, "open.prefix"),
        sampling=sampling_to_pb(value.sampling),
        law=LAWS[value.law],
        seed=value.seed,
        choice=value.choice,
        num_atoms=value.num_atoms,
        node_cap=value.node_cap,
        max_depth=value.max_depth,
        topk=value.topk,
        eos_ids=value.eos_ids,
        decoding=decoding_to_pb(value.sampling),
        ahead_cap=value.ahead_cap,
        bonus_key=value.bonus_key,
        prediction=pack_u32(value.prediction, "open.prediction"),
        num_prompt=value.num_prompt,
        traceparent=value.traceparent,
        tenant=value.tenant,
        node_budget=value.node_budget,
    )


def _open_from_pb(pb: drafter_pb2.Open) -> Open:
    return Open(
        slot=pb.slot,
        session=pb.session,
        epoch=pb.epoch,
        prefix=unpack_u32(pb.prefix, "open.prefix"),
        sampling=sampling_from_pb(pb.sampling, pb.decoding),
        law=from_enum(LAWS, pb.law, "open.law"),
        seed=pb.seed,
        choice=pb.choice,
        num_atoms=pb.num_atoms,
        node_cap=pb.node_cap,
        max_depth=pb.max_depth,
        topk=pb.topk,
        eos_ids=tuple(pb.eos_ids),
        ahead_cap=pb.ahead_cap,
        bonus_key=pb.bonus_key if pb.HasField("bonus_key") else None,
        prediction=unpack_u32(pb.prediction, "open.prediction"),
        num_prompt=pb.num_prompt,
        traceparent=pb.traceparent,
        tenant=pb.tenant,
        node_budget=pb.node_budget if pb.HasField("node_budget") else None,
    )


def _open_or_fault(pb: drafter_pb2.Open) -> Open | Reject:
    try:
        return _open_from_pb(pb)
    except ValueError as error:
        return Reject(pb.slot, str(error))


def _commit_to_pb(value: Commit) -> drafter_pb2.Commit:
    return drafter_pb2.Commit(
        slot=value.slot,
        base_len=value.base_len,
        tokens=pack_u32(value.tokens, "commit.tokens"),
        hash_after=value.hash_after,
        runs=value.runs,
        node_budget=value.node_budget,
    )


def _commit_from_pb(pb: drafter_pb2.Commit) -> Commit:
    tokens, runs = unpack_u32(pb.tokens, "commit.tokens"), tuple(pb.runs)
    if runs and (sum(runs) != len(tokens) or min(runs) < 1):
        raise ValueError(f"commit.runs: {runs} for {len(tokens)} tokens; give lengths of at least 1 that add up")
    budget = pb.node_budget if pb.HasField("node_budget") else None
    return Commit(pb.slot, pb.base_len, tokens, pb.hash_after, runs, budget)


def _need_sync_to_pb(value: NeedSync) -> drafter_pb2.NeedSync:
    return drafter_pb2.NeedSync(slot=value.slot, have_len=value.have_len, have_hash=value.have_hash)


def _reject_to_pb(value: Reject) -> drafter_pb2.Reject:
    return drafter_pb2.Reject(slot=value.slot, reason=value.reason, retry_after_ms=value.retry_after_ms)


def _load_to_pb(value: Load) -> drafter_pb2.Load:
    return drafter_pb2.Load(
        sessions=value.sessions,
        capacity=value.capacity,
        queue_us=value.queue_us,
        incarnation=value.incarnation,
        draining=value.draining,
    )


def _load_from_pb(pb: drafter_pb2.Load) -> Load:
    return Load(
        sessions=pb.sessions,
        capacity=pb.capacity,
        queue_us=pb.queue_us,
        incarnation=pb.incarnation,
        draining=pb.draining,
    )
