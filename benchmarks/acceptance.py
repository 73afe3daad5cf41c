"""`rootward bench acceptance`: tokens per round in closed form, by draft strategy, verification rule and number of nodes.

    python -m benchmarks.acceptance --out FOLDER
    python -m benchmarks.acceptance --strategies best_first rsd_s:4,4 --rules traversal token --nodes 8 16 --temperatures 1

Contexts are positions in the target's own continuations of the prompts. At each of them every strategy of `rootward.core.growth` (the
objects that the drafter service runs) grows one tree; the draft rows are cut to K atoms in integer weights, as on the wire. The law of
`rootward.core.verification` then gives the expected tokens of the round without tossing a coin. Coupled trees share their noise with the
target, so there one verdict per tree is drawn. Intervals are 95 % over contexts. At temperature 0 every rule takes the longest match.

Legend: C contexts, N nodes, K atoms, V vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contexts import continued, prefill, random_prompts, tokenised
from benchmarks.results import command, described, markdown_table, save
from benchmarks.rows import quantise_top
from rootward import demo
from rootward.core import verification
from rootward.core.distribution import DraftDistribution
from rootward.core.growth import BestFirst, Growth, Strategy, growth_of, strategy_of
from rootward.core.living_tree import ROOT, LivingTree
from rootward.core.pairing import check_rule
from rootward.core.requests import DraftMode, DraftStrategy, Rule, Sampling
from rootward.core.rng import Key, target_gumbel
from rootward.core.tree import TokenTree
from rootward.engine.loading import load_model
from rootward.engine.sampling import distributions
from rootward.engine.tokenizers import load_tokenizer
from rootward.errors import ConfigurationError
from rootward.host import ask_for_huge_pages
from rootward.ports import COMMITTED, LanguageModel, Rows

STRATEGIES = (
    "best_first",
    "greedy",
    "chain:4",
    "chain:8",
    "rsd_c:2,2,2",
    "rsd_c:4,1,1,1",
    "rsd_s:2,4",
    "rsd_s:4,4",
    "iid:2,2,2",
    "iid:4,1,1,1",
    "top_k",
    "marginals",
    "coupled",
)
LONGEST_PROMPT, LONGEST_CONTINUATION = 128, 48
MAX_NODES = 256
GROUP = 32  # contexts that share a forward
COUPLED_ATOMS = 1024  # of a row that the noise chooses from
GREEDY_DRAFT_TEMPERATURE = 0.5  # of the draft distribution at temperature 0, as in the drafter


@dataclass(frozen=True)
class Cell:
    """One strategy under one rule: mean tokens per round, bonus token included, and half the width of its interval."""

    temperature: float
    strategy: str
    rule: str
    max_nodes: int
    nodes: float
    levels: float
    tokens: float
    half_width: float


class Slots:
    """A model with one slot per context: the context is committed but for its last token, which is the root of every tree."""

    def __init__(self, model: LanguageModel, contexts: Sequence[Sequence[int]]) -> None:
        self.model, self.last = model, [text[-1] for text in contexts]
        self.slots = [model.open() for _ in contexts]
        prefill(model, self.slots, [text[:-1] for text in contexts])

    def forward(self, wanted: Sequence[tuple[int, LivingTree, Sequence[int]]]) -> torch.Tensor:
        """Logits [rows, V] of the given nodes of each (context, tree, nodes); parents come first or were asked for before."""
        batch = []
        for context, tree, nodes in wanted:
            records = [None if node == ROOT else tree.nodes[node] for node in nodes]
            parents = [COMMITTED if record is None else record.parent for record in records]
            tokens = [self.last[context] if record is None else record.token for record in records]
            columns = (np.array(values, dtype=np.int64) for values in (nodes, parents, tokens))
            batch.append(Rows(self.slots[context], *columns))
        return self.model.forward(batch)

    def release(self) -> None:
        """Forget all nodes of the trees."""
        for slot in self.slots:
            self.model.release(slot)

    def close(self) -> None:
        for slot in self.slots:
            self.model.close(slot)


@dataclass(frozen=True)
class Grown:
    """One tree and the draft rows of its expanded nodes."""

    context: int
    tree: LivingTree
    growth: Growth
    key: Key

    @property
    def inner(self) -> list[int]:
        """Ids of the nodes that have children, in draw order."""
        return [node for node in (ROOT, *self.tree.nodes) if self.tree.at(node).children]


def grown(
    draft: Slots, strategy: Strategy, sampling: Sampling, vocabulary: int, given: argparse.Namespace, max_nodes: int
) -> list[Grown]:
    """One tree per context, level by level, all contexts in one draft forward."""
    num_atoms = min(COUPLED_ATOMS if strategy.mode is DraftMode.COUPLED else given.num_atoms, vocabulary)
    trees = []
    for context in range(len(draft.slots)):
        tree = LivingTree(0, 0, vocab_size=vocabulary, node_cap=max_nodes, copies=strategy.mode is DraftMode.IID)
        trees.append(Grown(context, tree, growth_of(tree, strategy, node_cap=max_nodes), Key(given.seed, context)))
    rngs = [np.random.default_rng([given.seed, 104, context]) for context in range(len(trees))]
    growing = [(one, [ROOT]) for one in trees]
    while growing:
        logits = draft.forward([(one.context, one.tree, nodes) for one, nodes in growing if nodes])[:, :vocabulary]
        probs, ids = distributions(logits, [sampling] * len(logits)).topk(num_atoms)
        atoms, weights = quantise_top(ids.numpy(), probs.double().numpy())
        row = 0
        for one, nodes in growing:
            for node in nodes:
                some = weights[row] > 0
                distribution = DraftDistribution(atoms[row][some], weights[row][some])
                noise = None
                if strategy.mode is DraftMode.COUPLED:
                    noise = target_gumbel(one.key, one.tree.at(node).depth, distribution.ids)
                one.growth.expand(node, distribution, noise)
                row += 1
            one.growth.draw(lambda n, rng=rngs[one.context]: rng.integers(1 << 64, size=n, dtype=np.uint64))
        growing = [(one, nodes) for one, _ in growing if (nodes := one.growth.frontier(1 << 30))]
    draft.release()
    return trees


@dataclass(frozen=True)
class Round:
    """A tree in rank space: a token is the rank of its atom in the row of its parent; column K is all the rest of the vocabulary.

    target, draft float64[N, K + 1]; choice int[N]: the target's own token under the shared noise (coupled trees).
    """

    tree: TokenTree
    target: np.ndarray
    draft: np.ndarray
    choice: np.ndarray

    @property
    def levels(self) -> int:
        return int(self.tree.depth.max())


def rounds_of(target: Slots, trees: Sequence[Grown], sampling: Sampling, vocabulary: int) -> list[Round]:
    """The trees with the target's rows at their inner nodes, from one target forward."""
    logits = target.forward([(one.context, one.tree, one.inner) for one in trees if one.inner])[:, :vocabulary]
    probs = distributions(logits, [sampling] * len(logits)).double().numpy()
    target.release()
    found, row = [], 0
    for one in trees:
        rows = dict(zip(one.inner, probs[row : row + len(one.inner)], strict=True))
        found.append(_round(one, rows))
        row += len(one.inner)
    return found


