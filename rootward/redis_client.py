"""A Redis client from a URL: one server, Sentinel or a cluster, with or without TLS.

    redis://[user:password@]host:6379/0                            one server; unix:///path/redis.sock is one, too
    redis+sentinel://[user:password@]host:26379,host:26379/name/0  the master called `name`, wherever it is
    redis+cluster://[user:password@]host:7000,host:7001            a cluster, found from any of these nodes

`rediss` in place of `redis` is TLS; its options follow as a query: `?ssl_ca_certs=ca.pem&ssl_certfile=me.pem&ssl_keyfile=me.key`.
User and password are those of an ACL user on the servers; Sentinels that ask for their own get
`?sentinel_username=…&sentinel_password=…`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisClusterException, RedisError

from rootward.errors import ConfigurationError, Unavailable

_KINDS = ("", "+sentinel", "+cluster")
SCHEMES = ("unix", *(f"{plain}{kind}" for plain in ("redis", "rediss") for kind in _KINDS))
KEY_PREFIX = "rw"  # installations that share one Redis have different ones
SENTINEL_PORT = 26379
SERVER_PORT = 6379


def open_redis(url: str, *, timeout_s: float) -> Redis | RedisCluster:
    """A client that has not connected yet, answers in text, and gives every command `timeout_s`. ConfigurationError for a wrong URL."""
    try:
        scheme = urlsplit(url).scheme
        if scheme not in SCHEMES or "@" in urlsplit(url).path:
            raise ValueError
        plain, _, kind = scheme.partition("+")
        common: dict[str, Any] = {
            "decode_responses": True,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            # One immediate retry: connections in the pool may be from before a restart. The caller bounds the whole time.
            "retry": Retry(NoBackoff(), 1),
        }
        if kind == "sentinel":
            return _sentinel(url, plain, common)
        if kind == "cluster":
            return _cluster(url, plain, common)
        # A server that has become a replica refuses writes on connections that it keeps open; the name may lead to another one now.
        return Redis.from_url(url, retry_on_error=[ReadOnlyError], **common)
    except (ValueError, TypeError):  # whose message may have a part of the password: it is not chained
        example = "redis://host:port/0, redis+sentinel://host:port/name or redis+cluster://host:port"
        quoting = "and / ? # @ in a password as %2F %3F %23 %40"
        raise ConfigurationError(f"redis_url: {redacted(url)!r} is no Redis URL; write {example}, {quoting}") from None


@asynccontextmanager
async def answering(name: str, timeout_s: float, failure: type[Unavailable]) -> AsyncIterator[None]:
    """Bounds calls in time and turns every failure of the connection into `failure`, which says that `name` does not answer.

    The client loses the cancellation of a task whose command has just been sent or has just failed (`asyncio.wait_for` of Python 3.11
    returns the result, or raises the error, of a future that is done). The task is cancelled all the same."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        async with asyncio.timeout(timeout_s):
            try:
                yield
            finally:
                if task is not None and task.cancelling() > before:
                    raise asyncio.CancelledError
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        raise failure(f"{name} does not answer ({type(error).__name__})") from error


async def server_time(client: Redis | RedisCluster) -> float:
    """Seconds since 1970 on the clock of the server; of a cluster, on that of any node."""
    answer: Any = await client.time()
    seconds, micros = next(iter(answer.values())) if isinstance(answer, dict) else answer
    return float(seconds) + float(micros) / 1e6


def redacted(url: str) -> str:
    """The URL without users, passwords and options; without anything but the scheme where a password might be in another part."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "…"
    if "@" in parts.path + parts.query + parts.fragment:
        return f"{parts.scheme}://…"
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _sentinel(url: str, plain: str, common: dict[str, Any]) -> Redis:
    name, _, db = urlsplit(url).path.strip("/").partition("/")
    if not name:
        raise ValueError("the name of the master is missing")
    query = dict(parse_qsl(urlsplit(url).query))
    own = {k: query.pop(f"sentinel_{k}") for k in ("username", "password") if f"sentinel_{k}" in query}
    options = common | _options(url, plain, query)
    of_sentinels = {k: v for k, v in options.items() if k not in ("username", "password")} | own
    found: Any = Sentinel(_hosts(url, SENTINEL_PORT), sentinel_kwargs=of_sentinels, **options)  # type: ignore[no-untyped-call]
    master: Redis = found.master_for(name, db=int(db or 0))
    return master


def _cluster(url: str, plain: str, common: dict[str, Any]) -> RedisCluster:
    nodes = [ClusterNode(host, port) for host, port in _hosts(url, SERVER_PORT)]
    return RedisCluster(startup_nodes=nodes, **common, **_options(url, plain, dict(parse_qsl(urlsplit(url).query))))


def _hosts(url: str, port: int) -> list[tuple[str, int]]:
    parts = [urlsplit(f"//{host}") for host in urlsplit(url).netloc.rpartition("@")[2].split(",")]
    if not all(part.hostname for part in parts):
        raise ValueError("a host is missing")
    return [(str(part.hostname), part.port or port) for part in parts]


def _options(url: str, plain: str, query: dict[str, str]) -> dict[str, Any]:
    """User, password and TLS, as the client's own parser of URLs of one server reads them."""
    user = urlsplit(url).netloc.rpartition("@")[0]
    parsed = parse_url(f"{plain}://{user}@host/?{urlencode(query)}")
    found: dict[str, Any] = {name: value for name, value in parsed.items() if name not in ("host", "port", "db")}
    if found.pop("connection_class", None) is SSLConnection:
        found["ssl"] = True
    return found
