"""The session store in Redis: one server, behind Sentinel, or a cluster. Keys and scripts are all here. Every key has a time to live.

`id` is the client's, behind its tenant where it has one (`requests.of_tenant`).

    rw:req:{id}         hash     state (running | finished | interrupted), epoch, holder, length of the log, digest of what was
                                 asked, seed, verifier that works on it, finish (JSON, once finished), state before the last
                                 holder took over
    rw:req:{id}:epoch   counter  fencing: the highest epoch given out
    rw:req:{id}:lease   string   holder that drives the request now; expires unless renewed
    rw:req:{id}:log     list     committed output in order, several tokens an item (`Run` as JSON)
    rw:kv:M:K           zset     processes of verifiers that hold the KV of a prefix, by the second of the last confirmation; M is the
                                 fingerprint of the model, K a hash of the prefix (a hint, see `router`)
    rw:quota:{tenant}   hash     token bucket: level, its time (ms), and the last call that changed it
    rw:suspicion        string   lock of the request under suspicion that is tried now
    rw:response:{:S}:{id}    string   a stored answer of /v1/responses with its conversation (JSON, see `stored_responses`)
    rw:responses:{:S}   zset     ids of these, by the second at which they were stored; S is the tenant, without API keys empty
    rw:poison:{content} string   a request of this content (fingerprint of the model and a hash) ended two verifiers

`rw` is the setting `redis_prefix`.
`{id}` is a hash tag: all keys of one request are in one slot of a cluster, so that scripts may use them together. Request keys live
`RETENTION_S` (longest request + 60 s) from the last write, and 60 s after the end.

Fencing. Only a script that holds the lease or takes it over grants an epoch. A lease that expired, or vanished with a Redis that restarted
empty, is taken back by its holder unless a later epoch was granted, so that an outage of Redis does not stop a running request. Every write
carries its epoch and is refused after a later one.

Lost replies. The client repeats a command at once when its connection breaks before the reply, so that every script may run twice; the
second run finds what the first one took, and takes it no second time. A command may also arrive after the gateway has stopped waiting for
it and gone on by itself: it then changes nothing that the gateway relies on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.lock import Lock
from redis.exceptions import LockError, NoScriptError, ReadOnlyError, ResponseError

from gateway.requests import as_chosen
from gateway.router import Holders
from gateway.session_store import (
    KEPT_AFTER_END_S,
    RETENTION_S,
    MemoryStore,
    Rate,
    Record,
    Run,
    StoreRefused,
    StoreUnavailable,
    Write,
    another_request,
    duplicate,
    stale,
)
from rootward.clock import SystemClock
from rootward.ports import Lease
from rootward.redis_client import KEY_PREFIX, answering, open_redis

SUSPICION_S = 30.0  # after which the lock of a request under suspicion expires
SUSPICION_POLL_S = 0.05

# The beginning of all scripts on a request. KEYS: request, epoch, lease, log. ARGV begins with: holder, epoch, ttl of the lease (ms),
# retention (ms).
_HELD = """
local holder = redis.call('GET', KEYS[3])
local epoch = tonumber(redis.call('GET', KEYS[2]) or '0')
local function expire(ms) for _, i in ipairs({1, 2, 4}) do redis.call('PEXPIRE', KEYS[i], ms) end end
local function grant(e)
  redis.call('SET', KEYS[2], e)
  redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[3])
  redis.call('HSET', KEYS[1], 'state', 'running', 'epoch', e, 'holder', ARGV[1])
  expire(ARGV[4])
