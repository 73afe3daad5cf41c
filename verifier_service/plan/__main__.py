"""`rootward plan TARGET DRAFT`: loads both, measures, and says whether speculation pays."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from rootward import demo
from rootward.engine.threads import on_passing_thread
from rootward.errors import ConfigurationError
from rootward.host import ask_for_huge_pages, available_cores
from rootward.ports import LanguageModel
from verifier_service.local_drafts import HEAD
from verifier_service.plan.flags import parser
from verifier_service.plan.forecast import forecasts
from verifier_service.plan.measurement import Bench, Measured
from verifier_service.plan.report import answer, as_json, check_picture, draw, tables
from verifier_service.settings import VerifierSettings

LONGEST_PROMPT = 512  # tokens; of a longer one the end is read
RTTS_MS = (0.0, 1.0, 5.0, 20.0, 50.0)
NGRAM = "ngram"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 with an answer, whichever it is; 2 for wrong options, 3 for models that do not fit. Errors are one line on stderr."""
    given = parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    ask_for_huge_pages()
    try:
        _check(given)
        measured = _measured(given)
        loads = sorted({1, (1 + given.load) // 2, given.load})
        found = forecasts(measured, loads=loads, rtts_ms=sorted({0.0, *RTTS_MS, given.rtt}))
        at_rtt = [one for one in found if one.rtt_ms == (given.rtt if measured.remote else 0.0)]
        title = f"{_name(given.target)} with {_name(given.draft)}"
        if given.json:
            about = {"target": _name(given.target), "draft": _name(given.draft), "threads": given.threads}
            print(json.dumps(as_json(measured, found, about=about), indent=1))
        else:
            console = Console()
            console.print(f"[bold]{title}[/bold], {given.threads} threads each")
            for table in tables(measured, at_rtt):
                console.print(table)
            if measured.remote:
                at_most_load = [
                    one for one in found if (one.temperature, one.load) == (given.temperatures[0], given.load)
                ]
                by_distance = ", ".join(f"{one.rtt_ms:g} ms: {one.speedup:.2f}" for one in at_most_load)
                console.print(
                    f"speed-up by distance at temperature {given.temperatures[0]:g}, {given.load} sessions: {by_distance}"
                )
            console.print(f"\n[bold]{answer(at_rtt)}[/bold]")
        if given.out is not None:
            draw(measured, found, given.out, title)
    except ConfigurationError as wrong:
        print(f"rootward: {str(wrong).splitlines()[0]}", file=sys.stderr)
        return wrong.exit_code
    return 0


def _measured(given: argparse.Namespace) -> Measured:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=1.0)
        # Threads that loading starts slow every later step of the thread that loaded, so services do not load on it either.
        bench = asyncio.run(on_passing_thread(_bench, given))
        progress.update(task, description="measuring")
        loads = sorted({1, given.load})
        try:
            return bench.measure(
                given.temperatures, loads, given.seconds, lambda share: progress.update(task, completed=share)
            )
        finally:
            bench.thread.shutdown()


def _bench(given: argparse.Namespace) -> Bench:
    """Models and prompts. ConfigurationError if a model cannot be read, or the two do not fit."""
    from rootward.engine.loading import load_model
    from verifier_service.target import load_local_head, load_target

    local = NGRAM if given.draft == NGRAM else f"{HEAD}{given.draft}" if is_head(given.draft) else "none"
    room = LONGEST_PROMPT + given.tokens + given.nodes
    options: dict[str, Any] = {
        "model": given.target,
        "local_draft": local,
        "num_draft_tokens": given.nodes,
        "num_ahead_tokens": 0,
        "max_num_seqs": given.load,
        "max_num_batched_tokens": max(256, given.load * (given.nodes + 1)),
        "num_threads": given.threads,
        "max_model_len": room,
        "device": given.device,
        "dtype": given.dtype,
    }
    settings = VerifierSettings(**options)
    target = load_target(settings)
    longest = target.info.max_positions - given.tokens - given.nodes
    if not target.info.supports_trees:
        raise ConfigurationError("target: its architecture cannot hold a token tree; it decodes plainly", 3)
    if longest < 1:
        raise ConfigurationError(
            f"--tokens: {given.tokens} do not fit the context of {target.info.max_positions}; ask for fewer"
        )
    draft = None
    if local == "none":
        longer = min(room, target.info.max_positions)
        draft = load_model(given.draft, device=given.device, dtype=given.dtype, max_slots=given.load, max_len=longer)
        draft = _in_vocabulary_of(target, draft)
    tokenizer, longest = getattr(target, "tokenizer", None), min(LONGEST_PROMPT, longest)
    if tokenizer is None:
        prompts = _random_prompts(target.info.vocab_size, given.seed)
    else:
        prompts = prompt_ids(tokenizer, given.texts, raw=given.raw, longest=longest)
    head = load_local_head(settings, target)
    return Bench(settings, target, prompts=prompts, num_tokens=given.tokens, head=head, draft=draft, seed=given.seed)


def _in_vocabulary_of(target: LanguageModel, draft: LanguageModel) -> LanguageModel:
    """The draft as `serve all` serves it: of two tokenizers, in the tokens that both have. ConfigurationError if that cannot be."""
    from rootward.engine.other_vocabulary import in_vocabulary_of

    tokenizers = [getattr(model, "tokenizer", None) for model in (draft, target)]
    if None not in tokenizers:
        return in_vocabulary_of(draft, *tokenizers)
    sizes = [model.info.vocab_size for model in (draft, target)]
    if sizes[0] != sizes[1]:
        reason = (
            f"draft: {sizes[0]} tokens, the target {sizes[1]}, and no tokenizers to map one vocabulary to the other"
        )
        raise ConfigurationError(f"{reason}; see rootward check-pair", 3)
    return draft


def is_head(draft: str) -> bool:
    """A folder with a draft head: a few layers that read hidden states of their target."""
    file = Path(draft).expanduser() / "config.json"
    if not file.is_file():
        return False
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"draft: {str(file)!r} is no JSON ({error})") from None
    names = " ".join(config.get("architectures") or ()).lower()
    return "eagle" in names or "dflash" in names or "draft_vocab_size" in config


