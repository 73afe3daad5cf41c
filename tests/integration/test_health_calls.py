"""Calls of the health service, which needs no credentials and whose watches do not end, leave room for others."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.services import drafter_of, tabular_pair

from drafter_service.servicer import DrafterServicer
from rootward.wire import auth, server
from rootward.wire.clients import RemoteDrafter


async def _watched(stub: health_pb2_grpc.HealthStub) -> grpc.aio.Call | None:
    """A watch that has begun; None if there were too many."""
    call: grpc.aio.Call = stub.Watch(health_pb2.HealthCheckRequest())
    try:
        assert (await call.read()).status == server.HEALTHY
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return None
    return call


async def test_watches_of_a_stranger_do_not_take_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CALLS", 8)
    monkeypatch.setattr(auth, "MAX_HEALTH_CALLS", 4, raising=False)
    drafter = drafter_of(tabular_pair()[1])
    async with drafter, server.RpcServer("127.0.0.1:0", grace_s=0) as serving:
        DrafterServicer(drafter, drafter.describe).register(serving)
        await serving.start()
        async with grpc.aio.insecure_channel(serving.address) as channel, RemoteDrafter(serving.address) as client:
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [await _watched(stub) for _ in range(8)]
            assert (await client.get_info()).model == drafter.grower.info
            assert sum(watch is not None for watch in watches) == 4
            assert watches[0] is not None
            watches[0].cancel()
            async with asyncio.timeout(60):
                while await _watched(stub) is None:
                    await asyncio.sleep(0.01)
