"""What operators see of requests while they run: events of a session, counts of a gateway, and `rootward top`."""

import asyncio
import io
import json

import pytest
from rich.console import Console
from unit.gateway.service_for_tests import IDS, TEXT, at_rest, collect, grpc_serving, serving
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway import watching
from gateway.requests import GenerateRequest
from gateway.watching import WatchedRequest, Watching
from rootward.cli import main as cli
from rootward.cli.top import _view, rates
from rootward.client import AsyncClient, Client, SamplingParams
from rootward.client.types import Load, VerifierLoad
from rootward.errors import BadRequestError

WHOLE = SamplingParams(max_tokens=50)


async def collected(events):
    return [event async for event in events]


async def begun(service, count=1):
    async with asyncio.timeout(60):
        while len(service.watching.watchers) < count:
            await asyncio.sleep(0.005)


async def test_a_request_from_its_beginning_to_its_end():
    async with grpc_serving(SpellingVerifier()) as (service, address), AsyncClient(address) as client:
        watch = asyncio.create_task(collected(client.watch(request_id="one")))
        await begun(service)
        await client.generate("a", sampling=WHOLE, request_id="other")
        await client.generate("a", sampling=WHOLE, request_id="one", session_id="s")
        first, sent, *rounds, last = await watch  # it ends with the request
        assert (first.kind, first.num_prompt_tokens, first.num_tokens) == ("begun", 1, 0)
        assert (sent.kind, sent.verifier, sent.epoch) == ("sent", "v0", 1)
        assert {e.kind for e in rounds} == {"round"}
        at = 0
        for event in rounds:
            assert event.offset == at
            assert event.num_accepted == event.num_tokens - 1  # the bonus token is none
            at += event.num_tokens
        assert at == len(IDS)
        assert (last.kind, last.num_tokens, last.finish_reason, last.error) == ("ended", len(IDS), "stop", "")
        events = [first, sent, *rounds, last]
        assert {(e.request_id, e.session_id, e.num_missed) for e in events} == {("one", "s", 0)}
        assert [e.elapsed_s for e in events] == sorted(e.elapsed_s for e in events)
        assert not service.watching.watchers


async def test_a_session_over_its_turns_and_across_a_lost_verifier():
    dying = SpellingVerifier(die_after=lambda r: 4 if not r.committed else None)
    async with grpc_serving(dying, SpellingVerifier()) as (service, address), AsyncClient(address) as client:
        events = client.watch(session_id="s")
        first = asyncio.create_task(anext(events))
        await begun(service)
        for turn in range(3):
            assert (await client.generate("a", sampling=WHOLE, request_id=f"r{turn}", session_id="s")).text == TEXT
        seen = [await first]
        while sum(e.kind == "ended" for e in seen) < 3:
            seen.append(await anext(events))
        await events.aclose()
        for turn in range(3):
            own = [e for e in seen if e.request_id == f"r{turn}"]
            assert sum(e.num_tokens for e in own if e.kind == "round") == len(IDS)
            epochs = [e.epoch for e in own if e.kind == "sent"]
            assert epochs == list(range(1, len(epochs) + 1))
        async with asyncio.timeout(60):
            while service.watching.watchers:  # the caller has left
                await asyncio.sleep(0.005)


async def test_what_runs_already_and_what_fails():
    verifier = SpellingVerifier(run=1, delay_s=0.05)
    async with serving(verifier) as service:
        running = asyncio.create_task(collect(service, GenerateRequest("a", request_id="one", deadline_s=0.4)))
        while not service.watching.running:
            await asyncio.sleep(0.005)
        first, *_, last = await collected(service.watching.watch(request_id="one"))
        assert first.begun.num_prompt_tokens == 1
        assert (last.ended.reason, last.ended.error) == (0, "DEADLINE_EXCEEDED")
        await asyncio.gather(running, return_exceptions=True)
        await at_rest(service, verifier)
        assert not service.watching.running


async def test_a_slow_watcher_gets_the_number_of_missed_events(monkeypatch):
    monkeypatch.setattr(watching, "MAX_WAITING", 4)
    seen = Watching(lambda: 0.0)
    request = WatchedRequest(seen, "one", "", "", 0.0)
    events = seen.watch(request_id="one")
    request.begun(1)
    first = asyncio.create_task(anext(events))
    await asyncio.sleep(0)
    assert (await first).begun.num_prompt_tokens == 1
    for i in range(10):
        request.round(i, (False,))
    assert [(await anext(events)).round.offset for _ in range(4)] == [0, 1, 2, 3]
    request.round(10, (True, False))
    late = await anext(events)
    assert (late.round.offset, late.round.num_tokens, late.round.num_accepted, late.num_missed) == (10, 2, 1, 6)
    await events.aclose()


