"""Leases, epochs, the committed log and session metadata: in Redis, or in memory when no Redis is configured.

Keys in Redis. `{id}` is a hash tag: all keys of one request lie in one cluster slot. Every key has a time to live.

    rw:req:{id}         hash     state (running | finished | aborted | failed), epoch, holder, verifier
    rw:req:{id}:epoch   counter  fencing: the highest epoch given out
    rw:req:{id}:lease   string   holder that drives the request now; expires unless renewed
    rw:req:{id}:log     list     committed output token ids, in order
    rw:session:{id}     hash     several turns of one conversation: last verifier, number of prompt tokens it held

The first four live `retention_s` (longest request + 60 s) from the last renewal, and 60 s after the release.

A lease that ran out, or vanished with a Redis that restarted empty, may be taken back by its holder as long as nobody was
granted a later epoch: so an outage of Redis does not stop a running request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio
from redis.exceptions import RedisError

from rootward.errors import ConfigurationError, DuplicateRequest, Unavailable
from rootward.ports import Lease, SessionStore

RETENTION_S = 660.0  # the longest request (600 s) + 60 s
KEPT_AFTER_RELEASE_S = 60.0
FORGET_EVERY_S = 1.0

# KEYS: request, epoch, lease, log. ARGV: holder, ttl of the lease in ms, retention in ms.
_ACQUIRE = """
local holder = redis.call('GET', KEYS[3])
if holder and holder ~= ARGV[1] then return 0 end
local epoch = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
redis.call('HSET', KEYS[1], 'state', 'running', 'epoch', epoch, 'holder', ARGV[1])
for i = 1, 4 do if i ~= 3 then redis.call('PEXPIRE', KEYS[i], ARGV[3]) end end
return epoch
"""

# ARGV: holder, epoch, ttl in ms, retention in ms. 1 = held again, 0 = lost.
_RENEW = """
local holder = redis.call('GET', KEYS[3])
local epoch = tonumber(redis.call('GET', KEYS[2]) or '0')
if (holder and holder ~= ARGV[1]) or epoch > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[3])
redis.call('HSET', KEYS[1], 'state', 'running', 'epoch', ARGV[2], 'holder', ARGV[1])
for i = 1, 4 do if i ~= 3 then redis.call('PEXPIRE', KEYS[i], ARGV[4]) end end
return 1
"""

# ARGV: holder, epoch, state, time to keep in ms.
_RELEASE = """
if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[3])
redis.call('HSET', KEYS[1], 'state', ARGV[3])
for i = 1, 4 do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
return 1
"""

# ARGV: holder, epoch.
_RESTART = """
if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
return redis.call('DEL', KEYS[4])
"""

# ARGV: holder, epoch, offset, retention in ms, tokens...
_APPEND = """
if redis.call('GET', KEYS[3]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
if redis.call('LLEN', KEYS[4]) ~= tonumber(ARGV[3]) then return 0 end
for i = 5, #ARGV do redis.call('RPUSH', KEYS[4], ARGV[i]) end
redis.call('PEXPIRE', KEYS[4], ARGV[4])
return 1
"""


class StoreUnavailable(Unavailable):
    """The session store does not answer. Running requests go on without it."""


class Store(SessionStore, Protocol):
    """A SessionStore in which a known request id can begin anew."""

    async def restart(self, lease: Lease) -> None:
        """Empty the committed log: the tokens of an earlier run under this id are not those of the run that begins."""


async def open_store(url: str, *, timeout_s: float = 2.0) -> Store:
    """The store of a URL, connected; "" is memory. ConfigurationError (exit code 4) when Redis cannot be reached."""
    return await RedisStore.connect(url, timeout_s=timeout_s) if url else MemoryStore()


class RedisStore:
    """SessionStore on a Redis server. Calls raise StoreUnavailable when it does not answer within `timeout_s`."""

    def __init__(self, client: redis.asyncio.Redis, *, timeout_s: float = 2.0, retention_s: float = RETENTION_S):
        self._client, self._timeout_s = client, timeout_s
        self._retention_ms = _ms(retention_s)
        self._acquire = client.register_script(_ACQUIRE)
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)
        self._restart = client.register_script(_RESTART)
        self._append = client.register_script(_APPEND)

    @staticmethod
    async def connect(url: str, *, timeout_s: float = 2.0, retention_s: float = RETENTION_S) -> RedisStore:
        try:
            client = redis.asyncio.from_url(
                url, decode_responses=True, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
            )
        except ValueError as error:
            message = f"redis_url: {redacted(url)!r} is no Redis URL; write redis://host:port/0"
            raise ConfigurationError(message) from error
        store = RedisStore(client, timeout_s=timeout_s, retention_s=retention_s)
        try:
            await store.ping()
        except StoreUnavailable as error:
            await client.aclose()
            message = f"redis_url: {redacted(url)!r} cannot be reached; start Redis there, or leave it empty"
            raise ConfigurationError(message, exit_code=4) from error
        return store

    async def ping(self) -> None:
        async with self._answering():
            await self._client.ping()

    async def acquire(self, request_id: str, holder: str, ttl_s: float) -> Lease:
        """A new lease with the next epoch; DuplicateRequest if another holder's lease is alive."""
        async with self._answering():
            epoch = await self._acquire(_request_keys(request_id), [holder, _ms(ttl_s), self._retention_ms])
        if not epoch:
            raise duplicate(request_id)
        return Lease(request_id, int(epoch), holder)

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        """False: somebody else drives the request now."""
        arguments: list[str | int] = [lease.holder, lease.epoch, _ms(ttl_s), self._retention_ms]
        async with self._answering():
            return bool(await self._renew(_request_keys(lease.request_id), arguments))

    async def release(self, lease: Lease, state: str) -> None:
        arguments: list[str | int] = [lease.holder, lease.epoch, state, _ms(KEPT_AFTER_RELEASE_S)]
        async with self._answering():
            await self._release(_request_keys(lease.request_id), arguments)

    async def restart(self, lease: Lease) -> None:
        """Empty the committed log, if the lease is current."""
        async with self._answering():
            await self._restart(_request_keys(lease.request_id), [lease.holder, lease.epoch])

    async def append(self, lease: Lease, offset: int, tokens: Sequence[int]) -> bool:
        """Append to the committed log if the log is `offset` long and the lease is current."""
        arguments: list[str | int] = [lease.holder, lease.epoch, offset, self._retention_ms, *tokens]
        async with self._answering():
            return bool(await self._append(_request_keys(lease.request_id), arguments))

    async def committed(self, request_id: str) -> tuple[int, ...]:
        log: Any
        async with self._answering():
            log = await self._client.lrange(_request_keys(request_id)[3], 0, -1)
        return tuple(int(token) for token in log)

    async def put_session(self, session_id: str, fields: dict[str, str], ttl_s: float) -> None:
        key = _session_key(session_id)
        async with self._answering(), self._client.pipeline(transaction=True) as both:
            both.hset(key, items=[part for field in fields.items() for part in field])
            both.pexpire(key, _ms(ttl_s))
            await both.execute()

    async def get_session(self, session_id: str) -> dict[str, str]:
        fields: Any
        async with self._answering():
            fields = await self._client.hgetall(_session_key(session_id))
        return dict(fields)

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Bounds a call in time and turns every failure of the connection into StoreUnavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"the session store does not answer ({type(error).__name__})") from error


