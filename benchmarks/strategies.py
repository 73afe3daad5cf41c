"""Each draft strategy with each verification rule, asked for by request of running services: which pairs they serve, chi-square tests of
the texts against the target's exact law, and tokens per target pass of the demo pair.

    python -m benchmarks.strategies --out FOLDER

One verifier process serves all pairs of a target. Its texts of a tabular target are tested at temperature 1 (`results.p_value`).

The control is a drafter that draws other tokens than it declares, at a verifier without the audit of drafters: the same test must reject
its texts under every ratio test and keep those of match, which trusts no drafter. Exit code 1 if a test says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.demo import spread
from benchmarks.results import described, markdown_table, p_value, save
from benchmarks.services import address_of, generated, service, verifier_with_drafters
from rootward import demo
from rootward.core.requests import (
    DraftStrategy,
    Rule,
    Sampling,
    Speculation,
    SpeculationMode,
    SpeculationStats,
    Stopping,
    VerifierRequest,
)
from rootward.engine.loading import load_model
from rootward.engine.tabular import TabularModel
from rootward.errors import ServiceError
from rootward.ports import Verifier
from rootward.wire.clients import RemoteVerifier

TARGET = "tabular:vocab=4,seed=1"
DRAFT = f"{TARGET},noise=1,noise_seed=2"
NODES = 16
MODEL = "model"  # the pool of drafters with a model
STRATEGIES = (
    "best_first",
    "chain:8",
    "rsd_c:2,2,2",
    "rsd_s:4,4",
    "iid:2,2,2",
    "greedy",
    "greedy:2,2,2",
    "top_k",
    "top_k:2,2,2",
    "marginals:8",
    "coupled",
    "coupled:2,2,2",
)
LOOKUPS = ("ngram", "recycling", "ngram+recycling")  # of the verifier itself
LOOKUP_PODS = ("ngram:", "recycling:")  # drafters without a model
CHEAT = "argmax"  # the drafter of the control draws the likeliest token
CONTROL = (
    ("best_first", Rule.TRAVERSAL),
    ("rsd_s:4,4", Rule.TOKEN),
    ("chain:8", Rule.BLOCK),
    ("iid:2,2,2", Rule.MULTI_STEP),
    ("rsd_c:2,2,2", Rule.MATCH),
)
ALPHA = 1e-4  # error of all tests together
CERTAIN = 1e-9  # a control is rejected below it
SMALLEST = 1e-100  # that is written in full
LEAST_FREEDOM = 20  # of a chi-square statistic
LEAST_TREE_ROUNDS = 0.8  # share of rounds with a tree, or the texts say nothing about the pair
WITHOUT_AUDIT = (
    "from verifier_service import __main__, audit; audit.DrafterAudit.trusts = lambda *_: True; __main__.main()"
)
START_S = 60.0

_numbers = count()  # of requests


@dataclass
class Cell:
    """One pair. Of the tabular target's texts: p_value, tokens, share of rounds with a tree. Of the demo pair at temperature 1: tokens per
    pass and their standard error."""

    drafts: str
    rule: str
    refused: str = ""
    p_value: float = math.nan
    tokens: int = 0
    with_tree: float = 1.0
    tokens_per_pass: float = math.nan
    error: float = math.nan


def draft_sources() -> dict[str, Speculation]:
    """`Speculation` of a request by the name of the drafts."""
    required = Speculation(SpeculationMode.REQUIRED, num_draft_tokens=NODES)
    grown = {text: replace(required, drafter=MODEL, strategy=DraftStrategy.parse(text)) for text in STRATEGIES}
    found = {name: replace(required, drafter=name) for name in (*LOOKUPS, *LOOKUP_PODS)}
    return grown | found


async def texts_of(
    verifier: Verifier,
    speculation: Speculation,
    prompts: Sequence[tuple[int, ...]],
    length: int,
    temperature: float,
    seed: int,
) -> list[tuple[list[int], SpeculationStats]]:
    """One text for each prompt, all at once, with the statistics of each."""
    requests = [
        VerifierRequest(
            f"request-{next(_numbers)}",
            prompt,
            Sampling(temperature),
            Stopping(length, ignore_eos=True),
            speculation,
            seed=seed + i,
        )
        for i, prompt in enumerate(prompts)
    ]
    async with asyncio.timeout(START_S):
        return await asyncio.gather(*(generated(verifier, request) for request in requests))


@asynccontextmanager
async def started(target: str, draft: str, sessions: int) -> AsyncIterator[RemoteVerifier]:
    """A verifier with drafters of every kind, each in a pool of its own."""
    size = "--max-num-seqs", str(sessions), "--log-level", "warning"
    # For up to a quarter of a second, reports of load still count the sessions of the pair before; those that find no room decode plainly.
    size_of_drafters = "--max-num-seqs", str(3 * sessions), "--log-level", "warning"
    models = {MODEL: draft} | {name: name for name in LOOKUP_PODS}
    async with AsyncExitStack() as stack:
        pools = []
        for pool, model in models.items():
            address = await stack.enter_async_context(service("drafter_service", "--model", model, *size_of_drafters))
            pools.append(f"{pool}={address}")
        flags = verifier_flags(target, ",".join(pools))
        address = await stack.enter_async_context(service("verifier_service", *flags, *size))
        remote = await stack.enter_async_context(verifier_with_drafters(address, len(pools)))
        yield remote
        caught = [name for name in (await remote.get_info()).stats if name.startswith("drafter_caught/")]
        if caught:
            raise RuntimeError(f"the audit raised a false alarm: {', '.join(caught)}")


def verifier_flags(target: str, drafters: str) -> list[str]:
    """Children are drawn where a request does not say, and what the verifier looks up itself is asked for by name."""
    flags = ["--model", target, "--drafters", drafters, "--law", "sampled", "--local-draft", "ngram+recycling"]
    patient = ["--draft-wait-ms", "10000"]  # tokens per pass shall not depend on the speed of the machine
    return [*flags, *patient, "--max-num-batched-tokens", "1024", "--max-model-len", "640"]


class LawTest:
    """Texts of the tabular target through a verifier, tested against its law."""

    def __init__(self, texts: int, length: int) -> None:
        self._texts = texts
        self._length = length
        self._prompt = (1, 2, 3)
        target = load_model(TARGET)
        assert isinstance(target, TabularModel)
        self._target = target

    async def measure(self, verifier: Verifier, drafts: str, speculation: Speculation, rule: Rule) -> Cell:
        """Its p-value, or why the verifier refuses the pair. Under match a text depends on its seed alone, so no two pairs share one."""
        asked = replace(speculation, rule=rule)
        cell = Cell(drafts, rule.value)
        prompts = [self._prompt] * self._texts
        try:
            await texts_of(verifier, asked, prompts[:1], 1, 1.0, 0)
        except ServiceError as error:
            return replace(cell, refused=str(error))
        found = await texts_of(verifier, asked, prompts, self._length, 1.0, next(_numbers))
        stats = [one for _, one in found]
        if {one.verification for one in stats} != {rule.value}:
            raise RuntimeError(f"{drafts}, {rule.value}: another rule decided")
        texts = [[*self._prompt, *tokens] for tokens, _ in found]
        return replace(
            cell,
            p_value=p_value(self._target, texts, least_freedom=LEAST_FREEDOM),
            tokens=sum(len(tokens) for tokens, _ in found),
            with_tree=sum(one.num_spec_steps for one in stats) / sum(map(rounds, stats)),
        )


def rounds(stats: SpeculationStats) -> int:
    return stats.num_spec_steps + stats.num_plain_steps


def per_pass(found: Sequence[tuple[list[int], SpeculationStats]]) -> tuple[float, float]:
    """Tokens per target pass and its standard error, of a ratio over texts."""
    num_passes = sum(rounds(stats) for _, stats in found)
    ratio = sum(len(text) for text, _ in found) / num_passes
    residuals = [len(text) - ratio * rounds(stats) for text, stats in found]
    variance = sum(r * r for r in residuals) * len(found) / max(1, len(found) - 1)
    return ratio, math.sqrt(variance) / num_passes


async def laws(options: argparse.Namespace, chosen: dict[str, Speculation]) -> tuple[list[Cell], list[Cell]]:
    """All pairs, and the control."""
    test = LawTest(options.texts, options.length)
    async with started(TARGET, DRAFT, options.texts) as verifier:
        cells = [
            await reported(test.measure(verifier, name, speculation, rule))
            for name, speculation in chosen.items()
            for rule in Rule
        ]
    size = "--max-num-seqs", str(options.texts), "--log-level", "error"
    async with service("benchmarks.dishonest", "--cheat", CHEAT, "--model", DRAFT, *size) as drafter:
        flags = verifier_flags(TARGET, f"{MODEL}={drafter}")
        command = sys.executable, "-c", WITHOUT_AUDIT, "--listen", "127.0.0.1:0", *flags, *size
        async with address_of(*command) as address, verifier_with_drafters(address, 1) as verifier:
            pairs = ((name, draft_sources()[name], rule) for name, rule in CONTROL)
            return cells, [
                await reported(test.measure(verifier, name, speculation, rule)) for name, speculation, rule in pairs
            ]


async def reported(measuring: Any) -> Cell:
    cell: Cell = await measuring
    print(
        f"{cell.drafts:18} {cell.rule:12} {cell.refused or f'p = {cell.p_value:.2g}, {cell.tokens} tokens'}", flush=True
    )
    return cell


async def passes(options: argparse.Namespace, chosen: dict[str, Speculation], cells: list[Cell]) -> dict[str, float]:
    """Fills in the tokens per pass of the pairs that are served; those of greedy decoding, which match decides for every request."""
    target, draft = demo.paths()
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    texts = spread(demo.prompts(), options.prompts)
    prompts = [tuple(tokenizer.encode(text, add_special_tokens=False).ids[-128:]) for text in texts]
    greedy: dict[str, float] = {}
    async with started(str(target), str(draft), options.prompts) as verifier:
        for name, speculation in chosen.items():
            for cell in (cell for cell in cells if cell.drafts == name and not cell.refused):
                asked = replace(speculation, rule=Rule(cell.rule))
                found = await texts_of(verifier, asked, prompts, options.tokens, 1.0, 1)
                cell.tokens_per_pass, cell.error = per_pass(found)
                print(f"{name:18} {cell.rule:12} {cell.tokens_per_pass:.2f} tokens a pass", flush=True)
            asked = replace(speculation, rule=Rule.MATCH)
            greedy[name], _ = per_pass(await texts_of(verifier, asked, prompts, options.tokens, 0.0, 1))
            print(f"{name:18} {'T = 0':12} {greedy[name]:.2f} tokens a pass", flush=True)
    return greedy


def faults(cells: Sequence[Cell], control: Sequence[Cell]) -> list[str]:
    """Tests that say otherwise than they must."""
    served = [cell for cell in cells if not cell.refused]
    least = ALPHA / len(served)
    wrong = [
        f"{cell.drafts}, {cell.rule}: p = {cell.p_value:.2g} is below {least:.2g}"
        for cell in served
        if cell.p_value < least
    ]
    wrong += [
        f"{cell.drafts}, {cell.rule}: {cell.with_tree:.0%} of the rounds had a tree, below {LEAST_TREE_ROUNDS:.0%}"
        for cell in served
        if cell.with_tree < LEAST_TREE_ROUNDS
    ]
    if (joint := together(cells)) < ALPHA:
        wrong.append(f"all pairs together: p = {joint:.2g} is below {ALPHA:g}")
    for cell in control:
        kept = cell.rule == Rule.MATCH.value
        if cell.refused or not (cell.p_value > least if kept else cell.p_value < CERTAIN):
            wrong.append(
                f"control, {cell.drafts}, {cell.rule}: p = {cell.p_value:.2g}, {cell.refused or 'not as it must be'}"
            )
    return wrong


def together(cells: Sequence[Cell]) -> float:
    """Fisher's p-value of all pairs that are served: many small faults show in it."""
    from scipy.stats import chi2

    values = [max(cell.p_value, sys.float_info.min) for cell in cells if not cell.refused]
    return float(chi2.sf(-2 * sum(map(math.log, values)), 2 * len(values)))


