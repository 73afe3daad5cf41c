"""SDK values ↔ the public messages of rootward.v1."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from google.protobuf.message import Message

from rootward.client.types import (
    GenerationResult,
    Load,
    ModelCard,
    SamplingParams,
    ServerInfo,
    SessionEvent,
    Speculation,
    SpeculationStats,
    Timing,
    TokenDelta,
    TokenLogprob,
    Usage,
    VerifierLoad,
    Worker,
)
from rootward.errors import APIError
from rootward.v1 import control_pb2, generate_pb2
from rootward.wire.columns import unpack_f32, unpack_u32

T = TypeVar("T")
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]

_MODES = {"auto": "AUTO", "disabled": "DISABLED", "required": "REQUIRED"}
_VERIFICATIONS = {"traversal": "TRAVERSAL", "coupled": "COUPLED", "token": "TOKEN"}


def request_to_pb(
    prompt: Prompt | None,
    messages: Messages | None,
    sampling: SamplingParams,
    speculation: Speculation | str | bool | None,
    *,
    model: str,
    request_id: str,
    session_id: str,
    priority: int = 0,
    cache_salt: str = "",
) -> generate_pb2.GenerateRequest:
    """TypeError or ValueError for what cannot be said; ranges are checked by the server."""
    message = generate_pb2.GenerateRequest(request_id=request_id, model=model, session_id=session_id)
    if (prompt is None) == (messages is None):
        raise TypeError("give either prompt or messages")
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt is not None:
        _checked("prompt", prompt, message.token_ids.ids.extend)
    else:
        message.chat.CopyFrom(_chat_to_pb(messages or ()))
    _set(message, "priority", priority)
    _set(message.cache, "cache_salt", cache_salt or None)
    _sampling_to_pb(sampling, message)
    message.speculation.CopyFrom(_speculation_to_pb(speculation))
    message.response.speculation_detail = True  # text of every token, for spans
    return message


def delta_from_pb(chunk: generate_pb2.GenerateChunk) -> TokenDelta:
    """What the caller of `stream` sees."""
    accepted = tuple(bool(flag) for flag in chunk.accepted)
    ends = unpack_u32(chunk.text_ends, "text_ends")
    texts = [chunk.text[a:b] for a, b in pairwise((0, *ends))]
    spans = tuple(zip(texts, accepted, strict=False))
    ids = unpack_u32(chunk.token_ids, "token_ids")
    return TokenDelta(chunk.text, ids, accepted, chunk.index, chunk.offset, spans, _logprobs_from_pb(chunk.logprobs))


@dataclass(slots=True)
class Received:
    """What has come of one choice."""

    index: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    last: generate_pb2.GenerateChunk | None = None

    def take(self, chunk: generate_pb2.GenerateChunk) -> None:
        """APIError if a token would be missing or repeated."""
        if chunk.offset != len(self.token_ids):
            raise APIError(f"the server skipped from output position {len(self.token_ids)} to {chunk.offset}")
        delta = delta_from_pb(chunk)
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.accepted += delta.accepted
        self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or _logprobs_from_pb(chunk.prompt_logprobs)
        self.last = chunk

    def result(self, usage: generate_pb2.Usage, request_id: str) -> GenerationResult:
        """A generation put together. Without a finish it was cancelled, or is partial."""
        so_far = GenerationResult(
            "".join(self.text),
            tuple(self.token_ids),
            tuple(self.accepted),
            "cancelled",
            request_id=request_id,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
            index=self.index,
            raw=self.last,
        )
        if self.last is None or not self.last.HasField("finish"):
            return so_far
        finish = self.last.finish
        stop, timing = finish.WhichOneof("stop"), finish.timing
        return replace(
            so_far,
            finish_reason=generate_pb2.Finish.Reason.Name(finish.reason).lower(),
            stop=getattr(finish, stop) if stop else None,
            usage=_usage_from_pb(usage),
            speculation=_stats_from_pb(finish.speculation),
            timing=Timing(timing.queue_ms, timing.ttft_ms, timing.decode_ms, timing.total_ms),
            warnings=tuple(finish.warnings),
        )


def server_info_from_pb(message: control_pb2.ServerInfo) -> ServerInfo:
    return ServerInfo(
        message.version,
        message.role,
        message.worker,
        tuple(_model_from_pb(m) for m in message.models),
        tuple(_worker_from_pb(w) for w in message.verifiers),
        tuple(_worker_from_pb(w) for w in message.drafters),
        tuple(message.features),
        message.uptime_s,
    )


def load_from_pb(message: control_pb2.LoadInfo) -> Load:
    return Load(
        message.num_running,
        message.num_waiting,
        message.max_sessions,
        message.draining,
        message.num_requests,
        message.num_tokens,
        message.num_rounds,
        message.uptime_s,
        tuple(
            VerifierLoad(v.name, v.ready, v.num_running, v.num_waiting, v.max_sessions, dict(v.stats))
            for v in message.verifiers
        ),
    )


def event_from_pb(message: control_pb2.SessionEvent) -> SessionEvent:
    kind = message.WhichOneof("event") or ""
    about = (message.request_id, message.session_id, message.tenant, message.elapsed_s, message.num_missed)
    begun, sent, run, ended = message.begun, message.sent, message.round, message.ended
    return SessionEvent(
        kind,
        *about,
        num_prompt_tokens=begun.num_prompt_tokens,
        num_tokens=begun.num_known_tokens or run.num_tokens or ended.num_tokens,  # one of them is there
        num_accepted=run.num_accepted,
        offset=run.offset,
        verifier=sent.verifier,
        epoch=sent.epoch,
        finish_reason=generate_pb2.Finish.Reason.Name(ended.reason).lower() if ended.reason else "",
        error=ended.error,
    )


def _chat_to_pb(messages: Messages) -> generate_pb2.ChatPrompt:
    parts = [
        generate_pb2.ChatMessage(role=m.get("role", ""), content=m.get("content", ""), name=m.get("name", ""))
        for m in messages
    ]
    return generate_pb2.ChatPrompt(messages=parts)


def _sampling_to_pb(params: SamplingParams, message: generate_pb2.GenerateRequest) -> None:
    stopping, decoding = message.stopping, message.decoding
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "n"):
        _set(message.sampling, name, getattr(params, name))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        _set(decoding, name, getattr(params, name))
    _checked("logit_bias", params.logit_bias, decoding.logit_bias.update)
    _checked("allowed_token_ids", params.allowed_token_ids, decoding.allowed_token_ids.extend)
    _checked("bad_words", params.bad_words, decoding.bad_words.extend)
    _set_form(params, decoding)
    for name in ("max_tokens", "min_tokens"):
        _set(stopping, name, getattr(params, name))
    _set(message.response, "logprobs", params.logprobs)
    _set(message.response, "prompt_logprobs", params.prompt_logprobs)
    stopping.stop.extend([params.stop] if isinstance(params.stop, str) else params.stop)
    _checked("stop_token_ids", params.stop_token_ids, stopping.stop_token_ids.extend)
    stopping.ignore_eos, stopping.include_stop_str_in_output = params.ignore_eos, params.include_stop
    message.response.skip_special_tokens = params.skip_special_tokens


def _set_form(params: SamplingParams, decoding: generate_pb2.Decoding) -> None:
    forms = {"json_object": params.json_object or None, "json_schema": params.json_schema}
    forms |= {"regex": params.regex, "grammar": params.grammar}
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        raise ValueError(f"{', '.join(given)}: a text has one form; give one of them")
    for name, form in given.items():
        _set(decoding, name, json.dumps(form, ensure_ascii=False) if isinstance(form, Mapping) else form)


def _logprobs_from_pb(pb: generate_pb2.Logprobs) -> tuple[TokenLogprob, ...]:
    emitted = unpack_f32(pb.emitted, "logprobs.emitted")
    ids, top = unpack_u32(pb.top_token_ids, "logprobs.top_token_ids"), unpack_f32(pb.top_logprobs, "logprobs.top")
    k = len(ids) // len(emitted) if emitted else 0
    pairs = list(zip(ids, top, strict=True))
    return tuple(TokenLogprob(value, tuple(pairs[i * k : (i + 1) * k])) for i, value in enumerate(emitted))


def _set(message: Message, name: str, value: object) -> None:
    """Set a field unless the value is None."""
    if value is not None:
        _checked(name, value, lambda v: setattr(message, name, v))


def _checked(name: str, value: T, put: Callable[[T], None]) -> None:
    """Protobuf's own complaints do not name the field."""
    try:
        put(value)
    except (ValueError, TypeError):
        raise ValueError(f"{name}: {value!r} is out of range or of the wrong type") from None


