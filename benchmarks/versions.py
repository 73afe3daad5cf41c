"""`python -m benchmarks.versions --other CHECKOUT --model FOLDER`: the services of this checkout beside those of another one.

    git worktree add ../before HEAD~1
    python -m benchmarks.versions --other ../before --model FOLDER --head rootward/demo/smollm2_head --out RESULT.json

Verifier and gateway of both run at the same time, and each request goes to one and then to the other; which is first changes by turns. A
machine whose speed changes from minute to minute (docs/log.md, lesson 6) changes both alike, so the ratio of each pair counts: its median,
and the number of pairs in which this checkout is faster. Times are those between tokens, over HTTP, of one session at a time, alone on the
machine or beside `--busy` processes that compute all the time. With `--between`, that many requests at once come before each of them: what
a verifier has learned from many sessions must not slow down one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.peers import HttpEngine, Job, completes, prompts_of
from benchmarks.results import command, cpu_model, save
from benchmarks.services import address_of, busy_process, free_port
from rootward.core.requests import SpeculationMode

PLAIN, AUTO, TREES = "plain", "auto", "trees"
HERE = Path(__file__).resolve().parent.parent
SETTLE_S = 0.3  # between two requests


def speculation(mode: str, nodes: int) -> Any:
    """The field of a request."""
    if mode == TREES:
        return {"mode": SpeculationMode.REQUIRED.value, "num_draft_tokens": nodes}
    return SpeculationMode.DISABLED.value if mode == PLAIN else SpeculationMode.AUTO.value


@asynccontextmanager
async def serving(checkout: Path, given: argparse.Namespace) -> AsyncIterator[str]:
    """The URL of a gateway of this checkout, with a verifier behind it."""
    python, model = sys.executable, str(given.model.resolve())
    flags = ["--model", model, "--num-threads", str(given.threads)]
    flags += ["--max-num-seqs", str(max(1, given.between))]
    if given.head is not None:
        flags += ["--local-draft", f"head:{given.head.resolve()}"]
    async with AsyncExitStack() as stack:
        own = (python, "-m", "verifier_service", "--listen", "127.0.0.1:0", *flags)
        verifier = await stack.enter_async_context(address_of(*own, cwd=checkout))
        http = f"127.0.0.1:{free_port()}"
        own = (python, "-m", "gateway", "--listen", "127.0.0.1:0", "--http-listen", http)
        await stack.enter_async_context(
            address_of(*own, "--model", model, "--verifiers", verifier, "--served-model-name", "model", cwd=checkout)
        )
        while not await completes(f"http://{http}"):
            await asyncio.sleep(0.5)
        yield f"http://{http}"


async def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """By mode and temperature: milliseconds a token of each pair, this checkout's first."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(one, given)) for one in (HERE, given.other)]
        for _ in range(given.busy):
            stack.enter_context(busy_process())
        series = [(mode, temperature) for temperature in given.temperatures for mode in given.modes]
        found: dict[tuple[str, float], list[list[float]]] = {key: [] for key in series}
        prompts = prompts_of(given, given.between + given.pairs + 1)
        others = tuple(prompts[: given.between])
        measured = prompts[given.between :]  # the first is a warm-up
        for turn, prompt in enumerate(track(measured, console=Console(stderr=True), description="pairs")):
            for mode, temperature in series:
                times = [0.0, 0.0]
                for side in (0, 1) if turn % 2 else (1, 0):
                    body = {"speculation": speculation(mode, given.nodes), "cache_salt": f"{mode} {turn}"}
                    engine = HttpEngine(mode, urls[side], "model", body)
                    if others:
                        await engine.run(Job(others, temperature, given.max_tokens, turn))
                        await asyncio.sleep(SETTLE_S)
                    run = await engine.run(Job((prompt,), temperature, given.max_tokens, turn))
                    times[side] = 1e3 * (run.seconds - run.first_token_s) / (run.tokens - 1)
                    await asyncio.sleep(SETTLE_S)
                if turn:
                    found[mode, temperature].append(times)
    return [{"mode": mode, "temperature": t, "ms_per_token": pairs} for (mode, t), pairs in found.items()]


def table_of(series: Sequence[dict[str, Any]]) -> Table:
    table = Table("system", "T", "this, ms", "other, ms", "this / other", "this faster", title=cpu_model())
    for one in series:
        pairs = one["ms_per_token"]
        ratios = [mine / other for mine, other in pairs]
        times = [f"{median(column):.1f}" for column in zip(*pairs, strict=True)]
        faster = f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}"
        table.add_row(one["mode"], f"{one['temperature']:g}", *times, f"{median(ratios):.3f}", faster)
    return table


@command
def main(argv: Sequence[str]) -> None:
    given = parser().parse_args(argv)
    given.other = given.other.resolve()
    series = asyncio.run(measure(given))
    Console().print(table_of(series))
    if given.out is not None:
        names = ("threads", "max_tokens", "nodes", "busy", "between")
        head = given.head.name if given.head is not None else None
        settings = {name: getattr(given, name) for name in names} | {"model": given.model.name, "head": head}
        save(given.out, {**settings, "series": series})


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=(__doc__ or "").splitlines()[0])
    add = found.add_argument
    add("--other", type=Path, required=True, help="folder of another checkout, such as a git worktree")
    add("--model", type=Path, required=True, help="folder of the target model")
    add("--head", type=Path, help="folder of its draft head (default: n-gram look-up)")
    add("--modes", nargs="+", choices=(PLAIN, AUTO, TREES), default=[PLAIN, AUTO, TREES])
    add("--temperatures", type=float, nargs="+", default=[0.0])
    add("--nodes", type=int, default=7, help="of `trees` (default 7)")
    add("--pairs", type=int, default=16, help="measured pairs of requests, after one warm-up (default 16)")
    add("--max-tokens", type=int, default=64, help="tokens of every answer (default 64)")
    add("--threads", type=int, default=2, help="CPU threads of the target (default 2)")
    add("--busy", type=int, default=0, help="processes beside them that compute all the time (default 0)")
    add("--between", type=int, default=0, help="requests at once before each measured one (default 0)")
    add("--prompts", type=Path, help="JSON lines with `text`, or plain lines (default: built-in questions)")
    add("--out", type=Path, help="JSON result")
    found.set_defaults(prompt_tokens=0)  # as in benchmarks.peers: no passage before the question
    return found


if __name__ == "__main__":
    sys.exit(main())
