"""Autoscaling: the demand for drafters from the counters in workers' heartbeats, and KEDA's external scaler that serves it.

The formula is that of the recording rules, without a Prometheus. The registry is read every second; rates are taken over `WINDOW_S`. Every
gateway computes the same values. While Redis does not answer, the last values hold for `HOLD_S`; then they are unknown, not 0, since an
autoscaler that reads 0 would remove every drafter. One trigger of KEDA asks for one signal of one pool.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from gateway.settings import GatewaySettings
from rootward.clock import Clock, SystemClock
from rootward.demand import UNKNOWN, Cost, Reading, Signals, signals
from rootward.discovery.registry import Registry, RegistryUnavailable, Worker
from rootward.errors import InvalidRequest, NotFound, Unavailable
from rootward.v1 import external_scaler_pb2 as pb
from rootward.v1 import external_scaler_pb2_grpc
from rootward.wire.server import SMALL_BYTES, RpcServer
from rootward.wire.status import Context, errors_as_status

log = structlog.get_logger("scaler")

LOOK_S = 1.0
WINDOW_S = 15.0
HOLD_S = 30.0
NAME = pb.DESCRIPTOR.services_by_name["ExternalScaler"].full_name
GRACE_S = 1.0  # for streams to end well
SIGNALS = ("demand", "sessions", "rows", "stall")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All workers at one time, by id."""

    at_s: float
    workers: Mapping[str, Worker]

    @property
    def pools(self) -> frozenset[str]:
        """Pools that verifiers draw from."""
        return frozenset(pool for w in self.workers.values() if w.role == "verifier" for pool in w.counters)


