"""Events of running requests, for operators: counts and times, never text. An event is the message `SessionEvent` of the wire.

Without a watcher an event costs next to nothing. A watcher that reads too slowly misses events and gets their number.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from gateway.choices import is_output_of
from rootward.core.requests import FinishReason
from rootward.v1.control_pb2 import SessionEvent
from rootward.wire.public_codec import REASONS

MAX_WAITING = 1024  # events of one watcher


@dataclass(slots=True, eq=False)
class _Watcher:
    """One of the two ids is empty."""

    session_id: str
    request_id: str
    events: asyncio.Queue[SessionEvent] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING))
    num_missed: int = 0

    def wants(self, request: WatchedRequest) -> bool:
        if self.session_id:
            return request.session_id == self.session_id
        return is_output_of(request.request_id, [self.request_id])

    def put(self, event: SessionEvent) -> None:
        """Queue an event. The end of a request is never dropped, since it ends the watch of that request."""
        if self.events.full():
            self.num_missed += 1
            if not event.HasField("ended"):
                return
            self.num_missed += self.events.get_nowait().num_missed
        own = SessionEvent(num_missed=self.num_missed)
        own.MergeFrom(event)
        self.events.put_nowait(own)
        self.num_missed = 0


class Watching:
    """All watchers and running requests of a gateway. `now` is in seconds."""

    def __init__(self, now: Callable[[], float]):
        self.now = now
        self.watchers: list[_Watcher] = []
        self.running: dict[WatchedRequest, SessionEvent] = {}  # with its event `begun`

    async def watch(self, *, session_id: str = "", request_id: str = "") -> AsyncGenerator[SessionEvent, None]:
        """Events of a session until the caller leaves, or of a request until it has ended. A running request starts with `begun`."""
        watcher = _Watcher(session_id, request_id)
        for running, begun in self.running.items():
            if watcher.wants(running):
                watcher.put(begun)
        self.watchers.append(watcher)
        try:
            while True:
                event = await watcher.events.get()
                yield event
                over = event.HasField("ended") and not any(map(watcher.wants, self.running))
                if request_id and over and watcher.events.empty():
                    return
        finally:
            self.watchers.remove(watcher)


@dataclass(frozen=True, slots=True, eq=False)
class WatchedRequest:
    """Reports the events of one request. `arrived` is in seconds."""

    watching: Watching
    request_id: str
    session_id: str
    tenant: str
    arrived: float

    def begun(self, num_prompt_tokens: int, num_known_tokens: int = 0) -> None:
        """`num_known_tokens`: of the output of a resumed request."""
        begun = SessionEvent.Begun(num_prompt_tokens=num_prompt_tokens, num_known_tokens=num_known_tokens)
        self.watching.running[self] = self._event(begun=begun)
        self._put(begun=begun)

    def sent(self, verifier: str, epoch: int) -> None:
        self._put(sent=SessionEvent.Sent(verifier=verifier, epoch=epoch))

    def round(self, offset: int, accepted: Sequence[bool]) -> None:
        if self.watching.watchers:
            num_accepted = sum(accepted)
            self._put(round=SessionEvent.Round(offset=offset, num_tokens=len(accepted), num_accepted=num_accepted))

    def ended(self, reason: FinishReason | None, error: str, num_tokens: int) -> None:
        """reason: None for a request that failed or whose client disconnected."""
        if self.watching.running.pop(self, None) is not None:
            ended = SessionEvent.Ended(error=error, num_tokens=num_tokens)
            if reason is not None:
                ended.reason = REASONS[reason]
            self._put(ended=ended)

    def _put(self, **event: object) -> None:
        for watcher in self.watching.watchers:
            if watcher.wants(self):
                watcher.put(self._event(**event))

    def _event(self, **event: object) -> SessionEvent:
        ids = {"request_id": self.request_id, "session_id": self.session_id, "tenant": self.tenant}
        return SessionEvent(**ids, elapsed_s=self.watching.now() - self.arrived, **event)  # type: ignore[arg-type]
