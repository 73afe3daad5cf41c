"""Places and queue: the counts always add up, and at rest means at rest."""

import asyncio

import pytest

from gateway.admission import Admission
from rootward.errors import Overloaded, Unavailable


async def is_at_rest(admission):
    try:
        async with asyncio.timeout(0.02):
            await admission.at_rest()
    except TimeoutError:
        return False
    return True


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
