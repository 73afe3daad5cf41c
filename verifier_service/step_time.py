"""How long an engine step takes by its number of rows: measured at start, corrected by every step."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rootward.ports import LanguageModel, Rows

# Numbers of nodes that are compared. With the root they fill the tiles of matrix kernels, which have 4, 8 or 16 rows: a ninth row may cost
# as much as the four before it.
SIZES = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127, 191, 240)
# Rows whose time is learned: full tiles, and one row more, with which the next one begins
LEARNED = tuple(sorted({size + rows for size in SIZES for rows in (1, 2)}))
MEASURED = tuple(rows for rows in LEARNED if rows <= 64)  # at start
WARM_UP_TURNS, MIN_TURNS, MAX_TURNS = 2, 5, 27  # over these sizes; the first ones are not measured
MEASURE_S = 0.5  # of measuring at start, after which no turn begins
SIZE_MEMORY = 0.1  # weight of the newest step in the time of a size
SPEED_MEMORY = 0.2  # the same in the speed of the machine
SETTLED = 8  # steps after drafters begin or end to grow trees in which the speed changes because of that, not of what else runs
LARGEST_SURPRISE = 1.0  # limit of the error of log seconds: a step that was held up for long counts as e times too slow


@dataclass(slots=True)
class Mean:
    """The mean of `count` values, exponentially weighted once there are many."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, least_weight: float) -> None:
        self.count += 1
        self.value += max(least_weight, 1.0 / self.count) * (value - self.value)


class StepTime:
    """Seconds of an engine step by its number of rows; never falling.

    log seconds of a step = log seconds measured for its size + log of the speed factor. Other load on the machine changes the factor within
    seconds, the ratio between two sizes hardly changes. So a step of the same size as the one before corrects the factor, and a step of
    another size corrects mostly the seconds of that size.

    Steps with trees of drafters have a factor of their own: a drafter on the same machine takes its share of it while it grows them.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        """measured: seconds by number of rows."""
        # Logarithms of seconds, by number of rows; a measurement at start counts for one step.
        self._log = {rows: Mean(math.log(max(seconds, 1e-9)), 1) for rows, seconds in sorted((measured or {}).items())}
        self._speed = {True: Mean(), False: Mean()}  # logarithms, of steps with trees of drafters and of all others
        self._last = 0  # size of the step before
        self._last_drafted = True  # whether that had a drafter's tree
        self._num_alike = 0  # steps like it in a row
        self._rows: list[int] = []
        self._seconds: list[float] = []
        self._fit()

    @property
    def known(self) -> bool:
        return bool(self._log)

    @property
    def speed(self) -> float:
        """The factor of steps with trees of drafters: their time now divided by that measured at start; above 1 if the machine has become
        slower. That of all steps while no drafter grows trees."""
        return math.exp(self._speed[True].value)

    def seconds(self, rows: int, *, drafted: bool = True) -> float:
        """Expected seconds of a step; 0 while nothing is known. Linear between known sizes, and beyond the largest one."""
        at, speed = bisect_left(self._rows, rows), math.exp(self._speed[drafted].value)
        if not at or len(self._rows) == 1:
            return self._seconds[0] * speed if self._rows else 0.0
        at = min(at, len(self._rows) - 1)
        (low, high), (fast, slow) = self._rows[at - 1 : at + 1], self._seconds[at - 1 : at + 1]
        return (fast + (slow - fast) * (rows - low) / (high - low)) * speed

    def add(self, rows: int, seconds: float, *, drafted: bool = True) -> None:
        """Learn the seconds of a step with these rows. drafted: a drafter has grown some of its nodes."""
        size, value = _bucket(rows), math.log(max(seconds, 1e-9))
        speed, other_speed = self._speed[drafted], self._speed[not drafted]
        is_new = size not in self._log
        if is_new:
            expected = math.log(self.seconds(size, drafted=drafted)) - speed.value if self.known else value
            self._log = dict(sorted({**self._log, size: Mean(expected, 1)}.items()))
        known = self._log[size]
        surprise = min(LARGEST_SURPRISE, max(-LARGEST_SURPRISE, value - known.value - speed.value))
        self._num_alike = self._num_alike + 1 if drafted == self._last_drafted else 1
        corrects_size = size != self._last and drafted == self._last_drafted and self._last > 0
        if corrects_size:
            known.add(known.value + surprise, SIZE_MEMORY)
            surprise *= 0.5
        before = speed.value
        speed.add(before + surprise, SPEED_MEMORY)
        if self._num_alike > SETTLED or not other_speed.count:
            other_speed.value += speed.value - before
        self._last, self._last_drafted = size, drafted
        if is_new or corrects_size:
            self._fit()

    def _fit(self) -> None:
        """Isotonic regression: neighbouring sizes of which the larger one seems faster get their common mean."""
        pools: list[tuple[float, int]] = []
        for known in self._log.values():
            pools.append((known.value, 1))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (a, n), (b, m) = pools[-2:]
                pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
        self._rows = list(self._log)
        self._seconds = [math.exp(value) for value, count in pools for _ in range(count)]


def _bucket(rows: int) -> int:
    """The nearest of the numbers of rows whose time is learned: one for every number of nodes of a single session."""
    at = bisect_left(LEARNED, rows)
    if at == len(LEARNED):
        return 1 << round(math.log2(rows))
    return min(LEARNED[max(0, at - 1)], LEARNED[at], key=lambda learned: abs(learned - rows))


def measure(model: LanguageModel, *, clock: Callable[[], float] = time.perf_counter) -> StepTime:
    """Medians over steps of the sizes MEASURED, in turn, on a slot of the idle model: repeated until MEASURE_S has passed."""
    slot = model.open()
    most = model.info.max_positions if model.info.supports_trees else 1
    timings: dict[int, list[float]] = {rows: [] for rows in MEASURED if rows <= most}
    begun_s = clock()
    try:
        for turn in range(MAX_TURNS):
            if turn >= MIN_TURNS and clock() - begun_s > MEASURE_S:
                break
            for rows, seconds in timings.items():
                start_s = clock()
                logits = model.forward([Rows.chain(slot, 0, [0] * rows)])
                float(logits.reshape(-1)[0])  # a device works on after the call returns
                if turn >= WARM_UP_TURNS:
                    seconds.append(clock() - start_s)
                model.release(slot)
    finally:
        model.close(slot)
    return StepTime({rows: sorted(seconds)[len(seconds) // 2] for rows, seconds in timings.items()})
