"""Greedy texts of a model through the services, compared with plain decoding of one request at a time: they must be equal, token by token.

    python -m benchmarks.equality --model FOLDER --head HEAD --dtype bfloat16 --out RESULT.json

Compared are plain decoding and every kind of draft (n-grams, a draft head, a draft model), one request and 16 at a time, a verifier whose
KV memory is too small for its sessions, and two verifiers of which one is killed (SIGKILL) at a time while requests run. The exit code is 3
if one text differs; a target that is not `lossless: bitwise` (`rootward status`) does not promise that none does.

The draft model is the target itself in float32: it proposes what a good draft model would, at a price that does not matter here.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers import TASKS, TOPICS
from benchmarks.results import save
from benchmarks.services import free_port, service
from rootward import demo
from rootward.client import AsyncClient, SamplingParams, Speculation

TEXTS = [task.format(topic) for topic, task in product((*TOPICS, "a lighthouse"), TASKS)]
AT_ONCE = 16
NGRAMS = Speculation(mode="required", drafter="ngram")
CONTEXT = 512  # longest request, in tokens
KILL_EVERY_S = 6.0  # from a verifier's restart to the next kill


@dataclass(frozen=True, slots=True)
class Comparison:
    """differ: of `texts`. happened: what the comparison is about (preemptions, kills), as often as it occurred."""

    name: str
    texts: int
    differ: int
    tokens: int
    accepted_draft_tokens: int
    seconds: float
    happened: int | None = None


class Runs:
    """Greedy generations of the same texts; the first ones are what all others are compared with."""

    def __init__(self, texts: Sequence[str], max_tokens: int) -> None:
        self._texts = texts
        self._sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._expected: list[tuple[int, ...]] = []
        self.found: list[Comparison] = []

    async def compare(
        self, name: str, client: AsyncClient, *, speculation: str | Speculation, at_once: int, happened: Any = None
    ) -> None:
        """happened: called afterwards for how often it did."""
        slots = asyncio.Semaphore(at_once)
        start_s = time.perf_counter()

        async def one(text: str) -> Any:
            async with slots:
                messages = [{"role": "user", "content": text}]
                return await client.generate(messages=messages, sampling=self._sampling, speculation=speculation)

        results = await asyncio.gather(*map(one, self._texts))
        tokens = [tuple(result.token_ids) for result in results]
        self._expected = self._expected or tokens
        done = Comparison(
            name=name,
            texts=len(tokens),
            differ=sum(a != b for a, b in zip(tokens, self._expected, strict=True)),
            tokens=sum(map(len, tokens)),
            accepted_draft_tokens=sum(result.speculation.num_accepted_draft_tokens for result in results),
            seconds=round(time.perf_counter() - start_s, 1),
            happened=None if happened is None else await happened(),
        )
        self.found.append(done)
        print(f"{name}: {done.differ} of {done.texts} differ, {done.seconds:.0f} s", file=sys.stderr, flush=True)


@asynccontextmanager
async def gateway(given: argparse.Namespace, *verifiers: str) -> AsyncIterator[AsyncClient]:
    flags = ("--model", str(given.model), "--verifiers", ",".join(verifiers), "--http-listen", "127.0.0.1:0")
    async with service("gateway", *flags) as address, AsyncClient(address, timeout=600.0) as client:
        while not any(verifier.ready for verifier in (await client.server_info()).verifiers):
            await asyncio.sleep(0.2)
        yield client


@asynccontextmanager
async def served(given: argparse.Namespace, *flags: str) -> AsyncIterator[AsyncClient]:
    """A client of a gateway with one verifier."""
    async with (
        service("verifier_service", *verifier_flags(given), *flags) as address,
        gateway(given, address) as client,
    ):
        yield client


def verifier_flags(given: argparse.Namespace) -> tuple[str, ...]:
    flags = ("--model", str(given.model), "--dtype", given.dtype, "--num-threads", str(given.threads))
    return (*flags, "--max-num-seqs", str(AT_ONCE), "--max-model-len", str(CONTEXT))


class Verifier:
    """A verifier process that is killed and started again on the same port."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._command = (sys.executable, "-m", "verifier_service", "--listen", self.address, *verifier_flags(given))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=DEVNULL, stderr=DEVNULL)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class Kills:
    """Kills verifiers in turn, the next one when the last one is ready again."""

    def __init__(self, verifiers: Sequence[Verifier], client: AsyncClient) -> None:
        self._verifiers = verifiers
        self._client = client
        self._num = 0

    async def number(self) -> int:
        return self._num

    async def run(self) -> None:
        while True:
            for verifier in self._verifiers:
                while sum(known.ready for known in (await self._client.server_info()).verifiers) < len(self._verifiers):
                    await asyncio.sleep(0.2)
                await asyncio.sleep(KILL_EVERY_S)
                await verifier.kill()
                self._num += 1
                await verifier.start()


