"""`rootward bench lookup`: tokens per round of drafters without a model, on the target's own texts.

Under target matching the text is a function of (target, seed): no drafter changes it. Therefore each text is generated once, plainly, and
every drafter is replayed on it: its tree, the accepted path along the text, the bonus token, and again. The counts are those of a verifier.

python -m benchmarks.lookup --sources ngram: ngram+recycling: --budgets 16 --out report.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import command, markdown_row, markdown_table, save
from rootward.core.living_tree import LivingTree
from rootward.core.lookup import Recipe, Source, Successors, extend_tree, parse_recipe
from rootward.core.requests import DraftMode
from rootward.errors import ConfigurationError
from rootward.host import ask_for_huge_pages

SOURCES = ("ngram:", "recycling:", "ngram+recycling:")
MAX_DEPTH, TOPK, LONGEST_PROMPT = 8, 4, 256
TEMPERATURES, BUDGETS = (0.0, 1.0), (8, 16, 32)
ANY_TOKEN = 1 << 32


@dataclass(frozen=True, slots=True)
class Replay:
    """Counts over some texts."""

    rounds: int = 0
    tokens: int = 0
    nodes: int = 0

    def __add__(self, other: Replay) -> Replay:
        return Replay(self.rounds + other.rounds, self.tokens + other.tokens, self.nodes + other.nodes)

    @property
    def block_efficiency(self) -> float:
        """Tokens per round, bonus included."""
        return self.tokens / self.rounds if self.rounds else 1.0


def replayed(source: Source, prompt: Sequence[int], output: Sequence[int], budget: int) -> Replay:
    """The rounds in which a source that has read the prompt would have drafted the output."""
    source.extend(prompt)
    rounds = nodes = at = 0
    while at < len(output):
        tree = LivingTree(0, 0, vocab_size=ANY_TOKEN, node_cap=budget)
        nodes += extend_tree(tree, source, max_depth=MAX_DEPTH, topk=TOPK)
        accepted = [node for node in tree.commit(output[at : at + MAX_DEPTH + 1]) if node is not None]
        run = output[at : at + len(accepted) + 1]
        source.extend(run)
        at, rounds = at + len(run), rounds + 1
    return Replay(rounds, len(output), nodes)


def measure(
    recipes: Sequence[Recipe], texts: Sequence[tuple[list[int], list[int]]], budgets: Sequence[int], law: DraftMode
) -> list[dict[str, Any]]:
    """One row per recipe and node budget. Texts come one after another and share what the recipe lets them share."""
    rows: list[dict[str, Any]] = []
    for recipe in recipes:
        for budget in budgets:
            memory, total = Successors(), Replay()
            for prompt, output in texts:
                total += replayed(recipe.source(law, memory), prompt, output, budget)
            rows.append(
                {
                    "source": recipe.name,
                    "budget": budget,
                    "block_efficiency": round(total.block_efficiency, 4),
                    "nodes_per_round": round(total.nodes / max(total.rounds, 1), 2),
                    **asdict(total),
                }
            )
    return rows


def texts_of(model: str, prompts: Path | None, temperature: float, num: int, length: int, seed: int) -> list[Any]:
    """(prompt, output) of so many prompts, continued by the model itself for up to `length` tokens."""
    from benchmarks.contexts import continued, random_prompts, tokenised
    from rootward import demo
    from rootward.engine.loading import load_model
    from rootward.engine.tokenizers import load_tokenizer

    target = load_model(model, max_slots=num, max_len=LONGEST_PROMPT + length + 1)
    if model.startswith("tabular:"):
        given = random_prompts(num, target.info.vocab_size, 8, seed)
    else:
        texts = demo.read_prompts(prompts) if prompts else demo.prompts()
        given = tokenised(texts, load_tokenizer(model), LONGEST_PROMPT)
    made = continued(target, given, temperature, range(num), length, seed)
    heads = [given[i % len(given)] for i in range(num)]
    return [(head, text[len(head) :]) for head, text in zip(heads, made, strict=True)]


@command
def main(argv: Sequence[str]) -> None:
    ask_for_huge_pages()
    given = _parser().parse_args(argv)
    results = _results(given, [_recipe(spec) for spec in given.sources])
    if given.out is not None:
        name = Path(given.model).name if given.model else "demo/target"
        save(given.out, {"model": name, "seed": given.seed, "length": given.length, "results": results})


def _results(given: argparse.Namespace, recipes: Sequence[Recipe]) -> list[dict[str, Any]]:
    """All rows, printed as they come."""
    from rootward import demo

    model, results = given.model or str(demo.paths().target), []
    print(markdown_table(("temperature", "drafter", "nodes", "tokens per round", "nodes per round"), []))
    for temperature in given.temperatures:
        texts = texts_of(model, given.prompts, temperature, given.num_texts, given.length, given.seed)
        for row in measure(recipes, texts, given.budgets, DraftMode.COUPLED):
            results.append({"temperature": temperature, **row})
            numbers = (row["budget"], f"{row['block_efficiency']:.2f}", f"{row['nodes_per_round']:.1f}")
            print(markdown_row((f"{temperature:g}", row["source"], *numbers)), flush=True)
    return results


def _recipe(spec: str) -> Recipe:
    try:
        recipe = parse_recipe(spec)
    except ValueError as wrong:
        raise ConfigurationError(f"--sources: {wrong}") from wrong
    if recipe is None:
        raise ConfigurationError(f"--sources: {spec!r} is none; use {', '.join(SOURCES)}")
    return recipe


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rootward bench lookup",
        description="Tokens per round with drafters that look things up, replayed on the target's own texts.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="", help="the target: folder, hub name or tabular:... (default: the demo's)")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `text`, or plain lines (default: the demo's)")
    parser.add_argument("--sources", nargs="+", default=SOURCES, help=f"drafters (default {' '.join(SOURCES)})")
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES, help="default 0 1")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="nodes below the root, default 8 16 32")
    parser.add_argument("--num-texts", type=int, default=16, help="texts per temperature (default 16)")
    parser.add_argument("--length", type=int, default=256, help="longest output in tokens (default 256)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON report (default: none)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
