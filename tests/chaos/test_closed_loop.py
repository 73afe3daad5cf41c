"""The whole loop on one machine: sessions → services → KEDA's scaler in the gateway → the HPA's algorithm → drafter processes as pods.

Load rises threefold and falls back, from nothing and to nothing. Drafters start and get SIGTERM as pods do; every text must stay as it is.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import grpc
import pytest
from support.processes import Service, drafter, free_port, gateway, verifier
from support.redis import running_redis

from rootward import AsyncClient, SamplingParams, Speculation
from rootward.bench.hpa import Autoscaler, Policy, Rules, Spec, Target
from rootward.client_types import GenerationResult
from rootward.errors import BadRequestError
from rootward.rpc.clients import RemoteDrafter
from rootward.v1 import external_scaler_pb2 as pb
from rootward.v1.external_scaler_pb2_grpc import ExternalScalerStub

pytestmark = [pytest.mark.services, pytest.mark.long, pytest.mark.timeout(890)]

# Devices that take 120 ms to verify and 30 ms a level to draft. Both agree often.
TARGET = "tabular:vocab=64,seed=1,order=1,sharpness=4,step_ms=120"
DRAFT = "tabular:vocab=64,seed=1,order=1,sharpness=4,noise=0.3,noise_seed=2,step_ms=30"
MODEL = "table"
ROWS, UTILISATION, MOST = 2, 0.7, 6
PER_POD = ROWS * UTILISATION
SYNC_S = 3.0  # Kubernetes has 15: windows and periods of the chart are a fifth, too
DOWN = Rules(36, (Policy("Pods", 2, 12), Policy("Percent", 20, 12)), "Min")
UP = Rules(0, (Policy("Percent", 100, 3), Policy("Pods", 4, 3)))
DRAIN_S, MARGIN_S = 10, 20
LOW, HIGH = 4, 12
PATIENCE = 80  # syncs until a phase must have come to rest
REST = 14  # syncs without a change: longer than the window
COOLDOWN = 4  # syncs without demand until KEDA takes the last one away
WANTED = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


@dataclass
class Pods:
    """What a Deployment of drafters would do."""

    stack: ExitStack
    redis_url: str
    running: list[Service] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # exit codes
    starting: int = 0

    @property
    def asked(self) -> int:
        return len(self.running) + self.starting

    def scale(self, wanted: int, group: asyncio.TaskGroup) -> None:
        for _ in range(wanted - self.asked):
            self.starting += 1
            group.create_task(self._start())
        for _ in range(min(len(self.running), self.asked - wanted)):
            group.create_task(self._end(self.running.pop()))  # the youngest first, as a ReplicaSet does

    async def _start(self) -> None:
        flags = ("--redis-url", self.redis_url, "--pool", "cheap", "--shutdown-timeout-s", str(DRAIN_S))
        rows = ("--max-num-batched-tokens", str(ROWS), "--max-num-seqs", "8")
        self.running.append(await asyncio.to_thread(self.stack.enter_context, drafter(DRAFT, *flags, *rows)))
        self.starting -= 1

    async def _end(self, pod: Service) -> None:
        """SIGTERM. It must end by itself: hand its sessions over, or give up at the end of its drain."""
        assert pod.process is not None
        pod.process.terminate()
        self.ended.append(await asyncio.to_thread(pod.process.wait, 10 * (DRAIN_S + MARGIN_S)))

    async def sessions(self) -> list[int]:
        """Trees that each pod holds."""
        found = []
        for pod in self.running:
            async with RemoteDrafter(pod.address) as remote:
                found.append((await remote.get_info()).load.sessions)
        return found


@dataclass
class Load:
    """Sessions that ask again and again, each for its own text."""

    client: AsyncClient
    expected: list[tuple[int, ...]]
    wanted: int = 0
    finished: int = 0
    rounds: int = 0  # with trees

    async def session(self, number: int) -> None:
        while True:
            if number >= self.wanted:
                await asyncio.sleep(0.1)
                continue
            result = await self._generated(number)
            assert result.token_ids == self.expected[number]
            self.finished += 1
            self.rounds += result.speculation.num_spec_steps

    async def _generated(self, number: int) -> GenerationResult:
        """With trees, whether or not they pay on this machine, as soon as there is a drafter."""
        for mode in ("required", "auto"):
            try:
                return await self.client.generate(
                    prompt_of(number), sampling=WANTED, speculation=Speculation(mode=mode)
                )
            except BadRequestError as refused:
                if "no drafter" not in str(refused):
                    raise
        raise AssertionError("auto was refused for want of a drafter")


def prompt_of(number: int) -> list[int]:
    return [1 + number, 2, 3]


@dataclass
class Scaler:
    """KEDA: the pool wakes and goes to sleep by IsActive; between 1 and `MOST` an HPA is fed with what GetMetrics says."""

    stub: ExternalScalerStub
    hpa: Autoscaler
    sync: int = 0
    idle: int = 0
    trace: list[tuple[int, float]] = field(default_factory=list)  # (replicas, demand)

    def trigger(self) -> pb.ScaledObjectRef:
        return pb.ScaledObjectRef(
            name="d", scalerMetadata={"pool": "cheap", "signal": "demand", "target": str(PER_POD)}
        )

    async def decide(self, replicas: int, ready: int) -> int:
        self.sync += 1
        active = (await self.stub.IsActive(self.trigger(), timeout=20)).result
        demand = await self._demand()
        self.idle = 0 if active else self.idle + 1
        if replicas == 0:
            wanted = int(active)
        else:
            wanted = max(1, self.hpa.sync(SYNC_S * self.sync, replicas, ready, [demand]))
            wanted = 0 if self.idle >= COOLDOWN else wanted
        self.trace.append((wanted, -1.0 if demand is None else demand))
        return wanted

    async def _demand(self) -> float | None:
        try:
            answer = await self.stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=self.trigger()), timeout=20)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # unknown is not zero
                return None
            raise
        return float(answer.metricValues[0].metricValueFloat)

    @property
    def rests(self) -> bool:
        last = [replicas for replicas, _ in self.trace[-REST:]]
        return len(last) == REST and len(set(last)) == 1


@dataclass
class Loop:
    pods: Pods
    load: Load
    scaler: Scaler
    group: asyncio.TaskGroup

    async def phase(self, sessions: int) -> int:
        """Change the load, sync until nothing changes any more; how many drafters there are then. One swing up and one down at most."""
        self.load.wanted, begun = sessions, len(self.scaler.trace)
        for sync in range(PATIENCE):
            await asyncio.sleep(SYNC_S)
            self.pods.scale(await self.scaler.decide(self.pods.asked, len(self.pods.running)), self.group)
            if sync >= REST and self.scaler.rests and not self.pods.starting:
                break
        else:
            raise AssertionError(f"drafters do not come to rest: {self.scaler.trace}")
        trace = self.scaler.trace[max(0, begun - 1) :]
        print(f"{sessions} sessions: {' '.join(f'{replicas}({demand:.1f})' for replicas, demand in trace)}")
        assert turns([replicas for replicas, _ in trace]) <= 1
        return self.pods.asked


def turns(replicas: list[int]) -> int:
    """Changes of direction."""
    steps = [b - a for a, b in pairwise(replicas) if a != b]
    return sum(a * b < 0 for a, b in pairwise(steps))


@asynccontextmanager
async def looped() -> AsyncIterator[Loop]:
    scaler_port = free_port()
    with running_redis() as url, ExitStack() as stack:
        registry = ("--redis-url", url, "--served-model-name", MODEL)
        places = ("--max-num-seqs", str(HIGH), "--num-draft-tokens", "8")
        stack.enter_context(verifier(TARGET, ["cheap=redis:cheap"], *registry, *places))
        listen = ("--scaler-listen", f"127.0.0.1:{scaler_port}")
        front = stack.enter_context(gateway(TARGET, ["redis:"], *registry, *listen))
        pods = Pods(stack, url)
        async with (
            AsyncClient(front.address, timeout=300) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{scaler_port}") as channel,
        ):
            texts = [client.generate(prompt_of(number), sampling=WANTED) for number in range(HIGH)]
            load = Load(client, [result.token_ids for result in await asyncio.gather(*texts)])
            spec = Spec((Target("AverageValue", PER_POD),), least=1, most=MOST, up=UP, down=DOWN)
            scaler = Scaler(ExternalScalerStub(channel), Autoscaler(spec))
            async with asyncio.TaskGroup() as group, asyncio.TaskGroup() as sessions:
                running = [sessions.create_task(load.session(number)) for number in range(HIGH)]
                yield Loop(pods, load, scaler, group)
                for task in running:
                    task.cancel()


async def test_drafters_follow_a_threefold_step_and_back_to_nothing():
    async with looped() as loop:
        pods, load, scaler = loop.pods, loop.load, loop.scaler
        await loop.phase(0)
        assert {replicas for replicas, _ in scaler.trace} == {0}
        low = await loop.phase(LOW)
        assert low >= 1
        assert load.rounds > 0  # they are of use
        high = await loop.phase(HIGH)
        demand = scaler.trace[-1][1]
        assert high == min(MOST, max(1, math.ceil(demand / PER_POD))) or abs(demand / PER_POD / high - 1) <= 0.1
        assert high > low
        held = await pods.sessions()
        assert min(held) >= 1, held  # the new ones took over
        finished = load.finished
        back = await loop.phase(LOW)
        assert back < high
        assert load.finished > finished
        assert await loop.phase(0) == 0
    print(f"{load.finished} requests, {load.rounds} rounds with trees; {len(pods.ended)} drafters ended")
    assert set(pods.ended) == {0}
    assert len(pods.ended) >= high
