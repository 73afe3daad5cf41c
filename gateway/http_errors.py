"""Errors as OpenAI clients expect them: {"error": {message, type, param, code}} with the right status and headers."""

from __future__ import annotations

from dataclasses import dataclass, field

from rootward.errors import DeadlineExceeded, InvalidRequest, ServiceError, Unauthenticated


@dataclass(frozen=True, slots=True)
class HttpError:
    status: int
    body: dict[str, object]
    headers: dict[str, str] = field(default_factory=dict)


# reason -> status, type, code. A duplicate is 400: the openai package retries 409.
_KINDS: dict[str, tuple[int, str, str]] = {
    "INVALID_VALUE": (400, "invalid_request_error", "invalid_value"),
    "UNSUPPORTED_PARAMETER": (400, "invalid_request_error", "unsupported_parameter"),
    "INVALID_GRAMMAR": (400, "invalid_request_error", "invalid_json_schema"),
    "CONTEXT_LENGTH_EXCEEDED": (400, "invalid_request_error", "context_length_exceeded"),
    "INVALID_API_KEY": (401, "authentication_error", "invalid_api_key"),
    "PERMISSION_DENIED": (403, "permission_error", "permission_denied"),
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
# Fields that go by another name than in the messages of gRPC.
_NAMES = {
    "token_ids": "prompt",
    "structured_output": "structured_outputs",
    "chat.template_kwargs": "chat_template_kwargs",
}
_BUG = (500, "internal_server_error", "internal_error")


def http_error(error: Exception) -> HttpError:
    """What the client is told. Of a bug it learns that it is one."""
    if not isinstance(error, ServiceError):
        message = f"internal error ({type(error).__name__})"
        return HttpError(500, _body(message, _BUG, None), {"x-should-retry": "false"})
    kind = _KINDS.get(error.reason, _BUG)
    field = (error.field if isinstance(error, InvalidRequest) else error.metadata.get("field")) or ""
    param, message = _NAMES.get(field, field), str(error)
    if message.startswith(f"{field}:"):
        message = param + message[len(field) :]
    return HttpError(kind[0], _body(message, kind, param or None), _headers(error))


def simple_error(status: int, code: str, message: str) -> HttpError:
    """An error that no service raised, such as an unknown path."""
    return HttpError(status, _body(message, (status, "invalid_request_error", code), None))


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
