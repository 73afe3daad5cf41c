"""SDK values ↔ the public messages of rootward.v1."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, TypeVar

from google.protobuf.message import Message

from rootward.client.types import (
    GenerationResult,
    Load,
    Messages,
    ModelCard,
    Prompt,
    Round,
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
from rootward.wire.columns import unpack_logprobs, unpack_u32
from rootward.wire.records import Conversion, Record, u32

T = TypeVar("T")

VERIFICATIONS = tuple(name.lower() for name, number in generate_pb2.Speculation.Verification.items() if number)
MESSAGE_KEYS = ("role", "content", "name")  # of a chat message on the wire

USAGE = Record(Usage, generate_pb2.Usage)
STATS = Record(SpeculationStats, generate_pb2.SpeculationStats)
TIMING = Record(Timing, generate_pb2.Timing)
ROUND = Record(
    Round,
    generate_pb2.Round,
    token_ids=u32("rounds.token_ids"),
    tree_tokens=u32("rounds.tree_tokens"),
    tree_parents=u32("rounds.tree_parents"),
    path=u32("rounds.path"),
)
LOSSLESS = Conversion(
    lambda name: control_pb2.ServerInfo.LosslessLevel.Value(name.upper()),
    lambda number: "bitwise" if number == control_pb2.ServerInfo.BITWISE else "distribution",
)
MODEL = Record(ModelCard, control_pb2.ModelInfo, lossless=LOSSLESS)
WORKER = Record(Worker, control_pb2.WorkerInfo)
SERVER_INFO = Record(ServerInfo, control_pb2.ServerInfo, models=MODEL.each, verifiers=WORKER.each, drafters=WORKER.each)
LOAD = Record(Load, control_pb2.LoadInfo, verifiers=Record(VerifierLoad, control_pb2.VerifierLoad).each)


def request_to_pb(
    prompt: Prompt | None = None,
    *,
    messages: Messages | None = None,
    sampling: SamplingParams | None = None,
    speculation: Speculation | str | bool | None = None,
    model: str = "",
    request_id: str = "",
    session_id: str = "",
    priority: int = 0,
    cache_salt: str = "",
    return_trees: bool = False,
) -> generate_pb2.GenerateRequest:
    """TypeError or ValueError for what cannot be said; ranges are checked by the server."""
    message = generate_pb2.GenerateRequest(
        request_id=request_id or uuid.uuid4().hex, model=model, session_id=session_id
    )
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
    _sampling_to_pb(sampling or SamplingParams(), message)
    message.speculation.CopyFrom(_speculation_to_pb(speculation))
    message.response.speculation_detail = True  # text of every token, for spans
    message.response.trees = return_trees
    return message


def delta_from_pb(chunk: generate_pb2.GenerateChunk) -> TokenDelta:
    """What the caller of `stream` sees."""
    accepted = tuple(bool(flag) for flag in chunk.accepted)
    ends = unpack_u32(chunk.text_ends, "text_ends")
    texts = [chunk.text[a:b] for a, b in pairwise((0, *ends))]
    spans = tuple(zip(texts, accepted, strict=False))
    ids = unpack_u32(chunk.token_ids, "token_ids")
    return TokenDelta(
        text=chunk.text,
        token_ids=ids,
        accepted=accepted,
        index=chunk.index,
        offset=chunk.offset,
        spans=spans,
        logprobs=unpack_logprobs(chunk.logprobs),
        rounds=tuple(map(ROUND.from_pb, chunk.rounds)),
    )


@dataclass(slots=True)
class Received:
    """What has come of one choice."""

    index: int = 0
    deltas: list[TokenDelta] = field(default_factory=list)
    num_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    last: generate_pb2.GenerateChunk | None = None

    def take(self, chunk: generate_pb2.GenerateChunk) -> TokenDelta:
        """APIError if a token would be missing or repeated."""
        if chunk.offset != self.num_tokens:
            raise APIError(f"the server skipped from output position {self.num_tokens} to {chunk.offset}")
        delta = delta_from_pb(chunk)
        self.deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        self.prompt_logprobs = self.prompt_logprobs or unpack_logprobs(chunk.prompt_logprobs)
        self.last = chunk
        return delta

    def joined(self, name: str) -> tuple[Any, ...]:
        """This field of all deltas together."""
        return tuple(chain.from_iterable(getattr(delta, name) for delta in self.deltas))

    def result(self, usage: generate_pb2.Usage, request_id: str) -> GenerationResult:
        """A generation put together. Without a finish it was cancelled, or is partial."""
        so_far = GenerationResult(
            "".join(delta.text for delta in self.deltas),
            self.joined("token_ids"),
            self.joined("accepted"),
            "cancelled",
            request_id=request_id,
            logprobs=self.joined("logprobs"),
            prompt_logprobs=self.prompt_logprobs,
            index=self.index,
            rounds=self.joined("rounds"),
            raw=self.last,
        )
        if self.last is None or not self.last.HasField("finish"):
            return so_far
        finish = self.last.finish
        stop = finish.WhichOneof("stop")
        return replace(
            so_far,
            finish_reason=generate_pb2.Finish.Reason.Name(finish.reason).lower(),
            stop=getattr(finish, stop) if stop else None,
            usage=USAGE.from_pb(usage),
            speculation=STATS.from_pb(finish.speculation),
            timing=TIMING.from_pb(finish.timing),
            warnings=tuple(finish.warnings),
        )


def event_from_pb(message: control_pb2.SessionEvent) -> SessionEvent:
    begun = message.begun
    ended = message.ended
    return SessionEvent(
        kind=message.WhichOneof("event") or "",
        request_id=message.request_id,
        session_id=message.session_id,
        tenant=message.tenant,
        elapsed_s=message.elapsed_s,
        num_missed=message.num_missed,
        num_prompt_tokens=begun.num_prompt_tokens,
        num_tokens=begun.num_known_tokens or message.round.num_tokens or ended.num_tokens,  # at most one is set
        num_accepted=message.round.num_accepted,
        offset=message.round.offset,
        verifier=message.sent.verifier,
        epoch=message.sent.epoch,
        finish_reason=generate_pb2.Finish.Reason.Name(ended.reason).lower() if ended.reason else "",
        error=ended.error,
    )


def _chat_to_pb(messages: Messages) -> generate_pb2.ChatPrompt:
    chat = generate_pb2.ChatPrompt()
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{at}: {message!r} is no mapping; send one with role and content")
        if other := [key for key in message if key not in MESSAGE_KEYS]:
            fix = "send it over HTTP (/v1/chat/completions), or leave it out"
            raise ValueError(f"{at}.{other[0]}: is not carried by gRPC, only {', '.join(MESSAGE_KEYS)}; {fix}")
        fields = {key: value for key, value in message.items() if key != "content"}
        fields["content"] = _text_of(message.get("content"), f"{at}.content")
        target = chat.messages.add()
        for key, value in fields.items():
            _set_named(target, key, value, f"{at}.{key}")
    return chat


def _text_of(content: object, at: str) -> object:
    """The text of a message: itself, or its parts joined."""
    if content is None:
        raise ValueError(f"{at}: is missing; send a text or a list of text parts")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'{at}[{i}]: {part!r} is no text part; send {{"type": "text", "text": ...}}')
    return "".join(part["text"] for part in content)


def _sampling_to_pb(params: SamplingParams, message: generate_pb2.GenerateRequest) -> None:
    stopping = message.stopping
    decoding = message.decoding
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
    stopping.ignore_eos = params.ignore_eos
    stopping.include_stop_str_in_output = params.include_stop
    message.response.skip_special_tokens = params.skip_special_tokens


def _set_form(params: SamplingParams, decoding: generate_pb2.Decoding) -> None:
    forms = {"json_object": params.json_object or None, "json_schema": params.json_schema}
    forms |= {"regex": params.regex, "grammar": params.grammar}
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        raise ValueError(f"{', '.join(given)}: a text has one form; give one of them")
    for name, form in given.items():
        _set(decoding, name, json.dumps(form, ensure_ascii=False) if isinstance(form, Mapping) else form)


def _set(message: Message, name: str, value: object) -> None:
    """Set a field unless the value is None."""
    if value is not None:
        _set_named(message, name, value, name)


def _set_named(message: Message, name: str, value: object, told: str) -> None:
    _checked(told, value, lambda v: setattr(message, name, v))


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
    message = generate_pb2.Speculation(mode=_number(generate_pb2.Speculation.Mode, "speculation.mode", wish.mode))
    if wish.verification is not None:
        kind = generate_pb2.Speculation.Verification
        message.verification = _number(kind, "speculation.verification", wish.verification)
    for name in ("draft_strategy", "max_depth", "topk", "num_draft_tokens", "drafter", "prediction"):
        _set(message, name, getattr(wish, name))
    return message


def _number(kind: Any, field: str, name: str) -> Any:
    """Of an enum of the wire, whose names are in capitals; 0 has none."""
    known = {value.lower(): number for value, number in kind.items() if number}
    if name not in known:
        raise ValueError(f"{field}: {name!r} is unknown; use one of {', '.join(known)}")
    return known[name]
