"""Two gateways, two verifiers, one Redis, all processes; one of them is killed again and again while requests run.

Every client gets every token once and in order (the SDK refuses a gap or a repetition), and because the requests are coupled, exactly
the tokens of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
import pytest_asyncio
from support.processes import Service, free_port, gateway, verifier
from support.redis import RedisProcess

from rootward import AsyncClient, SamplingParams

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

MODEL = "tabular:vocab=40,seed=1,sharpness=2"
NUM_TOKENS, NUM_STREAMS, NUM_SEEDS = 250, 6, 3
DRAIN = ("--shutdown-timeout-s", "0.1")


@dataclass
class Cluster:
    """Services by role; a killed one is started again on its address."""

    redis: RedisProcess
    verifiers: list[Service] = field(default_factory=list)
    gateways: list[Service] = field(default_factory=list)
    expected: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_done: int = 0

    @property
    def target(self) -> str:
        return ",".join(one.address for one in self.gateways)

    async def generate(self, client: AsyncClient, seed: int) -> None:
        """One generation, compared token by token."""
        tokens: list[int] = []
        stream = client.stream([1, 2, 3], sampling=SamplingParams(max_tokens=NUM_TOKENS, seed=seed))
        async for delta in stream:
            assert delta.offset == len(tokens)
            tokens += delta.token_ids
        result = await stream.get_final_result()
        assert tuple(tokens) == result.token_ids == self.expected[seed]
        assert (result.finish_reason, result.usage.completion_tokens) == ("length", NUM_TOKENS)
        self.num_done += 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    with ExitStack() as running:
        redis = running.enter_context(RedisProcess())
        made = Cluster(redis)
        for _ in range(2):
            target = verifier(MODEL, [], "--max-num-seqs", "32", *DRAIN, port=free_port())
            made.verifiers.append(running.enter_context(target))
        for _ in range(2):
            flags = ("--redis-url", redis.url, "--redispatch-wait-s", "120", *DRAIN)
            front = gateway(MODEL, [v.address for v in made.verifiers], *flags, port=free_port())
            made.gateways.append(running.enter_context(front))
        async with AsyncClient(made.target) as client:
            for seed in range(NUM_SEEDS):
                params = SamplingParams(max_tokens=NUM_TOKENS, seed=seed)
                made.expected[seed] = (await client.generate([1, 2, 3], sampling=params)).token_ids
        assert len(set(made.expected.values())) == NUM_SEEDS
        yield made


@asynccontextmanager
async def load(cluster: Cluster, streams: int = NUM_STREAMS) -> AsyncIterator[None]:
    """Streams that begin anew as they end; leaving it lets the running ones end."""
    over = asyncio.Event()

    async def one(number: int, client: AsyncClient) -> None:
        turn = number
        while not over.is_set():
            await cluster.generate(client, turn % NUM_SEEDS)
            turn += 1

    async with AsyncClient(cluster.target, timeout=240.0, max_retries=8) as client, asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(one(number, client))
        await until(lambda: cluster.num_done >= streams)  # all of them under way
        yield
        over.set()


async def until(condition: Callable[[], object], timeout_s: float = 240.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def kill_and_restart(victim: Service) -> None:
    victim.process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(victim.process.wait)
    await asyncio.to_thread(victim.start)


async def killed_again_and_again(cluster: Cluster, victims: list[Service], times: int) -> None:
    rng = random.Random(times)
    async with load(cluster):
        for number in range(times):
            before = cluster.num_done
            await asyncio.sleep(rng.random() * 0.2)  # somewhere in a generation
            await kill_and_restart(victims[number % len(victims)])
            await until(lambda: cluster.num_done > before + 1)  # noqa: B023
    cluster.num_done = 0


@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.long)])
async def test_verifiers_killed_under_load(cluster: Cluster, times: int) -> None:
    await killed_again_and_again(cluster, cluster.verifiers, times)


@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.long)])
async def test_gateways_killed_under_load(cluster: Cluster, times: int) -> None:
    await killed_again_and_again(cluster, cluster.gateways, times)


@pytest.mark.parametrize("away_s", [2.5, pytest.param(10.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_redis_away_under_load(cluster: Cluster, how: str, away_s: float) -> None:
    async with load(cluster):
        if how == "stopped":
            cluster.redis.signal(signal.SIGSTOP)
        else:
            cluster.redis.kill()
        before = cluster.num_done
        await asyncio.sleep(away_s)
        await until(lambda: cluster.num_done > before)  # running ones end and new ones begin without it
        if how == "stopped":
            cluster.redis.signal(signal.SIGCONT)
        else:
            cluster.redis.start()
        before = cluster.num_done
        await until(lambda: cluster.num_done > before + NUM_STREAMS)
    await kill_and_restart(cluster.gateways[0])  # the record works again
    async with load(cluster, streams=2):
        await kill_and_restart(cluster.gateways[1])
    cluster.num_done = 0


async def test_drained_services_hand_over_what_they_run(cluster: Cluster) -> None:
    """SIGTERM with a shutdown timeout that has passed before anything ends: clients go on elsewhere and see nothing of it."""
    async with load(cluster):
        for victim in (cluster.verifiers[0], cluster.gateways[0]):
            before = cluster.num_done
            victim.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(victim.process.wait, 60) == 0
            await asyncio.to_thread(victim.start)
            await until(lambda: cluster.num_done > before + 1)  # noqa: B023
    cluster.num_done = 0


async def test_http_streams_resume_by_last_event_id_on_another_gateway(cluster: Cluster) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "seed": 0, "stream": True, "return_token_ids": True}
    headers = {"x-request-id": f"http-{os.getpid()}", "accept": "text/event-stream"}
    one, two = (front.http for front in cluster.gateways)
    got, last = await events(one, body, headers, stop_after=20)
    assert 0 < len(got) < NUM_TOKENS
    await kill_and_restart(cluster.gateways[0])
    rest, end = await events(two, body, headers | {"last-event-id": last})
    assert (tuple(got + rest), end) == (cluster.expected[0], str(NUM_TOKENS))


async def events(
    url: str, body: dict[str, object], headers: dict[str, str], stop_after: int | None = None
) -> tuple[list[int], str]:
    """(token ids, id of the last event) of a stream of server-sent events, left after so many tokens."""
    tokens: list[int] = []
    last = ""
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as web,
        web.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                last = line.removeprefix("id: ")
            elif line.startswith("data: {"):
                data = httpx.Response(200, content=line.removeprefix("data: ")).json()
                tokens += data["choices"][0]["token_ids"] if data["choices"] else []
            if stop_after is not None and len(tokens) > stop_after and last == str(len(tokens)):
                break
    return tokens, last
