"""EndpointSlices over HTTP, by the real client: ready, terminating and gone pods, and a server that does not answer."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, asynccontextmanager
from copy import deepcopy
from pathlib import Path

import pytest
from kubernetes.aio import client
from support.cluster import STREAMS, Remote, cluster
from support.kubernetes_api import ApiServer, api_server
from support.services import until

from rootward.discovery import kubernetes as module
from rootward.discovery.kubernetes import endpoint_slice_discovery, open_endpoint_slices, peers_in
from rootward.discovery.polling import PolledDiscovery, by_address
from rootward.errors import ConfigurationError
from rootward.ports import Peer

RECORDED = json.loads((Path(__file__).parents[1] / "support" / "endpointslice.json").read_text())
NAME = RECORDED["metadata"]["name"]
FIRST = Peer("10.244.1.17:50061", "eu-west-1a")
SECOND = Peer("10.244.2.9:50061", "eu-west-1b")


def recorded(*conditions: dict[str, bool], name: str = NAME, service: str = "drafter-fast") -> dict:
    """The slice with these conditions of its first endpoints; the others are not there."""
    item = deepcopy(RECORDED)
    item["metadata"] |= {"name": name, "labels": item["metadata"]["labels"] | {module.SERVICE_LABEL: service}}
    item["endpoints"] = item["endpoints"][: len(conditions)]
    for endpoint, these in zip(item["endpoints"], conditions, strict=True):
        endpoint["conditions"] = these
    return item


READY = {"ready": True, "serving": True, "terminating": False}
UNREADY = {"ready": False, "serving": False, "terminating": False}
LEAVING = {"ready": False, "serving": True, "terminating": True}


def found_in(slices: list[dict], port: str) -> tuple[Peer, ...]:
    return by_address(peers_in(slices, port))


class Watched:
    """What discovery has said so far."""

    def __init__(self) -> None:
        self.seen: list[tuple[Peer, ...]] = []

    async def follow(self, discovery: PolledDiscovery) -> None:
        async with aclosing(discovery.watch()) as changes:
            async for peers in changes:
                self.seen.append(peers)

    async def last(self, *peers: Peer) -> None:
        await until(lambda: self.seen and self.seen[-1] == peers)


@asynccontextmanager
async def watching(server: ApiServer):
    watched = Watched()
    async with client.ApiClient(client.Configuration(host=server.url)) as api:
        discovery = endpoint_slice_discovery(
            client.DiscoveryV1Api(api), "rootward", "drafter-fast", "grpc", every_s=0.01
        )
        task = asyncio.create_task(watched.follow(discovery))
        try:
            yield watched
        finally:
            assert not task.done(), task.exception()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_pods_that_come_leave_and_go_are_followed() -> None:
    async with api_server() as server:
        await server.apply(RECORDED)
        await server.apply(recorded(READY, READY, name="another", service="somebody-else"))
        async with watching(server) as watched:
            await watched.last(FIRST)  # the other pod is not ready
            await server.apply(recorded(READY, READY))
            await watched.last(FIRST, SECOND)
            await server.apply(recorded(LEAVING, READY))
            await watched.last(Peer(FIRST.address, FIRST.zone, leaving=True), SECOND)
            await server.apply(recorded(UNREADY, READY))
            await watched.last(SECOND)
            await server.delete(NAME)
            await watched.last()
        assert all(query["resourceVersion"] == "0" for query in server.asked)  # from the cache of the API server


async def test_the_last_answer_holds_while_the_server_is_away_or_refuses() -> None:
    async with api_server() as server:
        await server.apply(recorded(READY))
        async with watching(server) as watched:
            await watched.last(FIRST)
            for server.status in (403, 410, 500):
                asked = len(server.asked)
                await until(lambda asked=asked: len(server.asked) > asked + 2)
            assert watched.seen == [(FIRST,)]
            server.status = 200
            await server.apply(recorded(READY, READY))
            await watched.last(FIRST, SECOND)


async def test_a_slice_of_a_thousand_pods_is_read() -> None:
    many = recorded(READY)
    many["endpoints"] *= 1000
    for number, endpoint in enumerate(many["endpoints"]):
        many["endpoints"][number] = endpoint | {"addresses": [f"10.245.{number // 250}.{number % 250}"]}
    async with api_server() as server:
        await server.apply(many)
        async with watching(server) as watched:
            await until(lambda: watched.seen and len(watched.seen[-1]) == 1000)


def test_absent_conditions_mean_ready_and_ports_go_by_name_or_number() -> None:
    slices = [recorded({})]
    assert found_in(slices, "grpc") == (FIRST,)
    assert found_in(slices, "admin") == (Peer("10.244.1.17:9090", "eu-west-1a"),)
    assert found_in(slices, "1234") == (Peer("10.244.1.17:1234", "eu-west-1a"),)
    assert found_in(slices, "http") == ()
    only = recorded({})
    only["ports"] = [{"name": "", "port": 5}]
    assert found_in([only], "grpc") == (Peer("10.244.1.17:5", "eu-west-1a"),)


def test_an_endpoint_in_two_slices_counts_once_and_ready_wins() -> None:
    assert found_in([recorded(LEAVING), recorded(READY, name="new")], "grpc") == (FIRST,)
    assert found_in([recorded(READY), recorded(LEAVING, name="new")], "grpc") == (FIRST,)


def test_addresses_of_version_6_are_bracketed_and_names_are_not_dialled() -> None:
    six, name = recorded(READY), recorded(READY, name="fqdn")
    six["addressType"], six["endpoints"][0]["addresses"] = "IPv6", ["fd00::1", "fd00::2"]
    name["addressType"], name["endpoints"][0]["addresses"] = "FQDN", ["a.example"]
    assert found_in([six, name], "grpc") == (Peer("[fd00::1]:50061", "eu-west-1a"),)


async def test_outside_a_cluster_and_without_a_kubeconfig_is_a_configuration_error(monkeypatch, tmp_path) -> None:
    async def none(**_: object) -> None:
        raise module.ConfigException("Invalid kube-config file")

    monkeypatch.setattr(module.config, "load_kube_config", none)
    with pytest.raises(ConfigurationError, match="service account"):
        async with open_endpoint_slices("drafters.ns"):
            pass


@pytest.mark.services
async def test_sessions_follow_the_pods_of_a_service() -> None:
    """A verifier that knows nothing but the service: a pod that becomes ready drafts, one that terminates is left at once."""

    def pod(remote: Remote, conditions: dict[str, bool]) -> dict:
        host, _, port = remote.server.address.rpartition(":")
        item = recorded(conditions, name=f"slice-{port}")
        item["endpoints"][0]["addresses"], item["ports"] = [host], [{"name": "grpc", "port": int(port)}]
        return item

    async with api_server() as server, client.ApiClient(client.Configuration(host=server.url)) as api:
        found = endpoint_slice_discovery(client.DiscoveryV1Api(api), "rootward", "drafter-fast", "grpc", every_s=0.01)
        async with cluster(1, found=found) as c:
            first, second = await c.add_drafter(announce=False), await c.add_drafter(announce=False)
            await server.apply(pod(first, READY))
            await until(lambda: c.verifiers[0].pool.up)
            c.load()
            await until(lambda: first.num_trees == STREAMS)
            await server.apply(pod(second, READY))
            await until(lambda: len(c.verifiers[0].pool.up) == 2)
            await server.apply(pod(first, LEAVING))  # the API says so before the pod does
            await until(lambda: second.num_trees == STREAMS and not first.num_trees)
            await c.progress(5)
            await server.delete(pod(first, LEAVING)["metadata"]["name"])
            await until(lambda: len(c.verifiers[0].pool.links) == 1)
            await c.stop()
