"""What the bodies of both OpenAI endpoints have in common. Unknown names are ignored, known and unsupported ones refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.auth import tenant
from gateway.http_speculation import speculation
from gateway.http_structure import structure
from gateway.http_values import boolean, content, integer, number, one, short, string, strings, token_ids, token_numbers
from gateway.requests import Resume
from rootward.core.requests import Sampling
from rootward.errors import InvalidRequest, UnsupportedParameter

MAX_DIGITS = 12  # of a header
MAX_STREAM_INTERVAL = 1024  # tokens

NO_IDS: tuple[int, ...] = ()
NO_TEXTS: tuple[str, ...] = ()

Body = Mapping[str, object]
Harmless = Mapping[str, tuple[object, ...]]

# Known names that are not served, with the values that ask for nothing.
UNSUPPORTED: Harmless = {
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_embeds": (),
    "spaces_between_special_tokens": (True,),
}


def json_object(data: bytes) -> Body:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest("body", f"{len(data)} bytes", "are no JSON; send a JSON object") from None
    if not isinstance(body, dict):
        raise InvalidRequest("body", type(body).__name__, "is not an object; send a JSON object")
    return body


def refuse(body: Body, unsupported: Harmless) -> None:
    """UnsupportedParameter for the first of these names whose value asks for something."""
    for name, harmless in unsupported.items():
        value = body.get(name)
        if value is not None and not any(value == h and type(value) in (type(h), float) for h in harmless):
            raise UnsupportedParameter(name, short(value), "is not supported by this server; leave it out")


def shared(body: Body, headers: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `GenerateRequest` that both endpoints write the same way. ValueError as the domain types raise it."""
    return {
        "request_id": one(body, "request_id", string, "") or headers.get("x-request-id", ""),
        "model": one(body, "model", string, ""),
        "n": one(body, "n", integer, 1),
        "sampling": _sampling(body),
        "stop": _stop(body.get("stop")),
        "stop_token_ids": one(body, "stop_token_ids", token_ids, NO_IDS),
        "include_stop": one(body, "include_stop_str_in_output", boolean, False),
        "ignore_eos": one(body, "ignore_eos", boolean, False),
        "skip_special_tokens": one(body, "skip_special_tokens", boolean, True),
        "seed": _seed(body),
        "speculation": speculation(body.get("speculation")),
        "session_id": one(body, "session_id", string, "") or headers.get("x-session-id", ""),
        "deadline_s": _deadline_s(headers.get("x-request-timeout-ms")),
        "min_tokens": one(body, "min_tokens", integer, 0),
        "structure": structure(body),
        "bad_words": one(body, "bad_words", strings, NO_TEXTS),
        "trees": one(body, "return_trees", boolean, False),
        "prompt_logprobs": num_logprobs("prompt_logprobs", body),
        "prediction": _prediction(body.get("prediction")),
        "traceparent": headers.get("traceparent", ""),
        "cache_salt": one(body, "cache_salt", string, ""),
        "priority": one(body, "priority", integer, 0),
        "tenant": tenant(headers),
        "resume": _resume(headers.get("last-event-id")),
        "truncate_prompt": one(body, "truncate_prompt_tokens", integer, None),
        "add_special_tokens": one(body, "add_special_tokens", boolean, None),
    }


def num_logprobs(name: str, body: Body) -> int | None:
    """How many likely tokens to tell of. False means none, as in the chat API."""
    value = body.get(name)
    return None if value is None or value is False else integer(name, value)


def max_tokens(body: Body) -> int | None:
    """Under either of its names."""
    old = one(body, "max_tokens", integer, None)
    new = one(body, "max_completion_tokens", integer, None)
    if old is not None and new is not None and old != new:
        raise InvalidRequest("max_tokens", old, f"disagrees with max_completion_tokens {new}; send one of them")
    return old if old is not None else new


def stream_options(body: Body, stream: bool) -> tuple[bool, bool]:
    """(usage in one more chunk, usage in every chunk)."""
    options = body.get("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise InvalidRequest("stream_options", "given", "without 'stream': true; leave it out")
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", short(options), "is not an object")
    return one(options, "include_usage", boolean, False), one(options, "continuous_usage_stats", boolean, False)


def stream_interval(body: Body) -> int:
    value = one(body, "stream_interval", integer, 0)
    if not 0 <= value <= MAX_STREAM_INTERVAL:
        raise InvalidRequest(
            "stream_interval", value, f"is outside [0, {MAX_STREAM_INTERVAL}]; 0 sends tokens as they become final"
        )
    return value


def _resume(header: str | None) -> Resume | None:
    """Ids of events are output positions, so the last one that a client saw is where it goes on."""
    if header is None:
        return None
    if not header.isdecimal() or len(header) > MAX_DIGITS:
        raise InvalidRequest("last-event-id", header[:16], "is no id of an event of this server")
    return Resume(int(header))


def _prediction(value: object) -> str:
    """OpenAI's predicted output: {"type": "content", "content": a text or parts that are texts}."""
    if value is None:
        return ""
    if not isinstance(value, dict) or value.get("type") != "content":
        raise InvalidRequest("prediction", short(value), "is no object of type 'content'")
    return content("prediction.content", value.get("content"))


def _sampling(body: Body) -> Sampling:
    top_k = one(body, "top_k", integer, 0)
    return Sampling(
        temperature=one(body, "temperature", number, 1.0),
        top_k=0 if top_k == -1 else top_k,  # vLLM writes "all" as -1
        top_p=one(body, "top_p", number, 1.0),
        min_p=one(body, "min_p", number, 0.0),
        repetition_penalty=one(body, "repetition_penalty", number, 1.0),
        presence_penalty=one(body, "presence_penalty", number, 0.0),
        frequency_penalty=one(body, "frequency_penalty", number, 0.0),
        logit_bias=one(body, "logit_bias", token_numbers, ()),
        allowed_token_ids=one(body, "allowed_token_ids", token_ids, ()),
    )


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise InvalidRequest("stop", short(value), "is not a string or a list of strings")
    return tuple(stops)


def _seed(body: Body) -> int | None:
    """An int64 or uint64; negative ones are taken modulo 2^64."""
    seed = one(body, "seed", integer, None)
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise InvalidRequest("seed", seed, "does not fit 64 bits")
    return None if seed is None else seed % 2**64


def _deadline_s(header: str | None) -> float | None:
    if header is None:
        return None
    if not (header.isascii() and header.isdecimal()) or len(header) > MAX_DIGITS or int(header) < 1:
        raise InvalidRequest("x-request-timeout-ms", header[:16], "is no number of milliseconds above 0")
    return int(header) / 1000
