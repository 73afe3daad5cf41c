"""One verifier's stream at the drafter: what waits to be sent, and when to stop listening.

Growth of one base joins while it waits, so a slow link finds one frame per slot. A verifier that does not take its frames is not heard
either: nothing more is read from it until it does, so neither its commits nor our answers pile up, and the pressure reaches its own outbox.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rootward.core.frames import FromDrafter, Grow, HelloAck, Load, NeedSync, Reject, joined

MOST_UNHEARD = 64  # frames read and not applied yet: one turn of growth takes them all
MOST_UNSENT = 4  # answers that wait, per tree that may be open


@dataclass(slots=True, eq=False)
class Stream:
    """`capacity`: trees it may have open."""

    number: int
    capacity: int
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # something was taken: listening may go on
    ack: HelloAck | None = None
    load: Load | None = None
    greeted: bool = False  # the handshake is the first frame
    unheard: int = 0
    ended: bool = False
    grows: list[Grow] = field(default_factory=list)
    need_syncs: dict[int, NeedSync] = field(default_factory=dict)
    rejects: dict[int, Reject] = field(default_factory=dict)
    _newest: dict[int, int] = field(default_factory=dict)  # slot -> where its last growth waits

    @property
    def full(self) -> bool:
        unsent = len(self.grows) + len(self.need_syncs) + len(self.rejects)
        return self.unheard >= MOST_UNHEARD or unsent >= MOST_UNSENT * (self.capacity + 1)

    def put(self, message: Grow | NeedSync | Reject) -> None:
        """Something to be sent."""
        if isinstance(message, Grow):
            self._grow(message)
        elif isinstance(message, NeedSync):
            self.need_syncs[message.slot] = message
        else:
            self.rejects[message.slot] = message
        self.ready.set()

    def take(self) -> FromDrafter | None:
        """Everything that waits, as one frame; None if nothing does."""
        self.ready.clear()
        if not (self.ack or self.grows or self.need_syncs or self.rejects or self.load):
            return None
        answers = tuple(self.need_syncs.values()), tuple(self.rejects.values())
        frame = FromDrafter(self.ack, tuple(self.grows), *answers, self.load)
        self.ack = self.load = None
        self.grows, self.need_syncs, self.rejects, self._newest = [], {}, {}, {}
        self.moved.set()
        return frame

    async def room(self) -> None:
        """Return when more may be read."""
        while self.full:
            self.moved.clear()
            await self.moved.wait()

    def heard(self) -> None:
        """A turn of growth has taken a frame."""
        self.unheard -= 1
        self.moved.set()

    def _grow(self, grow: Grow) -> None:
        at = self._newest.get(grow.slot)
        whole = joined(self.grows[at], grow) if at is not None else None
        if at is not None and whole is not None:
            self.grows[at] = whole
        else:
            self._newest[grow.slot] = len(self.grows)
            self.grows.append(grow)
