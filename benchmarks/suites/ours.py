"""Our systems: verifier and drafter as objects in this process, or as processes that talk gRPC on loopback.

They are built by the services' own `build`, with the services' own defaults, and all targets of one process run on one thread, as each
would alone (`rootward.engine.threads`). Plain decoding is a verifier without drafters or local drafts.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.suites.models import Pair
from benchmarks.suites.paired import Job, Run
from drafter_service.__main__ import build as build_drafter
from drafter_service.settings import DrafterSettings
from rootward.core.requests import Finish, Sampling, Stopping, VerifierRequest
from rootward.engine.loading import load_model
from rootward.engine.threads import on_passing_thread
from rootward.ports import Verifier
from rootward.wire.clients import RemoteVerifier
from verifier_service.__main__ import build as build_verifier
from verifier_service.cost import measure as measure_cost
from verifier_service.settings import VerifierSettings

PLAIN, CONTROL = "ours, plain", "ours, plain again"
SPECULATION, PROCESSES = "ours, speculation", "ours, speculation, gRPC processes"
START_S, STOP_S = 180.0, 20.0
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all of our systems are built for."""

    sessions: int
    max_len: int
    threads: int
    draft_threads: int
    device: str = "cpu"
    dtype: str = "float32"
    more_verifier: tuple[tuple[str, Any], ...] = ()  # settings other than the defaults
    more_drafter: tuple[tuple[str, Any], ...] = ()

    def verifier(self, pair: Pair) -> VerifierSettings:
        return VerifierSettings(**self._common(pair.target, self.threads) | dict(self.more_verifier))

    def drafter(self, pair: Pair) -> DrafterSettings:
        return DrafterSettings(**self._common(pair.draft, self.draft_threads) | dict(self.more_drafter))

    def _common(self, folder: object, threads: int) -> dict[str, Any]:
        shape = {"max_num_seqs": max(2, self.sessions), "max_model_len": self.max_len, "num_threads": threads}
        return {"model": str(folder), "device": self.device, "dtype": self.dtype, **shape}


class OnThreads:
    """A language model whose forwards run on so many threads, whichever thread calls: in one process the services share torch."""

    def __init__(self, model: Any, num_threads: int):
        self._model, self._num_threads = model, num_threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.get_num_threads() != self._num_threads:  # of the calling thread
            torch.set_num_threads(self._num_threads)
        logits: torch.Tensor = self._model.forward(*args, **kwargs)
        return logits


class Ours:
    """A verifier, wherever it runs."""

    most_sessions: int | None = None
    chosen = ""

    def __init__(self, name: str, verifier: Verifier):
        self.name, self.verifier = name, verifier

    async def run(self, job: Job) -> Run:
        requests = [self._request(job, i) for i in range(len(job.prompts))]
        start_s = time.perf_counter()
        answers = await asyncio.gather(*(self._collect(request) for request in requests))
        run = Run([tokens for tokens, *_ in answers], time.perf_counter() - start_s)
        run.first_s = max(at_s for *_, at_s in answers) - start_s
        for _, finish, first, _ in answers:
            run.first += first
            stats = finish.stats
            run.passes += stats.num_spec_steps + stats.num_plain_steps
            run.drafted += stats.num_draft_tokens
            run.accepted += stats.num_accepted_draft_tokens
            run.speculated += stats.num_spec_steps
        return run

    @staticmethod
    def _request(job: Job, i: int) -> VerifierRequest:
        stopping = Stopping(job.max_tokens, ignore_eos=True)
        seed = job.seed * 1000 + i
        return VerifierRequest(f"job-{next(_numbers)}", job.prompts[i], Sampling(job.temperature), stopping, seed=seed)

    async def _collect(self, request: VerifierRequest) -> tuple[list[int], Finish, int, float]:
        """Tokens, how it ended, how many came first, and when."""
        tokens: list[int] = []
        finish, first, first_s = None, 0, 0.0
        async for run in self.verifier.generate(request):
            if not tokens:
                first, first_s = len(run.tokens), time.perf_counter()
            tokens += run.tokens
            finish = run.finish
        assert finish is not None
        return tokens, finish, first, first_s


