"""The record of running requests: what is written, when, and which epochs may be given out."""

import asyncio
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs
from support.records import record_of
from unit.gateway.redis_for_tests import redis_server

from gateway.ledger import Ledger
from gateway.redis_store import open_store
from gateway.router import PUBLISHED_S, TTL_S, Prefixes, PrefixKeys, prefix_lengths, tokens_held
from gateway.session_store import INTERRUPTED, MemoryStore, Run, StoreUnavailable, Write
from rootward.core.requests import TokenLogprob, VerifierRequest
from rootward.errors import StaleEpoch, Unavailable
from rootward.ports import Lease


class Counting(MemoryStore):
    """Counts writes with tokens; `dead` makes every call fail."""

    def __init__(self):
        super().__init__(now=lambda: self.time)
        self.time, self.appends, self.dead = 0.0, 0, False

    async def begin(self, *args, **options):
        self._check()
        return await super().begin(*args, **options)

    async def take_over(self, *args):
        self._check()
        return await super().take_over(*args)

    async def next_epoch(self, *args):
        self._check()
        return await super().next_epoch(*args)

    async def hints(self, *args):
        self._check()
        return await super().hints(*args)

    async def write(self, writes, ttl_s):
        self._check()
        self.appends += sum(bool(w.run) for w in writes)
        return await super().write(writes, ttl_s)

    def _check(self):
        if self.dead:
            raise StoreUnavailable("gone")


def run(*tokens):
    return Run(tokens, (False,) * len(tokens))


async def logged(store):
    return (await record_of(store, "r")).output.tokens


@pytest.fixture(scope="module")
def redis_url():
    with redis_server() as url:
        yield url


@pytest.fixture
def store():
    return Counting()


@pytest.fixture
def ledger(store):
    return Ledger(store, now=lambda: store.time, lease_s=6.0, flush_s=0.0)


async def test_many_runs_are_one_write(store, ledger):
    entry = await ledger.begin("r")
    for token in range(100):
        ledger.extend(entry, run(token))
    await ledger.flush()
    await ledger.flush()
    assert store.appends == 1
    assert await logged(store) == tuple(range(100))
    ledger.end(entry, "finished")
    await ledger.flush()
    assert store._requests["r"].fields["state"] == "finished"
    assert not ledger._entries


async def test_leases_are_renewed_at_a_third_of_their_time(store, ledger):
    entry = await ledger.begin("r")
    for _ in range(10):
        store.time += 2.1
        await ledger.flush()
        assert not entry.lost
        assert store._requests["r"].lease_until == store.time + 6


async def test_a_lost_lease_stops_the_request(store, ledger):
    entry = await ledger.begin("r")
    store.time += 10
    await store.begin("r", "another", 60, {})
    await ledger.flush()
    with pytest.raises(StaleEpoch):
        ledger.extend(entry, run(1))
    ledger.end(entry, "interrupted")
    await ledger.flush()
    assert store._requests["r"].holder == "another"
    assert not ledger._entries


async def test_a_log_that_vanished_is_written_again(store, ledger):
    entry = await ledger.begin("r")
    ledger.extend(entry, run(1, 2))
    await ledger.flush()
    store._requests.clear()  # Redis restarted empty
    ledger.extend(entry, run(3))
    for _ in range(3):
        await ledger.flush()
    assert await logged(store) == (1, 2, 3)


async def test_a_long_backlog_is_written_in_parts(store, ledger, monkeypatch):
    """A Redis that comes back empty is told all outputs again. In one write they would take longer than it may, each time anew."""
    monkeypatch.setattr("gateway.ledger.MOST_WRITTEN", 8)
    sizes, write = [], store.write

    async def watched(writes, ttl_s):
        sizes.append(
            sum(len(one.run) * (1 + len(one.run.logprobs[0].top) if one.run.logprobs else 1) for one in writes)
        )
        return await write(writes, ttl_s)

    store.write = watched
    plain, told = await ledger.begin("r"), await ledger.begin("told")
    output = tuple(range(20))
    likely = TokenLogprob(-1.0, ((1, -1.0), (2, -1.5)))
    ledger.extend(plain, run(*output))
    ledger.extend(told, Run(output, (False,) * 20, (likely,) * 20))
    await ledger.flush()
    assert await logged(store) == (await record_of(store, "told")).output.tokens == output
    store._requests.clear()  # Redis restarted empty
    ledger.end(plain, "finished")
    ledger.end(told, "finished")
    for _ in range(2):  # the first finds that out
        await ledger.flush()
    assert max(sizes) <= 8
    for name in ("r", "told"):
        assert store._requests[name].fields["state"] == "finished"
        assert store._requests[name].log.tokens == output
    assert not ledger._entries


