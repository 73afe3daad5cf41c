"""Who may call: a check that runs before a handler does and sees the method, the metadata and the peer's certificate.

Health and reflection stay open: probes and tools carry no credentials, and they tell nothing about requests.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from rootward.errors import PermissionDenied, ServiceError
from rootward.wire.status import Context, abort

log = logging.getLogger(__name__)

OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.")
SAN = "x509_subject_alternative_name"

Check = Callable[[str, Context], None]  # (method, context); raises ServiceError to refuse
Handler = Any  # grpc.RpcMethodHandler, generic for type checkers alone


class Door(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # likewise
    """Runs `check` in the task of every call, right before its handler."""

    def __init__(self, check: Check):
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(OPEN):
            return handler
        return _guarded(method, handler, self._check)


def peers_only(identities: tuple[str, ...]) -> Check:
    """Admits certificates that carry one of these names, such as spiffe://cluster/ns/llm/sa/verifier (exactly, no patterns)."""
    allowed = frozenset(identities)

    def check(method: str, context: Context) -> None:
        names = peer_names(context)
        if not allowed.intersection(names):
            who = ", ".join(sorted(names)) or "no certificate"
            raise PermissionDenied(
                f"{method}: the peer's certificate ({who}) is none of tls_peers; call with one that is"
            )

    return check


def peer_names(context: Context) -> frozenset[str]:
    """The names in the certificate of the peer; empty without one."""
    return frozenset(name.decode(errors="replace") for name in context.auth_context().get(SAN, ()))


def _guarded(method: str, handler: Handler, check: Check) -> Handler:
    """The same handler behind a check, whichever of the four kinds it is and whether it yields or writes."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    body = getattr(handler, kind)

    async def admit(context: Context) -> None:
        try:
            check(method, context)
        except ServiceError as error:
            seen = {
                "path": method,
                "peer": context.peer(),
                "reason": error.reason,
                "error": str(error),
            }  # no credentials
            log.warning("call_refused", extra=seen)
            await abort(context, error)

    async def answer(request: Any, context: Context) -> Any:
        await admit(context)
        return await body(request, context)

    async def answers(request: Any, context: Context) -> Any:
        await admit(context)
        async for message in body(request, context):
            yield message

    make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
    guarded = answers if inspect.isasyncgenfunction(body) else answer
    return make(guarded, handler.request_deserializer, handler.response_serializer)
