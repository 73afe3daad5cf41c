"""Authentication: API keys, their scopes, and one check for gRPC and HTTP before any of a call is read.

A file of keys, hashed at rest. `rootward keys new NAME` makes an entry and prints the key, once:

    keys:
      - name: mobile-app
        sha256: 5e88…                       # of the key; the key itself is stored nowhere
        tenant: mobile                      # default: the name
        scopes: [generate]                  # generate, priority, admin (default: generate)
        models: [my-model]                  # default: all
        expires: 2027-01-01T00:00:00Z       # default: never

The file is read again when it changes; a broken one is refused as a whole, and the known keys stay valid. The path of a call determines the
scope that it needs. Handlers find the caller with `caller()`; None on a gateway without keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import structlog
import yaml  # type: ignore[import-untyped]
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from gateway.http_errors import error_response, id_header
from rootward.clock import Clock, SystemClock
from rootward.errors import ConfigurationError, PermissionDenied, ServiceError, Unauthenticated
from rootward.file_watch import WatchedFiles
from rootward.keys import digest
from rootward.wire.auth import RefusalLog
from rootward.wire.status import Context

log = structlog.get_logger()

_BEARER = re.compile(r"^\s*bearer\s+(\S+)\s*$", re.IGNORECASE)
# Beginnings of the methods of administrators.
ADMIN_RPC = ("/rootward.v1.Control/Drain", "/rootward.v1.Control/WatchSession", "/grpc.reflection.")
ABORT_RPC = "/rootward.v1.Control/Abort"  # a key aborts requests of its own tenant, see `ends_requests_of`
OPEN_HTTP = {"/", "/version", "/openapi.json", "/health", "/health/live", "/health/ready"}
OPEN_FILES = "/page/"  # of the page at /, which asks for a key itself


class Scope(StrEnum):
    """A permission of a key."""

    GENERATE = "generate"  # text, tokens, models, load
    PRIORITY = "priority"  # run before the requests of others (priority below 0)
    ADMIN = "admin"  # drain, abort and watch requests of others; metrics


class Caller(BaseModel):
    """One key of the file and its owner."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=128)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    tenant: Annotated[str, Field(max_length=128, validate_default=True)] = ""
    scopes: list[Scope] = [Scope.GENERATE]
    models: list[str] = []  # empty: all
    expires: AwareDatetime | None = None

    @field_validator("tenant")
    @classmethod
    def _own_tenant(cls, value: str, info: ValidationInfo) -> str:
        """A key without a tenant is a tenant of its own."""
        return value or str(info.data.get("name", ""))

    def require(self, scope: Scope) -> None:
        """PermissionDenied unless the key has the scope; admin includes all."""
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            raise PermissionDenied(f"api key {self.name!r} has no scope {scope.value!r}; use one that has it")

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models

    def require_model(self, models: Collection[str]) -> None:
        """PermissionDenied unless the key may use one of these models."""
        if not any(map(self.may_use, models)):
            known = " or ".join(map(repr, models))
            raise PermissionDenied(f"api key {self.name!r} does not allow model {known}; ask for one that it allows")


class KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: Annotated[list[Caller], Field(min_length=1)]


class Keys:
    """The current keys of a file."""

    def __init__(self, path: Path, clock: Clock | None = None):
        """ConfigurationError if the file cannot be read or has a wrong entry."""
        self._path = path
        self._clock = clock or SystemClock()
        self._file = WatchedFiles(path, clock=self._clock)
        self._entries = read_keys(path)

    def caller(self, authorization: str | None) -> Caller:
        """The caller of this `Authorization` header. Unauthenticated for an unknown or expired key."""
        if self._file.changed():
            self._read_again()
        token = _BEARER.match(authorization or "")
        if token is None:
            raise Unauthenticated("authorization: no API key was sent; send 'Authorization: Bearer KEY'")
        entry = self._entries.get(digest(token[1]))
        if entry is None:
            raise Unauthenticated("authorization: the API key is not known; check it, or ask for a new one")
        if entry.expires is not None and entry.expires <= datetime.fromtimestamp(self._clock.wall(), UTC):
            raise Unauthenticated(f"authorization: API key {entry.name!r} has expired; ask for a new one")
        return entry

    def _read_again(self) -> None:
        try:
            self._entries = read_keys(self._path)
        except ConfigurationError as error:
            log.error("api_keys_not_read", error=str(error))
        else:
            log.info("api_keys_read", num_keys=len(self._entries))