async def test_an_append_whose_answer_was_lost_is_not_written_twice(store, ledger):
    entry = await ledger.begin("r")
    ledger.extend(entry, run(1, 2))
    await MemoryStore.write(store, [Write(entry.lease, 0, run(1, 2))], 6.0)
    ledger.extend(entry, run(3))
    for _ in range(3):
        await ledger.flush()
    assert await logged(store) == (1, 2, 3)


async def test_epochs_go_up_even_when_the_store_forgot_them(store, ledger):
    entry = await ledger.begin("r")
    for epoch in (2, 3):
        await ledger.next_epoch(entry)
        assert entry.epoch == epoch
    store._requests.clear()
    await ledger.next_epoch(entry)
    assert entry.epoch == 4
    assert store._requests["r"].epoch == 4


async def test_without_the_store_epochs_are_counted_on_only_while_the_lease_lasts(store, ledger):
    entry = await ledger.begin("r")
    store.dead = True
    store.time += 5.9
    await ledger.next_epoch(entry)
    assert entry.epoch == 2
    store.time += 0.2
    with pytest.raises(Unavailable, match="store is gone, and this request needs it: its lease has run out"):
        await ledger.next_epoch(entry)
    assert entry.epoch == 2


async def test_a_write_refused_for_the_holders_own_next_epoch_does_not_lose_the_request(store, ledger, monkeypatch):
    """The two calls are on two connections: the refusal of a write of the old epoch may arrive before the new epoch does."""
    entry = await ledger.begin("r")
    granted, arrives, next_epoch = asyncio.Event(), asyncio.Event(), store.next_epoch

    async def slow_reply(*arguments):
        lease = await next_epoch(*arguments)
        granted.set()
        await arrives.wait()
        return lease

    monkeypatch.setattr(store, "next_epoch", slow_reply)
    attempt = asyncio.create_task(ledger.next_epoch(entry))
    await granted.wait()
    ledger.note(entry, verifier="v")
    await ledger.flush()
    arrives.set()
    await attempt
    ledger.extend(entry, run(1))
    await ledger.flush()
    assert (entry.epoch, await logged(store)) == (2, (1,))
    assert store._requests["r"].fields["verifier"] == "v"


async def test_only_a_store_that_answers_gives_an_epoch_above_that_of_a_verifier(store, ledger):
    entry = await ledger.begin("r")
    await ledger.next_epoch(entry, above=9)
    assert entry.epoch == store._requests["r"].epoch == 10
    store.dead = True
    with pytest.raises(Unavailable, match="a verifier remembers a later epoch") as refused:
        await ledger.next_epoch(entry, above=20)
    assert refused.value.retry_after_s  # the client may resume then: no other gateway drives the request
    assert entry.epoch == 10


@pytest.fixture
async def redis(redis_url):
    client = Redis.from_url(redis_url)
    yield client
    await client.config_set("maxmemory", 0)
    await client.flushall()
    await client.aclose()


@pytest.mark.parametrize("flushed", [False, True])
async def test_a_request_whose_keys_redis_refuses_takes_the_store_from_no_other(redis, redis_url, flushed):
    store = open_store(redis_url)
    ledger = Ledger(store, now=asyncio.get_running_loop().time, flush_s=0.0)
    bad, good = await ledger.begin("bad"), await ledger.begin("good")
    await redis.set("rw:req:{bad}", "no hash")
    for token in range(3):
        for entry in (bad, good):
            ledger.extend(entry, run(token))
        if flushed:  # Redis has restarted
            await redis.script_flush()
        with capture_logs() as lines:
            await ledger.flush()
        assert [line["event"] for line in lines] == (["request_unrecorded"] if token == 0 else [])
        assert not ledger.down
    assert (await record_of(store, "good")).output.tokens == (0, 1, 2)
    assert bad.tokens == [0, 1, 2]  # it runs on
    ledger.end(bad, "finished")
    ledger.end(good, "finished")
    await ledger.flush()
    assert not ledger._entries
    await store.close()


