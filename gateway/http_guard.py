"""Checks of a request before the HTTP application sees it: it names this server, its body is JSON, small and complete in time, and all
bodies and gRPC messages of the process together stay within a budget. API keys are checked before (`gateway.auth`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http_errors import error_response, id_header
from rootward.errors import InvalidRequest, PermissionDenied, ServiceError
from rootward.wire.auth import BytesInFlight
from rootward.wire.channel import MAX_REQUEST_BYTES

BODY_S = 60.0  # for a body to arrive
MAX_CONTAINERS = 1 << 14  # arrays and objects of a body: a message takes about 15 microseconds of the event loop
MAX_MEMBERS = 1 << 15  # of all objects of a body
# Bytes of the longest body for each value that it may have: 262 144 token ids with the default limit, 45 ms of the event loop.
BYTES_A_VALUE = 8
MAX_VALUES = MAX_REQUEST_BYTES // BYTES_A_VALUE  # of JSON in the texts of a body
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0"})  # an address, unlike a name, leads nowhere else


def for_web_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, whose answers scripts of web pages of these origins may read (CORS).

    A browser's preflight request is answered before any other check, since it has neither key nor body."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


class RequestGuard:
    """ASGI middleware.

    max_body_bytes: of the endpoints that take a body (POST).
    in_flight: budget of the process.
    refused: told of every refusal.
    hosts: names of a server that is open to everybody on this machine. Otherwise web pages in a browser could use it, by a name of their
        own that resolves to loopback (DNS rebinding) or by a form, whose content type is not JSON. None: any name.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        in_flight: BytesInFlight,
        refused: Callable[[ServiceError], None] = lambda error: None,
        hosts: Collection[str] | None = None,
    ):
        self._app, self._max_body_bytes, self._in_flight, self._hosts = app, max_body_bytes, in_flight, hosts
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._in_flight.holding() as take:
            headers = Headers(scope=scope)
            try:
                self._check_host(headers)
                if scope["method"] == "POST":
                    self._check_content_type(headers)
                    self._check_encoding(headers)
                    try:
                        body = await _read(Request(scope, receive), limit=self._max_body_bytes, take=take)
                    except ClientDisconnect:
                        return
                    receive = _replayed(body, receive)
                    del body
                try:
                    await self._app(scope, receive, send)
                except Exception as error:
                    # It was answered, and goes on to the server, which logs it: without its text, which may be of a prompt.
                    raise RuntimeError(type(error).__name__).with_traceback(error.__traceback__) from None
            except ServiceError as error:
                self._refused(error)
                await error_response(error, id_header(headers))(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        if self._hosts is None:
            return
        given = headers.get("host", "")
        try:
            name = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            name = ""
        if name not in self._hosts:
            fix = f"is none of {', '.join(sorted(self._hosts))}; use one of them, or start the gateway with api_keys"
            raise PermissionDenied(f"host: {given[:64]!r} {fix}", metadata={"field": "host"})

    def _check_content_type(self, headers: Headers) -> None:
        given = headers.get("content-type")
        kind = (given or "").partition(";")[0].strip().lower()
        if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
            return
        if given is not None or self._hosts is not None:
            raise InvalidRequest(
                "content-type", (given or "")[:64], "is not JSON; send 'Content-Type: application/json'"
            )

    def _check_encoding(self, headers: Headers) -> None:
        given = headers.get("content-encoding", "identity")
        if given.strip().lower() not in ("", "identity"):
            raise InvalidRequest("content-encoding", given[:64], "is not supported; send the body uncompressed")


async def _read(request: Request, *, limit: int, take: Callable[[int], None]) -> bytes:
    """The body. InvalidRequest as soon as it is too long, before the rest is read."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise _too_long(int(declared), limit)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                take(len(part))
                data += part
                if len(data) > limit:
                    raise _too_long(len(data), limit)
    except TimeoutError:
        raise InvalidRequest("body", f"{len(data)} bytes", f"are all that came within {BODY_S:.0f} s") from None
    if b"\0" in data:
        # UTF-16 or UTF-32, which json.loads reads as well. `check_structure` could not tell their texts from their brackets.
        fix = "are not UTF-8; send JSON in UTF-8, a zero in a text as \\u0000"
        raise InvalidRequest("body", f"{len(data)} bytes", fix)
    check_structure(data, max_values=limit // BYTES_A_VALUE)
    return bytes(data)


def check_structure(*texts: bytes | bytearray, max_values: int = MAX_VALUES, field: str = "body") -> None:
    """InvalidRequest for JSON texts whose parsing would block the event loop. json.loads and pydantic keep the interpreter lock until they
    are done, so that a thread would not help."""
    limits = {
        b"[{": (MAX_CONTAINERS, "arrays and objects"),
        b":": (MAX_MEMBERS, "members of objects"),
        b",": (max_values, "values"),
    }

    def excess(texts: Iterable[bytes | bytearray]) -> InvalidRequest | None:
        joined = b"".join(texts)
        for marks, (most, noun) in limits.items():
            if (number := sum(joined.count(mark) for mark in marks)) > most:
                return InvalidRequest(field, number, f"{noun} are more than {most}; send fewer")
        return None

    if error := excess(texts):  # count again without strings, unless there are very many
        unescaped = [text.replace(rb"\\", b"").replace(rb"\"", b"") for text in texts]
        if sum(text.count(b'"') for text in unescaped) <= 4 * MAX_CONTAINERS:
            error = excess(part for text in unescaped for part in text.split(b'"')[::2])
    if error:
        raise error


def _too_long(num_bytes: int, limit: int) -> InvalidRequest:
    return InvalidRequest("body", f"{num_bytes} bytes", f"are more than {limit}; send a shorter prompt")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, then further messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
