"""Whether a call may go on: one decision for gRPC and HTTP, before any of it is read.

The path says which `Scope` is needed, `Keys` says who calls. Handlers find the caller with `caller()`; None on a gateway
without keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from gateway.http_bodies import send_error
from gateway.http_errors import http_error
from gateway.keys import Caller, Keys, Scope
from rootward.errors import ServiceError
from rootward.wire.status import Context

log = structlog.get_logger()

_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)  # of the call that this task serves

ADMIN_RPC = {f"/rootward.v1.Control/{name}" for name in ("Drain", "WatchSession")}
OPEN_HTTP = {"/", "/version", "/openapi.json", "/health", "/health/live", "/health/ready"}
OPEN_FILES = "/page/"  # of the page at /, which asks for a key itself


def caller() -> Caller | None:
    """Who makes the call that this task serves."""
    return _CALLER.get()


def tenant(headers: Mapping[str, str]) -> str:
    """On whose account this call is: that of its key; without keys what its headers say."""
    known = caller()
    return known.tenant if known is not None else headers.get("x-rootward-tenant", "")


def ends_requests_of() -> str | None:
    """Whose requests this call may abort: its own tenant's. None: everybody's, for admins and on a gateway without keys."""
    known = caller()
    return None if known is None or Scope.ADMIN in known.scopes else known.tenant


def rpc_scope(method: str) -> Scope:
    """What a gRPC method needs, as "/package.Service/Method". (Health and reflection are not asked about.)"""
    return Scope.ADMIN if method in ADMIN_RPC else Scope.GENERATE


def http_scope(path: str) -> Scope | None:
    """What an HTTP path needs. None: nothing."""
    if path in OPEN_HTTP or path.startswith(OPEN_FILES):
        return None
    return Scope.ADMIN if path == "/metrics" else Scope.GENERATE


class Access:
    """The keys of a gateway and the model that it serves."""

    def __init__(self, keys: Keys, model: str):
        self._keys, self._model = keys, model

    def check_rpc(self, method: str, context: Context) -> None:
        """`rootward.wire.auth.Check` of the gRPC server."""
        headers = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        _CALLER.set(self._admit(rpc_scope(method), headers.get("authorization")))

    def around(self, app: ASGIApp) -> ASGIApp:
        """The HTTP application behind the same check."""

        async def checked(scope: AsgiScope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and (needed := http_scope(scope["path"])) is not None:
                try:
                    _CALLER.set(self._admit(needed, Headers(scope=scope).get("authorization")))
                except ServiceError as error:
                    peer = ":".join(map(str, scope.get("client") or ()))
                    log.warning("call_refused", path=scope["path"], peer=peer, reason=error.reason, error=str(error))
                    await send_error(http_error(error), {}, scope, receive, send)
                    return
            await app(scope, receive, send)

        return checked

    def _admit(self, needed: Scope, authorization: str | None) -> Caller:
        known = self._keys.caller(authorization)
        known.require(needed)
        if needed is Scope.GENERATE:
            known.require_model(self._model)
        return known
