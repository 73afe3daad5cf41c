"""The body of POST /v1/completions → GenerateRequest. Unknown names are ignored, known and unsupported ones refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.http_structure import structure
from gateway.http_values import boolean, integer, number, one, short, string, strings, token_ids, token_numbers
from gateway.planning import refusing
from gateway.requests import GenerateRequest
from rootward.core.requests import Law, Rule, Sampling, Speculation, SpeculationMode
from rootward.errors import InvalidRequest, UnsupportedParameter

MAX_DIGITS = 12  # of a header

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI documents it

# Known names that are not served, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "prompt_logprobs": (False,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prediction": (),
    "truncate_prompt_tokens": (),
    "priority": (0,),
    "prompt_embeds": (),
    "stream_interval": (0, 1),
}
_RULES: dict[str, tuple[Rule, Law | None]] = {
    "traversal": (Rule.TRAVERSAL, None),
    "coupled": (Rule.MATCH, Law.COUPLED),
    "token": (Rule.TOKEN, None),
}
_SPECULATION_NAMES = {"mode", "verification", "max_depth", "topk", "num_draft_tokens"}


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion as asked for over HTTP."""

    request: GenerateRequest
    stream: bool = False
    include_usage: bool = False  # one more chunk with the usage
    return_token_ids: bool = False
    report_speculation: bool = False  # the request speaks of speculation, so the answer does


def parse_completion(data: bytes, headers: Mapping[str, str]) -> Completion:
    """InvalidRequest or UnsupportedParameter, naming the parameter, for what cannot be served."""
    body = _object(data)
    for name, harmless in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(value == h and type(value) in (type(h), float) for h in harmless):
            raise UnsupportedParameter(name, short(value), "is not supported by this server; leave it out")
    stream = one(body, "stream", boolean, False)
    options = _stream_options(body, stream)
    with refusing():
        request = GenerateRequest(
            prompt=_prompt(body.get("prompt")),
            request_id=one(body, "request_id", string, "") or headers.get("x-request-id", ""),
            model=one(body, "model", string, ""),
            sampling=_sampling(body),
            max_tokens=_max_tokens(body),
            stop=_stop(body.get("stop")),
            stop_token_ids=one(body, "stop_token_ids", token_ids, ()),
            include_stop=one(body, "include_stop_str_in_output", boolean, False),
            ignore_eos=one(body, "ignore_eos", boolean, False),
            skip_special_tokens=one(body, "skip_special_tokens", boolean, True),
            seed=_seed(body),
            speculation=_speculation(body.get("speculation")),
            session_id=one(body, "session_id", string, "") or headers.get("x-session-id", ""),
            deadline_s=_deadline_s(headers.get("x-request-timeout-ms")),
            min_tokens=one(body, "min_tokens", integer, 0),
            structure=structure(body),
            bad_words=one(body, "bad_words", strings, ()),
            logprobs=_logprobs(body.get("logprobs")),
        )
    return Completion(
        request,
        stream,
        include_usage=options,
        return_token_ids=one(body, "return_token_ids", boolean, False),
        report_speculation=body.get("speculation") is not None,
    )


def _object(data: bytes) -> dict[str, object]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest("body", f"{len(data)} bytes", "are no JSON; send a JSON object") from None
    if not isinstance(body, dict):
        raise InvalidRequest("body", type(body).__name__, "is not an object; send a JSON object")
    return body


def _prompt(value: object) -> str | tuple[int, ...]:
    """A text, a list of token ids, or a list with one of these."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > 1:
            raise UnsupportedParameter("prompt", f"{len(value)} prompts", "are not supported in one request; send one")
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return token_ids("prompt", value)
    raise InvalidRequest("prompt", short(value), "is missing or empty; send a string or a list of token ids")


def _sampling(body: Mapping[str, object]) -> Sampling:
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


def _logprobs(value: object) -> int | None:
    """How many likely tokens to tell of. False means none, as in the chat API."""
    return None if value is None or value is False else integer("logprobs", value)


def _max_tokens(body: Mapping[str, object]) -> int:
    old = one(body, "max_tokens", integer, None)
    new = one(body, "max_completion_tokens", integer, None)
    if old is not None and new is not None and old != new:
        raise InvalidRequest("max_tokens", old, f"disagrees with max_completion_tokens {new}; send one of them")
    wanted = old if old is not None else new
    return DEFAULT_MAX_TOKENS if wanted is None else wanted


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise InvalidRequest("stop", short(value), "is not a string or a list of strings")
    return tuple(stops)


def _seed(body: Mapping[str, object]) -> int | None:
    """An int64 or uint64; negative ones are taken modulo 2^64."""
    seed = one(body, "seed", integer, None)
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise InvalidRequest("seed", seed, "does not fit 64 bits")
    return None if seed is None else seed % 2**64


def _speculation(value: object) -> Speculation:
    """true, false, a mode, or an object."""
    if value is None or value is True:
        return Speculation()
    if value is False:
        return Speculation(SpeculationMode.DISABLED)
    if isinstance(value, str):
        return Speculation(_mode(value))
    if not isinstance(value, dict):
        raise InvalidRequest("speculation", short(value), "is neither a boolean nor a mode nor an object")
    odd = next((name for name in value if name not in _SPECULATION_NAMES), None)
    if odd is not None:
        raise UnsupportedParameter(f"speculation.{odd}", short(value[odd]), "is not supported; leave it out")
    rule, law = _verification(value.get("verification"))
    sizes = {name: one(value, name, integer, None) for name in ("num_draft_tokens", "max_depth", "topk")}
    return Speculation(_mode(value.get("mode", "auto")), rule, law, **sizes)


def _mode(value: object) -> SpeculationMode:
    try:
        return SpeculationMode(value)
    except ValueError:
        fix = "is unknown; use 'auto', 'disabled' or 'required'"
        raise InvalidRequest("speculation.mode", short(value), fix) from None


def _verification(value: object) -> tuple[Rule | None, Law | None]:
    if value is None:
        return None, None
    if not isinstance(value, str) or value not in _RULES:
        fix = "is unknown; use 'traversal', 'coupled' or 'token'"
        raise InvalidRequest("speculation.verification", short(value), fix)
    return _RULES[value]


def _stream_options(body: Mapping[str, object], stream: bool) -> bool:
    """Whether a usage chunk is wanted."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise InvalidRequest("stream_options", "given", "without 'stream': true; leave it out")
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", short(options), "is not an object")
    if options.get("continuous_usage_stats"):
        raise UnsupportedParameter("stream_options.continuous_usage_stats", True, "is not supported; leave it out")
    return one(options, "include_usage", boolean, False)


def _deadline_s(header: str | None) -> float | None:
    if header is None:
        return None
    if not header.isdecimal() or len(header) > MAX_DIGITS or int(header) < 1:
        raise InvalidRequest("x-request-timeout-ms", header[:16], "is no number of milliseconds above 0")
    return int(header) / 1000