def tables(cells: Sequence[Cell], control: Sequence[Cell], greedy: dict[str, float]) -> str:
    """Markdown."""
    rules = [rule.value for rule in Rule]
    by_pair = {(cell.drafts, cell.rule): cell for cell in cells}
    tokens = [
        (f"`{name}`", *(written(by_pair[name, rule]) for rule in rules), f"{greedy[name]:.2f}") for name in greedy
    ]
    controls = [(f"`{cell.drafts}`", cell.rule, rounded(cell.p_value)) for cell in control]
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        if cell.refused:
            reasons.setdefault(cell.refused, []).append(f"`{cell.drafts}` {cell.rule}")
    refusals = [(", ".join(pairs), reason) for reason, pairs in reasons.items()]
    return "\n\n".join(
        [
            markdown_table(("drafts", *rules, "T = 0"), tokens, num_text_columns=1 + len(rules)),
            markdown_table(("control: cheating drafter, no audit", "rule", "p"), controls, num_text_columns=2),
            markdown_table(("refused", "answer of the verifier"), refusals, num_text_columns=2),
        ]
    )


def written(cell: Cell) -> str:
    return "refused" if cell.refused else f"{cell.tokens_per_pass:.2f} (p = {rounded(cell.p_value)})"


def rounded(p: float) -> str:
    return f"{p:.2g}" if p >= SMALLEST else f"< {SMALLEST:g}"


