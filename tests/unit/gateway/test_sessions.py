"""The same contract for every store: in memory and on a real Redis."""

import asyncio
import itertools
import random
import tempfile
from contextlib import suppress

import pytest
from redis.asyncio import Redis
from support.records import record_of
from unit.gateway.redis_for_tests import redis_server, running
from unit.gateway.service_for_tests import IDS, TEXT, collect, serving

from gateway.redis_store import RedisStore, open_store
from gateway.requests import GenerateRequest
from gateway.session_store import MemoryStore, Run, StoreUnavailable, Write
from rootward.core.requests import TokenLogprob
from rootward.errors import DuplicateRequest, StaleEpoch

_names = itertools.count()
ABOUT = {"digest": "d", "seed": "5"}


@pytest.fixture(scope="module")
def redis_url():
    with redis_server() as url:
        yield url


@pytest.fixture(params=["memory", "redis"])
async def store(request):
    kind = request.param
    made = MemoryStore() if kind == "memory" else open_store(request.getfixturevalue("redis_url"))
    yield made
    await made.close()


@pytest.fixture
def name():
    return f"request-{next(_names)}"


def run(*tokens):
    return Run(tokens, tuple(t % 2 == 0 for t in tokens))


async def write(store, lease, offset, *tokens, ttl_s=5, state="", **fields):
    due = Write(lease, offset, run(*tokens), fields, state)
    return (await store.write([due], ttl_s))[0]


async def renewed(store, lease, ttl_s=5):
    return (await store.write([Write(lease)], ttl_s))[0] >= 0


async def test_epochs_count_up_and_one_holder_drives(store, name):
    first = await store.begin(name, "a", 5, ABOUT)
    assert (first.request_id, first.epoch, first.holder) == (name, 1, "a")
    with pytest.raises(DuplicateRequest, match=name):
        await store.begin(name, "b", 5, ABOUT)
    second = await store.next_epoch(first, 5)
    assert second.epoch == 2
    assert await write(store, second, 0, state="finished") == 0
    assert (await store.begin(name, "b", 5, ABOUT)).epoch == 3


async def test_the_holder_may_ask_for_an_epoch_above_one_that_the_store_has_forgotten(store, name):
    lease = await store.begin(name, "a", 5, ABOUT)
    above = await store.next_epoch(lease, 5, 1_800_000_000)
    assert above.epoch == 1_800_000_001
    assert (await store.next_epoch(above, 5, 7)).epoch == 1_800_000_002
    assert await write(store, lease, 0, 1) == -1
    await store.take_over(name, "b", 5, "d")
    with pytest.raises(StaleEpoch):
        await store.next_epoch(above, 5, 1_900_000_000)


async def test_a_lease_runs_out_and_a_successor_fences_its_holder(store, name):
    old = await store.begin(name, "a", 0.05, ABOUT)
    await asyncio.sleep(0.1)
    new = await store.begin(name, "b", 5, ABOUT)
    assert new.epoch == old.epoch + 1
    assert await write(store, old, 0, 1) == -1
    assert await write(store, old, 0, state="finished") == -1
    with pytest.raises(StaleEpoch):
        await store.next_epoch(old, 5)
    assert await renewed(store, new)
    with pytest.raises(DuplicateRequest):
        await store.begin(name, "c", 5, ABOUT)


async def test_an_expired_lease_without_a_new_holder_is_taken_back(store, name):
    lease = await store.begin(name, "a", 0.05, ABOUT)
    await asyncio.sleep(0.1)
    assert await write(store, lease, 0, 1) == 1
    with pytest.raises(DuplicateRequest):
        await store.begin(name, "b", 5, ABOUT)


async def test_renewal_keeps_others_out(store, name):
    lease = await store.begin(name, "a", 0.2, ABOUT)
    for ttl_s in (0.2, 0.2, 60):
        await asyncio.sleep(0.1)
        assert await renewed(store, lease, ttl_s)
    await asyncio.sleep(0.3)
    with pytest.raises(DuplicateRequest):
        await store.begin(name, "b", 5, ABOUT)


async def test_an_older_epoch_of_the_same_holder_is_fenced(store, name):
    old = await store.begin(name, "a", 5, ABOUT)
    new = await store.next_epoch(old, 5)
    assert await write(store, old, 0, 1, state="finished") == -1
    assert await write(store, new, 0, 1) == 1
    with pytest.raises(DuplicateRequest):
        await store.begin(name, "b", 5, ABOUT)


async def test_the_log_grows_only_at_its_end_and_keeps_flags_and_logprobs(store, name):
    lease = await store.begin(name, "a", 5, ABOUT)
    top = (TokenLogprob(-0.5, ((7, -0.25), (8, float("-inf")))), TokenLogprob(-1.0))
    due = Write(lease, 0, Run((7, 8), (True, False), top))
    assert await store.write([due], 5) == [2]
    assert await write(store, lease, 1, 1) == 2
    assert await write(store, lease, 3, 1) == 2
    assert await store.write([Write(lease, 2, Run((9,), (True,), top[:1]))], 5) == [3]
    assert (await record_of(store, name)).output == Run((7, 8, 9), (True, False, True), (*top, top[0]))
    assert await write(store, lease, 3, *range(10_000)) == 10_003