class DemandWatch:
    """Reads the registry in `run` until cancelled, and computes signals from its readings. models: names that the verifiers serve."""

    def __init__(self, registry: Registry, models: Sequence[str], clock: Clock | None = None) -> None:
        self._registry, self._models, self._clock = registry, models, clock or SystemClock()
        self._snapshots: deque[Snapshot] = deque()
        self._costs: dict[str, Cost] = {}  # of a round by pool, as it was when drafters last reported
        self.ended = False  # the gateway drains
        # Set, and replaced, after every look. Take it before reading, so that no change is missed.
        self.changed = asyncio.Event()

    async def run(self) -> None:
        while True:
            await self.look()
            await self._clock.sleep(LOOK_S)

    async def look(self) -> None:
        """Read the registry once. The last readings stay if it does not answer."""
        try:
            of_models = await asyncio.gather(*(self._registry.workers("verifier", model) for model in self._models))
            workers = {worker.id: worker for found in of_models for worker in found}
            for pool in sorted({pool for verifier in workers.values() for pool in verifier.counters}):
                workers |= {drafter.id: drafter for drafter in await self._registry.workers("drafter", pool)}
        except RegistryUnavailable as error:
            log.debug("not_seen", error=str(error))
        else:
            self._keep(Snapshot(self._clock.now(), workers))
        self._wake_up()

    def end(self) -> None:
        """The gateway drains: streams end, and KEDA asks another gateway."""
        self.ended = True
        self._wake_up()

    def active(self, pool: str) -> bool:
        """Whether there are sessions that would take drafts of this pool."""
        workers = self._latest(pool).workers.values()
        return any(w.counters.get(pool, {}).get("speculating_sessions", 0) > 0 for w in workers)

    def signals(self, pool: str) -> Signals:
        """Demand and guards of a pool. NotFound if no verifier knows it; Unavailable if the last reading is too old."""
        new = self._latest(pool)
        of_pool = [w for w in new.workers.values() if pool in w.counters]
        verifiers = [self._reading(w, pool) for w in of_pool if w.role == "verifier"]
        drafters = [self._reading(w, pool) for w in of_pool if w.role == "drafter"]
        return signals(verifiers, drafters, new.at_s - self._snapshots[0].at_s, self._costs.get(pool, UNKNOWN))

    def _reading(self, worker: Worker, pool: str) -> Reading:
        """Its counters since it was first seen in the window, as `rate` computes. A worker that is new here need not be young: the registry
        may have lost it, or no verifier used its pool."""
        seen = (snapshot.workers.get(worker.id) for snapshot in self._snapshots)
        first = next((known for known in seen if known and known.incarnation == worker.incarnation), worker)
        return Reading(first.counters.get(pool, {}), worker.counters.get(pool, {}))

    def _latest(self, pool: str) -> Snapshot:
        latest = self._snapshots[-1] if self._snapshots else None
        if latest is None or self._clock.now() - latest.at_s > HOLD_S:
            raise Unavailable("the registry has not answered; demand is unknown", retry_after_s=LOOK_S)
        if pool not in latest.pools:
            known = ", ".join(sorted(latest.pools)) or "none"
            raise NotFound(f"pool: {pool!r} is known to no verifier; known: {known}")
        return latest

    def _keep(self, snapshot: Snapshot) -> None:
        self._snapshots.append(snapshot)
        while len(self._snapshots) > 2 and snapshot.at_s - self._snapshots[1].at_s >= WINDOW_S:
            self._snapshots.popleft()
        for pool in snapshot.pools:
            self._costs[pool] = self.signals(pool).cost

    def _wake_up(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class ScalerServicer(external_scaler_pb2_grpc.ExternalScalerServicer):
    def __init__(self, watch: DemandWatch) -> None:
        self._watch = watch

    def register(self, server: RpcServer) -> None:
        external_scaler_pb2_grpc.add_ExternalScalerServicer_to_server(self, server.grpc)
        server.services.append(NAME)
        server.limits[f"/{NAME}/"] = SMALL_BYTES

    async def IsActive(self, request: pb.ScaledObjectRef, context: Context) -> pb.IsActiveResponse:
        async with errors_as_status(context):
            active = self._watch.active(_pool(request))
        return pb.IsActiveResponse(result=active)

    async def StreamIsActive(self, request: pb.ScaledObjectRef, context: Context) -> AsyncIterator[pb.IsActiveResponse]:
        """The state at once, then on change. It ends without an error on a drain, which would double the time until KEDA asks again."""
        last: bool | None = None
        async with errors_as_status(context):
            pool = _pool(request)
            while changed := None if self._watch.ended else self._watch.changed:
                if (active := self._watch.active(pool)) is not last:
                    last = active
                    yield pb.IsActiveResponse(result=active)
                await changed.wait()

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Context) -> pb.GetMetricSpecResponse:
        async with errors_as_status(context):
            target = _target(request)
            spec = pb.MetricSpec(metricName=_metric(request), targetSize=math.ceil(target), targetSizeFloat=target)
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        async with errors_as_status(context):
            pool, signal = _pool(request.scaledObjectRef), _signal(request.scaledObjectRef)
            value: float | None = getattr(self._watch.signals(pool), signal)
            if value is None:
                raise Unavailable(f"{signal} of pool {pool!r} is not known yet", retry_after_s=1.0)
            name = request.metricName or _metric(request.scaledObjectRef)
        values = [pb.MetricValue(metricName=name, metricValue=math.ceil(value), metricValueFloat=value)]
        return pb.GetMetricsResponse(metricValues=values)


@asynccontextmanager
async def scaler_port(settings: GatewaySettings, registry: Registry) -> AsyncIterator[None]:
    """Serve on `scaler_listen`. Streams end without an error when the gateway ends."""
    watch = DemandWatch(registry, [served.name for served in settings.served])
    looking = asyncio.create_task(watch.run(), name="scaler")
    try:
        # KEDA needs a certificate of the authority, since nothing else identifies it.
        async with RpcServer(
            settings.scaler_listen, tls=settings.server_tls, grace_s=GRACE_S, setting="scaler_listen"
        ) as server:
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
