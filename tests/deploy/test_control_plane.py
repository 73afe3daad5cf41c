"""The chart on a real control plane, with nodes that only say that containers run (`support.control_plane`): admission, Pod Security,
controllers, scheduling, endpoints, rights, disruption budgets, upgrades. Skipped where no control plane is.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml
from kubernetes import client
from support.control_plane import ControlPlane, binaries, control_plane, wait_for
from support.helm import CHART, REGISTRY, VALUE_SETS, Helm

from rootward.discovery.kubernetes import open_endpoint_slices

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(binaries() is None, reason="CONTROL_PLANE names no folder with a Kubernetes control plane"),
]
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
WAIT_S = 120.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = binaries()
    assert folder is not None
    with control_plane(folder, tmp_path_factory.mktemp("control-plane")) as made:
        for path in sorted((folder / "crds").glob("*.yaml")):
            made.apply(path.read_text(encoding="utf-8"))
        yield made


class Release:
    """Of the chart, in a namespace of its own in which Pod Security `restricted` is enforced."""

    def __init__(self, cluster: ControlPlane, helm: Helm, namespace: str) -> None:
        self.cluster, self.helm, self.namespace = cluster, helm, namespace
        cluster.core.create_namespace({"metadata": {"name": namespace, "labels": RESTRICTED}})

    def run(self, *arguments: str) -> str:
        where = ("--kubeconfig", str(self.cluster.kubeconfig), "--namespace", self.namespace)
        done = self.helm.run(*arguments, *where)
        assert done.returncode == 0, done.stderr
        assert "PodSecurity" not in done.stderr, done.stderr  # a warning
        return done.stdout

    def install(self, *flags: str) -> None:
        registry = (
            ()
            if any("imageRegistry" in flag or flag == "-f" for flag in flags)
            else ("--set", f"global.imageRegistry={REGISTRY}")
        )
        self.run("install", "rw", str(CHART), *registry, *flags)

    def pods(self, component: str = "") -> list[client.V1Pod]:
        selector = f"app.kubernetes.io/component={component}" if component else ""
        return list(self.cluster.core.list_namespaced_pod(self.namespace, label_selector=selector).items)

    def failures(self) -> list[str]:
        """Why controllers could not create pods."""
        events = self.cluster.core.list_namespaced_event(self.namespace).items
        return [event.message for event in events if event.reason == "FailedCreate"]


@pytest.fixture(scope="module")
def release(cluster: ControlPlane, helm: Helm) -> Release:
    """The default values, every pod ready. Tests leave it as it was."""
    made = Release(cluster, helm, "defaults")
    made.install("--set", "verifier.replicas=2", "--set", "discovery.mode=kubernetes", "--wait", "--timeout", "115s")
    return made


def test_every_pod_runs(release: Release) -> None:
    pods = release.pods()
    assert {pod.metadata.labels["app.kubernetes.io/component"] for pod in pods} == {
        "gateway",
        "verifier",
        "drafter",
        "redis",
    }
    assert {pod.status.phase for pod in pods} == {"Running"}
    assert release.failures() == []


async def test_workers_are_discovered_with_the_rights_of_the_pod_and_no_more(
    release: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The discovery of a gateway, as its service account, finds the verifiers that are ready."""
    gateway = release.pods("gateway")[0]
    account = gateway.spec.service_account_name
    token = release.cluster.core.create_namespaced_service_account_token(
        account, release.namespace, {"spec": {"expirationSeconds": 3600}}
    ).status.token
    kubeconfig = json.loads(release.cluster.kubeconfig.read_text())
    kubeconfig["users"][0]["user"]["token"] = token
    own = tmp_path / "kubeconfig"
    own.write_text(json.dumps(kubeconfig))
    monkeypatch.setenv("KUBECONFIG", str(own))
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(own))

    settings = yaml.safe_load(
        release.cluster.core.read_namespaced_config_map("rw-rootward-gateway", release.namespace).data["settings.yaml"]
    )
    kind, _, target = settings["verifiers"][0].partition(":")
    assert kind == "kubernetes"
    service, _, port = target.partition(":")
    async with open_endpoint_slices(f"{service.partition('.')[0]}.{release.namespace}:{port}") as found:
        watch: AsyncIterator = found.watch()
        peers = await anext(watch)
        await watch.aclose()
    addresses = {peer.address.rpartition(":")[0] for peer in peers}
    assert addresses == {pod.status.pod_ip for pod in release.pods("verifier")}

    def may(verb: str, resource: str, group: str = "") -> bool:
        command = [
            "kubectl",
            "--kubeconfig",
            str(own),
            "auth",
            "can-i",
            verb,
            f"{resource}.{group}".rstrip("."),
            "-n",
            release.namespace,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == "yes"

    assert may("list", "endpointslices", "discovery.k8s.io")
    assert not any(
        may(verb, kind)
        for verb, kind in (("get", "secrets"), ("list", "pods"), ("create", "pods"), ("get", "configmaps"))
    )


def test_a_disruption_budget_keeps_a_verifier(release: Release) -> None:
    """A second eviction is refused while the first one's replacement is not ready."""
    nodes = release.cluster.nodes
    assert nodes is not None
    before = release.pods("verifier")
    nodes.refusing.add("-verifier-")
    try:
        first, second = ({"metadata": {"name": pod.metadata.name, "namespace": release.namespace}} for pod in before)
        release.cluster.core.create_namespaced_pod_eviction(first["metadata"]["name"], release.namespace, first)
        with pytest.raises(client.ApiException) as refused:
            release.cluster.core.create_namespaced_pod_eviction(second["metadata"]["name"], release.namespace, second)
        assert refused.value.status == 429
    finally:
        nodes.refusing.clear()
        for pod in release.pods("verifier"):
            if pod.metadata.name not in [old.metadata.name for old in before]:
                release.cluster.core.delete_namespaced_pod(pod.metadata.name, release.namespace)

    def ready() -> list[client.V1Pod]:
        pods = release.pods("verifier")
        return [pod for pod in pods if pod.status.phase == "Running" and not pod.metadata.deletion_timestamp]

    wait_for(lambda: len(ready()) == 2, WAIT_S, "the verifier was not replaced")


def test_an_upgrade_and_a_way_back(release: Release) -> None:
    """Only what changes is rolled out, and a roll back leads to the pods of before."""
    others = {
        pod.metadata.uid for pod in release.pods() if pod.metadata.labels["app.kubernetes.io/component"] != "drafter"
    }
    flags = ("--reset-then-reuse-values", "--wait", "--timeout", "115s")
    release.run("upgrade", "rw", str(CHART), "--set", "drafter.defaults.settings.max_num_seqs=7", *flags)
    assert others == {
        pod.metadata.uid for pod in release.pods() if pod.metadata.labels["app.kubernetes.io/component"] != "drafter"
    }
    release.run("rollback", "rw", "1", "--wait", "--timeout", "115s")
    assert release.failures() == []


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_value_set_is_admitted(cluster: ControlPlane, helm: Helm, name: str) -> None:
    """By the API server and the definitions of the custom resources; controllers make the pods, autoscalers find what they scale."""
    release = Release(cluster, helm, f"set-{name}")
    release.install(
        "-f",
        str(CHART / "ci" / f"{name}-values.yaml"),
        *(() if name != "defaults" else ("--set", f"global.imageRegistry={REGISTRY}")),
    )

    def complete() -> bool:
        sets = cluster.apps.list_namespaced_deployment(release.namespace).items
        return all((one.status.updated_replicas or 0) == one.spec.replicas for one in sets)

    try:
        wait_for(complete, WAIT_S, f"pods are missing: {release.failures()}")
        assert release.failures() == []
        scaled = f"/apis/autoscaling/v2/namespaces/{release.namespace}/horizontalpodautoscalers"

        def reached() -> bool:
            found = cluster.get(scaled)["items"]
            conditions = [{c["type"]: c["status"] for c in one["status"].get("conditions") or []} for one in found]
            return all(one.get("AbleToScale") == "True" for one in conditions)

        wait_for(reached, WAIT_S, "an autoscaler does not find its target")
    finally:
        release.run("uninstall", "rw")
    left = [
        o["metadata"]["name"] for o in cluster.get(f"/apis/apps/v1/namespaces/{release.namespace}/deployments")["items"]
    ]
    assert left == []
    cluster.core.delete_namespace(release.namespace)
