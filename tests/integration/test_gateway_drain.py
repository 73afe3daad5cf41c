"""SIGTERM to a gateway process: refuse, let running requests end, stop; the second one stops at once."""

import asyncio
import re
import signal

import grpc
import httpx
import pytest
import pytest_asyncio
from support.processes import gateway, verifier

from rootward import AsyncClient, SamplingParams
from rootward.client import connection
from rootward.errors import APIConnectionError, StreamInterruptedError, UnavailableError
from rootward.v1 import control_pb2, control_pb2_grpc

pytestmark = [pytest.mark.services, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

MODEL = "tabular:vocab=40,seed=1"
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


@pytest.fixture(autouse=True)
def few_attempts(monkeypatch):
    """Where nobody comes back, ten attempts take half a minute."""
    monkeypatch.setattr(connection, "RESUME_ATTEMPTS", 3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target():
    with verifier(MODEL, []) as running:
        yield running


async def some_tokens(stream):
    deltas = aiter(stream)
    await anext(deltas)
    return deltas


async def drains(client):
    async with asyncio.timeout(60):
        while not (await client.load()).draining:
            await asyncio.sleep(0.02)


async def test_running_requests_end_and_new_ones_are_refused(target):
    with gateway(MODEL, [target.address], "--shutdown-timeout-s", "60") as front:
        async with AsyncClient(front.address, max_retries=0) as client, httpx.AsyncClient(base_url=front.http) as web:
            stream = client.stream([1, 2], sampling=LONG)
            deltas = await some_tokens(stream)
            front.process.send_signal(signal.SIGTERM)
            await drains(client)
            with pytest.raises(UnavailableError, match="draining"):
                await client.generate([1, 2])
            refused = await web.post("/v1/completions", json={"prompt": [1, 2]})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (await web.get("/health")).status_code == 503
            async for _ in deltas:
                pass
            result = await stream.get_final_result()
            assert (len(result.token_ids), result.finish_reason) == (2000, "length")
        assert await asyncio.to_thread(front.process.wait, 60) == 0
        assert re.search(r"draining +at_most_s=64", front.output())  # the sender of the signal sees that it has arrived


async def test_the_rest_is_ended_after_the_shutdown_timeout(target):
    with gateway(MODEL, [target.address], "--shutdown-timeout-s", "0.3") as front:
        async with AsyncClient(front.address) as client:
            stream = client.stream([1, 2], sampling=LONG)
            deltas = await some_tokens(stream)
            front.process.send_signal(signal.SIGTERM)
            with pytest.raises((StreamInterruptedError, UnavailableError)):
                [_ async for _ in deltas]
        assert await asyncio.to_thread(front.process.wait, 60) == 0
        await nothing_runs(target)


async def test_a_second_signal_stops_at_once(target):
    with gateway(MODEL, [target.address], "--shutdown-timeout-s", "60") as front:
        async with AsyncClient(front.address) as client:
            stream = client.stream([1, 2], sampling=LONG)
            deltas = await some_tokens(stream)
            front.process.send_signal(signal.SIGTERM)
            await drains(client)
            front.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(front.process.wait, 60) == 0
            with pytest.raises((StreamInterruptedError, UnavailableError, APIConnectionError)):
                [_ async for _ in deltas]
        await nothing_runs(target)


async def nothing_runs(target):
    """The verifier was told that nobody wants the rest."""
    from rootward.wire.clients import RemoteVerifier

    async with RemoteVerifier(target.address) as remote, asyncio.timeout(60):
        while (await remote.get_info()).num_running:
            await asyncio.sleep(0.05)


async def test_a_gateway_that_an_administrator_has_drained_ends_its_process(target):
    with gateway(MODEL, [target.address]) as front:
        async with AsyncClient(front.address) as client:
            stream = client.stream([1, 2], sampling=LONG)
            deltas = await some_tokens(stream)
            async with grpc.aio.insecure_channel(front.address) as channel:
                control = control_pb2_grpc.ControlStub(channel)
                answer = await control.Drain(control_pb2.DrainRequest(timeout_s=60))
            assert answer.num_running == 1
            async for _ in deltas:
                pass
        assert await asyncio.to_thread(front.process.wait, 60) == 0