async def test_a_request_whose_lease_redis_refuses_takes_the_store_from_no_other(redis, redis_url):
    await redis.rpush("rw:req:{bad}:epoch", "no number")
    store = open_store(redis_url)
    ledger = Ledger(store, now=asyncio.get_running_loop().time, flush_s=0.0)
    entry = await ledger.begin("bad")
    assert (entry.epoch, ledger.down) == (1, False)
    with pytest.raises(Unavailable, match="cannot be resumed"):
        await ledger.take_over("bad", "digest")
    await ledger.next_epoch(entry)
    ledger.extend(entry, run(1))
    await ledger.flush()
    assert (entry.epoch, ledger.down, ledger._entries) == (2, False, set())
    await store.close()


async def test_a_run_that_was_taken_over_is_written_again_once_after_redis_came_back_empty(
    redis, redis_url, monkeypatch
):
    """In parts, and with an end: fields of the store's own, as they were when it was taken over, are not among what is written."""
    stores = [open_store(redis_url) for _ in range(2)]
    one, two = (Ledger(store, now=asyncio.get_running_loop().time, flush_s=0.0) for store in stores)
    one.extend(await one.begin("r", {"digest": "d", "seed": "7"}), run(1, 2, 3))
    await one.flush()
    entry, _ = await two.take_over("r", "d")
    two.extend(entry, run(4))
    await two.flush()
    await redis.flushall()
    monkeypatch.setattr("gateway.ledger.MOST_WRITTEN", 4)
    offsets = []
    write = stores[1].write

    async def noted(writes, ttl_s):
        offsets.extend(one.offset for one in writes)
        return await write(writes, ttl_s)

    monkeypatch.setattr(stores[1], "write", noted)
    for token in range(5, 9):
        two.extend(entry, run(token))
        for _ in range(3):
            await two.flush()
    assert offsets == [4, 0, 4, 5, 6, 7]
    record = await record_of(stores[1], "r")
    assert (record.output.tokens, record.running) == (tuple(range(1, 9)), True)
    assert (record.fields["digest"], record.fields["seed"]) == ("d", "7")
    two.note(entry, finish="{}")
    two.end(entry, "finished")
    await two.flush()
    assert not two._entries
    assert (await record_of(stores[1], "r")).finished
    assert not await redis.exists("rw:req:{r}:lease")
    for store in stores:
        await store.close()


async def test_a_request_whose_record_was_lost_before_its_first_token_can_be_resumed(redis, redis_url):
    store = open_store(redis_url)
    ledger = Ledger(store, now=asyncio.get_running_loop().time, flush_s=0.0)
    entry = await ledger.begin("r", {"digest": "d", "seed": "7"})
    await ledger.flush()
    await redis.flushall()
    ledger.extend(entry, run(1, 2))
    await ledger.flush()
    ledger.extend(entry, run(3))
    await ledger.flush()
    taken, record = await ledger.take_over("r", "d")
    assert taken is not None
    assert (record.fields["seed"], record.output.tokens) == ("7", (1, 2, 3))
    await store.close()


async def test_a_redis_that_takes_no_writes_is_down_until_it_takes_them(redis, redis_url):
    store = open_store(redis_url)
    ledger = Ledger(store, now=asyncio.get_running_loop().time, flush_s=0.0)
    entry = await ledger.begin("r")
    await redis.config_set("maxmemory", 1)
    ledger.extend(entry, run(1))
    await ledger.flush()
    assert ledger.down
    await redis.config_set("maxmemory", 0)
    await ledger.flush()
    assert not ledger.down
    assert await logged(store) == (1,)
    await store.close()


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_command_that_arrives_after_the_gateway_has_gone_on_fences_no_run(kind, redis, redis_url):
    """The gateway has stopped waiting for it, and takes epochs by itself meanwhile."""
    store = MemoryStore() if kind == "memory" else open_store(redis_url)
    own = Lease("r", 1, "holder")  # of a request that begins without the store
    assert await store.write([Write(own, 0, run(1), {"digest": "d"})], 5) == [1]
    late = await store.begin("r", "holder", 5, {"digest": "d"})
    assert late.epoch == 1
    assert await store.write([Write(own, 1, run(2))], 5) == [2]
    following = Lease("r", 2, "holder")
    assert await store.write([Write(following, 2, run(3))], 5) == [3]
    for _ in range(2):
        assert (await store.next_epoch(own, 5)).epoch == 2
    assert await store.write([Write(following, 3, run(4))], 5) == [4]
    assert (await store.next_epoch(following, 5, above=7)).epoch == 8
    assert await store.write([Write(following, 4, run(5))], 5) == [-1]
    assert (await record_of(store, "r")).output.tokens == (1, 2, 3, 4)
    await store.close()


