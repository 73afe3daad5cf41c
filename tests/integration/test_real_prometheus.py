"""A real Prometheus scrapes running services; the HPA's query returns there what formula and simulation give from the same counters."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.helm import CHART
from support.processes import drafter, free_port, gateway, verifier, wait_until

from benchmarks.autoscaling import Plan, Pool, Seen, Work
from rootward import AsyncClient, SamplingParams, Speculation
from rootward.demand import Reading, signals

pytestmark = [pytest.mark.services, pytest.mark.long, pytest.mark.timeout(600)]

MODEL = "tabular:vocab=40,seed=1"
WINDOW_S = 10
SESSIONS = 6
COUNTERS = {  # sample → name in `rootward.demand`
    "rootward_speculating_sessions": "speculating_sessions",
    "rootward_round_seconds_count": "round_seconds_count",
    "rootward_round_seconds_sum": "round_seconds_sum",
    "rootward_draft_stall_seconds_sum": "draft_stall_seconds_sum",
    "rootward_draft_prior_row_seconds": "draft_prior_row_seconds",
    "rootward_drafter_rows": "drafter_rows",
    "rootward_draft_row_seconds_total": "draft_row_seconds_wanted",
    "rootward_draft_compute_seconds_count": "draft_compute_seconds_count",
    "rootward_draft_compute_seconds_sum": "draft_compute_seconds_sum",
}


@contextmanager
def prometheus(folder: Path, targets: list[str]):
    """Scrapes and evaluates every second, with windows that fit."""
    rules = (CHART / "files" / "rules" / "drafter.yaml").read_text(encoding="utf-8")
    (folder / "rules.yaml").write_text(re.sub(r"\[[12]m\]", f"[{WINDOW_S}s]", rules), encoding="utf-8")
    static = f"[{{targets: {targets}, labels: {{namespace: test}}}}]"
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [rules.yaml]\n"
        f"scrape_configs: [{{job_name: rootward, static_configs: {static}}}]\n",
        encoding="utf-8",
    )
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address={address}", "--log.level=error"]
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=60) as client:
            wait_until(lambda: ready(client), what="Prometheus")
            yield client
    finally:
        process.terminate()
        process.wait(20)


def ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def query(client: httpx.Client, expression: str) -> float | None:
    result = client.get("/api/v1/query", params={"query": expression}).json()["data"]["result"]
    return float(result[0]["value"][1]) if result else None


def counters(address: str) -> dict[str, float]:
    text = httpx.get(f"http://{address}/metrics", timeout=60).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {
        COUNTERS[s.name]: s.value for s in samples if s.name in COUNTERS and s.labels.get("kind", "wanted") == "wanted"
    }


def asked(signal: str) -> str:
    """The query behind an external metric of the HPA, as prometheus-adapter makes it."""
    (rule,) = yaml.safe_load((CHART / "files" / "rules" / "adapter.yaml").read_text(encoding="utf-8"))["externalRules"]
    series = rule["metricsQuery"].replace("<<.Series>>", f"rootward:{signal}")
    return series.replace("<<.LabelMatchers>>", 'namespace="test",pool="default"')


def simulated(verifier: Reading, drafter: Reading, sessions: int) -> float | None:
    """Demand in the simulation with times of rounds as the services had them."""
    rounds, growths = verifier.increase("round_seconds_count"), drafter.increase("draft_compute_seconds_count")
    draft_s = drafter.increase("draft_compute_seconds_sum") / growths
    stall_s = verifier.increase("draft_stall_seconds_sum") / rounds
    work = Work(
        draft_s=draft_s,
        draft_fixed=1.0,
        verify_s=verifier.increase("round_seconds_sum") / rounds - stall_s - draft_s,
        verify_fixed=1.0,
        rows=int(drafter.now("drafter_rows")),
        width=drafter.increase("draft_row_seconds_wanted") / growths / draft_s,
    )
    pool = Pool(work, Plan(lambda now_s: sessions, end_s=90.0, pods=1), None, None, 1)
    pool.run()
    return Seen(pool.scrapes[0], pool.scrapes[-1], work).demand


async def keep_busy(client: AsyncClient, stop: asyncio.Event) -> None:
    wanted = SamplingParams(max_tokens=400, ignore_eos=True)
    while not stop.is_set():
        await client.generate([1, 2, 3], sampling=wanted, speculation=Speculation(mode="required"))


async def test_the_recording_rules_equal_the_formula_on_real_services(tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("NO PROMETHEUS: install Debian's package prometheus")
    admin = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with (
        drafter(MODEL, "--admin-listen", admin[0]) as draft,
        verifier(MODEL, [draft.address], "--admin-listen", admin[1]) as target,
        gateway(MODEL, [target.address]) as front,
        prometheus(tmp_path, admin) as prom,
    ):
        assert query(prom, "rootward:drafter_demand") is None  # no round yet: unknown is absent
        stop = asyncio.Event()
        async with AsyncClient(front.address, timeout=120) as client, asyncio.TaskGroup() as group:
            for _ in range(SESSIONS):
                group.create_task(keep_busy(client, stop))
            await asyncio.sleep(WINDOW_S)  # the window has to pass before rates are those of the load
            old = [await asyncio.to_thread(counters, address) for address in admin]
            began = time.monotonic()
            await asyncio.sleep(WINDOW_S)
            new = [await asyncio.to_thread(counters, address) for address in admin]
            seconds = time.monotonic() - began
            await asyncio.sleep(2)  # one scrape and one evaluation
            seen = {
                name: await asyncio.to_thread(query, prom, asked(name))
                for name in ("drafter_demand", "drafter_rows_busy", "drafter_stall", "speculating_sessions")
            }
            stop.set()
        expected = signals([Reading(old[1], new[1])], [Reading(old[0], new[0])], seconds)
        assert expected.demand is not None
        assert expected.demand > 0
        assert seen["speculating_sessions"] == pytest.approx(SESSIONS, abs=2)
        assert seen["drafter_demand"] == pytest.approx(expected.demand, rel=0.4)
        foretold = simulated(Reading(old[1], new[1]), Reading(old[0], new[0]), SESSIONS)
        assert seen["drafter_demand"] == pytest.approx(foretold, rel=0.4)
        assert seen["drafter_rows_busy"] == pytest.approx(expected.rows, rel=0.4, abs=0.02)
        assert seen["drafter_stall"] == pytest.approx(expected.stall, abs=0.08)
        await asyncio.sleep(WINDOW_S / 2)
        assert await asyncio.to_thread(query, prom, "rootward:drafter_demand") == 0  # idle
