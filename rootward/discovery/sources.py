"""The settings that say where workers are, and the `ports.Discovery` of each.

    host:port, static:host:port      a fixed address
    dns:name:port                    every address of a name (a headless service), resolved again and again
    redis:[name]                     the registry in Redis; the name defaults to the pool's
    kubernetes:service[.namespace][:port]   EndpointSlices of a service; the port is a name or a number, by default `grpc` or the only one

Each may be put into a pool, `POOL=…`; without one it is the name after `redis:`, else "default". Metrics are counted by pool.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from rootward.addresses import join_host_port, split_host_port
from rootward.clock import Clock
from rootward.discovery.polling import PolledDiscovery
from rootward.discovery.registry import Registry, registry_discovery
from rootward.errors import ConfigurationError
from rootward.ports import DEFAULT_POOL, Discovery, Peer
from rootward.settings import CommaSeparated

KINDS = ("static", "dns", "redis", "kubernetes")
DNS_POLL_S = 5.0  # between two look-ups of a name
DNS_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Source:
    """One entry: `kind` of KINDS, and its argument."""

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
    sources: Sequence[Source], role: str, *, registry: Registry | None = None
) -> AsyncIterator[list[tuple[str, Discovery]]]:
    """(pool, discovery) of workers of this role. ConfigurationError for a source in the registry if there is none."""
    async with AsyncExitStack() as stack:
        yield [(source.pool, await _opened(source, role, registry, stack)) for source in sources]


async def _opened(source: Source, role: str, registry: Registry | None, stack: AsyncExitStack) -> Discovery:
    if source.kind == "static":
        return StaticDiscovery(source.target)
    if source.kind == "dns":
        return dns_discovery(*split_host_port(source.target))
    if source.kind == "redis":
        if registry is None:
            raise ConfigurationError("redis_url: is empty, and workers are to be found in Redis; give --redis-url")
        return registry_discovery(registry, role, source.target or source.pool)
    try:
        from rootward.discovery.kubernetes import open_endpoint_slices  # a large import, for clusters only
    except ImportError:
        message = f"kubernetes:{source.target}: needs the package kubernetes; install rootward[kubernetes]"
        raise ConfigurationError(message) from None
    return await stack.enter_async_context(open_endpoint_slices(source.target))


class StaticDiscovery:
    """`ports.Discovery`: always these addresses."""

    def __init__(self, *addresses: str) -> None:
        self._peers = tuple(Peer(address) for address in dict.fromkeys(addresses))

    async def watch(self) -> AsyncGenerator[tuple[Peer, ...], None]:
        yield self._peers
        await asyncio.Event().wait()


async def addresses_of(host: str, port: int) -> list[str]:
    """host:port of every address of a name; none for a name without addresses (no pod is ready). OSError: the resolver fails."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            return []
        raise
    return [join_host_port(str(address[0]), port) for *_, address in found]


def dns_discovery(
    host: str,
    port: int,
    *,
    clock: Clock | None = None,
    resolve: Callable[[str, int], Awaitable[list[str]]] = addresses_of,
) -> PolledDiscovery:
    """Every A and AAAA record of a name; a headless service has one per ready pod."""

    async def ask() -> list[Peer]:
        async with asyncio.timeout(DNS_TIMEOUT_S):
            return [Peer(address) for address in await resolve(host, port)]

    return PolledDiscovery(ask, source=f"dns:{host}", every_s=DNS_POLL_S, clock=clock)


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
