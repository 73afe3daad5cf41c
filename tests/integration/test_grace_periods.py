"""SIGTERM under load: every service ends within what the chart gives it beyond its drain timeout, and no request is harmed."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest
import yaml
from support.helm import CHART
from support.processes import Service, drafter, free_port, gateway, verifier

from rootward import AsyncClient, SamplingParams

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

MODEL = "tabular:vocab=40,seed=1"
DRAFT = "tabular:vocab=40,seed=1"
LONG = SamplingParams(max_tokens=500, ignore_eos=True, seed=7)
IN_TIME = [False, pytest.param(True, marks=pytest.mark.long)]
DRAIN_S = "1"  # the chart's are longer; what comes after them is the same


def margin(*path: str) -> float:
    """Seconds that the chart adds to a drain timeout."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for key in path:
        values = values[key]
    return float(values["drain"]["marginSeconds"])


async def ends_well(service: Service, margin_s: float, *, in_time: bool) -> None:
    """By itself; within the drain timeout and the chart's margin, where the machine is quiet enough to ask for times."""
    assert service.process is not None
    service.process.send_signal(signal.SIGTERM)
    patience_s = float(DRAIN_S) + margin_s if in_time else 100.0
    assert await asyncio.to_thread(service.process.wait, patience_s) == 0


@pytest.mark.parametrize("in_time", IN_TIME)
async def test_a_verifier_and_a_drafter_that_stop_under_load_fail_no_request(in_time):
    """Two of each; one of each is told to stop in the middle of the same requests."""
    stop = ("--shutdown-timeout-s", DRAIN_S)
    with drafter(DRAFT, *stop) as d1, drafter(DRAFT, *stop) as d2:
        both = [d1.address, d2.address]
        with (
            verifier(MODEL, both, *stop) as v1,
            verifier(MODEL, both, *stop) as v2,
            gateway(MODEL, [v1.address, v2.address]) as front,
        ):
            async with AsyncClient(front.address, timeout=120) as client:
                undisturbed = await client.generate([1, 2, 3], sampling=LONG)
                running = [asyncio.create_task(client.generate([1, 2, 3], sampling=LONG)) for _ in range(4)]
                await wait_for_load(client, len(running))
                await ends_well(d1, margin("drafter", "defaults"), in_time=in_time)
                await ends_well(v1, margin("verifier"), in_time=in_time)
                results = await asyncio.gather(*running)
    assert {result.token_ids for result in results} == {undisturbed.token_ids}


async def wait_for_load(client: AsyncClient, count: int) -> None:
    async with asyncio.timeout(60):
        while (await client.load()).num_running < count:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("in_time", IN_TIME)
async def test_a_gateway_that_is_stopped_ends_within_its_margin(in_time):
    with verifier(MODEL, []) as target, gateway(MODEL, [target.address], "--shutdown-timeout-s", DRAIN_S) as front:
        async with AsyncClient(front.address, timeout=120, max_retries=0) as client:
            task = asyncio.create_task(
                client.generate([1, 2], sampling=SamplingParams(max_tokens=4000, ignore_eos=True))
            )
            await wait_for_load(client, 1)
            await ends_well(front, margin("gateway"), in_time=in_time)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_probes_and_metrics_of_a_worker(role):
    extra = ("--admin-listen", f"127.0.0.1:{(port := free_port())}")
    service = drafter(DRAFT, *extra) if role == "drafter" else verifier(MODEL, [], *extra)
    with service, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as probe:
        for path in ("startup", "ready", "live"):
            assert probe.get(f"/health/{path}").status_code == 200
        metrics = probe.get("/metrics").text
        assert "process_resident_memory_bytes" in metrics
        assert f"rootward_{'drafter_rows' if role == 'drafter' else 'kv_cache_usage_ratio'}" in metrics