async def test_a_request_begun_without_the_store_is_recorded_later(store, ledger):
    store.dead = True
    entry = await ledger.begin("r")
    assert entry.epoch == 1
    ledger.extend(entry, run(1))
    await ledger.flush()
    store.dead = False
    store.time += 5
    for _ in range(3):
        await ledger.flush()
    assert await logged(store) == (1,)
    with pytest.raises(Exception, match="running already"):
        await store.begin("r", "another", 5, {})


async def test_ended_requests_do_not_pile_up_while_the_store_is_gone(store, ledger):
    entry = await ledger.begin("r")
    store.dead = True
    ledger.extend(entry, run(1))
    ledger.end(entry, "finished")
    await ledger.flush()
    assert ledger._entries
    store.time += 61
    await ledger.flush()
    assert not ledger._entries


async def test_the_loop_writes_and_sleeps_when_there_is_nothing(store, ledger):
    loop = asyncio.create_task(ledger.run())
    entry = await ledger.begin("r")
    ledger.extend(entry, run(1))
    async with asyncio.timeout(60):
        while await logged(store) != (1,):
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert store.appends == 1
    loop.cancel()


def held(process, age_s):
    return age_s < TTL_S


async def test_the_holder_of_a_prompt_is_known_at_once_and_to_other_gateways(redis_url, monkeypatch):
    monkeypatch.setattr("gateway.ledger.HINT_S", 10)  # on a busy machine Redis may need longer than gateways wait
    stores = [open_store(redis_url) for _ in range(2)]
    gone = set()

    def is_held(process, age_s):
        return process not in gone and held(process, age_s)

    now = asyncio.get_running_loop().time
    one, two = (Ledger(store, now=now, model=lambda: "m", is_held=is_held) for store in stores)
    prompt = VerifierRequest("r", tuple(range(100)))
    one.computed(one.keys(prompt), (7,) * 40, "v1:1@5")
    assert await one.held(one.keys(prompt)) == {"v1:1": 96}
    assert await two.held(two.keys(prompt)) == {}
    await one.flush()
    assert await two.held(two.keys(prompt)) == {"v1:1": 96}
    longer = replace(prompt, prompt=(*prompt.prompt, *(7,) * 40, 8, 9))
    assert await two.held(two.keys(longer)) == {"v1:1": 128}
    assert await two.held(two.keys(replace(longer, tenant="other"))) == {}
    assert await two.held(two.keys(replace(longer, cache_salt="other"))) == {}
    two.computed(two.keys(replace(prompt, prompt=(*range(64), *range(300, 400)))), (), "v2:1@6")
    assert await two.held(two.keys(prompt)) == {"v1:1": 96, "v2:1": 64}

    # A restart.
    gone.add("v1:1@5")
    assert await two.held(two.keys(prompt)) == {"v2:1": 64}
    for store in stores:
        await store.close()


async def test_hints_are_not_waited_for_when_the_store_is_gone(store, ledger):
    store.dead = True
    assert await ledger.held(ledger.keys(VerifierRequest("r", tuple(range(100))))) == {}


