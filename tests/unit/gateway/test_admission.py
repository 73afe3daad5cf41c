"""Places and queue: the counts always add up, and at rest means at rest."""

import asyncio
import random

import pytest

from gateway.admission import Admission, LogprobLimit
from rootward.errors import Overloaded, Unavailable


async def is_at_rest(admission):
    return await admission.at_rest(0.02)


async def hold(admission, released):
    async with admission.slot():
        await released.wait()


async def test_counts_add_up():
    admission = Admission(max_num_seqs=2, max_num_queued_reqs=1)
    assert await is_at_rest(admission)
    released = asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, released)) for _ in range(3)]
    await asyncio.sleep(0)
    assert (admission.num_running, admission.num_waiting) == (2, 1)
    with pytest.raises(Overloaded, match="1 requests, its limit") as caught:
        await hold(admission, released)
    assert caught.value.retry_after_s
    assert not await is_at_rest(admission)
    tasks[2].cancel()  # a waiting one gives up
    await asyncio.sleep(0)
    assert (admission.num_running, admission.num_waiting) == (2, 0)
    tasks[0].cancel()  # a running one gives up
    await asyncio.sleep(0)
    assert admission.num_running == 1
    assert not await is_at_rest(admission)
    released.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await is_at_rest(admission)


async def test_one_alone_is_not_rest():
    admission = Admission(max_num_seqs=1, max_num_queued_reqs=0)
    async with admission.slot():
        assert not await is_at_rest(admission)
        with pytest.raises(Overloaded):
            await hold(admission, asyncio.Event())
    assert await is_at_rest(admission)


async def test_draining_refuses():
    admission = Admission(max_num_seqs=1, max_num_queued_reqs=9)
    admission.draining = True
    with pytest.raises(Unavailable, match="draining"):
        await hold(admission, asyncio.Event())


async def served(admission, order, name, tokens=0, priority=0):
    async with admission.slot(tokens, priority):
        order.append(name)
        await asyncio.sleep(0)


async def test_lower_priorities_first_then_by_arrival():
    admission, order = Admission(max_num_seqs=1, max_num_queued_reqs=9), []
    async with asyncio.TaskGroup() as group, admission.slot():
        for name, priority in [("a", 1), ("b", 0), ("c", -1), ("d", 0)]:
            group.create_task(served(admission, order, name, priority=priority))
        await asyncio.sleep(0)
    assert order == ["c", "b", "d", "a"]
    assert await is_at_rest(admission)


async def test_the_queue_is_bounded_in_tokens_but_takes_one_of_any_length():
    admission, order = Admission(max_num_seqs=1, max_num_queued_reqs=9, max_num_queued_tokens=100), []
    async with asyncio.TaskGroup() as group, admission.slot(1000):
        group.create_task(served(admission, order, "long", 500))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="prompts of 500 tokens; its limit is 100"):
            await served(admission, order, "refused", 1)
        assert admission.num_waiting_tokens == 500
    assert order == ["long"]
    assert admission.num_waiting_tokens == 0


async def test_when_to_come_again_follows_the_pace():
    admission = Admission(max_num_seqs=1, max_num_queued_reqs=10)
    admission._between_ends_s = 0.7
    async with asyncio.TaskGroup() as group, admission.slot():
        for number in range(10):
            group.create_task(served(admission, [], number))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as caught:
            await served(admission, [], "refused")
    assert caught.value.retry_after_s == 7.0


@pytest.mark.parametrize("seed", range(5))
async def test_places_are_conserved_under_cancellation(seed):
    rng, admission = random.Random(seed), Admission(max_num_seqs=3, max_num_queued_reqs=50)
    tasks = []
    for _ in range(400):
        if rng.random() < 0.6:
            tasks.append(asyncio.create_task(served(admission, [], 0, rng.randrange(9), rng.randrange(3))))
        elif tasks:
            rng.choice(tasks).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        assert 0 <= admission.num_running <= 3
        assert admission.num_running == 3 or not admission.num_waiting or any(not t.done() for t in tasks)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await is_at_rest(admission)
    assert (admission.num_running, admission.num_waiting, admission.num_waiting_tokens) == (0, 0, 0)


async def test_cancelled_requests_leave_the_queue():
    admission = Admission(max_num_seqs=1, max_num_queued_reqs=2)
    released = asyncio.Event()
    running = asyncio.create_task(hold(admission, released))
    await asyncio.sleep(0)
    for _ in range(500):
        waiting = asyncio.create_task(hold(admission, released))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert not admission._queue
    last = asyncio.create_task(hold(admission, released))
    await asyncio.sleep(0)
    released.set()
    await asyncio.gather(running, last)
    assert await is_at_rest(admission)


async def held_by(admission, order, tenant, seconds=0.0):
    async with admission.slot(tenant=tenant):
        order.append(tenant)
        await asyncio.sleep(seconds)


async def test_a_free_slot_goes_to_the_tenant_with_the_fewest_running_requests():
    admission, order = Admission(max_num_seqs=2, max_num_queued_reqs=9), []
    async with asyncio.TaskGroup() as group, admission.slot(tenant="many"), admission.slot(tenant="many"):
        for tenant in ("many", "many", "many", "few"):
            group.create_task(held_by(admission, order, tenant))
        await asyncio.sleep(0)
        assert admission.num_waiting == 4
    assert order[0] == "few"
    assert await is_at_rest(admission)


async def test_a_full_queue_refuses_the_newest_request_of_the_tenant_that_fills_it():
    admission = Admission(max_num_seqs=1, max_num_queued_reqs=3)
    order = []
    async with admission.slot(tenant="many"):
        many = [asyncio.create_task(held_by(admission, order, "many")) for _ in range(3)]
        await asyncio.sleep(0)
        few = asyncio.create_task(held_by(admission, order, "few"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert many[2].done()
        with pytest.raises(Overloaded, match="its limit"):
            many[2].result()
        assert admission.num_waiting == 3
        with pytest.raises(Overloaded):  # it has the most, and makes no room for itself
            await held_by(admission, order, "many")
    await asyncio.gather(*many[:2], few)
    assert sorted(order) == ["few", "many", "many"]
    assert await is_at_rest(admission)


async def test_the_answer_with_the_most_logprobs_is_ended_when_all_have_too_many():
    limit, ended = LogprobLimit(10), []
    async with limit.share(ended.append) as large, limit.share(pytest.fail) as small:
        large.add(8)
        small.add(2)
        assert not ended
        small.add(1)
        (error,) = ended
        assert isinstance(error, Overloaded)
        assert error.retry_after_s
        assert "more than 10" in str(error)
        small.add(7)  # the ended one counts no more
        large.add(1)
        assert len(ended) == 1


async def test_an_answer_that_is_complete_counts_and_is_not_ended():
    limit, ended = LogprobLimit(10), []
    async with limit.share(pytest.fail) as complete:
        complete.add(9)
        complete.growing = False
        async with limit.share(ended.append) as growing:
            growing.add(1)
            assert not ended
            growing.add(1)
        assert len(ended) == 1
    async with limit.share(pytest.fail) as later:  # what an answer held is given back
        later.add(10)
