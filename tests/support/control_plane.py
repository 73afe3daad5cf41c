"""A real Kubernetes control plane on loopback: etcd, API server, controllers and scheduler, with nodes on which no container runs.

The binaries are not in any package index. $CONTROL_PLANE names a folder with `etcd`, `kube-apiserver`, `kube-controller-manager` and
`kube-scheduler` (those of a Kubernetes release and of etcd, or built from their sources) and a folder `crds` with the custom resource
definitions of the projects that the chart renders for.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kubernetes import client, config
from support.processes import free_port

TOKEN = "administrator-of-the-tests"
START_S, HEARTBEAT_S, LOOK_S = 120.0, 10.0, 0.3
BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


def binaries() -> Path | None:
    """The folder, if it is complete."""
    folder = Path(os.environ.get("CONTROL_PLANE", "/nonexistent"))
    return folder if all((folder / name).exists() for name in BINARIES) else None


@dataclass
class ControlPlane:
    """What a test asks: `api` as administrator, `kubeconfig` for commands."""

    kubeconfig: Path
    url: str
    api: client.ApiClient
    nodes: Nodes | None = None

    @property
    def core(self) -> client.CoreV1Api:
        return client.CoreV1Api(self.api)

    @property
    def apps(self) -> client.AppsV1Api:
        return client.AppsV1Api(self.api)

    def get(self, path: str) -> dict[str, Any]:
        """Any object or list, by its path."""
        answer = self.api.call_api(
            path, "GET", auth_settings=["BearerToken"], _preload_content=False, _return_http_data_only=True
        )
        found: dict[str, Any] = json.loads(answer.data)
        return found

    def apply(self, manifests: str) -> None:
        command = ["kubectl", "--kubeconfig", str(self.kubeconfig), "apply", "--server-side", "-f", "-"]
        done = subprocess.run(command, input=manifests, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


@contextmanager
def control_plane(folder: Path, work: Path) -> Iterator[ControlPlane]:
    etcd, etcd_peer, port = free_port(), free_port(), free_port()
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    accounts, tokens, kubeconfig = work / "accounts.pem", work / "tokens.csv", work / "kubeconfig"
    accounts.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    tokens.write_text(f"{TOKEN},tests,tests,system:masters\n")
    url = f"https://127.0.0.1:{port}"
    with ExitStack() as stack:
        start = lambda name, *flags: stack.enter_context(running(folder / name, work / f"{name}.log", flags))  # noqa: E731
        own = f"http://127.0.0.1:{etcd}"
        peers = f"http://127.0.0.1:{etcd_peer}"
        start(
            "etcd",
            f"--data-dir={work / 'etcd'}",
            f"--listen-client-urls={own}",
            f"--advertise-client-urls={own}",
            f"--listen-peer-urls={peers}",
        )
        start(
            "kube-apiserver",
            f"--etcd-servers={own}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={work / 'certificates'}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={accounts}",
            f"--service-account-signing-key-file={accounts}",
            "--service-cluster-ip-range=10.96.0.0/16",
        )
        wait_for(
            lambda: (work / "certificates" / "apiserver.crt").exists(), START_S, "the API server has no certificate"
        )
        authority = base64.b64encode((work / "certificates" / "apiserver.crt").read_bytes()).decode()
        kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "tests",
                    "clusters": [
                        {"name": "tests", "cluster": {"server": url, "certificate-authority-data": authority}}
                    ],
                    "users": [{"name": "tests", "user": {"token": TOKEN}}],
                    "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
                }
            )
        )
        made = ControlPlane(kubeconfig, url, config.new_client_from_config(str(kubeconfig)))
        wait_for(lambda: answers(made), START_S, "the API server is not ready")
        common = (f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0")
        start(
            "kube-controller-manager",
            *common,
            f"--service-account-private-key-file={accounts}",
            f"--root-ca-file={work / 'certificates' / 'apiserver.crt'}",
        )
        start("kube-scheduler", *common)
        made.nodes = Nodes(made.api)
        with made.nodes.running():
            yield made


@contextmanager
def running(binary: Path, log: Path, flags: Sequence[str]) -> Iterator[None]:
    with log.open("w") as written:
        process = subprocess.Popen([binary, *flags], stdout=written, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(made: ControlPlane) -> bool:
    try:
        return bool(client.CoreV1Api(made.api).read_namespace("default"))
    except (client.ApiException, urllib3.exceptions.HTTPError):
        return False


def wait_for(holds: Callable[[], Any], seconds: float, otherwise: str) -> Any:
    until = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < until, otherwise
        time.sleep(0.2)
    return found


@dataclass
class Nodes:
    """Stands in for kubelets: containers are said to run as soon as their pod is bound, init containers to have ended well; what
    is deleted is gone. `refusing`: pods whose name contains one of these never get ready."""

    api: client.ApiClient
    count: int = 3
    refusing: set[str] = field(default_factory=set)
    _stop: threading.Event = field(default_factory=threading.Event)
    _addresses: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        core = client.CoreV1Api(self.api)
        for i in range(self.count):
            labels = {
                "kubernetes.io/hostname": f"node-{i}",
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "topology.kubernetes.io/zone": f"zone-{i % 2}",
                "accelerator": ("h100", "l4", "none")[i % 3],
            }
            core.create_node({"metadata": {"name": f"node-{i}", "labels": labels}, "spec": {}})
        thread = threading.Thread(target=self._run, name="nodes")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        beat = 0.0
        while not self._stop.wait(LOOK_S):
            try:
                if time.monotonic() - beat > HEARTBEAT_S:
                    beat = time.monotonic()
                    self._beat()
                self._look()
            except client.ApiException as error:
                if error.status not in (404, 409):  # a pod that went away or changed meanwhile
                    raise

    def _beat(self) -> None:
        amount = {"cpu": "64", "memory": "1Ti", "pods": "200", "ephemeral-storage": "1Ti", "nvidia.com/gpu": "16"}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "",
            "lastHeartbeatTime": now(),
            "lastTransitionTime": now(),
        }
        for i in range(self.count):
            status = {"capacity": amount, "allocatable": amount, "conditions": [ready]}
            client.CoreV1Api(self.api).patch_node_status(f"node-{i}", {"status": status})

    def _look(self) -> None:
        core = client.CoreV1Api(self.api)
        for pod in core.list_pod_for_all_namespaces().items:
            where = pod.metadata.name, pod.metadata.namespace
            if pod.metadata.deletion_timestamp is not None:
                core.delete_namespaced_pod(*where, body={"gracePeriodSeconds": 0})
            elif pod.spec.node_name and pod.status.phase == "Pending":
                self._addresses += 1
                core.patch_namespaced_pod_status(*where, body={"status": self._status(pod)})

    def _status(self, pod: Any) -> dict[str, Any]:
        ready = not any(part in pod.metadata.name for part in self.refusing)
        address = f"10.1.{self._addresses // 250}.{self._addresses % 250 + 1}"
        kinds = ("Initialized", "ContainersReady", "Ready")
        return {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": now(),
            "conditions": [
                {"type": kind, "status": str(ready or kind == "Initialized"), "lastTransitionTime": now()}
                for kind in kinds
            ],
            "containerStatuses": [
                {
                    "name": container.name,
                    "image": container.image,
                    "imageID": "none",
                    "ready": ready,
                    "started": ready,
                    "restartCount": 0,
                    "state": {"running": {"startedAt": now()}},
                }
                for container in pod.spec.containers
            ],
        }


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
