"""The settings that say where workers are, and the `ports.Discovery` of each.

    host:port, static:host:port      written down
    dns:name:port                    every address of a name (a headless service), looked up again and again
    redis:[name]                     the registry in Redis; the name defaults to the pool's
    kubernetes:service[.namespace][:port]   EndpointSlices of a service; the port is a name or a number, by default `grpc` or the only one

Each may be put into a pool, `POOL=…`; without one it is the name after `redis:`, else "default". Metrics are counted by pool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from rootward.discovery.registry import Registry, RegistryDiscovery, open_registry
from rootward.discovery.static import DnsDiscovery, StaticDiscovery
from rootward.errors import ConfigurationError
from rootward.ports import DEFAULT_POOL, Discovery
from rootward.redis_client import KEY_PREFIX
from rootward.settings import CommaSeparated

KINDS = ("static", "dns", "redis", "kubernetes")


@dataclass(frozen=True, slots=True)
class Source:
    """One entry: `kind` of KINDS, and what it looks for."""

    pool: str
    kind: str
    target: str


def parse_sources(entries: Sequence[str]) -> tuple[Source, ...]:
    """The sources of a setting's entries, checked. ValueError names the entry and how to write it."""
    return tuple(_parse(entry) for entry in entries)


def _checked(entries: list[str]) -> list[str]:
    parse_sources(entries)
    return entries


SourceList = Annotated[CommaSeparated, AfterValidator(_checked)]  # the type of a setting


@asynccontextmanager
async def open_sources(
    sources: Sequence[Source],
    role: str,
    *,
    redis_url: str = "",
    prefix: str = KEY_PREFIX,
    registry: Registry | None = None,
) -> AsyncIterator[list[tuple[str, Discovery]]]:
    """(pool, discovery) of workers of this role. ConfigurationError if a source needs what is not configured."""
    async with AsyncExitStack() as stack:
        if registry is None and any(source.kind == "redis" for source in sources):
            if not redis_url:
                raise ConfigurationError("redis_url: is empty, and workers are to be found in Redis; give --redis-url")
            registry = await stack.enter_async_context(open_registry(redis_url, prefix=prefix))
        found: list[tuple[str, Discovery]] = []
        for source in sources:
            found.append((source.pool, await stack.enter_async_context(_open(source, role, registry))))
        yield found


@asynccontextmanager
async def _open(source: Source, role: str, registry: Registry | None) -> AsyncIterator[Discovery]:
    if source.kind == "static":
        yield StaticDiscovery([source.target])
    elif source.kind == "dns":
        host, _, port = source.target.rpartition(":")
        yield DnsDiscovery(host.strip("[]"), int(port))
    elif source.kind == "redis":
        assert registry is not None
        yield RegistryDiscovery(registry, role, source.target or source.pool)
    else:
        try:
            from rootward.discovery.kubernetes import open_endpoint_slices  # a large import, for clusters only
        except ImportError:
            message = f"kubernetes:{source.target}: needs the package kubernetes; install rootward[kubernetes]"
            raise ConfigurationError(message) from None
        async with open_endpoint_slices(source.target) as discovery:
            yield discovery


def _parse(entry: str) -> Source:
    pool, given, rest = entry.rpartition("=")
    if given and not pool:
        raise ValueError(f"{entry!r}: the name of the pool before '=' is empty")
    kind, named, target = rest.partition(":")
    if not named or kind not in KINDS:
        kind = "static"
        target = rest
    if kind in ("static", "dns"):
        host, _, port = target.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{entry!r}: write host:port" + (" after 'dns:'" if kind == "dns" else ""))
    if kind == "kubernetes" and not target.partition(":")[0].partition(".")[0]:
        raise ValueError(f"{entry!r}: write kubernetes:service, kubernetes:service.namespace, or either with :port")
    return Source(pool or (target if kind == "redis" else "") or DEFAULT_POOL, kind, target)