end
"""

# A new run, without the log of an earlier one. More ARGV: the least epoch, field, value, … of the hash. Returns the epoch; 0 = the request
# is running.
BEGIN = """
if holder == ARGV[1] then return epoch end  -- this command a second time, or so late that the run has begun without it
if holder then return 0 end
redis.call('DEL', KEYS[1], KEYS[4])
for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
epoch = math.max(epoch + 1, tonumber(ARGV[5]))
grant(epoch)
return epoch
"""

# Another holder continues a run. More ARGV: digest. Returns {epoch, hash, log}. Epoch 0 = the request is unknown or finished; -1 = the id
# belongs to a request of another digest. Of the same holder a second time, or late, it changes nothing. The last state in the hash is that
# before its first time.
TAKE_OVER = """
local digest = redis.call('HGET', KEYS[1], 'digest')
if not digest then return {0, {}, {}} end
if digest ~= ARGV[5] then return {-1, {}, {}} end
local fields, log = redis.call('HGETALL', KEYS[1]), redis.call('LRANGE', KEYS[4], 0, -1)
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'finished' then return {0, fields, log} end
local again = redis.call('HGET', KEYS[1], 'holder') == ARGV[1]
if again then state = redis.call('HGET', KEYS[1], 'before') or state end
for _, part in ipairs({'state', state}) do table.insert(fields, part) end
if again then return {epoch, fields, log} end
redis.call('HSET', KEYS[1], 'before', state)
grant(epoch + 1)
return {epoch + 1, fields, log}
"""

# The holder begins another attempt. More ARGV: an epoch that the new one is above. Returns the epoch; 0 = another holder drives the
# request now. Without the reply the holder takes its own epoch + 1, so a command that runs twice, or late, gives out none above that.
NEXT_EPOCH = """
if holder ~= ARGV[1] and (holder or epoch > tonumber(ARGV[2])) then return 0 end
epoch = math.max(epoch, math.max(tonumber(ARGV[2]), tonumber(ARGV[5])) + 1)
grant(epoch)
return epoch
"""

# A `Write`. More ARGV: offset, number of tokens, item of the log, state, tokens in all, ms to keep after the end, field, value, …
# Returns the length of the log afterwards; -1 = another holder drives the request now.
WRITE = """
if (holder and holder ~= ARGV[1]) or epoch > tonumber(ARGV[2]) then return -1 end
for i = 11, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
grant(ARGV[2])
local length = tonumber(redis.call('HGET', KEYS[1], 'length') or '0')
if tonumber(ARGV[5]) == 0 then
  redis.call('DEL', KEYS[4])
  length = 0
end
if tonumber(ARGV[6]) > 0 and length == tonumber(ARGV[5]) then
  redis.call('RPUSH', KEYS[4], ARGV[7])
  length = length + tonumber(ARGV[6])
  redis.call('PEXPIRE', KEYS[4], ARGV[4])
end
redis.call('HSET', KEYS[1], 'length', length)
if ARGV[8] ~= '' and length == tonumber(ARGV[9]) then
  redis.call('DEL', KEYS[3])
  redis.call('HSET', KEYS[1], 'state', ARGV[8])
  expire(ARGV[10])
end
return length
"""

# `MemoryStore.take_tokens`. KEYS: bucket. ARGV: cost, tokens per second, size of the bucket, id of this call. Returns 0 = taken; else the
# ms until there are so many.
TAKE_TOKENS = """
local time = redis.call('TIME')
local now, size = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[3])
local known = redis.call('HMGET', KEYS[1], 'level', 'at', 'last')
if known[3] == ARGV[4] then return 0 end
local at = tonumber(known[2] or now)
if at > now then  -- the clock went back, as it may when another server takes over; the bucket fills on from now
  at = now
  redis.call('HSET', KEYS[1], 'at', at)
end
local level = math.min(size, tonumber(known[1] or size) + (now - at) / 1000 * ARGV[2])
local cost = tonumber(ARGV[1])
if cost > 0 and level < math.min(cost, size) then
  return math.max(1, math.ceil((math.min(cost, size) - level) / ARGV[2] * 1000))
