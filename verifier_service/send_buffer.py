"""Messages to a drafter that wait for its stream: at most one per slot, however slow the drafter is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rootward.core.frames import (
    MAX_FEATURES,
    Close,
    Commit,
    Features,
    Launch,
    Open,
    ToDrafter,
    cumulative,
    joined_features,
    opened_at,
)


class SendBuffer:
    """Opens, commits and closes of one stream. Slots are never reused, so their order among slots does not matter."""

    def __init__(self) -> None:
        self._opens: dict[int, Open] = {}
        self._features: dict[int, Features] = {}  # of the ends of their prefixes
        self._commits: dict[int, Commit] = {}
        self._closes: dict[int, Close] = {}
        self._launches: dict[int, Launch] = {}
        self._flushed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._opens) + len(self._commits) + len(self._closes) + len(self._launches)

    def open(self, message: Open, features: Features | None = None) -> None:
        self._opens[message.slot] = message
        if features is not None:
            self._features[message.slot] = features

    def commit(self, message: Commit) -> None:
        slot = message.slot
        self._launches.pop(slot, None)  # that round is over
        if slot in self._opens:
            self._opens[slot] = opened_at(self._opens[slot], message)
            features = joined_features(self._features.pop(slot, None), message.features, len(message.tokens))
            if features is not None:  # of a whole window and the tokens since: a drafter refuses more than it reads
                self._features[slot] = replace(features, rows=features.rows[-MAX_FEATURES:])
        elif slot in self._commits:
            self._commits[slot] = cumulative(self._commits[slot], message)
        else:
            self._commits[slot] = message

    def launch(self, message: Launch) -> None:
        self._launches[message.slot] = message

    def close(self, slot: int, reason: str) -> None:
        """If its Open was not sent yet, neither is sent."""
        for messages in (self._commits, self._features, self._launches):
            messages.pop(slot, None)
        if self._opens.pop(slot, None) is None:
            self._closes[slot] = Close(slot, reason)

    def clear(self) -> None:
        """Drop all messages: the stream has ended."""
        for messages in (self._opens, self._commits, self._closes, self._features, self._launches):
            messages.clear()
        self._flushed.clear()

    def flush(self) -> bool:
        """Release the collected messages to `take`. True if the drafter must answer one of them."""
        if len(self):
            self._flushed.set()
        return bool(self._opens or self._commits)

    async def take(self) -> ToDrafter:
        """One frame of all messages, once they are flushed."""
        await self._flushed.wait()
        opens, parts = dict(self._opens), []
        for slot, features in self._features.items():
            opens[slot] = replace(opens[slot], num_features=len(features.rows))
            parts += features.chunks(slot, len(opens[slot].prefix))
        frame = ToDrafter(
            opens=tuple(opens.values()),
            commits=tuple(self._commits.values()),
            closes=tuple(self._closes.values()),
            features=tuple(parts),
            launches=tuple(self._launches.values()),
        )
        self.clear()
        return frame
