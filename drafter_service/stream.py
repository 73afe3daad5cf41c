"""Send buffer and flow control of one verifier's stream at the drafter.

Grow messages of one slot and base are joined while they wait, so a slow connection gets one per slot. While a verifier does not take its
answers, nothing more is read from it: memory stays bounded on this side, and messages collect in the verifier's own send buffer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rootward.core.frames import FromDrafter, Grow, HelloAck, Load, NeedSync, Reject, joined

MAX_UNAPPLIED = 64  # frames read and not applied yet; the next level of growth applies all of them
MAX_UNSENT = 4  # answers that wait, per tree that may be open


@dataclass(slots=True, eq=False)
class Stream:
    """capacity: number of trees that the verifier may have open. Used on the event loop only."""

    number: int
    capacity: int
    # There may be something to send, or the stream has ended.
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # a frame was applied or sent: reading may go on
    ack: HelloAck | None = None
    load: Load | None = None
    greeted: bool = False  # the handshake was answered; it is the first frame, and reports of load follow it
    num_unapplied: int = 0  # frames read and not applied yet
    ended: bool = False  # the verifier has closed its side
    grows: list[Grow] = field(default_factory=list)
    need_syncs: dict[int, NeedSync] = field(default_factory=dict)
    rejects: dict[int, Reject] = field(default_factory=dict)
    _newest: dict[int, int] = field(default_factory=dict)  # by slot: index of its last message in `grows`

    @property
    def full(self) -> bool:
        unsent = len(self.grows) + len(self.need_syncs) + len(self.rejects)
        return self.num_unapplied >= MAX_UNAPPLIED or unsent >= MAX_UNSENT * (self.capacity + 1)

    def put(self, message: Grow | NeedSync | Reject) -> None:
        """Queue an answer."""
        if isinstance(message, Grow):
            self._grow(message)
        elif isinstance(message, NeedSync):
            self.need_syncs[message.slot] = message
        else:
            self.rejects[message.slot] = message
        self.ready.set()

    def take(self) -> FromDrafter | None:
        """All waiting answers as one frame, None if there are none."""
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
        """Wait until more frames may be read."""
        while self.full:
            self.moved.clear()
            await self.moved.wait()

    def note_applied(self) -> None:
        """One frame of this stream was applied."""
        self.num_unapplied -= 1
        self.moved.set()

    def _grow(self, grow: Grow) -> None:
        at = self._newest.get(grow.slot)
        whole = joined(self.grows[at], grow) if at is not None else None
        if at is not None and whole is not None:
            self.grows[at] = whole
        else:
            self._newest[grow.slot] = len(self.grows)
            self.grows.append(grow)
