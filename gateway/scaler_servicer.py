"""KEDA's external scaler on the wire: `externalscaler.ExternalScaler`. One trigger asks for one signal of one pool."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog

from gateway.scaler import DemandWatch
from gateway.settings import GatewaySettings
from rootward.discovery.registry import open_registry
from rootward.errors import InvalidRequest, Unavailable
from rootward.v1 import external_scaler_pb2 as pb
from rootward.v1 import external_scaler_pb2_grpc
from rootward.wire.server import RpcServer
from rootward.wire.status import errors_as_status

log = structlog.get_logger("scaler")

NAME = pb.DESCRIPTOR.services_by_name["ExternalScaler"].full_name
GRACE_S = 1.0  # for streams to end well
SIGNALS = ("demand", "sessions", "rows", "stall")
LONGEST_SILENCE_S = 10.0  # after which a stream looks by itself

Context = grpc.aio.ServicerContext[Any, Any]


class ScalerServicer(external_scaler_pb2_grpc.ExternalScalerServicer):
    def __init__(self, watch: DemandWatch) -> None:
        self._watch = watch

    def register(self, server: RpcServer) -> None:
        external_scaler_pb2_grpc.add_ExternalScalerServicer_to_server(self, server.grpc)
        server.services.append(NAME)

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        async with errors_as_status(context):
            active = self._watch.active(_pool(request))
        return pb.IsActiveResponse(result=active)

    async def StreamIsActive(self, request: pb.ScaledObjectRef, context: Context) -> AsyncIterator[pb.IsActiveResponse]:
        """The state at once, then on change. It ends well on a drain: an error would double the time until KEDA asks again."""
        said: bool | None = None
        async with errors_as_status(context):
            pool = _pool(request)
            while changed := None if self._watch.ended else self._watch.changed:
                if (active := self._watch.active(pool)) is not said:
                    said = active
                    yield pb.IsActiveResponse(result=active)
                try:
                    async with asyncio.timeout(LONGEST_SILENCE_S):
                        await changed.wait()
                except TimeoutError:
                    pass

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Context) -> pb.GetMetricSpecResponse:
        async with errors_as_status(context):
            target = _target(request)
            spec = pb.MetricSpec(metricName=_metric(request), targetSize=math.ceil(target), targetSizeFloat=target)
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        async with errors_as_status(context):
            value = self._value(request.scaledObjectRef)
            name = request.metricName or _metric(request.scaledObjectRef)
        values = [pb.MetricValue(metricName=name, metricValue=math.ceil(value), metricValueFloat=value)]
        return pb.GetMetricsResponse(metricValues=values)

    def _value(self, request: pb.ScaledObjectRef) -> float:
        pool = _pool(request)
        found = self._watch.signals(pool)
        value: float | None = getattr(found, _signal(request))
        if value is None:
            raise Unavailable(f"{_signal(request)} of pool {pool!r} is not known yet", retry_after_s=1.0)
        return value


@asynccontextmanager
async def scaler_port(settings: GatewaySettings) -> AsyncIterator[None]:
    """Serve on `scaler_listen`, if there is one. Streams end well when the gateway does."""
    if not settings.scaler_listen:
        yield
        return
    async with open_registry(settings.redis_url) as registry:
        watch = DemandWatch(registry, settings.name)
        looking = asyncio.create_task(watch.run(), name="scaler")
        try:
            async with RpcServer(settings.scaler_listen, tls=settings.server_tls, grace_s=GRACE_S) as server:
                ScalerServicer(watch).register(server)
                await server.start()
                await server.set_ready(True)
                log.info("scaler_listens", address=server.address)
                yield
                watch.end()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


def _pool(request: pb.ScaledObjectRef) -> str:
    if pool := request.scalerMetadata.get("pool", ""):
        return pool
    raise InvalidRequest("pool", "", "is missing in the trigger's metadata; name a pool of drafters")


def _signal(request: pb.ScaledObjectRef) -> str:
    signal = request.scalerMetadata.get("signal", "demand")
    if signal not in SIGNALS:
        raise InvalidRequest("signal", signal, f"is none of {', '.join(SIGNALS)}")
    return signal


def _target(request: pb.ScaledObjectRef) -> float:
    written = request.scalerMetadata.get("target", "")
    try:
        target = float(written)
    except ValueError:
        target = math.nan
    if not (math.isfinite(target) and target > 0):
        raise InvalidRequest("target", written, "must be a number above 0: what one replica is for")
    return target


def _metric(request: pb.ScaledObjectRef) -> str:
    return f"rootward-{_pool(request)}-{_signal(request)}"
