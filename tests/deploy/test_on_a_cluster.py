"""Renders against the rules of what they meet on a cluster: Gateway API, Prometheus, KEDA, cert-manager, NetworkPolicy."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
import typer.main
import yaml
from support.helm import CHART, Helm, containers, named, of_kind, parsed, pods

from gateway.settings import GatewaySettings
from rootward.cli.main import app

KEDA = "gateway: {scaler: {port: 50053}}\ndrafter: {pools: {default: {autoscaling: {mode: keda-push}}}}\n"
MUTUAL_TLS = "tls: {mode: certManager}\n"
DOWNLOADED = "verifier: {model: {source: hf, repo: example/target}}\n"


def settings(objects, part: str) -> dict:
    return yaml.safe_load(named(objects, "ConfigMap", f"rw-rootward-{part}")["data"]["settings.yaml"])


# -- models -----------------------------------------------------------------------------------------------------------


def test_the_download_is_online_and_takes_a_proxy(helm):
    values = DOWNLOADED + "global: {downloadEnv: [{name: HTTPS_PROXY, value: 'http://proxy:3128'}]}\n"
    for pod in ("gateway", "verifier"):
        spec = named(helm.rendered(values, *REGISTRY), "Deployment", f"rw-rootward-{pod}")["spec"]["template"]["spec"]
        download, service = spec["initContainers"][0], spec["containers"][0]
        variables = {v["name"]: v.get("value") for v in download["env"]}
        assert (variables["HF_HUB_OFFLINE"], variables["HTTPS_PROXY"]) == ("0", "http://proxy:3128")
        assert variables["HF_XET_CHUNK_CACHE_SIZE_BYTES"] == "0"
        assert {v["name"]: v.get("value") for v in service["env"]}["HF_HUB_OFFLINE"] == "1"


def test_gateways_mount_a_tokenizer_and_no_weights(helm):
    objects = helm.rendered(
        "verifier: {model: {source: pvc, claim: weights}}\ngateway: {tokenizer: {source: pvc, claim: tokenizer}}"
    )
    claims = {
        part: [v["persistentVolumeClaim"]["claimName"] for v in volumes(objects, part) if "persistentVolumeClaim" in v]
        for part in ("gateway", "verifier")
    }
    assert claims == {"gateway": ["tokenizer"], "verifier": ["weights"]}
    assert settings(objects, "gateway")["served_model_name"] == settings(objects, "verifier")["served_model_name"]


@pytest.mark.parametrize(
    "weights", ["source: pvc, claim: w", "source: host, hostPath: /w", "source: image, image: x/w:1"]
)
def test_weights_are_mounted_in_gateways_only_with_a_tokenizer_source(helm, weights):
    done = helm.template(f"verifier: {{model: {{{weights}}}}}")
    assert "gateway.tokenizer.source" in done.stderr
    both = helm.rendered(f"verifier: {{model: {{{weights}}}}}\ngateway: {{tokenizer: {{{weights}}}}}")
    assert [v for v in volumes(both, "gateway") if v["name"] == "model"] == [
        v for v in volumes(both, "verifier") if v["name"] == "model"
    ]


S3 = "verifier: {model: {source: url, url: 's3://models/llama-70b/', secret: s3%s}}\n"


def download_of(objects, part: str) -> tuple[dict, dict]:
    """(the init container, the volume that it fills)"""
    (container,) = named(objects, "Deployment", f"rw-rootward-{part}")["spec"]["template"]["spec"]["initContainers"]
    (mounted,) = [m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/models"]
    return container, next(v for v in volumes(objects, part) if v["name"] == mounted)


def test_what_is_downloaded_is_what_is_served(helm):
    """The folder that the command fills is the one that the settings name, and the mount is the same volume, read only for the service."""
    for values in (DOWNLOADED, S3 % "", S3 % ", subPath: v1"):
        objects = helm.rendered(values)
        for part in ("gateway", "verifier"):
            container, volume = download_of(objects, part)
            folder = container["args"][2]
            assert settings(objects, part)["model"] in (folder, f"{folder}/v1")
            (mount,) = [m for m in container_of(objects, part)["volumeMounts"] if m["name"] == volume["name"]]
            assert folder.startswith(mount["mountPath"])
            assert mount["readOnly"]
            assert ("--tokenizer-only" in container["args"]) == (part == "gateway")


def test_the_command_of_the_download_is_ours(helm):
    for objects in (helm.rendered(DOWNLOADED), helm.rendered(S3 % "")):
        arguments = download_of(objects, "gateway")[0]["args"]
        name, *words = arguments
        command = typer.main.get_command(app).commands[name]
        assert command.make_context(name, words).params["url"] == arguments[1]


def test_a_bucket_is_read_with_its_credentials(helm):
    objects = helm.rendered(S3 % "")
    container, _ = download_of(objects, "verifier")
    assert container["args"][1] == "s3://models/llama-70b"
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert "envFrom" not in container_of(objects, "verifier")
    assert settings(objects, "gateway")["served_model_name"] == "llama-70b"


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ("claim: weights", {"persistentVolumeClaim": {"claimName": "weights"}}),
        ("hostPath: /srv/models", {"hostPath": {"path": "/srv/models", "type": "Directory"}}),
    ],
)
def test_a_cache_keeps_downloads_for_all_pods(helm, cache, volume):
    """Gateways download their few files for themselves: a claim would bind them to its nodes."""
    values = "verifier: {model: {source: hf, repo: o/t, cache: {%s}}}\ndrafter: {pools: {p: {model: {source: hf, repo: o/d, cache: {%s}}}}}"
    objects = helm.rendered(values % (cache, cache))
    folders = set()
    for part in ("verifier", "drafter-p"):
        container, filled = download_of(objects, part)
        assert {key: value for key, value in filled.items() if key != "name"} == volume
        folders.add(container["args"][2])
    assert len(folders) == 2  # models do not meet in one folder
    assert download_of(objects, "gateway")[1]["emptyDir"] == {"sizeLimit": "1Gi"}


def test_a_claim_and_a_folder_of_the_node_are_no_one_cache(helm):
    done = helm.template("verifier: {model: {source: hf, repo: o/t, cache: {claim: a, hostPath: /b}}}")
    assert done.returncode != 0
    assert "model.cache" in done.stderr


GIB = {"Mi": 2**-10, "Gi": 1, "Ti": 2**10}


@pytest.mark.parametrize(
    "values", [DOWNLOADED, S3 % "", "verifier: {model: {source: hf, repo: o/t, cache: {claim: c}}}"]
)
def test_no_volume_outgrows_the_pod(helm, values):
    """The kubelet evicts a pod whose local volumes exceed the largest ephemeral-storage limit of its containers."""

    def gib(quantity: str) -> float:
        return float(quantity[:-2]) * GIB[quantity[-2:]]

    for where, pod in pods(helm.rendered(values)).items():
        limits = [gib(c["resources"]["limits"].get("ephemeral-storage", "0Gi")) for c in containers(pod)]
        local = [
            v["emptyDir"] for v in pod["spec"]["volumes"] if "emptyDir" in v and v["emptyDir"].get("medium") != "Memory"
        ]
        if any(limits):
            assert max(limits) >= max(gib(one["sizeLimit"]) for one in local), where


def volumes(objects, part: str) -> list[dict]:
    return named(objects, "Deployment", f"rw-rootward-{part}")["spec"]["template"]["spec"]["volumes"]


# -- routes -----------------------------------------------------------------------------------------------------------

ROUTE = "gateway: {route: {enabled: true, parentRefs: [{name: public}], hostnames: [%s], grpcHostnames: [%s]}}"


def test_no_host_name_has_two_kinds_of_route(helm):
    objects = helm.rendered(ROUTE % ("llm.example", "grpc.llm.example"))
    names = [h for kind in ("HTTPRoute", "GRPCRoute") for r in of_kind(objects, kind) for h in r["spec"]["hostnames"]]
    assert sorted(names) == ["grpc.llm.example", "llm.example"]
    assert not of_kind(helm.rendered(ROUTE % ("llm.example", "")), "GRPCRoute")


@pytest.mark.parametrize(
    ("http", "grpc"),
    [
        ("llm.example", "llm.example"),
        ("", "llm.example"),
        ("*.example", "grpc.llm.example"),
        ("llm.example", "*.example"),
        ("*.llm.example", "*.example"),
    ],
)
def test_a_host_name_of_both_protocols_is_refused(helm, http, grpc):
    """Of routes whose names meet, wildcards included, a Gateway takes one."""
    done = helm.template(ROUTE % (f"'{http}'" if http else "", f"'{grpc}'"))
    assert done.returncode != 0
    assert f"gateway.route.grpcHostnames: {grpc}" in done.stderr


def test_a_route_does_not_end_long_answers(helm):
    """Implementations have their own limits for a whole response (Envoy: 15 s); "0s" is none."""
    (route,) = of_kind(helm.rendered(ROUTE % ("llm.example", "")), "HTTPRoute")
    assert [rule["timeouts"] for rule in route["spec"]["rules"]] == [{"request": "0s", "backendRequest": "0s"}]


def test_a_wildcard_is_no_name_of_another_domain(helm):
    objects = helm.rendered(ROUTE % ("'*.llm.example'", "grpc.example, 'my-llm.example'"))
    assert len(of_kind(objects, "GRPCRoute")) == 1


def test_a_load_balancer_does_not_publish_the_scaler(helm):
    objects = helm.rendered("gateway: {service: {type: LoadBalancer}, scaler: {port: 50053}}")
    public = named(objects, "Service", "rw-rootward-gateway")
    assert (public["spec"]["type"], [p["name"] for p in public["spec"]["ports"]]) == ("LoadBalancer", ["grpc", "http"])
    assert named(objects, "Service", "rw-rootward-gateway-scaler")["spec"]["type"] == "ClusterIP"


# -- certificates -----------------------------------------------------------------------------------------------------


def test_keda_gets_a_certificate_of_its_own(helm):
    objects = helm.rendered(MUTUAL_TLS + KEDA)
    given = {e["name"] for e in of_kind(objects, "TriggerAuthentication")[0]["spec"]["secretTargetRef"]}
    served = {
        o["spec"]["secretName"] for o in of_kind(objects, "Certificate") if "server auth" in o["spec"].get("usages", [])
    }
    assert given == {"rw-rootward-keda-tls"}
    assert not given & served


def test_certificates_name_every_address_that_is_dialled(helm):
    objects = helm.rendered(
        MUTUAL_TLS
        + KEDA.replace("scaler:", "route: {enabled: true, parentRefs: [{name: g}], hostnames: [llm.example]}, scaler:")
    )
    names = {
        o["metadata"]["name"]: o["spec"]["dnsNames"] for o in of_kind(objects, "Certificate") if "dnsNames" in o["spec"]
    }
    assert {"llm.example", "rw-rootward-gateway.llm.svc.cluster.local"} <= set(names["rw-rootward-gateway"])
    scaler = of_kind(objects, "ScaledObject")[0]["spec"]["triggers"][0]["metadata"]["scalerAddress"].partition(":")[0]
    assert scaler in names["rw-rootward-gateway"]
    redis = urlsplit(variables(objects, "gateway")["ROOTWARD_REDIS_URL"])
    assert redis.hostname in names["rw-rootward-redis"]


def variables(objects, part: str) -> dict[str, str]:
    spec = named(objects, "Deployment", f"rw-rootward-{part}")["spec"]["template"]["spec"]
    return {v["name"]: v.get("value", "") for v in spec["containers"][0]["env"]}


def test_clients_see_another_certificate_than_the_other_roles(helm):
    """An authority that the public trusts signs neither SPIFFE identities nor names inside a cluster."""
    objects = helm.rendered(
        "tls: {mode: certManager, public: {issuerRef: {name: acme, kind: ClusterIssuer}}}\n"
        "gateway: {route: {enabled: true, parentRefs: [{name: g}], hostnames: [llm.example]}}"
    )
    internal, public = (named(objects, "Certificate", f"rw-rootward-{name}")["spec"] for name in ("gateway", "public"))
    assert "llm.example" not in internal["dnsNames"]
    assert (public["dnsNames"], public["issuerRef"]["name"], public.get("uris")) == (["llm.example"], "acme", None)
    given = settings(objects, "gateway")
    assert given["tls_certificate"] != given["public_tls_certificate"]
    mounted = {m["name"]: m["mountPath"] for m in container_of(objects, "gateway")["volumeMounts"]}
    secrets = {v["name"]: v["secret"]["secretName"] for v in volumes(objects, "gateway") if "secret" in v}
    assert given["public_tls_key"] == f"{mounted['public']}/tls.key"
    assert secrets["public"] == public["secretName"]
    validation = of_kind(objects, "BackendTLSPolicy")[0]["spec"]["validation"]
    assert validation == {"hostname": "llm.example", "wellKnownCACertificates": "System"}
    assert container_of(objects, "test")["command"][-2:] == ["system", "llm.example"]


def container_of(objects, part: str) -> dict:
    return next(pod for name, pod in pods(objects).items() if name.endswith(f"-{part}"))["spec"]["containers"][0]


def test_redis_uses_tls_under_mutual_tls(helm):
    plain, secured = helm.rendered(""), helm.rendered(MUTUAL_TLS)
    for objects, scheme in ((plain, "redis"), (secured, "rediss")):
        for part in ("gateway", "verifier", "drafter-default"):
            assert urlsplit(variables(objects, part)["ROOTWARD_REDIS_URL"]).scheme == scheme
    arguments = named(secured, "StatefulSet", "rw-rootward-redis")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert dict(itertools.pairwise(arguments))["--port"] == "0"
    assert dict(itertools.pairwise(arguments))["--tls-port"] == "6379"


def test_redis_takes_a_renewed_certificate(helm):
    """It reads its files when it starts. redis-cli refuses a server whose certificate has expired, and takes NOAUTH for an answer."""
    for values, expected in (("", "tcpSocket"), (MUTUAL_TLS, "exec")):
        (container,) = named(helm.rendered(values), "StatefulSet", "rw-rootward-redis")["spec"]["template"]["spec"][
            "containers"
        ]
        assert expected in container["livenessProbe"]
    command = container["livenessProbe"]["exec"]["command"]
    assert command[0] == "redis-cli"
    assert (
        dict(itertools.pairwise(command))["--cacert"]
        == dict(itertools.pairwise(container["args"]))["--tls-ca-cert-file"]
    )


# -- restarts, limits -------------------------------------------------------------------------------------------------


def test_a_new_chart_version_restarts_nothing(helm, tmp_path):
    newer = tmp_path / "rootward"
    shutil.copytree(CHART, newer)
    metadata = yaml.safe_load((newer / "Chart.yaml").read_text(encoding="utf-8"))
    (newer / "Chart.yaml").write_text(yaml.safe_dump(metadata | {"version": "9.9.9"}), encoding="utf-8")
    done = helm.run("template", "rw", str(newer), "--namespace", "llm", *REGISTRY)
    assert done.returncode == 0, done.stderr
    after = parsed(done.stdout)
    assert any("9.9.9" in str(o["metadata"]["labels"]) for o in after)
    templates = {name: pod for name, pod in pods(helm.rendered("")).items() if not name.startswith("Pod/")}
    assert templates == {name: pod for name, pod in pods(after).items() if not name.startswith("Pod/")}


def test_scratch_space_is_bounded(helm):
    for where, pod in pods(helm.rendered(DOWNLOADED)).items():
        for volume in pod["spec"].get("volumes", []):
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], (where, volume["name"])
    for part in ("gateway", "verifier", "drafter-default"):
        spec = named(helm.rendered(""), "Deployment", f"rw-rootward-{part}")["spec"]["template"]["spec"]
        assert "ephemeral-storage" in spec["containers"][0]["resources"]["limits"]


def test_images_come_from_a_named_registry(helm):
    done = helm.template("", "--set", "global.imageRegistry=")
    assert done.returncode != 0
    assert "global.imageRegistry" in done.stderr
    assert (
        helm.template(
            "image: {slim: {repository: ghcr.example/r/slim}, worker: {repository: ghcr.example/r/worker}}",
            "--set",
            "global.imageRegistry=",
        ).returncode
        == 0
    )


def test_what_does_not_come_from_that_registry_is_pinned(helm):
    """What others publish under a tag can change, and a node keeps what it once pulled."""
    images = {c["image"] for pod in pods(helm.rendered("", *REGISTRY)).values() for c in containers(pod)}
    compose = yaml.safe_load((CHART.parents[1] / "compose.yaml").read_text(encoding="utf-8"))["services"]
    (foreign,) = {image for image in images if not image.startswith("registry.example.com/rootward/")}
    assert foreign == compose["redis"]["image"]
    assert re.fullmatch(r"docker\.io/library/redis:[\d.]+-alpine@sha256:[0-9a-f]{64}", foreign)
    own_tag = helm.rendered("redis: {image: {tag: mine}}", *REGISTRY)
    pod = named(own_tag, "StatefulSet", "rw-rootward-redis")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "docker.io/library/redis:mine"


def test_ipv6_listens_on_every_address(helm):
    objects = helm.rendered(f"global: {{ipv6: true}}\n{KEDA}", *REGISTRY)
    listened = {
        (part, key): value
        for part in ("gateway", "verifier", "drafter-default")
        for key, value in settings(objects, part).items()
        if key.endswith("listen")
    }
    assert len(listened) == 8  # gRPC and metrics of each, and the gateway's HTTP and scaler
    assert {value.rpartition(":")[0] for value in listened.values()} == {"[::]"}


# -- fit --------------------------------------------------------------------------------------------------------------


def test_pods_take_what_a_platform_adds(helm):
    """Volumes, sidecars, labels, a scheduler; and a pool runs another build on another accelerator."""
    objects = helm.rendered(
        "verifier:\n  schedulerName: volcano\n  podLabels: {team: ml}\n  extraVolumes: [{name: scratch, emptyDir: {sizeLimit: 1Gi}}]\n"
        "  extraVolumeMounts: [{name: scratch, mountPath: /scratch}]\n  sidecars: [{name: agent, image: agent:1}]\n"
        "drafter: {pools: {amd: {image: {tag: rocm}, gpuToleration: false, tolerations: [{key: amd.com/gpu, operator: Exists}],"
        " resources: {limits: {amd.com/gpu: 1, memory: 1Gi}}}, default: {}}}"
    )
    template = named(objects, "Deployment", "rw-rootward-verifier")["spec"]["template"]
    assert (template["spec"]["schedulerName"], template["metadata"]["labels"]["team"]) == ("volcano", "ml")
    assert [c["name"] for c in template["spec"]["containers"]] == ["verifier", "agent"]
    assert "scratch" in {m["name"] for m in template["spec"]["containers"][0]["volumeMounts"]}
    assert "scratch" in {v["name"] for v in template["spec"]["volumes"]}
    amd, default = (container_of(objects, f"drafter-{pool}") for pool in ("amd", "default"))
    assert amd["image"] == default["image"].rpartition(":")[0] + ":rocm"
    assert amd["resources"]["limits"]["amd.com/gpu"] == 1


def test_every_pod_is_placed_as_its_platform_asks(helm):
    """Redis and the test pod too: taints, nodes, a scheduler, a priority; users and groups that a cluster gives out itself."""
    placed = (
        "{schedulerName: volcano, priorityClassName: high, nodeSelector: {pool: cpu}, podLabels: {team: ml}, podAnnotations: {cost: a},"
        " tolerations: [{key: cpu, operator: Exists}], podSecurityContext: {supplementalGroups: [44]},"
        " securityContext: {capabilities: {add: [IPC_LOCK]}}}"
    )
    openshift = "global: {podSecurityContext: {runAsUser: null, runAsGroup: null, fsGroup: null}}\n"
    objects = helm.rendered(
        f"{openshift}gateway: {placed}\nverifier: {placed}\nredis: {placed}\ntests: {placed}\ndrafter: {{defaults: {placed}}}"
    )
    assert len(pods(objects)) == 5
    for where, pod in pods(objects).items():
        spec, metadata = pod["spec"], pod["metadata"]
        assert (spec["schedulerName"], spec["priorityClassName"], spec["nodeSelector"]) == (
            "volcano",
            "high",
            {"pool": "cpu"},
        ), where
        assert {"key": "cpu", "operator": "Exists"} in spec["tolerations"], where
        assert (metadata["labels"]["team"], metadata["annotations"]["cost"]) == ("ml", "a"), where
        given = {
            "runAsNonRoot": True,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
            "supplementalGroups": [44],
        }
        assert spec["securityContext"] == given, where
        for container in containers(pod):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}, where


@pytest.mark.parametrize(
    ("repository", "reference"),
    [
        ("docker.io/library/redis", "docker.io/library/redis"),
        ("mirror/redis", "registry.example.com/rootward/mirror/redis"),
    ],
)
def test_redis_comes_from_the_registry_of_the_release_unless_it_names_one(helm, repository, reference):
    digest = f"sha256:{7:064x}"
    objects = helm.rendered(f"redis: {{image: {{repository: {repository}, digest: '{digest}'}}}}", *REGISTRY)
    pod = named(objects, "StatefulSet", "rw-rootward-redis")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"{reference}@{digest}"


# -- a model over several machines ------------------------------------------------------------------------------------

SPREAD = "verifier: {nodes: 2, replicas: 2, settings: {tensor_parallel: 2}, %s}\ngateway: {tokenizer: {source: hf, repo: o/t}}"
GROUP = "leaderworkerset.sigs.k8s.io"


def test_a_download_that_is_slow_or_retried_does_not_end_its_group(helm):
    """The operator counts a container that was started again as a failure, before all pods of a group run as well (LeaderWorkerSet 0.9)."""
    (group,) = of_kind(helm.rendered(SPREAD % "model: {source: hf, repo: o/t}"), "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupAfterStart"
    arguments = template["workerTemplate"]["spec"]["initContainers"][0]["args"]
    assert int(arguments[arguments.index("--attempts") + 1]) > 1


def test_each_machine_is_given_its_rank_and_the_address_of_the_first(helm):
    """By the variables that LeaderWorkerSet sets in every container."""
    (group,) = of_kind(helm.rendered(SPREAD % ""), "LeaderWorkerSet")
    arguments = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["args"]
    given = dict(itertools.pairwise(arguments))
    assert (given["--node-rank"], given["--master-addr"]) == ("$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)")
    (single,) = [c for c in of_kind(helm.rendered(""), "Deployment") if c["metadata"]["name"].endswith("-verifier")]
    assert "--node-rank" not in single["spec"]["template"]["spec"]["containers"][0]["args"]


def test_machines_of_one_model_are_not_spread(helm):
    (group,) = of_kind(helm.rendered(SPREAD % "exclusiveTopology: cloud.google.com/gke-nodepool"), "LeaderWorkerSet")
    assert "topologySpreadConstraints" not in group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    assert group["metadata"]["annotations"] == {f"{GROUP}/exclusive-topology": "cloud.google.com/gke-nodepool"}
    (plain,) = of_kind(helm.rendered(SPREAD % ""), "LeaderWorkerSet")
    assert "annotations" not in plain["metadata"]


def test_a_drain_of_nodes_ends_one_group_at_a_time(helm):
    """Whichever of its pods is evicted, a group ends; so every pod counts, and all of a group that starts again are away."""
    objects = helm.rendered(SPREAD % "")
    (budget,) = [o for o in of_kind(objects, "PodDisruptionBudget") if o["metadata"]["name"].endswith("-verifier")]
    machines = [pod for name, pod in pods(objects).items() if name.startswith("LeaderWorkerSet/")]
    assert len(machines) == 2
    assert all(matches(budget["spec"]["selector"], pod) for pod in machines)
    assert budget["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize(("nodes", "accepted"), [(1, True), (2, False)])
def test_a_group_has_a_name_that_its_pods_can_be_labelled_with(helm, nodes, accepted):
    """Kubernetes labels pods of a StatefulSet, as those of a group's followers, with its name and the hash of a revision: 63 letters."""
    values = f"models: [{{name: fifteen-letters, verifier: {{nodes: {nodes}, settings: {{tensor_parallel: 2}}}}}}]"
    flags = ("--namespace", "llm", "-f", "-", *REGISTRY)
    done = helm.run("template", "the-longest-rootward-that-fits", str(CHART), *flags, stdin=values)
    assert (done.returncode == 0) is accepted, done.stderr
    assert accepted or "the-longest-rootward-that-fits-verifier-fifteen-letters" in done.stderr


