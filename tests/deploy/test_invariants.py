"""What must hold of every render, whatever the values."""

import pytest
import yaml
from support.helm import VALUE_SETS, containers, of_kind, pods, workloads

AUTOSCALERS = ("HorizontalPodAutoscaler", "ScaledObject")

pytestmark = pytest.mark.parametrize("name", VALUE_SETS)


@pytest.fixture
def objects(helm, name):
    return helm.objects(name)


def role_of(o):
    return o["metadata"]["labels"]["app.kubernetes.io/component"]


def selects(selector, pod) -> bool:
    labels = pod["metadata"]["labels"]
    wanted = selector.get("matchLabels", selector)
    return all(labels.get(key) == value for key, value in wanted.items())


def test_every_pod_is_restricted(objects):
    """Pod Security `restricted`, test pods and init containers included."""
    for where, pod in pods(objects).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, where
        assert spec["securityContext"]["runAsUser"] > 0, where
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, where
            assert context["capabilities"] == {"drop": ["ALL"]}, where
            assert context["readOnlyRootFilesystem"] is True, where
        assert not any("hostPath" in volume for volume in spec.get("volumes", [])), where


def test_api_tokens_are_mounted_only_where_discovery_needs_them(objects, name):
    kubernetes = name == "pools"
    for where, pod in pods(objects).items():
        asks = kubernetes and where.endswith(("-gateway", "-verifier"))
        assert pod["spec"]["automountServiceAccountToken"] is asks, where
    assert bool(of_kind(objects, "Role")) == kubernetes
    for role in of_kind(objects, "Role"):
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}
        ]


def test_grace_is_pre_stop_and_drain_and_a_margin(objects):
    settings = {o["metadata"]["name"]: o["data"].get("settings.yaml") for o in of_kind(objects, "ConfigMap")}
    served = [(name, pod["spec"]) for name, pod in pods(objects).items() if name.startswith(("Deployment/", "Leader"))]
    assert len({name.split("/")[1] for name, _ in served}) == len(workloads(objects))
    for name, spec in served:
        sleep = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        timeout = yaml.safe_load(settings[name.split("/")[1]])["shutdown_timeout_s"]
        assert spec["terminationGracePeriodSeconds"] > sleep + timeout


def test_selectors_meet_the_pods_they_mean(objects):
    every = list(pods(objects).values())
    for o in [
        *of_kind(objects, "Deployment"),
        *of_kind(objects, "StatefulSet"),
        *of_kind(objects, "PodDisruptionBudget"),
    ]:
        own = [pod for pod in every if selects(o["spec"]["selector"], pod)]
        machines = 2 if len(of_kind(objects, "LeaderWorkerSet")) and role_of(o) == "verifier" else 1
        assert [role_of(pod) for pod in own] == [role_of(o)] * machines, o["metadata"]["name"]
    for service in of_kind(objects, "Service"):
        meant = [pod for pod in every if selects(service["spec"]["selector"], pod)]
        ports = {port["name"] for pod in meant for c in pod["spec"]["containers"] for port in c["ports"]}
        assert len(meant) == 1, service["metadata"]["name"]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_replicas_yield_to_an_autoscaler(objects):
    scaled = {o["spec"]["scaleTargetRef"]["name"] for kind in AUTOSCALERS for o in of_kind(objects, kind)}
    for workload in workloads(objects):
        assert ("replicas" in workload["spec"]) == (workload["metadata"]["name"] not in scaled)
    assert scaled <= {o["metadata"]["name"] for o in workloads(objects)}
    kinds = {o["metadata"]["name"]: (o["apiVersion"], o["kind"]) for o in workloads(objects)}
    for target in (o["spec"]["scaleTargetRef"] for kind in AUTOSCALERS for o in of_kind(objects, kind)):
        assert kinds[target["name"]] == (target["apiVersion"], target["kind"])


def test_a_budget_never_blocks_a_single_replica(objects):
    deployments = {(role_of(o), o["metadata"]["name"]): o for o in workloads(objects)}
    for budget in of_kind(objects, "PodDisruptionBudget"):
        replicas = deployments[role_of(budget), budget["metadata"]["name"]]["spec"].get("replicas")
        assert replicas is None or replicas > 1
        assert "minAvailable" not in budget["spec"]
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_gpus_are_limits_and_their_taint_is_tolerated(objects):
    for where, pod in pods(objects).items():
        for container in containers(pod):
            resources = container["resources"]
            assert "nvidia.com/gpu" not in resources.get("requests", {}), where
            if "nvidia.com/gpu" in resources.get("limits", {}):
                assert any(t["key"] == "nvidia.com/gpu" for t in pod["spec"]["tolerations"]), where
            assert "memory" in resources["limits"], where


def test_exactly_the_calls_of_the_parts_are_allowed(objects):
    policies = of_kind(objects, "NetworkPolicy")
    if not policies:
        return
    every = list(pods(objects).values())
    for pod in every:
        mine = [p for p in policies if selects(p["spec"]["podSelector"], pod)]
        assert {kind for p in mine for kind in p["spec"]["policyTypes"]} == {"Ingress", "Egress"}
    callers: dict[tuple[str, str], set[str]] = {}
    for policy in policies:
        for rule in policy["spec"].get("ingress", []):
            for source in rule.get("from", []):
                if "podSelector" in source:
                    for port in rule.get("ports", [{"port": "any"}]):
                        key = role_of(policy), port["port"]
                        callers.setdefault(key, set()).update(
                            role_of(p) for p in every if selects(source["podSelector"], p)
                        )
    assert callers["verifier", "grpc"] == {"gateway"}
    spread = {key: called for key, called in callers.items() if key[1] == "any"}
    assert spread == ({("verifier", "any"): {"verifier"}} if of_kind(objects, "LeaderWorkerSet") else {})
    if any(role_of(pod) == "drafter" for pod in every):
        assert callers["drafter", "grpc"] == {"verifier"}
    if any(role_of(pod) == "redis" for pod in every):
        assert callers["redis", "redis"] == {role_of(pod) for pod in every} - {"redis", "test"}
    named = {
        (role_of(pod), port["name"]) for pod in every for c in pod["spec"]["containers"] for port in c.get("ports", [])
    }
    opened = {
        (role_of(p), port["port"])
        for p in policies
        for rule in p["spec"].get("ingress", [])
        for port in rule.get("ports", [])
    }
    assert named - {("test", "grpc")} <= opened | {(role, port) for role, port in named if role == "test"}


def test_images_follow_registry_and_digest(objects, name):
    for pod in pods(objects).values():
        for container in containers(pod):
            if name == "external-redis-tls":
                assert container["image"].startswith("registry.example.com/ml/rootward/")
                assert "@sha256:" in container["image"]
            else:
                assert container["image"].rpartition(":")[2] not in ("", "latest")


def test_shared_memory_fits_the_memory_limit(objects):
    """What is written there counts as memory of the container."""
    for where, pod in pods(objects).items():
        memory = pod["spec"]["containers"][0]["resources"]["limits"]["memory"]
        for volume in pod["spec"].get("volumes", []):
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                assert int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) < int(memory.removesuffix("Gi")), where


def test_no_secret_is_in_a_config_map(objects):
    for o in of_kind(objects, "ConfigMap"):
        assert "password" not in str(o["data"]).lower(), o["metadata"]["name"]
