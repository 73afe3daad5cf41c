"""The whole loop on one machine: sessions → services → KEDA's scaler in the gateway → the HPA's algorithm → drafter processes as pods.

Load rises and falls back, from nothing and to nothing. Drafters start and get SIGTERM as pods do; every text must stay as it is. The HPA is
fed with the two signals that ask for drafters as the chart has them: rows (demand) and places (sessions).

Why the number of drafters comes to rest. With r drafters, each for t rows, an HPA goes up when demand is above 1.1 · r · t (0.1 is its
tolerance) and down when it was at most (r − 1) · t for the whole of its down window. To swing between a and b > a for ever it has to see
more than 1.1 · (b − 1) · t at a and at most a · t at b: demand that falls by more than the tolerance because there are more drafters. That
is what a signal must not do, and `test_more_drafters_do_not_lessen_demand` looks at. What is left is noise as wide as a band: loads here
lie so that neither a fifth less nor a third more leaves the band, and then a step of load turns the number round once at most: too far up,
while new sessions read their prompts and ask for whole trees, and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import grpc
import pytest
from support.processes import Service, drafter, free_port, gateway, verifier
from support.redis import running_redis

from benchmarks.hpa import Autoscaler, Policy, Rules, Spec, Target
from rootward import AsyncClient, SamplingParams, Speculation
from rootward.client.types import GenerationResult
from rootward.errors import BadRequestError
from rootward.v1 import external_scaler_pb2 as pb
from rootward.v1.external_scaler_pb2_grpc import ExternalScalerStub
from rootward.wire.clients import RemoteDrafter

pytestmark = pytest.mark.services

TABLE = "tabular:vocab=64,seed=1,order=1,sharpness=4"
MODEL = "table"
UTILISATION, PLACES_TAKEN, TOLERANCE = 0.7, 0.9, 0.1  # as in the chart; the last is the HPA's
DRAIN_S, MARGIN_S = 10, 20
UP = Rules(0, (Policy("Percent", 100, 3), Policy("Pods", 4, 3)))


@dataclass(frozen=True)
class Setting:
    """Devices (ms a step of the target, a level of the draft), tokens of a request, rows and places of a drafter, drafters and sessions at
    most, seconds between syncs, what holds on the way down, syncs without demand until KEDA takes the last one away."""

    verify_ms: float
    draft_ms: float
    tokens: int
    rows: int
    places: int
    most: int
    sessions: int
    sync_s: float
    down: Rules
    cooldown: int = 4

    @property
    def rows_each(self) -> float:
        return self.rows * UTILISATION

    @property
    def places_each(self) -> float:
        return self.places * PLACES_TAKEN

    @property
    def rest(self) -> int:
        """Syncs without a change after which none will come: longer than the down window."""
        return int(self.down.window_s / self.sync_s) + 2


# Kubernetes' 15 s a sync, the chart's windows and periods, all five times shorter. Two sessions want some 2.1 rows (0.75 of what one
# drafter is for), ten some 7 (2.5 of it: three drafters stay while it is within 5.6 and 9.2).
SLOW = Setting(
    120, 30, 100, rows=4, places=8, most=6, sessions=10, sync_s=3.0,
    down=Rules(36, (Policy("Pods", 2, 12), Policy("Percent", 20, 12)), "Min"),
)  # fmt: skip
# Rows are plenty, so that places decide, and those count sessions: no noise.
QUICK = Setting(
    20, 2, 60, rows=64, places=2, most=6, sessions=4, sync_s=0.25, down=Rules(2.5, (Policy("Percent", 100, 0.25),)), cooldown=12
)  # fmt: skip


@dataclass
class Pods:
    """What a Deployment of drafters would do."""

    setting: Setting
    stack: ExitStack
    redis_url: str
    running: list[Service] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # exit codes
    starting: int = 0
    num_started: int = 0

    @property
    def asked(self) -> int:
        return len(self.running) + self.starting

    def scale(self, wanted: int, group: asyncio.TaskGroup) -> None:
        for _ in range(wanted - self.asked):
            self.starting += 1
            self.num_started += 1
            group.create_task(self._start())
        for _ in range(min(len(self.running), self.asked - wanted)):
            group.create_task(self._end(self.running.pop()))  # the youngest first, as a ReplicaSet does

    async def _start(self) -> None:
        flags = ("--redis-url", self.redis_url, "--pool", "cheap", "--shutdown-timeout-s", str(DRAIN_S))
        sizes = ("--max-num-batched-tokens", str(self.setting.rows), "--max-num-seqs", str(self.setting.places))
        model = f"{TABLE},noise=0.3,noise_seed=2,step_ms={self.setting.draft_ms}"
        self.running.append(await asyncio.to_thread(self.stack.enter_context, drafter(model, *flags, *sizes)))
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
    sampling: SamplingParams
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
                    prompt_of(number), sampling=self.sampling, speculation=Speculation(mode=mode)
                )
            except BadRequestError as refused:
                if "no drafter" not in str(refused):
                    raise
        raise AssertionError("auto was refused for want of a drafter")


def prompt_of(number: int) -> list[int]:
    return [1 + number, 2, 3]


@dataclass(frozen=True)
class Sync:
    replicas: int
    demand: float | None
    sessions: float | None

    def __str__(self) -> str:
        return f"{self.replicas}({'?' if self.demand is None else f'{self.demand:.1f}'})"


@dataclass
class Scaler:
    """KEDA: the pool wakes and goes to sleep by IsActive; between 1 and `most` an HPA is fed with what GetMetrics says."""

    stub: ExternalScalerStub
    setting: Setting
    hpa: Autoscaler
    idle: int = 0
    trace: list[Sync] = field(default_factory=list)

    def trigger(self, signal: str = "demand") -> pb.ScaledObjectRef:
        target = self.setting.rows_each if signal == "demand" else self.setting.places_each
        return pb.ScaledObjectRef(name="d", scalerMetadata={"pool": "cheap", "signal": signal, "target": str(target)})

    async def decide(self, replicas: int, ready: int) -> int:
        active = (await self.stub.IsActive(self.trigger(), timeout=60)).result
        values = [await self.value("demand"), await self.value("sessions")]
        self.idle = 0 if active else self.idle + 1
        now_s = self.setting.sync_s * (len(self.trace) + 1)
        wanted = max(1, self.hpa.sync(now_s, replicas, ready, values)) if replicas else int(active)
        wanted = 0 if self.idle >= self.setting.cooldown else wanted
        self.trace.append(Sync(wanted, *values))
        return wanted

    async def value(self, signal: str) -> float | None:
        asked = pb.GetMetricsRequest(scaledObjectRef=self.trigger(signal))
        try:
            answer = await self.stub.GetMetrics(asked, timeout=60)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # unknown is not zero
                return None
            raise
        return float(answer.metricValues[0].metricValueFloat)

    async def forget(self) -> None:
        """Wait until no session that has ended is in the signals any more: heartbeats, and looks at them, are a second apart each."""
        quiet_s = 0.0
        while quiet_s < 3.0:
            await asyncio.sleep(0.25)
            quiet_s = quiet_s + 0.25 if await self.value("sessions") == 0.0 else 0.0

    def rests(self, begun: int) -> bool:
        last = [sync.replicas for sync in self.trace[begun:][-self.setting.rest :]]
        return len(last) == self.setting.rest and len(set(last)) == 1


@dataclass
class Loop:
    pods: Pods
    load: Load
    scaler: Scaler
    group: asyncio.TaskGroup

    async def phase(self, sessions: int, settled: Callable[[], bool] | None = None, patience: int = 100) -> list[Sync]:
        """Change the load, sync until nothing changes any more, or `settled`. What was decided, from the state before on."""
        scaler, begun = self.scaler, len(self.scaler.trace)
        self.load.wanted, settled = sessions, settled or (lambda: scaler.rests(begun))
        for sync in range(patience):
            await asyncio.sleep(scaler.setting.sync_s)
            self.pods.scale(await scaler.decide(self.pods.asked, len(self.pods.running)), self.group)
            if sync and settled() and not self.pods.starting:
                break
        trace = scaler.trace[max(0, begun - 1) :]
        print(f"{sessions} sessions: {' '.join(map(str, trace))}")
        assert sync < patience - 1, "drafters do not come to rest"
        return trace


def turns(trace: list[Sync]) -> int:
    """Changes of direction."""
    steps = [b.replicas - a.replicas for a, b in pairwise(trace) if a.replicas != b.replicas]
    return sum(a * b < 0 for a, b in pairwise(steps))


def fits(trace: list[Sync], setting: Setting) -> bool:
    """What it came to rest at is what both signals ask for: no fewer would do, by the largest values of the down window, and no more."""
    replicas, window = trace[-1].replicas, trace[-setting.rest :]
    demand = max(sync.demand or 0.0 for sync in window) / setting.rows_each
    places = max(sync.sessions or 0.0 for sync in window) / setting.places_each
    fewer, most = replicas - 1, replicas * (1 + TOLERANCE)
    return max(demand, places) <= most and (demand > fewer or places > fewer)


@asynccontextmanager
async def looped(setting: Setting) -> AsyncIterator[Loop]:
    scaler_port, places = free_port(), str(setting.sessions)
    target = f"{TABLE},step_ms={setting.verify_ms}"
    with running_redis() as url, ExitStack() as stack:
        registry = ("--redis-url", url, "--served-model-name", MODEL)
        sizes = ("--max-num-seqs", places, "--num-draft-tokens", "8")
        stack.enter_context(verifier(target, ["cheap=redis:cheap"], *registry, *sizes))
        listen = ("--scaler-listen", f"127.0.0.1:{scaler_port}")
        front = stack.enter_context(gateway(target, ["redis:"], *registry, *listen))
        async with (
            AsyncClient(front.address, timeout=300) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{scaler_port}") as channel,
        ):
            sampling = SamplingParams(temperature=0.0, max_tokens=setting.tokens, ignore_eos=True)
            texts = [client.generate(prompt_of(number), sampling=sampling) for number in range(setting.sessions)]
            load = Load(client, sampling, [result.token_ids for result in await asyncio.gather(*texts)])
            targets = Target("AverageValue", setting.rows_each), Target("AverageValue", setting.places_each)
            hpa = Autoscaler(Spec(targets, least=1, most=setting.most, up=UP, down=setting.down))
            scaler = Scaler(ExternalScalerStub(channel), setting, hpa)
            await scaler.forget()  # those of the texts above, or the first syncs count them
            async with asyncio.TaskGroup() as group, asyncio.TaskGroup() as sessions:
                running = [sessions.create_task(load.session(number)) for number in range(setting.sessions)]
                yield Loop(Pods(setting, stack, url), load, scaler, group)
                for task in running:
                    task.cancel()


@pytest.mark.timeout(600)
async def test_idle_active_scaled_idle():
    """By places, which count sessions: four of them, 1.8 a drafter."""
    async with looped(QUICK) as loop:
        pods, scaler = loop.pods, loop.scaler
        await loop.phase(1, lambda: len(pods.running) == 1, patience=800)
        await loop.phase(4, lambda: len(pods.running) == 3, patience=800)
        assert max(sync.replicas for sync in scaler.trace) == 3
        async with asyncio.timeout(120):
            while min(await pods.sessions()) < 1:  # the new ones take over
                await asyncio.sleep(0.1)
        await loop.phase(0, lambda: not pods.asked, patience=800)
    # On a slow machine one may go between two requests and come back.
    assert pods.num_started >= 3
    assert pods.ended == [0] * pods.num_started


@pytest.mark.long
@pytest.mark.timeout(890)
async def test_drafters_follow_a_fivefold_step_and_back_to_nothing():
    async with looped(SLOW) as loop:
        pods, load = loop.pods, loop.load
        assert {sync.replicas for sync in await loop.phase(0)} == {0}
        peaks = []
        for sessions in (2, 10, 2):
            finished = load.finished
            trace = await loop.phase(sessions)
            assert turns(trace) <= 1
            assert fits(trace, SLOW)
            assert load.finished > finished
            assert min(await pods.sessions()) >= sessions // 10  # new ones take over
            peaks.append(pods.asked)
        low, high, back = peaks
        assert 1 <= low < high > back >= 1
        assert load.rounds > 0
        assert (await loop.phase(0))[-1].replicas == 0
    print(f"{load.finished} requests, {load.rounds} rounds with trees; {len(pods.ended)} drafters ended")
    assert set(pods.ended) == {0}
    assert len(pods.ended) >= high


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_more_drafters_do_not_lessen_demand():
    """The same load at one drafter, at four, at one again: see the top of this file. One has too few places and too few rows for all."""

    async def demand(loop: Loop, replicas: int) -> float:
        loop.pods.scale(replicas, loop.group)
        seen: list[float] = []
        for sync in range(14):
            await asyncio.sleep(SLOW.sync_s)
            value = await loop.scaler.value("demand")
            if sync >= 6 and value is not None:  # what was before has left the window of the rates
                seen.append(value)
        return fmean(seen)

    async with looped(SLOW) as loop:
        loop.load.wanted = SLOW.sessions
        few, many, again = [await demand(loop, replicas) for replicas in (1, 4, 1)]
        print(f"demand at one drafter {few:.1f}, at four {many:.1f}, at one again {again:.1f}")
        loop.pods.scale(0, loop.group)
        loop.load.wanted = 0
    assert many >= fmean([few, again]) / (1 + TOLERANCE)
