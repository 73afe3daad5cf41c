"""`ports.Discovery` for sources that have to be asked (DNS, the registry, the Kubernetes API), and the peers of several sources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing

import structlog

from rootward.clock import Clock, SystemClock
from rootward.ports import Discovery, Peer

log = structlog.get_logger("discovery")

RETRY_S = 1.0  # pause after an unexpected error of a source


class PolledDiscovery:
    """Asks a source every `every_s` seconds. While it fails, its last answer holds.

    ask: the peers now, see `by_address`; raises if the source does not answer. source: its name in the log.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Iterable[Peer]]],
        *,
        source: str,
        every_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._ask = ask
        self._source = source
        self._every_s = every_s
        self._clock = clock or SystemClock()

    async def watch(self) -> AsyncGenerator[tuple[Peer, ...], None]:
        """Each answer that differs from the one before. The first failure in a row is logged."""
        known: tuple[Peer, ...] | None = None
        answered = True
        while True:
            try:
                found = by_address(await self._ask())
            except Exception as error:  # sources have kinds of their own
                if answered:
                    log.warning("discovery_failed", source=self._source, error=f"{type(error).__name__}: {error}")
                answered = False
            else:
                answered = True
                if found != known:
                    known = found
                    yield found
            await self._clock.sleep(self._every_s)


def by_address(peers: Iterable[Peer]) -> tuple[Peer, ...]:
    """One peer for each address, sorted by it. Of two at one address, one of which leaves, the other one counts: it has just been replaced,
    or the source is in the middle of an update."""
    found: dict[str, Peer] = {}
    for peer in peers:
        if peer.address not in found or found[peer.address].leaving:
            found[peer.address] = peer
    return tuple(found[address] for address in sorted(found))


async def follow(
    sources: Sequence[tuple[str, Discovery]], changed: Callable[[Mapping[str, tuple[str, Peer]]], None]
) -> None:
    """Follow all sources, given as (pool, discovery), until cancelled.

    changed: called after every change, with the pool and the peer of each address; an address of several pools is in the first of them.
    After an unexpected error of a source its last answer holds, and it is followed again.
    """
    answers: dict[int, tuple[Peer, ...]] = {}  # by number of the source

    async def one(number: int, discovery: Discovery) -> None:
        while True:
            try:
                async with aclosing(discovery.watch()) as answered:
                    async for answers[number] in answered:
                        last_first = sorted(answers.items(), reverse=True)
                        changed({peer.address: (sources[n][0], peer) for n, peers in last_first for peer in peers})
            except Exception:
                log.exception("discovery_failed", source=number)
            await asyncio.sleep(RETRY_S)

    async with asyncio.TaskGroup() as group:
        for number, (_, discovery) in enumerate(sources):
            group.create_task(one(number, discovery))
