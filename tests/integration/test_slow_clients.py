"""A client that does not read: what waits for it is counted and bounded, others do not notice, and it gets every token once in the end."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from unit.gateway.service_for_tests import at_rest, grpc_serving
from unit.gateway.verifier_for_tests import MODEL

from gateway import servicer
from rootward import AsyncClient, SamplingParams
from rootward.core.requests import Committed, Finish, FinishReason
from rootward.ports import VerifierInfo
from rootward.v1 import generate_pb2, generate_pb2_grpc
from rootward.wire.clients import RemoteVerifier
from rootward.wire.columns import unpack_u32
from rootward.wire.server import RpcServer
from verifier_service.servicer import VerifierServicer

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

NUM_TOKENS = 30_000
CONTEXT = MODEL.__class__("tiny", vocab_size=330, max_positions=2 * NUM_TOKENS, fingerprint="f" * 16)
WINDOW = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]  # what a client buffers without reading


class Fast:
    """Commits four tokens of a known text at a time, as fast as it can."""

    def __init__(self):
        self.running = 0

    async def get_info(self):
        return VerifierInfo(CONTEXT, "fast", 1, (), self.running, 0, 8)

    async def generate(self, request):
        self.running += 1
        try:
            most = request.stopping.max_tokens
            for at in range(0, most, 4):
                await asyncio.sleep(0)
                tokens = tuple(position % 90 + 65 for position in range(at, min(at + 4, most)))
                finish = Finish(FinishReason.LENGTH) if at + 4 >= most else None
                yield Committed(request.epoch, at, tokens, (False,) * len(tokens), finish)
        finally:
            self.running -= 1


@asynccontextmanager
async def served(**limits):
    """(verifier, remote, gateway service, gateway address), all over real gRPC."""
    verifier = Fast()
    async with RpcServer("127.0.0.1:0", grace_s=0) as server:
        VerifierServicer(verifier).register(server)
        await server.start()
        async with RemoteVerifier(server.address) as remote, grpc_serving(remote, **limits) as (service, address):
            yield verifier, remote, service, address


def ask() -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest(request_id="slow")
    request.token_ids.ids[:] = [65]
    request.stopping.max_tokens, request.stopping.ignore_eos = NUM_TOKENS, True
    return request


def num_waiting_tokens(feed) -> int:
    """Committed tokens that generations have not taken."""
    return sum(len(item.tokens) for queue in feed._waiting.values() for item in queue._items)


async def until(condition):
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


async def test_what_waits_for_a_slow_client_is_bounded_and_nothing_of_it_is_lost():
    async with served() as (verifier, remote, service, address), grpc.aio.insecure_channel(address, WINDOW) as channel:
        call = generate_pb2_grpc.InferenceStub(channel).GenerateStream(ask())
        first = await call.read()
        await until(lambda: not verifier.running)  # it has committed everything, and the client has read one message
        assert service.admission.num_running == 1
        async with AsyncClient(address) as other:  # what it gets comes by the same feed, after all that
            result = await other.generate([65], sampling=SamplingParams(max_tokens=50, ignore_eos=True))
        assert len(result.token_ids) == 50
        assert NUM_TOKENS / 2 < num_waiting_tokens(remote._feed) < NUM_TOKENS
        got, chunks = list(unpack_u32(first.token_ids)), 1
        while (chunk := await call.read()) is not grpc.aio.EOF:
            assert chunk.offset == len(got)
            got += unpack_u32(chunk.token_ids)
            chunks += 1
        assert got == [position % 90 + 65 for position in range(NUM_TOKENS)]
        assert chunks < NUM_TOKENS / 4 / 2  # what had waited came joined
        assert num_waiting_tokens(remote._feed) == 0
        await at_rest(service)


async def test_a_client_that_never_reads_times_out(monkeypatch):
    monkeypatch.setattr(servicer, "SLOW_CLIENT_S", 0.2)
    async with (
        served(request_timeout_s=3.0) as (_, remote, service, address),
        grpc.aio.insecure_channel(address, WINDOW) as channel,
    ):
        call = generate_pb2_grpc.InferenceStub(channel).GenerateStream(ask())
        await until(lambda: service.admission.num_running)
        await call.read()
        await until(lambda: not service.admission.num_running)
        assert num_waiting_tokens(remote._feed) == 0
        await at_rest(service)
