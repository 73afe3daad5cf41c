"""What a caller may make a server read: nothing before its credentials are checked, then no more than the method's limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rootward.errors import Unauthenticated
from rootward.wire import auth
from rootward.wire.auth import BytesInFlight, Context
from rootward.wire.channel import MIB, open_channel, public
from rootward.wire.server import SMALL_BYTES, RpcServer

KEY = (("authorization", "Bearer good"),)
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def check(method: str, context: Context) -> None:
    if dict(context.invocation_metadata() or ()).get("authorization") != "Bearer good":
        raise Unauthenticated("authorization: no API key was sent")


@asynccontextmanager
async def length_server(
    decoded: list[int], *, budget: int = 1 << 30, free: asyncio.Event | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """Four methods that answer with the length of their requests, and what was decoded of those."""

    done = asyncio.Event()
    done.set()

    def decode(data: bytes) -> bytes:
        decoded.append(len(data))
        return data

    async def unary(request: bytes, context: Context) -> bytes:
        await (free or done).wait()
        return str(len(request)).encode()

    async def yielding(request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield str(len(request)).encode()

    async def writing(request: bytes, context: Context) -> None:
        await context.write(str(len(request)).encode())

    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary, decode),
        "Small": grpc.unary_unary_rpc_method_handler(unary, decode),
        "Yielding": grpc.unary_stream_rpc_method_handler(yielding, decode),
        "Writing": grpc.unary_stream_rpc_method_handler(writing, decode),
    }
    in_flight = BytesInFlight(budget)
    async with RpcServer("127.0.0.1:0", transport=public(), checks=(check,), in_flight=in_flight, grace_s=0) as server:
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Lengths", handlers),))
        server.limits["/test.Lengths/Small"] = SMALL_BYTES
        await server.start()
        async with open_channel(server.address) as channel:
            yield channel


async def status(call: grpc.aio.UnaryUnaryCall) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        await call
    return refused.value.code()


async def test_nothing_is_decoded_of_callers_without_a_key() -> None:
    decoded: list[int] = []
    async with length_server(decoded) as channel:
        for method in ("Unary", "Small"):
            call = channel.unary_unary(f"/test.Lengths/{method}")(bytes(32 * MIB), timeout=60)
            assert await status(call) is grpc.StatusCode.UNAUTHENTICATED
        for method in ("Yielding", "Writing"):
            call = channel.unary_stream(f"/test.Lengths/{method}")(bytes(32 * MIB), timeout=60)
            assert await status(call.read()) is grpc.StatusCode.UNAUTHENTICATED
        assert decoded == []


async def test_callers_with_a_key_are_answered_by_every_kind_of_handler() -> None:
    decoded: list[int] = []
    async with length_server(decoded) as channel:
        assert await channel.unary_unary("/test.Lengths/Unary")(bytes(MIB), metadata=KEY, timeout=60) == b"%d" % MIB
        for method in ("Yielding", "Writing"):
            call = channel.unary_stream(f"/test.Lengths/{method}")(bytes(7), metadata=KEY, timeout=60)
            assert [message async for message in call] == [b"7"]
        assert decoded == [MIB, 7, 7]


async def test_limits_of_the_server_and_of_a_method() -> None:
    decoded: list[int] = []
    async with length_server(decoded) as channel:

        def call(method: str, num_bytes: int) -> grpc.aio.UnaryUnaryCall:
            return channel.unary_unary(f"/test.Lengths/{method}")(bytes(num_bytes), metadata=KEY, timeout=60)

        assert await status(call("Unary", 2 * MIB + 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await status(call("Small", SMALL_BYTES + 1)) is grpc.StatusCode.INVALID_ARGUMENT
        assert decoded == []
        assert await call("Small", SMALL_BYTES) == b"%d" % SMALL_BYTES


async def test_messages_in_flight_share_a_budget_until_they_are_answered() -> None:
    decoded, free = [], asyncio.Event()
    async with length_server(decoded, budget=3 * MIB, free=free) as channel:
        unary = channel.unary_unary("/test.Lengths/Unary")
        held = [unary(bytes(MIB), metadata=KEY, timeout=60) for _ in range(2)]
        while len(decoded) < 2:
            await asyncio.sleep(0.01)
        assert await status(unary(bytes(MIB + 1), metadata=KEY, timeout=60)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert decoded == [MIB, MIB]
        free.set()
        await asyncio.gather(*held)
        assert await unary(bytes(2 * MIB), metadata=KEY, timeout=60) == b"%d" % (2 * MIB)


async def test_a_message_that_does_not_arrive_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MESSAGE_TIMEOUT_S", 0.1)
    async with length_server([]) as channel:
        call = channel.stream_unary("/test.Lengths/Unary")(metadata=KEY, timeout=60)  # never writes
        assert await status(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_is_open_and_reflection_is_not() -> None:
    async with length_server([]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        service = "x" * SMALL_BYTES
        call = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert await status(call) is grpc.StatusCode.INVALID_ARGUMENT
        listed = channel.stream_stream(REFLECTION)()
        assert await status(listed.read()) is grpc.StatusCode.UNAUTHENTICATED


async def lists_services(address: str) -> bool:
    async with open_channel(address) as channel:
        listed = channel.stream_stream(REFLECTION)()
        try:
            await listed.write(b"\x3a\x00")  # list_services; fails where the refusal comes first
            return b"grpc.health.v1.Health" in await listed.read()
        except grpc.RpcError:  # UNIMPLEMENTED
            return False
        finally:
            listed.cancel()


async def test_without_checks_reflection_is_for_the_machine_itself() -> None:
    for address, offered in (("127.0.0.1:0", True), ("0.0.0.0:0", False)):
        async with RpcServer(address, grace_s=0) as server:
            await server.start()
            assert await lists_services(f"127.0.0.1:{server.address.rpartition(':')[2]}") is offered
