"""The gRPC server of every role: health with Watch, reflection, limits, a port of its own."""

from __future__ import annotations

from typing import Self

import grpc
from grpc_health.v1 import health as health_module
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rootward.addresses import is_loopback
from rootward.errors import ConfigurationError
from rootward.wire.auth import HEALTH, Admission, BytesInFlight, Check, RefusalLog, peers_only
from rootward.wire.channel import SERVING, Transport, server_options
from rootward.wire.tls import ServerTls, server_credentials

HEALTHY = health_pb2.HealthCheckResponse.SERVING
UNHEALTHY = health_pb2.HealthCheckResponse.NOT_SERVING
MAX_CALLS = 4096  # at one time
MAX_BYTES_IN_FLIGHT = 1 << 30
SMALL_BYTES = 64 << 10  # of requests that carry names and numbers only


class RpcServer:
    """One listening address. Register servicers on `grpc`, then `start`; leaving the context stops it.

        async with RpcServer("127.0.0.1:0") as server:
            VerifierServicer(verifier).register(server)
            await server.start()
            await server.set_ready(True)

    Health: service "" is SERVING while the process runs; each registered service while it takes work (`set_ready`).
    """

    def __init__(
        self,
        address: str,
        *,
        transport: Transport = SERVING,
        tls: ServerTls | None = None,
        checks: tuple[Check, ...] = (),
        in_flight: BytesInFlight | None = None,
        refusals: RefusalLog | None = None,
        grace_s: float = 5.0,
        setting: str = "listen",
    ) -> None:
        """setting: the one that has the address, for errors."""
        self._checks = (*checks, peers_only(tls.peers)) if tls and tls.peers else checks
        # For servicers to add to when they register: prefix of a method's path -> most bytes of its request message.
        self.limits = {HEALTH: SMALL_BYTES}
        admission = Admission(
            self._checks, self.limits, in_flight or BytesInFlight(MAX_BYTES_IN_FLIGHT), refusals or RefusalLog()
        )
        self.grpc = grpc.aio.server(
            options=server_options(transport), interceptors=[admission], maximum_concurrent_rpcs=MAX_CALLS
        )
        self.address = address  # with the port that was bound, once started
        self.services: list[str] = []
        self._tls = tls
        self._grace_s = grace_s
        self._setting = setting
        self._health = health_module.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def start(self) -> None:
        """Listen. ConfigurationError if the address is taken or cannot be bound."""
        if self._checks or is_loopback(self.address):  # reflection is never open to the network
            names = [*self.services, health_module.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self.grpc)
        self.address = f"{self.address.rpartition(':')[0]}:{self._bind()}"
        await self.set_ready(False)
        await self._health.set("", HEALTHY)
        await self.grpc.start()

    async def set_ready(self, ready: bool) -> None:
        """Set the health of every registered service."""
        for name in self.services:
            await self._health.set(name, HEALTHY if ready else UNHEALTHY)

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then cancel them. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(self._grace_s if grace_s is None else grace_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.stop(0 if kind else None)

    def _bind(self) -> int:
        try:
            if self._tls is None:
                port = self.grpc.add_insecure_port(self.address)
            else:
                port = self.grpc.add_secure_port(self.address, server_credentials(self._tls))
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigurationError(
                f"{self._setting}: {self.address!r} is in use or cannot be bound; choose another address or stop its owner"
            )
        return port
