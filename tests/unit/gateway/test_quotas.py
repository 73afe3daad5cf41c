"""Token buckets of tenants: the rule, in memory and in Redis, and what requests pay."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.gateway.redis_for_tests import redis_server
from unit.gateway.service_for_tests import IDS, at_rest, collect, serving
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.redis_store import open_store
from gateway.requests import GenerateRequest
from gateway.session_store import MemoryStore, Rate, StoreUnavailable
from rootward.errors import ContextLengthExceeded, RateLimited

RATE = Rate(10.0, 100.0)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 150)), max_size=40))
async def test_no_tenant_gets_more_than_its_rate(asks):
    """Over any time: at most a full bucket, what flowed in, and one overdraft."""
    now, taken, largest = 0.0, 0, 0
    store = MemoryStore(now=lambda: now)
    for pause, cost in asks:
        now += pause
        wait_s = await store.take_tokens("t", cost, RATE)
        assert wait_s >= 0
        if not wait_s:
            taken, largest = taken + cost, max(largest, cost)
        assert taken <= RATE.size + RATE.tokens_per_s * now + max(0, largest - RATE.size) + 1e-6


async def test_tokens_are_there_after_the_returned_wait():
    now = 0.0
    store = MemoryStore(now=lambda: now)
    assert await store.take_tokens("t", 70, RATE) == 0
    assert await store.take_tokens("t", 70, RATE) == pytest.approx(4.0)
    assert await store.take_tokens("u", 70, RATE) == 0
    now = 4.0
    assert await store.take_tokens("t", 70, RATE) == 0


async def test_what_is_larger_than_the_bucket_passes_when_it_is_full_and_is_paid_off():
    now = 0.0
    store = MemoryStore(now=lambda: now)
    assert await store.take_tokens("t", 250, RATE) == 0
    assert await store.take_tokens("t", 1, RATE) == pytest.approx(15.1)
    await store.take_tokens("t", -200, RATE)
    assert await store.take_tokens("t", 50, RATE) == 0


async def test_the_bucket_in_redis_is_shared_and_follows_the_same_rule():
    with redis_server() as url:
        one, two = [open_store(url) for _ in range(2)]
        slow, began = Rate(0.5, 100.0), time.monotonic()

        def about(seconds):  # which pass meanwhile
            return pytest.approx(seconds, abs=1 + time.monotonic() - began)

        assert await one.take_tokens("t", 60, slow) == 0
        assert await two.take_tokens("t", 60, slow) == about(40)
        await one.take_tokens("t", -30, slow)
        assert await two.take_tokens("t", 60, slow) == 0
        assert await one.take_tokens("big", 300, slow) == 0
        assert await two.take_tokens("big", 1, slow) == about(402)
        assert 0 < await one._client.pttl("rw:quota:{big}") < 700_000
        for store in (one, two):
            await store.close()


async def test_a_clock_of_redis_that_goes_back_stops_no_bucket():
    """As when a replica takes over whose clock is behind."""
    with redis_server() as url:
        store = open_store(url)
        quick = Rate(1000.0, 100.0)
        assert await store.take_tokens("t", 100, quick) == 0
        at = int(await store._client.hget("rw:quota:{t}", "at"))
        await store._client.hset("rw:quota:{t}", "at", at + 3_600_000)
        assert await store.take_tokens("t", 100, quick) <= 0.1
        async with asyncio.timeout(20):
            while await store.take_tokens("t", 50, quick):
                await asyncio.sleep(0.01)
        await store.close()


async def test_a_tenant_is_charged_for_generated_tokens_and_refused_with_retry_after():
    verifier = SpellingVerifier()
    async with serving(verifier, tenant_rate=Rate(1.0, 60.0)) as service:
        ask = GenerateRequest("a", tenant="t", max_tokens=50)
        assert len((await collect(service, ask)).spans) == len(IDS) < 25
        await at_rest(service, verifier)
        # There is room only for what was given back.
        await collect(service, GenerateRequest("a", tenant="t", max_tokens=30))
        with pytest.raises(RateLimited, match="'t' has used up") as caught:
            await collect(service, ask)
        assert caught.value.retry_after_s >= 1
        await collect(service, GenerateRequest("a", tenant="u", max_tokens=50))
        await at_rest(service, verifier)


async def test_without_the_store_each_gateway_counts_by_itself():
    class Gone(MemoryStore):
        async def take_tokens(self, *_):
            raise StoreUnavailable("gone")

    class Hanging(MemoryStore):
        async def take_tokens(self, *_):
            await asyncio.sleep(60)

    for store in (Gone(), Hanging()):
        async with serving(SpellingVerifier(), store=store, tenant_rate=Rate(0.01, 60.0)) as service:
            await collect(service, GenerateRequest("a", tenant="t", max_tokens=59))
            with pytest.raises(RateLimited):
                await collect(service, GenerateRequest("a", tenant="t", max_tokens=59))


async def test_the_operators_limits_on_one_request():
    verifier = SpellingVerifier()
    async with serving(verifier, max_prompt_tokens=3, max_output_tokens=7) as service:
        with pytest.raises(ContextLengthExceeded, match="prompt: 4 tokens are more than this server takes, 3"):
            await collect(service, GenerateRequest((1, 2, 3, 4)))
        with pytest.raises(ContextLengthExceeded, match="max_tokens: 8 is more than this server gives, 7"):
            await collect(service, GenerateRequest((1, 2, 3), max_tokens=8))
        assert len((await collect(service, GenerateRequest((1, 2, 3)))).spans) == 7
