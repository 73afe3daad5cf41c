"""What settings mean, and the sources that need no server."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing

import pytest
from support.fake_clock import FakeClock

from rootward.discovery.sources import (
    DNS_POLL_S,
    Source,
    StaticDiscovery,
    addresses_of,
    dns_discovery,
    open_sources,
    parse_sources,
)
from rootward.errors import ConfigurationError
from rootward.ports import Peer


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("10.0.0.1:50061", Source("default", "static", "10.0.0.1:50061")),
        ("[::1]:50061", Source("default", "static", "[::1]:50061")),
        ("static:d:1", Source("default", "static", "d:1")),
        ("cheap=static:d:1", Source("cheap", "static", "d:1")),
        ("dns:drafters.ns.svc:50061", Source("default", "dns", "drafters.ns.svc:50061")),
        ("redis:", Source("default", "redis", "")),
        ("redis:fast", Source("fast", "redis", "fast")),
        ("a=redis:fast", Source("a", "redis", "fast")),
        ("kubernetes:drafters", Source("default", "kubernetes", "drafters")),
        ("x=kubernetes:drafters.ns:grpc", Source("x", "kubernetes", "drafters.ns:grpc")),
    ],
)
def test_an_entry_names_a_pool_a_kind_and_a_target(entry: str, source: Source) -> None:
    assert parse_sources([entry]) == (source,)


@pytest.mark.parametrize(
    "entry", ["", "host", "host:", "host:0", "host:70000", "dns:name", "=a:1", "kubernetes:", "kubernetes:.ns"]
)
def test_wrong_entries_are_refused_by_name(entry: str) -> None:
    with pytest.raises(ValueError, match=r"write|pool"):
        parse_sources([entry])


async def test_the_registry_needs_a_redis() -> None:
    with pytest.raises(ConfigurationError, match="redis_url"):
        async with open_sources(parse_sources(["redis:"]), "drafter"):
            pass


async def test_a_static_list_yields_each_address_once() -> None:
    async with aclosing(StaticDiscovery("b:1", "a:1", "b:1").watch()) as changes:
        assert await anext(changes) == (Peer("b:1"), Peer("a:1"))


async def test_a_name_is_resolved_again_and_its_last_answer_holds() -> None:
    answers: list[list[str] | Exception] = [
        ["b:1", "a:1"],
        ["a:1", "b:1", "a:1"],  # the same in another order: no news
        socket.gaierror(socket.EAI_AGAIN, "try again"),
        TimeoutError(),
        ["a:1"],
        [],
    ]

    async def resolve(host: str, port: int) -> list[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    clock, seen = FakeClock(), []
    discovery = dns_discovery("drafters", 1, clock=clock, resolve=resolve)

    async def watch() -> None:
        async with aclosing(discovery.watch()) as changes:
            async for peers in changes:
                seen.append([peer.address for peer in peers])

    task = asyncio.create_task(watch())
    await clock.advance(DNS_POLL_S * (len(answers) - 1))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert seen == [["a:1", "b:1"], ["a:1"], []]


async def test_names_of_this_machine_resolve() -> None:
    assert "127.0.0.1:50061" in await addresses_of("localhost", 50061)
