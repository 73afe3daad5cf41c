"""A generation as an HTTP response: one JSON object, or server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers import Answer
from gateway.choices import coalesced, concurrent_deltas, outputs, tokenised
from gateway.detokenizer import Span
from gateway.http_errors import error_response, http_error, json_response, log_bug
from gateway.requests import Delta, GenerateRequest
from gateway.schemas import GenerationBody
from gateway.service import SLOW_CLIENT_S, GatewayService
from rootward.errors import InvalidRequest

SILENCE_S = 15.0  # after which a comment keeps proxies from closing the stream
SSE_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
DONE, KEEP_ALIVE = b"data: [DONE]\n\n", b": keep-alive\n\n"


class GenerationResponse(Response):
    """Generates while it is sent, until the client disconnects. `form_field`: the field of the body that the gateway made the form of the
    output from, if the client did not write that form itself."""

    def __init__(
        self,
        service: GatewayService,
        *,
        body: GenerationBody,
        request: GenerateRequest,
        kind: Callable[..., Answer],
        form_field: str = "",
    ):
        super().__init__()
        self._form_field = form_field
        self._service, self._body, self._request, self._kind = service, body, request, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit_s = self._service.settings.request_timeout_s + SLOW_CLIENT_S
        await _unless_disconnected(receive, self._answered(scope, receive, send), limit_s)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the headers of a stream with the first delta, so that a refusal has its own status."""
        headers = {"x-request-id": self._request.request_id}
        streamed: Answer | None = None  # the answer of a stream whose headers are sent
        try:
            requests = await tokenised(outputs(self._request, self._body.prompts), self._service.prompt_ids)
            answer = self._kind(
                body=self._body, request=self._request, service=self._service, num_outputs=len(requests)
            )
            deltas = coalesced(concurrent_deltas(self._service.generate, requests), self._body.stream_interval)
            async with aclosing(deltas):
                if not self._body.stream:
                    whole = await self._collected(answer, deltas)
                    await json_response(await answer.settled(whole), headers=headers)(scope, receive, send)
                    return
                first = await anext(deltas)
                await send(_start({**SSE_HEADERS, **headers}))
                streamed = answer
                async with aclosing(self._events(answer, first, deltas)) as events:
                    async for event in events:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as raised:
            error = self._named(raised)
            if streamed is None:
                await error_response(error, headers, path=scope["path"])(scope, receive, send)
                return
            log_bug(error)
            failure = streamed.failure(http_error(error, path=scope["path"]).body)
            event = _event(failure, typed=streamed.typed_events)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _named(self, error: Exception) -> Exception:
        """The error, under the name of the field that the form of the output was made from."""
        form = self._request.structure
        if self._form_field and form and isinstance(error, InvalidRequest) and error.field == form.form.value:
            return type(error)(self._form_field, "given", error.fix)
        return error

    async def _collected(self, answer: Answer, deltas: AsyncIterator[Delta]) -> dict[str, object]:
        spans: dict[int, list[Span]] = {}
        async for delta in deltas:
            spans.setdefault(delta.index, []).extend(delta.spans)
            answer.tally.add(delta)
        size = answer.prompt_characters(answer.tally.prompts.values())
        return await self._service.tokenizer_pool.run(size, answer.whole, spans)

    async def _events(
        self, answer: Answer, first: Delta, deltas: AsyncGenerator[Delta, None]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, with a comment after SILENCE_S without one. The id of an event is the output position after it."""
        now = asyncio.get_running_loop().time
        delta: Delta | None = first
        last_sent = now()
        pending: asyncio.Future[Delta | None] | None = None
        try:
            while delta is not None:
                size = 0 if delta.offset and delta is not first else answer.prompt_characters([delta.prompt])
                for chunk in await self._service.tokenizer_pool.run(size, answer.chunks, delta):
                    event_id = delta.offset + len(delta.spans) if answer.resumable else None
                    yield _event(chunk, event_id, typed=answer.typed_events)
                    last_sent = now()
                pending = asyncio.ensure_future(anext(deltas, None))
                while not pending.done():
                    await asyncio.wait({pending}, timeout=max(0.0, last_sent + SILENCE_S - now()))
                    if now() >= last_sent + SILENCE_S:
                        yield KEEP_ALIVE
                        last_sent = now()
                delta = pending.result()
        finally:
            if pending is not None and not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await pending
        last = answer.last()
        if last is not None:
            yield _event(await answer.settled(last), typed=answer.typed_events)
        if not answer.typed_events:
            yield DONE


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None], limit_s: float) -> None:
    """Run `work`; cancel it when the client disconnects or when it takes longer than `limit_s`."""
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


def _start(headers: dict[str, str]) -> dict[str, object]:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


def _event(body: dict[str, object], event_id: int | None = None, *, typed: bool = False) -> bytes:
    prefix = b"" if event_id is None else b"id: %d\n" % event_id
    if typed:
        prefix += f"event: {body['type']}\n".encode()
    return prefix + b"data: " + orjson.dumps(body) + b"\n\n"