def _round(one: Grown, rows: dict[int, np.ndarray]) -> Round:
    tree, ratio = one.tree, one.growth.strategy.mode.ratio
    ids = [ROOT, *tree.nodes]
    index = {node: i for i, node in enumerate(ids)}
    tokens = {node: np.array(sorted({tree.nodes[c].token for c in tree.at(node).children})) for node in rows}
    for node in rows:
        if ratio and tree.at(node).row is not None:
            tokens[node] = np.union1d(tokens[node], tree.at(node).row[0])
    width = max((len(values) for values in tokens.values()), default=0)
    target, draft = np.zeros((2, len(ids), width + 1))
    target[:, width] = 1.0  # what follows a leaf does not decide where the round stops
    choice = np.full(len(ids), width)
    for node, law in rows.items():
        i, known = index[node], tokens[node]
        target[i, : len(known)] = law[known]
        target[i, width] = max(0.0, 1.0 - law[known].sum())
        if ratio and (declared := tree.at(node).row) is not None:
            draft[i, np.searchsorted(known, declared[0])] = declared[1] / declared[1].sum()
        if one.growth.strategy.mode is DraftMode.COUPLED:
            with np.errstate(divide="ignore"):
                own = int(np.argmax(np.log(law) + target_gumbel(one.key, tree.at(node).depth, len(law))))
            choice[i] = np.searchsorted(known, own) if own in known else width
    records = list(tree.nodes.values())
    ranks = [int(np.searchsorted(tokens[record.parent], record.token)) for record in records]
    parents = [-1, *(index[record.parent] for record in records)]
    shape = TokenTree([0, *ranks], parents, [False, *(record.sampled for record in records)])
    return Round(shape, target, draft, choice)


def tokens_per_round(one: Round, rule: Rule, mode: DraftMode) -> float:
    """Expected tokens of the round, the bonus token included; for coupled trees those of the verdict under the shared noise."""
    if mode is DraftMode.COUPLED:
        return 1.0 + float(one.tree.depth[verification.match(one.tree, one.choice).stop])
    if rule is Rule.MATCH:
        return 1.0 + float(matched(one.tree, one.target)[1:].sum())
    replacement = mode is DraftMode.IID
    return verification.law(rule.value, one.tree, one.target, one.draft, replacement=replacement).block_efficiency


