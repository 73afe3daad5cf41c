"""The part of a Kubernetes API server that serves EndpointSlices: list and watch with versions, bookmarks, 410 Gone, broken connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
GONE = {"kind": "Status", "status": "Failure", "message": "too old resource version", "reason": "Expired", "code": 410}


class ApiServer:
    """Objects by name, and what happened to them: (version, event)."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200  # of every answer
        self.asked: list[dict[str, str]] = []  # the query of each request
        self._objects: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, dict[str, Any]]] = []
        self._version, self._oldest = 100, 100
        self._news = asyncio.Condition()
        self._watches: list[tuple[web.Request, web.StreamResponse]] = []

    @property
    def num_lists(self) -> int:
        return sum("watch" not in query for query in self.asked)

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    async def apply(self, item: dict[str, Any]) -> None:
        """Create or change an object."""
        name = item["metadata"]["name"]
        await self._happen("MODIFIED" if name in self._objects else "ADDED", deepcopy(item))

    async def delete(self, name: str) -> None:
        await self._happen("DELETED", self._objects[name])

    async def bookmark(self) -> None:
        await self._happen("BOOKMARK", {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": {}})

    async def compact(self) -> None:
        """Forget what happened so far."""
        self._oldest, self._events = self._version, []

    async def cut(self, partial: bytes = b"") -> None:
        """Break every watch without a word, or in the middle of one."""
        for request, answer in list(self._watches):
            if partial:
                await answer.write(partial)
            assert request.transport is not None
            request.transport.close() if partial else request.transport.abort()

    async def _happen(self, kind: str, item: dict[str, Any]) -> None:
        async with self._news:
            self._version += 1
            item = item | {"metadata": item["metadata"] | {"resourceVersion": str(self._version)}}
            if kind == "DELETED":
                del self._objects[item["metadata"]["name"]]
            elif kind != "BOOKMARK":
                self._objects[item["metadata"]["name"]] = item
            self._events.append((self._version, {"type": kind, "object": item}))
            self._news.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append(query)
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        label, _, service = query["labelSelector"].partition("=")

        def fits(item: dict[str, Any]) -> bool:
            return item["metadata"].get("labels", {}).get(label) == service

        if "watch" in query:
            return await self._watch(request, int(query["resourceVersion"]), fits)
        items = [item for item in self._objects.values() if fits(item)]
        meta = {"resourceVersion": str(self._version)}
        return web.json_response({"kind": "EndpointSliceList", "metadata": meta, "items": items})

    async def _watch(self, request: web.Request, version: int, fits: Any) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        self._watches.append((request, answer))
        try:
            while True:
                if version < self._oldest:
                    await _send(answer, {"type": "ERROR", "object": GONE})
                    return answer
                for at, event in [e for e in self._events if e[0] > version]:
                    version = at
                    if event["type"] == "BOOKMARK" or fits(event["object"]):
                        await _send(answer, event)
                async with self._news:
                    await self._news.wait_for(lambda v=version: self._version > v)
        finally:
            self._watches.remove((request, answer))


async def _send(answer: web.StreamResponse, event: dict[str, Any]) -> None:
    await answer.write(json.dumps(event).encode() + b"\n")


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    server, app = ApiServer(), web.Application()
    app.router.add_get(PATH, server._answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
