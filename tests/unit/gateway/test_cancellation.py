"""A request that is cancelled while a reply is on its way leaves nothing taken: no lease, no tokens of its tenant, no place, no thread."""

import asyncio
import threading
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest
from support.records import record_of
from unit.gateway.redis_for_tests import redis_server
from unit.gateway.service_for_tests import IDS, at_rest, collect, ids_of, serving
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.admission import Admission
from gateway.generation import Aborted, Cutoff
from gateway.ledger import Ledger
from gateway.redis_store import open_store
from gateway.requests import GenerateRequest, Resume
from gateway.session_store import INTERRUPTED, RUNNING, MemoryStore, Rate
from gateway.tokenizer import LARGE_CHARACTERS, TokenizerPool
from rootward.errors import DeadlineExceeded, InvalidRequest, Unavailable

FIXED = Rate(1e-9, 1000.0)  # nothing flows in
ASK = GenerateRequest("a", request_id="one", tenant="t", max_tokens=50)
NAME = "t one"


class LateReplies(MemoryStore):
    """Does at once what it is asked. The reply to the method `late` comes when `reply` is set."""

    def __init__(self):
        super().__init__()
        self.late, self.asked, self.reply = "", asyncio.Event(), asyncio.Event()

    async def _replied(self, name, work):
        result = await work
        if self.late == name:
            self.asked.set()
            await self.reply.wait()
        return result

    async def begin(self, *args, **options):
        return await self._replied("begin", super().begin(*args, **options))

    async def take_over(self, *args):
        return await self._replied("take_over", super().take_over(*args))

    async def next_epoch(self, *args):
        return await self._replied("next_epoch", super().next_epoch(*args))

    async def write(self, *args):
        return await self._replied("write", super().write(*args))

    async def take_tokens(self, *args):
        return await self._replied("take_tokens", super().take_tokens(*args))

    async def cancel(self, task):
        """Cancel a task before it has the reply."""
        async with asyncio.timeout(60):
            await self.asked.wait()
            task.cancel()
            await asyncio.sleep(0.01)
            self.late = ""
            self.reply.set()
            with suppress(asyncio.CancelledError):
                await task

    async def used(self):
        """What tenant t has used of its tokens."""
        return round((self._full_at.get("t", self._now()) - self._now()) * FIXED.tokens_per_s)

    def is_leased(self, name):
        return self._is_leased(self._requests[name])


@pytest.fixture
def store():
    return LateReplies()


async def interrupted(service, request):
    """Cancel a request after its first tokens; they are returned."""
    got = []
    async with aclosing(service.generate(request)) as deltas:
        async for delta in deltas:
            got += ids_of(delta)
            if got:
                return tuple(got)
    raise AssertionError("it ended")


@pytest.mark.parametrize("method", ["begin", "take_tokens"])
async def test_a_request_that_is_cancelled_while_it_begins_can_be_sent_again_at_no_cost(store, method):
    async with serving(store=store, tenant_rate=FIXED) as service:
        store.late = method
        await store.cancel(asyncio.create_task(collect(service, ASK)))
        await at_rest(service)
        assert await store.used() == 0
        assert len((await collect(service, ASK)).spans) == len(IDS)
        await at_rest(service)


async def test_a_lease_that_is_cancelled_while_redis_grants_it_is_given_back():
    with redis_server() as url:
        store = open_store(url)
        ledger = Ledger(store, now=asyncio.get_running_loop().time)
        await store.begin("another", "h", 5, {})  # loads the script
        for i in range(60):
            task = asyncio.create_task(ledger.begin(f"r{i}", {"digest": "d"}))
            await asyncio.sleep(3e-5 * i)  # somewhere in the round trip
            task.cancel()
            with suppress(asyncio.CancelledError):
                ledger.end(await task, INTERRUPTED)
            await ledger.flush()
            assert not await store._client.exists(store._request_keys(f"r{i}")[2]), i
        await store.close()


@pytest.mark.parametrize("method", ["take_over", "take_tokens"])
async def test_a_resumption_that_is_cancelled_leaves_the_request_as_it_was(store, method):
    verifier = SpellingVerifier(run=1, delay_s=0.01)
    async with serving(verifier, store=store, tenant_rate=FIXED) as service:
        got = await interrupted(service, ASK)
        await at_rest(service, verifier)
        used = await store.used()
        assert used == 1 + len(got)
        again = replace(ASK, resume=Resume(len(got), got))
        store.late = method
        await store.cancel(asyncio.create_task(collect(service, again)))
        await at_rest(service, verifier)
        assert (await record_of(store, NAME)).fields["state"] == INTERRUPTED
        assert not store.is_leased(NAME)
        assert await store.used() == used
        assert len((await collect(service, again)).spans) == len(IDS) - len(got)
        await at_rest(service, verifier)
        assert await store.used() == 1 + len(IDS)