def matched(tree: TokenTree, target: np.ndarray) -> np.ndarray:
    """float64[N]: probability that target matching reaches each node. Of equal siblings the first is taken."""
    reach = np.zeros(len(tree))
    reach[0] = 1.0
    for node, family in enumerate(tree.children):
        for token, child in {int(tree.token[child]): child for child in reversed(family)}.items():
            reach[child] = reach[node] * target[node, token]
    return reach


def rules_of(asked: DraftStrategy, mode: DraftMode, wanted: Sequence[Rule], temperature: float) -> list[Rule]:
    """The wanted rules that are lossless for these trees."""
    if temperature == 0:
        return [] if mode is DraftMode.COUPLED else [Rule.MATCH]
    found = []
    for rule in wanted:
        try:
            check_rule(asked, mode, rule)
        except ValueError:
            continue
        found.append(rule)
    return found


def measure(given: argparse.Namespace, done: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The report. `done` is called after each strategy and budget of a temperature."""
    target, draft, prompts = load_pair(given)
    vocabulary = min(target.info.vocab_size, draft.info.vocab_size)
    cells: list[Cell] = []
    for temperature in given.temperatures:
        samples: dict[tuple[str, str, int], list[tuple[float, int, int]]] = {}
        for start in range(0, given.num_contexts, GROUP):
            some = range(start, min(start + GROUP, given.num_contexts))
            texts = continued(target, prompts, temperature, some, LONGEST_CONTINUATION, given.seed)
            sides = Slots(target, texts), Slots(draft, texts)
            for asked, max_nodes in trees_of(given):
                mode = asked.mode or DraftMode.SAMPLED
                sampling = Sampling(temperature or GREEDY_DRAFT_TEMPERATURE)
                strategy = strategy_of(asked, mode, BestFirst())
                trees = grown(sides[1], strategy, sampling, vocabulary, given, max_nodes)
                rounds = rounds_of(sides[0], trees, Sampling(temperature), vocabulary)
                for rule in rules_of(asked, mode, given.rules, temperature):
                    values = [(tokens_per_round(r, rule, mode), len(r.tree) - 1, r.levels) for r in rounds]
                    samples.setdefault((str(asked), rule.value, max_nodes), []).extend(values)
                done(f"T = {temperature:g}, {asked}")
            for side in sides:
                side.close()
        cells += [cell_of(temperature, key, np.array(values)) for key, values in samples.items()]
    return {
        "format": "rootward-acceptance/2",
        "target": name_of(given.target, "demo/target"),
        "draft": name_of(given.draft, "demo/draft"),
        "vocabulary": vocabulary,
        **{name: getattr(given, name) for name in ("num_contexts", "num_atoms", "seed")},
        "cells": [asdict(cell) for cell in cells],
    }


def trees_of(given: argparse.Namespace) -> Iterator[tuple[DraftStrategy, int]]:
    """(strategy, most nodes): every budget; a strategy with a shape of its own has as many nodes as that."""
    for asked in given.strategies:
        own = bool(asked.numbers) and asked.name != "marginals"
        for max_nodes in [MAX_NODES] if own else given.nodes:
            yield asked, max_nodes


def cell_of(temperature: float, key: tuple[str, str, int], values: np.ndarray) -> Cell:
    tokens, nodes, levels = values.T
    half_width = 1.96 * float(tokens.std(ddof=1)) / len(tokens) ** 0.5
    strategy, rule, max_nodes = key
    num_nodes, num_levels, num_tokens = (float(column.mean()) for column in (nodes, levels, tokens))
    return Cell(temperature, strategy, rule, max_nodes, num_nodes, num_levels, num_tokens, half_width)


def load_pair(given: argparse.Namespace) -> tuple[LanguageModel, LanguageModel, list[list[int]]]:
    """Target, draft and prompts as token ids. ConfigurationError if a model cannot be read or the two do not fit."""
    paths = demo.paths()
    specs = given.target or str(paths.target), given.draft or str(paths.draft)
    longest = LONGEST_PROMPT + LONGEST_CONTINUATION + MAX_NODES
    target, draft = (load_model(spec, max_slots=min(GROUP, given.num_contexts), max_len=longest) for spec in specs)
    hashes = target.info.tokenizer_hash, draft.info.tokenizer_hash
    sizes = target.info.vocab_size, draft.info.vocab_size
    if hashes[0] != hashes[1] if all(hashes) else sizes[0] != sizes[1]:
        fix = f"{sizes[1]} and {sizes[0]} tokens; use a pair with one tokenizer"
        raise ConfigurationError(f"--draft: its tokenizer is not the target's: {fix}", 3)
    if specs[0].startswith("tabular:"):
        return target, draft, random_prompts(64, sizes[0], 8, given.seed)
    texts = demo.read_prompts(given.prompts) if given.prompts else demo.prompts()
    return target, draft, tokenised(texts, load_tokenizer(specs[0]), LONGEST_PROMPT)


def name_of(spec: str, default: str) -> str:
    """A model's name without the folders above it."""
    return default if not spec else spec if spec.startswith("tabular:") else Path(spec).name


def as_markdown(report: dict[str, Any]) -> str:
    """One table per temperature, in order of the number of nodes."""
    head = described()
    parts = [
        f"# Tokens per round: {report['target']} with {report['draft']}",
        f"{head['date']}, {head['hardware']}, commit {head['commit']}. {report['num_contexts']} contexts per temperature, "
        f"draft rows of {report['num_atoms']} atoms, V = {report['vocabulary']}. Closed form, bonus token included, ± 95 % over contexts.",
    ]
    cells = [Cell(**cell) for cell in report["cells"]]
    for temperature in sorted({cell.temperature for cell in cells}):
        here = sorted((c for c in cells if c.temperature == temperature), key=lambda c: (round(c.nodes), -c.tokens))
        rows = [
            (c.strategy, c.rule, f"{c.nodes:.1f}", f"{c.levels:.1f}", f"{c.tokens:.3f} ± {c.half_width:.2f}")
            for c in here
        ]
        parts.append(f"## Temperature {temperature:g}")
        header = ("strategy", "rule", "nodes", "levels", "tokens per round")
        parts.append(markdown_table(header, rows, num_text_columns=2))
    return "\n\n".join(parts) + "\n"


@command
def main(argv: Sequence[str]) -> None:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    ask_for_huge_pages()
    given = checked(parser().parse_args(argv))
    groups = -(-given.num_contexts // GROUP) * len(given.temperatures)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("loading", total=groups * len(list(trees_of(given))))
        report = measure(given, lambda name: progress.update(bar, advance=1, description=name))
    Console().print(Markdown(as_markdown(report)))
    if given.out is not None:
        save(given.out / "acceptance.json", report)
        (given.out / "acceptance.md").write_text(as_markdown(report), encoding="utf-8")


def checked(given: argparse.Namespace) -> argparse.Namespace:
    """The options with strategies and rules as values; ConfigurationError names what is wrong."""
    try:
        given.strategies = [DraftStrategy.parse(text) for text in given.strategies]
    except ValueError as wrong:
        raise ConfigurationError(f"--strategies: {wrong}") from wrong
    for name, ok, fix in (
        ("temperatures", all(0 <= t <= 100 for t in given.temperatures), "use numbers from 0 to 100"),
        ("nodes", all(1 <= n <= MAX_NODES for n in given.nodes), f"use whole numbers from 1 to {MAX_NODES}"),
        ("num-contexts", given.num_contexts >= 2, "use at least 2"),
        ("num-atoms", given.num_atoms >= 2, "use at least 2"),
        ("seed", given.seed >= 0, "use 0 or more"),
    ):
        if not ok:
            raise ConfigurationError(f"--{name}: {getattr(given, name.replace('-', '_'))}: {fix}")
    return given


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="rootward bench acceptance",
        description="Tokens per round in closed form: draft strategies x verification rules x node budgets.",
        allow_abbrev=False,
    )
    add = found.add_argument
    add("--target", default="", help="folder, hub name or tabular:... (default: the demo target)")
    add("--draft", default="", help="the same for the draft model (default: the demo draft)")
    add("--prompts", type=Path, help="JSON lines with `text`, or plain lines (default: the demo prompts)")
    add("--strategies", nargs="+", default=STRATEGIES, help=f"default {' '.join(STRATEGIES)}")
    rules = ", ".join(rule.value for rule in Rule)
    add("--rules", nargs="+", type=Rule, metavar="RULE", default=list(Rule), help=f"of {rules} (default: all)")
    add("--nodes", type=int, nargs="+", default=[4, 8, 16, 32], help="nodes below the root (default 4 8 16 32)")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="default 0 1")
    add("--num-contexts", type=int, default=96, help="per temperature (default 96)")
    add("--num-atoms", type=int, default=32, help="atoms K of a draft row (default 32)")
    add("--seed", type=int, default=1)
    add("--out", type=Path, help="folder of acceptance.json and acceptance.md (default: none)")
    return found


if __name__ == "__main__":
    sys.exit(main())
