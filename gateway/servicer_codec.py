"""The public messages of rootward.v1 ↔ the gateway's own values."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from gateway.access import tenant
from gateway.planning import refusing
from gateway.requests import Chat, Delta, Ending, GenerateRequest, Resume, Usage
from gateway.stops import Span
from rootward.core.requests import DraftMode, Rule, Speculation, SpeculationMode, TokenLogprob
from rootward.errors import InvalidRequest
from rootward.v1 import generate_pb2 as pb
from rootward.wire.codec_common import REASONS, stats_to_pb
from rootward.wire.codec_sampling import logprobs_to_pb, processors_from_pb, structure_from_pb
from rootward.wire.columns import pack_u32

_MODES = {
    pb.Speculation.MODE_UNSPECIFIED: SpeculationMode.AUTO,
    pb.Speculation.AUTO: SpeculationMode.AUTO,
    pb.Speculation.DISABLED: SpeculationMode.DISABLED,
    pb.Speculation.REQUIRED: SpeculationMode.REQUIRED,
}
_VERIFICATIONS: dict[int, tuple[Rule | None, DraftMode | None]] = {
    pb.Speculation.VERIFICATION_UNSPECIFIED: (None, None),
    pb.Speculation.TRAVERSAL: (Rule.TRAVERSAL, None),
    pb.Speculation.COUPLED: (Rule.MATCH, DraftMode.COUPLED),
    pb.Speculation.TOKEN: (Rule.TOKEN, None),
}


def request_from_pb(
    message: pb.GenerateRequest, *, deadline_s: float | None = None, metadata: Mapping[str, str] | None = None
) -> GenerateRequest:
    """The request of a client. `metadata` is that of the call. InvalidRequest for what cannot be served."""
    headers = metadata or {}
    stopping, response = message.stopping, message.response
    with refusing():
        return GenerateRequest(
            prompt=_prompt(message),
            request_id=message.request_id or headers.get("x-request-id", ""),
            model=message.model,
            sampling=processors_from_pb(message.sampling, message.decoding),
            max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
            stop=tuple(stopping.stop),
            stop_token_ids=tuple(stopping.stop_token_ids),
            include_stop=stopping.include_stop_str_in_output,
            ignore_eos=stopping.ignore_eos,
            skip_special_tokens=response.skip_special_tokens if response.HasField("skip_special_tokens") else True,
            seed=message.sampling.seed if message.sampling.HasField("seed") else None,
            speculation=_speculation(message.speculation),
            session_id=message.session_id or headers.get("x-session-id", ""),
            deadline_s=deadline_s,
            min_tokens=stopping.min_tokens,
            structure=structure_from_pb(message.decoding),
            bad_words=tuple(message.decoding.bad_words),
            logprobs=response.logprobs if response.HasField("logprobs") else None,
            n=message.sampling.n if message.sampling.HasField("n") else 1,
            priority=message.priority,
            tenant=tenant(headers),
            resume=_resume(message),
            prompt_logprobs=response.prompt_logprobs if response.HasField("prompt_logprobs") else None,
            prediction=message.speculation.prediction,
            traceparent=headers.get("traceparent", ""),
            cache_salt=uuid.uuid4().hex if message.cache.bypass_prefix_cache else message.cache.cache_salt,
        )


def chat_from_pb(message: pb.ChatPrompt) -> Chat:
    """The conversation of a client."""
    if not message.messages:
        raise InvalidRequest("chat.messages", 0, "messages are not enough; send at least one")
    return Chat(
        tuple(_chat_message(m) for m in message.messages),
        message.add_generation_prompt if message.HasField("add_generation_prompt") else True,
        message.continue_final_message,
        _template_kwargs(message.template_kwargs_json),
    )


def finish_to_pb(ending: Ending, *, detail: bool) -> pb.Finish:
    """How it ended. `detail` adds the histogram of accepted lengths."""
    timing = ending.timing
    stats = ending.stats if detail else replace(ending.stats, acceptance_histogram=())
    finish = pb.Finish(
        reason=REASONS[ending.reason],
        speculation=stats_to_pb(stats),
        timing=pb.Timing(
            queue_ms=timing.queue_ms, ttft_ms=timing.ttft_ms, decode_ms=timing.decode_ms, total_ms=timing.total_ms
        ),
        warnings=ending.warnings,
    )
    for field in ("eos_token_id", "stop_token_id", "stop_string"):
        if (value := getattr(ending, field)) is not None:
            setattr(finish, field, value)
    return finish


def usage_to_pb(usage: Usage) -> pb.Usage:
    accepted, rejected = usage.predicted or (None, None)
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=rejected,
    )


def chunk_to_pb(delta: Delta, response: pb.ResponseOptions) -> pb.GenerateChunk:
    """A run of spans as the client wants to see it."""
    chunk, spans = pb.GenerateChunk(request_id=delta.request_id, index=delta.index, offset=delta.offset), delta.spans
    _tell(chunk, spans, response)
    if response.speculation_detail:
        chunk.text_ends = pack_u32(list(accumulate(len(s.text) for s in spans)), "text_ends")
    if delta.offset == 0:
        _tell_of_prompt(chunk, delta.prompt_logprobs)
    if delta.ending is not None:
        chunk.finish.CopyFrom(finish_to_pb(delta.ending, detail=response.speculation_detail))
    return chunk


def choice_to_pb(
    index: int,
    spans: Sequence[Span],
    ending: Ending,
    response: pb.ResponseOptions,
    prompt_logprobs: Sequence[TokenLogprob] = (),
) -> pb.Choice:
    """A whole choice."""
    choice = pb.Choice(index=index, finish=finish_to_pb(ending, detail=response.speculation_detail))
    _tell(choice, spans, response)
    _tell_of_prompt(choice, prompt_logprobs)
    return choice


def _tell(message: pb.GenerateChunk | pb.Choice, spans: Sequence[Span], response: pb.ResponseOptions) -> None:
    """Text, ids and log-probabilities, as far as they are wanted."""
    if not response.HasField("text") or response.text:
        message.text = "".join(s.text for s in spans)
    if not response.HasField("token_ids") or response.token_ids:
        message.token_ids, message.accepted = (
            pack_u32([s.token for s in spans], "token_ids"),
            bytes(s.accepted for s in spans),
        )
    if response.HasField("logprobs") and spans:
        message.logprobs.CopyFrom(logprobs_to_pb([s.logprob for s in spans if s.logprob is not None]))


def _tell_of_prompt(message: pb.GenerateChunk | pb.Choice, told: Sequence[TokenLogprob]) -> None:
    if told:
        message.prompt_logprobs.CopyFrom(logprobs_to_pb(told))


def _prompt(message: pb.GenerateRequest) -> str | tuple[int, ...] | Chat:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "chat":
        return chat_from_pb(message.chat)
    if kind == "token_ids" and message.token_ids.ids:
        return tuple(message.token_ids.ids)
    raise InvalidRequest("prompt", "", "is missing or empty; send text, token_ids or chat")


def _resume(message: pb.GenerateRequest) -> Resume | None:
    received = tuple(message.resume_tokens.ids)
    if not message.HasField("resume_offset"):
        return Resume(len(received), received) if received else None
    return Resume(message.resume_offset, received)


def _speculation(message: pb.Speculation) -> Speculation:
    mode, verification = _MODES.get(message.mode), _VERIFICATIONS.get(message.verification)
    if mode is None:
        raise InvalidRequest("speculation.mode", message.mode, "is unknown; use AUTO, DISABLED or REQUIRED")
    if verification is None:
        fix = "is unknown; use TRAVERSAL, COUPLED or TOKEN"
        raise InvalidRequest("speculation.verification", message.verification, fix)
    sizes = {
        name: getattr(message, name) if message.HasField(name) else None
        for name in ("num_draft_tokens", "max_depth", "topk")
    }
    return Speculation(mode, *verification, **sizes, drafter=message.drafter)


def _chat_message(message: pb.ChatMessage) -> dict[str, str]:
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **named}


def _template_kwargs(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest("chat.template_kwargs_json", text[:32], "is no JSON object")
    return value
