"""What `helm test` runs, run: against a gateway that asks for keys, over mutual TLS, as the pod of the chart calls it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import yaml
from support.certificates import Authority, spiffe
from support.helm import CHART, ROOT, named
from support.processes import drafter, gateway, verifier, wait_until

from rootward import Client, demo
from rootward.keys import digest, new_key

SECURED = "{tls: {mode: certManager}, gateway: {auth: {existingSecret: keys}}, tests: {apiKeySecret: test-key}}"


def flags_of(files, *peers: str) -> tuple[str, ...]:
    paths = (
        "--tls-certificate",
        str(files.certificate),
        "--tls-key",
        str(files.key),
        "--tls-authority",
        str(files.authority),
    )
    return (*paths, "--tls-peers", ",".join(peers)) if peers else paths


def check(address: str, authority: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHART / "files" / "check.py"), address, str(authority)]
    variables = {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.services
def test_it_passes_with_the_key_and_reports_what_is_missing_without(tmp_path):
    pair, authority, key = demo.paths(), Authority(tmp_path), new_key()
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [{"name": "test", "sha256": digest(key)}]}), encoding="utf-8")
    own = {role: authority.issue(role) for role in ("gateway", "verifier", "drafter")}
    trusted_by_all = Authority(tmp_path, "public")
    public = trusted_by_all.issue("public")
    shown = ("--public-tls-certificate", str(public.certificate), "--public-tls-key", str(public.key))
    with ExitStack() as running:
        enter = running.enter_context
        draft = enter(drafter(str(pair.draft), *flags_of(own["drafter"], spiffe("verifier"))))
        target = enter(verifier(str(pair.target), [draft.address], *flags_of(own["verifier"], spiffe("gateway"))))
        front = enter(
            gateway(str(pair.target), [target.address], *flags_of(own["gateway"]), *shown, "--api-keys", str(keys))
        )
        trusted = grpc.ssl_channel_credentials(trusted_by_all.file.read_bytes())
        with Client(front.address, tls=trusted, api_key=key) as client:
            wait_until(lambda: client.server_info().drafters, what="the drafter")
        passed = check(front.address, trusted_by_all.file, {"ROOTWARD_API_KEY": key})
        assert passed.returncode == 0, passed.stderr
        assert "equals plain decoding" in passed.stdout
        for variable, told in (("LEAST_MODELS", f"models: {pair.target.name}; "), ("LEAST_DRAFTERS", "drafters: ")):
            missing = check(front.address, trusted_by_all.file, {"ROOTWARD_API_KEY": key, variable: "2"})
            assert missing.returncode == 1
            assert missing.stdout.startswith(told)
            assert "the release has 2 or more" in missing.stdout
        refused = check(front.address, trusted_by_all.file, {})
        assert refused.returncode == 1
        assert "AuthenticationError" in refused.stderr


def test_the_pod_has_the_key_and_the_authority(helm):
    pod = named(helm.rendered(SECURED), "Pod", "rw-rootward-test")["spec"]
    (container,) = pod["containers"]
    (key,) = [v["valueFrom"]["secretKeyRef"] for v in container["env"] if v["name"] == "ROOTWARD_API_KEY"]
    assert key == {"name": "test-key", "key": "key"}
    authority = container["command"][-1]
    (mount,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "tls"]
    (volume,) = [v["secret"] for v in pod["volumes"] if v["name"] == "tls"]
    assert [f"{mount}/{item['path']}" for item in volume["items"]] == [authority]
    assert not any("tls.key" in str(item) for item in volume["items"])


# One pool may have no drafter; beside them is that of the default values.
POOLS = (
    "{a: {replicas: 2}, b: {autoscaling: {mode: hpa, minReplicas: 3}}, c: {autoscaling: {mode: keda, minReplicas: 0}}}"
)
SEVERAL = "{models: [{name: small, drafter: {pools: {d: {replicas: 1}}}}, {name: large}]}"


@pytest.mark.parametrize(
    ("values", "expected"), [(f"{{drafter: {{pools: {POOLS}}}}}", ("1", "3")), (SEVERAL, ("2", "1"))]
)
def test_the_pod_knows_how_much_of_the_release_must_be_there(helm, values, expected):
    (container,) = named(helm.rendered(values), "Pod", "rw-rootward-test")["spec"]["containers"]
    told = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (told["LEAST_MODELS"], told["LEAST_DRAFTERS"]) == expected
