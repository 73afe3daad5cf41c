"""The session store in Redis: one server, behind Sentinel, or a cluster. Keys and scripts are in `redis_schema.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import NoScriptError, RedisClusterException, RedisError

from gateway.quotas import Rate
from gateway.redis_schema import (
    BEGIN,
    NEXT_EPOCH,
    RESTART,
    TAKE_OVER,
    TAKE_TOKENS,
    WRITE,
    block_key,
    quota_key,
    request_keys,
    session_key,
)
from gateway.sessions import (
    KEPT_AFTER_END_S,
    RETENTION_S,
    MemoryStore,
    Record,
    Run,
    Store,
    StoreUnavailable,
    Write,
    another_request,
    duplicate,
    stale,
)
from rootward.clock import SystemClock
from rootward.errors import ConfigurationError
from rootward.ports import Lease
from rootward.redis_client import open_redis, redacted

TIMEOUT_S = 2.0

Arguments = list[str | int]


async def open_store(url: str, *, timeout_s: float = TIMEOUT_S) -> Store:
    """The store of a URL, connected; "" is memory. ConfigurationError (exit code 4) when Redis cannot be reached."""
    return await RedisStore.connect(url, timeout_s=timeout_s) if url else MemoryStore()


class RedisStore:
    """Calls raise StoreUnavailable when Redis does not answer within `timeout_s`."""

    def __init__(self, client: Redis | RedisCluster, *, timeout_s: float = TIMEOUT_S, retention_s: float = RETENTION_S):
        self._client, self._timeout_s, self._clock = client, timeout_s, SystemClock()
        self._retention_ms = _ms(retention_s)
        scripts = (BEGIN, TAKE_OVER, NEXT_EPOCH, WRITE, RESTART)
        self._begin, self._take_over, self._next, self._write, self._restart = map(client.register_script, scripts)
        self._take_tokens = client.register_script(TAKE_TOKENS)

    @staticmethod
    async def connect(url: str, *, timeout_s: float = TIMEOUT_S, retention_s: float = RETENTION_S) -> RedisStore:
        client = open_redis(url, timeout_s=timeout_s)
        store = RedisStore(client, timeout_s=timeout_s, retention_s=retention_s)
        try:
            await store.ping()
        except StoreUnavailable as error:
            await client.aclose()
            message = f"redis_url: {redacted(url)!r} cannot be reached; start Redis there, or leave it empty"
            raise ConfigurationError(message, exit_code=4) from error
        return store

    async def ping(self) -> None:
        """Whether a key can be asked for: on a cluster that needs all of it, unlike PING."""
        async with self._answering():
            await self._client.exists(session_key(""))

    async def begin(
        self, request_id: str, holder: str, ttl_s: float, about: Mapping[str, str], *, least_epoch: int = 1
    ) -> Lease:
        arguments = [*self._held(holder, 0, ttl_s), least_epoch, *_flat(about)]
        async with self._answering():
            epoch = await self._begin(request_keys(request_id), arguments)
        if not epoch:
            raise duplicate(request_id)
        return Lease(request_id, int(epoch), holder)

    async def take_over(self, request_id: str, holder: str, ttl_s: float, digest: str) -> tuple[Lease | None, Record]:
        arguments = [*self._held(holder, 0, ttl_s), digest]
        async with self._answering():
            epoch, flat, log = await self._take_over(request_keys(request_id), arguments)
        if int(epoch) < 0:
            raise another_request(request_id)
        record = Record(dict(zip(flat[::2], flat[1::2], strict=True)), Run.joined(log))
        return (Lease(request_id, int(epoch), holder) if epoch else None), record

    async def next_epoch(self, lease: Lease, ttl_s: float) -> Lease:
        arguments = self._held(lease.holder, lease.epoch, ttl_s)
        async with self._answering():
            epoch = await self._next(request_keys(lease.request_id), arguments)
        if not epoch:
            raise stale(lease.request_id)
        return Lease(lease.request_id, int(epoch), lease.holder)

    async def write(self, writes: Sequence[Write], ttl_s: float) -> list[int]:
        """All in one round trip: their number, not the network, is what they cost."""
        keys = [request_keys(write.lease.request_id) for write in writes]
        arguments = [self._arguments(write, ttl_s) for write in writes]
        async with self._answering():
            try:
                pipeline: Any = self._client.pipeline(transaction=False)
                for own, values in zip(keys, arguments, strict=True):
                    pipeline.execute_command("EVALSHA", self._write.sha, len(own), *own, *values)
                found = await pipeline.execute()
            except NoScriptError:  # a server that has restarted; one by one they load the script where it is missing
                found = [await self._write(own, values) for own, values in zip(keys, arguments, strict=True)]
        return [int(length) for length in found]

    def _arguments(self, write: Write, ttl_s: float) -> Arguments:
        lease, run = write.lease, write.run
        log: Arguments = [write.offset, len(run), run.to_json() if run else ""]
        end: Arguments = [write.state, write.total, _ms(KEPT_AFTER_END_S)]
        return [*self._held(lease.holder, lease.epoch, ttl_s), *log, *end, *_flat(write.fields)]

    def _held(self, holder: str, epoch: int, ttl_s: float) -> Arguments:
        """What the arguments of every script on a request begin with."""
        return [holder, epoch, _ms(ttl_s), self._retention_ms]

    async def restart(self, lease: Lease) -> None:
        async with self._answering():
            await self._restart(request_keys(lease.request_id), [lease.holder, lease.epoch])

    async def record(self, request_id: str) -> Record:
        key, _, _, log = request_keys(request_id)
        async with self._answering():
            fields: Any = await self._client.hgetall(key)
            items: Any = await self._client.lrange(log, 0, -1)
        return Record(dict(fields), Run.joined(items))

    async def put_session(self, session_id: str, fields: Mapping[str, str], ttl_s: float) -> None:
        key = session_key(session_id)
        async with self._answering():
            pipeline: Any = self._client.pipeline(transaction=False)
            pipeline.hset(key, mapping=dict(fields))
            pipeline.pexpire(key, _ms(ttl_s))
            await pipeline.execute()

    async def put_hints(self, model: str, held: Mapping[str, Sequence[str]], ttl_s: float) -> None:
        if not held:
            return
        now_s = self._clock.wall()
        async with self._answering():
            pipeline: Any = self._client.pipeline(transaction=False)
            for verifier, keys in held.items():
                for key in (block_key(model, block) for block in keys):
                    pipeline.zadd(key, {verifier: now_s})
                    pipeline.zremrangebyscore(key, "-inf", now_s - ttl_s)
                    pipeline.pexpire(key, _ms(ttl_s))
            await pipeline.execute()

    async def hints(
        self, model: str, keys: Sequence[str], session_id: str
    ) -> tuple[list[Mapping[str, float]], dict[str, str]]:
        async with self._answering():
            pipeline: Any = self._client.pipeline(transaction=False)
            pipeline.hgetall(session_key(session_id))
            for block in keys:
                pipeline.zrange(block_key(model, block), 0, -1, withscores=True)
            session, *holders = await pipeline.execute()
        return [{str(name): float(at) for name, at in found} for found in holders], dict(session)

    async def take_tokens(self, tenant: str, cost: int, rate: Rate) -> float:
        async with self._answering():
            wait_ms = await self._take_tokens([quota_key(tenant)], [cost, rate.tokens_per_s, rate.size])
        return int(wait_ms) / 1000

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Bounds a call in time and turns every failure of the connection into StoreUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # the client has swallowed it
                    raise asyncio.CancelledError
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"the session store does not answer ({type(error).__name__})") from error


def _flat(fields: Mapping[str, str]) -> list[str]:
    return [part for pair in fields.items() for part in pair]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
