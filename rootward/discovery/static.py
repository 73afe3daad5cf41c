"""Workers that are written down, or found by name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import structlog

from rootward.clock import Clock, SystemClock
from rootward.ports import Peer

log = structlog.get_logger("discovery")

ASK_S = 5.0  # between two look-ups of a name
TIMEOUT_S = 5.0

Resolve = Callable[[str, int], Awaitable[list[str]]]


class StaticDiscovery:
    """`ports.Discovery`: these addresses, for ever."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._peers = tuple(Peer(address) for address in dict.fromkeys(addresses))

    async def watch(self) -> AsyncGenerator[tuple[Peer, ...], None]:
        yield self._peers
        await asyncio.Event().wait()


class DnsDiscovery:
    """`ports.Discovery`: every A and AAAA record of a name (a headless service has one per ready pod), looked up again every `ask_s`."""

    def __init__(
        self, host: str, port: int, *, ask_s: float = ASK_S, clock: Clock | None = None, resolve: Resolve | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._ask_s = ask_s
        self._clock = clock or SystemClock()
        self._resolve = resolve or addresses_of

    def watch(self) -> AsyncGenerator[tuple[Peer, ...], None]:
        def complain(error: Exception) -> None:
            log.warning("name_not_resolved", host=self._host, error=str(error) or type(error).__name__)

        return polled(
            self._ask, every_s=self._ask_s, clock=self._clock, failures=(OSError, TimeoutError), complain=complain
        )

    async def _ask(self) -> tuple[Peer, ...]:
        async with asyncio.timeout(TIMEOUT_S):
            addresses = await self._resolve(self._host, self._port)
        return tuple(Peer(address) for address in sorted(set(addresses)))


async def polled(
    ask: Callable[[], Awaitable[tuple[Peer, ...]]],
    *,
    every_s: float,
    clock: Clock,
    failures: tuple[type[Exception], ...],
    complain: Callable[[Exception], None],
) -> AsyncGenerator[tuple[Peer, ...], None]:
    """What `ask` returns, whenever it differs from the answer before, for ever. While it fails the last answer holds; `complain` is called
    with the first failure in a row."""
    known: tuple[Peer, ...] | None = None
    answered = True
    while True:
        try:
            found = await ask()
        except failures as error:
            if answered:
                complain(error)
            answered = False
        else:
            answered = True
            if found != known:
                known = found
                yield found
        await clock.sleep(every_s)


async def addresses_of(host: str, port: int) -> list[str]:
    """host:port of every address of a name; none for a name without addresses (no pod is ready). OSError: the resolver fails."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            return []
        raise
    return [join(str(address[0]), port) for *_, address in found]


def join(host: str, port: int) -> str:
    """host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
