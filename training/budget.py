"""How long a phase may train, in wall-clock minutes or in steps, and the learning rate that follows from it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

WARMUP = 0.02
DECAY_FROM = 0.4


class Budget:
    """Progress from 0 to 1 of one phase, by whichever of time and steps runs out first.

    With minutes a slow machine takes fewer steps through the same schedule; with steps a run can be repeated.
    """

    def __init__(
        self, minutes: float, steps: int | None = None, *, seconds_done: float = 0.0, steps_done: int = 0
    ) -> None:
        self._seconds = minutes * 60
        self._steps = steps
        self._start = time.monotonic() - seconds_done
        self.steps_done = steps_done

    def elapsed_s(self) -> float:
        """Seconds spent, pauses left out."""
        return time.monotonic() - self._start

    def progress(self) -> float:
        """The fraction used up."""
        by_time = self.elapsed_s() / self._seconds
        return max(by_time, self.steps_done / self._steps) if self._steps else by_time

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent in this block does not count."""
        began = time.monotonic()
        yield
        self._start += time.monotonic() - began


def learning_rate(peak: float, progress: float) -> float:
    """Warm up, hold, then fall linearly to 1 % of the peak: the early checkpoint still learns at full rate."""
    if progress < WARMUP:
        return peak * (progress + 1e-3) / (WARMUP + 1e-3)
    left = (1 - min(progress, 1.0)) / (1 - DECAY_FROM)
    return peak * max(0.01, min(1.0, left))