def test_long_prompts_have_few_keys_of_fixed_lengths():
    assert prefix_lengths(31) == []
    assert prefix_lengths(600) == [32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512]
    assert len(prefix_lengths(131_072)) == 44
    for longest in (500, 5_000, 50_000):  # what is not covered is less than a fifth
        assert prefix_lengths(longest)[-1] > 0.8 * longest
    keys = PrefixKeys("m", VerifierRequest("r", tuple(range(5_000)))).keys
    assert len(keys) == len(prefix_lengths(5_000))
    assert PrefixKeys("m", VerifierRequest("r", tuple(range(700)))).keys == keys[: len(prefix_lengths(700))]
    salted = PrefixKeys("m", VerifierRequest("r", tuple(range(5_000)), tenant="a", cache_salt="s")).keys
    assert not set(keys) & set(salted)
    named = VerifierRequest("r", tuple(range(5_000)), tenant=repr(("a", "s")))
    assert not set(salted) & set(PrefixKeys("m", named).keys)


@pytest.mark.parametrize("num_prompt", [1, 31, 32, 100, 256, 300])
@pytest.mark.parametrize("num_output", [0, 1, 31, 64, 200])
def test_keys_behind_a_prompt_are_those_of_the_whole_text(num_prompt, num_output):
    prompt, output = tuple(range(num_prompt)), tuple(range(7, 7 + num_output))
    whole = PrefixKeys("m", VerifierRequest("r", (*prompt, *output))).keys
    assert PrefixKeys("m", VerifierRequest("r", prompt)).with_output(output) == whole


async def test_hints_do_not_pile_up_while_the_store_is_gone():
    store = Counting()
    ledger = Ledger(store, now=lambda: store.time)
    ledger.extend(await ledger.begin("r"), run(1))
    store.dead = True
    ledger.computed(ledger.keys(VerifierRequest("r", tuple(range(100)))), (), "v@1")
    await ledger.flush()
    assert ledger.prefixes.take_unpublished() == {}


async def test_a_run_that_has_just_ended_here_is_taken_over_with_all_of_its_tokens():
    store = Counting()
    ledger = Ledger(store, now=lambda: store.time)
    entry = await ledger.begin("r", {"digest": "d"})
    ledger.extend(entry, run(1, 2))
    ledger.end(entry, INTERRUPTED)
    _, record = await ledger.take_over("r", "d")
    assert record.output.tokens == (1, 2)


def test_the_longest_prefix_that_is_held_counts():
    hints = [{"a:1@1": 1, "b:1@1": 1}, {"b:1@1": 1, "c:1@1": 1}, {"a:1@1": TTL_S + 1, "b:1@1": 1}]
    assert tokens_held(hints, held) == {"a:1": 32, "b:1": 96, "c:1": 64}


def test_hints_are_published_now_and_then():
    time = [0.0]
    prefixes = Prefixes(lambda: time[0], held)
    prefixes.sent(["k"], "v@1")
    assert prefixes.take_unpublished() == {"v@1": ["k"]}
    time[0] = 0.9 * PUBLISHED_S
    prefixes.sent(["k"], "v@1")
    assert prefixes.take_unpublished() == {}
    assert prefixes.holders(["k"]) == [{"v@1": 0}]  # the age that counts here is that of the last use
    time[0] = 1.5 * PUBLISHED_S
    prefixes.sent(["k"], "v@1")
    assert prefixes.take_unpublished() == {"v@1": ["k"]}


def test_a_prefix_that_was_evicted_and_computed_again_is_published_at_once():
    time = [0.0]

    def is_held(process, age_s):
        return age_s <= 0.3 * PUBLISHED_S

    prefixes = Prefixes(lambda: time[0], is_held)
    prefixes.sent(["k"], "v@1")
    prefixes.take_unpublished()
    time[0] = 0.2 * PUBLISHED_S
    prefixes.sent(["k"], "v@1")
    assert prefixes.take_unpublished() == {}
    time[0] = 0.4 * PUBLISHED_S  # other gateways take what was published for evicted
    prefixes.sent(["k"], "v@1")
    assert prefixes.take_unpublished() == {"v@1": ["k"]}


def test_hints_that_have_expired_are_forgotten_with_the_next_process():
    time = [0.0]
    prefixes = Prefixes(lambda: time[0], held)
    prefixes.sent(["k"], "v@1")
    time[0] = TTL_S + 1
    prefixes.sent(["k"], "v@2")
    assert prefixes.holders(["k"]) == [{"v@2": 0}]
