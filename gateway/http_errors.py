"""Errors as OpenAI clients expect them: {"error": {message, type, param, code}} with the right status and headers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from traceback import format_tb
from typing import Any

import orjson
import structlog
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gateway.planning import check_name
from rootward.errors import DeadlineExceeded, InvalidRequest, ServiceError, Unauthenticated, UnsupportedParameter

log = structlog.get_logger()

_INDICES = re.compile(r"(\[\d+\])+$")


@dataclass(frozen=True, slots=True)
class HttpError:
    status: int
    body: dict[str, object]
    headers: dict[str, str] = field(default_factory=dict)


# reason -> status, type, code. A duplicate is 400, since the openai package retries 409.
_KINDS: dict[str, tuple[int, str, str]] = {
    "INVALID_VALUE": (400, "invalid_request_error", "invalid_value"),
    "UNSUPPORTED_PARAMETER": (400, "invalid_request_error", "unsupported_parameter"),
    "INVALID_GRAMMAR": (400, "invalid_request_error", "invalid_json_schema"),
    "POISON_REQUEST": (400, "invalid_request_error", "poison_request"),
    "CONTEXT_LENGTH_EXCEEDED": (400, "invalid_request_error", "context_length_exceeded"),
    "INVALID_API_KEY": (401, "authentication_error", "invalid_api_key"),
    "PERMISSION_DENIED": (403, "permission_error", "permission_denied"),
    "RESPONSE_NOT_FOUND": (404, "invalid_request_error", "response_not_found"),
    "NOT_FOUND": (404, "invalid_request_error", "model_not_found"),
    "DUPLICATE_REQUEST_ID": (400, "invalid_request_error", "duplicate_request_id"),
    "NO_DRAFTER": (400, "invalid_request_error", "speculation_unavailable"),
    "STALE_EPOCH": (503, "service_unavailable_error", "preempted"),
    "INCOMPATIBLE_PAIR": (503, "service_unavailable_error", "service_unavailable"),
    "OVERLOADED": (429, "rate_limit_error", "server_overloaded"),
    "RATE_LIMITED": (429, "rate_limit_error", "rate_limit_exceeded"),
    "UNAVAILABLE": (503, "service_unavailable_error", "service_unavailable"),
    "STREAM_INTERRUPTED": (503, "service_unavailable_error", "stream_interrupted"),
    "DEADLINE_EXCEEDED": (504, "timeout_error", "timeout"),
}
# Fields with another name than in gRPC.
_NAMES = {
    "structured_output": "structured_outputs",
    "chat.template_kwargs": "chat_template_kwargs",
}
# Fields that have yet another name at a path.
_NAMES_AT = {
    "/detokenize": {"token_ids": "tokens"},
    "/v1/responses": {
        "response_id": "previous_response_id",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "structured_output": "text.format",
        "response_format.json_schema.schema": "text.format.schema",
    },
}
# Fields of vLLM (until 0.11) and of llama.cpp that have another name here.
_NAMES_HERE = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar (in Lark)",
    "grammar": "structured_outputs.grammar (in Lark)",
    "json_schema": "structured_outputs.json",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "n_probs": "logprobs",
}
_METHOD_NOT_ALLOWED = (405, "invalid_request_error", "method_not_allowed")
_NOT_FOUND = (404, "invalid_request_error", "not_found")  # of a path, a response or a drafter, not of a model
_BUG = (500, "internal_server_error", "internal_error")

# pydantic's error type -> the fix, with the bounds that pydantic gives.
_FIXES = {
    "greater_than_equal": "is below {ge}",
    "greater_than": "is not above {gt}",
    "less_than_equal": "is above {le}",
    "less_than": "is not below {lt}",
    "literal_error": "is unknown; use {expected}",
    "finite_number": "is not a finite number",
    "string_unicode": "is not valid Unicode; send no lone surrogates",
    "string_too_short": "is empty",
    "string_too_long": "is longer than {max_length} characters",
    "string_pattern_mismatch": "does not match {pattern}",
    "too_short": "is too short; at least {min_length} needed",
}
# Of the errors of a union's members, the types that say most. The others follow in their order.
_RANKS = {"unsupported": 0, "refused": 1, "string_unicode": 2, "too_short": 3}
# pydantic's error type -> the expected type; the members of a union have an error each.
_VALUE_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean (true or false)",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}


def http_error(error: Exception, *, path: str | None = "", request_id: str = "") -> HttpError:
    """The response to an error at this path. None: its fields have the names that the client sent. A bug is logged without values, which
    may be prompts, and reported by its type alone."""
    kind = _KINDS.get(error.reason, _BUG) if isinstance(error, ServiceError) else _BUG
    if kind is _BUG:
        trace = "".join(format_tb(error.__traceback__))
        log.error("http_handler_failed", request_id=request_id, error=type(error).__name__, trace=trace)
    if not isinstance(error, ServiceError):
        message = f"internal error ({type(error).__name__})"
        return HttpError(500, _body(message, _BUG, None), {"x-should-retry": "false"})
    field = error.metadata.get("field", "")
    if error.reason == "NOT_FOUND" and field != "model":
        kind = _NOT_FOUND
    elif error.reason == "INVALID_GRAMMAR" and field in ("regex", "grammar"):
        kind = (*kind[:2], f"invalid_{field}")
    param, message = field, str(error)
    if path is not None:
        param = _NAMES_AT.get(path, _NAMES).get(field) or _NAMES.get(field, field)
    if message.startswith(f"{field}:"):
        message = param + message[len(field) :]
    return HttpError(kind[0], _body(message, kind, param or None), _headers(error))


def not_served(error: HTTPException, *, method: str, path: str) -> HttpError:
    """The response to a request whose path or method no endpoint has."""
    kind, fix = _NOT_FOUND, "is not served; GET /openapi.json lists what is"
    if path.endswith("/"):
        fix += ", without a slash at the end"
    if error.status_code == 405:
        kind, fix = _METHOD_NOT_ALLOWED, f"is not served; use {(error.headers or {}).get('Allow', 'another method')}"
    return HttpError(error.status_code, _body(f"{method} {path}: {fix}", kind, None), dict(error.headers or {}))


def _body(message: str, kind: tuple[int, str, str], param: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind[1], "param": param, "code": kind[2]}}


def _headers(error: ServiceError) -> dict[str, str]:
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        headers["retry-after-ms"] = str(round(error.retry_after_s * 1000))
    if isinstance(error, DeadlineExceeded) and int(error.metadata.get("emitted", "0")):
        headers["x-should-retry"] = "false"
    return headers


def json_response(body: Mapping[str, object], *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's request id, or a new one. InvalidRequest for an id that is no name."""
    request_id = headers.get("x-request-id") or uuid.uuid4().hex
    check_name("x-request-id", request_id)
    return request_id