@dataclass(slots=True)
class _Record:
    """What Redis keeps about one request."""

    state: str = ""
    epoch: int = 0
    holder: str = ""
    lease_until: float = 0.0
    log: list[int] = field(default_factory=list)
    expires: float = 0.0


class MemoryStore:
    """SessionStore of one process: the same rules, nothing survives it. `now` is a monotonic clock in seconds."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic, retention_s: float = RETENTION_S):
        self._now, self._retention_s = now, retention_s
        self._requests: dict[str, _Record] = {}
        self._sessions: dict[str, tuple[float, dict[str, str]]] = {}
        self._look_again = 0.0

    async def acquire(self, request_id: str, holder: str, ttl_s: float) -> Lease:
        """A new lease with the next epoch; DuplicateRequest if another holder's lease is alive."""
        self._forget_expired()
        record = self._requests.setdefault(request_id, _Record())
        if self._alive(record) and record.holder != holder:
            raise duplicate(request_id)
        record.epoch += 1
        self._grant(record, holder, ttl_s)
        return Lease(request_id, record.epoch, holder)

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        """False: somebody else drives the request now."""
        record = self._requests.setdefault(lease.request_id, _Record())
        if (self._alive(record) and record.holder != lease.holder) or record.epoch > lease.epoch:
            return False
        record.epoch = lease.epoch
        self._grant(record, lease.holder, ttl_s)
        return True

    async def release(self, lease: Lease, state: str) -> None:
        record = self._requests.get(lease.request_id)
        if record is not None and self._holds(record, lease):
            record.state, record.lease_until = state, 0.0
            record.expires = self._now() + KEPT_AFTER_RELEASE_S

    async def restart(self, lease: Lease) -> None:
        """Empty the committed log, if the lease is current."""
        record = self._requests.get(lease.request_id)
        if record is not None and self._holds(record, lease):
            record.log.clear()

    async def append(self, lease: Lease, offset: int, tokens: Sequence[int]) -> bool:
        """Append to the committed log if the log is `offset` long and the lease is current."""
        record = self._requests.get(lease.request_id)
        if record is None or not self._holds(record, lease) or len(record.log) != offset:
            return False
        record.log.extend(tokens)
        return True

    async def committed(self, request_id: str) -> tuple[int, ...]:
        self._forget_expired()
        record = self._requests.get(request_id)
        return tuple(record.log) if record else ()

    async def put_session(self, session_id: str, fields: dict[str, str], ttl_s: float) -> None:
        _, known = self._sessions.get(session_id, (0.0, {}))
        self._sessions[session_id] = (self._now() + ttl_s, known | fields)

    async def get_session(self, session_id: str) -> dict[str, str]:
        self._forget_expired()
        until, fields = self._sessions.get(session_id, (0.0, {}))
        return dict(fields) if self._now() < until else {}

    async def close(self) -> None:
        """Nothing is held outside this process."""

    def _alive(self, record: _Record) -> bool:
        return self._now() < record.lease_until

    def _holds(self, record: _Record, lease: Lease) -> bool:
        return self._alive(record) and record.holder == lease.holder and record.epoch == lease.epoch

    def _grant(self, record: _Record, holder: str, ttl_s: float) -> None:
        now = self._now()
        record.state, record.holder, record.lease_until = "running", holder, now + ttl_s
        record.expires = now + self._retention_s

    def _forget_expired(self) -> None:
        """Once a second at most: records are those of the last minutes, so a scan is cheap."""
        now = self._now()
        if now < self._look_again:
            return
        self._look_again = now + FORGET_EVERY_S
        for request_id in [i for i, r in self._requests.items() if r.expires <= now and r.epoch]:
            del self._requests[request_id]
        for session_id in [i for i, (until, _) in self._sessions.items() if until <= now]:
            del self._sessions[session_id]


def redacted(url: str) -> str:
    """The URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _request_keys(request_id: str) -> list[str]:
    key = f"rw:req:{{{request_id}}}"
    return [key, f"{key}:epoch", f"{key}:lease", f"{key}:log"]


def _session_key(session_id: str) -> str:
    return f"rw:session:{{{session_id}}}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def duplicate(request_id: str) -> DuplicateRequest:
    """What the second of two live requests with one id is told."""
    return DuplicateRequest(f"request_id: {request_id!r} is running already; choose another id or wait for its end")