def _speculation_to_pb(wish: Speculation | str | bool | None) -> generate_pb2.Speculation:
    if wish is None or isinstance(wish, bool):
        wish = Speculation("disabled" if wish is False else "auto")
    if isinstance(wish, str):
        wish = Speculation(wish)
    if wish.mode not in _MODES:
        raise ValueError(f"speculation.mode: {wish.mode!r} is unknown; use one of {', '.join(_MODES)}")
    if wish.verification is not None and wish.verification not in _VERIFICATIONS:
        known = ", ".join(_VERIFICATIONS)
        raise ValueError(f"speculation.verification: {wish.verification!r} is unknown; use one of {known}")
    message = generate_pb2.Speculation(mode=generate_pb2.Speculation.Mode.Value(_MODES[wish.mode]))
    if wish.verification is not None:
        message.verification = generate_pb2.Speculation.Verification.Value(_VERIFICATIONS[wish.verification])
    for name in ("max_depth", "topk", "num_draft_tokens", "drafter", "prediction"):
        _set(message, name, getattr(wish, name))
    return message


def _usage_from_pb(usage: generate_pb2.Usage) -> Usage:
    predicted = usage.HasField("accepted_prediction_tokens")
    pair = (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) if predicted else (None, None)
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, *pair)


def _stats_from_pb(stats: generate_pb2.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        stats.num_spec_steps,
        stats.num_plain_steps,
        stats.num_draft_tokens,
        stats.num_accepted_draft_tokens,
        stats.num_drafter_misses,
        tuple(stats.acceptance_histogram),
        stats.drafter,
        stats.verification,
        stats.seed,
    )


def _model_from_pb(m: control_pb2.ModelInfo) -> ModelCard:
    return ModelCard(m.name, m.vocab_size, m.max_positions, tuple(m.eos_ids), m.num_parameters, m.supports_trees)


def _worker_from_pb(w: control_pb2.WorkerInfo) -> Worker:
    return Worker(w.name, w.address, w.model, w.ready, w.draining)
