"""`helm upgrade` from the version before: the API server takes it, and pods restart only for a reason."""

from __future__ import annotations

import tarfile

import pytest
import yaml
from support.helm import CHART, REGISTRY, ROOT, parsed, pods

BEFORE = ROOT / "tests" / "data" / "charts" / "rootward-0.1.0.tgz"  # as packaged, with its values of ci/


def values_before() -> dict[str, str]:
    with tarfile.open(BEFORE) as archive:
        names = [name for name in archive.getnames() if "/ci/" in name]
        return {name.rpartition("/")[2]: archive.extractfile(name).read().decode() for name in sorted(names)}


VALUES = values_before()
# Fields that an API server refuses to change (`Forbidden: updates to … are forbidden`).
IMMUTABLE = {
    "Deployment": ["selector"],
    "StatefulSet": ["selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"],
    "Service": ["clusterIP"],
    "PersistentVolumeClaim": ["accessModes", "storageClassName", "volumeName"],
    "Job": ["selector", "template", "completionMode"],
    "RoleBinding": ["roleRef"],
}


@pytest.fixture(params=VALUES)
def releases(request, helm):
    """(before, after): the objects of both versions for the same values."""
    values = VALUES[request.param]
    flags = ("--namespace", "llm", "-f", "-")
    if "imageRegistry" not in values:
        flags += ("--set", f"global.imageRegistry={REGISTRY}")
    kept = ("--set", "redis.keyPrefix=rw") if "mode: external" in values else ()  # as docs/operations/upgrades.md says
    done = [
        helm.run("template", "rw", *where, *flags, stdin=values)
        for where in ((str(BEFORE),), (str(CHART), "--is-upgrade", *kept))
    ]
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    return tuple({(o["kind"], o["metadata"]["name"]): o for o in parsed(one.stdout)} for one in done)


def test_the_chart_is_newer_than_the_one_before():
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"]
    assert tuple(map(int, version.split("."))) > (0, 1, 0)


def test_no_immutable_field_changes(releases):
    before, after = releases
    for key, old in before.items():
        for field in IMMUTABLE.get(key[0], []):
            was, now = (o.get("spec", o).get(field, o.get(field)) for o in (old, after.get(key, old)))
            assert was == now, (key, field)


def test_nothing_that_serves_or_holds_state_is_renamed(releases):
    """A new name is a new object: the old one is deleted first."""
    before, after = releases
    kinds = {"Deployment", "StatefulSet", "Service", "PersistentVolumeClaim", "Secret", "ServiceAccount"}
    assert {key for key in before if key[0] in kinds} <= set(after)


def test_only_redis_and_pods_that_download_a_model_restart(releases):
    """0.2.0 downloads by another command and pins the image of Redis. GPUs keep their weights."""
    before, after = (pods(list(objects.values())) for objects in releases)
    changed = {name for name, pod in before.items() if after[name] != pod and not name.startswith("Pod/")}
    redis = {name for name in before if name.startswith("StatefulSet/")}
    assert changed == redis | {name for name, pod in before.items() if pod["spec"].get("initContainers")}


def test_a_selector_that_changes_is_noticed(releases):
    before, after = releases
    changed = {key: {**o, "spec": {**o["spec"], "selector": {}}} for key, o in after.items() if key[0] == "Deployment"}
    with pytest.raises(AssertionError, match="selector"):
        test_no_immutable_field_changes((before, {**after, **changed}))


def upgraded(helm, before: str, after: str) -> list[dict]:
    """The objects of this chart for values before and after, as {(kind, name): object}."""
    flags = ("--namespace", "llm", "--set", f"global.imageRegistry={REGISTRY}", "-f", "-")
    done = [helm.run("template", "rw", str(CHART), *flags, stdin=values) for values in (before, after)]
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    return [{(o["kind"], o["metadata"]["name"]): o for o in parsed(one.stdout)} for one in done]


def test_a_second_machine_replaces_the_verifiers_and_nothing_else(helm):
    kept = "redis: {auth: {existingSecret: u}}\nverifier: {replicas: 2, settings: {tensor_parallel: 2}"
    before, after = upgraded(helm, f"{kept}}}", f"{kept}, nodes: 2}}")
    gone = ("Deployment", "rw-rootward-verifier")
    assert set(before) - set(after) == {gone}
    test_no_immutable_field_changes((before, after))
    was, now = (pods(list(objects.values())) for objects in (before, after))
    assert {name for name, pod in was.items() if now.get(name) != pod} == {"/".join(gone)}


def test_another_key_prefix_restarts_redis_and_all_that_use_it(helm):
    kept = "redis: {auth: {existingSecret: u}, keyPrefix: %s}"
    before, after = upgraded(helm, kept % "rw", kept % "blue")
    test_no_immutable_field_changes((before, after))
    was, now = (pods(list(objects.values())) for objects in (before, after))
    assert {name for name in was if was[name] != now[name]} == {name for name in was if not name.startswith("Pod/")}
