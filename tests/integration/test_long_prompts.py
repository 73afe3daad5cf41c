"""A long prompt travels beside the stream: the other sessions of the pair go on meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from support.services import assert_at_rest, collect, over_grpc, request, until

import rootward.wire.outgoing
from benchmarks.slow_link import Conditions
from rootward.core.requests import SpeculationMode
from rootward.engine.tabular import TabularModel

LONG = 20_000  # tokens, 80 kB
NARROW = Conditions(bandwidth=40_000.0)  # bytes per second: two seconds for the prompt, nothing for a frame


async def rounds_while_a_long_prompt_travels() -> int:
    """Rounds with trees that a short session has between the Open of a long one and its first tree."""
    target = TabularModel(5, seed=1, max_positions=LONG + 2000, max_slots=4)
    draft = TabularModel.perturbed(target, 0.4, seed=2)
    async with over_grpc(target, draft, conditions=NARROW) as system:
        short = asyncio.create_task(collect(system.verifier, request("short", max_tokens=3000, temperature=0.0)))
        link = system.service.pool.links[0]
        await until(lambda: link.drafts)
        prompt = tuple(i % 5 for i in range(LONG))
        wanted = request("long", prompt, max_tokens=1500, temperature=0.0, mode=SpeculationMode.REQUIRED)
        long = asyncio.create_task(collect(system.verifier, wanted))
        await until(lambda: len(link.drafts) == 2)
        running = system.service._live["short"]
        before = running.accounts.tree_rounds
        await until(lambda: len(system.drafter.grower.trees) == 2)
        rounds = running.accounts.tree_rounds - before
        for task in (short, long):
            task.cancel()
        await asyncio.gather(short, long, return_exceptions=True)
        await assert_at_rest(system)
    return rounds


async def test_a_long_prompt_holds_nobody_up() -> None:
    assert await rounds_while_a_long_prompt_travels() >= 10


async def test_the_same_test_fails_when_everything_takes_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootward.wire.outgoing, "LONG_TOKENS", 1 << 30)
    assert await rounds_while_a_long_prompt_travels() < 10