async def test_it_ends_only_with_the_whole_log(store, name):
    lease = await store.begin(name, "a", 5, ABOUT)
    assert await write(store, lease, 3, 4, state="finished") == 0  # a store that has lost the first three
    assert (await record_of(store, name)).fields["state"] == "running"
    assert await write(store, lease, 0, 1, 2, 3, 4, state="finished", finish="x") == 4
    record = await record_of(store, name)
    assert (record.finished, record.fields["finish"], record.fields["seed"]) == (True, "x", "5")


async def test_many_requests_are_one_write_and_each_has_its_own_answer(store, name):
    leases = [await store.begin(f"{name}-{i}", "a", 5, ABOUT) for i in range(3)]
    await store.take_over(f"{name}-1", "b", 5, "d")
    assert await store.write([Write(lease, 0, run(i)) for i, lease in enumerate(leases)], 5) == [1, -1, 1]


async def test_another_holder_takes_over_what_runs_or_was_interrupted(store, name):
    old = await store.begin(name, "a", 5, ABOUT)
    await write(store, old, 0, 1, 2, verifier="v1")
    new, record = await store.take_over(name, "b", 5, "d")
    assert (new.epoch, new.holder, record.output) == (2, "b", run(1, 2))
    assert (record.fields["verifier"], record.fields["seed"]) == ("v1", "5")
    assert await write(store, old, 2, 3) == -1
    assert await write(store, new, 2, 3, state="interrupted") == 3
    newer, record = await store.take_over(name, "c", 5, "d")
    assert (newer.epoch, record.output.tokens) == (3, (1, 2, 3))


async def test_a_call_to_take_over_that_arrives_twice_or_late_changes_nothing(store, name):
    """The client of Redis repeats a call whose connection breaks, and the first one may arrive after the second."""
    await write(store, await store.begin(name, "a", 5, ABOUT), 0, 1, 2)
    lease, _ = await store.take_over(name, "b", 5, "d")
    assert await write(store, lease, 2, 3) == 3
    again, record = await store.take_over(name, "b", 5, "d")
    assert (again, record.output) == (lease, run(1, 2, 3))
    assert await write(store, lease, 3, 4) == 4
    later = await store.next_epoch(lease, 5)
    assert (await store.take_over(name, "b", 5, "d"))[0] == later
    assert await write(store, later, 4, 5, state="interrupted") == 5
    await store.take_over(name, "b", 5, "d")
    assert (await record_of(store, name)).fields["state"] == "interrupted"


async def test_take_over_returns_a_finished_record_and_an_empty_one_for_an_unknown_request(store, name):
    assert await store.take_over(name, "b", 5, "d") == (None, await record_of(store, name))
    lease = await store.begin(name, "a", 5, ABOUT)
    await write(store, lease, 0, 1, 2, state="finished", finish="x")
    taken, record = await store.take_over(name, "b", 5, "d")
    assert taken is None
    assert (record.finished, record.output) == (True, run(1, 2))
    assert (await store.begin(name, "c", 5, ABOUT)).epoch == 2


async def test_a_request_is_not_resumed_by_its_id_with_another_digest(store, name):
    lease = await store.begin(name, "a", 5, ABOUT)
    for _ in range(2):
        with pytest.raises(DuplicateRequest, match="asks something else"):
            await store.take_over(name, "b", 5, "another digest")
        assert await write(store, lease, 0, state="finished") == 0


async def test_a_new_run_under_a_known_id_begins_with_an_empty_log(store, name):
    old = await store.begin(name, "a", 5, ABOUT)
    await write(store, old, 0, 1, 2, state="interrupted", verifier="v1")
    new = await store.begin(name, "b", 5, ABOUT)
    assert "verifier" not in (await record_of(store, name)).fields
    assert await write(store, new, 0, 3) == 1
    assert await write(store, old, 0, 5) == -1
    assert (await record_of(store, name)).output == run(3)


async def test_a_write_at_the_beginning_replaces_the_log(store, name):
    lease = await store.begin(name, "a", 5, ABOUT)
    assert await write(store, lease, 0, 1, 2) == 2
    assert await write(store, lease, 0, 3) == 1
    assert (await record_of(store, name)).output == run(3)
    assert await write(store, lease, 0) == 0


async def test_one_of_many_racing_holders_wins(store, name):
    begun = (store.begin(name, f"h{i}", 5, ABOUT) for i in range(20))
    results = await asyncio.gather(*begun, return_exceptions=True)
    assert sum(isinstance(r, DuplicateRequest) for r in results) == 19


