"""docs/operations/upgrades.md, step by step, with real processes: nobody's stream breaks, and no text is continued by another model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import httpx
import pytest
from support.processes import Service, drafter, free_port, gateway, verifier
from support.redis import running_redis

from rootward import AsyncClient, SamplingParams

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

OLD, NEW = "tabular:vocab=40,seed=1", "tabular:vocab=40,seed=2"
DRAFT = "tabular:vocab=40,seed=1,noise=0.3,noise_seed=3"
NAME = "llm"
LONG = SamplingParams(max_tokens=600, ignore_eos=True, seed=7)
SHORT = SamplingParams(max_tokens=60, ignore_eos=True, seed=7)


@dataclass
class Release:
    """What `helm install` makes: a Redis, drafters, verifiers and a gateway of its own, all under one name for clients."""

    redis_url: str
    drafter: Service
    verifier: Service
    gateway: Service
    admin: str

    async def running(self) -> float:
        """rootward_num_requests_running of the gateway."""
        async with httpx.AsyncClient() as web:
            metrics = (await web.get(f"http://{self.admin}/metrics")).text
        return next(
            float(line.split()[1]) for line in metrics.splitlines() if line.startswith("rootward_num_requests_running ")
        )


@contextmanager
def installed(model: str) -> Iterator[Release]:
    with running_redis() as url, ExitStack() as stack:
        registry = ("--redis-url", url)
        named = ("--served-model-name", NAME)
        admin = f"127.0.0.1:{free_port()}"
        draft = stack.enter_context(drafter(DRAFT, *registry))
        target = stack.enter_context(verifier(model, ["redis:default"], *registry, *named))
        front = stack.enter_context(gateway(model, ["redis:"], *registry, *named, "--admin-listen", admin))
        yield Release(url, draft, target, front, admin)


@asynccontextmanager
async def client_of(release: Release) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(release.gateway.address, timeout=120) as client:
        yield client


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_a_new_target_by_two_releases():
    with installed(OLD) as old:
        async with client_of(old) as before:
            alone = await before.generate([1, 2, 3], sampling=LONG)
            streams = [asyncio.create_task(before.generate([1, 2, 3], sampling=LONG)) for _ in range(4)]
            with installed(NEW) as new:  # step 1 of the page: beside the old release
                async with client_of(new) as after:
                    tried = await after.generate([1, 2, 3], sampling=SHORT)  # step 2: a share of the traffic
                    assert tried.token_ids != alone.token_ids[: len(tried.token_ids)]
                    # Step 3: all of it, while streams of the old release run on.
                    shifted = [asyncio.create_task(after.generate([1, 2, 3], sampling=SHORT)) for _ in range(4)]
                    results = await asyncio.gather(*streams)

                    async def nobody() -> bool:
                        return await old.running() == 0

                    await until(nobody)
                    # Step 4: the old release stops.
                    parts = (old.gateway, old.verifier, old.drafter)
                    assert [await asyncio.to_thread(part.stop) for part in parts] == [0, 0, 0]
                    assert {result.token_ids for result in await asyncio.gather(*shifted)} == {tried.token_ids}
                    assert (await after.generate([1, 2, 3], sampling=SHORT)).token_ids == tried.token_ids
    assert {result.token_ids for result in results} == {alone.token_ids}


async def test_a_new_target_under_the_same_name_is_refused_and_gets_no_requests():
    with installed(OLD) as old:
        async with client_of(old) as client:
            alone = await client.generate([1, 2, 3], sampling=SHORT)
            with verifier(NEW, [], "--redis-url", old.redis_url, "--served-model-name", NAME):

                async def refused() -> bool:
                    return "verifier_does_not_fit" in await asyncio.to_thread(old.gateway.output)

                await until(refused)
                texts = await asyncio.gather(*(client.generate([1, 2, 3], sampling=SHORT) for _ in range(8)))
    assert {text.token_ids for text in texts} == {alone.token_ids}


@pytest.mark.long
async def test_a_bad_draft_model_in_a_second_pool_costs_no_text():
    """The candidate of the page: compared by pool, then the old one goes."""
    with running_redis() as url, ExitStack() as stack:
        enter = stack.enter_context
        registry = ("--redis-url", url)
        pools = ["l4=redis:l4", "candidate=redis:candidate"]
        good = enter(drafter(DRAFT, *registry, "--pool", "l4"))
        target = enter(verifier(OLD, pools, *registry, "--served-model-name", NAME))
        front = enter(gateway(OLD, ["redis:"], *registry, "--served-model-name", NAME))
        async with AsyncClient(front.address, timeout=120) as client:
            alone = await client.generate([1, 2, 3], sampling=LONG)
            running = [asyncio.create_task(client.generate([1, 2, 3], sampling=LONG)) for _ in range(3)]
            enter(drafter("tabular:vocab=40,seed=9", *registry, "--pool", "candidate"))

            async def both() -> bool:
                return len((await client.server_info()).drafters) == 2

            await until(both)
            assert await asyncio.to_thread(good.stop) == 0
            running += [asyncio.create_task(client.generate([1, 2, 3], sampling=LONG)) for _ in range(3)]
            results = await asyncio.gather(*running)
        assert await asyncio.to_thread(target.stop) == 0
    assert {result.token_ids for result in results} == {alone.token_ids}
