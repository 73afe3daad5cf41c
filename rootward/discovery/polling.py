"""`ports.Discovery` for sources that have to be asked: DNS, the registry, the Kubernetes API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

import structlog

from rootward.clock import Clock, SystemClock
from rootward.ports import Peer

log = structlog.get_logger("discovery")


class PolledDiscovery:
    """Asks a source every `every_s` seconds. While it fails, its last answer holds.

    ask: the peers now; raises one of `failures` if the source does not answer. source: its name in the log.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[tuple[Peer, ...]]],
        *,
        source: str,
        every_s: float,
        failures: tuple[type[Exception], ...],
        clock: Clock | None = None,
    ) -> None:
        self._ask = ask
        self._source = source
        self._every_s = every_s
        self._failures = failures
        self._clock = clock or SystemClock()

    async def watch(self) -> AsyncGenerator[tuple[Peer, ...], None]:
        """Each answer that differs from the one before. The first failure in a row is logged."""
        known: tuple[Peer, ...] | None = None
        answered = True
        while True:
            try:
                found = await self._ask()
            except self._failures as error:
                if answered:
                    log.warning("discovery_failed", source=self._source, error=f"{type(error).__name__}: {error}")
                answered = False
            else:
                answered = True
                if found != known:
                    known = found
                    yield found
            await self._clock.sleep(self._every_s)
