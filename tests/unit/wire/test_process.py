"""A service as a process: its loop, its exit codes, its probes and metrics."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterator

import httpx
import pytest
import uvloop
from prometheus_client import CollectorRegistry, Counter

from rootward.errors import ConfigurationError
from rootward.wire.process import admin_port, announce, run_service


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A service that has ended ignores SIGTERM; this process should not."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_service_runs_on_uvloop() -> None:
    loops = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())

    assert run_service("test", main) == 0
    assert isinstance(loops[0], uvloop.Loop)


def test_a_configuration_error_is_one_line_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        raise ConfigurationError("listen: 'x' is wrong; say y")

    assert run_service("test", main) == ConfigurationError("").exit_code
    assert capsys.readouterr().err == "rootward test: listen: 'x' is wrong; say y\n"


def test_garbage_collections_skip_objects_loaded_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    before = gc.get_freeze_count()
    try:
        announce("test", "127.0.0.1:1")
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
    assert capsys.readouterr().out == "rootward test listening on 127.0.0.1:1\n"


async def answers(admin) -> dict[str, int]:
    async with httpx.AsyncClient(base_url=f"http://{admin.address}", timeout=60) as client:
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


async def test_without_an_address_no_port_is_opened():
    async with admin_port("") as admin:
        admin.serving(ready=lambda: True)
        assert admin.address == ""


async def test_a_taken_port_names_the_setting():
    async with admin_port("127.0.0.1:0") as admin:
        await answers(admin)  # a socket that is bound but does not listen yet does not conflict
        with pytest.raises(ConfigurationError, match="admin_listen"):
            async with admin_port(admin.address):
                pass
