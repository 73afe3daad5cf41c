"""Verifiers found by discovery: connected, drained, removed."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs
from unit.gateway.service_for_tests import collect
from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway import router
from gateway.requests import GenerateRequest
from gateway.router import TTL_S, Upstreams
from gateway.service import GatewayService
from gateway.session_store import MemoryStore
from gateway.settings import GatewaySettings
from rootward.ports import Peer


class Dialled(SpellingVerifier):
    closed = False

    async def close(self):
        self.closed = True


class Told:
    """A discovery that says what the test says."""

    def __init__(self):
        self.news = asyncio.Queue()

    def say(self, *peers):
        self.news.put_nowait(tuple(p if isinstance(p, Peer) else Peer(p) for p in peers))

    async def watch(self):
        while True:
            yield await self.news.get()


@asynccontextmanager
async def discovering(*sources, delay_s=0.0):
    made = {}

    def dial(address):
        made[address] = Dialled(delay_s=delay_s)
        return made[address]

    upstreams = Upstreams({}, sources=[("default", source) for source in sources], dial=dial, poll_s=0.02)
    service = GatewayService(
        byte_level(), upstreams, MemoryStore(), settings=GatewaySettings(model="demo"), served_model="demo"
    )
    async with service:
        yield service, upstreams, made


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_verifiers_come_and_go():
    one, two = Told(), Told()
    async with discovering(one, two) as (service, upstreams, made):
        assert not upstreams.ready
        one.say("a:1")
        two.say("b:2", "a:1")
        await until(lambda: sum(u.ready for u in upstreams) == 2)
        assert (await collect(service, GenerateRequest("a"))).text
        one.say()
        two.say(Peer("a:1", leaving=True), "b:2")
        await until(lambda: [u.name for u in upstreams if u.ready] == ["b:2"])
        assert {u.name for u in upstreams} == {"a:1", "b:2"}
        two.say("b:2")
        await until(lambda: made["a:1"].closed)
        assert [u.name for u in upstreams] == ["b:2"]
    assert made["b:2"].closed


async def test_one_that_comes_back_while_another_is_closed_is_kept():
    source, closing, closed = Told(), asyncio.Event(), asyncio.Event()

    async def close():
        closing.set()
        await closed.wait()

    async with discovering(source) as (_, upstreams, made):
        for found in (["a:1"], ["a:1", "b:2"]):
            source.say(*found)
            await until(lambda found=found: [u.name for u in upstreams if u.ready] == found)
        made["a:1"].close = close
        source.say()
        await closing.wait()
        source.say("b:2")
        await until(source.news.empty)
        closed.set()
        await asyncio.sleep(0.1)
        assert [u.name for u in upstreams if u.ready] == ["b:2"]


async def test_one_that_has_gone_ends_what_it_runs():
    source = Told()
    async with discovering(source, delay_s=0.03) as (service, upstreams, made):
        source.say("a:1")
        running = asyncio.create_task(collect(service, GenerateRequest("a")))
        await until(lambda: made and made["a:1"].running)
        source.say()
        await until(lambda: not upstreams.ready)
        assert not made["a:1"].closed
        assert (await running).text == made["a:1"].text
        assert len(made["a:1"].requests) == 1
        await until(lambda: made["a:1"].closed)


async def test_hints_are_ignored_when_a_verifier_evicts_or_restarts():
    class Evicting(Dialled):
        incarnation, stats = 1, {}

        async def get_info(self):
            info = await super().get_info()
            return type(info)(info.model, incarnation=self.incarnation, max_sessions=4, stats=self.stats)

    verifier = Evicting()
    upstreams = Upstreams({"a:1": verifier})
    (upstream,) = upstreams
    assert upstreams.is_held("a:1@1", 5.0) is False  # it has not answered yet
    await upstreams.has_died(upstream, 0)
    process = upstream.holder
    assert process == "a:1@1"
    assert upstreams.is_held(process, TTL_S - 1) is True
    assert upstreams.is_held(process, TTL_S + 9) is False
    verifier.stats = {"kv_evicted_age_s": 30.0}  # what was not used for longer may be gone
    await upstreams.has_died(upstream, 0)
    assert (upstreams.is_held(process, 29.0), upstreams.is_held(process, 35.0)) == (True, False)
    verifier.incarnation = 2
    await upstreams.has_died(upstream, 0)
    assert upstreams.is_held(process, 5.0) is False
    assert upstreams.is_held("a:1@2", 5.0) is True
    assert upstreams.is_held("a:1@3", -1.0) is False  # newer than the last report
    assert upstreams.is_held("elsewhere:1@2", 5.0) is False


def test_where_verifiers_are_is_a_setting():
    settings = GatewaySettings(model="x/large", verifiers="a:1, dns:b:2,redis:")
    assert [(s.kind, s.target) for s in settings.served[0].sources] == [
        ("static", "a:1"),
        ("dns", "b:2"),
        ("redis", "large"),
    ]
    with pytest.raises(ValidationError, match="write host:port"):
        GatewaySettings(model="x", verifiers="nowhere")


async def test_a_verifier_that_never_answers_is_in_the_log_once(monkeypatch):
    """A wrong port is the usual cause; the gateway waited without a word."""
    monkeypatch.setattr(router, "MISSING_S", 0.05)
    silent, answering = SpellingVerifier(up=False), SpellingVerifier()
    upstreams = Upstreams({"silent": silent, "answering": answering}, poll_s=0.01)
    service = GatewayService(
        byte_level(), upstreams, MemoryStore(), settings=GatewaySettings(model="demo"), served_model="demo"
    )
    with capture_logs() as logs:
        async with service:
            await until(lambda: any(line["event"] == "verifier_missing" for line in logs))
            await asyncio.sleep(0.2)
    assert [(line["verifier"], line["error"]) for line in logs if line["event"] == "verifier_missing"] == [
        ("silent", "down")
    ]
