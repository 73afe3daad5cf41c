"""Workers behind a Kubernetes service, from its EndpointSlices, which are listed every `POLL_S` seconds.

A pod that terminates is `leaving`; one that is not ready is no peer. Needs `list` on `endpointslices` of the namespace and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException

from rootward.addresses import join_host_port
from rootward.discovery.polling import PolledDiscovery
from rootward.errors import ConfigurationError
from rootward.ports import Peer

SERVICE_LABEL = "kubernetes.io/service-name"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_PORT = "grpc"
POLL_S = 2.0  # between two lists
CALL_TIMEOUT_S = 10.0  # of one list

Json = Mapping[str, Any]


def peers_in(slices: Iterable[Json], port: str) -> list[Peer]:
    """The peers of all slices. While slices are rebuilt an endpoint may be in two of them.

    Absent conditions mean what the API says they mean: ready, serving, not terminating. Only the first address is to be used."""
    found = []
    for item in slices:
        number = port_of(item.get("ports") or (), port)
        if number is None or item.get("addressType") not in ("IPv4", "IPv6"):
            continue
        for endpoint in item.get("endpoints") or ():
            conditions, addresses = endpoint.get("conditions") or {}, endpoint.get("addresses") or ()
            leaving = bool(conditions.get("terminating"))
            if addresses and (leaving or conditions.get("ready") in (True, None)):
                found.append(Peer(join_host_port(addresses[0], number), endpoint.get("zone") or "", leaving))
    return found


def port_of(ports: Any, wanted: str) -> int | None:
    """The number of the port of that name (or number), or of the only one there is."""
    if wanted.isdecimal():
        return int(wanted)
    for entry in ports:
        if entry.get("name") == wanted or len(ports) == 1:
            return int(entry["port"])
    return None


def endpoint_slice_discovery(
    api: client.DiscoveryV1Api, namespace: str, service: str, port: str, *, every_s: float = POLL_S
) -> PolledDiscovery:
    """The pods of a service. Status 401 and 403 mean that the service account may not list EndpointSlices."""

    async def ask() -> list[Peer]:
        answer = await api.list_namespaced_endpoint_slice(
            namespace,
            label_selector=f"{SERVICE_LABEL}={service}",
            resource_version="0",  # from the cache of the API server
            _preload_content=False,
            _request_timeout=CALL_TIMEOUT_S,
        )
        if answer.status != 200:
            answer.close()
            raise ApiException(status=answer.status, reason=answer.reason)
        return peers_in(json.loads(await answer.read()).get("items") or (), port)

    return PolledDiscovery(ask, source=f"kubernetes:{service}", every_s=every_s)


@asynccontextmanager
async def open_endpoint_slices(target: str) -> AsyncIterator[PolledDiscovery]:
    """service[.namespace][:port], with the rights of the pod, else of the user's kubeconfig. ConfigurationError without either."""
    name, _, port = target.partition(":")
    service, _, namespace = name.partition(".")
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except ConfigException:
        try:
            await config.load_kube_config(client_configuration=settings)
        except (ConfigException, OSError) as error:
            message = f"kubernetes:{target}: neither a pod's service account nor a kubeconfig is here ({error})"
            raise ConfigurationError(message) from error
    async with client.ApiClient(settings) as api:
        found = namespace or own_namespace()
        yield endpoint_slice_discovery(client.DiscoveryV1Api(api), found, service, port or DEFAULT_PORT)


def own_namespace() -> str:
    """Namespace of the pod that this runs in, else "default"."""
    return NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.exists() else "default"
