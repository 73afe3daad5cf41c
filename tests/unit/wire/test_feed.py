"""Queued runs of a generation: merged where they are consecutive, else not."""

import asyncio

import pytest

from rootward.core.requests import Committed, Finish, FinishReason, Prefilled, TokenLogprob
from rootward.errors import InvalidRequest, Unavailable
from rootward.wire import channel
from rootward.wire.feed import Feed, RunQueue

END = Finish(FinishReason.LENGTH)


def run(offset, *tokens, epoch=1, **fields):
    return Committed(epoch, offset, tokens, tuple(i < len(tokens) - 1 for i in range(len(tokens))), **fields)


def num_tokens(queue):
    return sum(len(item.tokens) for item in queue._items)


def arrived(*items, merging=True):
    made = RunQueue(merging=merging)
    for item in items:
        made.put(item)
    return made


async def test_queued_runs_are_merged_up_to_the_finish():
    told = [TokenLogprob(-float(i)) for i in range(4)]
    waiting = arrived(
        run(0, 5, 6, logprobs=tuple(told[:2]), prefilled=Prefilled(3)),
        run(2, 7, logprobs=(told[2],)),
        run(3, 8, logprobs=(told[3],), finish=END),
    )
    assert num_tokens(waiting) == 4
    joined = Committed(1, 0, (5, 6, 7, 8), (True, False, False, False), END, tuple(told), prefilled=Prefilled(3))
    assert await waiting.take() == joined
    assert num_tokens(waiting) == 0


@pytest.mark.parametrize(
    "apart",
    [
        [run(0, 5), run(2, 6)],  # a gap, for the gateway to see
        [run(0, 5), run(0, 5)],
        [run(0, 5), run(1, 6, epoch=2)],
        [run(0, 5), run(1, 6, prefilled=Prefilled(1))],
        [run(0, 5, finish=END), run(1, 6)],
    ],
)
async def test_runs_that_are_not_consecutive_are_not_merged(apart):
    waiting = arrived(*apart)
    assert [await waiting.take() for _ in apart] == apart


async def test_rounds_with_trees_are_not_merged():
    waiting = arrived(run(0, 5), run(1, 6), merging=False)
    assert [(await waiting.take()).tokens for _ in range(2)] == [(5,), (6,)]


async def test_an_error_follows_the_runs_before_it():
    waiting = arrived(run(0, 5), run(1, 6), Unavailable("gone"))
    assert (await waiting.take()).tokens == (5, 6)
    with pytest.raises(Unavailable, match="gone"):
        await waiting.take()


async def test_a_run_that_no_message_can_carry_ends_its_generation_alone(monkeypatch):
    monkeypatch.setattr(channel, "MAX_ITEM_BYTES", 1000)
    feed = Feed()
    told = (TokenLogprob(-1.0, ((1, -1.0),) * 20),) * 9
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs: 20 per token take 1[0-9]{3} bytes for 9 tokens"):
        feed.put(1, run(0, 5, prefilled=Prefilled(0, told)))
    feed.put(2, run(0, 5, prefilled=Prefilled(0, told[:2])))
    feed.end()
    assert [entry.number async for frame in feed.frames() for entry in frame.entries] == [2]


async def test_a_run_wakes_the_generation_that_waits():
    waiting = arrived()
    taken = asyncio.create_task(waiting.take())
    await asyncio.sleep(0)
    waiting.put(run(0, 5))
    assert (await taken).tokens == (5,)
