"""The registry of workers in Redis: which are alive, their addresses and load.

    rw:worker:{role}:{id}      hash   the description of the worker (`Worker`); lives for 3 heartbeats
    rw:workers:{role}:{name}   zset   ids by last beat, on the clock of the Redis server, so that those of the machines need not agree;
                                      entries older than 3 heartbeats are ignored

`rw` is the setting `redis_prefix`.
`name` is what peers ask for: the served model of verifiers, the pool of drafters. Everything is written again at every heartbeat, so a
Redis that comes back empty is full again one heartbeat later. The braces stand for values: there are no hash tags, and no command
touches two keys, so the keys of one worker may lie in different slots of a cluster.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from pydantic import TypeAdapter
from redis.asyncio import Redis, RedisCluster

from rootward.discovery.polling import PolledDiscovery
from rootward.errors import Unavailable
from rootward.ports import Peer
from rootward.redis_client import KEY_PREFIX, answering, open_redis, server_time

log = structlog.get_logger("registry")

HEARTBEAT_S = 1.0
MISSED = 3  # heartbeats after which a worker counts as gone
POLL_S = 0.5  # between two reads of the workers of a name
TIMEOUT_S = 2.0

Counters = Mapping[str, Mapping[str, float]]  # pool → name → cumulative value, see rootward/demand.py


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as it describes itself. `counters` only ever grow within one incarnation; a new one starts over."""

    role: str  # "gateway", "verifier" or "drafter"
    id: str  # unique, of this process
    name: str  # what peers ask for: the served model of a verifier, the pool of a drafter
    address: str
    incarnation: int = 0
    zone: str = ""
    draining: bool = False
    counters: Counters = field(default_factory=dict)


class RegistryUnavailable(Unavailable):
    """Redis does not answer. What was known before holds."""


class Registry:
    """Reads and writes the registry. Every call ends within `TIMEOUT_S`, RegistryUnavailable if Redis does not answer."""

    def __init__(self, client: Redis | RedisCluster, *, prefix: str, heartbeat_s: float) -> None:
        self._client = client
        self._prefix = prefix
        self.heartbeat_s = heartbeat_s
        self._answering = partial(answering, "the registry", TIMEOUT_S, RegistryUnavailable)

    @property
    def stale_s(self) -> float:
        return MISSED * self.heartbeat_s

    async def publish(self, worker: Worker) -> None:
        """A heartbeat. A reader between two of these writes sees the worker as it was before, or not at all."""
        key, index = self._worker_key(worker.role, worker.id), self._index_key(worker.role, worker.name)
        fields: dict[Any, Any] = {
            "address": worker.address,
            "incarnation": worker.incarnation,
            "zone": worker.zone,
            "draining": int(worker.draining),
            "counters": json.dumps(worker.counters),
        }
        async with self._answering():
            now_s = await server_time(self._client)
            await self._client.hset(key, mapping=fields)
            await self._client.pexpire(key, round(self.stale_s * 1e3))
            await self._client.zadd(index, {worker.id: now_s})
            await self._client.zremrangebyscore(index, "-inf", now_s - 10 * self.stale_s)

    async def remove(self, worker: Worker) -> None:
        """The worker ends: peers need not wait until it has missed its heartbeats."""
        async with self._answering():
            await self._client.zrem(self._index_key(worker.role, worker.name), worker.id)
            await self._client.delete(self._worker_key(worker.role, worker.id))

    async def workers(self, role: str, name: str) -> tuple[Worker, ...]:
        """The workers that are alive, sorted by id. A worker whose hash cannot be read is left out."""
        async with self._answering():
            oldest_s = await server_time(self._client) - self.stale_s
            ids: Any = await self._client.zrangebyscore(self._index_key(role, name), oldest_s, "+inf")
            hashes: Any = await asyncio.gather(*(self._client.hgetall(self._worker_key(role, i)) for i in ids))
        found = (_worker_of(role, i, name, fields) for i, fields in zip(ids, hashes, strict=True))
        return tuple(sorted((worker for worker in found if worker is not None), key=lambda worker: worker.id))

    async def listed(self, role: str, name: str) -> frozenset[str]:
        """Ids of workers that have registered and have not removed themselves, whether or not they are alive."""
        async with self._answering():
            ids: Any = await self._client.zrange(self._index_key(role, name), 0, -1)
        return frozenset(ids)

    async def close(self) -> None:
        await self._client.aclose()

    def _worker_key(self, role: str, worker_id: str) -> str:
        return f"{self._prefix}:worker:{role}:{worker_id}"

    def _index_key(self, role: str, name: str) -> str:
        return f"{self._prefix}:workers:{role}:{name}"


