"""What waits for one drafter: at most one message per slot, however slow the link.

The engine posts while it steps and flushes after its commits, and once more what planning the next step adds (trees opened and closed);
the link takes everything that waits as one frame whenever it can write. A link that writes slower than the engine steps finds the commits
of a slot in one, and those of a tree not yet opened in its prefix.
"""

from __future__ import annotations

import asyncio

from rootward.core.frames import Close, Commit, Open, ToDrafter
from rootward.core.merging import cumulative, opened_at


class Outbox:
    """Opens, commits and closes of one stream. Slots are never reused, so their order among slots does not matter."""

    def __init__(self) -> None:
        self._opens: dict[int, Open] = {}
        self._commits: dict[int, Commit] = {}
        self._closes: dict[int, Close] = {}
        self._flushed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._opens) + len(self._commits) + len(self._closes)

    def open(self, message: Open) -> None:
        self._opens[message.slot] = message

    def commit(self, message: Commit) -> None:
        slot = message.slot
        if slot in self._opens:
            self._opens[slot] = opened_at(self._opens[slot], message)
        elif slot in self._commits:
            self._commits[slot] = cumulative(self._commits[slot], message)
        else:
            self._commits[slot] = message

    def close(self, slot: int, reason: str) -> None:
        """A tree that was never asked for leaves no trace."""
        self._commits.pop(slot, None)
        if self._opens.pop(slot, None) is None:
            self._closes[slot] = Close(slot, reason)

    def clear(self) -> None:
        """The stream is gone, and with it whatever was said about its slots."""
        self._opens, self._commits, self._closes = {}, {}, {}
        self._flushed.clear()

    def flush(self) -> bool:
        """Let the link take what has collected. True if the drafter owes an answer to some of it."""
        if len(self):
            self._flushed.set()
        return bool(self._opens or self._commits)

    async def take(self) -> ToDrafter:
        """One frame of everything that waits, once a step has flushed it."""
        await self._flushed.wait()
        frame = ToDrafter(
            opens=tuple(self._opens.values()),
            commits=tuple(self._commits.values()),
            closes=tuple(self._closes.values()),
        )
        self.clear()
        return frame
