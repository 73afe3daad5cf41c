"""A running stream and a short prompt beside a long one: how long their readers wait while the engine reads the prompt of another request.

    python -m benchmarks.stalls --model FOLDER --systems rootward llama.cpp --gguf FILE --prompt-tokens 2000 --out RESULT.json

One request streams its answer. While it does, a second one comes with a passage of this repository's documentation, and soon after it a
third one with a short prompt; measured are the longest time without text of the first, and the times to the first tokens of the others.
What is said of the first is counted until the second has its first token. Engines start as in `benchmarks.peers`, and each repetition
runs them one after another while the others stand still.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from benchmarks import peers
from benchmarks.peers_report import NAMES
from benchmarks.results import command, described, markdown_table, save
from benchmarks.turns import balanced_order
from rootward.errors import ConfigurationError

SYSTEMS = ("rootward", "llama.cpp", "vllm")  # those with a server
QUESTION = "Write a long story about {}."
SHORT = "The capital of France is"
EVENTS_BEFORE = 40  # of the first stream, after which the second request comes
SHORT_AFTER_S = 0.1  # after which the third one comes
MAX_TOKENS = 1000  # of the first answer, which is cut off
OF_PEERS = (
    "--temperatures",
    "--batches",
    "--max-tokens",
    "--busy",
    "--prompts",
    "--show",
    "--more",
    "--readme",
    "--plot",
)


@dataclass(frozen=True, slots=True)
class Stall:
    """usual_s: median time between texts of the first stream before the second request comes; longest_s: the longest time without text
    after that; num_texts: of the first stream meanwhile; first_token_s, short_first_token_s: from sending the second and the third
    request to their first tokens."""

    usual_s: float
    longest_s: float
    first_token_s: float
    short_first_token_s: float
    num_texts: int


async def text_times(engine: peers.HttpEngine, prompt: str, max_tokens: int) -> AsyncIterator[float]:
    """The times at which text of a greedy answer arrives."""
    body = {
        "model": engine.model,
        "prompt": prompt,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(timeout=peers.ANSWER_S) as client,
        client.stream("POST", f"{engine.url}/v1/completions", json=body | engine.body) as answer,
    ):
        if answer.status_code != 200:
            raise RuntimeError(f"{engine.url}: {answer.status_code} {(await answer.aread()).decode()[:300]}")
        async for line in peers.event_lines(answer):
            choices = json.loads(line.removeprefix("data: ")).get("choices") if line.startswith("data: {") else None
            if choices and choices[0].get("text"):
                yield time.perf_counter()


async def stall(engine: peers.HttpEngine, question: str, passage: str) -> Stall:
    """RuntimeError if the first answer ends before the second begins."""
    times: list[float] = []
    second: asyncio.Task[float] | None = None
    third: asyncio.Task[float] | None = None

    async def first_token_s(prompt: str, after_s: float = 0.0) -> float:
        await asyncio.sleep(after_s)
        begin_s = time.perf_counter()
        async with aclosing(text_times(engine, prompt, 2)) as arriving:
            return await anext(arriving) - begin_s

    sent_s = 0.0
    async with aclosing(text_times(engine, question, MAX_TOKENS)) as arriving:
        async for arrived_s in arriving:
            times.append(arrived_s)
            if len(times) == EVENTS_BEFORE:
                sent_s, second = time.perf_counter(), asyncio.create_task(first_token_s(passage))
                third = asyncio.create_task(first_token_s(SHORT, SHORT_AFTER_S))
            if second is not None and second.done():
                break
        else:
            raise RuntimeError(f"{engine.url}: the first answer ended before the second began; give a shorter prompt")
    assert second is not None
    assert third is not None
    waited_s, short_waited_s = await second, await third
    end_s = sent_s + waited_s
    gaps = [(after - before, after) for before, after in itertools.pairwise(times)]
    return Stall(
        usual_s=median(gap for gap, after in gaps if after <= sent_s),
        longest_s=max(gap for gap, after in gaps if after > sent_s),
        first_token_s=waited_s,
        short_first_token_s=short_waited_s,
        num_texts=sum(sent_s < arrived_s <= end_s for arrived_s in times),
    )


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    from rich.console import Console
    from transformers import AutoTokenizer

    console = Console(stderr=True)
    passages = peers.passages(AutoTokenizer.from_pretrained(given.model), given.repeats + 1, given.prompt_tokens)
    found: dict[tuple[str, str], list[Stall]] = {}
    engines: dict[tuple[str, str], peers.HttpEngine] = {}
    processes: dict[str, set[psutil.Process]] = {}
    missing: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for system in given.systems:
            console.print(f"starting {system}")
            before = set(psutil.Process().children())
            try:
                for engine in await stack.enter_async_context(peers.STARTS[system](given)):
                    assert isinstance(engine, peers.HttpEngine)
                    engines[system, engine.mode] = engine
                processes[system] = set(psutil.Process().children()) - before
            except peers.MissingError as why:
                missing[system] = str(why)
                console.print(f"{system} is missing: {why}")
        for turn, passage in enumerate(passages):
            question = QUESTION.format(peers.TOPICS[turn % len(peers.TOPICS)])
            for key in balanced_order(list(engines), turn):
                async with peers.alone(key[0], processes):
                    one = await stall(engines[key], question, passage)
                console.print(f"{turn}: {', '.join(key)}: {one}")
                if turn:  # the first is a warm-up
                    found.setdefault(key, []).append(one)
    return {
        "format": "rootward-stalls/1",
        **described(),
        "versions": described()["versions"] | peers.versions(given, missing),
        "model": Path(given.model).name,
        **{name: getattr(given, name) for name in ("dtype", "threads", "repeats", "prompt_tokens")},
        "verifier_flags": " ".join(given.verifier_flags),
        "missing": missing,
        "series": [
            {"system": system, "mode": mode, "runs": [asdict(one) for one in runs]}
            for (system, mode), runs in found.items()
        ],
    }


def as_markdown(report: dict[str, Any]) -> str:
    """Medians over the repetitions, of the longest times their maximum as well."""

    def row(series: dict[str, Any]) -> list[str]:
        def values(name: str) -> list[float]:
            return [run[name] for run in series["runs"]]

        return [
            f"{NAMES[series['system']]}, {series['mode']}",
            f"{1e3 * median(values('usual_s')):.0f}",
            f"{1e3 * median(values('longest_s')):.0f}",
            f"{1e3 * max(values('longest_s')):.0f}",
            f"{median(values('num_texts')):.0f}",
            f"{median(values('first_token_s')):.1f}",
            f"{median(values('short_first_token_s')):.2f}",
        ]

    heads = (
        "",
        "usual, ms",
        "longest, ms",
        "longest of all runs, ms",
        "texts while the prompt is read",
        "first token of the second, s",
        "of the third, short, s",
    )
    title = f"{report['model']}, {report['dtype']}, {report['hardware']}, prompts of {report['prompt_tokens']} tokens"
    return f"{title}\n\n{markdown_table(heads, [row(series) for series in report['series']])}\n"


@command
def main(argv: Sequence[str]) -> None:
    found = peers.parser()
    found.prog, found.description = "python -m benchmarks.stalls", (__doc__ or "").splitlines()[0]
    found.set_defaults(systems=list(SYSTEMS), batches=[3], prompt_tokens=2000, max_model_len=4096, repeats=5)
    given = found.parse_args(argv)
    if other := next((word for word in argv if word.partition("=")[0] in OF_PEERS), None):
        raise ConfigurationError(f"{other}: is an option of benchmarks.peers alone; leave it out")
    if given.model is None:
        raise ConfigurationError("--model: missing; give the folder of the model")
    if unfit := set(given.systems) - set(SYSTEMS):
        raise ConfigurationError(f"--systems: {min(unfit)} has no server; choose from {', '.join(SYSTEMS)}")
    report = asyncio.run(measure(given))
    print(as_markdown(report))
    if given.out is not None:
        save(given.out, report)
        given.out.with_suffix(".md").write_text(as_markdown(report), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
