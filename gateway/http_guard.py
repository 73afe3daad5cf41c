"""What a request must satisfy before the HTTP application sees it: it names this server, its body is JSON, small and complete in time,
and all bodies of the process together stay within a budget. API keys are checked before that (`gateway.access`)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http_errors import error_response
from rootward.errors import InvalidRequest, Overloaded, PermissionDenied, ServiceError

BODY_S = 60.0  # for a body to arrive
MAX_CONTAINERS = (
    1 << 18
)  # arrays and objects of a body; each takes up to 60 bytes and a third of a microsecond of the event loop
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


class RequestGuard:
    """ASGI middleware.

    max_body_bytes: of the endpoints that take a body (POST).
    max_bytes_in_flight: of all bodies, from their first byte to the end of their answer.
    hosts: names of this server, for one that everybody on this machine may use: web pages in a browser could drive it otherwise,
        by a name of their own that resolves to loopback (DNS rebinding) or by a form, whose content type is not JSON. None: any name.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        max_bytes_in_flight: int,
        hosts: Collection[str] | None = None,
    ):
        self._app, self._max_body_bytes, self._hosts = app, max_body_bytes, hosts
        self._max_bytes_in_flight = max_bytes_in_flight
        self.bytes_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = _Held(self)
        try:
            headers = Headers(scope=scope)
            self._check_host(headers)
            if scope["method"] == "POST":
                self._check_content_type(headers)
                body = await _read(receive, headers, limit=self._max_body_bytes, held=held)
                if body is None:
                    return
                receive = _replayed(body, receive)
                del body
            await self._app(scope, receive, send)
        except ServiceError as error:
            await error_response(error)(scope, receive, send)
        finally:
            held.release()

    def take(self, num_bytes: int) -> None:
        """Overloaded if the budget does not have them."""
        if self.bytes_in_flight + num_bytes > self._max_bytes_in_flight:
            limit = self._max_bytes_in_flight
            raise Overloaded(
                f"requests in flight have {limit} bytes of bodies, the limit; try again", retry_after_s=1.0
            )
        self.bytes_in_flight += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.bytes_in_flight -= num_bytes

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


class _Held:
    """The bytes that one request holds of the budget."""

    def __init__(self, guard: RequestGuard):
        self._guard, self._num_bytes = guard, 0

    def grow(self, num_bytes: int) -> None:
        self._guard.take(num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        self._guard.give_back(self._num_bytes)
        self._num_bytes = 0


async def _read(receive: Receive, headers: Headers, *, limit: int, held: _Held) -> bytes | None:
    """The body; None if the client went away. Refused as soon as it is known to be too long, before the rest is read."""
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and len(declared) < 20 and int(declared) > limit:
        raise _too_long(int(declared), limit)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                held.grow(len(part))
                data += part
                if len(data) > limit:
                    raise _too_long(len(data), limit)
                more = message.get("more_body", False)
    except TimeoutError:
        raise InvalidRequest("body", f"{len(data)} bytes", f"are all that came within {BODY_S:.0f} s") from None
    # json.loads keeps the interpreter lock until it is done, so that a thread would not help the event loop: what it is given is
    # bounded instead. Brackets in texts count as well; a prompt has far fewer.
    num_containers = data.count(b"[") + data.count(b"{")
    if num_containers > MAX_CONTAINERS:
        raise InvalidRequest("body", num_containers, f"arrays and objects are more than {MAX_CONTAINERS}; send fewer")
    return bytes(data)


def _too_long(num_bytes: int, limit: int) -> InvalidRequest:
    return InvalidRequest("body", f"{num_bytes} bytes", f"are more than {limit}; send a shorter prompt")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first, and then what else arrives."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
