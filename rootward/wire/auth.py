"""Admission of gRPC calls: checks on metadata and certificate, then a limit on the size of the message, then decoding.

A check runs before the first byte of a request message is taken from the transport, so a caller without credentials costs no memory. gRPC
reads the message of a unary request before it runs the handler; therefore every such handler is registered as one with a stream of raw
requests, from which exactly one message is read after the checks have passed.

Health needs no credentials: probes have none, and the answer contains nothing about requests.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from rootward.clock import Clock, SystemClock
from rootward.errors import InvalidRequest, Overloaded, PermissionDenied, ServiceError
from rootward.wire.status import Context, abort

log = logging.getLogger(__name__)

HEALTH = "/grpc.health.v1.Health/"
MAX_HEALTH_CALLS = 1024  # at one time: strangers may make them, and a watch does not end
MESSAGE_TIMEOUT_S = 60.0  # for a request message to arrive
MAX_REFUSALS, REFUSALS_S = 60, 60.0  # lines of the log for refused calls of each reason, in this time
MAX_PATH = 256  # characters of a path in the log
SAN = "x509_subject_alternative_name"

Check = Callable[[str, Context], None]  # (method, context); raises ServiceError to refuse
Handler = Any  # grpc.RpcMethodHandler, generic for type checkers alone


class BytesInFlight:
    """Bounds the bytes of all request messages and bodies of a process, from their arrival to the end of their answers."""

    def __init__(self, limit: int):
        self.limit = limit
        self.held = 0

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """A function that reserves bytes for one request until the end of the block. It raises Overloaded beyond the limit."""
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if self.held + num_bytes > self.limit:
                raise Overloaded(f"requests in flight have {self.limit} bytes, the limit; try again", retry_after_s=1.0)
            self.held += num_bytes
            taken += num_bytes

        try:
            yield take
        finally:
            self.held -= taken


class RefusalLog:
    """Logs refused calls: at most `MAX_REFUSALS` a minute for each reason, since strangers cause them. The first line of another minute has
    the number of those left out. refused: told of every one."""

    def __init__(self, clock: Clock | None = None, refused: Callable[[ServiceError], None] = lambda error: None):
        self._clock, self._refused = clock or SystemClock(), refused
        self._counts: dict[str, tuple[float, int]] = {}  # by reason: when its minute began, and calls since

    def note(self, error: ServiceError, path: str, peer: str) -> None:
        """`path` and `peer` are of the call."""
        self._refused(error)
        now, num_left_out = self._clock.now(), 0
        began, count = self._counts.get(error.reason, (now, 0))
        if now - began >= REFUSALS_S:
            num_left_out = max(0, count - MAX_REFUSALS)
            began, count = now, 0
        self._counts[error.reason] = began, count + 1
        if count < MAX_REFUSALS:  # without credentials
            about = {"path": path[:MAX_PATH], "peer": peer, "reason": error.reason, "error": str(error)}
            log.warning("call_refused", extra={**about, "num_left_out": num_left_out})


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # as above
    """Runs `checks` in the task of every call. limits: prefix of a method's path -> most bytes of its request message."""

    def __init__(
        self, checks: tuple[Check, ...], limits: Mapping[str, int], in_flight: BytesInFlight, refusals: RefusalLog
    ):
        self._checks = checks
        self._health_checks = (at_most(MAX_HEALTH_CALLS),)
        self._refusals = refusals
        self._limits = limits
        self._in_flight = in_flight

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        checks = self._health_checks if method.startswith(HEALTH) else self._checks
        limit = next((limit for prefix, limit in self._limits.items() if method.startswith(prefix)), None)
        return _guarded(method, handler, checks, limit, self._in_flight, self._refusals)


def at_most(limit: int) -> Check:
    """Admits so many calls at one time."""
    num_calls = 0

    def ended(*_: object) -> None:
        nonlocal num_calls
        num_calls -= 1

    def check(method: str, context: Context) -> None:
        nonlocal num_calls
        if num_calls >= limit:
            raise Overloaded(f"{method}: {limit} calls are under way, the limit; try again", retry_after_s=1.0)
        num_calls += 1
        context.add_done_callback(ended)  # type: ignore[arg-type]  # the stubs want an object of a class of theirs

    return check


def peers_only(identities: tuple[str, ...]) -> Check:
    """Admits certificates that carry one of these names, such as spiffe://cluster/ns/llm/sa/verifier (exactly, no patterns)."""
    allowed = frozenset(identities)

    def check(method: str, context: Context) -> None:
        names = {name.decode(errors="replace") for name in context.auth_context().get(SAN, ())}
        if not allowed.intersection(names):
            who = ", ".join(sorted(names)) or "no certificate"
            raise PermissionDenied(
                f"{method}: the peer's certificate ({who}) is none of tls_peers; call with one that is"
            )

    return check


def _guarded(
    method: str,
    handler: Handler,
    checks: tuple[Check, ...],
    limit: int | None,
    in_flight: BytesInFlight,
    refusals: RefusalLog,
) -> Handler:
    """The handler behind the checks, which reads its request message itself. Handlers may yield or write to the context."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    body = getattr(handler, kind)

    async def admitted(messages: AsyncIterator[Any], context: Context, take: Callable[[int], None]) -> Any:
        """The argument of the handler: its request, or the stream of them."""
        try:
            for check in checks:
                check(method, context)
            return messages if handler.request_streaming else await _request(handler, messages, limit, take)
        except ServiceError as error:
            refusals.note(error, method, context.peer())
            await abort(context, error)

    async def answer(messages: AsyncIterator[Any], context: Context) -> Any:
        with in_flight.holding() as take:
            return await body(await admitted(messages, context, take), context)

    async def answers(messages: AsyncIterator[Any], context: Context) -> Any:
        with in_flight.holding() as take:
            async with aclosing(body(await admitted(messages, context, take), context)) as responses:
                async for message in responses:
                    yield message

    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    deserializer = handler.request_deserializer if handler.request_streaming else None
    return make(answers if inspect.isasyncgenfunction(body) else answer, deserializer, handler.response_serializer)


async def _request(
    handler: Handler, messages: AsyncIterator[bytes], limit: int | None, take: Callable[[int], None]
) -> Any:
    """The only message of a unary request. InvalidRequest if it is missing, late, too large or not of the method's type."""
    try:
        async with asyncio.timeout(MESSAGE_TIMEOUT_S):
            data = await anext(aiter(messages), None)
    except TimeoutError:
        raise InvalidRequest("message", "", f"did not arrive within {MESSAGE_TIMEOUT_S:.0f} s") from None
    if data is None:
        raise InvalidRequest("message", "", "is missing; send one request message")
    if limit is not None and len(data) > limit:
        raise InvalidRequest("message", len(data), f"bytes are more than the {limit} that this method takes; send less")
    take(len(data))
    try:
        return handler.request_deserializer(data)
    except Exception as error:  # whatever the protobuf implementation raises for bytes that are no message
        fix = f"bytes cannot be decoded ({type(error).__name__}); send the request message of this method"
        raise InvalidRequest("message", len(data), fix) from None
