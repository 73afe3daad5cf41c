"""A generation as an HTTP response: one JSON object, or server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers import Answer
from gateway.choices import coalesced, concurrent_deltas, outputs, tokenised
from gateway.detokenizer import Span
from gateway.http_errors import error_response, http_error, json_response
from gateway.metrics import CallMetrics
from gateway.requests import Delta
from gateway.service import SLOW_CLIENT_S

SILENCE_S = 15.0  # after which a comment keeps proxies from closing the stream
SSE_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
# Bytes of an answer that are sent at a time, with other work between: the server copies them, and holds them until they are read.
PART_BYTES = 1 << 20
DONE, KEEP_ALIVE = b"data: [DONE]\n\n", b": keep-alive\n\n"
# Characters at which Python's `splitlines` ends a line, and with it clients such as httpx's `iter_lines`, though events do not. They are in
# strings only, and JSON escapes the others of that kind.
LINE_ENDS = {"\x85".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


class GenerationResponse(Response):
    """Generates while it is sent, until the client disconnects."""

    def __init__(self, answer: Answer, calls: CallMetrics):
        super().__init__()
        self._answer, self._calls = answer, calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit_s = self._answer.service.settings.request_timeout_s + SLOW_CLIENT_S
        await _unless_disconnected(receive, self._answered(scope, receive, send), limit_s)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the headers of a stream with its first part, so that a refusal has its own status."""
        answer, service, body = self._answer, self._answer.service, self._answer.body
        with_ids = answer.resumable and _reads_ids(Headers(scope=scope))
        headers = {"x-request-id": answer.request.request_id}
        streaming = False  # the headers of a stream are sent
        try:
            with self._calls.counting():
                requests = await tokenised(outputs(answer.request, body.prompts), service.prompt_ids)
            deltas = coalesced(concurrent_deltas(service.generate, requests), body.stream_interval)
            async with service.logprob_share(answer.request) as answer.tally.share, aclosing(deltas):
                if not body.stream:
                    whole = json_response(await answer.settled(await _collected(answer, deltas)), headers=headers)
                    await send({"type": "http.response.start", "status": 200, "headers": whole.raw_headers})
                    for part in _parts(bytes(whole.body)):
                        await _send_part(send, part)
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                async with aclosing(_events(answer, deltas, with_ids=with_ids)) as events:
                    async for part in events:
                        if not streaming:
                            start = Headers({**SSE_HEADERS, **headers}).raw
                            await send({"type": "http.response.start", "status": 200, "headers": start})
                            streaming = True
                        await _send_part(send, part)
        except Exception as raised:
            error = answer.named(raised)
            if not streaming:
                await error_response(error, headers, path=scope["path"])(scope, receive, send)
                return
            known = http_error(error, path=scope["path"], request_id=answer.request.request_id)
            failure = answer.failure(known.body)
            for part in _event(failure, typed=answer.typed_events):
                await _send_part(send, part)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _collected(answer: Answer, deltas: AsyncIterator[Delta]) -> dict[str, object]:
    spans: dict[int, list[Span]] = {}
    async for delta in deltas:
        spans.setdefault(delta.index, []).extend(delta.spans)
        answer.tally.add(delta)
    answer.tally.completed()
    size = answer.size(answer.tally.prompts.values(), sum(map(len, spans.values())))
    return await answer.service.tokenizer_pool.answer(size, answer.whole, spans)


def _reads_ids(headers: Headers) -> bool:
    """Whether the client reads whole server-sent events. Many take each event for one line with data (vllm bench, sglang.bench_serving,
    llmperf), so ids are sent to those alone that say so, or that resume."""
    return "text/event-stream" in headers.get("accept", "") or "last-event-id" in headers


async def _events(
    answer: Answer, deltas: AsyncGenerator[Delta, None], *, with_ids: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a stream in parts, with a comment after SILENCE_S without one: proxies end streams, and requests that wait for their
    headers, in a minute. The id of an event is the output position after it."""
    now = asyncio.get_running_loop().time
    last_sent, is_first = now(), True
    pending = asyncio.ensure_future(anext(deltas, None))
    try:
        while True:
            while not pending.done():
                await asyncio.wait({pending}, timeout=max(0.0, last_sent + SILENCE_S - now()))
                if now() >= last_sent + SILENCE_S:
                    yield KEEP_ALIVE
                    last_sent = now()
            if (delta := pending.result()) is None:
                break
            prompts = () if delta.offset and not is_first else (delta.prompt,)
            is_first = False
            size = answer.size(prompts, len(delta.spans), delta.rounds)
            for chunk in await answer.service.tokenizer_pool.answer(size, answer.chunks, delta):
                event_id = delta.offset + len(delta.spans) if with_ids else None
                for part in _event(chunk, event_id, typed=answer.typed_events):
                    yield part
                last_sent = now()
            pending = asyncio.ensure_future(anext(deltas, None))
    finally:
        if not pending.done():
            pending.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await pending
    last = answer.last()
    if last is not None:
        for part in _event(await answer.settled(last), typed=answer.typed_events):
            yield part
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


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
    if len(part) == PART_BYTES:
        await asyncio.sleep(0)


def _parts(body: bytes) -> Iterator[bytes]:
    return (body[begin : begin + PART_BYTES] for begin in range(0, len(body), PART_BYTES))


def _event(body: dict[str, object], event_id: int | None = None, *, typed: bool = False) -> Iterator[bytes]:
    prefix = b"" if event_id is None else b"id: %d\n" % event_id
    if typed:
        prefix += f"event: {body['type']}\n".encode()
    data = orjson.dumps(body)
    for mark, escaped in LINE_ENDS.items():
        data = data.replace(mark, escaped)
    if len(data) < PART_BYTES:
        yield prefix + b"data: " + data + b"\n\n"
        return
    yield prefix + b"data: "
    yield from _parts(data)
    yield b"\n\n"
