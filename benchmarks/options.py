"""The command line of `rootward bench acceptance`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rootward.errors import ConfigurationError

TEMPERATURES, BUDGETS = (0.0, 0.3, 0.7, 1.0), (4, 8, 16, 32, 64)
NUM_CONTEXTS = 96
QUICK_TEMPERATURES, QUICK_BUDGETS, QUICK_CONTEXTS = (0.0, 1.0), (4, 16), 16
QUICK_DRAFTING = (
    "chain",
    "rsd_c_bushy",
    "rsd_c_narrow",
    "rsd_s_w2",
    "rsd_s_square",
    "iid_copies",
    "best_first_0.7",
    "best_first_0.8",
    "greedy_root3_0.7",
    "top_k_best_first",
    "coupled_0.7",
)
ALL_RULES = ("token", "multi_step", "block", "traversal", "match", "coupled")


@dataclass(frozen=True)
class Options:
    """What to measure. Empty `target` and `draft`: the demo pair. `noise` is None or the draft becomes a noisy target."""

    target: str
    draft: str
    prompts: Path | None
    temperatures: tuple[float, ...]
    budgets: tuple[int, ...]
    rules: tuple[str, ...]
    drafting: tuple[str, ...]  # empty: all
    num_contexts: int
    num_atoms: int
    noise: float | None
    seed: int
    out: Path
    quick: bool
    levels: bool
    processes: int
    greedy_draft_temperature: float


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{self.prog}: {message}; see --help")


def parsed(argv: Sequence[str]) -> Options:
    """ConfigurationError, one line, on anything wrong."""
    from benchmarks.constructions import constructions

    given = _parser().parse_args(list(argv))
    names = tuple(constructions())
    drafting = given.drafting or (QUICK_DRAFTING if given.quick else ())
    _known("--drafting", drafting, names)
    _known("--rules", given.rules, ALL_RULES)
    temperatures = given.temperatures or (QUICK_TEMPERATURES if given.quick else TEMPERATURES)
    budgets = given.budgets or (QUICK_BUDGETS if given.quick else BUDGETS)
    num_contexts = given.num_contexts or (QUICK_CONTEXTS if given.quick else NUM_CONTEXTS)
    _require(all(0 <= t <= 100 for t in temperatures), "--temperatures", "use numbers from 0 to 100")
    _require(all(1 <= b <= 256 for b in budgets), "--budgets", "use whole numbers from 1 to 256")
    _require(num_contexts >= 2, "--num-contexts", "use at least 2")
    _require(given.num_atoms >= 2, "--num-atoms", "use at least 2")
    _require(given.noise is None or 0 <= given.noise < 1e6, "--noise", "use a standard deviation, 0 or more")
    _require(0 < given.greedy_draft_temperature <= 100, "--greedy-draft-temperature", "use a number from 0 to 100")
    _require(given.processes >= 0, "--processes", "use 1 or more")
    _require(given.seed >= 0, "--seed", "use 0 or more")
    _require(given.noise is None or not given.draft, "--noise", "replaces the draft; leave --draft out")
    return Options(
        given.target,
        given.draft,
        given.prompts,
        tuple(dict.fromkeys(temperatures)),
        tuple(dict.fromkeys(budgets)),
        given.rules,
        drafting,
        num_contexts,
        given.num_atoms,
        given.noise,
        given.seed,
        given.out,
        given.quick,
        given.levels and not given.quick,
        given.processes,
        given.greedy_draft_temperature,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rootward bench acceptance",
        description="Expected tokens of a round in closed form: rules x drafting x temperatures x node budgets.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", default="", help="folder, hub name or tabular:... (default: the demo target)")
    parser.add_argument("--draft", default="", help="the same for the draft model (default: the demo draft)")
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines with `text`, or plain lines (default: the demo prompts)"
    )
    parser.add_argument("--temperatures", type=_list(float), default=(), help="default 0,0.3,0.7,1.0")
    parser.add_argument("--budgets", type=_list(int), default=(), help="nodes below the root, default 4,8,16,32,64")
    parser.add_argument("--rules", type=_list(str), default=ALL_RULES, help=f"default all: {','.join(ALL_RULES)}")
    parser.add_argument("--drafting", type=_list(str), default=(), help="tree constructions (default all)")
    parser.add_argument("--num-contexts", type=int, default=0, help=f"per temperature (default {NUM_CONTEXTS})")
    parser.add_argument("--num-atoms", type=int, default=64, help="support K of the declared draft rows (default 64)")
    parser.add_argument("--noise", type=float, help="draft = the target with Gaussian noise of this size on its logits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("acceptance"), help="folder of the report (default ./acceptance)"
    )
    parser.add_argument("--quick", action="store_true", help="a small grid, under a minute on the demo pair")
    parser.add_argument(
        "--greedy-draft-temperature",
        type=float,
        default=0.5,
        help="of the draft law at temperature 0 (default 0.5, as in the drafter)",
    )
    parser.add_argument("--processes", type=int, default=0, help="one thread each (default: one per core)")
    parser.add_argument("--no-levels", dest="levels", action="store_false", help="leave out growth by draft forwards")
    return parser


def _list(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def read(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            values = ()
        if not values:
            raise argparse.ArgumentTypeError(f"{text!r} is no list with commas")
        return values

    return read


def _known(option: str, given: Sequence[str], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise ConfigurationError(
                f"rootward bench acceptance: {option}: {name!r} is unknown; use {', '.join(names)}"
            )


def _require(ok: bool, option: str, fix: str) -> None:
    if not ok:
        raise ConfigurationError(f"rootward bench acceptance: {option}: {fix}")
