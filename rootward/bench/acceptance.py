"""`rootward bench acceptance`: how many tokens a round yields, for any pair, any prompts, every construction and rule.

    python -m rootward.bench.acceptance --out report
    python -m rootward.bench.acceptance --noise 1.0 --out report-noisy
    python -m rootward.bench.acceptance --target tabular:vocab=50,seed=1 --draft tabular:vocab=50,seed=1,noise=1 --quick
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rootward.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.progress import Progress

    from rootward.bench.options import Options
    from rootward.bench.results import Results
    from rootward.ports import LanguageModel

LONGEST_PROMPT, LONGEST_CONTINUATION, TREE_DEPTH = 128, 48, 80


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code. What is wrong is told in one line on stderr."""
    from rootward.bench.options import parsed

    try:
        options = parsed(sys.argv[1:] if argv is None else argv)
        results = run(options)
        write(results, options.out)
    except ConfigurationError as wrong:
        print(str(wrong).splitlines()[0], file=sys.stderr)
        return wrong.exit_code
    except SystemExit as done:  # --help
        return int(done.code or 0)
    return 0


def run(options: Options) -> Results:
    """Measure; a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    start_s = time.monotonic()
    target, draft, names = _models(options)
    prompts = _prompts(options, target)
    _check_pair(target, draft)
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        cells, level_cells = _measure(options, target, draft, prompts, progress)
    from rootward.bench.results import Results

    metadata = _metadata(options, target, draft, names, len(prompts))
    metadata["seconds"] = round(time.monotonic() - start_s, 1)
    return Results(metadata, cells, level_cells)


def write(results: Results, out: Path) -> None:
    """acceptance.json, acceptance.md and the plots."""
    from rootward.bench import plots, tables

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise ConfigurationError(f"rootward bench acceptance: --out: {str(out)!r} cannot be made: {wrong.strerror}") from wrong
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


def _measure(
    options: Options, target: LanguageModel, draft: LanguageModel, prompts: list[list[int]], progress: Progress
) -> tuple[list, list]:
    from rootward.bench import grid, levels
    from rootward.bench.constructions import ACCEPTANCES, constructions
    from rootward.bench.contexts import continued
    from rootward.bench.ranked import RankedRows

    known = constructions()
    chosen = [known[name] for name in options.drafting or known]
    wanted = {t: levels.settings(t, ACCEPTANCES) if options.levels and t in (0.0, 1.0) else [] for t in options.temperatures}
    total = len(options.temperatures) * len(chosen) * len(options.budgets) + sum(map(len, wanted.values()))
    task = progress.add_task("contexts", total=total)
    cells: list = []
    level_cells: list = []
    for t in options.temperatures:
        texts = continued(target, prompts, t, options.num_contexts, LONGEST_CONTINUATION, options.seed)

        def done(name: str, t: float = t) -> None:
            progress.update(task, advance=1, description=f"temperature {t:g}: {name}")

        with RankedRows(target, draft, texts, t, num_atoms=options.num_atoms, seed=options.seed) as rows:
            cells += grid.cells(rows, chosen, options.budgets, options.rules, done)
            level_cells += levels.level_cells(rows, wanted[t], options.num_contexts // 2, done)
    return cells, level_cells


def _models(options: Options) -> tuple[LanguageModel, LanguageModel, tuple[str, str]]:
    """(target, draft, their names for the report)."""
    from rootward import demo
    from rootward.bench.noisy import NoisyModel
    from rootward.engine.loading import load_model

    quiet()
    paths = demo.paths()
    target_spec = options.target or str(paths.target)
    draft_spec = target_spec if options.noise is not None else options.draft or str(paths.draft)
    longest = LONGEST_PROMPT + LONGEST_CONTINUATION + TREE_DEPTH
    target, draft = (load_model(spec, max_slots=options.num_contexts, max_len=longest) for spec in (target_spec, draft_spec))
    if options.noise is not None:
        draft = NoisyModel(draft, options.noise, options.seed)
    names = short_name(target_spec), short_name(draft_spec)
    noisy = f"{names[0]} + logit noise {options.noise:g}" if options.noise is not None else names[1]
    return target, draft, (names[0], noisy)


def short_name(spec: str) -> str:
    """A model's name without the place where it lies on this machine."""
    if spec.startswith("tabular:") or not Path(spec).exists():
        return spec
    return "/".join(Path(spec).resolve().parts[-2:])


def quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _prompts(options: Options, target: LanguageModel) -> list[list[int]]:
    from rootward import demo
    from rootward.bench.contexts import random_prompts, read_prompts, tokenised
    from rootward.engine.tokenizers import load_tokenizer

    if options.target.startswith("tabular:"):
        return random_prompts(64, target.info.vocab_size, 8, options.seed)
    texts = read_prompts(options.prompts) if options.prompts else demo.prompts()
    return tokenised(texts, load_tokenizer(options.target or str(demo.paths().target)), LONGEST_PROMPT)


def _check_pair(target: LanguageModel, draft: LanguageModel) -> None:
    a, b = target.info, draft.info
    if a.vocab_size != b.vocab_size and not (a.tokenizer_hash and a.tokenizer_hash == b.tokenizer_hash):
        raise ConfigurationError(
            f"--draft: its vocabulary has {b.vocab_size} tokens, the target's {a.vocab_size}; use a pair with one tokenizer", 3
        )
    if a.tokenizer_hash and b.tokenizer_hash and a.tokenizer_hash != b.tokenizer_hash:
        raise ConfigurationError("--draft: its tokenizer differs from the target's; use a pair with one tokenizer", 3)


def _metadata(
    options: Options, target: LanguageModel, draft: LanguageModel, names: tuple[str, str], num_prompts: int
) -> dict[str, Any]:
    from rootward.bench.environment import described
    from rootward.bench.grid import NUM_VERDICTS

    models = {
        side: {"name": name, "num_parameters": model.info.num_parameters, "fingerprint": model.info.fingerprint}
        for side, name, model in zip(("target", "draft"), names, (target, draft), strict=True)
    }
    return {
        **described(),
        **models,
        "vocab": min(target.info.vocab_size, draft.info.vocab_size),
        "noise": options.noise,
        "temperatures": list(options.temperatures),
        "budgets": list(options.budgets),
        "rules": list(options.rules),
        "num_contexts": options.num_contexts,
        "num_prompts": num_prompts,
        "num_atoms": options.num_atoms,
        "verdicts_per_tree": NUM_VERDICTS,
        "seed": options.seed,
        "quick": options.quick,
    }


if __name__ == "__main__":
    sys.exit(main())
