"""Errors keep their class, reason, metadata and delay across the wire; what comes from the transport is told apart."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from rootward import errors
from rootward.wire import status

SERVICE_ERRORS = [
    errors.InvalidRequest("top_p", 2.0, "is outside (0, 1]"),
    errors.UnsupportedParameter("min_p", 0.1, "is not offered"),
    errors.ContextLengthExceeded("max_tokens", 9999, "does not fit"),
    errors.NotFound("model: 'x' is unknown", metadata={"model": "x"}),
    errors.DuplicateRequest("request 'r' is running"),
    errors.StaleEpoch("epoch 1 < 2"),
    errors.NoDrafter("no drafter is up"),
    errors.IncompatiblePair("tokenizers differ: a, b"),
    errors.Overloaded("queue is full", retry_after_s=1.5, metadata={"queued": "64"}),
    errors.Unavailable("draining", retry_after_s=0.25),
    errors.DeadlineExceeded("the deadline passed", metadata={"phase": "queue"}),
    errors.ServiceError("bug"),
]


class Aborted(Exception):
    pass


class FakeContext:
    """Records an abort as the error that the client would see."""

    async def abort(self, code, details="", trailing_metadata=()):
        self.seen = rpc_error(code, details, trailing_metadata)
        raise Aborted


def rpc_error(code, details="", trailing=()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


async def over_the_wire(error, request_id="r1") -> grpc.aio.AioRpcError:
    context = FakeContext()
    with pytest.raises(Aborted):
        await status.abort(context, error, request_id)
    return context.seen


@pytest.mark.parametrize("error", SERVICE_ERRORS, ids=lambda e: type(e).__name__)
async def test_the_peer_gets_the_same_error(error):
    again = status.from_rpc_error(await over_the_wire(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.metadata == error.metadata
    assert again.retry_after_s == error.retry_after_s
    if isinstance(error, errors.InvalidRequest):
        assert again.field == error.field


API = {
    "INVALID_ARGUMENT": errors.BadRequestError,
    "FAILED_PRECONDITION": errors.BadRequestError,
    "NOT_FOUND": errors.NotFoundError,
    "ALREADY_EXISTS": errors.ConflictError,
    "ABORTED": errors.ConflictError,
    "RESOURCE_EXHAUSTED": errors.RateLimitError,
    "UNAVAILABLE": errors.UnavailableError,
    "DEADLINE_EXCEEDED": errors.DeadlineExceededError,
    "INTERNAL": errors.InternalServerError,
}


@pytest.mark.parametrize("error", SERVICE_ERRORS, ids=lambda e: type(e).__name__)
async def test_the_sdk_gets_its_own_class(error):
    again = status.api_error(await over_the_wire(error))
    assert type(again) is API[error.status]
    assert (again.code, again.reason, again.request_id) == (error.status, error.reason, "r1")
    assert (again.retry_after_s, again.details) == (error.retry_after_s, error.metadata)


async def test_details_on_the_wire_are_those_of_google_rpc():
    seen = await over_the_wire(errors.InvalidRequest("top_p", 2.0, "is outside (0, 1]"))
    details = status_pb2.Status.FromString(dict(tuple(seen.trailing_metadata()))[status.DETAILS_KEY])
    kinds = [d.TypeName() for d in details.details]
    assert kinds == ["google.rpc.ErrorInfo", "google.rpc.RequestInfo", "google.rpc.BadRequest"]
    bad = error_details_pb2.BadRequest()
    details.details[2].Unpack(bad)
    assert bad.field_violations[0].field == "top_p"
    assert details.code == 3


async def test_retry_after_is_also_in_the_trailing_metadata():
    seen = await over_the_wire(errors.Overloaded("full", retry_after_s=1.5))
    assert dict(tuple(seen.trailing_metadata()))["retry-after-ms"] == "1500"


async def test_a_huge_value_does_not_outgrow_the_headers():
    seen = await over_the_wire(errors.InvalidRequest("stop", "x" * 100_000, "is too long"))
    assert sum(len(key) + len(value) for key, value in seen.trailing_metadata()) < 6000


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"),
        (grpc.StatusCode.CANCELLED, "CANCELLED"),
        (grpc.StatusCode.UNKNOWN, "Stream removed"),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
    ],
)
def test_a_lost_peer_is_unavailable(code, message):
    error = rpc_error(code, message)
    assert type(status.from_rpc_error(error)) is errors.Unavailable
    assert type(status.api_error(error)) is errors.APIConnectionError


def test_a_deadline_that_passed_here_is_a_timeout():
    error = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    assert type(status.from_rpc_error(error)) is errors.DeadlineExceeded
    assert type(status.api_error(error)) is errors.APITimeoutError


def test_a_message_that_is_too_large_is_not_worth_a_retry():
    error = rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (9 vs. 4)")
    assert type(status.from_rpc_error(error)) is errors.InvalidRequest
    assert type(status.api_error(error)) is errors.BadRequestError


@pytest.mark.parametrize("details", [b"\xff\xff", b"\n\x03abc", b""])
def test_unreadable_details_are_no_details(details):
    error = rpc_error(grpc.StatusCode.NOT_FOUND, "no", [(status.DETAILS_KEY, details)])
    assert type(status.from_rpc_error(error)) is errors.NotFound
    assert status.api_error(error).reason == ""


def test_details_of_another_domain_are_not_ours():
    info = error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="proxy.example")
    body = status_pb2.Status(code=14)
    body.details.add().Pack(info)
    error = rpc_error(grpc.StatusCode.UNAVAILABLE, "no", [(status.DETAILS_KEY, body.SerializeToString())])
    assert type(status.from_rpc_error(error)) is errors.Unavailable


async def test_a_handler_error_becomes_its_status():
    for raised, code in [
        (errors.NoDrafter("none"), grpc.StatusCode.FAILED_PRECONDITION),
        (ExceptionGroup("tasks", [errors.NoDrafter("none")]), grpc.StatusCode.FAILED_PRECONDITION),
        (KeyError("secret"), grpc.StatusCode.INTERNAL),
    ]:
        context = FakeContext()
        with pytest.raises(Aborted):
            async with status.errors_as_status(context, "r"):
                raise raised
        assert context.seen.code() is code
        assert "secret" not in context.seen.details()


async def test_a_bug_is_logged_under_the_id_of_its_request(caplog):
    value = "a prompt"
    with pytest.raises(Aborted):
        async with status.errors_as_status(FakeContext(), "r1"):
            raise KeyError(value)
    (line,) = caplog.records
    assert (line.request_id, line.error) == ("r1", "KeyError")
    assert value not in str(line.__dict__)
