"""`rootward doctor`: what it makes of facts, and that it collects them from real processes and sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from support.certificates import Authority
from unit.gateway.service_for_tests import grpc_serving, serving
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.models import Models
from gateway.servicer import register
from rootward.cli.main import main
from rootward.client.types import Load, ServerInfo, VerifierLoad, Worker
from rootward.doctor import Finding, Level, machine, system
from rootward.doctor.machine import GIB, Machine
from rootward.doctor.system import CertificateSeen, RedisSeen, Seen, System
from rootward.wire.server import RpcServer
from rootward.wire.tls import ServerTls

GOOD = Machine(
    cores=4,
    all_cores=4,
    load=0.5,
    memory=32 * GIB,
    flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    descriptors=65536,
    torch="2.13",
)
INFO = ServerInfo(
    "1.0",
    "gateway",
    "g",
    verifiers=(Worker("v", "v:1", "m", True, False),),
    drafters=(Worker("d", "d:1", "", True, False),),
)
LOAD = Load(1, 0, 8, False, verifiers=(VerifierLoad("v", True, 1, 0, 8, {"kv_cache_usage_ratio": 0.2}),))
SEEN = (
    Seen("verifier", "v:1", version="1.0", rtt_ms=0.5, skew_s=0.0),
    Seen("drafter", "d:1", version="1.0", rtt_ms=0.5, skew_s=0.1),
)
HEALTHY = System(
    Seen("gateway", "g:1", version="1.0", rtt_ms=1.0, skew_s=0.0),
    INFO,
    LOAD,
    SEEN,
    RedisSeen("", 0.4, "noeviction", 0.1),
)


def worst(findings: list[Finding]) -> dict[str, Level]:
    return {one.name: one.level for one in findings if one.level is not Level.OK}


def with_stats(**stats: float) -> System:
    load = dataclasses.replace(
        LOAD, verifiers=(VerifierLoad("v", True, 1, 0, 8, {k.replace("__", "/"): v for k, v in stats.items()}),)
    )
    return dataclasses.replace(HEALTHY, load=load)


def test_a_good_machine_has_nothing_to_change() -> None:
    found = machine.judge(GOOD)
    assert worst(found) == {}
    assert all(not one.advice for one in found)


@pytest.mark.parametrize(
    ("change", "name", "level"),
    [
        ({"cores": 1}, "cores", Level.WARNING),
        ({"load": 20.0}, "cores", Level.WARNING),
        ({"threads": {"OMP_NUM_THREADS": "64"}}, "threads", Level.WARNING),
        ({"threads": {"OMP_NUM_THREADS": "1"}}, "threads", Level.WARNING),
        ({"memory": 3 * GIB}, "memory", Level.WARNING),
        ({"memory": GIB}, "memory", Level.PROBLEM),
        ({"flags": frozenset({"avx2"})}, "processor", Level.WARNING),
        ({"flags": frozenset()}, "processor", Level.WARNING),
        ({"torch": ""}, "torch", Level.WARNING),
        ({"has_gpu": True}, "torch", Level.PROBLEM),
        ({"descriptors": 4096}, "file descriptors", Level.WARNING),
        ({"descriptors": 256}, "file descriptors", Level.PROBLEM),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_fault_of_a_machine_is_named_with_a_fix(change: dict, name: str, level: Level) -> None:
    found = machine.judge(dataclasses.replace(GOOD, **change))
    assert worst(found) == {name: level}
    assert next(one.advice for one in found if one.name == name)


def test_a_gpu_that_torch_sees_needs_no_fast_processor() -> None:
    assert worst(machine.judge(dataclasses.replace(GOOD, gpus=("H100",), has_gpu=True, flags=frozenset()))) == {}


def test_this_machine_can_be_looked_at() -> None:
    seen = machine.look()
    assert 1 <= seen.cores <= seen.all_cores
    assert seen.memory > 0
    assert seen.torch
    assert {one.name for one in machine.judge(seen)} >= {"cores", "memory", "torch"}


def test_a_healthy_system_has_nothing_to_change() -> None:
    assert worst(system.judge(HEALTHY)) == {}


@pytest.mark.parametrize(
    ("change", "name", "level"),
    [
        ({"load": dataclasses.replace(LOAD, draining=True)}, "gateway", Level.WARNING),
        ({"info": dataclasses.replace(INFO, verifiers=())}, "verifiers", Level.PROBLEM),
        (
            {"info": dataclasses.replace(INFO, verifiers=(*INFO.verifiers, Worker("w", "w:1", "m", False, False)))},
            "verifiers",
            Level.WARNING,
        ),
        ({"info": dataclasses.replace(INFO, drafters=())}, "drafters", Level.WARNING),
        ({"workers": (SEEN[0], dataclasses.replace(SEEN[1], version="0.9"))}, "versions", Level.WARNING),
        ({"workers": (SEEN[0], dataclasses.replace(SEEN[1], rtt_ms=40.0))}, "distance", Level.WARNING),
        ({"workers": (SEEN[0], dataclasses.replace(SEEN[1], skew_s=-5.0))}, "clocks", Level.WARNING),
        ({"workers": (SEEN[0], dataclasses.replace(SEEN[1], skew_s=300.0))}, "clocks", Level.PROBLEM),
        ({"workers": (SEEN[0], Seen("drafter", "d:1", "failed to connect"))}, "workers", Level.WARNING),
        ({"redis": RedisSeen("redis does not answer")}, "redis", Level.PROBLEM),
        ({"redis": RedisSeen("", 0.4, "allkeys-lru")}, "redis", Level.PROBLEM),
        ({"redis": RedisSeen("", 0.4, "noeviction", 0.95)}, "redis", Level.PROBLEM),
        ({"redis": RedisSeen("", 0.4, "")}, "redis", Level.WARNING),
        ({"redis": RedisSeen("", 80.0, "noeviction")}, "redis", Level.WARNING),
        ({"certificates": [CertificateSeen("g:1", 3.0)]}, "certificate g:1", Level.WARNING),
        ({"certificates": [CertificateSeen("g:1", error="certificate has expired")]}, "certificate g:1", Level.PROBLEM),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_fault_of_a_system_is_named_with_a_fix(change: dict, name: str, level: Level) -> None:
    found = system.judge(dataclasses.replace(HEALTHY, **change))
    assert worst(found) == {name: level}
    assert next(one.advice for one in found if one.name == name)


@pytest.mark.parametrize(
    ("stats", "name", "level"),
    [
        ({"kv_cache_usage_ratio": 0.93}, "KV memory", Level.WARNING),
        ({"kv_cache_usage_ratio": 0.99}, "KV memory", Level.PROBLEM),
        ({"drafters_left_alone": 1.0}, "drafters", Level.WARNING),
        ({"drafter_caught__d:1": 1.0}, "audit", Level.PROBLEM),
        ({"drafter_first_growth_ms__d:1": 400.0}, "distance", Level.WARNING),
        ({"spec_decode_speedup_estimate": 0.8}, "speculation", Level.WARNING),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_verifiers_report_is_judged(stats: dict, name: str, level: Level) -> None:
    assert worst(system.judge(with_stats(**stats))) == {name: level}


def test_a_gateway_that_does_not_answer_is_the_only_finding() -> None:
    found = system.judge(System(Seen("gateway", "g:1", "failed to connect")))
    assert worst(found) == {"gateway": Level.PROBLEM}
    assert len(found) == 1


async def test_doctor_reports_workers_of_a_running_gateway_that_it_cannot_reach() -> None:
    async with grpc_serving() as (_, address):
        seen = await system.look(address)
    assert seen.info is not None
    assert seen.gateway.rtt_ms > 0
    assert abs(seen.gateway.skew_s) < 5
    assert {one.role for one in seen.workers if one.error} == {
        "verifier",
        "drafter",
    }  # names of the test, not addresses


async def test_the_certificate_of_a_gateway_is_read_and_an_expired_one_is_a_problem(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for role, expired in (("gateway", False), ("old", True)):
        files = authority.issue(role, expired=expired)
        async with (
            serving(SpellingVerifier()) as service,
            RpcServer("127.0.0.1:0", tls=ServerTls(files, mutual=False), grace_s=0) as server,
        ):
            register(Models([service]), server, shutdown_timeout_s=1.0)
            await server.start()
            seen = await system.look(f"grpcs://{server.address}", authority=authority.file)
        levels = worst(system.judge(seen))
        name = f"certificate {server.address}"
        assert levels[name] is (Level.PROBLEM if expired else Level.WARNING)  # a day is left
        assert (levels.get("gateway") is Level.PROBLEM) == expired


async def test_a_redis_that_is_away_is_a_problem() -> None:
    seen = await system._redis_at("redis://127.0.0.1:1/0")
    assert seen.error


async def test_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    async with grpc_serving() as (_, address):
        code = await asyncio.to_thread(main, ["doctor", "--gateway", address, "--output", "json"])
    out = capsys.readouterr().out
    report = json.loads(out[out.index("{") :])
    assert (code == 0) == report["healthy"]
    assert {"cores", "gateway", "verifiers", "redis"} - {one["name"] for one in report["findings"]} == {"redis"}


def test_problems_and_wrong_options_have_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gateway", "127.0.0.1:1", "--output", "json"]) == 3
    assert main(["doctor", "--redis-url", "redis://h:1"]) == 2
    err = capsys.readouterr().err
    assert "gateway: 127.0.0.1:1: no gateway answers there; start it (rootward serve all), or correct --gateway" in err
