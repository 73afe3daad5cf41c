"""What a step costs by its rows, measured at start and learned from every step since."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rootward.ports import LanguageModel, Rows

MEMORY = 0.98  # what the past weighs after one more step
OUTLIER = 4.0  # a step that took longer than so many times the expected counts as one that took so long
REPEATS = 3  # of each size at start; the first is warm-up


class StepCost:
    """Seconds of a step as a straight line over its rows: least squares with a fading memory, never falling.

    A line is all that is asked of it: how much more dear n rows are than one. While all steps had the same size it is flat.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # fading sums

    def add(self, rows: int, seconds: float) -> None:
        if self.known:
            seconds = min(seconds, OUTLIER * self.seconds(rows))
        now = (1.0, rows, seconds, rows * rows, rows * seconds)
        old = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (MEMORY * o + n for o, n in zip(old, now, strict=True))

    @property
    def known(self) -> bool:
        return self._y > 0.0

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step; 0 while nothing is known."""
        if not self.known:
            return 0.0
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        slope = max(0.0, self._xy / self._weight - x * y) / spread if spread > 1e-9 * (1.0 + x * x) else 0.0
        slope = min(slope, y / x)  # the line must not start below zero
        return y + slope * (rows - x)


def measure(
    model: LanguageModel, sizes: Sequence[int] = (1, 8, 32), clock: Callable[[], float] = time.perf_counter
) -> StepCost:
    """The cost of steps of these sizes, on a slot of the idle model."""
    cost, slot = StepCost(), model.open()
    token = [0]
    try:
        most = model.info.max_positions if model.info.supports_trees else 1
        for rows in (n for n in sizes if n <= most):
            for repeat in range(REPEATS):
                start_s = clock()
                model.forward([Rows.chain(slot, 0, token * rows)])
                if repeat:
                    cost.add(rows, clock() - start_s)
                model.release(slot)
    finally:
        model.close(slot)
    return cost
