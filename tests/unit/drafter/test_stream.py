"""What waits at a drafter for one verifier: growth joins, nothing is dropped, and whoever does not listen is not heard."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.stream import MAX_UNAPPLIED, MAX_UNSENT, Stream
from rootward.core.frames import Grow, NeedSync, extend_hash
from rootward.core.living_tree import LivingTree

ROW = (np.arange(8), np.ones(8, dtype=np.int64))


def chain(first: int, tokens: list[int], *, base: int = 0, at_rest: bool = False) -> Grow:
    """Each node below the one before; the first below the root of the base."""
    size = len(tokens)
    parent = np.array([0 if first + i == 1 else first + i - 1 for i in range(size)], dtype=np.int64)
    rows = {int(p): ROW for p in parent}
    sampled = np.ones(size, dtype=np.bool_)
    return Grow(1, base, 0, first, parent, np.array(tokens, dtype=np.int64), sampled, rows, at_rest, draft_us=5)


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=6))
def test_frames_of_one_base_join_and_mean_the_same(parts: list[list[int]]) -> None:
    stream, first, frames = Stream(1, 4), 1, []
    for i, tokens in enumerate(parts):
        frames.append(chain(first, tokens, at_rest=i == len(parts) - 1))
        first += len(tokens)
        stream.put(frames[-1])
    frame = stream.take()
    assert frame is not None
    assert len(frame.grows) == 1
    assert frame.grows[0].at_rest
    assert frame.grows[0].draft_us == 5 * len(parts)
    together, apart = (LivingTree(0, 0, vocab_size=8) for _ in range(2))
    together.receive(frame.grows[0])
    for one in frames:
        apart.receive(one)
    assert together.snapshot(99).tree.parent.tolist() == apart.snapshot(99).tree.parent.tolist()
    assert together.snapshot(99).tree.token.tolist() == apart.snapshot(99).tree.token.tolist()
    assert stream.take() is None


def test_frames_of_two_bases_stay_two_in_their_order() -> None:
    stream = Stream(1, 4)
    stream.put(chain(1, [3, 4]))
    later = Grow(1, 1, extend_hash(0, 3), 3, np.array([2]), np.array([5]), np.array([True]), {2: ROW})
    stream.put(later)
    frame = stream.take()
    assert frame is not None
    assert [g.first_node for g in frame.grows] == [1, 3]


async def test_a_stream_is_full_while_its_verifier_reads_nothing() -> None:
    stream = Stream(1, capacity=2)
    for slot in range(1000):
        if stream.full:
            break
        stream.put(NeedSync(slot, 0, 0))
    assert slot == MAX_UNSENT * 3
    waiting = asyncio.create_task(stream.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert stream.take() is not None
    await asyncio.wait_for(waiting, 60)


async def test_frames_that_growth_has_not_taken_stop_the_reading() -> None:
    stream = Stream(1, capacity=2)
    stream.num_unapplied = MAX_UNAPPLIED
    waiting = asyncio.create_task(stream.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.note_applied()
    await asyncio.wait_for(waiting, 60)
