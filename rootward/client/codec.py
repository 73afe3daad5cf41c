"""SDK values ↔ the public messages of rootward.v1."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from rootward.client.types import (
    GenerationResult,
    Load,
    Messages,
    Prompt,
    Round,
    SamplingParams,
    ServerInfo,
    SessionEvent,
    Speculation,
    Timing,
    TokenDelta,
    TokenLogprob,
    Usage,
    VerifierLoad,
    Worker,
)
from rootward.errors import APIError
from rootward.v1 import control_pb2, generate_pb2
from rootward.wire.columns import unpack_u32
from rootward.wire.records import Record, u32
from rootward.wire.values_codec import MODEL, STATS, unpack_logprobs

VERIFICATIONS = tuple(name.lower() for name, number in generate_pb2.Speculation.Verification.items() if number)
FORMS = ("json_object", "json_schema", "regex", "grammar")
MESSAGE_KEYS = ("role", "content", "name")  # of a chat message on the wire
# What a field can hold, by its type.
POSSIBLE_VALUES = {
    FieldDescriptor.CPPTYPE_UINT32: f"a whole number from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"a whole number from 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_INT32: f"a whole number from {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_INT64: f"a whole number from {-(2**63)} to {2**63 - 1}",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "text",
}

USAGE = Record(Usage, generate_pb2.Usage)
TIMING = Record(Timing, generate_pb2.Timing)
ROUND = Record(
    Round,
    generate_pb2.Round,
    token_ids=u32("rounds.token_ids"),
    tree_tokens=u32("rounds.tree_tokens"),
    tree_parents=u32("rounds.tree_parents"),
    path=u32("rounds.path"),
)
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
    """The request of `stream`. ValueError for a value that the message cannot hold; the server checks ranges."""
    if (prompt is None) == (messages is None):
        raise TypeError("give either prompt or messages")
    message = generate_pb2.GenerateRequest()
    set_field(message, "request_id", request_id or uuid.uuid4().hex)
    set_field(message, "model", model)
    set_field(message, "session_id", session_id)
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt is not None:
        set_field(message.token_ids, "ids", prompt, label="prompt")
    else:
        message.chat.CopyFrom(_chat_to_pb(messages or ()))
    set_field(message, "priority", priority)
    set_field(message.cache, "cache_salt", cache_salt)
    if sampling is not None:
        _set_sampling(message, sampling)
    if not isinstance(speculation, Speculation):
        mode = speculation if isinstance(speculation, str) else "disabled" if speculation is False else "auto"
        speculation = Speculation(mode)
    _set_fields(message.speculation, speculation, prefix="speculation.")
    message.response.speculation_detail = True  # text of every token, for spans
    message.response.trees = return_trees
    return message


def delta_from_pb(chunk: generate_pb2.GenerateChunk) -> TokenDelta:
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
    """The part of one choice that has arrived."""

    index: int = 0
    deltas: list[TokenDelta] = field(default_factory=list)
    num_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    last: generate_pb2.GenerateChunk | None = None

    def take(self, chunk: generate_pb2.GenerateChunk) -> TokenDelta:
        """Add a chunk. APIError if a token would be missing or repeated."""
        if chunk.offset != self.num_tokens:
            raise APIError(f"the server skipped from output position {self.num_tokens} to {chunk.offset}")
        delta = delta_from_pb(chunk)
        self.deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        self.prompt_logprobs = self.prompt_logprobs or unpack_logprobs(chunk.prompt_logprobs)
        self.last = chunk
        return delta

    def joined(self, name: str) -> tuple[Any, ...]:
        """This field of all deltas, concatenated."""
        return tuple(chain.from_iterable(getattr(delta, name) for delta in self.deltas))

    def result(self, usage: generate_pb2.Usage, request_id: str) -> GenerationResult:
        """The generation. Without a finish it was cancelled, or is partial."""
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
            set_field(target, key, value, label=f"{at}.{key}")
    return chat


def _text_of(content: object, at: str) -> object:
    """The text of a message: itself, or its parts, a line each."""
    if content is None:
        raise ValueError(f"{at}: is missing; send a text or a list of text parts")
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'{at}[{i}]: {part!r} is no text part; send {{"type": "text", "text": ...}}')
    return "\n".join(part["text"] for part in content)


def _set_sampling(message: generate_pb2.GenerateRequest, params: SamplingParams) -> None:
    forms = [name for name in FORMS if getattr(params, name) not in (None, False)]
    if len(forms) > 1:
        raise ValueError(f"{', '.join(forms)}: a text has one form; give one of them")
    changes: dict[str, Any] = {
        "stop": [params.stop] if isinstance(params.stop, str) else params.stop,
        "json_object": params.json_object or None,  # False would be sent as the form of the text
    }
    if isinstance(params.json_schema, Mapping):
        changes["json_schema"] = json.dumps(params.json_schema, ensure_ascii=False)
    params = replace(params, **changes)
    for part in (message.sampling, message.decoding, message.stopping, message.response):
        _set_fields(part, params)
    message.stopping.include_stop_str_in_output = params.include_stop


def _set_fields(message: Message, values: object, prefix: str = "") -> None:
    """Copy the attributes of `values` that are fields of the message. None leaves a field unset."""
    for name in message.DESCRIPTOR.fields_by_name:
        value = getattr(values, name, None)
        if value is not None:
            set_field(message, name, value, label=prefix + name)


def set_field(message: Message, name: str, value: Any, label: str = "") -> None:
    """Set a field. ValueError with the label of the field, which protobuf's own errors do not name."""
    field = message.DESCRIPTOR.fields_by_name[name]
    label = label or name
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if field.enum_type is not None:
        known = {one.name.lower(): one.number for one in field.enum_type.values if one.number}
        if value not in known:
            raise ValueError(f"{label}: {value!r} is unknown; use one of {', '.join(known)}")
        value = known[value]
    try:
        if not field.is_repeated:
            setattr(message, name, value)
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif is_map or isinstance(value, str | bytes):  # also sequences, of characters and of numbers
            raise TypeError
        else:
            getattr(message, name).extend(value)
    except (ValueError, TypeError):
        fix = POSSIBLE_VALUES.get(field.cpp_type, "a message")
        if is_map:
            fix = "a mapping"
        elif field.is_repeated:
            fix = f"a list, each item {fix}"
        raise ValueError(f"{label}: {value!r} is out of range or of the wrong type; use {fix}") from None
