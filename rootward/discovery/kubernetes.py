"""Workers behind a Kubernetes service, from its EndpointSlices, which are listed every `ASK_S` seconds.

A pod that terminates is `leaving`; one that is not ready is no peer. Needs `list` on `endpointslices` of the namespace and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException

from rootward.clock import Clock, SystemClock
from rootward.discovery.static import join, polled
from rootward.errors import ConfigurationError
from rootward.ports import Peer

log = structlog.get_logger("discovery")

SERVICE_LABEL = "kubernetes.io/service-name"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_PORT = "grpc"
ASK_S = 2.0  # between two lists
CALL_S = 10.0  # for one

Json = Mapping[str, Any]


def peers_in(slices: Iterable[Json], port: str) -> tuple[Peer, ...]:
    """By address, each once: while slices are rebuilt an endpoint may stand in two of them, and the one that is ready counts."""
    found: dict[str, Peer] = {}
    for item in slices:
        number = port_of(item.get("ports") or (), port)
        if number is None or item.get("addressType") not in ("IPv4", "IPv6"):
            continue
        for endpoint in item.get("endpoints") or ():
            peer = _peer(endpoint, number)
            if peer is not None and (peer.address not in found or found[peer.address].leaving):
                found[peer.address] = peer
    return tuple(found[address] for address in sorted(found))


def _peer(endpoint: Json, port: int) -> Peer | None:
    """Absent conditions mean what the API says they mean: ready, serving, not terminating. Only the first address is to be used."""
    conditions = endpoint.get("conditions") or {}
    leaving = bool(conditions.get("terminating"))
    addresses = endpoint.get("addresses") or ()
    if not addresses or not (leaving or conditions.get("ready") in (True, None)):
        return None
    return Peer(join(addresses[0], port), endpoint.get("zone") or "", leaving)


def port_of(ports: Any, wanted: str) -> int | None:
    """The number of the port of that name (or number), or of the only one there is."""
    if wanted.isdecimal():
        return int(wanted)
    for entry in ports:
        if entry.get("name") == wanted or len(ports) == 1:
            return int(entry["port"])
    return None


class EndpointSliceDiscovery:
    """`ports.Discovery`. While the API server does not answer, its last answer holds."""

    def __init__(
        self,
        api: client.DiscoveryV1Api,
        namespace: str,
        service: str,
        port: str,
        *,
        ask_s: float = ASK_S,
        clock: Clock | None = None,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._service = service
        self._port = port
        self._ask_s = ask_s
        self._clock = clock or SystemClock()

    def watch(self) -> AsyncGenerator[tuple[Peer, ...], None]:
        failures = (ApiException, aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError)
        return polled(self._ask, every_s=self._ask_s, clock=self._clock, failures=failures, complain=self._complain)

    async def _ask(self) -> tuple[Peer, ...]:
        answer = await self._api.list_namespaced_endpoint_slice(
            self._namespace,
            label_selector=f"{SERVICE_LABEL}={self._service}",
            resource_version="0",  # from the cache of the API server
            _preload_content=False,
            _request_timeout=CALL_S,
        )
        if answer.status != 200:
            answer.close()
            raise ApiException(status=answer.status, reason=answer.reason)
        found = json.loads(await answer.read())
        if not isinstance(found, dict):
            raise ValueError(f"an object was expected, not {type(found).__name__}")
        return peers_in(found.get("items") or (), self._port)

    def _complain(self, error: Exception) -> None:
        status = getattr(error, "status", None)
        rights = "; the service account needs list on endpointslices" if status in (401, 403) else ""
        log.warning("endpoint_slices_away", service=self._service, error=f"{type(error).__name__}: {error}{rights}")


@asynccontextmanager
async def open_endpoint_slices(target: str) -> AsyncIterator[EndpointSliceDiscovery]:
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
        yield EndpointSliceDiscovery(client.DiscoveryV1Api(api), found, service, port or DEFAULT_PORT)


def own_namespace() -> str:
    """Of the pod this runs in, else "default"."""
    return NAMESPACE_FILE.read_text(encoding="utf-8").strip() if NAMESPACE_FILE.exists() else "default"
