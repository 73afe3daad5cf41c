"""What becomes of requests while they run, told to whoever watches: counts and times, never text.

Telling costs a look at a list that is nearly always empty. A watcher that is too slow misses events and is told how many.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from gateway.choices import belongs
from rootward.core.requests import FinishReason

MAX_WAITING = 1024  # events of one watcher


@dataclass(frozen=True, slots=True)
class Begun:
    num_prompt_tokens: int
    num_known_tokens: int = 0  # of the output, where it goes on with one


@dataclass(frozen=True, slots=True)
class Sent:
    verifier: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Round:
    offset: int
    num_tokens: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Ended:
    """No reason: it failed, or its client went away."""

    reason: FinishReason | None
    error: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Event:
    request_id: str
    session_id: str
    tenant: str
    elapsed_s: float
    what: Begun | Sent | Round | Ended
    num_missed: int = 0


@dataclass(slots=True, eq=False)
class Watcher:
    """Either id is empty."""

    session_id: str
    request_id: str
    events: asyncio.Queue[Event] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING))
    num_missed: int = 0

    def wants(self, told: Told) -> bool:
        if self.session_id:
            return told.session_id == self.session_id
        return belongs(told.request_id, [self.request_id])

    def take(self, event: Event) -> None:
        """The end of a request is never missed: a watch of it would not end."""
        if self.events.full():
            self.num_missed += 1
            if not isinstance(event.what, Ended):
                return
            self.num_missed += self.events.get_nowait().num_missed
        self.events.put_nowait(replace(event, num_missed=self.num_missed))
        self.num_missed = 0


class Watching:
    """All watchers of a gateway, and what there is to watch. `now` is in seconds."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._live: dict[Told, Begun] = {}
        self._watchers: list[Watcher] = []

    def begun(self, told: Told, begun: Begun) -> None:
        self._live[told] = begun
        self.tell(told, begun)

    def ended(self, told: Told, ended: Ended) -> None:
        if self._live.pop(told, None) is not None:
            self.tell(told, ended)

    def tell(self, told: Told, what: Begun | Sent | Round | Ended) -> None:
        for watcher in self._watchers:
            if watcher.wants(told):
                watcher.take(self._event(told, what))

    async def watch(self, *, session_id: str = "", request_id: str = "") -> AsyncGenerator[Event, None]:
        """Events of a session until it is closed, or of a request until it has ended. What runs is told of as begun."""
        watcher = Watcher(session_id, request_id)
        for told, begun in self._live.items():
            if watcher.wants(told):
                watcher.take(self._event(told, begun))
        self._watchers.append(watcher)
        try:
            while True:
                event = await watcher.events.get()
                yield event
                over = isinstance(event.what, Ended) and not any(map(watcher.wants, self._live))
                if request_id and over and watcher.events.empty():
                    return
        finally:
            self._watchers.remove(watcher)

    @property
    def anybody(self) -> bool:
        return bool(self._watchers)

    def _event(self, told: Told, what: Begun | Sent | Round | Ended) -> Event:
        return Event(told.request_id, told.session_id, told.tenant, self._now() - told.arrived, what)


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """One request, as it tells of itself."""

    watching: Watching
    request_id: str
    session_id: str
    tenant: str
    arrived: float

    def sent(self, verifier: str, epoch: int) -> None:
        self.watching.tell(self, Sent(verifier, epoch))

    def round(self, offset: int, accepted: Sequence[bool]) -> None:
        if self.watching.anybody:
            self.watching.tell(self, Round(offset, len(accepted), sum(accepted)))
