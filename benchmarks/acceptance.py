"""`rootward bench acceptance`: how many tokens a round yields, for any pair, any prompts, every construction and rule.

python -m benchmarks.acceptance --out report
python -m benchmarks.acceptance --noise 1.0 --out report-noisy
python -m benchmarks.acceptance --target tabular:vocab=50,seed=1 --draft tabular:vocab=50,seed=1,noise=1 --quick
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rootward.errors import ConfigurationError
from rootward.settings import ask_for_huge_pages

if TYPE_CHECKING:
    from benchmarks.measuring import Part
    from benchmarks.options import Options
    from benchmarks.reporting import Results


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code. What is wrong is told in one line on stderr."""
    from benchmarks.options import parsed

    ask_for_huge_pages()
    try:
        options = parsed(sys.argv[1:] if argv is None else argv)
        _writable(options.out)
        write(run(options), options.out)
    except ConfigurationError as wrong:
        print(str(wrong).splitlines()[0], file=sys.stderr)
        return wrong.exit_code
    except SystemExit as done:  # --help
        return int(done.code or 0)
    return 0


def run(options: Options) -> Results:
    """Measure; a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from benchmarks import measuring, workers

    start_s = time.monotonic()
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("loading", total=measuring.num_steps(options))
        described, parts = workers.run(options, lambda name: progress.update(bar, advance=1, description=name))
    return collected(options, described, parts, round(time.monotonic() - start_s, 1))


def collected(options: Options, described: dict[str, Any], parts: Sequence[Part], seconds: float) -> Results:
    """The parts of each temperature put together."""
    from benchmarks.reporting import Results, merged_cells, merged_levels

    cells, level_cells = [], []
    for _, group in groupby(parts, key=lambda part: part.task.temperature):
        same = list(group)
        cells += merged_cells([part.cells for part in same])
        level_cells += merged_levels([part.level_cells for part in same])
    return Results({**_metadata(options), **described, "seconds": seconds}, cells, level_cells)


def write(results: Results, out: Path) -> None:
    """acceptance.json, acceptance.md and the plots."""
    from benchmarks import plots, tables

    try:
        drawn = plots.draw(results, out)
    except ImportError:
        print("no plots: matplotlib is missing; install rootward[dev]", file=sys.stderr)
        drawn = []
    (out / "acceptance.json").write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")
    (out / "acceptance.md").write_text(tables.report(results, drawn), encoding="utf-8")
    print(f"{out / 'acceptance.md'}: {len(results.cells)} cells in {results.metadata['seconds']:g} s")


def as_json(results: Results) -> dict[str, Any]:
    """The report as one object."""
    return {
        "format": "rootward-acceptance/1",
        "metadata": results.metadata,
        "cells": [cell.as_json() for cell in results.cells],
        "levels": [cell.as_json() for cell in results.level_cells],
    }


def _writable(out: Path) -> None:
    """Before anything is measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise ConfigurationError(f"--out: {str(out)!r} cannot be made: {wrong.strerror}; name a folder") from wrong


def _metadata(options: Options) -> dict[str, Any]:
    from benchmarks.grid import NUM_VERDICTS
    from benchmarks.results import described

    return {
        **described(),
        "noise": options.noise,
        "greedy_draft_temperature": options.greedy_draft_temperature,
        "temperatures": list(options.temperatures),
        "budgets": list(options.budgets),
        "rules": list(options.rules),
        "num_contexts": options.num_contexts,
        "num_atoms": options.num_atoms,
        "verdicts_per_tree": NUM_VERDICTS,
        "seed": options.seed,
        "quick": options.quick,
    }


if __name__ == "__main__":
    sys.exit(main())
