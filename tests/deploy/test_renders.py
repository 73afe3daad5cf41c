"""The chart is accepted by the real engine, by the schemas of Kubernetes, and renders to what was reviewed.

UPDATE_GOLDEN=1 rewrites tests/deploy/golden; review the difference.
"""

import copy
import hashlib
import json
import os
from pathlib import Path

import pytest
import yaml
from support.helm import CHART, CRDS, CUSTOM, VALUE_SETS, check_custom_resource

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
LONGEST_TEXT = 3000  # dashboards are reviewed where they lie


def normalised(objects) -> str:
    def short(value):
        if isinstance(value, dict):
            return {key: short(part) for key, part in value.items()}
        if isinstance(value, list):
            return [short(part) for part in value]
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            return f"sha256 {hashlib.sha256(value.encode()).hexdigest()}"
        return value

    ordered = sorted(objects, key=lambda o: (o["kind"], o["metadata"]["name"]))
    return yaml.dump_all([short(o) for o in ordered], Dumper=yaml.CSafeDumper, sort_keys=True, width=140)


def test_lint_is_clean(helm):
    done = helm.run("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("name", VALUE_SETS)
def test_renders_to_what_was_reviewed(helm, name):
    path, text = GOLDEN / f"{name}.yaml", normalised(helm.objects(name))
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name}: review it, then UPDATE_GOLDEN=1"


@pytest.mark.parametrize(("most", "budgets"), [(1, 0), (4, 1)])
@pytest.mark.parametrize("mode", ["hpa", "keda"])
def test_an_autoscaled_part_has_a_budget_where_it_can_have_several_replicas(helm, mode, most, budgets):
    scaled = {"autoscaling": {"mode": mode, "minReplicas": 1, "maxReplicas": most}}
    values = {"redis": {"auth": {"existingSecret": "redis-users"}}, "verifier": scaled}
    objects = helm.rendered(yaml.safe_dump(values | {"drafter": {"pools": {"default": scaled}}}))
    budgeted = [o for o in objects if o["kind"] == "PodDisruptionBudget"]
    roles = [o["metadata"]["labels"]["app.kubernetes.io/component"] for o in budgeted]
    assert (roles.count("verifier"), roles.count("drafter")) == (budgets, budgets)


class Strict(yaml.CSafeLoader):
    """Refuses a key that stands twice in a mapping, as the API server does."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), (
            f"{sorted(keys, key=keys.count)[-1]} stands twice, line {node.start_mark.line}"
        )
        return super().construct_mapping(node, deep)


def test_annotations_of_pods_are_one_mapping_with_those_of_the_chart(helm):
    own = ("kubectl.kubernetes.io/default-container", "checksum/settings", "rootward.dev/model", "helm.sh/hook")
    annotations = json.dumps({"podAnnotations": dict.fromkeys((*own, "mine"), "x")})
    parts = {name: f"{name}: {annotations}" for name in ("gateway", "verifier", "redis", "tests")}
    done = helm.template("\n".join([*parts.values(), f"drafter: {{defaults: {annotations}}}"]))
    assert done.returncode == 0, done.stderr
    objects = [found for found in yaml.load_all(done.stdout, Loader=Strict) if found]
    pods = [o["spec"]["template"]["metadata"] for o in objects if "template" in o.get("spec", {})]
    pods += [o["metadata"] for o in objects if o["kind"] == "Pod"]
    assert len(pods) == 5
    assert all(pod["annotations"]["mine"] == "x" for pod in pods)
    services = [p for p in pods if p["labels"]["app.kubernetes.io/component"] in ("gateway", "verifier", "drafter")]
    assert len(services) == 3
    assert all(pod["annotations"]["checksum/settings"] != "x" for pod in services)


def test_every_golden_has_its_values():
    assert sorted(path.stem for path in GOLDEN.glob("*.yaml")) == VALUE_SETS


def test_older_clusters_are_refused(helm):
    done = helm.template("", "--kube-version", "1.29.9")
    assert done.returncode != 0
    assert "kubeVersion" in done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_exists_in_every_supported_kubernetes_version(helm, version):
    validate = pytest.importorskip("kubernetes_validate")
    unique = {json.dumps(o, sort_keys=True): o for name in VALUE_SETS for o in helm.objects(name)}
    own = [o for o in unique.values() if o["apiVersion"].partition("/")[0] not in CUSTOM]
    assert len(own) > 50
    for o in own:
        validate.validate(o, version, strict=True)


def test_an_image_volume_needs_a_newer_kubernetes(helm):
    """That the validation can fail at all."""
    validate = pytest.importorskip("kubernetes_validate")
    objects = helm.rendered(
        "verifier: {model: {source: image, image: registry.example.com/weights:1}}\n"
        "gateway: {tokenizer: {source: hf, repo: o/t}}"
    )
    verifier = next(o for o in objects if o["kind"] == "Deployment" and o["metadata"]["name"].endswith("verifier"))
    validate.validate(verifier, "1.31", strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate(verifier, "1.30", strict=True)


def test_every_custom_resource_is_valid_under_its_definition(helm):
    """`Helm.rendered` checks the renders of all tests; here is one of every kind, and no definition is left over."""
    found = {
        o["kind"] for name in VALUE_SETS for o in helm.objects(name) if o["apiVersion"].partition("/")[0] in CUSTOM
    }
    assert found == {path.stem for path in CRDS.glob("*.yaml")}
    for path in CRDS.glob("*.yaml"):
        assert "https://" in path.read_text(encoding="utf-8").splitlines()[0]


WRONG = {
    "ScaledObject": [("spec", "fallback", "behaviour"), ("spec", "triggers", 0, "metricTyp")],
    "HTTPRoute": [("spec", "hostname"), ("spec", "rules", 0, "backendRefs", 0, "service")],
    "PodMonitor": [("spec", "podMetricsEndpoints", 0, "relabelling")],
    "Certificate": [("spec", "secret"), ("spec", "issuerRef", "issuer")],
    "PrometheusRule": [("spec", "groups", 0, "rules", 0, "exp")],
}


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, paths in WRONG.items() for path in paths])
def test_an_unknown_field_of_a_custom_resource_is_noticed(helm, kind, path):
    o = copy.deepcopy(next(o for name in VALUE_SETS for o in helm.objects(name) if o["kind"] == kind))
    part = o
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = "x"
    with pytest.raises(AssertionError, match=str(path[-1])):
        check_custom_resource(o)


def test_keda_accepts_a_fallback(helm):
    """KEDA (2.17 or newer) refuses one unless a target is an AverageValue (CheckFallbackValid of its admission webhook)."""
    scaled = [o["spec"] for name in VALUE_SETS for o in helm.objects(name) if o["kind"] == "ScaledObject"]
    assert scaled
    for spec in scaled:
        assert "AverageValue" in {trigger["metricType"] for trigger in spec["triggers"]}
        assert spec["fallback"]["failureThreshold"] >= 0
