"""A task that calls a drafter which is gone ends when it is cancelled, whatever the call was waiting for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

from support.processes import free_port

from rootward.core.frames import Hello, ToDrafter
from rootward.errors import ServiceError
from rootward.wire.clients import RemoteDrafter

TRIES = 300  # grpc loses 1 of 30 cancellations at random moments
LONGEST_S = 0.02  # before a cancellation: some calls to a closed port
ENDED_S = 60.0


async def call_drafter(address: str) -> None:
    """Reconnect for ever, as the link of a verifier does."""

    async def frames() -> AsyncIterator[ToDrafter]:
        yield ToDrafter(hello=Hello("verifier", 1, "", 10, 10))
        await asyncio.Event().wait()

    drafter = RemoteDrafter(address)
    while True:
        try:
            async with aclosing(drafter.session(frames())) as received:
                async for _ in received:
                    pass
        except ServiceError:
            await asyncio.sleep(0)


async def test_a_cancelled_task_ends_though_its_call_fails() -> None:
    address, moments = f"127.0.0.1:{free_port()}", random.Random(1)
    tasks = []
    for _ in range(TRIES):
        tasks.append(asyncio.create_task(call_drafter(address)))
        await asyncio.sleep(moments.uniform(0, LONGEST_S))
        tasks[-1].cancel()
    done, pending = await asyncio.wait(tasks, timeout=ENDED_S)
    for task in pending:
        task.cancel()
    assert not pending
    assert all(task.cancelled() for task in done)
