"""Results of benchmarks: files with a head (date, hardware, commit, versions; nothing that identifies one machine), tables, statistics."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from math import comb
from os import cpu_count
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from llvmlite.binding import get_host_cpu_name

from rootward.errors import ConfigurationError

if TYPE_CHECKING:
    from rootward.engine.tabular import TabularModel

PACKAGES = ("rootward", "numpy", "torch", "transformers")

# Of /proc/cpuinfo, fastest first
MATRIX_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 bfloat16", "avx512f": "AVX-512", "avx2": "AVX2"}


def described() -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "hardware": f"{cpu_model()}, {cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def cpu_model() -> str:
    """The processor's own name of its model, its microarchitecture, and the instructions that matrix products are made of: virtual
    machines often call very different processors by one name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    first = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    name, flags = first.get("model name", platform.machine()), first.get("flags", "").split()
    instructions = [label for flag, label in MATRIX_INSTRUCTIONS.items() if flag in flags][:1]
    return f"{name} ({', '.join([*instructions, get_host_cpu_name()])})"


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


def save(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report with its head as JSON; folders are made. NaN becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**described(), **report}, indent=1).replace("NaN", "null")
    path.write_text(text + "\n", encoding="utf-8")


def markdown_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def mean_with_error(values: Sequence[float]) -> str:
    """The mean of at least one value, with its standard error where there are several: "1.50 ± 0.06"."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{error}"


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[object]], *, num_text_columns: int = 1) -> str:
    """The columns after the first `num_text_columns` are aligned to the right."""
    rule = "|---" * num_text_columns + "|---:" * (len(header) - num_text_columns) + "|"
    return "\n".join([markdown_row(header), rule, *map(markdown_row, rows)])


INTERRUPTED = 130  # exit code, as of a shell


def command(main: Callable[[Sequence[str]], int | None]) -> Callable[..., int]:
    """A main of arguments as one that returns an exit code; a ConfigurationError is one line on stderr, and Ctrl-C none."""

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(sys.argv[1:] if argv is None else argv) or 0
        except ConfigurationError as error:
            print(str(error).splitlines()[0], file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            return INTERRUPTED

    return run


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


CONTEXT = 3  # tokens: one more than a tabular target looks at by default, which would show a dependence between rounds
LEAST_EXPECTED = 5  # of a cell of a chi-square statistic


def p_value(target: TabularModel, texts: Sequence[Sequence[int]], *, least_freedom: int = 100) -> float:
    """p-value of the hypothesis that every token of the texts, from the fourth on, has the target's distribution given the text before.

    Given that text the next token has this law whatever came before, so the counts that follow each context of three tokens are
    multinomial; all of them together are one chi-square statistic. The rarest tokens of a context count as one cell, so that each cell
    expects LEAST_EXPECTED or more. ValueError: too few tokens for so many degrees of freedom.
    """
    from scipy.stats import chi2

    counts: dict[tuple[int, ...], np.ndarray] = defaultdict(lambda: np.zeros(target.vocab))
    for text in texts:
        for i in range(CONTEXT, len(text)):
            counts[tuple(text[i - CONTEXT : i])][text[i]] += 1
    statistic = 0.0
    freedom = 0
    for context, seen in counts.items():
        expected = target.law(context) * seen.sum()
        rising = np.argsort(expected)
        expected, seen = expected[rising], seen[rising]
        num_rare = max(
            int((expected < LEAST_EXPECTED).sum()), int(np.searchsorted(expected.cumsum(), LEAST_EXPECTED)) + 1
        )
        if num_rare < target.vocab:
            cells = [0, *range(num_rare, target.vocab)]
            expected, seen = np.add.reduceat(expected, cells), np.add.reduceat(seen, cells)
            statistic += float(((seen - expected) ** 2 / expected).sum())
            freedom += len(cells) - 1
    if freedom < least_freedom:
        raise ValueError(f"texts: {freedom} degrees of freedom are fewer than {least_freedom}; give more tokens")
    return float(chi2.sf(statistic, freedom))
