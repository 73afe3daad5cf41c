"""The models of a gateway: each has a `GatewayService`, and a request goes to the one that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry

from gateway.auth import caller
from gateway.router import Upstream
from gateway.service import GatewayService
from rootward.client.types import Load, VerifierLoad
from rootward.errors import InvalidRequest, NotFound
from rootward.metrics import ByModel


class Models:
    """Running services by the names that clients use. Their order is that of /v1/models."""

    def __init__(self, services: Sequence[GatewayService], *, by_model: bool = False):
        """by_model: metrics have the label `model_name`, as those of several models do."""
        self._services = {service.served_model: service for service in services}
        self.registry = CollectorRegistry()
        if by_model or len(services) > 1:
            self.registry.register(ByModel({name: s.metrics.registry for name, s in self._services.items()}))
        else:
            self.registry = services[0].metrics.registry
        self.watching = services[0].watching  # one for all
        self.drained = asyncio.Event()  # by a drain that was asked for over the network

    def __iter__(self) -> Iterator[GatewayService]:
        return iter(self._services.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._services)

    def of(self, name: str) -> GatewayService:
        """The service of the model that a request names; one that names none gets the only one there is.

        InvalidRequest, NotFound and PermissionDenied tell which models there are."""
        known = " or ".join(map(repr, self._services))
        if not name and len(self._services) > 1:
            raise InvalidRequest("model", name, f"is missing, and several models are served; use {known}")
        service = self._services.get(name) if name else next(iter(self))
        if service is None:
            raise NotFound(f"model: {name!r} is not served here; use {known}", metadata={"field": "model"})
        if (who := caller()) is not None:
            who.require_model([service.served_model])
        return service

    def listed(self) -> list[GatewayService]:
        """Those that the caller may use and whose verifiers have told about their model. Unavailable if there is none."""
        who = caller()
        allowed = [service for service in self if who is None or who.may_use(service.served_model)]
        if not any(service.upstreams.model for service in allowed):
            raise allowed[0].unavailable()
        return [service for service in allowed if service.upstreams.model]

    @property
    def load(self) -> Load:
        """Of all models together."""
        each = [service.admission for service in self]
        delivered = [service.metrics.delivered for service in self]
        return Load(
            num_running=sum(admission.num_running for admission in each),
            num_waiting=sum(admission.num_waiting for admission in each),
            max_sessions=sum(admission.max_num_seqs for admission in each),
            draining=all(admission.draining for admission in each),
            num_requests=sum(of.num_requests for of in delivered),
            num_tokens=sum(of.num_tokens for of in delivered),
            num_rounds=sum(of.num_rounds for of in delivered),
            uptime_s=next(iter(self)).uptime_s,
            verifiers=tuple(verifier_load(upstream) for service in self for upstream in service.upstreams),
        )

    @property
    def ready(self) -> bool:
        """New requests of some model would be served."""
        return any(service.ready for service in self)

    async def wait_ready(self, timeout_s: float) -> None:
        """Until verifiers of every model have answered, or for `timeout_s`."""
        await asyncio.gather(*(service.upstreams.wait_ready(timeout_s) for service in self))

    def abort(self, request_ids: Sequence[str], *, tenant: str | None = None) -> list[str]:
        """As `GatewayService.abort`, whatever model they run on."""
        aborted = {i for service in self for i in service.abort(request_ids, tenant=tenant)}
        return [i for i in request_ids if i in aborted]

    async def drain(self, timeout_s: float) -> None:
        await asyncio.gather(*(service.drain(timeout_s) for service in self))

    def start_draining(self, timeout_s: float) -> None:
        """Drain without waiting for its end, which sets `drained`."""
        for service in self:
            service.admission.draining = True
        self._draining = asyncio.create_task(self.drain(timeout_s))
        self._draining.add_done_callback(lambda _: self.drained.set())


def verifier_load(upstream: Upstream) -> VerifierLoad:
    """As it last said."""
    info = upstream.info
    if info is None:
        return VerifierLoad(upstream.name, False, 0, 0, 0)
    counts = info.num_running, info.num_waiting, info.max_sessions
    return VerifierLoad(info.worker, upstream.ready, *counts, info.stats)
