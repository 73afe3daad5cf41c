"""The page at `/`: type a prompt, watch the trees. Static files beside this module; everything else it asks of the API itself."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
HEADERS = {  # nothing from elsewhere, nothing inline
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def index(request: Request) -> Response:
    return FileResponse(FOLDER / "index.html", headers=HEADERS)


class _Files(StaticFiles):
    """StaticFiles with our headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def page_routes() -> list[Route | Mount]:
    return [Route("/", index), Mount("/page", _Files(directory=FOLDER))]