end
level = math.min(size, level - cost)
redis.call('HSET', KEYS[1], 'level', tostring(level), 'at', now, 'last', ARGV[4])
redis.call('PEXPIRE', KEYS[1], math.ceil((size - math.min(level, 0)) / ARGV[2] * 1000) + 1000)
return 0
"""


TIMEOUT_S = 2.0
_CODE = re.compile(r"\b[A-Z]{3,}\b")  # in the text of an error

Arguments = list[str | int]


def open_store(url: str, *, prefix: str = KEY_PREFIX, timeout_s: float = TIMEOUT_S) -> Store:
    """The store of a URL, not yet connected, since a gateway starts without Redis; "" is memory. ConfigurationError for a wrong URL."""
    if not url:
        return MemoryStore()
    return RedisStore(open_redis(url, timeout_s=timeout_s), prefix=prefix, timeout_s=timeout_s)


class RedisStore:
    """`MemoryStore` has the documentation of the methods. StoreUnavailable when Redis does not answer within `timeout_s` or serves nobody;
    StoreRefused when it answers calls about one request with an error, such as WRONGTYPE."""

    def __init__(self, client: Redis | RedisCluster, *, prefix: str, timeout_s: float):
        self._client, self._prefix, self._clock = client, prefix, SystemClock()
        self._answering = partial(answering, "the session store", timeout_s, StoreUnavailable)
        scripts = (client.register_script(_HELD + own) for own in (BEGIN, TAKE_OVER, NEXT_EPOCH, WRITE))
        self._begin, self._take_over, self._next, self._write = scripts
        self._take_tokens = client.register_script(TAKE_TOKENS)

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    def _request_keys(self, request_id: str) -> list[str]:
        key = self._key("req", f"{{{request_id}}}")
        return [key, f"{key}:epoch", f"{key}:lease", f"{key}:log"]

    def _response_keys(self, space: str, name: str) -> tuple[str, str]:
        """(response, index), in one slot of a cluster, also for a space without a name."""
        tag = f"{{:{quote(space, safe='')}}}"
        return self._key("response", tag, name), self._key("responses", tag)

    async def ping(self) -> None:
        """Asks for a key, which needs all of a cluster, unlike PING."""
        async with self._answering():
            await self._client.exists(self._request_keys("")[0])

    async def begin(
        self, request_id: str, holder: str, ttl_s: float, about: Mapping[str, str], *, least_epoch: int = 1
    ) -> Lease:
        arguments = [*self._held(holder, 0, ttl_s), least_epoch, *_flat(about)]
        async with self._answering_about(request_id):
            epoch = await self._begin(self._request_keys(request_id), arguments)
        if not epoch:
            raise duplicate(request_id)
        return Lease(request_id, int(epoch), holder)

    async def take_over(self, request_id: str, holder: str, ttl_s: float, digest: str) -> tuple[Lease | None, Record]:
        arguments = [*self._held(holder, 0, ttl_s), digest]
        async with self._answering_about(request_id):
            epoch, flat, log = await self._take_over(self._request_keys(request_id), arguments)
        if int(epoch) < 0:
            raise another_request(request_id)
        # In a thread, because a long log with log-probabilities takes a second.
        output = await asyncio.to_thread(Run.joined, log)
        record = Record(dict(zip(flat[::2], flat[1::2], strict=True)), output)
        return (Lease(request_id, int(epoch), holder) if epoch else None), record

    async def next_epoch(self, lease: Lease, ttl_s: float, above: int = 0) -> Lease:
        arguments = [*self._held(lease.holder, lease.epoch, ttl_s), above]
        async with self._answering_about(lease.request_id):
            epoch = await self._next(self._request_keys(lease.request_id), arguments)
        if not epoch:
            raise stale(lease.request_id)
        return Lease(lease.request_id, int(epoch), lease.holder)

    @asynccontextmanager
    async def _answering_about(self, request_id: str) -> AsyncGenerator[None]:
        async with self._answering():
            try:
                yield
            except ResponseError as error:
                if _is_of_keys(error):
                    raise _refused(request_id, error) from error
                await self._leave_replica(error)
                raise

    async def _leave_replica(self, error: Exception) -> None:
        """A server that has become a replica refuses writes on connections that it keeps open, and answers pings: connect anew, since the
        name may lead to another one now. The client does so itself for single commands, not for the scripts of Redis 6 nor for errors that
        a pipeline returns. (Clients of Sentinel and of a cluster follow the master.)"""
        is_replica = isinstance(error, ReadOnlyError) or "READONLY" in _CODE.findall(str(error))
        if is_replica and isinstance(self._client, Redis):
            await self._client.connection_pool.disconnect(inuse_connections=False)

    async def write(self, writes: Sequence[Write], ttl_s: float) -> list[int | StoreRefused]:
        """All writes in one round trip."""
        keys = [self._request_keys(write.lease.request_id) for write in writes]
        arguments = [self._arguments(write, ttl_s) for write in writes]
        async with self._answering():
            pipeline: Any = self._client.pipeline(transaction=False)
            for own, values in zip(keys, arguments, strict=True):
                pipeline.execute_command("EVALSHA", self._write.sha, len(own), *own, *values)
            found = await pipeline.execute(raise_on_error=False)
            if any(isinstance(one, NoScriptError) for one in found):
                # A server has restarted; single calls load the script where it is missing.
                found = [await self._written(own, values) for own, values in zip(keys, arguments, strict=True)]
            for error in found:
                if isinstance(error, Exception) and not _is_of_keys(error):
                    await self._leave_replica(error)
                    raise error
        return [
            _refused(write.lease.request_id, length) if isinstance(length, Exception) else int(length)
            for write, length in zip(writes, found, strict=True)
        ]

    async def _written(self, keys: list[str], arguments: Arguments) -> Any:
        try:
            return await self._write(keys, arguments)
        except ResponseError as error:
            return error

    def _arguments(self, write: Write, ttl_s: float) -> Arguments:
        lease, run = write.lease, write.run
        log: Arguments = [write.offset, len(run), run.to_json() if run else ""]
        end: Arguments = [write.state, write.end, _ms(KEPT_AFTER_END_S)]
        return [*self._held(lease.holder, lease.epoch, ttl_s), *log, *end, *_flat(write.fields)]

    def _held(self, holder: str, epoch: int, ttl_s: float) -> Arguments:
        """The first arguments of every script on a request."""
        return [holder, epoch, _ms(ttl_s), _ms(RETENTION_S)]

    async def put_hints(self, model: str, held: Mapping[str, Sequence[str]], ttl_s: float) -> None:
        if not held:
            return
        now_s = self._clock.wall()
        async with self._answering():
            pipeline: Any = self._client.pipeline(transaction=False)
            for process, keys in held.items():
                for key in (self._key("kv", model, key) for key in keys):
                    pipeline.zadd(key, {process: now_s})
                    pipeline.zremrangebyscore(key, "-inf", now_s - ttl_s)
                    pipeline.pexpire(key, _ms(ttl_s))
            await pipeline.execute()

    async def hints(self, model: str, keys: Sequence[str]) -> Sequence[Holders]:
        now_s = self._clock.wall()
        async with self._answering():
            pipeline: Any = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.zrange(self._key("kv", model, key), 0, -1, withscores=True)
            found = await pipeline.execute()
        return [{str(process): now_s - float(at) for process, at in holders} for holders in found]

    async def take_tokens(self, tenant: str, cost: int, rate: Rate) -> float:
        async with self._answering():
            key = self._key("quota", f"{{{tenant}}}")
            wait_ms = await self._take_tokens([key], [cost, rate.tokens_per_s, rate.size, uuid4().hex])
        return int(wait_ms) / 1000

    async def add_poison(self, content: str, ttl_s: float) -> None:
        async with self._answering():
            await self._client.set(self._key("poison", content), "1", px=_ms(ttl_s))

    async def is_poison(self, content: str) -> bool:
        async with self._answering():
            return bool(await self._client.exists(self._key("poison", content)))

    async def put_response(self, space: str, name: str, text: str, *, ttl_s: float, max_responses: int) -> None:
        key, index = self._response_keys(space, name)
        now_s = self._clock.wall()
        async with self._answering():
            pipeline: Any = self._client.pipeline(transaction=False)
            pipeline.set(key, text, px=_ms(ttl_s))
            pipeline.zadd(index, {name: now_s})
            pipeline.zremrangebyscore(index, "-inf", now_s - ttl_s)
            pipeline.pexpire(index, _ms(ttl_s))
            pipeline.zrange(index, 0, -max_responses - 1)
            *_, too_many = await pipeline.execute()
            if too_many:
                await self._client.delete(*(self._response_keys(space, old)[0] for old in too_many))
                await self._client.zrem(index, *too_many)

    async def response(self, space: str, name: str) -> str | None:
        async with self._answering():
            text: Any = await self._client.get(self._response_keys(space, name)[0])
        return None if text is None else str(text)

    async def delete_response(self, space: str, name: str) -> bool:
        key, index = self._response_keys(space, name)
        async with self._answering():
            await self._client.zrem(index, name)
            return bool(await self._client.delete(key))

    @asynccontextmanager
    async def suspicion(self) -> AsyncGenerator[None]:
        lock = Lock(self._client, self._key("suspicion"), timeout=SUSPICION_S, thread_local=False)
        # Known before it is taken, since a call of `acquire` may take the lock without its caller knowing: its reply is lost, or it is
        # cancelled.
        token = lock.local.token = uuid4().hex.encode()
        try:
            while True:
                async with self._answering():
                    if await lock.acquire(blocking=False, token=token) or await lock.owned():
                        break
                await asyncio.sleep(SUSPICION_POLL_S)
            yield
        finally:
            with suppress(StoreUnavailable, LockError):  # it has expired, or was never taken
                async with self._answering():
                    await lock.release()

    async def close(self) -> None:
        await self._client.aclose()


def _is_of_keys(error: Exception) -> bool:
    """Whether an error that Redis answers is about the keys of one call. One about the server has a code (OOM, READONLY, MISCONF, …), which
    Redis 6 writes into the text of a script's error."""
    return type(error) is ResponseError and set(_CODE.findall(str(error))) <= {"ERR", "WRONGTYPE"}


def _refused(request_id: str, error: Exception) -> StoreRefused:
    return StoreRefused(f"the session store answers for request {as_chosen(request_id)!r} with an error: {error}")


def _flat(fields: Mapping[str, str]) -> list[str]:
    return [part for pair in fields.items() for part in pair]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


Store = MemoryStore | RedisStore
