"""`rootward check-pair TARGET DRAFT`: whether the draft model can draft for the target model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rootward.cli.options import Output, OutputFormat
from rootward.cli.output import show
from rootward.demo import draft_named, target_named
from rootward.errors import ConfigurationError
from rootward.ports import ModelInfo


@dataclass(frozen=True, slots=True)
class Side:
    """One model. num_padding: ids of the model that its tokenizer does not know."""

    info: ModelInfo
    num_padding: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A property of both, and what a difference means: "ok", "note" or "error"."""

    name: str
    target: str
    draft: str
    verdict: str
    remark: str = ""


def check_pair(
    target: Annotated[str, typer.Argument(help="Target model: folder, hub name, GGUF file, or demo: the shipped one.")],
    draft: Annotated[str, typer.Argument(help="Draft model: the same.")],
    output: Output = OutputFormat.text,
) -> None:
    """Check that a draft model fits a target model: tokenizer, vocabulary, context, end tokens, tree support.

    Loads both models on the CPU. Exit code 0 when they fit, 3 when they do not; the first differing token is shown.
    """
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ConfigurationError("check-pair: needs torch and transformers; run pip install 'rootward[worker]'")
    from transformers.utils import logging

    from rootward.engine.gguf_files import local_model

    logging.disable_progress_bar()
    target, draft = local_model(target_named(target)), local_model(draft_named(draft))
    findings = compare(_look(target), _look(draft), _first_difference(target, draft))
    wrong = [f for f in findings if f.verdict == "error"]
    show({"fits": not wrong, "findings": [asdict(f) for f in findings]}, _table(findings), output)
    if wrong:
        raise ConfigurationError(f"{wrong[0].name}: {wrong[0].remark}", exit_code=3)


def compare(target: Side, draft: Side, difference: str) -> list[Finding]:
    """The properties of both models. difference: the first token that the tokenizers read differently, described; "" if there is none."""
    t = target.info
    d = draft.info
    tokenizer = vocabulary = context = ends = trees = ""
    if difference or t.tokenizer_hash != d.tokenizer_hash:
        fix = "the drafter needs --target-tokenizer, and drafts only what both vocabularies have"
        tokenizer = f"{difference or 'the tokenizers split text differently'}; {fix}"
    comparable = t.tokenizer_hash != "" or t.vocab_size == d.vocab_size
    if not comparable or d.vocab_size < t.vocab_size - target.num_padding:
        vocabulary = "the draft model lacks tokens of the target; use models of one vocabulary"
    if d.max_positions < t.max_positions:
        context = "drafting ends where the draft's context does"
    if t.eos_ids != d.eos_ids:
        ends = "those of the target count"
    if not (t.supports_trees and d.supports_trees):
        trees = "this architecture cannot hold a token tree; it decodes plainly"

    def finding(name: str, show: Callable[[Side], str], remark: str, verdict: str = "error") -> Finding:
        return Finding(name, show(target), show(draft), verdict if remark else "ok", remark)

    return [
        finding("tokenizer", lambda side: side.info.tokenizer_hash[:12] or "-", tokenizer),
        finding("vocabulary", lambda side: f"{side.info.vocab_size} ({side.num_padding} padding)", vocabulary),
        finding("context", lambda side: str(side.info.max_positions), context, "note"),
        finding("end tokens", lambda side: ", ".join(map(str, side.info.eos_ids)) or "-", ends, "note"),
        finding("token trees", lambda side: "yes" if side.info.supports_trees else "no", trees),
    ]


def _look(spec: str) -> Side:
    """Load a model and describe it. ConfigurationError when there is none."""
    from rootward.engine.loading import load_model
    from rootward.engine.tokenizers import num_ids

    model: Any = load_model(spec, dtype="auto", max_slots=1)
    tokenizer = getattr(model, "tokenizer", None)
    return Side(model.info, max(0, model.info.vocab_size - num_ids(tokenizer)) if tokenizer is not None else 0)


def _first_difference(target: str, draft: str) -> str:
    from rootward.engine.loading import TABULAR
    from rootward.engine.tokenizers import first_difference, load_tokenizer

    if target.startswith(TABULAR) or draft.startswith(TABULAR):
        return ""
    found = first_difference(load_tokenizer(target), load_tokenizer(draft))
    if found is None:
        return ""
    return f"first differing token: {found.id} is {found.a!r} in the target, {found.b!r} in the draft"


def _table(findings: list[Finding]) -> Table:
    colours = {"ok": "green", "note": "yellow", "error": "red"}
    table = Table("", "target", "draft", "", "remark")
    for f in findings:
        verdict = Text(f.verdict, colours[f.verdict])
        table.add_row(f.name, Text(f.target), Text(f.draft), verdict, Text(f.remark))
    return table
