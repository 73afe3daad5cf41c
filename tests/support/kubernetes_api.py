"""The part of a Kubernetes API server that lists EndpointSlices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


class ApiServer:
    """Objects by name."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200  # of every answer
        self.asked: list[dict[str, str]] = []  # the query of each request
        self._objects: dict[str, dict[str, Any]] = {}

    async def apply(self, item: dict[str, Any]) -> None:
        """Create or change an object."""
        self._objects[item["metadata"]["name"]] = deepcopy(item)

    async def delete(self, name: str) -> None:
        del self._objects[name]

    async def _answer(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        self.asked.append(query)
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        label, _, service = query["labelSelector"].partition("=")
        items = [item for item in self._objects.values() if item["metadata"].get("labels", {}).get(label) == service]
        return web.json_response({"kind": "EndpointSliceList", "metadata": {"resourceVersion": "100"}, "items": items})


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
