"""Workers behind a Kubernetes service, from its EndpointSlices: list, then watch from there, list again when the watch has lost track.

The answers of the API server are kept in `Slices`, which does no I/O. A pod that terminates is `leaving` at once; one that is not
ready is no peer. Needs `get, list, watch` on `endpointslices` of the namespace and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException

from rootward.backoff import backoff_s
from rootward.clock import Clock, SystemClock
from rootward.discovery.static import join
from rootward.errors import ConfigurationError
from rootward.ports import Peer

log = structlog.get_logger("discovery")

SERVICE_LABEL = "kubernetes.io/service-name"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_PORT = "grpc"
CALL_S = 10.0  # a list, or to begin a watch
WATCH_S = 60  # a watch is ended by the server after so long and goes on from where it was
RESYNC_S = 600.0  # between two lists, whatever the watch has said
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0

Json = Mapping[str, Any]


class Gone(Exception):
    """The server no longer has the version that we know: list again."""


class Slices:
    """The EndpointSlices of one service, by the last answer. version: where a watch starts; "": nothing is known."""

    def __init__(self) -> None:
        self.version = ""
        self._by_name: dict[str, Json] = {}

    def listed(self, answer: Json) -> None:
        """The answer of a list replaces everything."""
        self._by_name = {item["metadata"]["name"]: item for item in answer.get("items") or ()}
        self.version = answer["metadata"]["resourceVersion"]

    def changed(self, event: Json) -> None:
        """One event of a watch. Gone: it cannot go on from here."""
        kind = event["type"]
        item = event["object"]
        if kind == "ERROR":
            if item.get("code") == 410:
                raise Gone(item.get("message", ""))
            raise ValueError(f"the watch failed: {item.get('message', item)}")
        meta = item["metadata"]
        if kind == "DELETED":
            self._by_name.pop(meta["name"], None)
        elif kind in ("ADDED", "MODIFIED"):
            self._by_name[meta["name"]] = item
        self.version = meta["resourceVersion"]  # a BOOKMARK brings nothing else

    def peers(self, port: str) -> tuple[Peer, ...]:
        """By address, each once: while slices are rebuilt an endpoint may stand in two of them, and the one that is ready counts."""
        found: dict[str, Peer] = {}
        for item in self._by_name.values():
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
        self, api: client.DiscoveryV1Api, namespace: str, service: str, port: str, *, clock: Clock | None = None
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._service = service
        self._port = port
        self._clock = clock or SystemClock()

    async def watch(self) -> AsyncGenerator[tuple[Peer, ...], None]:
        slices = Slices()
        known = None
        attempt = 0
        resync_s = 0.0
        while True:
            try:
                if not slices.version or self._clock.now() >= resync_s:
                    slices.listed(await self._list())
                    resync_s = self._clock.now() + RESYNC_S
                    if (found := slices.peers(self._port)) != known:
                        known = found
                        yield found
                begun_s = self._clock.now()
                async for event in self._events(slices.version):
                    slices.changed(event)
                    attempt = 0
                    if (found := slices.peers(self._port)) != known:
                        known = found
                        yield found
                if self._clock.now() - begun_s > LONGEST_RETRY_S:
                    attempt = 0
            except Gone:
                slices.version = ""
            except (ApiException, aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
                self._complain(error, attempt)
            await self._clock.sleep(backoff_s(attempt, FIRST_RETRY_S, LONGEST_RETRY_S, self._service, id(self)))
            attempt += 1

    async def _list(self) -> Json:
        answer = await self._call(_request_timeout=CALL_S)
        return _json(await answer.read())

    async def _events(self, version: str) -> AsyncIterator[Json]:
        """Events since that version, until the server ends the watch."""
        answer = await self._call(
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_S,
            _request_timeout=(CALL_S, WATCH_S + CALL_S),
        )
        try:
            async for line in answer.content:
                if line.endswith(b"\n"):  # else the connection broke inside an event; it comes again
                    yield _json(line)
        finally:
            answer.close()

    async def _call(self, **options: Any) -> Any:
        answer = await self._api.list_namespaced_endpoint_slice(
            self._namespace, label_selector=f"{SERVICE_LABEL}={self._service}", _preload_content=False, **options
        )
        if answer.status == 410:
            answer.close()
            raise Gone(answer.reason)
        if answer.status != 200:
            answer.close()
            raise ApiException(status=answer.status, reason=answer.reason)
        return answer

    def _complain(self, error: Exception, attempt: int) -> None:
        status = getattr(error, "status", None)
        rights = "; the service account needs get, list and watch on endpointslices" if status in (401, 403) else ""
        say = log.warning if attempt == 0 else log.debug
        say("endpoint_slices_away", service=self._service, error=f"{type(error).__name__}: {error}{rights}")


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


def _json(text: bytes) -> Json:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"an object was expected, not {type(found).__name__}")
    return found
