"""The models of a run, and one part of it: a temperature and a group of contexts.

Parts do not know of one another, so they may run in any process; numbers depend on the options alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import grid, levels
from benchmarks.constructions import constructions
from benchmarks.contexts import continued, random_prompts, read_prompts, tokenised
from benchmarks.noisy import NoisyModel
from benchmarks.options import Options
from benchmarks.ranked import RankedRows
from benchmarks.reporting import Cell, LevelCell
from rootward import demo
from rootward.engine.loading import load_model
from rootward.engine.tokenizers import load_tokenizer
from rootward.errors import ConfigurationError
from rootward.ports import LanguageModel

LONGEST_PROMPT, LONGEST_CONTINUATION, TREE_DEPTH = 128, 48, 80
LARGEST_GROUP, LEVEL_SHARE = 48, 2  # contexts side by side; one in so many takes part in the sweep over levels


class Task(NamedTuple):
    """One part of a run."""

    temperature: float
    contexts: range


class Part(NamedTuple):
    """What came out of it."""

    task: Task
    cells: list[Cell]
    level_cells: list[LevelCell]


@dataclass(frozen=True)
class Pair:
    """Both models, and the prompts as token ids."""

    target: LanguageModel
    draft: LanguageModel
    names: tuple[str, str]
    prompts: list[list[int]]

    def described(self) -> dict[str, Any]:
        """What a report says about them."""
        sides = zip(("target", "draft"), self.names, (self.target, self.draft), strict=True)
        models: dict[str, Any] = {
            side: {"name": name, "num_parameters": model.info.num_parameters, "fingerprint": model.info.fingerprint}
            for side, name, model in sides
        }
        vocab = min(self.target.info.vocab_size, self.draft.info.vocab_size)
        return {**models, "vocab": vocab, "num_prompts": len(self.prompts)}


def tasks(options: Options) -> list[Task]:
    """Every temperature, its contexts in groups of equal size: at least two."""
    size = min(LARGEST_GROUP, -(-options.num_contexts // 2))
    starts = range(0, options.num_contexts, size)
    groups = [range(start, min(start + size, options.num_contexts)) for start in starts]
    return [Task(t, group) for t in options.temperatures for group in groups]


def num_steps(options: Options) -> int:
    """How often `done` is called over all tasks."""
    num = len(options.drafting or constructions()) * len(options.budgets)
    return sum(num + len(_settings(options, task.temperature)) for task in tasks(options))


def measure(pair: Pair, options: Options, task: Task, done: Callable[[str], None]) -> Part:
    """All cells of one temperature on one group of contexts."""
    known, t = constructions(), task.temperature
    chosen = [known[name] for name in options.drafting or known]
    texts = continued(pair.target, pair.prompts, t, task.contexts, LONGEST_CONTINUATION, options.seed)
    with RankedRows(
        pair.target,
        pair.draft,
        texts,
        t,
        num_atoms=options.num_atoms,
        seed=options.seed,
        first_context=task.contexts.start,
        greedy_draft_temperature=options.greedy_draft_temperature,
    ) as rows:
        cells = list(grid.cells(rows, chosen, options.budgets, options.rules, done))
        few = max(1, len(texts) // LEVEL_SHARE)
        level_cells = list(levels.level_cells(rows, _settings(options, t), few, done))
    return Part(task, cells, level_cells)


def _settings(options: Options, temperature: float) -> list[levels.Setting]:
    return levels.settings(temperature) if options.levels and temperature in (0.0, 1.0) else []


def load_pair(options: Options) -> Pair:
    """ConfigurationError if a model cannot be read or the two do not fit."""
    paths = demo.paths()
    target_spec = options.target or str(paths.target)
    draft_spec = target_spec if options.noise is not None else options.draft or str(paths.draft)
    slots = max(len(task.contexts) for task in tasks(options))
    longest = LONGEST_PROMPT + LONGEST_CONTINUATION + TREE_DEPTH
    _quiet(target_spec)
    target, draft = (load_model(spec, max_slots=slots, max_len=longest) for spec in (target_spec, draft_spec))
    _check(target, draft)
    names = short_name(target_spec), short_name(draft_spec)
    if options.noise is not None:
        draft = NoisyModel(draft, options.noise, options.seed)
        names = names[0], f"{names[0]} + logit noise {options.noise:g}"
    return Pair(target, draft, names, _prompts(options, target_spec, target.info.vocab_size))


def short_name(spec: str) -> str:
    """A model's name without the place where it lies on this machine."""
    if spec.startswith("tabular:") or not Path(spec).exists():
        return spec
    return "/".join(Path(spec).resolve().parts[-2:])


def _quiet(spec: str) -> None:
    if not spec.startswith("tabular:"):
        from transformers.utils import logging

        logging.disable_progress_bar()


def _prompts(options: Options, target_spec: str, vocab: int) -> list[list[int]]:
    if target_spec.startswith("tabular:"):
        return random_prompts(64, vocab, 8, options.seed)
    texts = read_prompts(options.prompts) if options.prompts else demo.prompts()
    return tokenised(texts, load_tokenizer(target_spec), LONGEST_PROMPT)


def _check(target: LanguageModel, draft: LanguageModel) -> None:
    a, b = target.info, draft.info
    differ = (
        a.tokenizer_hash != b.tokenizer_hash if a.tokenizer_hash and b.tokenizer_hash else a.vocab_size != b.vocab_size
    )
    if differ:
        sizes = f"{b.vocab_size} and {a.vocab_size} tokens"
        raise ConfigurationError(
            f"--draft: its tokenizer is not the target's ({sizes}); use a pair with one tokenizer", 3
        )
