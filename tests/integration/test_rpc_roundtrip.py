"""A port behind real gRPC on loopback behaves like the object itself: values, ends, errors, cancellation."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from itertools import accumulate

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from drafter_service.servicer import NAME as DRAFTER
from drafter_service.servicer import DrafterServicer
from rootward import errors
from rootward.core.frames import Close, Commit, FromDrafter, Grow, Hello, HelloAck, Load, Open, ToDrafter
from rootward.core.requests import Committed, DraftMode, Finish, FinishReason, Sampling, Stopping, VerifierRequest
from rootward.ports import DrafterInfo, ModelInfo, VerifierInfo
from rootward.wire.channel import DRAFTING, open_channel
from rootward.wire.clients import RemoteDrafter, RemoteVerifier
from rootward.wire.server import RpcServer
from verifier_service.servicer import NAME as VERIFIER
from verifier_service.servicer import VerifierServicer

pytestmark = pytest.mark.services

MODEL = ModelInfo("tiny", 100, 64, (2,))
ACK = HelloAck("d0", 7, "", 100, 64, (DraftMode.SAMPLED, DraftMode.COUPLED), 8, 32)


class EchoDrafter:
    """One node per committed token; `trouble` is raised at the first Close."""

    def __init__(self, trouble: Exception | None = None):
        self.trouble, self.running, self.received = trouble, 0, []

    async def session(self, inbound):
        self.running += 1
        try:
            async for frame in inbound:
                self.received.append(frame)
                if frame.hello:
                    yield FromDrafter(ack=ACK)
                if frame.closes and self.trouble:
                    raise self.trouble
                if frame.commits:
                    yield FromDrafter(grows=tuple(grow(c.slot, c.tokens) for c in frame.commits))
        finally:
            self.running -= 1


def grow(slot, tokens) -> Grow:
    n = len(tokens)
    token = np.array(tokens, dtype=np.int64)
    rows = {0: (token, np.arange(1, n + 1))}
    return Grow(slot, 10, 2**64 - 1, 1, np.arange(n), token, np.ones(n, dtype=bool), rows)


class Queue:
    """An inbound stream that the test feeds by hand; None ends it."""

    def __init__(self, *frames):
        self.queue = asyncio.Queue()
        for frame in frames:
            self.queue.put_nowait(frame)

    async def __aiter__(self):
        while (frame := await self.queue.get()) is not None:
            if isinstance(frame, Exception):
                raise frame
            yield frame


HELLO = ToDrafter(hello=Hello("v0", 1, "", 100, 64))
COMMIT = ToDrafter(commits=(Commit(0, 10, (5, 6), 1), Commit(1, 10, (7,), 1)))


@asynccontextmanager
async def drafter_at(drafter):
    async with RpcServer("127.0.0.1:0", transport=DRAFTING, grace_s=0) as server:
        DrafterServicer(drafter, lambda: DrafterInfo(MODEL, ACK, Load(1, 8))).register(server)
        await server.start()
        async with RemoteDrafter(server.address) as remote:
            yield remote, server


async def collect(drafter, *frames):
    return [frame async for frame in drafter.session(aiter(Queue(*frames, None)))]


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_remote_drafter_answers_like_the_object():
    local = await collect(EchoDrafter(), HELLO, COMMIT)
    drafter = EchoDrafter()
    async with drafter_at(drafter) as (remote, _):
        assert await collect(remote, HELLO, COMMIT) == local
        assert drafter.received == [HELLO, COMMIT]
        assert await remote.get_info() == DrafterInfo(MODEL, ACK, Load(1, 8))


async def test_leaving_the_stream_ends_the_session_and_leaves_no_task():
    drafter = EchoDrafter()
    async with drafter_at(drafter) as (remote, _):
        async with aclosing(remote.session(aiter(Queue(HELLO)))) as stream:
            assert (await anext(stream)).ack == ACK
            assert drafter.running == 1
        await until(lambda: drafter.running == 0)
        assert not [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_write"]


async def test_the_errors_of_a_drafter_keep_their_class():
    drafter = EchoDrafter(errors.Overloaded("no slots", retry_after_s=2))
    async with drafter_at(drafter) as (remote, _):
        with pytest.raises(errors.Overloaded, match="no slots") as caught:
            await collect(remote, HELLO, ToDrafter(closes=(Close(0),)))
        assert caught.value.retry_after_s == 2


async def test_an_error_of_the_inbound_stream_reaches_the_caller():
    async with drafter_at(EchoDrafter()) as (remote, _):
        with pytest.raises(KeyError):
            await collect(remote, HELLO, KeyError("mine"))


async def test_a_stopped_server_is_unavailable():
    async with drafter_at(EchoDrafter()) as (remote, server), aclosing(remote.session(aiter(Queue(HELLO)))) as stream:
        await anext(stream)
        await server.stop(0)
        with pytest.raises(errors.Unavailable):
            await anext(stream)


async def test_closing_the_channel_under_a_stream_is_unavailable():
    async with drafter_at(EchoDrafter()) as (remote, _), aclosing(remote.session(aiter(Queue(HELLO)))) as stream:
        await anext(stream)
        pending = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        await remote.close()
        with pytest.raises(errors.Unavailable):
            await pending


async def test_an_address_without_a_server_is_unavailable():
    async with RemoteDrafter("127.0.0.1:1") as remote:
        with pytest.raises(errors.Unavailable):
            await collect(remote, HELLO)
        with pytest.raises(errors.Unavailable):
            await remote.get_info()


async def test_a_frame_that_is_no_protobuf_ends_its_own_stream_only():
    drafter = EchoDrafter()
    async with drafter_at(drafter) as (remote, server), aclosing(remote.session(aiter(good := Queue(HELLO)))) as stream:
        await anext(stream)
        async with open_channel(server.address) as channel:
            call = channel.stream_stream(f"/{DRAFTER}/Session")()
            await call.write(b"\xff\xff\xff")
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()
            assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNKNOWN)
        await until(lambda: drafter.running == 1)
        good.queue.put_nowait(COMMIT)
        assert len((await anext(stream)).grows) == 2


async def test_many_long_prompts_in_one_frame_pass_the_message_limit():
    prefix = tuple(range(200_000))
    opens = tuple(Open(s, 1, prefix, Sampling(), DraftMode.SAMPLED, 0, 0, 8, 64, 8, 4) for s in range(8))
    drafter = EchoDrafter()

    def got() -> list[Open]:  # beside the stream, in any order
        return sorted((one for frame in drafter.received for one in frame.opens), key=lambda one: one.slot)

    frames = Queue(HELLO, ToDrafter(opens=opens))
    async with drafter_at(drafter) as (remote, _), aclosing(remote.session(aiter(frames))) as stream:
        assert (await anext(stream)).ack
        await until(lambda: len(got()) == len(opens))  # megabytes
        frames.queue.put_nowait(COMMIT)
        assert (await anext(stream)).grows
    assert tuple(got()) == opens


class CountingVerifier:
    """Emits max_tokens tokens one by one, `every_s` apart."""

    def __init__(self, every_s=0.0, trouble: Exception | None = None):
        self.every_s, self.trouble, self.running, self.seen = every_s, trouble, 0, []

    async def generate(self, request):
        self.running += 1
        self.seen.append(request)
        try:
            if self.trouble:
                raise self.trouble
            last = request.stopping.max_tokens - 1
            for i in range(last + 1):
                await asyncio.sleep(self.every_s)
                yield Committed(
                    request.epoch, i, (i,), (i % 2 == 1,), Finish(FinishReason.LENGTH) if i == last else None
                )
        finally:
            self.running -= 1

    async def get_info(self):
        return VerifierInfo(MODEL, "v0", 3, ("d0",), stats={"rounds": 4.0})


@asynccontextmanager
async def verifier_at(verifier):
    async with RpcServer("127.0.0.1:0", grace_s=0) as server:
        VerifierServicer(verifier).register(server)
        await server.start()
        async with RemoteVerifier(server.address) as remote:
            yield remote, server


def ask(max_tokens=5, **fields) -> VerifierRequest:
    return VerifierRequest("r1", (1, 2, 3), stopping=Stopping(max_tokens), **fields)


def told(runs):
    """Every token with its position and flag, and what came with the last: runs that waited together come as one."""
    assert [run.offset for run in runs] == list(accumulate((len(run.tokens) for run in runs[:-1]), initial=0))
    tokens = [(run.epoch, token, flag) for run in runs for token, flag in zip(run.tokens, run.accepted, strict=True)]
    return [*tokens[:-1], (tokens[-1], runs[-1].finish)]


async def test_a_remote_verifier_answers_like_the_object():
    verifier = CountingVerifier()
    local = [run async for run in verifier.generate(ask())]
    async with verifier_at(verifier) as (remote, _):
        assert told([run async for run in remote.generate(ask())]) == told(local)
        assert await remote.get_info() == await verifier.get_info()


async def test_closing_the_iterator_ends_the_generation():
    verifier = CountingVerifier(every_s=0.01)
    async with verifier_at(verifier) as (remote, _):
        async with aclosing(remote.generate(ask(10_000))) as runs:
            assert (await anext(runs)).tokens == (0,)
        await until(lambda: verifier.running == 0)


async def test_cancelling_the_task_ends_the_generation():
    verifier = CountingVerifier(every_s=0.01)

    async def consume(remote):
        async with aclosing(remote.generate(ask(10_000))) as runs:
            async for _ in runs:
                pass

    async with verifier_at(verifier) as (remote, _):
        task = asyncio.create_task(consume(remote))
        await until(lambda: verifier.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: verifier.running == 0)


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (errors.StaleEpoch("epoch 1 < 2"), errors.StaleEpoch),
        (errors.ContextLengthExceeded("prompt", 99, "is too long"), errors.ContextLengthExceeded),
        (ExceptionGroup("tasks", [errors.NoDrafter("none")]), errors.NoDrafter),
        (ZeroDivisionError("bug"), errors.ServiceError),
    ],
)
async def test_the_errors_of_a_verifier_keep_their_class(trouble, kind):
    async with verifier_at(CountingVerifier(trouble=trouble)) as (remote, _):
        with pytest.raises(errors.ServiceError) as caught:
            await anext(remote.generate(ask()))
        assert type(caught.value) is kind


async def test_the_verifier_gets_the_deadline():
    verifier = CountingVerifier()
    async with verifier_at(verifier) as (remote, _):
        for deadline_s in (100.0, None):
            assert len(told([run async for run in remote.generate(ask(deadline_s=deadline_s))])) == 5
    assert 40 < verifier.seen[0].deadline_s <= 100
    assert verifier.seen[1].deadline_s > 1000  # no deadline still has a bound


async def test_a_verifier_that_hangs_ends_at_the_deadline():
    async with verifier_at(CountingVerifier(every_s=60)) as (remote, _):
        with pytest.raises(errors.DeadlineExceeded):
            await anext(remote.generate(ask(deadline_s=-0.5)))


async def test_a_request_that_cannot_be_read_is_refused_by_name():
    async with verifier_at(CountingVerifier()) as (_, server), open_channel(server.address) as channel:
        call = channel.unary_stream(f"/{VERIFIER}/Generate")(b"")
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details().startswith("max_tokens: 0 ")


async def test_a_taken_port_is_a_configuration_error():
    async with verifier_at(CountingVerifier()) as (_, server):
        with pytest.raises(errors.ConfigurationError, match=server.address):
            async with RpcServer(server.address) as second:
                await second.start()


async def test_health_and_reflection():
    async with verifier_at(CountingVerifier()) as (_, server), open_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == serving
        watch = health.Watch(health_pb2.HealthCheckRequest(service=VERIFIER))
        assert (await watch.read()).status == not_serving
        await server.set_ready(True)
        assert (await watch.read()).status == serving
        watch.cancel()
        listed = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")()
        await listed.write(b"\x3a\x00")  # list_services
        assert VERIFIER.encode() in await listed.read()
        listed.cancel()


@pytest.mark.parametrize(("remote", "service"), [(RemoteVerifier, VERIFIER), (RemoteDrafter, DRAFTER)])
async def test_an_answer_that_cannot_be_read_is_an_error_of_the_peer(remote, service):
    """Anything else would end the loop that polls all verifiers, and with it the gateway."""

    async def no_message(request, context):
        return b"\x0a\xff"

    server = grpc.aio.server()
    handlers = {"GetInfo": grpc.unary_unary_rpc_method_handler(no_message)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with remote(f"127.0.0.1:{port}") as peer:
        with pytest.raises(errors.IncompatiblePair, match="cannot be read: its bytes are no message"):
            await peer.get_info()
    await server.stop(0)
