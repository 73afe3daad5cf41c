"""Starts services as processes on loopback, runs sessions on them and reads their metrics."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from rootward.addresses import open_local, reserved_port
from rootward.clock import SystemClock
from rootward.core.requests import Sampling, Speculation, SpeculationStats, Stopping, VerifierRequest
from rootward.errors import ConfigurationError
from rootward.guard import exit_on_sigterm
from rootward.ports import Verifier
from rootward.wire.clients import RemoteVerifier

START_S = 600.0
STOP_S = 10.0
SCRAPE_S = 10.0
DRAFTERS_S = 60.0  # for a verifier to connect its drafters
_LISTENING = re.compile(r"listening on (\S+:\d+)")


def service(module: str, *flags: str) -> AbstractAsyncContextManager[str]:
    """The gRPC address of a service started on a free port. ConfigurationError if it does not start."""
    return address_of(sys.executable, "-m", module, "--listen", "127.0.0.1:0", *flags)


@asynccontextmanager
async def address_of(*command: str, cwd: Path | None = None) -> AsyncIterator[str]:
    """The address that a process announces; the process is stopped on exit, also by SIGTERM. cwd: folder that it runs in."""
    with exit_on_sigterm():
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL, cwd=cwd)
        try:
            yield await _address(process, command)
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _address(process: asyncio.subprocess.Process, command: Sequence[str]) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        while line := await process.stdout.readline():
            if found := _LISTENING.search(line.decode(errors="replace")):
                return found[1]
    raise ConfigurationError(
        f"{' '.join(command[1:3])}: did not start, exit code {await process.wait()}; run it by hand to see why"
    )


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that takes all it can get of a core."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


_reserved = ExitStack()


def free_port() -> int:
    """A port of 127.0.0.1 that no other process gets by chance as long as this one runs."""
    return _reserved.enter_context(reserved_port())


def scraped(admin: str) -> dict[str, float]:
    """Metrics of an admin port: `name` → sum over labels, and `name:LABEL_VALUE` → value of metrics with one label."""
    with open_local(f"http://{admin}/metrics", timeout_s=SCRAPE_S) as answer:
        text = answer.read().decode()
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
            for value in sample.labels.values():
                found[f"{sample.name}:{value}"] += sample.value
    return found


@asynccontextmanager
async def verifier_with_drafters(address: str, num_drafters: int) -> AsyncIterator[RemoteVerifier]:
    """A verifier once it has so many drafters."""
    async with RemoteVerifier(address) as verifier:
        async with asyncio.timeout(DRAFTERS_S):
            while len((await verifier.get_info()).drafters) < num_drafters:
                await asyncio.sleep(0.05)
        yield verifier


LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """Concurrent sessions with `max_tokens` output tokens each, at temperature 1. name: prefix of request ids; seed: that of the first
    session, counted up for the others."""

    sessions: int
    max_tokens: int
    speculation: Speculation
    name: str
    prompt: tuple[int, ...] = (1, 2, 3)
    seed: int = 0

    def scaled(self, share: float) -> Load:
        return replace(self, max_tokens=max(1, int(share * self.max_tokens)), name=f"{self.name}-warm")


@dataclass(frozen=True, slots=True)
class Outcome:
    """rate: mean tokens per second of a session, from its first to its last run of tokens. The rest are sums over sessions."""

    rate: float
    rounds: int
    tree_rounds: int
    accepted: int

    @property
    def block_efficiency(self) -> float:
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def with_tree(self) -> float:
        """Share of rounds that had a tree."""
        return self.tree_rounds / self.rounds if self.rounds else 0.0


async def generated(verifier: Verifier, request: VerifierRequest) -> tuple[list[int], SpeculationStats]:
    """The tokens of a request and its statistics."""
    tokens: list[int] = []
    stats = SpeculationStats()
    async for run in verifier.generate(request):
        tokens += run.tokens
        stats = run.finish.stats if run.finish is not None else stats
    return tokens, stats


async def measured(verifier: Verifier, load: Load) -> Outcome:
    """The outcome of a load, whose sessions start together."""
    async with asyncio.timeout(LONGEST_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(_session(verifier, load, number)) for number in range(load.sessions)]
    rates, stats = zip(*(task.result() for task in tasks), strict=True)
    return Outcome(
        sum(rates) / len(rates),
        sum(s.num_spec_steps + s.num_plain_steps for s in stats),
        sum(s.num_spec_steps for s in stats),
        sum(s.num_accepted_draft_tokens for s in stats),
    )


async def _session(verifier: Verifier, load: Load, number: int) -> tuple[float, SpeculationStats]:
    """(tokens per second after the first run of tokens, statistics)."""
    clock, tokens, stats = SystemClock(), 0, SpeculationStats()
    first = last = 0.0
    request = VerifierRequest(
        f"{load.name}-{number}",
        load.prompt,
        Sampling(1.0),
        Stopping(load.max_tokens, ignore_eos=True),
        load.speculation,
        seed=load.seed + number,
    )
    async for run in verifier.generate(request):
        last = clock.now()
        tokens += len(run.tokens) if first else 0
        first = first or last
        stats = run.finish.stats if run.finish is not None else stats
    return tokens / (last - first) if last > first else 0.0, stats