def test_only_machines_of_one_model_reach_all_ports_of_each_other(helm):
    objects = helm.rendered(
        "models: [{name: a, verifier: {nodes: 2, settings: {tensor_parallel: 2}}}, {name: b, verifier: {nodes: 2, settings:"
        " {tensor_parallel: 2}}}, {name: c}]"
    )
    machine = {name[-3:]: pod for name, pod in pods(objects).items() if "-verifier-" in name}
    machine["c"] = next(pod for name, pod in pods(objects).items() if name.endswith("-verifier-c"))
    assert admitted(objects, machine["a/0"], machine["a/1"], 41234)
    assert admitted(objects, machine["b/1"], machine["b/0"], 29500)
    for source, target in itertools.permutations(("a/0", "b/0", "c"), 2):
        assert not admitted(objects, machine[source], machine[target], 41234), (source, target)


# -- several models ---------------------------------------------------------------------------------------------------

TWO_MODELS = (
    "models: [{name: a, verifier: {replicas: 3}, drafter: {pools: {p: {}}}}, {name: b, servedModelName: x/b, drafter: {pools: {p: {}}}}]\n"
    "discovery: {mode: %s}\nmonitoring: {podMonitor: {enabled: true}}"
)


@pytest.mark.parametrize("mode", ["redis", "kubernetes", "dns"])
def test_each_model_finds_its_own_workers_alone(helm, mode):
    objects = helm.rendered(TWO_MODELS % mode)
    services = {o["metadata"]["name"]: o["spec"]["selector"] for o in of_kind(objects, "Service")}
    for entry, name, served in zip(settings(objects, "gateway")["models"], "ab", ("a", "x/b"), strict=True):
        of_verifier, of_drafter = settings(objects, f"verifier-{name}"), settings(objects, f"drafter-{name}-p")
        assert entry["served_model_name"] == of_verifier["served_model_name"] == served
        found = entry["verifiers"], of_verifier["drafters"]
        if mode == "redis":
            assert found == ([f"redis:{served}"], [f"{name}-p=redis:{of_drafter['pool']}"])
        else:
            assert [text.count(f"-{name}.llm") + text.count(f"-{name}-p.llm") for (text,) in found] == [1, 1]
            assert services[f"rw-rootward-verifier-{name}"]["rootward.dev/pool"] == name
    assert named(objects, "Deployment", "rw-rootward-verifier-a")["spec"]["replicas"] == 3
    template = named(objects, "Deployment", "rw-rootward-verifier-b")["spec"]["template"]
    assert template["metadata"]["annotations"]["rootward.dev/model"] == "x/b"
    endpoint = of_kind(objects, "PodMonitor")[0]["spec"]["podMetricsEndpoints"][0]
    assert endpoint["relabelings"][1]["targetLabel"] == "model_name"


