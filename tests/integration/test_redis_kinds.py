"""Session store and registry on Redis Cluster, behind Sentinel with failover, with an ACL user and over TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import redis
from support.certificates import Authority
from support.processes import free_port, wait_until
from support.redis import RedisProcess

from gateway.redis_store import RedisStore, open_store
from gateway.session_store import Rate, Run, StoreUnavailable, Write
from rootward.discovery.registry import Worker, open_registry
from rootward.ports import Lease

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

ABOUT = {"digest": "d", "seed": "5"}
USER = "user rootward on >word ~rw:* &* +@all -@dangerous"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RedisStore]:
    store = open_store(url, timeout_s=5.0)
    try:
        yield store
    finally:
        await store.close()


def run(*tokens: int) -> Run:
    return Run(tokens, (True,) * len(tokens))


async def check_store(store: RedisStore, name: str) -> Lease:
    """Leases, batched writes, fencing by epochs, routing hints and rate limits of a store. Returns a lease that is still valid."""
    leases = [await store.begin(f"{name}-{i}", "a", 30, ABOUT) for i in range(8)]
    assert await store.write([Write(lease, 0, run(1, 2)) for lease in leases], 30) == [2] * 8
    taken_over, record = await store.take_over(f"{name}-0", "b", 30, "d")
    assert (taken_over.epoch, record.output) == (2, run(1, 2))
    last = Write(taken_over, 2, run(3), {"finish": "x"}, "finished")
    assert await store.write([last, Write(leases[0])], 30) == [3, -1]
    assert (await store.take_over(f"{name}-0", "c", 30, "d"))[0] is None
    assert (await store.next_epoch(leases[1], 30)).epoch == 2
    await store.put_hints(name, {"v": [f"k{i}" for i in range(5)], "w": ["k0"]}, 30)
    assert [set(h) for h in await store.hints(name, ["k0", "k4", "k9"])] == [{"v", "w"}, {"v"}, set()]
    assert await store.take_tokens(name, 5, Rate(0.001, 8.0)) == 0
    assert await store.take_tokens(name, 5, Rate(0.001, 8.0)) > 0
    return leases[2]


async def check_registry(url: str) -> None:
    async with open_registry(url) as registry:
        await registry.publish(Worker("verifier", "v-1", "large", "h:1"))
        assert [w.address for w in await registry.workers("verifier", "large")] == ["h:1"]


def free_cluster_port() -> int:
    """A free port; nodes of a cluster also listen on port + 10000, which is free too."""
    return next(port for port in iter(free_port, None) if port + 10_000 < 65_536 and _is_free(port + 10_000))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@contextmanager
def cluster(size: int = 3) -> Iterator[list[RedisProcess]]:
    """The nodes of a Redis Cluster without replicas."""
    with ExitStack() as running:
        flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        nodes = [running.enter_context(RedisProcess(free_cluster_port(), *flags)) for _ in range(size)]
        clients = [running.enter_context(redis.Redis(port=node.port, decode_responses=True)) for node in nodes]
        for number, client in enumerate(clients):
            slots = range(16384 * number // size, 16384 * (number + 1) // size)
            client.execute_command("CLUSTER ADDSLOTS", *slots)
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", nodes[number].port)
        for client in clients:
            wait_until(lambda c=client: c.execute_command("CLUSTER INFO")["cluster_state"] == "ok", what="cluster")
            wait_until(lambda c=client: len(c.execute_command("CLUSTER NODES")) == size, what="nodes")
        yield nodes


async def test_store_on_a_cluster_reports_the_loss_of_a_node() -> None:
    with cluster() as nodes:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        async with connected(url) as store:
            await check_store(store, "one")
            nodes[1].kill()
            begun = (store.begin(f"two-{i}", "a", 30, ABOUT) for i in range(9))  # some keys belong to the lost node
            errors = [e for e in await asyncio.gather(*begun, return_exceptions=True) if isinstance(e, Exception)]
            assert errors
            assert all(isinstance(error, StoreUnavailable) for error in errors)
        with pytest.raises(StoreUnavailable):
            await open_store("redis+cluster://127.0.0.1:1", timeout_s=1.0).ping()


async def test_registry_on_a_cluster() -> None:
    with cluster() as nodes:
        await check_registry(f"redis+cluster://127.0.0.1:{nodes[0].port}")


@contextmanager
def sentinel_setup(folder: Path) -> Iterator[tuple[RedisProcess, RedisProcess, list[int]]]:
    """(master, replica, ports of three Sentinels)."""
    with ExitStack() as running:
        master = running.enter_context(RedisProcess())
        replica = running.enter_context(RedisProcess(0, "--replicaof", "127.0.0.1", str(master.port)))
        ports = []
        for number in range(3):
            port = free_port()
            file = folder / f"sentinel-{number}.conf"
            lines = [f"sentinel monitor main 127.0.0.1 {master.port} 2", "sentinel down-after-milliseconds main 500"]
            file.write_text("\n".join([*lines, "sentinel failover-timeout main 2000", ""]))
            running.enter_context(RedisProcess(port, config=file))
            ports.append(port)
        with redis.Redis(port=ports[0], decode_responses=True) as sentinel:
            ask = sentinel.execute_command
            wait_until(lambda: len(ask("SENTINEL", "sentinels", "main")) == 2, what="the Sentinels")
            wait_until(lambda: len(ask("SENTINEL", "replicas", "main")) == 1, what="the replica")
        with redis.Redis(port=replica.port) as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", what="replication")
        yield master, replica, ports


async def test_a_lease_survives_a_sentinel_failover(tmp_path: Path) -> None:
    with sentinel_setup(tmp_path) as (master, replica, ports):
        url = "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in ports) + "/main"
        async with connected(url) as store:
            lease = await check_store(store, "one")
            await check_registry(url)
            with redis.Redis(port=replica.port) as client:
                wait_until(lambda: client.llen(f"rw:req:{{{lease.request_id}}}:log") == 1, what="the replica's copy")
            master.kill()
            with pytest.raises(StoreUnavailable):
                await store.write([Write(lease, 2, run(3))], 30)
            async with asyncio.timeout(120):
                while True:
                    try:
                        assert await store.write([Write(lease, 2, run(3))], 30) == [3]
                        break
                    except StoreUnavailable:
                        await asyncio.sleep(0.1)
            await check_store(store, "two")


async def test_an_acl_user_limited_to_the_key_prefix_suffices() -> None:
    with RedisProcess() as server:
        with redis.Redis(port=server.port) as client:
            client.execute_command("ACL", "SETUSER", *USER.split()[1:])
            client.execute_command("ACL", "SETUSER", "default", "off")
        url = f"redis://rootward:word@127.0.0.1:{server.port}/0"
        async with connected(url) as store:
            await check_store(store, "one")
        await check_registry(url)
        with pytest.raises(StoreUnavailable) as caught:
            await open_store(url.replace("word@", "wrong@"), timeout_s=1.0).ping()
        assert "wrong" not in str(caught.value)


async def test_a_name_that_leads_to_another_master_is_followed() -> None:
    """The old one keeps its connections open and refuses writes, as a replica of the new one: workers went on asking it, and were gone for
    all others. (Redis 6 does not tell a script's refusal from its other errors.)"""
    worker = Worker("verifier", "v-1", "large", "h:1")
    with RedisProcess() as old, RedisProcess() as new, redis.Redis(port=old.port) as client:
        master = old
        async with proxy(lambda: master.port) as port, open_registry(f"redis://127.0.0.1:{port}/0") as registry:
            await registry.publish(worker)
            master = new
            client.execute_command("REPLICAOF", "127.0.0.1", new.port)
            await registry.publish(worker)
            assert await registry.workers("verifier", "large") == (worker,)


@pytest.mark.parametrize("call", ["write", "begin"])
async def test_a_session_store_follows_a_name_to_another_master(call: str) -> None:
    """Its scripts were refused by the old one for ever, since it answers pings and the connections stay open."""
    with RedisProcess() as old, RedisProcess() as new, redis.Redis(port=old.port) as client:
        master = old
        async with proxy(lambda: master.port) as port, connected(f"redis://127.0.0.1:{port}/0") as store:
            lease = await store.begin("one", "a", 30, ABOUT)
            assert await store.write([Write(lease, 0, run(1))], 30) == [1]
            master = new
            client.execute_command("REPLICAOF", "127.0.0.1", new.port)

            async def ask() -> object:
                if call == "begin":
                    return (await store.begin("two", "a", 30, ABOUT)).epoch
                return (await store.write([Write(lease, 0, run(1))], 30))[0]

            with suppress(StoreUnavailable):
                await ask()
            assert await ask() == 1


@asynccontextmanager
async def proxy(port: Callable[[], int], context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a proxy that leads each new connection to `port()`, with TLS (the Redis server of the tests is built without it) if there
    is a context."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port())
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_mutual_tls(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    server_side = authority.issue("redis")
    client_side = authority.issue("gateway")
    foreign = stranger.issue("foreign")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.file))
    context.load_cert_chain(server_side.certificate, server_side.key)
    context.verify_mode = ssl.CERT_REQUIRED
    with RedisProcess() as server:
        async with proxy(lambda: server.port, context) as port:

            def url(certificates: object = client_side, ca: Path = authority.file) -> str:
                own = f"ssl_certfile={certificates.certificate}&ssl_keyfile={certificates.key}"
                return f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ca}&{own}"

            async with connected(url()) as store:
                await check_store(store, "one")
            await check_registry(url())
            for wrong in (url(ca=stranger.file), url(foreign), f"redis://127.0.0.1:{port}/0"):
                with pytest.raises(StoreUnavailable):
                    await open_store(wrong, timeout_s=2.0).ping()
