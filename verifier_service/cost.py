"""What a step costs by its rows, and beside it while trees are in use: measured at start and learned from every step since.

    log seconds of a step = speed of the machine + cost of its size + burden of trees + noise

What else runs on a machine changes its speed by half within seconds; what a size costs beside another one hardly changes. So two sizes are
compared by steps close in time, and one that comes rarely by its neighbours: a Kalman filter (`belief.py`) does that, since it knows how
soon it doubts each of the terms. Burden: a drafter may share the machine, and verdicts on trees take time of their own.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from rootward.ports import LanguageModel, Rows
from verifier_service.belief import Belief
from verifier_service.growth_cost import GrowthCost

NOISE = 0.07  # standard deviations, of logarithms: of one step
SPEED = (1.0, 0.05)  # of the machine's speed: doubt at first, drift from step to step
JUMPS = (0.4, 0.05, 0.1)  # of the speed, of a size and of what trees cost, where a step is a surprise
BETWEEN = (0.1, 0.002)  # of a size between others that are known
BEYOND = (0.2, 0.002)  # of one beyond them, where a line through the last two leads
UNKNOWN = (1.0, 0.002)  # where there is no line yet, or a flat one
MOST = 0.2  # of a size that has not been seen for long
SAME = 0.01  # of what is known of two sizes by more rows not being cheaper
BURDEN = (0.2, 0.01)  # of what trees cost beside a plain step
FIRST = 5  # steps with trees from which that is learned at first
FASTEST = 1e-9  # seconds of a step, at least: clocks have steps of their own
WARM = 3  # plain steps after which the speed of the machine is known
SIZES = (1, 2, 4, 6, 8, 12, 16, 32, 64)  # rows of what is measured at start: kernels work in blocks, often of six rows
WARM_UP = 2  # times that all of them are tried: with recorded steps the second one records
LEAST_REPEATS, REPEATS = 3, 25  # and measured, in turn: as often as fits into
MEASURE_S = 0.5


class StepCost:
    """Seconds of a step by its rows: straight lines between sizes half an octave apart, never falling."""

    def __init__(self) -> None:
        self._belief = Belief()
        self._speed = self._belief.add({}, *SPEED)
        self._sizes: list[int] = []  # that were met, rounded; ascending
        self._terms: list[int] = []  # of each in the belief; others are compared with the first one that was met
        self._burdens: dict[str, int] = {}  # of each kind of trees in the belief
        self._met: dict[str, list[float]] = {}  # burdens of the first steps of each kind
        self._seconds: list[float] = []  # by size: of this one and all smaller ones, for a larger step is not cheaper
        self._last: list[int] = []  # what the step before consisted of
        self.num_live = 0  # plain steps of sessions, after what was measured at start
        self.unseen = 0  # steps since the last plain one
        self.look_until = 0  # all rounds that begin are plain until there are so many

    def add(self, rows: int, seconds: float, trees: str = "") -> None:
        """A step of so many rows (at least 1) took so long. trees: a name for what trees are in use, in this step or not; "": none."""
        belief, value, first = self._belief, math.log(max(seconds, FASTEST)), not self.known
        belief.pass_on()
        size = self._size(rows)
        if first:
            belief.mean[self._speed] = value  # nothing was known
        if trees and trees not in self._burdens and self.warm:
            self._meet(trees, value - float(belief.mean[self._speed] + belief.mean[size]))
        else:
            self._observe(size, self._burdens.get(trees), value)
        means = (float(belief.mean[self._speed] + belief.mean[term]) for term in self._terms)
        self._seconds = list(accumulate((math.exp(min(mean, 50.0)) for mean in means), max))
        if trees:
            self.unseen += 1
        else:
            self.num_live += 1
            self.unseen = self.look_until = 0

    def _observe(self, size: int, burden: int | None, value: float) -> None:
        """Where a step is a surprise the machine has changed its speed; or, if the step before was of another kind, it was the kind."""
        terms = [self._speed, size, *([] if burden is None else [burden])]
        changed = [term for term in terms if term == self._speed or term not in self._last]
        jumps = {term: jump for term, jump in zip(terms, JUMPS, strict=False) if term in changed}
        self._belief.observe(dict.fromkeys(terms, 1.0), value, NOISE, jumps)
        self._never_fall(self._terms.index(size))
        self._last = terms

    def at_work(self) -> None:
        """From now on steps are those of sessions: how fast the machine is then is to be seen."""
        self._belief.forget(self._speed)
        self.num_live = self.unseen = self.look_until = 0

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    @property
    def warm(self) -> bool:
        """How fast the machine is at work has been seen."""
        return self.num_live >= WARM

    def doubt(self, trees: str) -> float:
        """Standard deviation of the logarithm of what these trees make of a step; a plain step among theirs would tell. 0: hardly seen."""
        burden = self._burdens.get(trees)
        return float(self._belief.covariance[burden, burden]) ** 0.5 if burden is not None else 0.0

    def seconds(self, rows: int, trees: str = "") -> float:
        """Expected seconds of a step; 0 while nothing is known."""
        if not self.known:
            return 0.0
        burden, met = self._burdens.get(trees), self._met.get(trees)
        if burden is not None:
            return self._line(rows) * math.exp(self._belief.mean[burden])
        return self._line(rows) * (math.exp(median(met)) if met else 1.0)

    def _never_fall(self, at: int) -> None:
        """What has been learned of a size must not make it cheaper than a smaller one: they cost the same, then."""
        means, size = self._belief.mean, self._terms[at]
        for others, sign in ((self._terms[:at], 1.0), (self._terms[at + 1 :], -1.0)):
            worst = max(others, key=lambda term: sign * means[term], default=size)
            if sign * (means[worst] - means[size]) > SAME:
                self._belief.observe({size: 1.0, worst: -1.0}, 0.0, SAME)

    def _line(self, rows: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        at = bisect_left(sizes, rows)
        if at == 0 or len(sizes) == 1:
            return seconds[0]
        at = min(at, len(sizes) - 1)  # beyond the largest the last line goes on
        left, right = sizes[at - 1], sizes[at]
        low, high = seconds[at - 1], seconds[at]
        return low + (high - low) * (rows - left) / (right - left)

    def _size(self, rows: int) -> int:
        """The term of steps of so many rows."""
        size = round(2.0 ** (round(2.0 * math.log2(rows)) / 2.0))
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes) or self._sizes[at] != size:
            self._terms.insert(at, self._new_size(at, size))
            self._sizes.insert(at, size)
        return self._terms[at]

    def _new_size(self, at: int, size: int) -> int:
        sizes, terms = self._sizes, self._terms
        if not sizes:
            return self._belief.add({}, 0.0, 0.0)
        if at in (0, len(sizes)):
            more = math.log(self._line(size) / self._line(sizes[-1])) if at and len(sizes) > 1 else 0.0
            return self._belief.add(
                {terms[0 if at == 0 else -1]: 1.0}, *(BEYOND if more else UNKNOWN), more=more, most=MOST
            )
        share = math.log(size / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
        return self._belief.add({terms[at - 1]: 1.0 - share, terms[at]: share}, *BETWEEN)

    def _meet(self, trees: str, burden: float) -> None:
        """One of the first steps with these trees, plain ones just before it. Their median counts: nothing is known that a single one which
        was held up could be held against, and what it says would stay."""
        met = self._met.setdefault(trees, [])
        met.append(burden)
        if len(met) == FIRST:
            self._burdens[trees] = self._belief.add({}, *BURDEN)
            self._belief.mean[self._burdens[trees]] = median(met)


@dataclass(slots=True)
class Machine:
    """What is shared by all sessions. steps: their cost, shared by all kinds of trees; trees: the name of this kind; growth: how long the
    engine stands idle for a tree of this kind."""

    steps: StepCost = field(default_factory=StepCost)
    trees: str = "drafted"
    growth: GrowthCost = field(default_factory=GrowthCost)

    def plain_s(self, rows: int) -> float:
        """Expected seconds of a step while nobody uses trees."""
        return self.steps.seconds(rows)

    def step_s(self, rows: int) -> float:
        """Expected seconds of a step with trees."""
        return self.steps.seconds(rows, self.trees)

    def stepped(self, rows: int, seconds: float, *, trees: bool) -> None:
        """A step is over. trees: somebody uses them, in this step or not."""
        self.steps.add(rows, seconds, self.trees if trees and self.steps.known else "")


def measure(
    model: LanguageModel, sizes: Sequence[int] = SIZES, clock: Callable[[], float] = time.perf_counter
) -> StepCost:
    """The cost of steps of these sizes, on a slot of the idle model. All of them in turn: the machine may change its speed meanwhile."""
    cost, slot = StepCost(), model.open()
    most = model.info.max_positions if model.info.supports_trees else 1

    def seconds(rows: int) -> float:
        start_s = clock()
        logits = model.forward([Rows.chain(slot, 0, [0] * rows)])
        float(logits.reshape(-1)[0])  # a device works on after the call returns
        taken_s = clock() - start_s
        model.release(slot)
        return taken_s

    try:
        once_s = 0.0
        for turn in range(WARM_UP + REPEATS):
            if turn >= WARM_UP + LEAST_REPEATS and turn * once_s > MEASURE_S:
                break
            steps = [(rows, seconds(rows)) for rows in sizes if rows <= most]
            once_s = sum(taken_s for _, taken_s in steps)
            for rows, taken_s in steps if turn >= WARM_UP else ():
                cost.add(rows, taken_s)
    finally:
        model.close(slot)
    cost.at_work()
    return cost
