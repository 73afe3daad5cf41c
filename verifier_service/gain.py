"""Does speculation pay? Learned from the rounds themselves: tokens per second with trees against plain decoding.

Looks at past rounds and clocks only, never at a tree that has arrived: for such reasons a plain round is always allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 0.1  # weight of the newest round
TRIAL = 5  # tree rounds before an opinion
PLAIN_FIRST = 2  # plain rounds before anything can be compared; trees are being grown meanwhile
PLAIN_EVERY = 100  # one round in so many is plain, so that the comparison stays current
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096  # plain rounds until the next trial


@dataclass(slots=True)
class Pace:
    """Tokens and seconds of a round, averaged with a fading memory."""

    tokens: float = 1.0
    seconds: float = 0.0
    rounds: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        weight = max(MEMORY, 1.0 / (self.rounds + 1))
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.rounds += 1

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Gain:
    """The opinion of sessions of one kind. `plain` is shared by all: what plain decoding yields on this machine under this load."""

    def __init__(self, plain: Pace) -> None:
        self.plain, self.tree = plain, Pace(tokens=2.5)
        self._rounds = 0
        self._pause = 0  # plain rounds left until the next trial
        self._next_pause = FIRST_PAUSE

    @property
    def paused(self) -> bool:
        """Trees were tried and lost: until the next trial nothing needs to grow either."""
        return self._pause > 0

    @property
    def pays(self) -> bool:
        """Whether the next round should use a tree."""
        known = self.plain.rounds >= PLAIN_FIRST
        return known and not self.paused and (self._rounds + 1) % PLAIN_EVERY != 0

    @property
    def speedup(self) -> float:
        """Measured tokens per second with trees over plain; 1 while nothing is known."""
        known = self.tree.rounds and self.plain.rounds
        return self.tree.tokens_per_s / self.plain.tokens_per_s if known and self.plain.tokens_per_s else 1.0

    def add(self, tokens: int, seconds: float, *, with_tree: bool) -> None:
        """A round was committed, `seconds` after the one before. Waiting for a tree in vain is a cost of trees, not of plain decoding."""
        self._rounds += 1
        if not with_tree:
            self.plain.add(tokens, seconds)
            if self._pause:
                self._pause -= 1
                if not self._pause:
                    self.tree = Pace(tokens=self.tree.tokens)
            return
        self.tree.add(tokens, seconds)
        if self.tree.rounds < TRIAL:
            return
        if self.speedup < 1.0:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
        else:
            self._next_pause = FIRST_PAUSE
