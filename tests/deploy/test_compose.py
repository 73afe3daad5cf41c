"""compose.yaml: services take its flags, and its grace periods are those of the chart."""

import re

import pytest
import yaml
from support.helm import CHART, ROOT

from drafter_service.settings import DrafterSettings
from gateway.settings import GatewaySettings
from verifier_service.settings import VerifierSettings

SETTINGS = {"gateway": GatewaySettings, "verifier": VerifierSettings, "drafter": DrafterSettings}
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))["services"]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("role", SETTINGS)
def test_services_take_the_flags_and_have_time_to_drain(role):
    service = COMPOSE[role]
    verb, named, *flags = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(word)) for word in service["command"]]
    assert (verb, named) == ("serve", role)
    settings = SETTINGS[role].load(flags)
    drain = (VALUES["drafter"]["defaults"] if role == "drafter" else VALUES[role])["drain"]
    assert settings.shutdown_timeout_s == drain["timeoutSeconds"]
    assert int(service["stop_grace_period"].rstrip("s")) >= drain["timeoutSeconds"] + drain["marginSeconds"]


@pytest.mark.parametrize("role", SETTINGS)
def test_containers_are_confined(role):
    service = COMPOSE[role]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["user"] == "10001:10001"


def test_ports_without_keys_are_those_of_this_machine_alone():
    words = COMPOSE["gateway"]["command"]
    for flag in ("--listen", "--http-listen"):
        port = words[words.index(flag) + 1].rpartition(":")[2]
        assert f"127.0.0.1:{port}:{port}" in COMPOSE["gateway"]["ports"]
    published = [port for service in COMPOSE.values() for port in service.get("ports", ())]
    assert "--api-keys" in words or all(port.startswith("127.0.0.1:") for port in published)


def test_the_image_runs_as_the_pods_do():
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert "USER 10001:10001" in text
    assert VALUES["global"]["podSecurityContext"]["runAsUser"] == 10001


def test_redis_refuses_writes_before_the_kernel_ends_it():
    words = " ".join(COMPOSE["redis"]["command"])
    assert int(re.search(r"--maxmemory (\d+)mb", words)[1]) < int(COMPOSE["redis"]["mem_limit"].rstrip("m"))


@pytest.mark.parametrize("role", SETTINGS)
def test_our_images_are_built_and_never_pulled(role):
    """Compose pulls an image that is not there before it builds one, by a name that we do not own on a public registry."""
    assert COMPOSE[role]["pull_policy"] == "build"
    assert COMPOSE[role]["build"]["target"] == COMPOSE[role]["image"].partition(":")[0].removeprefix("rootward/")
