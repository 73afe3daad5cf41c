"""Errors on the wire: `ServiceError` ↔ gRPC status with google.rpc details, and the `APIError` that the SDK raises for one.

    a service                       the wire                                        its peer
    raise Overloaded(…) → abort →   RESOURCE_EXHAUSTED, ErrorInfo{reason, domain,   → from_rpc_error → Overloaded
                                    metadata}, RequestInfo, RetryInfo, BadRequest   → api_error → RateLimitError

An error without our ErrorInfo comes from the transport or from a proxy: the peer is gone, or never was there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from traceback import format_tb
from typing import Any, NoReturn

import grpc
from google.protobuf.any import pack
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from rootward import errors
from rootward.errors import APIError, APIStatusError, InvalidRequest, ServiceError

DOMAIN = "rootward"
DETAILS_KEY = "grpc-status-details-bin"
RETRY_KEY = "retry-after-ms"

_MAX_MESSAGE_CHARS = 1000  # the status travels in headers, whose default limit is 8 KiB in all
# Of grpc, before the reason.
_LAST_ERROR = re.compile(r"^failed to connect to all addresses; last error: (?:[A-Z_]+: )?")
_HTTP_PORT = "Trying to connect an http1.x server"  # of grpc
_MAX_ID_CHARS = 256  # of a request in the log, which a bug may have kept from being checked

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """The content of a gRPC status. `reason` is empty if it does not come from a Rootward service."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    request_id: str = ""
    retry_after_s: float | None = None

    @property
    def lost(self) -> bool:
        """True if no answer came: the connection broke, was refused, or the peer stopped."""
        late = self.code is grpc.StatusCode.DEADLINE_EXCEEDED  # "Stream removed (Deadline Exceeded)"
        broken = not late and any(text in self.message for text in ("RST_STREAM", "Stream removed"))
        gone = self.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        return not self.reason and (gone or broken)

    @property
    def too_large(self) -> bool:
        """True if gRPC refused a message for its size: the code is that of an overload, but retrying is in vain."""
        return not self.reason and "larger than max" in self.message


async def abort(context: Context, error: ServiceError, request_id: str = "") -> NoReturn:
    """End the RPC with the status of `error`."""
    code = grpc.StatusCode[error.status]
    message = _shorten(str(error))
    status = status_pb2.Status(code=code.value[0], message=message, details=map(pack, _details(error, request_id)))
    trailing: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    if error.retry_after_s is not None:
        trailing.append((RETRY_KEY, str(round(error.retry_after_s * 1000))))
    await context.abort(code, message, tuple(trailing))
    raise AssertionError("abort returned")


@asynccontextmanager
async def errors_as_status(context: Context, request_id: str = "") -> AsyncIterator[None]:
    """Around the body of a handler: ServiceError becomes its status, any bug INTERNAL; cancellation passes through.

    Where a bug was goes to the log, without values: those may be prompts. The peer learns the kind of exception only.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        known = _service_error(error)
        if known is None:
            trace = "".join(format_tb(error.__traceback__))
            extra = {"request_id": request_id[:_MAX_ID_CHARS], "error": type(error).__name__, "trace": trace}
            logging.getLogger(__name__).error("a handler failed", extra=extra)
            known = ServiceError(f"internal error ({type(error).__name__})")
        await abort(context, known, request_id)


def failure_of(error: grpc.RpcError) -> Failure:
    """The status of a failed RPC with its details, whether the call was made by grpc or grpc.aio."""
    call: Any = error  # grpc and grpc.aio give their errors the same methods, the base class has none
    trailing = dict(tuple(call.trailing_metadata() or ()))
    info = error_details_pb2.ErrorInfo()
    request = error_details_pb2.RequestInfo()
    retry = error_details_pb2.RetryInfo()
    _read_details(trailing.get(DETAILS_KEY), info, request, retry)
    ours = info.domain == DOMAIN
    return Failure(
        code=call.code(),
        message=call.details() or "",
        reason=info.reason if ours else "",
        metadata=dict(info.metadata) if ours else {},
        request_id=request.request_id,
        retry_after_s=_retry_after_s(retry, trailing.get(RETRY_KEY)),
    )


def from_rpc_error(error: grpc.RpcError) -> ServiceError:
    """The ServiceError a peer service raised, of the same class; Unavailable if the peer is gone."""
    failure = failure_of(error)
    if failure.lost:
        return errors.Unavailable(failure.message or "the peer is gone")
    if failure.too_large:
        return InvalidRequest.from_message(f"message: {failure.message}")
    kind = _BY_REASON.get(failure.reason) or _BY_CODE.get(failure.code.name, ServiceError)
    if issubclass(kind, InvalidRequest):
        return kind.from_message(failure.message, retry_after_s=failure.retry_after_s, metadata=failure.metadata)
    return kind(failure.message, retry_after_s=failure.retry_after_s, metadata=failure.metadata)


def api_error(error: grpc.RpcError) -> APIError:
    """The error that the SDK raises for a failed RPC."""
    failure = failure_of(error)
    if failure.lost:
        cause = _LAST_ERROR.sub("", failure.message)
        if _HTTP_PORT in cause:
            cause = f"{cause.partition(': Failed parsing')[0]} is a port for HTTP; use the gateway's address for gRPC"
        return errors.APIConnectionError(f"no answer from the server: {cause}")
    if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and not failure.reason:
        return errors.APITimeoutError("the deadline passed while waiting for the server")
    kind = _API_ERRORS.get(failure.code.name, errors.InternalServerError)
    if failure.too_large:
        kind = errors.BadRequestError
    return kind(
        failure.message,
        code=failure.code.name,
        reason=failure.reason,
        request_id=failure.request_id,
        retry_after_s=failure.retry_after_s,
        details=failure.metadata,
    )


_BY_REASON: dict[str, type[ServiceError]] = {
    kind.reason: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ServiceError)
}
# Without a reason only the code is known: the most general class of that code.
_MOST_GENERAL = (
    InvalidRequest,
    errors.NotFound,
    errors.DuplicateRequest,
    errors.Overloaded,
    errors.Unavailable,
    errors.DeadlineExceeded,
)
_BY_CODE: dict[str, type[ServiceError]] = {kind.status: kind for kind in _MOST_GENERAL}
_API_ERRORS = {code: kind for kind in APIStatusError.__subclasses__() for code in kind.codes}


def _service_error(error: BaseException) -> ServiceError | None:
    """The ServiceError in `error`, which a TaskGroup may have wrapped."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _service_error(inner))), None)
    return None


def _details(error: ServiceError, request_id: str) -> list[Message]:
    metadata = {key: _shorten(value) for key, value in error.metadata.items()}
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=_shorten(str(error)))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(retry)
    return details


def _read_details(data: str | bytes | None, *wanted: Message) -> None:
    """Fill each of `wanted` from the detail of its type. Details that cannot be read are left out."""
    try:
        status = status_pb2.Status.FromString(data) if isinstance(data, bytes) else status_pb2.Status()
    except DecodeError:
        return
    for detail in status.details:
        for message in wanted:
            try:
                detail.Unpack(message)  # does nothing for a detail of another type
            except DecodeError:
                message.Clear()


def _retry_after_s(retry: error_details_pb2.RetryInfo, trailing_ms: str | bytes | None) -> float | None:
    if retry.HasField("retry_delay"):
        return float(retry.retry_delay.ToMilliseconds()) / 1000
    return int(trailing_ms) / 1000 if isinstance(trailing_ms, str) and trailing_ms.isdecimal() else None


def _shorten(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[: _MAX_MESSAGE_CHARS - 1] + "…"
