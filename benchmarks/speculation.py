"""Speed of the speculation controller relative to plain decoding and the best fixed number of draft nodes, measured through service
processes, by the number of concurrent sessions.

Every repetition answers the same prompts without speculation, with each fixed number of nodes (`speculation: required`) and with the
controller, in an order of its own (`benchmarks.turns`). Ratios are medians over the repetitions, each of which compares its own rates: a
machine whose speed changes from minute to minute (docs/log.md, lesson 6) changes both. `--head` takes drafts from a head in the verifier
instead of a drafter. `--against` adds the controller of another checkout of this repository, in processes of its own:

    python -m benchmarks.speculation                                   # the demo pair
    python -m benchmarks.inflate --size 300M --out TARGET              # a target of 300 M parameters that writes the same texts
    python -m benchmarks.speculation --target TARGET --out RESULT.json
    python -m benchmarks.speculation --target SMOLLM2 --head rootward/demo/smollm2_head --sessions 1 2 4 8 16 32 --out RESULT.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.results import described, markdown_table, mean_with_error, save
from benchmarks.services import generated, service
from benchmarks.turns import balanced_order
from rootward import demo
from rootward.core.requests import Sampling, Speculation, SpeculationMode, Stopping, VerifierRequest
from rootward.engine.tokenizers import load_tokenizer
from rootward.host import threads_of_drafters
from rootward.wire.clients import RemoteVerifier

CONTROLLER, OTHER = "controller", "other controller"


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="speculation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--target", type=Path, default=demo.paths().target, help="of the demo's draft (default: the demo's)"
    )
    parser.add_argument("--head", type=Path, help="draft head of the target, in the verifier")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16], help="fixed numbers of nodes")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3, help="requests of each kind before the first repetition")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1], help="numbers of concurrent sessions")
    parser.add_argument("--threads", type=int, default=2, help="of a target")
    parser.add_argument("--drafter-threads", type=int, help="default: half as many, as in `serve all`")
    parser.add_argument("--against", type=Path, help="absolute path of another checkout of this repository")
    parser.add_argument("--verifier", nargs="*", default=[], metavar="NAME=VALUE", help="verifier settings")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args(argv)
    options.drafter_threads = options.drafter_threads or threads_of_drafters(options.threads, 1)
    return options


class Measured:
    """Results of one decoding mode."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.tokens = self.passes = 0

    def add(self, tokens: int, seconds: float, passes: int) -> None:
        self.rates.append(tokens / seconds)
        self.tokens += tokens
        self.passes += passes

    def over(self, other: Measured) -> float:
        """Its tokens per second relative to those of another mode: the median over repetitions."""
        return statistics.median(own / its for own, its in zip(self.rates, other.rates, strict=True))


class Client:
    """Sends requests to one verifier process."""

    def __init__(self, verifier: RemoteVerifier, tokens: int) -> None:
        self._verifier, self._tokens, self._count = verifier, tokens, 0

    async def answer(
        self, prompts: list[tuple[int, ...]], wish: Speculation, temperature: float, seed: int
    ) -> tuple[int, float, int]:
        """(tokens, seconds, target passes) of concurrent answers to the prompts."""
        start_s = time.perf_counter()
        found = await asyncio.gather(*(self._one(p, wish, temperature, seed + i) for i, p in enumerate(prompts)))
        return sum(n for n, _ in found), time.perf_counter() - start_s, sum(passes for _, passes in found)

    async def _one(self, prompt: tuple[int, ...], wish: Speculation, temperature: float, seed: int) -> tuple[int, int]:
        self._count += 1
        request = VerifierRequest(
            f"request-{self._count}",
            prompt,
            Sampling(temperature),
            Stopping(self._tokens, ignore_eos=True),
            wish,
            seed=seed,
            cache_salt=str(self._count),
        )
        tokens, stats = await generated(self._verifier, request)
        return len(tokens), stats.num_spec_steps + stats.num_plain_steps