def test_gateways_hold_the_tokenizer_of_every_model(helm):
    """In folders of their own, of tokenizer files alone."""
    objects = helm.objects("models")
    pod = named(objects, "Deployment", "rw-rootward-gateway")["spec"]["template"]["spec"]
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    entries = settings(objects, "gateway")["models"]
    assert [entry["model"] for entry in entries] == ["/models/large/llama", "/models/small/s3--models--qwen-7b"]
    assert mounts["/models/large"] != mounts["/models/small"]
    (download,) = pod["initContainers"]
    assert "--tokenizer-only" in download["args"]
    assert mounts["/models/small"] in {m["name"] for m in download["volumeMounts"]}


# -- two releases in one namespace ------------------------------------------------------------------------------------


def test_each_release_scales_by_its_own_series(helm):
    """The HPA and KEDA select the label that the PodMonitor puts on every series of the release."""
    monitor = of_kind(helm.objects("hpa"), "PodMonitor")[0]["spec"]["podMetricsEndpoints"][0]
    assert monitor["relabelings"][0]["targetLabel"] == "release"
    assert "filterRunning" not in monitor  # finished pods are no targets
    (scaler,) = [
        o for o in of_kind(helm.objects("hpa"), "HorizontalPodAutoscaler") if "drafter" in o["metadata"]["name"]
    ]
    for metric in scaler["spec"]["metrics"]:
        assert metric["external"]["metric"]["selector"]["matchLabels"]["release"] == "rw"
    for trigger in of_kind(helm.objects("keda"), "ScaledObject")[0]["spec"]["triggers"]:
        assert 'release="rw"' in trigger["metadata"]["query"]


