"""The median of paired repetitions and how sure it is: order statistics, which assume no distribution."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

WANTED_COVERAGE = 0.9


class Interval(NamedTuple):
    """A median and the order statistics around it; coverage: exact for independent repetitions."""

    median: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interval(values: Sequence[float]) -> Interval:
    """Median and the narrowest symmetric order statistics with WANTED_COVERAGE; smallest and largest if none has it."""
    ordered, n = sorted(values), len(values)
    if not n:
        raise ValueError("values: none; measure at least one repetition")

    def coverage(k: int) -> float:  # of [k-th smallest, k-th largest], k from 1
        outside: float = 2 * sum(comb(n, i) for i in range(k)) / 2.0**n
        return max(0.0, 1 - outside)

    k = max((k for k in range(1, (n + 1) // 2 + 1) if coverage(k) >= WANTED_COVERAGE), default=1)
    return Interval(median(ordered), ordered[k - 1], ordered[n - k], coverage(k))
