"""The users that the chart gives Redis: each role can do its work and nothing on the keys of others. On a real Redis."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest
import redis
from prometheus_client import CollectorRegistry
from support.cheats import drawn_by
from support.helm import ROOT, named, of_kind
from support.processes import free_port, wait_until
from support.records import record_of
from support.services import until

from gateway.local import redis_command
from gateway.redis_store import open_store
from rootward.discovery.registry import RegistryUnavailable, Worker, open_registry
from rootward.redis_client import open_redis
from verifier_service.audit import DrafterAudit


@pytest.fixture(scope="module")
def secret(helm):
    return named(helm.rendered(""), "Secret", "rw-rootward-redis")["stringData"]


@contextmanager
def redis_with(users: str, folder):
    port, path = free_port(), folder / "users.acl"
    path.write_text(users, encoding="utf-8")
    command = [*redis_command(port, str(folder)), "--aclfile", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def listens() -> bool:
        try:
            redis.Redis(port=port, socket_connect_timeout=1).ping()
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False
        raise AssertionError("it answers without a password")

    try:
        wait_until(listens, what="Redis")
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def urls(secret, tmp_path_factory):
    with redis_with(secret["users.acl"], tmp_path_factory.mktemp("redis")) as port:
        yield {role: f"redis://{role}:{secret[role]}@127.0.0.1:{port}/0" for role in ("gateway", "verifier", "drafter")}


def worker(role: str) -> Worker:
    return Worker(role, f"{role}-1", "cheap", "10.0.0.1:1", counters={"cheap": {"speculating_sessions": 1}})


async def test_every_role_can_do_its_work(urls):
    for role in ("drafter", "verifier"):
        async with open_registry(urls[role], heartbeat_s=60) as registry:
            await registry.publish(worker(role))
    async with open_registry(urls["verifier"]) as registry:
        assert await registry.workers("drafter", "cheap") == (worker("drafter"),)
    async with open_registry(urls["gateway"]) as registry:
        assert await registry.workers("verifier", "cheap") == (worker("verifier"),)
    audits = []
    for _ in range(2):  # the second verifier hears what the first one knows
        redis_client = open_redis(urls["verifier"], timeout_s=5.0)
        audits.append(DrafterAudit(CollectorRegistry(), f"verifier-{len(audits)}", redis=redis_client))
        audits[-1].observe("d", drawn_by("argmax", np.random.default_rng(0), 0 if len(audits) > 1 else 512))
        running = asyncio.create_task(audits[-1].run())
        await until(lambda: audits[-1]._drafters["d"].saved >= 0)  # told, and heard what others told
        running.cancel()
        await redis_client.aclose()
    assert not audits[1].trusts("d", "default")
    store = open_store(urls["gateway"])
    try:
        lease = await store.begin("r1", "gateway-1", 5.0, {"digest": "d"})
        assert (await record_of(store, "r1")).fields["digest"] == "d"
        assert (await store.next_epoch(lease, 5.0)).epoch > lease.epoch
        await store.put_hints("llama", {"v@1": ["0a"]}, 5.0)
    finally:
        await store.close()


async def test_a_drafter_reaches_nothing_but_its_own_entry(urls):
    async with open_registry(urls["drafter"]) as registry:
        with pytest.raises(RegistryUnavailable):
            await registry.publish(worker("verifier"))
    with redis.Redis.from_url(urls["drafter"]) as client:
        for command in (
            ("GET", "rw:req:{r1}:lease"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "*"),
            ("KEYS", "*"),
            ("ACL", "LIST"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


def test_the_page_names_the_same_users(secret):
    page = (ROOT / "docs" / "operations" / "redis.md").read_text(encoding="utf-8")
    ours = secret["users.acl"]
    for role in ("gateway", "verifier", "drafter"):
        ours = ours.replace(secret[role], "PASSWORD")
    assert set(ours.splitlines()) - {"user default off"} <= set(page.splitlines())


def test_passwords_are_drawn_and_differ(helm, secret):
    words = [secret[role] for role in ("gateway", "verifier", "drafter")]
    assert len(set(words)) == 3
    assert all(len(word) >= 32 for word in words)
    assert of_kind(helm.objects("defaults"), "Secret") == []  # a Secret of one's own: none is made
