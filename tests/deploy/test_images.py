"""The images as the pods run them: what the chart writes as settings and security context, on podman, and `helm test` against it.

`deploy/docker/build.sh` first (it needs no Docker engine and, with BASE=debootstrap, no registry of images); else this is skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from contextlib import ExitStack, contextmanager

import pytest
from support.helm import CHART, ROOT, named, pods
from support.processes import free_port, wait_until
from support.redis import running_redis

from rootward import Client

pytestmark = [pytest.mark.services, pytest.mark.long, pytest.mark.timeout(600)]

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
# For confined machines: no cgroups of systemd, no limits above those of the caller.
CONFINED = ("--cgroup-manager", "cgroupfs", "--runtime", "runc")
LIMITS = ("--network", "host", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=2048:2048")


def podman(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", *CONFINED, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module", autouse=True)
def images():
    if shutil.which("podman") is None:
        pytest.skip("NO PODMAN: the images are not run; install Debian's packages podman, buildah, runc")
    for name in ("slim", "worker"):
        if podman("image", "exists", f"rootward/{name}:{VERSION}").returncode:
            pytest.skip(f"NO IMAGE rootward/{name}:{VERSION}; run deploy/docker/build.sh")


def inside(image: str, script: str) -> str:
    """What a Python script prints in the container of an image."""
    flags = ("--rm", *LIMITS, "--read-only", "--tmpfs", "/tmp", "--entrypoint", "python3")
    done = podman("run", *flags, f"rootward/{image}:{VERSION}", "-c", script)
    assert done.returncode == 0, done.stderr
    return done.stdout


def normalised(name: str) -> str:
    """The name of a package as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("image", ["slim", "worker"])
def test_every_version_is_that_of_the_constraints(image):
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    wanted = {normalised(name): version for name, version in pins.items()} | {"rootward": VERSION}
    script = "import importlib.metadata as m\nfor d in m.distributions(): print(d.metadata['Name'], d.version)"
    found = {normalised(name): version for name, version in map(str.split, inside(image, script).splitlines())}
    for tool in ("pip", "setuptools"):  # a venv of the base image brings them
        found.pop(tool, None)
    assert {name: version.partition("+")[0] for name, version in found.items()} == {
        name: wanted.get(name) for name in found
    }


@pytest.mark.parametrize("image", ["slim", "worker"])
def test_what_settings_can_ask_for_is_there(image):
    names = ["kubernetes.aio", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc", "uvloop"]
    names += ["torch", "llguidance", "accelerate", "peft"] if image == "worker" else []
    inside(image, f"import importlib\nfor name in {names}: importlib.import_module(name)")
    if image == "slim":
        assert "None" in inside(image, "import importlib.util; print(importlib.util.find_spec('torch'))")


@pytest.mark.parametrize("image", ["slim", "worker"])
def test_bytecode_is_valid_by_hash_and_our_code_is_a_small_layer(image):
    """A bytecode file that is valid by time holds the time of the build: no two builds are alike, and none of it is ever used."""
    script = """
import pathlib, sysconfig
flags = [path.read_bytes()[4] for path in pathlib.Path(sysconfig.get_path("purelib")).rglob("__pycache__/*.pyc")]
print(len(flags), sum(flag & 1 for flag in flags))"""
    every, by_hash = map(int, inside(image, script).split())
    assert every == by_hash > 1000
    layers = json.loads(podman("history", "--format", "json", f"rootward/{image}:{VERSION}").stdout)
    ours, libraries = [layer["size"] for layer in layers if layer["size"] > 1_000_000][:2]
    assert ours < 30_000_000 < libraries


def confinement(pod) -> list[str]:
    """The security context of a pod as flags of podman."""
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    dropped = [flag for name in context["capabilities"]["drop"] for flag in ("--cap-drop", name)]
    return ["--read-only", "--tmpfs", "/tmp", "--user", user, "--security-opt", "no-new-privileges", *dropped]


@contextmanager
def running(pod, settings, *flags: str, env: str):
    """A container of a pod of the chart; yields its gRPC address."""
    (container,) = pod["spec"]["containers"]
    name = f"rootward-test-{container['name']}-{free_port()}"
    command = ["podman", *CONFINED, "run", "--rm", "--name", name, *LIMITS, *confinement(pod), "--env", env]
    command += [
        "--volume",
        f"{settings}:/etc/rootward/settings.yaml:ro",
        container["image"],
        *container["args"],
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        found = re.search(r"listening on (\S+:\d+)", process.stdout.readline())
        assert found, f"{name} did not start: {' '.join(command)}"
        yield found[1]
        stopped = podman("stop", "--time", str(pod["spec"]["terminationGracePeriodSeconds"]), name)
        assert stopped.returncode == 0, stopped.stderr
        assert process.wait(60) == 0  # SIGTERM ended it, within its grace
    finally:
        podman("rm", "--force", "--ignore", name)
        process.kill()
        process.wait(20)


def test_the_images_run_the_demo_as_the_pods_do(helm, tmp_path):
    objects = helm.rendered("")
    every = pods(objects)
    with running_redis() as url, ExitStack() as stack:

        def start(part: str, *flags: str) -> str:
            path = tmp_path / f"{part}.yaml"
            path.write_text(named(objects, "ConfigMap", f"rw-rootward-{part}")["data"]["settings.yaml"])
            own = ("--listen", "127.0.0.1:0", "--admin-listen", f"127.0.0.1:{free_port()}", *flags)
            pod = every[f"Deployment/rw-rootward-{part}"]
            return stack.enter_context(running(pod, path, *own, env=f"ROOTWARD_REDIS_URL={url}"))

        start("drafter-default")
        start("verifier")
        address = start("gateway", "--http-listen", "127.0.0.1:0")
        with Client(address) as client:
            wait_until(lambda: client.server_info().drafters, what="the drafter, through the registry")
        test = every["Pod/rw-rootward-test"]
        script, program = str(CHART / "files" / "check.py"), test["spec"]["containers"][0]["command"][0]
        image = test["spec"]["containers"][0]["image"]
        flags = [
            "--rm",
            *LIMITS,
            *confinement(test),
            "--volume",
            f"{script}:/check/check.py:ro",
            "--entrypoint",
            program,
        ]
        done = podman("run", *flags, image, "/check/check.py", address)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "equals plain decoding" in done.stdout
        inside = podman(
            "run", "--rm", *LIMITS, *confinement(test), "--entrypoint", "sh", image, "-c", "id -u; touch /opt/x"
        )
        assert inside.stdout.strip() == "10001"
        assert "Read-only file system" in inside.stderr