@pytest.mark.parametrize("mode", ["hpa", "keda"])
def test_verifiers_of_each_model_scale_by_its_own_series(helm, mode):
    objects = helm.rendered(
        f"verifier: {{autoscaling: {{mode: {mode}}}}}\nmodels: [{{name: a}}, {{name: b, servedModelName: x/b}}]"
    )
    scalers = of_kind(objects, {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[mode])
    found = {o["spec"]["scaleTargetRef"]["name"]: o["spec"] for o in scalers}
    assert set(found) == {"rw-rootward-verifier-a", "rw-rootward-verifier-b"}
    for name in "ab":
        spec = found[f"rw-rootward-verifier-{name}"]
        if mode == "hpa":
            metrics = [metric["external"]["metric"] for metric in spec["metrics"]]
            assert [m["name"] for m in metrics] == ["rootward_verifier_sessions", "rootward_verifier_kv_usage"]
            labels = {"namespace": "llm", "release": "rw", "model": name}
            assert [m["selector"]["matchLabels"] for m in metrics] == [labels, labels]
            # The controller makes a selector of them, and refuses values that no label can have, as "x/b".
            assert all(re.fullmatch(r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", value) for value in labels.values())
        else:
            selector = f'{{namespace="llm", release="rw", model="{name}"}}'
            queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
            assert queries == [f"max(rootward:verifier_{what}{selector})" for what in ("sessions", "kv_usage")]


def test_another_prefix_restarts_redis(helm):
    """It reads its users once, when it starts: with the old ones services would be refused their new keys."""
    usual, blue = (
        named(helm.rendered(v), "StatefulSet", "rw-rootward-redis")["spec"]["template"]
        for v in ("", "redis: {keyPrefix: blue}")
    )
    assert usual["metadata"] != blue["metadata"]
    assert "annotations" not in usual["metadata"]  # an upgrade from a chart that had none restarts nothing


def test_rules_record_and_watch_their_own_release_alone(helm):
    """Two releases of one Prometheus would record the same series twice."""
    rules = [
        rule
        for o in of_kind(helm.objects("hpa"), "PrometheusRule")
        for group in o["spec"]["groups"]
        for rule in group["rules"]
    ]
    assert len(rules) > 20
    for rule in rules:
        series = re.findall(r"rootward[_:][a-z0-9_]+(\{[^}]*\})?", rule["expr"])
        assert all('namespace="llm"' in selector and 'release="rw"' in selector for selector in series), rule["expr"]
        if not series:
            assert "rw-rootward-" in rule["expr"]


EXTERNAL = "redis: {mode: external, external: {existingSecret: u}}"


def prefixes(objects) -> set[str]:
    return {settings(objects, part)["redis_prefix"] for part in ("gateway", "verifier", "drafter-default")}


def test_releases_that_share_a_redis_do_not_share_keys(helm):
    """Without a word about it in their values; the longest names too."""
    found = [prefixes(helm.rendered(EXTERNAL))]
    long = "n" * 63
    for release, namespace in (("blue", "llm"), ("rw", "llm-2"), ("rw", long), ("rw", "m" + long[1:])):
        done = helm.run("template", release, str(CHART), "--namespace", namespace, "-f", "-", *REGISTRY, stdin=EXTERNAL)
        texts = [o["data"].get("settings.yaml", "{}") for o in of_kind(parsed(done.stdout), "ConfigMap")]
        found.append({given["redis_prefix"] for given in map(yaml.safe_load, texts) if "redis_prefix" in given})
    assert [len(prefix) for prefix in found] == [1] * 5
    assert len(set.union(*found)) == 5
    assert all(re.fullmatch(GatewaySettings.model_fields["redis_prefix"].metadata[0].pattern, *p) for p in found)
    assert prefixes(helm.rendered("")) == {"rw"}  # a Redis of its own: as before


def test_releases_that_share_a_redis_may_name_their_keys(helm):
    objects = helm.rendered("redis: {mode: external, keyPrefix: blue, external: {existingSecret: u}}")
    assert prefixes(objects) == {"blue"}
    users = named(helm.rendered("redis: {keyPrefix: blue}"), "Secret", "rw-rootward-redis")["stringData"]["users.acl"]
    assert "~blue:*" in users
    assert "rw:" not in users


# -- connections ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connection:
    source: str
    port: int
    target: str  # component of the release, or "" for an address outside it
    protocol: str = "TCP"


SCALERS = {"keda-push": KEDA, "keda-push, mutual TLS": KEDA + MUTUAL_TLS}
VALUE_SETS = {
    "defaults": "",
    "mutual TLS": MUTUAL_TLS,
    **SCALERS,
    "external Redis": "redis: {mode: external, external: {existingSecret: u, ports: [6380]}}",
    "tracing": "gateway: {settings: {tracing_endpoint: 'http://otel.monitoring:4317'}}\n"
    "verifier: {settings: {tracing_endpoint: 'https://otel.example'}}\n"
    "drafter: {defaults: {settings: {tracing_endpoint: 'http://[fd00::1]:14317'}}}",
    "workers of another release": "discovery: {verifiers: ['other-verifier:7001'], drafters: ['big=other-drafter:7002']}",
    "downloads": DOWNLOADED,
    "downloads through a proxy": DOWNLOADED + "global: {downloadEnv: [{name: HTTPS_PROXY, value: 'http://proxy:3128'},"
    " {name: https_proxy, value: 'proxy:3129'}, {name: NO_PROXY, value: 'localhost:1'}, {name: AWS_ENDPOINT_URL, value: 'http://minio:9000/'},"
    " {name: HF_ENDPOINT, value: 'http://[fd00::1]'}, {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: s, key: token}}}]}",
    "downloads from a bucket": "drafter: {pools: {default: {model: {source: url, url: 's3://m/d'}}}}",
    "two models": "models: [{name: a, verifier: {model: {source: hf, repo: x/a}}, drafter: {pools: {p: {}}}}, {name: b}]",
    "a model over two machines": "verifier: {nodes: 2, settings: {tensor_parallel: 2}}",
    "discovery by the API server": "discovery: {mode: kubernetes}\nnetworkPolicy: {apiServerPorts: [443, 16443]}",
}


def needed(name: str) -> Iterator[Connection]:
    """What the parts dial, from the settings of each value set."""
    yield Connection("gateway", 50052, "verifier")
    yield Connection("verifier", 50061, "drafter")
    yield Connection("test", 50051, "gateway")
    for part in ("gateway", "verifier", "drafter", "test"):
        for port in (53, 5353):  # OpenShift's DNS pods listen on 5353, and policies see the port of the pod
            yield from (Connection(part, port, "", protocol) for protocol in ("UDP", "TCP"))
    for part in ("gateway", "verifier", "drafter"):
        yield Connection(part, 6380, "") if name == "external Redis" else Connection(part, 6379, "redis")
    match name:
        case "tracing":
            yield from (
                Connection("gateway", 4317, ""),
                Connection("verifier", 443, ""),
                Connection("drafter", 14317, ""),
            )
        case "workers of another release":
            yield from (Connection("gateway", 7001, ""), Connection("verifier", 7002, ""))
        case "downloads from a bucket":
            yield Connection("drafter", 443, "")
        case "downloads through a proxy":
            yield from (
                Connection(part, port, "") for part in ("gateway", "verifier") for port in (443, 3128, 3129, 9000, 80)
            )
        case "downloads" | "two models":
            yield from (Connection("gateway", 443, ""), Connection("verifier", 443, ""))
        case "a model over two machines":
            yield from (Connection("verifier", port, "verifier") for port in (29500, 41234))
        case "discovery by the API server":
            yield from (Connection(part, port, "") for part in ("gateway", "verifier") for port in (443, 16443))


@pytest.mark.parametrize("name", VALUE_SETS)
def test_policies_allow_every_connection_that_is_needed(helm, name):
    objects = helm.rendered(VALUE_SETS[name])
    refused = [c for c in needed(name) if not allowed(objects, c)]
    assert refused == []


def test_the_check_of_policies_finds_traffic_that_no_service_needs(helm):
    """The walk can fail: no part calls another one's part, nor anything outside."""
    objects = helm.rendered("")
    unneeded = [
        ("gateway", 50061, "drafter"),
        ("drafter", 50052, "verifier"),
        ("drafter", 443, ""),
        ("gateway", 4317, ""),
        ("verifier", 29500, "verifier"),
        ("gateway", 443, "", "UDP"),
        ("verifier", 50061, "drafter", "UDP"),
    ]
    assert [c for c in unneeded if allowed(objects, Connection(*c))] == []
    proxied = helm.rendered(VALUE_SETS["downloads through a proxy"])
    assert [c for c in (("drafter", 3128, ""), ("gateway", 1, "")) if allowed(proxied, Connection(*c))] == []


def test_operators_of_the_cluster_reach_what_they_ask(helm):
    """KEDA the scaler, Prometheus the admin ports of the services; nobody else's namespace either."""
    policies = "networkPolicy: {prometheusNamespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}"
    objects = helm.rendered(KEDA + policies)
    for role in ("gateway", "verifier", "drafter"):
        assert enters(objects, role, "admin", "monitoring")
        assert not enters(objects, role, "admin", "keda")
    assert enters(objects, "gateway", "scaler", "keda")
    assert not enters(objects, "gateway", "scaler", "monitoring")
    assert not enters(objects, "redis", "redis", "monitoring")


def enters(objects, role: str, port: str, namespace: str) -> bool:
    """Whether pods of a namespace are admitted to a port of a role."""
    labels = {"kubernetes.io/metadata.name": namespace}
    return any(
        any(p["port"] == port for p in rule["ports"])
        and any(
            peer["namespaceSelector"].get("matchLabels", {}).items() <= labels.items()
            for peer in rule["from"]
            if "namespaceSelector" in peer
        )
        for policy in policies_of(objects, by_role(objects)[role])
        for rule in policy["spec"].get("ingress", [])
        if "from" in rule
    )


def test_releases_in_a_namespace_do_not_reach_each_other(helm):
    done = helm.run("template", "blue", str(CHART), "--namespace", "llm", *REGISTRY)
    ours, theirs = helm.rendered(""), parsed(done.stdout)
    both = [*ours, *theirs]
    for connection in (c for c in needed("defaults") if c.target):
        assert admitted(both, by_role(ours)[connection.source], by_role(ours)[connection.target], connection.port)
        if connection.target != "gateway":  # which takes requests from everybody
            assert not admitted(
                both, by_role(ours)[connection.source], by_role(theirs)[connection.target], connection.port
            )


def test_a_release_takes_drafts_from_another_one(helm):
    """Its verifiers dial drafters of the other release, which admits them where its values say so."""
    flags = ("--namespace", "llm", "-f", "-", *REGISTRY)
    verifiers = "{podSelector: {matchLabels: {app.kubernetes.io/instance: rw, app.kubernetes.io/component: verifier}}}"
    shared = f"networkPolicy: {{workerClients: [{verifiers}]}}"
    ours = helm.rendered("discovery: {drafters: ['default=blue-rootward-drafter-default:50061']}")
    for values, expected in ((shared, True), ("{}", False)):
        theirs = parsed(helm.run("template", "blue", str(CHART), *flags, stdin=values).stdout)
        drafter = by_role(theirs)["drafter"]
        assert admitted([*ours, *theirs], by_role(ours)["verifier"], drafter, 50061) is expected
        assert not admitted([*ours, *theirs], by_role(ours)["gateway"], drafter, 50061)


def by_role(objects) -> dict[str, dict]:
    return {p["metadata"]["labels"]["app.kubernetes.io/component"]: p for p in pods(objects).values()}


def allowed(objects, connection: Connection) -> bool:
    found = by_role(objects)
    return admitted(
        objects, found[connection.source], found.get(connection.target), connection.port, connection.protocol
    )


def admitted(objects, source, target, port: int, protocol: str = "TCP") -> bool:
    """Whether egress of the source and ingress of the target admit it, as NetworkPolicies are defined. target None: an address outside."""
    every = [{"port": port, "protocol": protocol}]  # of a rule that names none
    leaves = any(
        admits(rule.get("to"), target)
        and any((p["port"], p["protocol"]) == (port, protocol) for p in rule.get("ports", every))
        for policy in policies_of(objects, source)
        for rule in policy["spec"].get("egress", [])
    )
    if target is None:
        return leaves
    names = {p["name"]: p["containerPort"] for c in target["spec"]["containers"] for p in c.get("ports", [])}
    enters = any(
        admits(rule.get("from"), source)
        and any((names.get(p["port"], p["port"]), p["protocol"]) == (port, protocol) for p in rule.get("ports", every))
        for policy in policies_of(objects, target)
        for rule in policy["spec"].get("ingress", [])
    )
    return leaves and enters


def policies_of(objects, pod) -> list[dict]:
    return [p for p in of_kind(objects, "NetworkPolicy") if matches(p["spec"]["podSelector"], pod)]


def matches(selector, pod) -> bool:
    return selector["matchLabels"].items() <= pod["metadata"]["labels"].items()


def admits(peers, pod) -> bool:
    """No peers: everybody, addresses outside the release too."""
    return not peers or (pod is not None and any("podSelector" in p and matches(p["podSelector"], pod) for p in peers))


REGISTRY = ("--set", "global.imageRegistry=registry.example.com/rootward")


def test_every_container_has_a_memory_limit(helm: Helm):
    for where, pod in pods(helm.rendered(DOWNLOADED)).items():
        for container in containers(pod):
            assert "memory" in container["resources"]["limits"], where
