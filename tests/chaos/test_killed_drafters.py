"""kill -9 of drafters at random moments under 16 streams: no request fails or changes, none waits twice for one death, speculation returns.

Drafters are found in the registry: each new process has a new port.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from support.processes import Service, drafter, verifier
from support.redis import running_redis
from support.services import collect, request, until

from rootward.core.requests import SpeculationMode, SpeculationStats, VerifierRequest
from rootward.errors import NoDrafter
from rootward.wire.clients import RemoteDrafter, RemoteVerifier

TARGET = "tabular:vocab=8,seed=3,sharpness=2"
DRAFT = "tabular:vocab=8,seed=3,sharpness=2,noise=0.4,noise_seed=1"
STREAMS = 16
TOKENS = 200
WAIT_S = 5.0  # a session that waits in vain would show
RECOVERY_S = 120.0


def wanted(stream: int, number: int, mode: SpeculationMode) -> VerifierRequest:
    prompt = (1 + stream % 7, stream // 7 + 1, 2)
    return request(f"{mode.value}-{stream}-{number}", prompt, temperature=0.0, max_tokens=TOKENS, mode=mode)


@dataclass
class Run:
    """One verifier, drafters that are replaced when they die, and what the streams have seen."""

    target: RemoteVerifier
    processes: ExitStack
    redis_url: str
    model: str
    alive: list[Service] = field(default_factory=list)
    stats: list[SpeculationStats] = field(default_factory=list)
    required: list[SpeculationStats] = field(default_factory=list)  # those that wait for trees as long as they may
    num_kills: int = 0
    ended: bool = False

    async def add_drafter(self) -> None:
        flags = ["--redis-url", self.redis_url]
        self.alive.append(await asyncio.to_thread(self.processes.enter_context, drafter(self.model, *flags)))

    async def kill(self, victim: Service) -> None:
        self.alive.remove(victim)
        self.num_kills += 1
        await asyncio.to_thread(victim.kill)

    async def stream(self, number: int, expected: list[int]) -> None:
        """One generation after the other."""
        count = 0
        while not self.ended:
            count += 1
            try:
                stats = await self.generation(wanted(number, count, SpeculationMode.REQUIRED), expected)
                self.required.append(stats)
            except NoDrafter:  # at admission, as promised; one that runs goes on without
                stats = await self.generation(wanted(number, count, SpeculationMode.AUTO), expected)
            self.stats.append(stats)

    async def generation(self, request: VerifierRequest, expected: list[int]) -> SpeculationStats:
        tokens: list[int] = []
        finish = None
        async for run in self.target.generate(request):
            assert run.offset == len(tokens)
            tokens += run.tokens
            finish = run.finish
        assert tokens == expected
        assert finish is not None
        return finish.stats

    async def speculates(self) -> bool:
        """All drafters that live hold trees."""
        for process in self.alive:
            async with RemoteDrafter(process.address) as remote:
                if not (await remote.get_info()).load.sessions:
                    return False
        return True


@asynccontextmanager
async def under_load(model: str, num_drafters: int) -> AsyncIterator[Run]:
    with ExitStack() as processes:
        url = processes.enter_context(running_redis())
        flags = [
            "--drafters",
            "redis:",
            "--redis-url",
            url,
            "--draft-wait-ms",
            str(1000 * WAIT_S),
            "--local-draft",
            "none",
        ]
        process = await asyncio.to_thread(processes.enter_context, verifier(TARGET, [], *flags))
        async with RemoteVerifier(process.address) as target:
            run = Run(target, processes, url, model)
            plain = [collect(target, wanted(i, 0, SpeculationMode.DISABLED)) for i in range(STREAMS)]
            expected = [tokens for tokens, _ in await asyncio.gather(*plain)]
            async with asyncio.TaskGroup() as group:
                for i in range(STREAMS):
                    group.create_task(run.stream(i, expected[i]))
                await until(lambda: run.stats)
                assert not any(stats.num_spec_steps for stats in run.stats)  # nobody drafts yet
                for _ in range(num_drafters):
                    await run.add_drafter()
                await recovered(run)
                yield run
                run.ended = True


async def recovered(run: Run) -> None:
    async with asyncio.timeout(RECOVERY_S):
        while not await run.speculates():
            await asyncio.sleep(0.05)


async def killing(kills: int, model: str, num_drafters: int) -> None:
    moments = random.Random(kills)
    async with under_load(model, num_drafters) as run, asyncio.TaskGroup() as starts:
        before = await tokens_per_round(run)
        assert before > 1
        while run.num_kills < kills:
            await asyncio.sleep(moments.uniform(0.0, 0.4))
            await until(lambda: run.alive, RECOVERY_S)
            await run.kill(moments.choice(run.alive))
            starts.create_task(run.add_drafter())
        await until(lambda: len(run.alive) == num_drafters, RECOVERY_S)
        await recovered(run)
        assert await tokens_per_round(run) > 0.9 * before
        # A death costs a session at most the wait it was in: then it decodes plainly, or drafts elsewhere. Sessions that do not require
        # trees wait as long as they can gain by them, which a busy machine may often take to grow one.
        assert max(stats.num_drafter_misses for stats in run.required) <= run.num_kills
        assert sum(stats.num_drafter_misses for stats in run.stats) <= STREAMS * run.num_kills


async def tokens_per_round(run: Run) -> float:
    """Of one generation of every stream that begins now."""
    seen = len(run.required)
    await until(lambda: len(run.required) >= seen + 2 * STREAMS, RECOVERY_S)
    last = run.required[-STREAMS:]
    return STREAMS * TOKENS / sum(stats.num_spec_steps + stats.num_plain_steps for stats in last)


@pytest.mark.services
async def test_drafters_killed_at_random_moments_fail_no_request() -> None:
    await killing(8, "ngram:", 2)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["ngram:", DRAFT])
async def test_a_hundred_drafters_killed_at_random_moments_fail_no_request(model: str) -> None:
    await killing(100, model, 3)


@pytest.mark.services
async def test_loss_of_the_last_drafter_and_a_drain_stall_no_session() -> None:
    async with under_load("ngram:", 2) as run:
        first, second = run.alive
        first.process.terminate()  # SIGTERM: it says so, its sessions move, it ends
        code = await asyncio.to_thread(first.process.wait, RECOVERY_S)
        run.alive.remove(first)
        assert code == 0
        await recovered(run)
        await run.kill(second)
        seen = len(run.stats)
        await until(lambda: len(run.stats) > seen + 2 * STREAMS, RECOVERY_S)
        assert not any(stats.num_spec_steps for stats in run.stats[-STREAMS:])  # plain decoding
        await run.add_drafter()
        await recovered(run)


@pytest.mark.services
async def test_a_drafter_that_hangs_costs_each_session_one_wait() -> None:
    """It holds its connections and says nothing: no error tells, only silence."""
    async with under_load("ngram:", 2) as run:
        hung = run.alive.pop()
        assert hung.process is not None
        hung.process.send_signal(signal.SIGSTOP)
        seen = len(run.required)
        await until(lambda: len(run.required) > seen + 2 * STREAMS, RECOVERY_S)
        # All that were there wait once; then one at a time tries it again, after longer and longer rests.
        waits = [stats.num_drafter_misses for stats in run.required]
        assert max(waits) <= 2
        assert sum(waits) <= STREAMS
        assert all(stats.num_spec_steps for stats in run.required[-STREAMS:])
        await asyncio.to_thread(hung.kill)
