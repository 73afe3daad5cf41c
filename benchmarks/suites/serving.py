"""Our decoding and transformers', side by side on one machine in one run.

Plain decoding, speculation (verifier and drafter in this process, or as processes over gRPC), transformers' generate, assisted
generation with the same draft, and prompt lookup: same prompts, same lengths, same seeds, interleaved repetitions. From the root of the
repository:

    python -m benchmarks.suites.serving --out OUT                         # the demo pair, one session, T = 0 and 1
    python -m benchmarks.suites.serving --inflate 300M --out OUT          # at the cost of a larger target
    python -m benchmarks.suites.serving --sessions 1 4 16 --out OUT       # load
    python -m benchmarks.suites.serving --positions 4352 --contexts 4096 --out OUT  # beyond the length they were trained on
    python -m benchmarks.suites.serving --quick --out OUT                 # does it run?
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from benchmarks.environment import described
from benchmarks.suites import baselines, ours, report
from benchmarks.suites.models import Pair, Prompts, prepare, token_prompts
from benchmarks.suites.paired import Job, Run, System, measure
from benchmarks.suites.report import Measured, Setting
from rootward import demo
from rootward.engine.threads import on_passing_thread
from rootward.errors import ConfigurationError
from rootward.settings import ask_for_huge_pages

PAUSE_S = 0.05  # before each run: growth for a session that has ended stops, threads stop spinning
SYSTEMS = ("plain", "control", "speculation", "processes", "transformers", "attribution")
QUICK = {"pairs": 2, "max_tokens": 12, "trials": 0, "assistant_tokens": [4], "sessions": [1, 2]}


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="serving", description=(__doc__ or "").splitlines()[0])
    paths = demo.paths()
    parser.add_argument("--out", type=Path, required=True, help="folder of serving.md, serving.json, serving.png")
    parser.add_argument("--target", type=Path, default=paths.target, help="folder of the target (default: demo)")
    parser.add_argument("--draft", type=Path, default=paths.draft, help="folder of the draft (default: demo)")
    parser.add_argument(
        "--inflate", metavar="N", help="parameters of the inflated target, such as 300M (default: as it is)"
    )
    parser.add_argument(
        "--positions",
        type=int,
        help="extend the models to so many positions by their configuration (default: as they are)",
    )
    parser.add_argument("--layers", type=int, default=24, help="layers of the inflated target")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["plain", "speculation", "transformers"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--sessions", type=int, nargs="+", default=[1], help="sessions that start together")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[0], help="tokens of a prompt; 0: prompts as they are"
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens made in a session")
    parser.add_argument("--pairs", type=int, default=5, help="repetitions")
    parser.add_argument(
        "--trials", type=int, default=1, help="jobs on which transformers' settings are chosen; 0: the first ones"
    )
    parser.add_argument(
        "--assistant-tokens", type=int, nargs="+", default=[3, 5], help="constant numbers of draft tokens tried"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads of every target")
    parser.add_argument("--draft-threads", type=int, default=1, help="torch threads of our drafter")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--verifier", nargs="*", default=[], metavar="NAME=VALUE", help="verifier settings to change")
    parser.add_argument("--drafter", nargs="*", default=[], metavar="NAME=VALUE", help="drafter settings to change")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="keep the inflated target here (default: a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="few short runs, to see that it works")
    options = parser.parse_args(argv)
    if options.quick:
        vars(options).update(QUICK)
    return options


def changed(items: Sequence[str], flag: str) -> tuple[tuple[str, Any], ...]:
    """NAME=VALUE settings."""
    wrong = next((item for item in items if "=" not in item), None)
    if wrong is not None:
        raise ConfigurationError(f"--{flag}: {wrong!r} is not NAME=VALUE; write for example num_draft_tokens=24")
    return tuple((name, value) for name, _, value in (item.partition("=") for item in items))


def fitting(contexts: Sequence[int], longest_prompt: int, most: int, max_tokens: int) -> tuple[list[int], str]:
    """Contexts that the models can hold, and a sentence if some had to be shortened."""
    room = most - max_tokens
    if longest_prompt > room:
        raise ConfigurationError(f"--max-tokens: {max_tokens} leaves {room} of {most} positions for prompts; use fewer")
    cut = [c for c in contexts if c > room]
    note = f"The models hold {most} tokens: contexts of {', '.join(map(str, cut))} were cut to {room}." if cut else ""
    return list(dict.fromkeys(min(c, room) for c in contexts)), note


async def run(options: argparse.Namespace, work: Path) -> None:
    """Build every system, measure every setting, write the report."""
    shape = (options.inflate, options.layers, work, options.positions)
    pair = await on_passing_thread(prepare, options.target, options.draft, *shape)
    texts = token_prompts(pair.original)
    most = min(max_positions(pair.target), max_positions(pair.draft))
    contexts, note = fitting(options.contexts, max(map(len, texts)), most, options.max_tokens)
    settings = [Setting(t, c, s) for t in options.temperatures for c in contexts for s in options.sessions]
    longest = max(*contexts, *map(len, texts)) + options.max_tokens
    sizes = ours.Sizes(
        sessions=max(options.sessions),
        max_len=min(most, longest),
        threads=options.threads,
        draft_threads=options.draft_threads,
        device=options.device,
        dtype=options.dtype,
        more_verifier=changed(options.verifier, "verifier"),
        more_drafter=changed(options.drafter, "drafter"),
    )
    head = described_run(options, pair, note)
    prompts = Prompts(texts, options.seed)
    async with AsyncExitStack() as stack:
        systems = await systems_of(options, pair, sizes, stack)
        found = []
        for setting in settings:
            found.append(await measured(options, setting, systems, prompts))
            # What is done is kept if a later setting fails.
            report.write(options.out, head, found, last=len(found) == len(settings))


async def systems_of(options: argparse.Namespace, pair: Pair, sizes: ours.Sizes, stack: AsyncExitStack) -> list[System]:
    """Everything that is compared, started."""
    torch.set_num_threads(options.threads)  # threads that torch has not seen yet take this over
    wanted = options.systems
    found: list[System] = []
    makers = {
        "plain": ours.plain,
        "control": ours.control,
        "speculation": ours.speculation,
        "processes": ours.processes,
    }
    thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="target"))
    for name, maker in makers.items():
        if name in wanted:
            found.append(await stack.enter_async_context(maker(pair, sizes, thread)))
    if "transformers" in wanted or "attribution" in wanted:
        worker = baselines.Worker(options.threads, thread)
        numbers, place = options.assistant_tokens, (options.device, options.dtype)
        packed = "attribution" in wanted
        made = partial(baselines.baselines, pair.target, pair.draft, worker, numbers, *place, packed=packed)
        found += await on_passing_thread(made)
    return found


async def measured(
    options: argparse.Namespace, setting: Setting, systems: Sequence[System], prompts: Prompts
) -> Measured:
    """One setting: warm up and tune, then the repetitions."""

    def jobs(num: int, first_seed: int) -> list[Job]:
        taken = [prompts.take(setting.sessions, setting.context) for _ in range(num)]
        seeds = range(first_seed, first_seed + num)
        return [Job(p, setting.temperature, options.max_tokens, s) for p, s in zip(taken, seeds, strict=True)]

    able = [s for s in systems if s.most_sessions is None or s.most_sessions >= setting.sessions]
    say(f"{setting.title()}: warming up")
    training = jobs(1 + options.trials, 10_000 + options.seed)
    for system in able:
        if isinstance(system, baselines.Baseline):
            await system.tune(training if len(system.variants) > 1 else training[:1])
        else:
            for job in training:
                await system.run(job)
    paired = await measure(able, jobs(options.pairs, options.seed), options.seed, pause, told)
    trials = {s.name: dict(s.trials) for s in able if isinstance(s, baselines.Baseline)}
    return Measured(setting, paired, {s.name: s.chosen for s in able}, trials)


async def pause() -> None:
    await asyncio.sleep(PAUSE_S)


def told(name: str, run: Run) -> None:
    say(f"  {name}: {run.tokens_per_s:.1f} tokens/s, {run.num_tokens / max(1, run.passes):.2f} a pass")


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def max_positions(folder: Path) -> int:
    """Of the configuration."""
    return int(AutoConfig.from_pretrained(folder).max_position_embeddings)


def described_run(options: argparse.Namespace, pair: Pair, note: str) -> dict[str, Any]:
    """What the report says before its numbers. No paths."""
    hidden = ("out", "target", "draft", "work")
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    return {
        "environment": described(),
        "device": device,
        "options": {name: value for name, value in vars(options).items() if name not in hidden},
        "pair": pair.described(),
        "inflated": pair.inflated,
        "pair_sentence": pair.sentence(),
        "context_note": note,
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    ask_for_huge_pages()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    start_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = options.work or Path(folder)
            asyncio.run(run(options, work))
    except ConfigurationError as wrong:
        print(f"serving: {wrong}", file=sys.stderr)
        return wrong.exit_code
    say(f"done in {time.monotonic() - start_s:.0f} s")
    print((options.out / "serving.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
