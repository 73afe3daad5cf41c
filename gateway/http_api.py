"""The OpenAI-compatible HTTP face: completions, models, health, version, metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from functools import lru_cache
from traceback import format_tb
from typing import Any

import orjson
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import rootward
from gateway.http_answers import Answer, fingerprint, model_card
from gateway.http_errors import HttpError, http_error, simple_error
from gateway.http_requests import Completion, parse_completion
from gateway.planning import check_model, check_name
from gateway.requests import Delta
from gateway.service import GatewayService
from rootward.errors import InvalidRequest, ServiceError

log = structlog.get_logger()

MAX_BODY_BYTES = 32 << 20
BODY_S = 60.0  # for a body to arrive
SLOW_CLIENT_S = 5.0  # beyond the longest request, for a client to read what it was sent
SSE_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}

Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(service: GatewayService) -> Starlette:
    """The ASGI application of a gateway."""
    api = HttpApi(service)
    routes = [
        Route("/v1/completions", _Completions(api), methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/health", api.ready),
        Route("/health/live", api.live),
        Route("/health/ready", api.ready),
        Route("/version", api.version),
        Route("/metrics", api.metrics),
    ]
    return Starlette(
        routes=routes, exception_handlers={HTTPException: _no_such, ServiceError: _refused, Exception: _refused}
    )


class HttpApi:
    """Everything that is answered at once."""

    def __init__(self, service: GatewayService):
        self.service = service
        self._created = int(time.time())  # seconds since 1970

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self.service.served_model)
        return _json(self._card())

    async def live(self, request: Request) -> Response:
        return _json({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """503 when no verifier is ready or the gateway is draining. A missing drafter does not count."""
        ready = self.service.ready
        return _json({"status": "ready" if ready else "not ready"}, status=200 if ready else 503)

    async def version(self, request: Request) -> Response:
        return _json({"version": rootward.__version__})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.service.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def _card(self) -> dict[str, object]:
        return model_card(self.service.served_model, self.service.model, created=self._created)


class _Completions:
    """POST /v1/completions as an ASGI endpoint: it watches for a disconnect while it works, and then stops working."""

    def __init__(self, api: HttpApi):
        self._service = service = api.service
        text = lru_cache(maxsize=1 << 16)  # log-probabilities name the same tokens again and again
        self._decode = text(lambda token: service.tokenizer.decode([token], skip_special_tokens=False))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        headers = {"x-request-id": request_id}
        try:
            check_name("x-request-id", request_id)
            wanted = parse_completion(await _body(request), {**request.headers, **headers})
            check_name("request_id", wanted.request.request_id)
        except ClientDisconnect:
            return
        except Exception as error:
            await _send_error(http_error(error), headers if request_id.isascii() else {}, scope, receive, send)
            _log_bug(error)
            return
        headers = {"x-request-id": wanted.request.request_id}
        answer = self._stream if wanted.stream else self._whole
        limit_s = self._service.limits.request_timeout_s + SLOW_CLIENT_S
        await _unless_disconnected(receive, answer(wanted, headers, scope, receive, send), limit_s)

    async def _whole(
        self, wanted: Completion, headers: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            generated = await self._service.collect(wanted.request)
        except Exception as error:
            _log_bug(error)
            await _send_error(http_error(error), headers, scope, receive, send)
            return
        answer = self._answer(wanted, generated.request_id)
        response = _json(answer.completion(generated.spans, generated.ending), headers=headers)
        await response(scope, receive, send)

    async def _stream(
        self, wanted: Completion, headers: dict[str, str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Headers go out with the first delta, so that a refusal still has its own status."""
        async with aclosing(self._service.generate(wanted.request)) as deltas:
            try:
                first = await anext(deltas)
            except Exception as error:
                _log_bug(error)
                await _send_error(http_error(error), headers, scope, receive, send)
                return
            raw = [(k.encode(), v.encode()) for k, v in {**SSE_HEADERS, **headers}.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            async for event in self._events(wanted, first, deltas):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(
        self, wanted: Completion, first: Delta, deltas: AsyncGenerator[Delta, None]
    ) -> AsyncGenerator[bytes, None]:
        answer, text_at = self._answer(wanted, first.request_id), 0
        try:
            delta: Delta | None = first
            while delta is not None:
                chunk = answer.chunk(delta.spans, delta.ending, text_at=text_at)
                text_at += len(delta.text)
                yield _event(chunk, delta.offset + len(delta.spans))
                if delta.ending is not None and wanted.include_usage:
                    yield _event(answer.usage_chunk(delta.ending))
                delta = None if delta.ending is not None else await anext(deltas, None)
        except Exception as error:
            _log_bug(error)
            yield _event(http_error(error).body)
            return
        yield b"data: [DONE]\n\n"

    def _answer(self, wanted: Completion, request_id: str) -> Answer:
        return Answer(
            request_id,
            self._service.served_model,
            fingerprint(self._service.model, rootward.__version__),
            self._decode,
            wanted.return_token_ids,
            wanted.report_speculation,
            wanted.request.logprobs is not None,
        )


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None], limit_s: float) -> None:
    """Run `work`; when the client goes away first, or reads so slowly that `limit_s` pass, cancel it."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
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


def _event(body: dict[str, object], event_id: int | None = None) -> bytes:
    """A server-sent event. Its id is the output position after it."""
    prefix = b"" if event_id is None else b"id: %d\n" % event_id
    return prefix + b"data: " + orjson.dumps(body) + b"\n\n"


def _json(body: dict[str, object], *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


async def _send_error(error: HttpError, headers: dict[str, str], scope: Scope, receive: Receive, send: Send) -> None:
    await _json(error.body, status=error.status, headers={**headers, **error.headers})(scope, receive, send)


async def _refused(request: Request, error: Exception) -> Response:
    _log_bug(error)
    known = http_error(error)
    return _json(known.body, status=known.status, headers=known.headers)


async def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = simple_error(error.status_code, "not_found", f"{request.method} {request.url.path}: {error.detail}")
    return _json(known.body, status=known.status)


def _log_bug(error: Exception) -> None:
    """Where it happened, without values: those may be prompts."""
    if http_error(error).status == 500:
        log.error("http_handler_failed", error=type(error).__name__, trace="".join(format_tb(error.__traceback__)))