@asynccontextmanager
async def open_registry(
    url: str, *, prefix: str = KEY_PREFIX, heartbeat_s: float = HEARTBEAT_S
) -> AsyncIterator[Registry]:
    """The registry at a URL, not yet connected: a Redis that is away is no reason not to start. ConfigurationError for a wrong URL."""
    registry = Registry(open_redis(url, timeout_s=TIMEOUT_S), prefix=prefix, heartbeat_s=heartbeat_s)
    try:
        yield registry
    finally:
        await registry.close()


@asynccontextmanager
async def registered(registry: Registry, describe: Callable[[], Worker]) -> AsyncIterator[Callable[[], None]]:
    """Publish the result of `describe` at every heartbeat, and remove it at the end. Yields a function that requests a beat at once."""
    now = asyncio.Event()
    beats = asyncio.create_task(_beat_forever(registry, describe, now), name="heartbeat")
    try:
        yield now.set
    finally:
        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)
        try:
            await registry.remove(describe())
        except RegistryUnavailable as error:
            log.debug("not_unregistered", error=str(error))


async def _beat_forever(registry: Registry, describe: Callable[[], Worker], now: asyncio.Event) -> None:
    answered = True
    while True:
        now.clear()
        try:
            await registry.publish(describe())
            answered = True
        except RegistryUnavailable as error:
            if answered:
                log.warning("heartbeat_failed", error=str(error))
            answered = False
        with suppress(TimeoutError):
            async with asyncio.timeout(registry.heartbeat_s):
                await now.wait()


def registry_discovery(registry: Registry, role: str, name: str, *, every_s: float = POLL_S) -> PolledDiscovery:
    """The workers of a role under a name.

    While none of them registers, as when Redis is full and refuses writes, their last list holds. After that, or after a time without an
    answer, those that are not found stay until all have had the time to register again. Peers notice by themselves who is gone."""
    now_s = asyncio.get_running_loop().time
    known: dict[str, Peer] = {}  # by id
    kept_until_s = -math.inf

    async def ask() -> list[Peer]:
        nonlocal known, kept_until_s
        try:
            found = {w.id: Peer(w.address, w.zone, w.draining) for w in await registry.workers(role, name)}
            if known and not found and (silent := known.keys() & await registry.listed(role, name)):
                raise RegistryUnavailable(f"none of {len(silent)} workers registers any more; Redis may refuse writes")
        except RegistryUnavailable:
            kept_until_s = now_s() + registry.stale_s
            raise
        known = known | found if now_s() < kept_until_s else found
        return list(known.values())

    return PolledDiscovery(ask, source="redis", every_s=every_s)


_WORKER = TypeAdapter(Worker)


def _worker_of(role: str, worker_id: str, name: str, fields: Mapping[str, str]) -> Worker | None:
    """The worker of a hash, whose role, id and name are in the keys; None if the hash has expired or was written by something else."""
    try:
        counters = json.loads(fields["counters"])
        return _WORKER.validate_python({**fields, "role": role, "id": worker_id, "name": name, "counters": counters})
    except (KeyError, ValueError, RecursionError) as error:
        if fields:
            log.warning("worker_unreadable", worker=worker_id, error=repr(error))
        return None
