"""What an operator sees, as messages: events of requests and the load of verifiers."""

from __future__ import annotations

from gateway.upstreams import Upstream
from gateway.watching import Begun, Event, Round, Sent
from rootward.v1 import control_pb2 as pb
from rootward.wire.codec_common import REASONS


def event_to_pb(event: Event) -> pb.SessionEvent:
    message = pb.SessionEvent(
        request_id=event.request_id,
        session_id=event.session_id,
        tenant=event.tenant,
        elapsed_s=event.elapsed_s,
        num_missed=event.num_missed,
    )
    what = event.what
    if isinstance(what, Begun):
        message.begun.num_prompt_tokens, message.begun.num_known_tokens = what.num_prompt_tokens, what.num_known_tokens
    elif isinstance(what, Sent):
        message.sent.verifier, message.sent.epoch = what.verifier, what.epoch
    elif isinstance(what, Round):
        told = message.round
        told.offset, told.num_tokens, told.num_accepted = what.offset, what.num_tokens, what.num_accepted
    else:
        message.ended.error, message.ended.num_tokens = what.error, what.num_tokens
        if what.reason is not None:
            message.ended.reason = REASONS[what.reason]
    return message


def verifier_load_to_pb(upstream: Upstream) -> pb.VerifierLoad:
    """As it last said."""
    info = upstream.info
    if info is None:
        return pb.VerifierLoad(name=upstream.name)
    return pb.VerifierLoad(
        name=info.worker,
        ready=upstream.ready,
        num_running=info.num_running,
        num_waiting=info.num_waiting,
        max_sessions=info.max_sessions,
        stats=info.stats,
    )
