"""A proxy in the environment is for the network outside: services of this machine and of a deployment are reached directly."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from unit.gateway.service_for_tests import grpc_serving
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.local import _connected, _deployment
from gateway.settings import LocalSettings
from rootward import AsyncClient
from rootward.addresses import open_local
from rootward.wire.clients import RemoteVerifier
from rootward.wire.server import RpcServer
from verifier_service.servicer import VerifierServicer


@pytest.fixture(autouse=True)
def proxy(monkeypatch):
    """Nothing listens where the proxy should be."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


async def test_the_sdk_reaches_a_gateway_on_this_machine():
    async with grpc_serving() as (_, address), AsyncClient(address, max_retries=0) as client:
        assert (await client.generate("a")).text


async def test_serve_all_reaches_its_gateway_on_all_addresses_of_this_machine():
    """0.0.0.0 is the address that the gateway tells it, and is not one of loopback."""
    async with RpcServer("127.0.0.1:0", grace_s=0) as server, grpc_serving() as (_, address):
        VerifierServicer(SpellingVerifier()).register(server)
        await server.start()
        with ExitStack() as reserved:
            deployment = _deployment(LocalSettings(model="demo", redis_url="none"), "/tmp", reserved=reserved)
        deployment.drafters.clear()
        deployment.gateway.address = f"0.0.0.0:{address.rpartition(':')[2]} and http://127.0.0.1:1"
        deployment.verifier.address = server.address
        async with asyncio.timeout(10):
            await _connected(deployment)


async def test_a_service_reaches_another_by_any_name():
    async with RpcServer("127.0.0.1:0", grace_s=0) as server:
        VerifierServicer(SpellingVerifier()).register(server)
        await server.start()
        async with RemoteVerifier(f"dns:///localhost:{server.address.rpartition(':')[2]}") as remote:
            assert (await remote.get_info()).worker


def test_http_of_this_machine():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        answers = Thread(target=server.handle_request)
        answers.start()
        with open_local(f"http://127.0.0.1:{server.server_port}", timeout_s=10) as answer:
            assert answer.status == 204
        answers.join()
