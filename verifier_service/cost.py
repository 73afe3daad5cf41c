"""What a step costs by its rows, measured at start and learned from every step since."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rootward.ports import LanguageModel, Rows

DRIFT = (
    0.05  # weight of a plain step in how fast the machine is: sizes that are not met keep their ratio to those that are
)
OWN = 0.05  # and in what its own size costs
SPEED = 0.1  # weight of a step with a tree in how fast the machine is
SHARE = 0.02  # and in what it costs beside a plain one
MEMORY = 0.1  # weight of a tree in what growth costs
JUMP = 1.5  # a step with a tree says of the machine at most that it has become so much slower
DOUBT = 1.15  # what plain steps cost may have moved by so much before one is wanted to prove it
WARM = 3  # plain steps after which the speed of the machine is known
LARGEST = 8.0  # factor by which steps with trees may be slower
OUTLIER = 2.0  # a step that took longer than so many times the expected counts as one that took so long
SIZES = (1, 2, 4, 6, 8, 12, 16, 32, 64)  # rows of what is measured at start: kernels work in blocks, often of six rows
REPEATS = 5  # of each; the fastest counts: the first one warms up, and the machine may be busy with other things


class StepCost:
    """Seconds of a step by its rows: straight lines between sizes half an octave apart, never falling.

    A step says much about its own size and something about all of them. While only small ones are made, what large ones cost in
    comparison is remembered. Sizes never met follow their neighbours; with a single size known, all cost the same.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []  # sizes that were met, rounded; ascending
        self._seconds: list[float] = []
        self._steps: list[int] = []
        self._highest: list[float] = []  # of this size and all smaller ones: a larger step is not cheaper
        self.num_live = 0  # plain steps of sessions, after what was measured at start
        self._moved = 1.0  # how far steps with trees have moved these costs since the last of them
        self._beside: set[Busy] = set()  # whose steps those were

    def add(self, rows: int, seconds: float) -> None:
        """A step of so many rows (at least 1) took so long."""
        if self.known:
            seconds = min(seconds, OUTLIER * self.seconds(rows))
        size = round(2.0 ** (round(2.0 * math.log2(rows)) / 2.0))
        at = bisect_left(self._rows, size)
        if at == len(self._rows) or self._rows[at] != size:
            self._rows.insert(at, size)
            self._seconds.insert(at, seconds)
            self._steps.insert(at, 1)
            self._highest = list(accumulate(self._seconds, max))
            return
        error = seconds / max(self.seconds(rows), 1e-12) - 1.0
        self._steps[at] += 1
        self._seconds = [s * (1.0 + DRIFT * error) for s in self._seconds]
        self._seconds[at] *= 1.0 + max(OWN, 1.0 / self._steps[at]) * error
        self._highest = list(accumulate(self._seconds, max))

    def live(self, rows: int, seconds: float) -> None:
        """A plain step of sessions. The first ones tell how fast the machine is at work: what was measured at start was measured on an
        idle one. Later ones tell whether steps with trees have become slower because of it; if not, it was the trees."""
        if before_s := self.seconds(rows):
            ratio = min(seconds / before_s, OUTLIER)
            low, high = sorted((1.0, 1.0 / self._moved))
            self._scale(min(high, max(low, ratio)) if self.warm else 1.0 + (ratio - 1.0) / (self.num_live + 1))
        self.add(rows, seconds)
        if before_s:
            for busy in self._beside:  # what their steps cost is known from themselves
                busy.scale(before_s / self.seconds(rows))
        self.num_live, self._moved = self.num_live + 1, 1.0
        self._beside.clear()

    def beside(self, busy: Busy, factor: float) -> None:
        """A step with a tree says that everything costs so many times as much."""
        self._scale(factor)
        self._moved *= factor
        self._beside.add(busy)

    @property
    def unsure(self) -> bool:
        """Steps with trees have become slower or faster, and no plain one has been seen since: it would tell why."""
        return not 1.0 / DOUBT < self._moved < DOUBT

    def _scale(self, factor: float) -> None:
        self._seconds = [s * factor for s in self._seconds]
        self._highest = [s * factor for s in self._highest]

    def at_most(self, rows: int, seconds: float) -> None:
        """Something dearer of so many rows took so long: these and fewer rows cost no more, whatever was measured."""
        pairs = zip(self._rows, self._seconds, strict=True)
        self._seconds = [s if size > rows or s < seconds else (s + seconds) / 2 for size, s in pairs]
        self._highest = list(accumulate(self._seconds, max))

    @property
    def known(self) -> bool:
        return bool(self._rows)

    @property
    def warm(self) -> bool:
        """How fast the machine is at work has been seen."""
        return self.num_live >= WARM

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step; 0 while nothing is known."""
        if not self.known:
            return 0.0
        at = bisect_left(self._rows, rows)
        if at == 0 or len(self._rows) == 1:
            return self._highest[0]
        at = min(at, len(self._rows) - 1)  # beyond the largest the last line goes on
        left, right = self._rows[at - 1], self._rows[at]
        low, high = self._highest[at - 1], self._highest[at]
        return low + (high - low) * (rows - left) / (right - left)


class Busy:
    """How much slower steps with trees are than steps of as many rows while no drafter works: by rows, the nearest that are known. A
    drafter may share the machine, and verdicts on trees take time of their own."""

    def __init__(self) -> None:
        self._factor: dict[int, float] = {}  # by the binary logarithm of the rows
        self._steps: dict[int, int] = {}

    def add(self, rows: int, factor: float) -> None:
        """Of a step of so many rows."""
        size = rows.bit_length()
        old = self._factor.get(size, factor)
        self._steps[size] = self._steps.get(size, 0) + 1
        self._factor[size] = _bounded(old + max(SHARE, 1.0 / self._steps[size]) * (factor - old))

    def scale(self, factor: float) -> None:
        """All of them are so many times as slow."""
        self._factor = {size: _bounded(known * factor) for size, known in self._factor.items()}

    def knows(self, rows: int) -> bool:
        return rows.bit_length() in self._factor

    def factor(self, rows: int) -> float:
        size = rows.bit_length()
        return self._factor[min(self._factor, key=lambda known: abs(known - size))] if self._factor else 1.0


def _bounded(factor: float) -> float:
    return min(LARGEST, max(1.0, factor))


@dataclass(slots=True)
class Machine:
    """What is shared by all sessions. plain: cost of steps while nobody uses trees; growth_s: how long the engine stands idle for a node of
    a tree, on average.

    Machines change their speed, by what else runs on them; what a tree costs beside a plain step changes less. So a step with a tree that
    is slower than others were is taken to say that plain ones are slower as well; and a plain step among them, what the trees' share is.
    """

    plain: StepCost = field(default_factory=StepCost)
    busy: Busy = field(default_factory=Busy)
    growth_s: float = 0.0
    num_grown: int = 0

    def step_s(self, rows: int) -> float:
        """Expected seconds of a step with trees."""
        return self.plain.seconds(rows) * self.busy.factor(rows)

    def stepped(self, rows: int, seconds: float, *, trees: bool) -> None:
        """A step is over. trees: somebody uses them, in this step or not."""
        if not (trees and self.plain.known):
            self.plain.live(rows, seconds)
            return
        if self.busy.knows(rows):
            ratio = min(seconds / self.step_s(rows), OUTLIER)
            seconds = ratio * self.step_s(rows)
            self.plain.beside(self.busy, 1.0 + SPEED * (min(ratio, JUMP) - 1.0))
        self.busy.add(rows, seconds / self.plain.seconds(rows))
        self.plain.at_most(rows, seconds)

    def grew(self, idle_s: float, nodes: float) -> None:
        """The engine stood idle for so long until a tree of `nodes` nodes was there."""
        self.num_grown += 1
        self.growth_s += max(MEMORY, 1.0 / self.num_grown) * (idle_s / nodes - self.growth_s)


def measure(
    model: LanguageModel, sizes: Sequence[int] = SIZES, clock: Callable[[], float] = time.perf_counter
) -> StepCost:
    """The cost of steps of these sizes, on a slot of the idle model."""
    cost, slot = StepCost(), model.open()
    token = [0]
    try:
        most = model.info.max_positions if model.info.supports_trees else 1
        for rows in (n for n in sizes if n <= most):
            seconds = []
            for _ in range(REPEATS):
                start_s = clock()
                logits = model.forward([Rows.chain(slot, 0, token * rows)])
                float(logits.reshape(-1)[0])  # a device works on after the call returns
                seconds.append(clock() - start_s)
                model.release(slot)
            cost.add(rows, min(seconds))
    finally:
        model.close(slot)
    return cost
