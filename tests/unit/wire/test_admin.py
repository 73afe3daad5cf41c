"""The admin port: what probes and Prometheus see over a process's life."""

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from rootward.clock import FakeClock
from rootward.errors import ConfigurationError
from rootward.watchdog import Watchdog
from rootward.wire.process import admin_port


async def answers(admin) -> dict[str, int]:
    async with httpx.AsyncClient(base_url=f"http://{admin.address}", timeout=10) as client:
        return {probe: (await client.get(f"/health/{probe}")).status_code for probe in ("startup", "ready", "live")}


async def test_a_process_is_alive_before_it_has_started_and_started_when_it_drains():
    state = {"ready": True, "live": True}
    async with admin_port("127.0.0.1:0") as admin:
        assert await answers(admin) == {"startup": 503, "ready": 503, "live": 200}
        admin.serving(ready=lambda: state["ready"], live=lambda: state["live"])
        assert await answers(admin) == {"startup": 200, "ready": 200, "live": 200}
        state["ready"] = False
        assert await answers(admin) == {"startup": 200, "ready": 503, "live": 200}
        state["live"] = False
        assert (await answers(admin))["live"] == 503


async def test_metrics_of_the_service_and_of_the_process():
    registry = CollectorRegistry()
    Counter("rootward_rounds", "Rounds.", registry=registry).inc(3)
    async with admin_port("127.0.0.1:0") as admin, httpx.AsyncClient(base_url=f"http://{admin.address}") as client:
        admin.serving(ready=lambda: True, metrics=registry)
        text = (await client.get("/metrics")).text
    assert "rootward_rounds_total 3.0" in text
    assert "process_resident_memory_bytes" in text


async def test_no_address_is_no_port():
    async with admin_port("") as admin:
        admin.serving(ready=lambda: True)
        assert admin.address == ""


async def test_a_taken_port_names_the_setting():
    async with admin_port("127.0.0.1:0") as admin:
        await answers(admin)  # a socket that is bound but does not listen yet hinders nobody
        with pytest.raises(ConfigurationError, match="admin_listen"):
            async with admin_port(admin.address):
                pass


async def test_a_step_that_never_ends_fails_the_watchdog():
    clock = FakeClock()
    watchdog = Watchdog(10.0, clock)
    assert watchdog.healthy
    with watchdog.step():
        await clock.advance(9.0)
        assert watchdog.healthy
        await clock.advance(2.0)
        assert not watchdog.healthy
    assert watchdog.healthy
