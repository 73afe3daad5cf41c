"""A gateway service around in-test verifiers."""

import asyncio
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import END_ID, SpellingVerifier

from gateway.detokenizer import Span
from gateway.models import Models
from gateway.requests import Ending
from gateway.router import Upstreams
from gateway.service import LEASE_S, GatewayService
from gateway.servicer import register
from gateway.session_store import MemoryStore
from gateway.settings import GatewaySettings
from rootward.wire.server import RpcServer

TEXT = SpellingVerifier().text
IDS = (*byte_level().encode(TEXT), END_ID)  # what every generation must give
WAIT_S = 60.0  # what should happen happens in this time, however busy the machine is


@dataclass(frozen=True)
class Generated:
    """A whole generation."""

    request_id: str
    spans: tuple[Span, ...]
    ending: Ending

    @property
    def text(self):
        return "".join(span.text for span in self.spans)


def ids_of(delta):
    return tuple(span.token for span in delta.spans)


async def collect(service, request):
    """The whole generation at once."""
    spans = []
    async with aclosing(service.generate(request)) as deltas:
        async for delta in deltas:
            spans += delta.spans
            if delta.ending is not None:
                return Generated(delta.request_id, tuple(spans), delta.ending)
    raise AssertionError("the generation ended without a finish")


def settings_of(*, tenant_rate=None, **settings):
    """tenant_rate: finer than tokens per minute."""
    kind = GatewaySettings
    if tenant_rate is not None:
        kind = type("Settings", (GatewaySettings,), {"tenant_rate": property(lambda self: tenant_rate)})
    return kind(model="demo", **{"redispatch_wait_s": WAIT_S, **settings})


@asynccontextmanager
async def serving(*verifiers, store=None, poll_s=0.02, lease_s=LEASE_S, **settings):
    """A running service; verifiers are named "v0", "v1", …"""
    named = {f"v{i}": v for i, v in enumerate(verifiers or (SpellingVerifier(),))}
    upstreams = Upstreams(named, poll_s=poll_s)
    store = store or MemoryStore()
    service = GatewayService(
        byte_level(), upstreams, store, settings=settings_of(**settings), served_model="demo", lease_s=lease_s
    )
    async with service:
        if any(getattr(v, "up", True) for v in named.values()):  # one over the wire does not know
            await upstreams.wait_ready(WAIT_S)
        yield service
    await store.close()


@asynccontextmanager
async def grpc_serving(*verifiers, **options):
    """(service, "host:port"): the same behind a real gRPC server on loopback."""
    async with serving(*verifiers, **options) as service, RpcServer("127.0.0.1:0", grace_s=0) as server:
        register(Models([service]), server, shutdown_timeout_s=1.0)
        await server.start()
        await server.set_ready(True)
        yield service, server.address


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def stored(service):
    """What has run here is in the store. The loop that writes it pauses for up to a second where the machine is busy."""
    await until(lambda: not service._ledger._entries)


async def at_rest(service, *verifiers):
    """Conservation: nothing runs, waits or is held anywhere."""

    def busy():
        return service.admission.num_running or any(v.running for v in verifiers) or service._ledger._entries

    with suppress(TimeoutError):
        await until(lambda: not busy())
    assert service.admission.num_running == service.admission.num_waiting == 0
    assert not service._live
    assert not service._ledger._entries
    assert all(u.num_in_flight == 0 for u in service.upstreams)
    assert all(v.running == 0 for v in verifiers)
