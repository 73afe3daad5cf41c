"""Speed of the speculation controller relative to the best fixed number of draft nodes, measured through service processes.

Every repetition answers the same prompts without speculation, with each fixed number of nodes (`speculation: required`) and with the
controller, in shuffled order. `--against` adds the controller of another checkout of this repository, in processes of its own:

    python -m benchmarks.speculation                                # the demo pair
    python -m benchmarks.speculation --width 12992 --against /path  # an inflated target (300 M parameters), two controllers
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.inflate import save_inflated
from benchmarks.results import described
from benchmarks.services import generated, service
from rootward import demo
from rootward.core.requests import Sampling, Speculation, SpeculationMode, Stopping, VerifierRequest
from rootward.wire.clients import RemoteVerifier

CONTROLLER, OTHER = "controller", "other controller"


def options_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="speculation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--width", type=int, help="of the layers of an inflated target (default: the demo's target as it is)"
    )
    parser.add_argument("--layers", type=int, default=24, help="of the inflated target")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16], help="fixed numbers of nodes")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3, help="requests of each kind before the first repetition")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of a target")
    parser.add_argument("--against", type=Path, help="absolute path of another checkout of this repository")
    parser.add_argument("--verifier", nargs="*", default=[], metavar="NAME=VALUE", help="verifier settings")
    parser.add_argument("--work", type=Path, help="keep the inflated target here")
    return parser.parse_args(argv)


class Measured:
    """Results of one decoding mode."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.tokens = self.passes = 0

    def add(self, tokens: int, seconds: float, passes: int) -> None:
        self.rates.append(tokens / seconds)
        self.tokens += tokens
        self.passes += passes


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
    before = os.environ.get("PYTHONPATH", "")
    if checkout is not None:
        os.environ["PYTHONPATH"] = str(checkout)
    common = ["--max-model-len", "640", "--max-num-seqs", str(max(2, options.sessions)), "--log-level", "warning"]
    try:
        drafter = await stack.enter_async_context(service("drafter_service", "--model", str(models[1]), *common))
        more = [f"--{item.replace('_', '-')}" for item in options.verifier]
        flags = [
            "--model",
            str(models[0]),
            "--num-threads",
            str(options.threads),
            "--drafters",
            drafter,
            *common,
            *more,
        ]
        address = await stack.enter_async_context(service("verifier_service", *flags))
    finally:
        os.environ["PYTHONPATH"] = before
    remote = await stack.enter_async_context(RemoteVerifier(address))
    async with asyncio.timeout(60):
        while not (await remote.get_info()).drafters:
            await asyncio.sleep(0.02)
    return Client(remote, options.tokens)


async def measure(options: argparse.Namespace, work: Path) -> None:
    paths = demo.paths()
    target = paths.target
    if options.width:
        target = work / f"{options.layers}-{options.width}"
        if not target.exists():
            save_inflated(paths.target, target, options.layers, options.width)
    models = target, paths.draft
    encode = Tokenizer.from_file(str(paths.target / "tokenizer.json")).encode
    texts = [tuple(encode(prompt, add_special_tokens=False).ids[-128:]) for prompt in demo.prompts()]
    async with AsyncExitStack() as stack:
        client = await started(stack, models, options, None)
        modes = {"plain": (client, Speculation(SpeculationMode.DISABLED))}
        for nodes in options.nodes:
            modes[f"{nodes} nodes"] = client, Speculation(SpeculationMode.REQUIRED, num_draft_tokens=nodes)
        modes[CONTROLLER] = client, Speculation()
        if options.against is not None:
            modes[OTHER] = await started(stack, models, options, options.against), Speculation()
        print(described())
        for temperature in options.temperatures:
            found: dict[str, Measured] = defaultdict(Measured)
            for repetition in range(-options.warm_up, options.repetitions):
                prompts = [texts[(repetition * options.sessions + i) % len(texts)] for i in range(options.sessions)]
                names = list(modes)
                random.Random(repetition).shuffle(names)
                for name in names:
                    mode_client, wish = modes[name]
                    # Warm-up: one request with each fixed number of nodes, `warm_up` requests with each controller.
                    if repetition < 0 and (name == "plain" or (name.endswith("nodes") and repetition < -1)):
                        continue
                    result = await mode_client.answer(prompts, wish, temperature, 1000 * (repetition + options.warm_up))
                    if repetition >= 0:
                        found[name].add(*result)
                    await asyncio.sleep(0.05)
                if repetition >= 0:
                    report(temperature, found)


def report(temperature: float, found: dict[str, Measured]) -> None:
    """Print medians of tokens per second. The best fixed mode is the fastest of plain decoding and the fixed numbers of nodes."""
    rate = {name: statistics.median(one.rates) for name, one in found.items()}
    best = max(value for name, value in rate.items() if name not in (CONTROLLER, OTHER))
    print(f"T = {temperature:g}\n{'':18} tokens/s  tokens/pass  of best fixed")
    for name, one in found.items():
        print(f"{name:18} {rate[name]:8.1f}  {one.tokens / one.passes:11.2f}  {rate[name] / best:13.2f}", flush=True)


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, options.work or Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