@asynccontextmanager
async def plain(pair: Pair, sizes: Sizes, thread: ThreadPoolExecutor, name: str = PLAIN) -> AsyncIterator[Ours]:
    """A verifier without drafters, which looks nothing up either."""
    settings = sizes.verifier(pair).model_copy(update={"local_draft": "none"})
    target = await on_passing_thread(target_model, pair, sizes)
    async with build_verifier(target, [], settings, thread=thread) as verifier:
        yield Ours(name, verifier)


def control(pair: Pair, sizes: Sizes, thread: ThreadPoolExecutor) -> AbstractAsyncContextManager[Ours]:
    """The same once more, with a copy of the model of its own: how far two equal systems are apart on this machine."""
    return plain(pair, sizes, thread, CONTROL)


@asynccontextmanager
async def speculation(pair: Pair, sizes: Sizes, thread: ThreadPoolExecutor) -> AsyncIterator[Ours]:
    """A verifier and a drafter in this process, joined by their ports."""
    settings = sizes.drafter(pair)
    draft = await on_passing_thread(
        load_model,
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        max_slots=settings.max_num_seqs,
        max_len=settings.max_model_len,
        require_trees=True,
    )
    drafter = build_drafter(OnThreads(draft, sizes.draft_threads), settings)
    target = await on_passing_thread(target_model, pair, sizes)
    cost = await on_passing_thread(measure_cost, target)  # as the service does at its start
    verifier = build_verifier(target, [], sizes.verifier(pair), cost, {"drafter": drafter}, thread)
    async with drafter, verifier:
        await until_paired(verifier)
        yield Ours(SPECULATION, verifier)


@asynccontextmanager
async def processes(pair: Pair, sizes: Sizes, _: ThreadPoolExecutor) -> AsyncIterator[Ours]:
    """Both as processes of their own, as they are deployed; this one is the client."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        drafter = await enter(service("drafter_service", flags(sizes.drafter(pair))))
        verifier = await enter(service("verifier_service", [*flags(sizes.verifier(pair)), "--drafters", drafter]))
        remote = await enter(RemoteVerifier(verifier))
        await until_paired(remote)
        yield Ours(PROCESSES, remote)


def target_model(pair: Pair, sizes: Sizes) -> Any:
    """A target of its own for each verifier: nothing that one has cached helps another."""
    s = sizes.verifier(pair)
    model = load_model(s.model, device=s.device, dtype=s.dtype, max_slots=s.max_num_seqs, max_len=s.max_model_len)
    return OnThreads(model, sizes.threads)


async def until_paired(verifier: Verifier) -> None:
    """Return once the verifier has a drafter."""
    async with asyncio.timeout(START_S):
        while not (await verifier.get_info()).drafters:
            await asyncio.sleep(0.02)


def flags(settings: Any) -> list[str]:
    """Command line of a service with these settings, on a free port."""
    given = settings.model_dump(exclude_unset=True)
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None]
    return [*itertools.chain(*pairs), "--listen", "127.0.0.1:0"]


@asynccontextmanager
async def service(module: str, arguments: list[str]) -> AsyncIterator[str]:
    """A service process; yields its address. Ends it, and only it, at exit."""
    pipe = asyncio.subprocess.PIPE
    command: Callable[..., Any] = asyncio.create_subprocess_exec
    process = await command(sys.executable, "-m", module, *arguments, "--log-level", "warning", stdout=pipe)
    try:
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"listening on (\S+:\d+)", line)
        if found is None:
            raise RuntimeError(f"{module} did not start; run it with {' '.join(arguments)} to see why")
        yield found[1]
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
