"""Two hundred streams at once on the demo pair, through all services: none is lost, each in order, each its own."""

from __future__ import annotations

import asyncio

import pytest

from rootward import AsyncClient, SamplingParams

STREAMS, SEEDS = 200, 10


@pytest.mark.parametrize("num_tokens", [8, pytest.param(64, marks=pytest.mark.long)])
def test_two_hundred_streams(stack, num_tokens: int) -> None:
    async def one(client: AsyncClient, number: int) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=num_tokens, seed=number % SEEDS, ignore_eos=True)
        tokens: list[int] = []
        async for delta in client.stream("def f(", sampling=sampling, request_id=f"many-{num_tokens}-{number}"):
            assert delta.offset == len(tokens)
            tokens += delta.token_ids
        return tuple(tokens)

    async def all_at_once() -> list[tuple[int, ...]]:
        async with AsyncClient(stack.gateway.address, timeout=240.0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(STREAMS)))

    got = asyncio.run(all_at_once())
    assert [len(tokens) for tokens in got] == [num_tokens] * STREAMS
    for number, tokens in enumerate(got):
        assert tokens == got[number % SEEDS]
    assert len(set(got)) > 1
    load = stack.client.load()
    assert (load.num_running, load.num_waiting) == (0, 0)
