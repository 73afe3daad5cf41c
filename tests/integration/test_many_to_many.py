"""Three verifiers and up to four drafters over gRPC on loopback: drafters come and go under load, running sessions follow, texts stay."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from support.cluster import CAPACITY, COUPLED, LONG, STREAMS, cluster
from support.services import WAIT_S, request, until

from rootward.demand import signals


@pytest.mark.services
async def test_drafters_that_come_are_used_by_running_sessions_and_those_that_go_are_left() -> None:
    async with cluster() as c:
        for _ in range(2):
            await c.add_drafter()
        await until(lambda: all(len(v.pool.up) == 2 for v in c.verifiers))
        c.load()
        await until(lambda: sum(d.num_trees for d in c.drafters) == 3 * STREAMS)
        before = c.counters()
        await c.progress(10)
        told = signals(*c.readings(before), 1.0)
        assert told.demand is not None
        assert told.demand > 0
        assert told.cost.row_s is not None
        assert told.cost.row_s > 0
        third, fourth = await c.add_drafter(), await c.add_drafter()
        await until(lambda: third.num_trees >= 3 and fourth.num_trees >= 3)  # nobody new has come: these have moved
        await c.progress(10)

        leaving = c.drafters[0]
        await asyncio.wait_for(leaving.drafter.drain(), WAIT_S)  # announced on the streams; it ends when it is empty
        assert leaving.num_trees == 0
        await c.progress(10)
        await until(lambda: sum(d.num_trees for d in c.drafters) >= 3 * STREAMS)

        await c.drafters[1].vanish()  # not a word
        await c.progress(10)
        await until(lambda: third.num_trees + fourth.num_trees >= 3 * STREAMS)
        assert all(not task.done() for task, _ in c.streams.values())
        await c.stop()


@pytest.mark.services
async def test_from_no_drafter_to_the_first_and_back() -> None:
    async with cluster(1, step_ms=10.0) as c:  # so that speculation pays
        c.load(1)
        await c.progress(20)
        (session,) = c.verifiers[0]._running.values()
        await until(lambda: c.verifiers[0].pool.demand["default"].sessions == 1)  # asked for, with nobody there
        first = await c.add_drafter()
        await until(lambda: session.counts.num_spec_steps > 3)
        await first.vanish()
        trees = session.counts.num_spec_steps
        await c.progress(20)
        assert session.counts.num_spec_steps <= trees + 1  # what had arrived is verified once more
        second = await c.add_drafter()
        await until(lambda: session.counts.num_spec_steps > trees + 3)
        assert second.num_trees == 1
        await c.stop()


@pytest.mark.services
async def test_a_full_drafter_is_shared_by_verifiers_that_come_later() -> None:
    async with cluster(2) as c:
        only = await c.add_drafter()
        await until(lambda: all(v.pool.up for v in c.verifiers))
        second = c.verifiers.pop()
        c.load(CAPACITY)  # the first takes every place
        await until(lambda: only.num_trees == CAPACITY)
        c.verifiers[:] = [second]
        wanted = [request(f"late-{i}", max_tokens=LONG, seed=i, **COUPLED) for i in range(STREAMS)]
        late = [asyncio.create_task(c._consume(second, one, [])) for one in wanted]
        held = lambda: Counter(stream for stream, _ in list(only.drafter.grower.trees)).values()  # noqa: E731
        await until(lambda: len(held()) == 2 and max(held()) - min(held()) <= 1)
        await c.progress(5)  # those that gave up their trees go on
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await c.stop()