def read_keys(path: Path) -> dict[str, Caller]:
    """Digest → entry. ConfigurationError names the entry and never the digest."""
    try:
        content = KeyFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = _without_content(error)
        raise ConfigurationError(f"api_keys: {str(path)!r} cannot be read ({reason}); name a YAML file") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigurationError(f"api_keys: {where} in {str(path)!r}: {first['msg']}") from None
    entries = {entry.sha256: entry for entry in content.keys}
    if len(entries) < len(content.keys):
        raise ConfigurationError(f"api_keys: {str(path)!r} has the same key twice; remove one")
    return entries


def _without_content(error: Exception) -> str:
    """The place of an error in the file. YAML's own message quotes the line, which may hold a digest or a key."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, OSError):
        return str(error.strerror)
    return "no UTF-8" if isinstance(error, UnicodeDecodeError) else f"no YAML, line {mark.line + 1 if mark else 1}"


_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)  # of the call that this task serves


def caller() -> Caller | None:
    """The caller of the call that this task serves."""
    return _CALLER.get()


def tenant(headers: Mapping[str, str]) -> str:
    """The tenant of this call: that of its key; without keys the one in its headers."""
    known = caller()
    return known.tenant if known is not None else headers.get("x-rootward-tenant", "")


def rpc_headers(context: Context) -> dict[str, str]:
    """The metadata of a gRPC call, without binary entries."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def ends_requests_of() -> str | None:
    """The tenant whose requests this call may abort. None: all requests, for admins and on a gateway without keys."""
    known = caller()
    return None if known is None or Scope.ADMIN in known.scopes else known.tenant


def rpc_scope(method: str) -> Scope:
    """The scope that a gRPC method needs, as "/package.Service/Method". (Health is not checked.)"""
    return Scope.ADMIN if method.startswith(ADMIN_RPC) else Scope.GENERATE


def http_scope(path: str) -> Scope | None:
    """The scope that an HTTP path needs; None for a path that is open to all."""
    if path in OPEN_HTTP or path.startswith(OPEN_FILES):
        return None
    return Scope.ADMIN if path == "/metrics" else Scope.GENERATE


class Access:
    """Checks calls against the keys of a gateway and its models: a key must allow one of them, and `Models.of` checks the one that a
    request names. Without keys every caller may generate; administration then needs a gateway on loopback (`local`)."""

    def __init__(
        self, keys: Keys | None, models: Collection[str], *, local: bool = False, refusals: RefusalLog | None = None
    ):
        self._keys, self._models, self._local = keys, models, local
        self._refusals = refusals or RefusalLog()

    def check_rpc(self, method: str, context: Context) -> None:
        """`rootward.wire.auth.Check` of the gRPC server."""
        if self._keys is None:
            if not self._local and (rpc_scope(method) is Scope.ADMIN or method == ABORT_RPC):
                why = "is for administrators, and this gateway has no API keys to tell them by"
                raise PermissionDenied(f"{method}: {why}; start it with --api-keys, or on a loopback address")
            return
        _CALLER.set(self._admit(self._keys, rpc_scope(method), rpc_headers(context).get("authorization")))

    def around(self, app: ASGIApp) -> ASGIApp:
        """The HTTP application behind the same check."""
        keys = self._keys
        if keys is None:
            return app

        async def checked(scope: AsgiScope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and (needed := http_scope(scope["path"])) is not None:
                headers = Headers(scope=scope)
                try:
                    _CALLER.set(self._admit(keys, needed, headers.get("authorization")))
                except ServiceError as error:
                    peer = ":".join(map(str, scope.get("client") or ()))
                    self._refusals.note(error, scope["path"], peer)
                    await error_response(error, id_header(headers))(scope, receive, send)
                    return
            await app(scope, receive, send)

        return checked

    def _admit(self, keys: Keys, needed: Scope, authorization: str | None) -> Caller:
        known = keys.caller(authorization)
        known.require(needed)
        if needed is Scope.GENERATE:
            known.require_model(self._models)
        return known