async def test_a_resumption_that_is_refused_does_not_make_its_tenant_pay_twice(store):
    async with serving(store=store, tenant_rate=FIXED) as service:
        await collect(service, ASK)
        await at_rest(service)
        store._requests[NAME].fields["state"] = RUNNING  # its gateway died before it gave back what was not used
        del store._requests[NAME].fields["finish"]
        await store.take_tokens("t", 50 - len(IDS), FIXED)
        with pytest.raises(InvalidRequest, match="resume_tokens"):
            await collect(service, replace(ASK, resume=Resume(1, (0,))))
        await at_rest(service)
        await collect(service, replace(ASK, resume=Resume(len(IDS))))
        await at_rest(service)
        assert await store.used() == 1 + len(IDS)


async def test_a_request_that_is_cancelled_between_two_attempts_ends_in_the_store(store):
    verifiers = [SpellingVerifier(run=1, die_after=lambda request: 3), SpellingVerifier(run=1, die_after=lambda r: 3)]
    async with serving(*verifiers, store=store, tenant_rate=FIXED) as service:
        store.late = "next_epoch"
        await store.cancel(asyncio.create_task(collect(service, ASK)))
        await at_rest(service, *verifiers)
        record = await record_of(store, NAME)
        assert record.fields["state"] == INTERRUPTED
        assert not store.is_leased(NAME)
        assert await store.used() == 1 + len(record.output)


async def test_a_client_that_leaves_with_the_last_token_gets_back_what_it_did_not_use(store):
    async with serving(store=store, tenant_rate=FIXED) as service:

        async def one():
            async with aclosing(service.generate(ASK)) as deltas:
                async for delta in deltas:
                    if delta.ending is not None:
                        store.late = "write"

        await store.cancel(asyncio.create_task(one()))
        await at_rest(service)
        assert await store.used() == 1 + len(IDS)


async def test_a_full_queue_makes_no_room_by_a_request_that_has_just_been_cancelled():
    admission = Admission(max_num_seqs=1, max_num_queued_reqs=2)

    async def hold(tenant):
        async with admission.slot(tenant=tenant):
            pass

    async with admission.slot(tenant="many"):
        many = [asyncio.create_task(hold("many")) for _ in range(2)]
        await asyncio.sleep(0)
        few = asyncio.create_task(hold("few"))  # runs before the one that is cancelled
        many[1].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*many, few, return_exceptions=True)
    assert many[0].exception() is None
    assert many[1].cancelled()
    assert few.exception() is None
    assert await admission.at_rest(1)


async def test_short_texts_do_not_wait_for_long_ones_whose_clients_have_gone():
    release, pool = threading.Event(), TokenizerPool()
    gone = [asyncio.create_task(pool.run(LARGE_CHARACTERS + 1, release.wait, 120)) for _ in range(4)]
    for task in gone:
        await asyncio.sleep(0.01)
        task.cancel()
    await asyncio.sleep(0.01)
    try:
        async with asyncio.timeout(60):  # less than the long ones take without `release`
            assert await pool.run(5000, lambda: "short") == "short"
    finally:
        release.set()
    await asyncio.gather(*gone, return_exceptions=True)
    assert pool._num_calls == 0
    pool.close()


@pytest.mark.parametrize(("late", "raised"), [("abort", Aborted), ("lose", DeadlineExceeded)])
async def test_a_request_whose_deadline_has_passed_can_be_aborted_and_lost_while_it_cleans_up(late, raised):
    """Both are called for many requests in a row: one that is ending must not keep the call from the others."""
    cutoff, cleaning, go_on = Cutoff(asyncio.get_running_loop().time() + 0.01), asyncio.Event(), asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await go_on.wait()

    waiting = asyncio.create_task(cutoff.wait(work(), "test"))
    await cleaning.wait()
    cutoff.abort() if late == "abort" else cutoff.lose(Unavailable("gone"))
    go_on.set()
    with pytest.raises(raised):
        await waiting
