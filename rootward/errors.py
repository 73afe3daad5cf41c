"""Every exception of Rootward, in one tree.

`ServiceError` is raised inside a service and becomes a gRPC status (`wire.status`) or an HTTP error; of its kinds `Overloaded` and
`Unavailable` may be tried again. `APIError` is raised by the SDK. `ConfigurationError` ends a process with its exit code.
"""

from __future__ import annotations

from typing import ClassVar, Self


class RootwardError(Exception):
    """Root of the tree."""


class ServiceError(RootwardError):
    """Raised inside a service. `status` is the name of the gRPC code, `reason` the stable machine-readable cause."""

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, retry_after_s: float | None = None, metadata: dict[str, str] | None = None):
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})


class InvalidRequest(ServiceError):
    """A field has a value that cannot be served. The message names the field, the value and the fix."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_VALUE"

    def __init__(self, field: str, value: object, fix: str):
        super().__init__(f"{field}: {value!r} {fix}", metadata={"field": field})
        self.fix = fix

    @classmethod
    def from_message(
        cls, message: str, *, retry_after_s: float | None = None, metadata: dict[str, str] | None = None
    ) -> Self:
        """The error with this text, of the form "field: value fix"."""
        error = cls.__new__(cls)
        metadata = metadata if metadata is not None else {"field": message.partition(": ")[0]}
        ServiceError.__init__(error, message, retry_after_s=retry_after_s, metadata=metadata)
        error.fix = message
        return error

    @property
    def field(self) -> str:
        return self.metadata.get("field", "")


class UnsupportedParameter(InvalidRequest):
    """The parameter is known and not offered here: refused, never ignored."""

    reason = "UNSUPPORTED_PARAMETER"


class InvalidGrammar(InvalidRequest):
    """A schema, expression or grammar that does not compile, or uses what is not supported."""

    reason = "INVALID_GRAMMAR"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and max_tokens together are longer than the context of the model."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class Unauthenticated(ServiceError):
    """The caller is not known. The message never repeats the credentials."""

    status = "UNAUTHENTICATED"
    reason = "INVALID_API_KEY"


class PermissionDenied(ServiceError):
    """The caller is known and may not do this."""

    status = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class NotFound(ServiceError):
    status = "NOT_FOUND"
    reason = "NOT_FOUND"


class DuplicateRequest(ServiceError):
    status = "ALREADY_EXISTS"
    reason = "DUPLICATE_REQUEST_ID"


class StaleEpoch(ServiceError):
    """A newer owner drives this request; this one must stop (protocol.md, fencing)."""

    status = "ABORTED"
    reason = "STALE_EPOCH"


class NoDrafter(ServiceError):
    status = "FAILED_PRECONDITION"
    reason = "NO_DRAFTER"


class IncompatiblePair(ServiceError):
    status = "FAILED_PRECONDITION"
    reason = "INCOMPATIBLE_PAIR"


class Overloaded(ServiceError):
    status = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class RateLimited(Overloaded):
    """A tenant has reached its quota."""

    reason = "RATE_LIMITED"


class Unavailable(ServiceError):
    status = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class DeadlineExceeded(ServiceError):
    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class KvFull(RootwardError):
    """A forward needs `needed` KV blocks and `free` are left. Nothing has changed: close or release a session, then try again."""

    def __init__(self, needed: int, free: int):
        super().__init__(
            f"kv: {needed} more blocks are needed and {free} are free; preempt a session or raise kv_cache_tokens"
        )
        self.needed = needed
        self.free = free


class ModelLost(RootwardError):
    """The model cannot run again in this process: another process that held a part of it is gone or out of step."""


class ConfigurationError(RootwardError):
    """A setting, flag, file or address is wrong. Printed as one line; the process ends with `exit_code`.

    Exit codes: 2 usage or configuration, 3 incompatible model or pair, 4 unavailable.
    """

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


class APIError(RootwardError):
    """Base of the errors that the SDK raises."""


class APIConnectionError(APIError):
    """No answer from the server."""


class APITimeoutError(APIConnectionError):
    """The deadline passed while waiting."""


class StreamInterruptedError(APIError):
    """The stream broke and could not be resumed; `partial` holds what had been received."""

    def __init__(self, message: str, partial: object = None):
        super().__init__(message)
        self.partial = partial


class APIStatusError(APIError):
    """The server answered with an error status, one of `codes`."""

    codes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        message: str,
        *,
        code: str = "UNKNOWN",
        reason: str = "",
        request_id: str = "",
        retry_after_s: float | None = None,
        details: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.details = dict(details or {})


class BadRequestError(APIStatusError):
    codes = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE")


class AuthenticationError(APIStatusError):
    codes = ("UNAUTHENTICATED",)


class PermissionDeniedError(APIStatusError):
    codes = ("PERMISSION_DENIED",)


class NotFoundError(APIStatusError):
    codes = ("NOT_FOUND",)


class ConflictError(APIStatusError):
    codes = ("ALREADY_EXISTS", "ABORTED")


class RateLimitError(APIStatusError):
    codes = ("RESOURCE_EXHAUSTED",)


class UnavailableError(APIStatusError):
    codes = ("UNAVAILABLE",)


class DeadlineExceededError(APIStatusError):
    codes = ("DEADLINE_EXCEEDED",)


class InternalServerError(APIStatusError):
    codes = ("INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED")


def first_line(error: BaseException) -> str:
    """The first line of the message of another library's error; the name of its type if there is no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
