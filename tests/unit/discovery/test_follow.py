"""`follow`: the peers of several sources together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from rootward.discovery import polling
from rootward.discovery.polling import follow
from rootward.discovery.sources import StaticDiscovery
from rootward.ports import Discovery, Peer

Found = Mapping[str, tuple[str, Peer]]


class Failing:
    """Answers once, then raises; the next time it answers with another peer."""

    def __init__(self) -> None:
        self.num_watched = 0

    async def watch(self) -> AsyncIterator[tuple[Peer, ...]]:
        self.num_watched += 1
        yield (Peer(f"f{self.num_watched}:1"),)
        if self.num_watched == 1:
            raise RuntimeError("a bug in the source")
        await asyncio.Event().wait()


async def found_by(*sources: tuple[str, Discovery], changes: int) -> list[Found]:
    """The arguments of the first calls."""
    seen: list[Found] = []
    enough = asyncio.Event()

    def changed(found: Found) -> None:
        seen.append(found)
        if len(seen) == changes:
            enough.set()

    task = asyncio.create_task(follow(sources, changed))
    async with asyncio.timeout(60):
        await enough.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return seen


async def test_an_address_of_two_pools_is_in_the_first() -> None:
    sources = ("one", StaticDiscovery("a:1", "b:1")), ("two", StaticDiscovery("b:1", "c:1"))
    *_, found = await found_by(*sources, changes=2)
    assert {address: pool for address, (pool, _) in found.items()} == {"a:1": "one", "b:1": "one", "c:1": "two"}


async def test_a_source_that_raises_is_followed_again_and_the_others_stay(monkeypatch) -> None:
    monkeypatch.setattr(polling, "RETRY_S", 0.0)
    *_, found = await found_by(("one", StaticDiscovery("a:1")), ("two", Failing()), changes=3)  # type: ignore[arg-type]
    assert found.keys() == {"a:1", "f2:1"}