@pytest.mark.parametrize("prefix", ["rw", "blue"])
async def test_every_redis_key_has_a_prefix_and_a_time_to_live(redis_url, name, prefix):
    store = open_store(redis_url, prefix=prefix)
    lease = await store.begin(name, "a", 5, ABOUT)
    await write(store, lease, 0, 1)
    await store.put_hints(name, {"v": ["k"]}, 5)
    keys = [k async for k in store._client.scan_iter(match=f"*{name}*")]
    assert len(keys) == 5
    assert all(key.startswith(f"{prefix}:") for key in keys)
    assert all([await store._client.pttl(k) > 0 for k in keys])
    await store.close()


async def test_a_redis_that_restarts_empty_takes_the_running_lease_again(name):
    with tempfile.TemporaryDirectory(prefix="rw") as folder:
        path = f"{folder}/redis.sock"
        with running(path, folder):
            store = open_store(f"unix://{path}")
            lease = await store.next_epoch(await store.begin(name, "a", 5, ABOUT), 5)
        with pytest.raises(StoreUnavailable):
            await renewed(store, lease)
        with running(path, folder):
            assert await write(store, lease, 0, 1, 2) == 2  # without the scripts it knew before
            with pytest.raises(DuplicateRequest):
                await store.begin(name, "b", 5, ABOUT)
            assert (await store.next_epoch(lease, 5)).epoch == lease.epoch + 1
            await store.close()


async def test_a_gateway_starts_without_redis_and_records_its_requests_when_it_is_there(name):
    with tempfile.TemporaryDirectory(prefix="rw") as folder:
        path = f"{folder}/redis.sock"
        async with serving(store=open_store(f"unix://{path}", timeout_s=0.5), lease_s=1.0) as service:
            assert service.ready
            assert (await collect(service, GenerateRequest("a", request_id=name))).text == TEXT
            with running(path, folder):
                other = open_store(f"unix://{path}")
                async with asyncio.timeout(60):
                    while not (await record_of(other, name)).finished:
                        await asyncio.sleep(0.05)
                assert (await record_of(other, name)).output.tokens == IDS
                await other.close()


async def test_errors_of_an_unreachable_redis_have_no_password():
    store = open_store("redis://user:secret@127.0.0.1:1/0", timeout_s=0.5)
    with pytest.raises(StoreUnavailable) as caught:
        await store.ping()
    assert "secret" not in str(caught.value)
    await store.close()


async def test_no_url_is_memory():
    assert isinstance(open_store(""), MemoryStore)


async def test_one_request_is_under_suspicion_at_a_time(store):
    together = []
    inside = 0

    async def one():
        nonlocal inside
        async with store.suspicion():
            inside += 1
            together.append(inside)
            try:
                await asyncio.sleep(0.01)
            finally:
                inside -= 1

    tasks = [asyncio.create_task(one()) for _ in range(4)]
    await asyncio.sleep(0.005)
    tasks[0].cancel()
    with suppress(asyncio.CancelledError):
        await tasks[0]
    await asyncio.gather(*tasks[1:])
    assert together in ([1, 1, 1], [1, 1, 1, 1])


async def test_a_request_that_is_cancelled_while_it_takes_the_lock_of_suspicion_does_not_keep_it(store):
    async def one():
        async with store.suspicion():
            await asyncio.sleep(0.001)

    for i in range(100):
        task = asyncio.create_task(one())
        await asyncio.sleep(3e-5 * i)  # somewhere in the round trip of the lock
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if isinstance(store, RedisStore):
            assert not await store._client.exists("rw:suspicion")
    async with store.suspicion():
        pass


async def test_poison_is_remembered_for_its_time(store, name):
    assert not await store.is_poison(name)
    await store.add_poison(name, 60)
    assert await store.is_poison(name)
    await store.add_poison(f"{name}-short", 0.01)
    await asyncio.sleep(1.1)  # a store in memory looks once a second
    assert not await store.is_poison(f"{name}-short")


@pytest.mark.parametrize(("num_top", "most"), [(None, 10.5), (0, 37), (5, 176), (20, 600)])
async def test_the_memory_of_a_request_in_redis_is_that_of_the_documentation(redis_url, name, num_top, most):
    """docs/operations/redis.md: bytes of Redis for each token of output."""
    rng, store, num_tokens = random.Random(0), open_store(redis_url), 1000
    lease = await store.begin(name, "h" * 32, 5, ABOUT)
    for at in range(0, num_tokens, 10):
        tokens = tuple(rng.randrange(49152) for _ in range(10))
        top = [tuple((rng.randrange(49152), float(-rng.expovariate(0.2))) for _ in range(num_top or 0)) for _ in tokens]
        logprobs = () if num_top is None else tuple(TokenLogprob(-rng.expovariate(1), pairs) for pairs in top)
        assert await store.write([Write(lease, at, Run(tokens, (True,) * 10, logprobs))], 5) == [at + 10]
    async with Redis.from_url(redis_url) as client:
        keys = [key async for key in client.scan_iter(f"*{{{name}}}*")]
        sizes = [await client.memory_usage(key, samples=0) for key in keys]
        assert all([await client.pttl(key) > 0 for key in keys])
    await store.close()
    assert len(keys) == 4
    assert 0.8 * most < sum(sizes) / num_tokens < most