async def test_the_end_is_never_missed(monkeypatch):
    monkeypatch.setattr(watching, "MAX_WAITING", 4)
    room = Watching(lambda: 0.0)
    request = WatchedRequest(room, "one", "", "", 0.0)
    request.begun(1)
    events = room.watch(request_id="one")
    seen = [await anext(events)]
    for i in range(10):
        request.round(i, [True])
    request.ended(None, "", 10)  # nobody has looked since: the queue is full
    async with asyncio.timeout(60):
        seen += [event async for event in events]
    assert seen[-1].HasField("ended")
    assert len(seen) + sum(e.num_missed for e in seen) == 12


async def test_nothing_to_watch_is_refused():
    async with grpc_serving() as (_, address), AsyncClient(address) as client:
        for wanted in ({}, {"session_id": "a b"}, {"request_id": "{"}):
            with pytest.raises(BadRequestError) as refused:
                await collected(client.watch(**wanted))
            assert refused.value.details["field"] == (next(iter(wanted), "request_id"))


async def test_it_can_be_watched_without_a_loop():
    async with grpc_serving(SpellingVerifier(run=2, delay_s=0.01)) as (service, address), AsyncClient(address) as other:

        def watch():
            with Client(address) as client:
                return list(client.watch(request_id="one"))

        seen = asyncio.create_task(asyncio.to_thread(watch))
        await begun(service)
        await other.generate("a", sampling=WHOLE, request_id="one")
        assert [e.kind for e in await seen][-1] == "ended"


async def test_load_counts_what_was_delivered():
    """A stop string hides tokens, a client that leaves gets no more: neither counts what nobody got."""
    verifier = SpellingVerifier(run=3, delay_s=0.01)
    async with grpc_serving(verifier) as (service, address), AsyncClient(address) as client:
        stopped = await client.generate("a", sampling=SamplingParams(max_tokens=50, stop="return"))
        async with client.stream("a", sampling=WHOLE) as stream:
            got = (await anext(aiter(stream))).token_ids
        await at_rest(service, verifier)
        load = await client.load()
        delivered = stopped.usage.completion_tokens
        assert delivered < len(IDS)
        assert delivered + len(got) <= load.num_tokens < delivered + len(IDS)
        assert load.num_requests == 1
        sample = service.metrics.registry.get_sample_value("rootward_generation_tokens_total")
        assert sample == load.num_tokens
        assert 0 < load.num_rounds <= load.num_tokens
        (one,) = load.verifiers
        assert (one.name, one.ready, one.max_sessions) == ("tiny-1", True, 4)


# -- rootward top -------------------------------------------------------------------------------------------------------

BEFORE = Load(1, 0, 256, False, num_requests=10, num_tokens=1000, num_rounds=500, uptime_s=100.0)
NOW = Load(2, 1, 256, False, num_requests=14, num_tokens=1300, num_rounds=600, uptime_s=102.0)


def test_rates_are_those_of_the_interval():
    assert rates(BEFORE, NOW) == {"requests_per_s": 2.0, "tokens_per_s": 150.0, "tokens_per_round": 3.0}
    assert rates(NOW, NOW) == {"requests_per_s": None, "tokens_per_s": None, "tokens_per_round": None}
    again = Load(0, 0, 256, False, num_requests=1, num_tokens=20, num_rounds=10, uptime_s=4.0)  # a gateway of its place
    assert rates(NOW, again) == {"requests_per_s": 0.25, "tokens_per_s": 5.0, "tokens_per_round": 2.0}


def test_the_table():
    verifiers = (
        VerifierLoad("big", True, 2, 1, 8, {"spec_decode_speedup_estimate": 1.62}),
        VerifierLoad("new", False, 0, 0, 0),
    )
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(_view("gw:1", BEFORE, Load(*[getattr(NOW, f) for f in NOW.__slots__][:-1], verifiers)))
    text = console.export_text()
    for words in ("2 of 256 running, 1 waiting", "150.0", "3.00", "up 1 min", "big", "1.62", "not ready"):
        assert words in text


async def test_top_once(capsys):
    async with grpc_serving() as (_, address), AsyncClient(address) as client:
        await client.generate("a", sampling=WHOLE)
        for more in (["--once"], ["--output", "json"]):
            command = ["top", "--url", address, "--interval", "0.05", *more]
            assert await asyncio.to_thread(cli.main, command) == cli.OK
    out = capsys.readouterr().out
    assert "tiny-1" in out
    answer = json.loads(out[out.index("{") :])
    assert (answer["num_tokens"], answer["num_requests"]) == (len(IDS), 1)
    assert set(rates(NOW, NOW)) < set(answer)
    assert await asyncio.to_thread(cli.main, ["top", "--once", "--url", "127.0.0.1:1"]) == cli.UNAVAILABLE


def test_its_help_is_a_page(capsys):
    assert cli.main(["top", "--help"]) == cli.OK
    out = capsys.readouterr().out
    for word in ("--interval", "--once", "--output", "tokens/round", "Examples", "Exit code 4"):
        assert word in out
