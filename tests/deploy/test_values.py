"""Values, their schema and their page have one source; what the chart writes are settings that the services take."""

import importlib
import re
import sys

import pytest
import yaml
from support.helm import CHART, ROOT, VALUE_SETS, Objects, named, of_kind

from drafter_service.settings import DrafterSettings
from gateway.settings import GatewaySettings
from verifier_service.settings import VerifierSettings

SETTINGS = {"gateway": GatewaySettings, "verifier": VerifierSettings, "drafter": DrafterSettings}


@pytest.fixture(scope="module")
def source():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "deploy" / "helm")
        return importlib.import_module("values_source")


@pytest.fixture(scope="module")
def own(source):
    """Settings that the chart computes itself."""
    return sys.modules["values_words"].OWN


def test_what_was_written_is_what_would_be_written(source):
    for path, content in source.outputs().items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: run python deploy/helm/values_source.py"


def test_every_setting_is_the_charts_or_the_users(own):
    """A new setting of a service appears in the schema by itself; one the chart computes must really be computed."""
    schema = yaml.safe_load((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
    given = {
        "gateway": schema["gateway"]["properties"]["settings"]["properties"],
        "verifier": schema["verifier"]["properties"]["settings"]["properties"],
        "drafter": schema["drafter"]["properties"]["defaults"]["properties"]["settings"]["properties"],
    }
    for role, settings in SETTINGS.items():
        fields = settings.model_fields
        assert set(given[role]) == set(fields) - own, role
        for name, spec in given[role].items():
            default = fields[name].get_default(call_default_factory=True)
            assert spec.get("default") == (default.value if hasattr(default, "value") else default), name


def files(objects: Objects) -> dict[str, str]:
    return {
        o["metadata"]["labels"]["app.kubernetes.io/component"]: o["data"]["settings.yaml"]
        for o in of_kind(objects, "ConfigMap")
        if "settings.yaml" in o["data"]
    }


@pytest.mark.parametrize("name", VALUE_SETS)
def test_services_take_the_files_that_the_chart_writes(helm, name, tmp_path, monkeypatch):
    monkeypatch.setenv("ROOTWARD_REDIS_URL", "redis://redis:6379/0")  # the pods have it from a Secret
    for role, text in files(helm.objects(name)).items():
        path = tmp_path / f"{role}.yaml"
        path.write_text(text, encoding="utf-8")
        settings = SETTINGS[role].load(["--config", str(path)])
        assert settings.admin_listen == "0.0.0.0:9090"
        assert settings.shutdown_timeout_s > 0


def test_a_setting_reaches_the_service(helm, tmp_path):
    objects = helm.rendered("verifier: {settings: {num_draft_tokens: 48, draft_wait_ms: 12.5}}")
    path = tmp_path / "verifier.yaml"
    path.write_text(files(objects)["verifier"], encoding="utf-8")
    settings = VerifierSettings.load(["--config", str(path)])
    assert (settings.num_draft_tokens, settings.draft_wait_ms) == (48, 12.5)


def test_one_key_overrides_one_pool(helm):
    objects = helm.rendered("drafter: {defaults: {replicas: 3}, pools: {slow: {rows: 8}, default: null}}")
    deployment = named(objects, "Deployment", "rw-rootward-drafter-slow")
    assert deployment["spec"]["replicas"] == 3
    assert yaml.safe_load(files(objects)["drafter"])["max_num_batched_tokens"] == 8
    assert len([o for o in of_kind(objects, "Deployment") if "drafter" in o["metadata"]["name"]]) == 1


def test_a_replica_counts_for_the_rows_that_its_trees_can_fill(helm):
    fields = DrafterSettings.model_fields
    assert (fields["max_num_seqs"].default, fields["draws_per_level"].default) == (16, 4), "as in drafter/scaling.yaml"
    scaled = "autoscaling: {mode: hpa, targetUtilization: 0.5, guardUtilization: 0.9}"
    for rows, seats, expected in ((32, 100, "16000m"), (512, 100, "200000m"), (512, 16, "32000m")):
        values = f"drafter: {{pools: {{default: {{rows: {rows}, settings: {{max_num_seqs: {seats}}}, {scaled}}}}}}}"
        hpa = named(helm.rendered(values), "HorizontalPodAutoscaler", "rw-rootward-drafter-default")
        rows_of_demand, places_of_sessions = (
            m["external"]["target"]["averageValue"] for m in hpa["spec"]["metrics"][:2]
        )
        assert rows_of_demand == expected
        assert places_of_sessions == f"{900 * seats}m"


def test_targets_are_whole_milli_units(helm):
    """84 over 2.8 is 30 for an HPA; 2.8 as a float would make it 31."""
    objects = helm.objects("hpa")
    hpa = named(objects, "HorizontalPodAutoscaler", "rw-rootward-drafter-default")
    targets = [list(m["external"]["target"].values())[1] for m in hpa["spec"]["metrics"]]
    assert targets == ["2800m", "14400m", "850m", "100m"]


def test_pools_that_are_not_trusted_are_verified_by_match(helm):
    values = "drafter: {pools: {spot: {trusted: false}}}\nverifier: {settings: {untrusted_pools: [theirs]}}"
    settings = yaml.safe_load(files(helm.rendered(values))["verifier"])
    assert settings["untrusted_pools"] == ["theirs", "spot"]
    assert "untrusted_pools" not in yaml.safe_load(files(helm.rendered(""))["verifier"])


def test_redis_refuses_writes_before_the_kernel_ends_it(helm):
    """Its clients' buffers and fragmentation need the rest."""
    (redis,) = [o for o in of_kind(helm.rendered(""), "StatefulSet") if o["metadata"]["name"].endswith("redis")]
    (container,) = redis["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    (limit,) = re.findall(r"^(\d+)Mi$", container["resources"]["limits"]["memory"])
    (maxmemory,) = re.findall(r"^(\d+)mb$", arguments[arguments.index("--maxmemory") + 1])
    assert int(maxmemory) <= 0.8 * int(limit)
    assert arguments[arguments.index("--maxmemory-policy") + 1] == "noeviction"