def id_header(headers: Mapping[str, str]) -> dict[str, str]:
    """The header of an answer with the request's id; none if the client's is no name."""
    try:
        return {"x-request-id": request_id_of(headers)}
    except InvalidRequest:
        return {}


def error_response(error: Exception, headers: dict[str, str] | None = None, *, path: str | None = "") -> Response:
    """The answer to a request that failed. path: see `http_error`."""
    known = http_error(error, path=path, request_id=(headers or {}).get("x-request-id", ""))
    return json_response(known.body, status=known.status, headers={**(headers or {}), **known.headers})


def invalid_body(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The error that stands for all of pydantic's. Members of a union have errors each: the first of those with the longest path; of these,
    one of a value that is not supported, such as a type, whose other fields are then unknown; else one of a text that is not Unicode, or of
    a list that is too short."""
    if errors[0]["type"] == "json_invalid":
        return InvalidRequest.from_message(f"body: is no JSON ({errors[0]['ctx']['error']}); send a JSON object")
    depth = max(len(error["loc"]) for error in errors)
    furthest = [error for error in errors if len(error["loc"]) == depth]
    error = min(furthest, key=lambda one: _RANKS.get(one["type"], len(_RANKS)))
    path, kind, value = _path(error), error["type"], error.get("input")
    if kind == "extra_forbidden":
        instead = _NAMES_HERE.get(path)
        fix = f"use {instead}" if instead else "leave it out"
        return UnsupportedParameter(path, _Json(value), f"is not supported by this server; {fix}")
    if kind == "missing":
        return InvalidRequest.from_message(f"{path}: is missing; send it")
    kinds = [_VALUE_TYPES[one["type"]] for one in furthest if one["type"] in _VALUE_TYPES and _path(one) == path]
    if kinds and kind not in _RANKS:
        fix = f"is not {' or '.join(dict.fromkeys(kinds))}"
    else:
        fix = _FIXES.get(kind, "").format_map(error.get("ctx", {})) or error["msg"]
    return (UnsupportedParameter if kind == "unsupported" else InvalidRequest)(path, _Json(value), fix)


def _path(error: Mapping[str, Any]) -> str:
    """The path of the value in the body, such as messages[0].content, without names of members of a union and indices of scalars."""
    at = list(error["loc"][1:])
    if at and at[-1] == "[key]":
        del at[-2:]
    last = at.pop() if at and error["type"] == "extra_forbidden" else None  # a name of the client's
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at if not _is_member(part))
    path = _INDICES.sub("", path) if last is None else f"{path}.{str(last)[:32]}"
    return path.lstrip(".") or "body"


def _is_member(part: str | int) -> bool:
    return isinstance(part, str) and (part in ("str", "constrained-str") or part.endswith("]"))


class _Json:
    """A value of the body for a message: texts cut, other objects and lists by their type."""

    def __init__(self, value: object):
        self._value = value

    def __repr__(self) -> str:
        value = self._value
        if isinstance(value, str):
            return repr(value[:32])
        if isinstance(value, Mapping) and value:
            return "an object"
        if isinstance(value, list) and value:
            return "a list"
        return json.dumps(value, default=lambda other: type(other).__name__)
