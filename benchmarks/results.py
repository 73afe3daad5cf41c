"""The head of a dated result (hardware, commit, versions; nothing that identifies one machine), and intervals of medians."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from math import comb
from os import cpu_count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

PACKAGES = ("rootward", "numpy", "torch", "transformers")


def described() -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "hardware": f"{cpu_model()}, {cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def cpu_model() -> str:
    """The processor's own name of its model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit of the checkout this runs from; "" outside of one."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