def prompt_ids(tokenizer: Any, texts: Sequence[str], *, raw: bool, longest: int) -> list[list[int]]:
    """Token ids: texts as first messages of conversations where the tokenizer has a chat template, unless they are `raw`. Of longer ones
    the end. ConfigurationError if no token is left."""
    if not raw and getattr(tokenizer, "chat_template", None):
        messages = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in messages]
    found = [list(map(int, tokenizer.encode(text, add_special_tokens=False)))[-longest:] for text in texts]
    kept = [ids for ids in found if ids]
    if not kept:
        raise ConfigurationError("--prompts: none has a token; give text that the tokenizer knows")
    return kept


def _random_prompts(vocab_size: int, seed: int) -> list[list[int]]:
    """For a target without a tokenizer."""
    rng = np.random.default_rng(seed)
    return [list(map(int, row)) for row in rng.integers(vocab_size, size=(16, 8))]


def _name(spec: str) -> str:
    """A model's name without the folders above it."""
    return spec if ":" in spec else Path(spec).name or spec


def _check(given: argparse.Namespace) -> None:
    """Fill in threads and texts; ConfigurationError names the option that is wrong."""
    given.texts = demo.read_prompts(given.prompts) if given.prompts is not None else demo.chats()
    local = "ngram" if given.draft == NGRAM else "a draft head" if is_head(given.draft) else ""
    if given.rtt and local:
        raise ConfigurationError(f"--rtt: {given.rtt}: {local} drafts in the verifier, at no distance; leave it out")
    if given.threads is None:  # as `serve all` shares them out
        given.threads = max(1, available_cores() // (1 if local else 2))
    if given.out is not None:
        check_picture(given.out)
    for name, ok, fix in (
        ("temperatures", all(0 <= t <= 100 for t in given.temperatures), "use numbers from 0 to 100"),
        ("load", 1 <= given.load <= 256, "use 1 to 256 sessions"),
        ("rtt", 0 <= given.rtt <= 10_000, "use milliseconds from 0 to 10000"),
        ("nodes", 1 <= given.nodes <= 240, "use 1 to 240 nodes"),
        ("tokens", given.tokens >= 8, "use at least 8"),
        ("seconds", given.seconds > 0, "use more than 0"),
        ("threads", given.threads >= 1, "use at least 1"),
    ):
        if not ok:
            raise ConfigurationError(f"--{name}: {getattr(given, name)}: {fix}")


if __name__ == "__main__":
    sys.exit(main())
