"""KEDA's external scaler, asked as KEDA asks: through a registry in a real Redis, over gRPC, with a client of the public contract."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from support.fake_clock import FakeClock
from support.redis import running_redis

from benchmarks.hpa import DEFAULT_UP, Autoscaler, Policy, Rules, Spec, Target
from gateway.autoscaling import HOLD_S, DemandWatch, ScalerServicer
from rootward.discovery.registry import Worker, open_registry
from rootward.v1 import external_scaler_pb2 as pb
from rootward.v1.external_scaler_pb2_grpc import ExternalScalerStub
from rootward.wire.server import RpcServer

TARGET = "2.8"  # four rows at 0.7


@pytest.fixture(scope="module")
def redis_url():
    with running_redis() as url:
        yield url


def trigger(signal: str = "demand", pool: str = "cheap", **more: str) -> pb.ScaledObjectRef:
    metadata = {"pool": pool, "signal": signal, "target": TARGET, "scalerAddress": "gateway:50053", **more}
    return pb.ScaledObjectRef(name="drafter", namespace="llm", scalerMetadata=metadata)


class Cluster:
    """Workers that publish, a watch that looks, a stub that asks. Time passes by `beat`."""

    def __init__(self, registry, watch, clock, stub):
        self.registry, self.watch, self.clock, self.stub = registry, watch, clock, stub
        counters = {"speculating_sessions": 0, "round_seconds_count": 0, "round_seconds_sum": 0.0}
        counters |= {"draft_stall_seconds_sum": 0.0, "draft_prior_row_seconds": 0.2}
        self.verifier = Worker("verifier", "v", "llama", "10.0.0.1:1", counters={"cheap": counters})
        self.drafters: list[Worker] = []

    async def beat(self, seconds: float, *, sessions: int, round_s: float = 0.8, draft_s: float = 0.2) -> None:
        """Everybody worked for so long: each session did round after round, spread over the drafters."""
        old = self.verifier.counters["cheap"]
        rounds = sessions * seconds / round_s
        new = old | {"speculating_sessions": sessions}
        new |= {"round_seconds_count": old["round_seconds_count"] + rounds}
        new |= {"round_seconds_sum": old["round_seconds_sum"] + rounds * round_s}
        self.verifier = replace(self.verifier, counters={"cheap": new})
        self.drafters = [self._grown(d, rounds / len(self.drafters), draft_s) for d in self.drafters]
        for worker in (self.verifier, *self.drafters):
            await self.registry.publish(worker)
        await self.clock.advance(seconds)
        await self.watch.look()

    def _grown(self, drafter: Worker, growths: float, draft_s: float) -> Worker:
        old = drafter.counters["cheap"]
        new = old | {"draft_compute_seconds_count": old["draft_compute_seconds_count"] + growths}
        new |= {"draft_row_seconds_wanted": old["draft_row_seconds_wanted"] + growths * draft_s}
        return replace(drafter, counters={"cheap": new})

    def scale(self, count: int) -> None:
        fresh = {"drafter_rows": 4, "draft_compute_seconds_count": 0.0, "draft_row_seconds_wanted": 0.0}
        self.drafters = self.drafters[:count] + [
            Worker("drafter", f"d{n}", "cheap", f"10.0.1.{n}:1", incarnation=n, counters={"cheap": fresh})
            for n in range(len(self.drafters), count)
        ]

    async def value(self, signal: str = "demand") -> float:
        answer = await self.stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=trigger(signal)), timeout=60)
        return answer.metricValues[0].metricValueFloat

    async def active(self) -> bool:
        return (await self.stub.IsActive(trigger(), timeout=60)).result


@pytest.fixture
async def cluster(redis_url):
    async with running(redis_url) as one:
        yield one


@asynccontextmanager
async def running(redis_url):
    clock = FakeClock()
    async with open_registry(redis_url, heartbeat_s=30) as registry:
        await registry._client.flushall()
        watch = DemandWatch(registry, ["llama"], clock)
        async with RpcServer("127.0.0.1:0", grace_s=0.5) as server:
            ScalerServicer(watch).register(server)
            await server.start()
            async with grpc.aio.insecure_channel(server.address) as channel:
                yield Cluster(registry, watch, clock, ExternalScalerStub(channel))


async def test_idle_active_scaled_idle(cluster: Cluster) -> None:
    """An HPA that is fed by the scaler: from nothing to what the formula says, and back, without a Prometheus."""
    down = Rules(0, (Policy("Percent", 100, 15),))
    autoscaler = Autoscaler(
        Spec((Target("AverageValue", float(TARGET)),), least=0, up=DEFAULT_UP, down=down, scale_to_zero=True)
    )
    await cluster.beat(15, sessions=0)
    assert not await cluster.active()
    assert await cluster.value() == 0

    seen, replicas = [], 0
    for sync in range(12):
        await cluster.beat(15, sessions=96 if sync < 8 else 0)
        if replicas == 0 and await cluster.active():
            replicas = 1  # KEDA's part: from 0 to 1
        elif replicas:
            wanted = autoscaler.sync(15.0 * sync, replicas, replicas, [await cluster.value()])
            replicas = max(1, wanted) if await cluster.active() else 0
        cluster.scale(replicas)
        seen.append(replicas)
    assert seen[:4] == [1, 5, 9, 9]  # 96 · 0.2 / 0.8 = 24 rows; 2.8 a pod
    assert set(seen[3:8]) == {9}
    assert seen[-1] == 0
    assert not await cluster.active()


async def test_demand_is_reported_without_drafters(cluster: Cluster) -> None:
    await cluster.beat(15, sessions=40)
    assert await cluster.active()
    await cluster.beat(15, sessions=40)  # rates need two looks
    assert await cluster.value() == pytest.approx(40 * 0.2 / 0.8)
    assert (await cluster.value("rows"), await cluster.value("stall")) == (0, 0)


async def test_a_new_pool_scales_by_sessions_before_the_cost_of_a_round_is_known(cluster: Cluster) -> None:
    """No drafter ever reported and nothing is assumed: demand is unknown, the sessions are not, and they are enough to begin with."""
    unknown = cluster.verifier.counters["cheap"] | {"draft_prior_row_seconds": 0.0}
    cluster.verifier = replace(cluster.verifier, counters={"cheap": unknown})
    for _ in range(2):
        await cluster.beat(15, sessions=40)
    assert (await code_of(cluster.value()))[0] is grpc.StatusCode.UNAVAILABLE
    assert await cluster.value("sessions") == 40
    places = Spec((Target("AverageValue", 2.8), Target("AverageValue", 0.9 * 16)), most=40)
    assert Autoscaler(places).sync(0.0, 1, 1, [None, 40]) == 3


async def test_what_drafters_need_is_remembered_when_they_are_lost(cluster: Cluster) -> None:
    cluster.scale(2)
    await cluster.beat(15, sessions=40, draft_s=0.1)
    await cluster.beat(15, sessions=40, draft_s=0.1)
    busy = await cluster.value("rows")
    assert busy == pytest.approx(40 * 0.1 / 0.8 / 8)
    await cluster.registry._client.flushall()
    cluster.scale(0)
    await cluster.beat(15, sessions=40)
    assert await cluster.value() == pytest.approx(40 * 0.1 / 0.8)


async def test_a_drafter_that_is_new_to_the_registry_is_not_young(cluster: Cluster) -> None:
    """Redis came back empty, or all verifiers were away: what a drafter did in all its life is not what it did just now."""
    cluster.scale(2)
    for _ in range(100):
        cluster.drafters = [cluster._grown(d, 1000, 0.1) for d in cluster.drafters]
    await cluster.watch.look()  # nobody is there
    await cluster.beat(1, sessions=40, draft_s=0.1)
    await cluster.beat(1, sessions=40, draft_s=0.1)
    assert await cluster.value("rows") <= 40 * 0.1 / 0.8 / 8
    assert await cluster.value() == pytest.approx(40 * 0.1 / 0.8)


async def test_the_metric_spec_has_name_and_target(cluster: Cluster) -> None:
    spec = (await cluster.stub.GetMetricSpec(trigger("stall", target="0.1"), timeout=60)).metricSpecs[0]
    assert (spec.metricName, spec.targetSizeFloat, spec.targetSize) == ("rootward-cheap-stall", 0.1, 1)


async def test_a_stream_sends_the_state_at_once_then_changes_and_ends_without_an_error(cluster: Cluster) -> None:
    await cluster.beat(15, sessions=0)
    stream = cluster.stub.StreamIsActive(trigger())
    states = []
    async with asyncio.timeout(60):
        states.append((await stream.read()).result)
        await cluster.beat(15, sessions=3)
        states.append((await stream.read()).result)
        await cluster.beat(15, sessions=3)  # no change, nothing said
        await cluster.beat(15, sessions=0)
        states.append((await stream.read()).result)
        cluster.watch.end()
        assert await stream.read() is grpc.aio.EOF
    assert states == [False, True, False]
    assert await stream.code() is grpc.StatusCode.OK


async def code_of(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_unknown_is_never_zero(cluster: Cluster) -> None:
    """Before anything was seen, before a round was made, and once Redis has been away for too long."""
    ask = lambda: cluster.stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=trigger()), timeout=60)  # noqa: E731
    assert (await code_of(ask()))[0] is grpc.StatusCode.UNAVAILABLE
    await cluster.registry.publish(
        replace(cluster.verifier, counters={"cheap": {"speculating_sessions": 8, "round_seconds_count": 0}})
    )
    await cluster.watch.look()
    assert await cluster.active()
    assert (await code_of(ask()))[0] is grpc.StatusCode.UNAVAILABLE
    await cluster.beat(15, sessions=8)
    known = await cluster.value()
    await cluster.clock.advance(HOLD_S - 1)
    assert await cluster.value() == known
    await cluster.clock.advance(2)
    assert (await code_of(ask()))[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("metadata", "code", "word"),
    [
        ({"pool": "dear"}, grpc.StatusCode.NOT_FOUND, "dear"),
        ({"pool": ""}, grpc.StatusCode.INVALID_ARGUMENT, "pool"),
        ({"signal": "latency"}, grpc.StatusCode.INVALID_ARGUMENT, "signal"),
    ],
)
async def test_wrong_triggers_are_refused(cluster: Cluster, metadata, code, word) -> None:
    await cluster.beat(15, sessions=8)
    wrong = trigger(**metadata)
    found, details = await code_of(cluster.stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=wrong), timeout=60))
    assert found is code
    assert word in details


@pytest.mark.parametrize("target", ["", "none", "0", "-1", "nan", "inf"])
async def test_a_target_is_a_number_above_zero(cluster: Cluster, target: str) -> None:
    found, details = await code_of(cluster.stub.GetMetricSpec(trigger(target=target), timeout=60))
    assert found is grpc.StatusCode.INVALID_ARGUMENT
    assert "target" in details


def test_the_wire_is_kedas() -> None:
    """Names and numbers of fields, as KEDA's public contract has them."""
    services = pb.DESCRIPTOR.services_by_name
    assert pb.DESCRIPTOR.package == "externalscaler"
    methods = [m.name for m in services["ExternalScaler"].methods]
    assert methods == ["IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics"]
    fields = {name: {f.name: f.number for f in m.fields} for name, m in pb.DESCRIPTOR.message_types_by_name.items()}
    assert fields["ScaledObjectRef"] == {"name": 1, "namespace": 2, "scalerMetadata": 3}
    assert fields["IsActiveResponse"] == {"result": 1}
    assert fields["GetMetricSpecResponse"] == {"metricSpecs": 1}
    assert fields["MetricSpec"] == {"metricName": 1, "targetSize": 2, "targetSizeFloat": 3}
    assert fields["GetMetricsRequest"] == {"scaledObjectRef": 1, "metricName": 2}
    assert fields["GetMetricsResponse"] == {"metricValues": 1}
    assert fields["MetricValue"] == {"metricName": 1, "metricValue": 2, "metricValueFloat": 3}
