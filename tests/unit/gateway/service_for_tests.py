"""A gateway service around in-test verifiers."""

from contextlib import asynccontextmanager

from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.service import GatewayService, Limits
from gateway.sessions import MemoryStore
from gateway.upstreams import Upstreams


@asynccontextmanager
async def serving(*verifiers, store=None, poll_s=0.02, **limits):
    """A running service; verifiers are named "v0", "v1", …"""
    named = {f"v{i}": v for i, v in enumerate(verifiers or (SpellingVerifier(),))}
    upstreams = Upstreams(named, poll_s=poll_s)
    chosen = {"redispatch_wait_s": 2.0, **limits}
    service = GatewayService(
        byte_level(), upstreams, store or MemoryStore(), served_model="demo", limits=Limits(**chosen)
    )
    async with service:
        await upstreams.wait_ready(1.0)
        yield service
