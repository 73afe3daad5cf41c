"""Bodies in and out: read within limits, written as JSON, errors among them."""

from __future__ import annotations

import asyncio
from traceback import format_tb

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http_errors import HttpError, http_error
from rootward.errors import InvalidRequest

log = structlog.get_logger()

MAX_BODY_BYTES = 32 << 20
BODY_S = 60.0  # for a body to arrive


async def read_body(request: Request) -> bytes:
    """InvalidRequest if it is too long or takes too long."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY_BYTES:
                    fix = f"are more than {MAX_BODY_BYTES}; send a shorter prompt"
                    raise InvalidRequest("body", f"{len(data)} bytes", fix)
    except TimeoutError:
        raise InvalidRequest("body", f"{len(data)} bytes", f"are all that came within {BODY_S:.0f} s") from None
    return bytes(data)


def json_response(body: dict[str, object], *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


async def respond(body: dict[str, object], headers: dict[str, str], scope: Scope, receive: Receive, send: Send) -> None:
    await json_response(body, headers=headers)(scope, receive, send)


async def send_error(error: HttpError, headers: dict[str, str], scope: Scope, receive: Receive, send: Send) -> None:
    response = json_response(error.body, status=error.status, headers={**headers, **error.headers})
    await response(scope, receive, send)


def log_bug(error: Exception) -> None:
    """Where it happened, without values: those may be prompts."""
    if http_error(error).status == 500:
        log.error("http_handler_failed", error=type(error).__name__, trace="".join(format_tb(error.__traceback__)))