async def started(
    stack: AsyncExitStack, models: tuple[Path, Path], options: argparse.Namespace, checkout: Path | None
) -> Client:
    """A client of a new verifier and drafter. checkout: the directory whose code they run (None: this one)."""
    before = dict(os.environ)
    if checkout is not None:  # without the second one the working directory would come first
        os.environ |= {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    common = ["--max-model-len", "640", "--max-num-seqs", str(max(2, *options.sessions)), "--log-level", "warning"]
    try:
        if options.head is not None:
            source = ["--local-draft", f"head:{options.head}"]
        else:
            of_drafter = ("--model", str(models[1]), "--num-threads", str(options.drafter_threads), *common)
            drafter = await stack.enter_async_context(service("drafter_service", *of_drafter))
            source = ["--drafters", drafter, "--num-ahead-tokens", "0"]  # on one machine
        more = [f"--{item.replace('_', '-')}" for item in options.verifier]
        of_verifier = ("--model", str(models[0]), "--num-threads", str(options.threads))
        address = await stack.enter_async_context(service("verifier_service", *of_verifier, *source, *common, *more))
    finally:
        os.environ.clear()
        os.environ |= before
    remote = await stack.enter_async_context(RemoteVerifier(address))
    async with asyncio.timeout(60):
        while options.head is None and not (await remote.get_info()).drafters:
            await asyncio.sleep(0.02)
    return Client(remote, options.tokens)


def prompts_of(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Chats with the target of a head; continuations of text for the demo's pair."""
    if options.head is None:
        encode = Tokenizer.from_file(str(demo.paths().target / "tokenizer.json")).encode
        return [tuple(encode(prompt, add_special_tokens=False).ids[-128:]) for prompt in demo.prompts()]
    tokenizer = load_tokenizer(str(options.target))
    chats = [[{"role": "user", "content": text}] for text in demo.chats()]
    return [tuple(tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)) for c in chats]


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians by number of sessions, temperature and decoding mode."""
    models = options.target, demo.paths().draft
    rows: list[dict[str, Any]] = []
    texts = prompts_of(options)
    async with AsyncExitStack() as stack:
        client = await started(stack, models, options, None)
        modes = {"plain": (client, Speculation(SpeculationMode.DISABLED))}
        for nodes in options.nodes:
            modes[f"{nodes} nodes"] = client, Speculation(SpeculationMode.REQUIRED, num_draft_tokens=nodes)
        modes[CONTROLLER] = client, Speculation()
        if options.against is not None:
            modes[OTHER] = await started(stack, models, options, options.against), Speculation()
        print(described())
        for sessions, temperature in itertools.product(options.sessions, options.temperatures):
            found: dict[str, Measured] = defaultdict(Measured)
            for repetition in range(-options.warm_up, options.repetitions):
                prompts = [texts[(repetition * sessions + i) % len(texts)] for i in range(sessions)]
                for name in balanced_order(list(modes), repetition):
                    mode_client, wish = modes[name]
                    # Warm-up: one request with each fixed number of nodes, `warm_up` requests with each controller.
                    if repetition < 0 and (name == "plain" or (name.endswith("nodes") and repetition < -1)):
                        continue
                    result = await mode_client.answer(prompts, wish, temperature, 1000 * (repetition + options.warm_up))
                    if repetition >= 0:
                        found[name].add(*result)
                    await asyncio.sleep(0.05)
                setting = f"{sessions} sessions, T = {temperature:g}"
                print(f"{setting}: {repetition + 1} of {options.repetitions} repetitions", file=sys.stderr, flush=True)
            print(f"\n{sessions} sessions, T = {temperature:g}")
            of_setting = summary(sessions, temperature, found)
            print_table(of_setting)
            rows += of_setting
    return rows


def summary(sessions: int, temperature: float, found: dict[str, Measured]) -> list[dict[str, Any]]:
    """Median tokens per second of each mode, and ratios. The best fixed mode is that with the highest ratio to plain decoding among plain
    decoding itself and the fixed numbers of nodes."""
    plain = found["plain"]
    best = max((one for name, one in found.items() if name not in (CONTROLLER, OTHER)), key=lambda one: one.over(plain))
    return [
        {
            "sessions": sessions,
            "temperature": temperature,
            "mode": name,
            "tokens_per_s": statistics.median(one.rates),
            "rates": [round(rate, 2) for rate in one.rates],
            "tokens_per_pass": one.tokens / one.passes,
            "of_plain": one.over(plain),
            "of_best_fixed": one.over(best),
        }
        for name, one in found.items()
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    names = ("tokens_per_s", "tokens_per_pass", "of_plain", "of_best_fixed")
    plain = next(row["rates"] for row in rows if row["mode"] == "plain")
    cells = []
    for row in rows:
        mean = mean_with_error([own / its for own, its in zip(row["rates"], plain, strict=True)])
        cells.append([row["mode"], *(f"{row[name]:.2f}" for name in names), mean])
    header = ["mode", "tokens/s", "tokens a pass", "of plain", "of best fixed", "of plain, mean ± standard error"]
    print(markdown_table(header, cells), flush=True)


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    rows = asyncio.run(measure(options))
    if options.out is not None:
        used = {"target": options.target.name, "repetitions": options.repetitions}
        used |= {"tokens": options.tokens, "threads": options.threads, "drafter_threads": options.drafter_threads}
        save(options.out, {**used, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
