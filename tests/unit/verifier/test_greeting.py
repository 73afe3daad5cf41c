"""The handshake of a link: once, first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rootward.core.frames import FromDrafter, Hello, HelloAck, ToDrafter
from rootward.core.requests import DraftMode
from verifier_service.drafter_link import Link


def test_a_second_greeting_ends_the_stream_and_changes_nothing() -> None:
    class Twice:
        num_streams = 0

        async def session(self, _inbound: AsyncIterator[ToDrafter]) -> AsyncIterator[FromDrafter]:
            self.num_streams += 1
            yield FromDrafter(ack=HelloAck("d", 2, "", 5, 64, (DraftMode.SAMPLED,), 4, 16))
            seen.append(liar.ack)
            yield FromDrafter(ack=HelloAck("d", 2, "", 5, 64, (), 4, 16))
            seen.append(liar.ack)

    async def run() -> None:
        task = asyncio.create_task(liar.run(drafter))
        while drafter.num_streams < 2:
            await asyncio.sleep(0.01)
        task.cancel()

    seen: list[HelloAck | None] = []
    drafter = Twice()
    liar = Link("d", lambda: Hello("v", 1, "", 5, 64), lambda: None)
    asyncio.run(run())
    assert {ack.laws for ack in seen if ack is not None} == {(DraftMode.SAMPLED,)}