def page(cells: Sequence[Cell], table: str, options: argparse.Namespace) -> str:
    head = described()
    served = [cell for cell in cells if not cell.refused]
    error = max(cell.error for cell in served)
    smallest = min(cell.p_value for cell in served)
    return f"""# Draft strategies and verification rules through the services

`python -m benchmarks.strategies` at commit {head["commit"]}, {head["hardware"]}.

Every pair is asked for by request (`draft_strategy`, `verification`, `drafter` of `speculation`, required, {NODES} nodes) of one running
system: a verifier, a drafter with a model and two without one, `ngram:` and `recycling:`. What `ngram`, `recycling` and `ngram+recycling`
draft is looked up by the verifier itself.

- **Tokens per target pass** of the shipped demo pair at temperature 1: {options.prompts} held-out prompts, {options.tokens} tokens each,
  standard error at most {error:.2f}. At temperature 0 match decides whatever a request asks for, so a row has one figure.
- **p**: chi-square test of {options.texts * options.length} tokens of a tabular target with a tabular draft against the target's exact law.
  The smallest of {len(served)} is {smallest:.2g}, a fault below {ALPHA / len(served):.2g}; all together (Fisher) {together(served):.2g}.
- **Control**: a drafter that always draws the likeliest token and declares otherwise (`benchmarks.dishonest --cheat {CHEAT}`), at a
  verifier without the audit of drafters. The same test must reject its texts under ratio tests, and keep those of match.

A draft head is not among them: none is shipped for either target. Its trees are tested in `tests/statistical/test_heads_exact.py`.

{table}
"""


async def measure(options: argparse.Namespace) -> int:
    chosen = {
        name: speculation
        for name, speculation in draft_sources().items()
        if not options.drafts or name in options.drafts
    }
    cells, control = await laws(options, chosen)
    greedy = await passes(options, chosen, cells)
    table = tables(cells, control, greedy)
    print(table)
    if options.out is not None:
        pairs = {"cells": [asdict(cell) for cell in cells], "control": [asdict(cell) for cell in control]}
        save(options.out / "strategies.json", {**pairs, "greedy": greedy})
        (options.out / "README.md").write_text(page(cells, table, options), encoding="utf-8")
    found = faults(cells, control)
    print("\n".join(found) or "every test says what it must")
    return bool(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="strategies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drafts", nargs="+", choices=list(draft_sources()), metavar="NAME", help="default: all")
    parser.add_argument("--texts", type=int, default=32, help="of the tabular target for a pair")
    parser.add_argument("--length", type=int, default=120, help="of each, in tokens")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts of the demo pair")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--out", type=Path, help="folder of the report")
    return asyncio.run(measure(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