async def with_kills(given: argparse.Namespace, runs: Runs) -> None:
    verifiers = [Verifier(given), Verifier(given)]
    try:
        for verifier in verifiers:
            await verifier.start()
        async with gateway(given, *(verifier.address for verifier in verifiers)) as client:
            kills = Kills(verifiers, client)
            killing = asyncio.create_task(kills.run())
            name = f"n-grams, {AT_ONCE} at a time, two verifiers, killed in turn"
            await runs.compare(name, client, speculation=NGRAMS, at_once=AT_ONCE, happened=kills.number)
            killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing
    finally:
        for verifier in verifiers:
            await verifier.kill()


async def measure(given: argparse.Namespace) -> list[Comparison]:
    runs = Runs(TEXTS[: given.texts], given.max_tokens)
    async with served(given) as client:
        level = (await client.server_info()).models[0].lossless
        print(f"lossless: {level}", file=sys.stderr)
        await runs.compare("plain, one at a time", client, speculation="disabled", at_once=1)
        await runs.compare(f"plain, {AT_ONCE} at a time", client, speculation="disabled", at_once=AT_ONCE)
        await runs.compare("n-grams, one at a time", client, speculation=NGRAMS, at_once=1)
        await runs.compare(f"n-grams, {AT_ONCE} at a time", client, speculation=NGRAMS, at_once=AT_ONCE)
    if given.head:
        async with served(given, "--local-draft", f"head:{given.head}") as client:
            await runs.compare("draft head, one at a time", client, speculation="required", at_once=1)
            await runs.compare(f"draft head, {AT_ONCE} at a time", client, speculation="required", at_once=AT_ONCE)
    async with AsyncExitStack() as stack:
        drafter_flags = ("--model", str(given.model), "--dtype", "float32", "--num-threads", str(given.threads))
        drafter_flags += ("--max-model-len", str(CONTEXT))
        drafter = await stack.enter_async_context(service("drafter_service", *drafter_flags))
        client = await stack.enter_async_context(served(given, "--drafters", drafter, "--local-draft", "none"))
        await runs.compare("draft model, one at a time", client, speculation="required", at_once=1)
        await runs.compare(f"draft model, {AT_ONCE} at a time", client, speculation="required", at_once=AT_ONCE)
    async with served(given, "--kv-cache-tokens", str(given.kv_cache_tokens)) as client:

        async def preemptions() -> int:
            return int(sum(v.stats["num_preemptions_total"] for v in (await client.load()).verifiers))

        name = f"n-grams, {AT_ONCE} at a time, KV memory for {given.kv_cache_tokens} tokens"
        await runs.compare(name, client, speculation=NGRAMS, at_once=AT_ONCE, happened=preemptions)
    await with_kills(given, runs)
    return runs.found


def table_of(found: Sequence[Comparison], title: str) -> Table:
    table = Table("compared with plain decoding of one request", title=title, title_justify="left")
    for column in ("texts", "differ", "tokens", "accepted drafts", "preempted or killed", "s"):
        table.add_column(column, justify="right")
    for one in found:
        happened = "" if one.happened is None else str(one.happened)
        numbers = (one.texts, one.differ, one.tokens, one.accepted_draft_tokens, happened, one.seconds)
        table.add_row(one.name, *map(str, numbers))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--head", type=Path, default=demo.smollm2_head(), help="draft head of the target")
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--texts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--kv-cache-tokens", type=int, default=1600, help="of the verifier that preempts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON result")
    given = parser.parse_args(argv)
    found = asyncio.run(measure(given))
    title = f"{given.model.name}, {given.dtype}, {given.max_tokens} tokens a text"
    Console(width=120).print(table_of(found, title))
    if given.out:
        rows = [asdict(one) for one in found]
        save(given.out, {"model": given.model.name, "dtype": given.dtype, "rows": rows})
    return 3 if any(one.differ for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
