"""Redis does what it is asked, and the connection breaks before the reply: the client asks once more on a new one."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from unit.gateway.redis_for_tests import redis_server

from gateway.redis_store import open_store
from gateway.session_store import Rate, Run, Write

ABOUT = {"digest": "d"}


class Proxy:
    """Between a client and Redis. With `lose` it closes the connection instead of passing the next reply on."""

    def __init__(self, path):
        self._path, self._lose = path, False

    @asynccontextmanager
    async def losing_a_reply(self):
        self._lose = True
        yield
        assert not self._lose

    async def serve(self, reader, writer):
        redis_reader, redis_writer = await asyncio.open_unix_connection(self._path)
        asking = asyncio.create_task(_pass(reader, redis_writer))
        while (data := await redis_reader.read(1 << 16)) and not self._lose:
            writer.write(data)
        self._lose = False
        for one in (writer, redis_writer):
            one.close()
        asking.cancel()


async def _pass(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


@pytest.fixture
async def proxied():
    """(store, proxy)"""
    with redis_server() as url:
        path = url.removeprefix("unix://")
        proxy = Proxy(path)
        server = await asyncio.start_unix_server(proxy.serve, f"{path}.proxy")
        store = open_store(f"{url}.proxy")
        yield store, proxy
        await store.close()
        server.close()


async def ended(store, name):
    """Begin and interrupt a request."""
    lease = await store.begin(name, "a", 5, ABOUT)
    assert await store.write([Write(lease, 0, Run((1,), (True,)), {}, "interrupted")], 5) == [1]


async def test_the_next_epoch_is_granted_though_the_reply_was_lost(proxied):
    store, proxy = proxied
    lease = await store.next_epoch(await store.begin("r", "a", 5, ABOUT), 5)
    async with proxy.losing_a_reply():
        following = await store.next_epoch(lease, 5)
    assert following.epoch > lease.epoch
    assert await store.write([Write(following, 0, Run((1,), (True,)))], 5) == [1]
    assert await store.write([Write(lease, 1, Run((2,), (True,)))], 5) == [-1]


async def test_a_tenant_is_charged_once_though_the_reply_was_lost(proxied):
    store, proxy = proxied
    rate = Rate(1e-3, 100.0)
    assert await store.take_tokens("t", 10, rate) == 0
    async with proxy.losing_a_reply():
        assert await store.take_tokens("t", 40, rate) == 0
    assert await store.take_tokens("t", 40, rate) == 0
    async with proxy.losing_a_reply():
        assert await store.take_tokens("t", -20, rate) == 0
    assert await store.take_tokens("t", 31, rate) > 0
    assert await store.take_tokens("t", 30, rate) == 0


async def test_a_lease_is_taken_once_though_the_reply_was_lost(proxied):
    store, proxy = proxied
    await store.begin("another", "a", 5, ABOUT)  # loads the script
    async with proxy.losing_a_reply():
        await ended(store, "r")
    assert await store.begin("r", "b", 5, ABOUT)


async def test_a_resumed_request_has_the_state_of_before_though_the_reply_was_lost(proxied):
    store, proxy = proxied
    for name in ("another", "r"):
        await ended(store, name)
    await store.take_over("another", "b", 5, "d")
    async with proxy.losing_a_reply():
        _, record = await store.take_over("r", "b", 5, "d")
    assert record.fields["state"] == "interrupted"


async def test_a_write_counts_once_though_the_reply_was_lost(proxied):
    store, proxy = proxied
    lease = await store.begin("r", "a", 5, ABOUT)
    assert await store.write([Write(lease, 0, Run((1,), (True,)))], 5) == [1]
    async with proxy.losing_a_reply():
        assert await store.write([Write(lease, 1, Run((2, 3), (True, True)))], 5) == [3]
    async with proxy.losing_a_reply():
        assert await store.write([Write(lease, 3, Run((4,), (True,)), {}, "finished")], 5) == [4]
    assert await store.begin("r", "b", 5, ABOUT)


async def test_a_request_does_not_wait_for_its_own_lock_of_suspicion_whose_reply_was_lost(proxied):
    store, proxy = proxied
    await store.ping()
    async with asyncio.timeout(20), proxy.losing_a_reply(), store.suspicion():
        pass
    assert not await store._client.exists("rw:suspicion")
