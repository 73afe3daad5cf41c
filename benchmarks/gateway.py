"""What the gateway costs: many streams of the demo pair through all services, and the same ones straight from the verifier.

    python benchmarks/gateway.py --streams 200 --tokens 32 --pairs 5 [--profile FILE]

Straight is one stream of the verifier per request; by feed, one for all of them, as the gateway itself does. The ways take turns on the
same processes, so that a ratio is one of the same minute on the same machine. Every stream is checked: all tokens, in order, and the same
text every way (the requests are coupled).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rootward import AsyncClient, SamplingParams, demo
from rootward.core.requests import DraftMode, Rule, Speculation, Stopping, VerifierRequest
from rootward.v1 import verifier_pb2_grpc
from rootward.wire.channel import open_channel
from rootward.wire.clients import RemoteVerifier
from rootward.wire.codec import from_pb, to_pb

READY_S = 120.0
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12)


@dataclass
class Running:
    """A service process. Its CPU time is what the kernel says, on Linux."""

    address: str
    pid: int

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def service(module: str, *flags: str) -> AsyncIterator[Running]:
    """A service, listening."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *module.split(), *flags, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            line = (await process.stdout.readline()).decode()
        yield Running(line.partition(" listening on ")[2].split()[0], process.pid)
    finally:
        process.terminate()
        await process.wait()


def request(name: str, seed: int, tokens: int) -> VerifierRequest:
    coupled = Speculation(rule=Rule.MATCH, law=DraftMode.COUPLED)
    stopping = Stopping(tokens, ignore_eos=True)
    return VerifierRequest(name, PROMPT, stopping=stopping, speculation=coupled, seed=seed)


async def straight(verifier: verifier_pb2_grpc.VerifierStub, name: str, seed: int, tokens: int) -> tuple[int, ...]:
    got: list[int] = []
    async for message in verifier.Generate(to_pb(request(name, seed, tokens))):
        run = from_pb(message)
        assert run.offset == len(got), name
        got += run.tokens
    return tuple(got)


async def by_feed(verifier: RemoteVerifier, name: str, seed: int, tokens: int) -> tuple[int, ...]:
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


@dataclass
class Stack:
    """The demo pair as processes."""

    services: dict[str, Running]
    stub: verifier_pb2_grpc.VerifierStub
    verifier: RemoteVerifier
    client: AsyncClient

    def cpu_s(self) -> dict[str, float]:
        return {name: one.cpu_s() for name, one in self.services.items()} | {"client": time.process_time()}


@asynccontextmanager
async def stack(streams: int, profile: str = "") -> AsyncIterator[Stack]:
    pair, listen = demo.paths(), ("--listen", "127.0.0.1:0")
    async with AsyncExitStack() as running:
        enter = running.enter_async_context
        drafter = await enter(service("-m drafter_service", "--model", str(pair.draft), *listen))
        room = ("--max-num-seqs", str(streams))
        flags = (
            "--model",
            str(pair.target),
            "--drafters",
            drafter.address,
            *listen,
            *room,
            "--max-num-queued-reqs",
            "1000",
        )
        verifier = await enter(service("-m verifier_service", *flags))
        module = f"-m cProfile -o {profile} -m gateway" if profile else "-m gateway"
        flags = (
            "--model",
            str(pair.target),
            "--verifiers",
            verifier.address,
            *listen,
            "--http-listen",
            "127.0.0.1:0",
            *room,
        )
        gateway = await enter(service(module, *flags))
        services = {"drafter": drafter, "verifier": verifier, "gateway": gateway}
        stub = verifier_pb2_grpc.VerifierStub(await enter(open_channel(verifier.address)))
        client = await enter(AsyncClient(gateway.address))
        yield Stack(services, stub, await enter(RemoteVerifier(verifier.address)), client)


@dataclass
class Turn:
    """All streams once, one way."""

    tokens_per_s: float
    cpu_ms: dict[str, float]  # per token, by process
    got: list[tuple[int, ...]]


async def turn(stack: Stack, way: Way, label: str, streams: int, tokens: int) -> Turn:
    began, before = time.perf_counter(), stack.cpu_s()
    got = await asyncio.gather(*(way(f"{label}-{i}", i, tokens) for i in range(streams)))
    assert all(len(one) == tokens for one in got)
    total, seconds = streams * tokens, time.perf_counter() - began
    cpu_ms = {name: 1e3 * (now - before[name]) / total for name, now in stack.cpu_s().items()}
    return Turn(total / seconds, cpu_ms, list(got))


async def compare(streams: int, tokens: int, pairs: int, profile: str = "") -> dict[str, object]:
    """Figures of each way, and of the ratios of its tokens/s, through the gateway over each. A first round warms up."""
    done: dict[str, list[Turn]] = {"straight": [], "by_feed": [], "through": []}
    async with stack(streams, profile) as running:
        ways: dict[str, Way] = {
            "straight": lambda *about: straight(running.stub, *about),
            "by_feed": lambda *about: by_feed(running.verifier, *about),
            "through": lambda *about: through(running.client, *about),
        }
        for number in range(pairs + 1):
            for label in sorted(ways, reverse=number % 2 > 0):
                done[label].append(await turn(running, ways[label], f"{label}{number}", streams, tokens))
            assert done["straight"][-1].got == done["by_feed"][-1].got == done["through"][-1].got
    measured = {label: turns[1:] for label, turns in done.items()}
    about: dict[str, object] = {"streams": streams, "tokens": tokens}
    for label in ("straight", "by_feed"):
        about[f"through / {label}"] = ratios(measured["through"], measured[label])
    return about | {label: figures(turns) for label, turns in measured.items()}


def ratios(above: list[Turn], below: list[Turn]) -> dict[str, object]:
    """Of pairs of turns of the same minute."""
    found = [round(a.tokens_per_s / b.tokens_per_s, 3) for a, b in zip(above, below, strict=True)]
    return {"median": median(found), "pairs": found}


def figures(turns: list[Turn]) -> dict[str, object]:
    """Medians."""
    cpu_ms = {name: round(median(t.cpu_ms[name] for t in turns), 3) for name in turns[0].cpu_ms}
    return {"tokens_per_s": round(median(t.tokens_per_s for t in turns), 1), "cpu_ms_per_token": cpu_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--profile", default="", help="file for cProfile of the gateway")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(compare(options.streams, options.tokens, options.pairs, options.profile))))


if __name__ == "__main__":
    main()
