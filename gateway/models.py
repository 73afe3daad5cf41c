"""The models of a gateway: each has a `GatewayService`, and a request goes to the model that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry

from gateway.auth import caller
from gateway.metrics import CallMetrics
from gateway.router import Upstream
from gateway.service import GatewayService
from rootward.client.types import Load, VerifierLoad
from rootward.errors import InvalidRequest, NotFound
from rootward.metrics import ByModel


class Models:
    """Running services by the names that clients use, in the order of /v1/models.

    by_model: metrics have the label `model_name`, as those of several models do.
    """

    def __init__(self, services: Sequence[GatewayService], *, by_model: bool = False):
        self._services = {service.served_model: service for service in services}
        self.registry = CollectorRegistry()
        if by_model or len(services) > 1:
            self.registry.register(ByModel({name: s.metrics.registry for name, s in self._services.items()}))
        else:
            self.registry.register(services[0].metrics.registry)
        self.calls = CallMetrics(self.registry)
        self.watching = services[0].watching  # shared by all
        self.drained = asyncio.Event()  # set at the end of `start_draining`

    def __iter__(self) -> Iterator[GatewayService]:
        return iter(self._services.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._services)

    def of(self, name: str) -> GatewayService:
        """The service of the model that a request names; without a name, the only service.

        InvalidRequest, NotFound and PermissionDenied name the models that are served."""
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
        """The services that the caller may use and whose verifiers have answered. Unavailable if there is none."""
        who = caller()
        allowed = [service for service in self if who is None or who.may_use(service.served_model)]
        if not any(service.upstreams.model for service in allowed):
            raise allowed[0].unavailable()
        return [service for service in allowed if service.upstreams.model]

    @property
    def load(self) -> Load:
        """The load of all models together."""
        each = [service.admission for service in self]
        metrics = [service.metrics for service in self]
        return Load(
            num_running=sum(admission.num_running for admission in each),
            num_waiting=sum(admission.num_waiting for admission in each),
            max_sessions=sum(admission.max_num_seqs for admission in each),
            draining=all(admission.draining for admission in each),
            num_requests=sum(of.num_requests for of in metrics),
            num_tokens=sum(of.num_tokens for of in metrics),
            num_rounds=sum(of.num_rounds for of in metrics),
            uptime_s=next(iter(self)).uptime_s,
            verifiers=tuple(verifier_load(upstream) for service in self for upstream in service.upstreams),
        )

    @property
    def ready(self) -> bool:
        """At least one model takes new requests."""
        return any(service.ready for service in self)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until verifiers of every model have answered, for `timeout_s` at most."""
        await asyncio.gather(*(service.upstreams.wait_ready(timeout_s) for service in self))

    def abort(self, request_ids: Sequence[str], *, tenant: str | None = None) -> list[str]:
        """As `GatewayService.abort`, for requests of all models."""
        aborted = {i for service in self for i in service.abort(request_ids, tenant=tenant)}
        return [i for i in request_ids if i in aborted]

    async def drain(self, timeout_s: float) -> None:
        await asyncio.gather(*(service.drain(timeout_s) for service in self))

    def start_draining(self, timeout_s: float) -> None:
        """Start to drain; the end of the drain sets `drained`."""
        for service in self:
            service.admission.draining = True
        self._draining = asyncio.create_task(self.drain(timeout_s))
        self._draining.add_done_callback(lambda _: self.drained.set())


def verifier_load(upstream: Upstream) -> VerifierLoad:
    """The load that a verifier last reported."""
    info = upstream.info
    if info is None:
        return VerifierLoad(upstream.name, False, 0, 0, 0)
    return VerifierLoad(info.worker, upstream.ready, info.num_running, info.num_waiting, info.max_sessions, info.stats)
