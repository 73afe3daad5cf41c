"""What the gateway costs: many streams of the demo pair through all services, and the same ones straight from the verifier.

    python benchmarks/gateway.py --streams 200 --tokens 64 --pairs 3 [--profile FILE]

Both ways take turns on the same processes, so that the ratio is one of the same minute on the same machine. Every stream is checked: all
tokens, in order, and the same text both ways (the requests are coupled).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median

from rootward import AsyncClient, SamplingParams, demo
from rootward.core.requests import Law, Rule, Speculation, Stopping, VerifierRequest
from rootward.rpc.clients import RemoteVerifier

READY_S = 120.0
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12)


@asynccontextmanager
async def service(module: str, *flags: str) -> AsyncIterator[str]:
    """Address of a service process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *module.split(), *flags, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            line = (await process.stdout.readline()).decode()
        yield line.partition(" listening on ")[2].split()[0]
    finally:
        process.terminate()
        await process.wait()


def request(name: str, seed: int, tokens: int) -> VerifierRequest:
    coupled = Speculation(rule=Rule.MATCH, law=Law.COUPLED)
    stopping = Stopping(tokens, ignore_eos=True)
    return VerifierRequest(name, PROMPT, stopping=stopping, speculation=coupled, seed=seed)


async def straight(verifier: RemoteVerifier, name: str, seed: int, tokens: int) -> tuple[int, ...]:
    got: list[int] = []
    async for run in verifier.generate(request(name, seed, tokens)):
        assert run.offset == len(got), name
        got += run.tokens
    return tuple(got)


async def through(client: AsyncClient, name: str, seed: int, tokens: int) -> tuple[int, ...]:
    got: list[int] = []
    sampling = SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)
    async for delta in client.stream(PROMPT, sampling=sampling, request_id=name):
        assert delta.offset == len(got), name
        got += delta.token_ids
    return tuple(got)


Way = Callable[[str, int, int], Awaitable[tuple[int, ...]]]


async def turn(way: Way, label: str, streams: int, tokens: int) -> tuple[float, list[tuple[int, ...]]]:
    """(tokens per second, what each stream got) of `streams` at once."""
    began = time.perf_counter()
    got = await asyncio.gather(*(way(f"{label}-{i}", i, tokens) for i in range(streams)))
    assert all(len(one) == tokens for one in got)
    return streams * tokens / (time.perf_counter() - began), list(got)


@asynccontextmanager
async def stack(streams: int, profile: str = "") -> AsyncIterator[tuple[RemoteVerifier, AsyncClient]]:
    """The demo pair as processes."""
    pair, loopback = demo.paths(), "127.0.0.1:0"
    async with AsyncExitStack() as running:
        enter = running.enter_async_context
        drafter = await enter(service("-m drafter_service", "--model", str(pair.draft), "--listen", loopback))
        flags = [
            "--drafters",
            drafter,
            "--listen",
            loopback,
            "--max-num-seqs",
            str(streams),
            "--max-num-queued-reqs",
            "1000",
        ]
        target = await enter(service("-m verifier_service", "--model", str(pair.target), *flags))
        flags = ["--verifiers", target, "--listen", loopback, "--http-listen", loopback, "--max-num-seqs", str(streams)]
        module = f"-m cProfile -o {profile} -m gateway" if profile else "-m gateway"
        front = await enter(service(module, "--model", str(pair.target), *flags))
        yield await enter(RemoteVerifier(target)), await enter(AsyncClient(front))


async def compare(streams: int, tokens: int, pairs: int, profile: str = "") -> dict[str, object]:
    """Ratios of tokens per second, through the gateway over straight, one per pair of turns; the first pair warms up."""
    rates: list[tuple[float, float]] = []
    async with stack(streams, profile) as (verifier, client):
        for number in range(pairs + 1):
            ways: list[tuple[str, Way]] = [
                ("straight", lambda *about: straight(verifier, *about)),
                ("through", lambda *about: through(client, *about)),
            ]
            done = {}
            for label, way in ways if number % 2 else reversed(ways):
                done[label] = await turn(way, f"{label}{number}", streams, tokens)
            assert done["straight"][1] == done["through"][1]
            rates.append((done["straight"][0], done["through"][0]))
    ratios = [through / straight for straight, through in rates[1:]]
    names = ("straight_tokens_per_s", "through_tokens_per_s")
    figures: dict[str, object] = {name: [round(r[i], 1) for r in rates[1:]] for i, name in enumerate(names)}
    return figures | {
        "streams": streams,
        "tokens": tokens,
        "ratios": [round(r, 3) for r in ratios],
        "median": round(median(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--profile", default="", help="file for cProfile of the gateway")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(compare(options.streams, options.tokens, options.pairs, options.profile))))


if __name__ == "__main__":
    main()
