"""The same contract for every store: in memory and on a real Redis."""

import asyncio
import itertools
import tempfile

import pytest
from unit.gateway.redis_for_tests import redis_server, running

from gateway.sessions import MemoryStore, RedisStore, StoreUnavailable, open_store, redacted
from rootward.errors import ConfigurationError, DuplicateRequest

_names = itertools.count()


@pytest.fixture(scope="module")
def redis_url():
    with redis_server() as url:
        yield url


@pytest.fixture(params=["memory", "redis"])
async def store(request):
    kind = request.param
    made = MemoryStore() if kind == "memory" else await RedisStore.connect(request.getfixturevalue("redis_url"))
    yield made
    await made.close()


@pytest.fixture
def name():
    return f"request-{next(_names)}"


async def test_epochs_count_up_and_one_holder_drives(store, name):
    first = await store.acquire(name, "a", 5)
    assert (first.request_id, first.epoch, first.holder) == (name, 1, "a")
    with pytest.raises(DuplicateRequest, match=name):
        await store.acquire(name, "b", 5)
    assert (await store.acquire(name, "a", 5)).epoch == 2
    await store.release(await store.acquire(name, "a", 5), "finished")
    assert (await store.acquire(name, "b", 5)).epoch == 4


async def test_a_lease_runs_out_and_a_successor_fences_its_holder(store, name):
    old = await store.acquire(name, "a", 0.05)
    await asyncio.sleep(0.1)
    new = await store.acquire(name, "b", 5)
    assert new.epoch == old.epoch + 1
    assert not await store.renew(old, 5)
    assert not await store.append(old, 0, [1])
    await store.release(old, "finished")
    assert await store.renew(new, 5)
    with pytest.raises(DuplicateRequest):
        await store.acquire(name, "c", 5)


async def test_an_expired_lease_that_nobody_took_is_taken_back(store, name):
    lease = await store.acquire(name, "a", 0.05)
    await asyncio.sleep(0.1)
    assert not await store.append(lease, 0, [1])
    assert await store.renew(lease, 5)
    assert await store.append(lease, 0, [1])


async def test_renewal_keeps_others_out(store, name):
    lease = await store.acquire(name, "a", 0.2)
    for _ in range(3):
        await asyncio.sleep(0.1)
        assert await store.renew(lease, 0.2)
    with pytest.raises(DuplicateRequest):
        await store.acquire(name, "b", 5)


async def test_an_older_epoch_of_the_same_holder_is_fenced(store, name):
    old = await store.acquire(name, "a", 5)
    new = await store.acquire(name, "a", 5)
    assert not await store.append(old, 0, [1])
    assert not await store.renew(old, 5)
    await store.release(old, "finished")
    assert await store.append(new, 0, [1])


async def test_the_log_takes_tokens_only_at_its_end(store, name):
    lease = await store.acquire(name, "a", 5)
    assert await store.committed(name) == ()
    assert await store.append(lease, 0, [5, 6])
    assert not await store.append(lease, 1, [7])
    assert not await store.append(lease, 3, [7])
    assert await store.append(lease, 2, range(10_000))
    assert await store.committed(name) == (5, 6, *range(10_000))
    later = await store.acquire(name, "a", 5)
    assert await store.append(later, 10_002, [9])
    await store.release(later, "finished")
    assert len(await store.committed(name)) == 10_003


async def test_a_new_run_under_a_known_id_begins_with_an_empty_log(store, name):
    old = await store.acquire(name, "a", 5)
    await store.append(old, 0, [1, 2])
    await store.release(old, "aborted")
    new = await store.acquire(name, "b", 5)
    await store.restart(old)
    assert await store.committed(name) == (1, 2)
    await store.restart(new)
    assert await store.append(new, 0, [3])
    assert await store.committed(name) == (3,)


async def test_sessions_keep_fields_for_their_time(store, name):
    assert await store.get_session(name) == {}
    await store.put_session(name, {"verifier": "v1", "tokens": "7"}, 5)
    await store.put_session(name, {"verifier": "v2"}, 0.05)
    assert await store.get_session(name) == {"verifier": "v2", "tokens": "7"}
    await asyncio.sleep(0.1)
    assert await store.get_session(name) == {}


async def test_one_of_many_racing_holders_wins(store, name):
    results = await asyncio.gather(*(store.acquire(name, f"h{i}", 5) for i in range(20)), return_exceptions=True)
    assert sum(isinstance(r, DuplicateRequest) for r in results) == 19


async def test_every_redis_key_has_a_time_to_live(redis_url, name):
    store = await RedisStore.connect(redis_url)
    lease = await store.acquire(name, "a", 5)
    await store.append(lease, 0, [1])
    await store.put_session(name, {"verifier": "v"}, 5)
    keys = [k async for k in store._client.scan_iter(match=f"rw:*{name}*")]
    assert len(keys) == 5
    assert all([await store._client.pttl(k) > 0 for k in keys])
    await store.close()


async def test_a_redis_that_restarts_empty_takes_the_running_lease_again(name):
    with tempfile.TemporaryDirectory(prefix="rw") as folder:
        path = f"{folder}/redis.sock"
        with running(path, folder):
            store = await RedisStore.connect(f"unix://{path}")
            lease = await store.acquire(name, "a", 5)
            lease = await store.acquire(name, "a", 5)
        with pytest.raises(StoreUnavailable):
            await store.renew(lease, 5)
        with running(path, folder):
            assert await store.renew(lease, 5)
            assert await store.append(lease, 0, [1, 2])
            with pytest.raises(DuplicateRequest):
                await store.acquire(name, "b", 5)
            assert (await store.acquire(name, "a", 5)).epoch == lease.epoch + 1
            await store.close()


async def test_an_unreachable_redis_is_named_without_its_password():
    with pytest.raises(ConfigurationError, match=r"redis://127.0.0.1:1/0.*cannot be reached") as caught:
        await open_store("redis://user:secret@127.0.0.1:1/0", timeout_s=0.5)
    assert caught.value.exit_code == 4
    assert "secret" not in str(caught.value)
    assert redacted("redis://:p@h:1/2") == "redis://h:1/2"


async def test_a_url_that_is_none_is_a_usage_error():
    with pytest.raises(ConfigurationError, match="redis_url") as caught:
        await open_store("http://localhost")
    assert caught.value.exit_code == 2


async def test_no_url_is_memory():
    assert isinstance(await open_store(""), MemoryStore)
