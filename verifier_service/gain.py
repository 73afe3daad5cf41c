"""Does speculation pay, and with how many nodes? Learned from the rounds themselves: tokens per second with trees against plain decoding.

Looks at past rounds and clocks only, never at a tree that has arrived: for such reasons a plain round is always allowed, and so is a cap
that is fixed when the round begins.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from verifier_service.cost import StepCost

MEMORY = 0.1  # weight of the newest round
LEAST_WEIGHT = 0.01  # of the newest round in what a node is worth: late nodes are accepted rarely
TRIAL = 5  # tree rounds before an opinion
PLAIN_FIRST = 2  # plain rounds before anything can be compared; trees are being grown meanwhile
PLAIN_EVERY = 100  # one round in so many is plain, so that the comparison stays current
WHOLE_EVERY = 16  # one round in so many verifies all it may, so that what late nodes are worth stays current
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096  # plain steps until the next trial


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


class Worth:
    """What the nodes of a tree are worth: how often the one drawn as number 1, 2, … lay on the accepted path.

    A cut to n nodes would have kept the accepted ones among the first n: so one round tells about every smaller cap as well.
    """

    def __init__(self) -> None:
        self._hits: list[float] = []
        self._rounds: list[int] = []

    def add(self, cap: int, path: Iterable[int]) -> None:
        """A round of at most `cap` nodes accepted those numbered `path`."""
        self._hits += [0.0] * (cap - len(self._hits))
        self._rounds += [0] * (cap - len(self._rounds))
        accepted = set(path)
        for i in range(cap):
            weight = max(LEAST_WEIGHT, 1.0 / (self._rounds[i] + 1))
            self._hits[i] += weight * ((i + 1 in accepted) - self._hits[i])
            self._rounds[i] += 1

    def best(self, most: int, load: int, cost: StepCost) -> int:
        """Nodes, 0 to `most`, that give the most tokens per second when `load` sessions alike share a step.

        Nodes that were never tried are worth trying: with any of them among `most`, that many.
        """
        if len(self._hits) < most or not cost.known:
            return most
        tokens, best, record = 1.0, 0, 1.0 / cost.seconds(load)
        for n in range(1, most + 1):
            tokens += self._hits[n - 1]
            rate = tokens / cost.seconds(load * (n + 1))
            if rate >= record:
                best, record = n, rate
        return best


class Gain:
    """The opinion of sessions of one kind. `plain` is shared by all: what plain decoding yields on this machine under this load."""

    def __init__(self, plain: Pace, cost: StepCost | None = None) -> None:
        self.plain, self.tree = plain, Pace(tokens=2.5)
        self.worth, self._cost = Worth(), cost or StepCost()
        self._rounds = 0
        self._pause = 0.0  # plain steps left until the next trial
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

    def nodes(self, most: int, load: int) -> int:
        """Cap of a round that begins now: at most `most` nodes, while `load` sessions share a step. 0: decode plainly."""
        if most < 1 or not self.pays:
            return 0
        if self.tree.rounds < TRIAL or self._rounds % WHOLE_EVERY == 0:
            return most
        return self.worth.best(most, load, self._cost)

    def add(
        self, tokens: int, seconds: float, *, with_tree: bool, cap: int = 0, path: Iterable[int] = (), load: int = 1
    ) -> None:
        """A round was committed, `seconds` after the one before. Waiting for a tree in vain is a cost of trees, not of plain decoding.

        cap, path: the most nodes it might have had; the numbers, in draw order from 1, of those that were accepted.
        load: sessions that share a step, so that many sessions do not count their way through a pause in no time."""
        self._rounds += 1
        if not with_tree:
            self.plain.add(tokens, seconds)
            if self._pause > 0:
                self._pause -= 1.0 / max(load, 1)
                if self._pause <= 0:
                    self.tree = Pace(tokens=self.tree.tokens)
            return
        self.worth.add(cap, path)
        self.tree.add(tokens, seconds)
        if self.tree.rounds < TRIAL or self.paused:  # many sessions may lose in one step: that is one trial
            return
        if self.speedup < 1.0:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
        else:
            self._next_pause = FIRST_PAUSE


class Gains:
    """The opinions of all kinds of sessions. Those alike share what they learn, so that a short request pays for no trial of its own."""

    def __init__(self, cost: StepCost | None = None) -> None:
        self.plain, self.cost = Pace(), cost or StepCost()
        self._kinds: dict[Hashable, Gain] = {}

    def of(self, kind: Hashable) -> Gain:
        return self._kinds.setdefault(kind, Gain(self.plain, self.cost))

    @property
    def speedup(self) -> float:
        """Measured speed with trees over plain decoding, mean over the kinds of sessions that have tried both."""
        known = [gain.speedup for gain in self._kinds.values() if gain.tree.rounds]
        return sum(known) / len(known) if known else 1.0
