"""A request that verifiers die of is tried once more, then refused and remembered; other requests do not notice."""

import asyncio

import pytest
from unit.gateway.service_for_tests import TEXT, at_rest, collect, serving
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.ledger import POISON_TTL_S, Ledger, PoisonRequest
from gateway.requests import GenerateRequest
from gateway.session_store import MemoryStore, StoreUnavailable
from rootward.core.requests import Sampling, VerifierRequest
from rootward.errors import Unavailable

POISON = "poison"
POISON_IDS = tuple(b"poison")


def is_poison(request):
    return request.sampling.top_k == 13


def verifiers(count=3):
    """They die of poison before its first token."""
    return [SpellingVerifier(die_after=lambda r: 0 if is_poison(r) else None, delay_s=0.005) for _ in range(count)]


def poison(**changes):
    return GenerateRequest("a", sampling=Sampling(top_k=13), **changes)


async def test_three_verifiers_survive_a_poison_request_but_two_and_the_second_time_all():
    three = verifiers()
    async with serving(*three) as service:
        other = asyncio.create_task(collect(service, GenerateRequest("b", session_id="s")))
        with pytest.raises(PoisonRequest, match="verifiers died"):
            await collect(service, poison())
        assert sum(v.up for v in three) == 1
        assert (await other).text == TEXT
        attempts = sum(is_poison(r) for v in three for r in v.requests)
        assert attempts == 2
        for changed in ({}, {"seed": 7}, {"request_id": "again"}, {"cache_salt": "x"}, {"tenant": "t"}):
            with pytest.raises(PoisonRequest):
                await collect(service, poison(**changed))
        assert sum(is_poison(r) for v in three for r in v.requests) == 2  # no verifier has seen it again
        assert service.metrics.registry.get_sample_value("rootward_requests_poisoned_total") == 1
        await at_rest(service, *three)


async def test_a_request_that_loses_one_verifier_before_its_first_token_is_served_by_the_next():
    once = SpellingVerifier(die_after=lambda r: 0)
    async with serving(once, SpellingVerifier(max_sessions=1)) as service:
        for _ in range(2):
            once.up = True
            assert (await collect(service, GenerateRequest("a"))).text == TEXT


async def test_a_broken_stream_of_a_verifier_that_lives_is_no_death():
    def break_stream(run):
        raise Unavailable("connection reset")

    broken = [SpellingVerifier(spoil=break_stream) for _ in range(2)]
    async with serving(*broken) as service:
        with pytest.raises(Unavailable, match="connection reset"):
            await collect(service, GenerateRequest("a"))
        with pytest.raises(Unavailable):  # and it is not remembered
            await collect(service, GenerateRequest("a"))


async def test_a_verifier_that_was_gone_before_it_saw_the_request_is_no_death():
    gone = [SpellingVerifier() for _ in range(3)]
    async with serving(*gone, SpellingVerifier(max_sessions=1), poll_s=60) as service:
        for verifier in gone:
            verifier.up = False
        assert (await collect(service, GenerateRequest("a"))).text == TEXT


async def test_a_verifier_that_was_told_to_end_before_the_first_token_is_no_death():
    """Both are replaced, as in a rolling upgrade, and a long prompt is not read in the time that they give it."""

    tried, last = [], SpellingVerifier(up=False)

    class Replaced(SpellingVerifier):
        async def generate(self, request):
            tried.append(self)
            self.draining = True
            async with asyncio.timeout(20):
                while not any(u.verifier is self and u.info.draining for u in service.upstreams):
                    await asyncio.sleep(0.005)
            self.up, last.up = False, len(tried) == 2
            raise Unavailable("the verifier ended its feed")
            yield

    async with serving(Replaced(), Replaced(), last, redispatch_wait_s=60) as service:
        assert (await collect(service, GenerateRequest("a"))).text == TEXT
    assert len(tried) == 2


async def test_suspects_are_tried_one_at_a_time_until_their_first_token():
    """Otherwise a request of a client that shared a verifier with a poison request would share its next one, too."""
    together = []

    class Observing(SpellingVerifier):
        num_prefilling = 0

        async def generate(self, request):
            Observing.num_prefilling += request.epoch > 1
            together.append(Observing.num_prefilling)
            begun = False
            async for run in super().generate(request):
                if not begun:
                    begun = True
                    Observing.num_prefilling -= request.epoch > 1
                yield run

    first = SpellingVerifier(die_after=lambda r: 0, max_sessions=100)
    async with serving(first, Observing(delay_s=0.01)) as service:
        requests = [collect(service, GenerateRequest("a", session_id=str(i))) for i in range(4)]
        for done in await asyncio.gather(*requests):
            assert done.text == TEXT
    assert max(together) == 1


async def test_a_poison_request_is_refused_by_every_gateway_of_a_store():
    store, two, fresh = MemoryStore(), verifiers(2), verifiers(1)
    async with serving(*two, store=store) as one, serving(*fresh, store=store) as other:
        with pytest.raises(PoisonRequest):
            await collect(one, poison())
        with pytest.raises(PoisonRequest):
            await collect(other, poison(request_id="elsewhere"))
        assert (await collect(other, GenerateRequest("a"))).text == TEXT
    assert not any(map(is_poison, fresh[0].requests))


async def test_poison_requests_are_forgotten_after_their_time_in_every_gateway():
    now = 0.0

    def clock():
        return now

    store = MemoryStore(now=clock)
    lists = [Ledger(store, now=clock) for _ in range(2)]
    request = VerifierRequest("r", POISON_IDS)
    await lists[0].add_poison(request)
    for poisoned in lists:
        with pytest.raises(PoisonRequest):
            await poisoned.refuse_poison(request)
        await poisoned.refuse_poison(VerifierRequest("r", (*POISON_IDS, 1)))
    now = POISON_TTL_S
    for poisoned in lists:
        await poisoned.refuse_poison(request)


async def test_without_the_store_a_gateway_remembers_by_itself():
    class Gone(MemoryStore):
        async def add_poison(self, content, ttl_s):
            raise StoreUnavailable("away")

        async def is_poison(self, content):
            raise StoreUnavailable("away")

    two = verifiers(2)
    async with serving(*two, store=Gone()) as service:
        for _ in range(2):
            with pytest.raises(PoisonRequest):
                await collect(service, poison())
    assert sum(is_poison(r) for v in two for r in v.requests) == 2
