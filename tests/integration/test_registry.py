"""The registry on a real Redis: beats, stale ones, a Redis that goes and comes back."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import pytest
import redis.asyncio
from support.redis import RedisProcess, running_redis
from support.services import until

from rootward.discovery.registry import (
    Registry,
    RegistryUnavailable,
    Worker,
    open_registry,
    registered,
    registry_discovery,
)
from rootward.errors import ConfigurationError
from rootward.ports import Peer

BEAT_S = 2.0  # a worker that misses three is gone: more than the time between two lines of a test


@pytest.fixture(scope="module")
def redis_url():
    with running_redis() as url:
        yield url


@pytest.fixture
async def registry(redis_url: str):
    async with open_registry(redis_url, heartbeat_s=BEAT_S) as one:
        await one._client.flushall()
        yield one


def worker(number: int, **more) -> Worker:
    return Worker("drafter", f"d{number}", "fast", f"10.0.0.{number}:50061", 2**64 - number, **more)


async def test_peers_read_the_values_that_a_worker_has_published(registry: Registry) -> None:
    counters = {"fast": {"draft_row_seconds_wanted": 1.5}}
    one = worker(1, zone="z", counters=counters)
    two = worker(2, draining=True)
    await registry.publish(one)
    await registry.publish(two)
    assert await registry.workers("drafter", "fast") == (one, two)
    assert await registry.workers("drafter", "slow") == await registry.workers("verifier", "fast") == ()
    assert 0 < await registry._client.pttl(registry._worker_key("drafter", "d1")) <= 1e3 * registry.stale_s
    await registry.remove(one)
    assert await registry.workers("drafter", "fast") == (two,)


async def test_installations_with_different_prefixes_share_a_redis(registry: Registry, redis_url: str) -> None:
    await registry.publish(worker(1))
    async with open_registry(redis_url, prefix="blue", heartbeat_s=BEAT_S) as other:
        assert await other.workers("drafter", "fast") == ()
        await other.publish(worker(2))
    assert await registry.workers("drafter", "fast") == (worker(1),)


async def test_a_worker_that_misses_heartbeats_is_gone(registry: Registry) -> None:
    await registry.publish(worker(1))
    assert len(await registry.workers("drafter", "fast")) == 1
    seconds, micros = await registry._client.time()
    await registry._client.zadd(
        registry._index_key("drafter", "fast"), {"d1": seconds + micros / 1e6 - 1.1 * registry.stale_s}
    )
    assert await registry.workers("drafter", "fast") == ()


@pytest.mark.parametrize(
    "fields",
    [{}, {"address": "a:1"}, {"address": "a:1", "counters": "none"}, {"address": "a:1", "counters": "[" * 100_000}],
    ids=["expired", "incomplete", "no JSON", "nested"],
)
async def test_a_hash_that_expired_or_is_none_of_ours_is_left_out(registry: Registry, fields) -> None:
    await registry.publish(worker(1))
    await registry._client.zadd(registry._index_key("drafter", "fast"), {"ghost": 9e12})
    if fields:
        await registry._client.hset(registry._worker_key("drafter", "ghost"), mapping=fields)
    assert [one.id for one in await registry.workers("drafter", "fast")] == ["d1"]


async def test_workers_are_seen_when_they_come_drain_and_go(registry: Registry) -> None:
    draining = False
    seen: list[tuple[Peer, ...]] = []

    async def watch() -> None:
        discovery = registry_discovery(registry, "drafter", "fast", every_s=0.01)
        async with aclosing(discovery.watch()) as changes:
            async for peers in changes:
                seen.append(peers)

    task = asyncio.create_task(watch())
    await until(lambda: seen)
    address = worker(1).address
    async with registered(registry, lambda: worker(1, draining=draining)) as beat:
        await until(lambda: seen[-1] == (Peer(address),))
        draining = True
        beat()
        await until(lambda: seen[-1] == (Peer(address, leaving=True),))
    await until(lambda: seen[-1] == ())
    assert len(seen) == 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_redis_the_last_word_holds_and_a_redis_that_comes_back_empty_fills_again() -> None:
    seen: list[tuple[Peer, ...]] = []

    async def watch(registry: Registry) -> None:
        async with aclosing(registry_discovery(registry, "drafter", "fast", every_s=0.01).watch()) as changes:
            async for peers in changes:
                seen.append(peers)

    with running_redis() as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        async with open_registry(url, heartbeat_s=BEAT_S) as registry, registered(registry, lambda: worker(1)):
            task = asyncio.create_task(watch(registry))
            await until(lambda: seen and seen[-1])
            await registry._client.shutdown(nosave=True)
            with pytest.raises(RegistryUnavailable):
                await registry.workers("drafter", "fast")
            await asyncio.sleep(0.1)
            assert seen[-1]
            with running_redis(port):
                async with asyncio.timeout(60):
                    while not await _alive(url):
                        await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_workers_stay_known_while_redis_refuses_writes(registry: Registry) -> None:
    """Nobody can register with a full Redis, which goes on answering: gateways saw all verifiers vanish, and refused every request."""
    registry.heartbeat_s = 0.1
    ask = registry_discovery(registry, "drafter", "fast")._ask

    async def known() -> list[str]:
        return [peer.address for peer in await ask()]

    for number in (1, 2):
        await registry.publish(worker(number))
    both = await known()
    assert both == [worker(1).address, worker(2).address]
    await registry._client.config_set("maxmemory", 1)
    try:
        with pytest.raises(RegistryUnavailable):
            await registry.publish(worker(1))
        async with asyncio.timeout(60):
            while await registry.workers("drafter", "fast"):
                await asyncio.sleep(0.01)
        with pytest.raises(RegistryUnavailable, match="none of 2 workers"):
            await ask()
    finally:
        await registry._client.config_set("maxmemory", 0)
    registry.heartbeat_s = 60.0  # what comes now is within the time that workers have to register again
    with suppress(RegistryUnavailable):
        await ask()
    await registry.publish(worker(2))
    assert await known() == both
    registry.heartbeat_s = BEAT_S


async def test_workers_that_do_not_register_again_are_gone(registry: Registry) -> None:
    registry.heartbeat_s = 0.1
    ask = registry_discovery(registry, "drafter", "fast")._ask

    async def until_known(*numbers: int) -> None:
        addresses = [worker(number).address for number in numbers]
        async with asyncio.timeout(60):
            while True:
                with suppress(RegistryUnavailable):  # on a busy machine a worker misses beats
                    if [peer.address for peer in await ask()] == addresses:
                        return
                await asyncio.sleep(0.01)

    await registry.publish(worker(1))
    await until_known(1)
    async with asyncio.timeout(60):
        while await registry.workers("drafter", "fast"):
            await asyncio.sleep(0.01)
    with pytest.raises(RegistryUnavailable):
        await ask()
    async with registered(registry, lambda: worker(2)):
        await until_known(2)
    await until_known()  # it has ended in order


async def test_watchers_cancelled_while_redis_dies_end() -> None:
    """The client may raise the error of the connection in place of the cancellation: 4 of 10 of these watchers then went on for ever."""

    async def watch(registry: Registry) -> None:
        async with aclosing(registry_discovery(registry, "drafter", "fast", every_s=0.001).watch()) as changes:
            async for _ in changes:
                pass

    with RedisProcess() as process:
        async with open_registry(process.url, heartbeat_s=BEAT_S) as registry:
            await registry.publish(worker(1))
            tasks = [asyncio.create_task(watch(registry)) for _ in range(60)]
            await asyncio.sleep(0.2)
            process.kill()
            for task in tasks:
                task.cancel()
            _, pending = await asyncio.wait(tasks, timeout=60)
            for task in pending:
                task.cancel()
    assert not pending
    assert all(task.cancelled() for task in tasks)


async def _alive(url: str) -> bool:
    async with redis.asyncio.from_url(url) as client:
        return bool(await client.exists("rw:worker:drafter:d1"))


async def test_a_wrong_url_is_a_mistake_of_the_operator_and_shows_no_password() -> None:
    with pytest.raises(ConfigurationError, match="redis_url") as error:
        async with open_registry("ridis://user:secret@host"):
            pass
    assert "secret" not in str(error.value)
