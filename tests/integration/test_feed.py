"""A feed over real gRPC: what many generations of one caller commit travels together, and is lost together."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest
from support.codec import from_pb, to_pb

from rootward.core.requests import Committed, Finish, FinishReason, Stopping, TokenLogprob, VerifierRequest
from rootward.errors import Unavailable
from rootward.v1 import verifier_pb2, verifier_pb2_grpc
from rootward.wire.channel import open_channel
from rootward.wire.clients import RemoteVerifier
from rootward.wire.server import RpcServer
from verifier_service.servicer import VerifierServicer

pytestmark = pytest.mark.services

NUM_STEPS = 20


class Steps:
    """Every generation commits one token at each step, all of them at the same one."""

    def __init__(self, *, finishes: bool = True, num_top: int = 0):
        self.finishes, self.num_top = finishes, num_top
        self.running: set[asyncio.Queue[int]] = set()

    async def generate(self, request):
        step = asyncio.Queue()
        self.running.add(step)
        try:
            for i in range(request.stopping.max_tokens):
                await step.get()
                finish = Finish(FinishReason.LENGTH) if i == request.stopping.max_tokens - 1 else None
                told = (TokenLogprob(-1.0, ((1, -1.0),) * self.num_top),) if self.num_top else ()
                yield Committed(
                    request.epoch, i, (request.prompt[0] + i,), (False,), finish if self.finishes else None, told
                )
        finally:
            self.running.discard(step)

    def step(self):
        for one in self.running:
            one.put_nowait(0)


@asynccontextmanager
async def served(verifier):
    servicer = VerifierServicer(verifier)
    async with RpcServer("127.0.0.1:0", grace_s=0) as server:
        servicer.register(server)
        await server.start()
        async with RemoteVerifier(server.address) as remote:
            yield servicer, server, remote


def ask(number: int, max_tokens: int = NUM_STEPS) -> VerifierRequest:
    return VerifierRequest(f"r{number}", (1000 * number,), stopping=Stopping(max_tokens))


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def collected(verifier, request) -> list[int]:
    async with aclosing(verifier.generate(request)) as runs:
        return [token async for run in runs for token in run.tokens]


def counted(monkeypatch) -> list[int]:
    """Entries of every frame that any reader gets from here on."""
    sizes = []
    from rootward.wire import feed

    decode = feed.FeedReader.read

    async def read(self, frames):
        async def seen():
            async for frame in frames:
                sizes.append(len(frame.entries))
                yield frame

        await decode(self, seen())

    monkeypatch.setattr(feed.FeedReader, "read", read)
    return sizes


async def test_a_step_is_one_message_however_many_generations_there_are(monkeypatch):
    sizes, verifier = counted(monkeypatch), Steps()
    async with served(verifier) as (_, _, remote):
        tasks = [asyncio.create_task(collected(remote, ask(n))) for n in range(50)]
        await until(lambda: len(verifier.running) == 50)
        for done in range(NUM_STEPS):
            verifier.step()
            await until(lambda: sum(sizes) == 50 * (done + 1))  # noqa: B023
        assert await asyncio.gather(*tasks) == [[1000 * n + i for i in range(NUM_STEPS)] for n in range(50)]
    assert sizes == [0] + [50] * NUM_STEPS


async def test_steps_that_the_caller_reads_late_arrive_in_order():
    feed_of = Steps()
    async with served(feed_of) as (servicer, server, _), open_channel(server.address) as channel:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        frames = stub.Feed(verifier_pb2.FeedRequest(feed=9))
        assert not (await frames.read()).entries
        message = to_pb(ask(1))
        message.feed, message.number = 9, 4
        call = stub.Generate(message)
        await until(lambda: feed_of.running)
        for _ in range(NUM_STEPS):
            feed_of.step()
            await asyncio.sleep(0)
        got = []
        while len(got) < NUM_STEPS:
            got += [(entry.number, from_pb(entry.run).offset) for entry in (await frames.read()).entries]
        assert got == [(4, i) for i in range(NUM_STEPS)]
        assert await call.read() is grpc.aio.EOF  # and nothing on the call itself
        frames.cancel()
        await until(lambda: not servicer.feeds._open)


async def test_a_feed_that_breaks_fails_its_generations_and_the_next_one_opens_another():
    verifier = Steps()
    async with served(verifier) as (servicer, _, remote):
        tasks = [asyncio.create_task(collected(remote, ask(n))) for n in range(3)]
        await until(lambda: len(verifier.running) == 3)
        servicer.feeds.end()
        for failed in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(failed, Unavailable)
        await until(lambda: not verifier.running)
        again = asyncio.create_task(collected(remote, ask(7)))
        await until(lambda: verifier.running)
        for _ in range(NUM_STEPS):
            verifier.step()
        assert await again == [7000 + i for i in range(NUM_STEPS)]


async def test_closing_one_generation_does_not_affect_the_others():
    verifier = Steps()
    async with served(verifier) as (_, _, remote):
        others = [asyncio.create_task(collected(remote, ask(n))) for n in (1, 2)]
        async with aclosing(remote.generate(ask(3))) as runs:
            first = asyncio.create_task(anext(runs))
            await until(lambda: len(verifier.running) == 3)
            verifier.step()
            assert (await first).tokens == (3000,)
        await until(lambda: len(verifier.running) == 2)
        for _ in range(NUM_STEPS):
            verifier.step()
        assert [len(tokens) for tokens in await asyncio.gather(*others)] == [NUM_STEPS, NUM_STEPS]
        assert not remote._feed._waiting


async def test_large_runs_are_cut_into_messages_below_the_limit(monkeypatch):
    sizes, verifier = counted(monkeypatch), Steps(num_top=100_000)
    async with served(verifier) as (_, _, remote):
        tasks = [asyncio.create_task(collected(remote, ask(n, 1))) for n in range(4)]
        await until(lambda: len(verifier.running) == 4)
        verifier.step()
        assert await asyncio.gather(*tasks) == [[1000 * n] for n in range(4)]
    assert sum(sizes) == 4
    assert len(sizes) > 2


@pytest.mark.parametrize("finishes", [True, False])
async def test_a_generation_without_a_finish_is_lost(finishes):
    verifier = Steps(finishes=finishes)
    async with served(verifier) as (_, _, remote):
        task = asyncio.create_task(collected(remote, ask(0, 1)))
        await until(lambda: verifier.running)
        verifier.step()
        if finishes:
            assert await task == [0]
        else:
            with pytest.raises(Unavailable, match="without a finish"):
                await task


async def test_feeds_that_are_not_open_zero_or_taken_are_refused():
    async with served(Steps()) as (_, server, _), open_channel(server.address) as channel:
        stub = verifier_pb2_grpc.VerifierStub(channel)
        taken = stub.Feed(verifier_pb2.FeedRequest(feed=5))
        await taken.read()
        for name in (0, 5):
            with pytest.raises(grpc.RpcError) as caught:
                await stub.Feed(verifier_pb2.FeedRequest(feed=name)).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        message = to_pb(ask(1))
        message.feed = 6
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Generate(message).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        taken.cancel()


async def test_a_request_without_a_feed_is_refused() -> None:
    async with served(Steps()) as (_, server, _), open_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await verifier_pb2_grpc.VerifierStub(channel).Generate(to_pb(ask(1))).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith("feed: 0 ")
