"""URLs of Redis: which client they mean, and what is refused. That the clients work is tested on real servers."""

import asyncio
import traceback
from contextlib import suppress

import pytest
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.sentinel import SentinelConnectionPool

from rootward.errors import ConfigurationError, Unavailable
from rootward.redis_client import answering, open_redis, redacted


async def test_one_server_sentinel_and_cluster():
    one = open_redis("redis://user:word@h:1/2", timeout_s=1)
    assert isinstance(one, Redis)
    assert one.connection_pool.connection_kwargs["username"] == "user"
    watched = open_redis("redis+sentinel://user:word@a:1,b/main/3?sentinel_password=x", timeout_s=1)
    pool = watched.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert (pool.service_name, pool.connection_kwargs["db"], pool.connection_kwargs["password"]) == ("main", 3, "word")
    sentinels = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(s["host"], s["port"], s["password"], s.get("username")) for s in sentinels] == [
        ("a", 1, "x", None),
        ("b", 26379, "x", None),
    ]
    cluster = open_redis("rediss+cluster://:word@a:1,b:2?ssl_ca_certs=ca.pem", timeout_s=1)
    assert isinstance(cluster, RedisCluster)
    assert cluster.connection_kwargs["password"] == "word"
    assert cluster.connection_kwargs["ssl_ca_certs"] == "ca.pem"


@pytest.mark.parametrize(
    "url", ["http://h", "redis+sentinel://h:1", "redis+cluster://", "redis+sentinel://h:x/m", "nowhere"]
)
def test_an_invalid_url_is_a_configuration_error_without_its_password(url):
    with pytest.raises(ConfigurationError, match=r"redis_url: .* write redis://") as caught:
        open_redis(url.replace("://", "://me:secret@") + "?sentinel_password=hidden", timeout_s=1)
    assert caught.value.exit_code == 2
    assert not any(word in str(caught.value) for word in ("secret", "hidden"))


def test_redacted():
    assert redacted("redis://:p@h:1/2?ssl_keyfile=k") == "redis://h:1/2"


@pytest.mark.parametrize("password", ["se/cret", "se?cret", "se#cret", "s@e/cret", "s@e?cret", "[se/cret", "se:cret/x"])
def test_a_password_that_breaks_the_url_is_not_shown(password):
    url = f"redis://me:{password}@h:1/2"
    assert not any(part in redacted(url) for part in ("se", "cret"))
    shown = ""
    try:
        open_redis(url, timeout_s=1)
    except ConfigurationError as error:
        shown = "".join(traceback.format_exception(error))
    assert "cret" not in shown.replace(url, "")


@pytest.mark.parametrize("raised", [None, OSError])
async def test_a_cancellation_that_the_client_loses_is_raised(raised: type[Exception] | None) -> None:
    """`asyncio.wait_for` of Python 3.11 returns the result, or raises the error, of a future that is done instead of the cancellation."""

    async def call_losing_its_cancellation() -> None:
        async with answering("Redis", 10, Unavailable):
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                if raised is not None:
                    raise raised from None

    task = asyncio.create_task(call_losing_its_cancellation())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_calls_in_the_clean_up_of_a_cancelled_task_are_made() -> None:
    calls = []

    async def call_in_clean_up() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            async with answering("Redis", 10, Unavailable):
                calls.append(1)
            calls.append(2)

    task = asyncio.create_task(call_in_clean_up())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert calls == [1, 2]


async def test_a_call_that_takes_too_long_is_a_failure_though_the_client_loses_the_cancellation() -> None:
    async def call_losing_its_cancellation() -> None:
        async with answering("Redis", 0.01, Unavailable):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(10)

    with pytest.raises(Unavailable, match="Redis does not answer"):
        await call_losing_its_cancellation()
