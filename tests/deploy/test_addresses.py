"""Where things are, as the chart writes it: Redis of every kind as services read it, and the gateway's face under TLS."""

from __future__ import annotations

import pytest
from redis.asyncio.sentinel import SentinelConnectionPool
from support.helm import named, of_kind

from drafter_service.settings import DrafterSettings
from gateway.settings import GatewaySettings
from rootward.redis_client import open_redis
from verifier_service.settings import VerifierSettings

SETTINGS = {"gateway": GatewaySettings, "verifier": VerifierSettings, "drafter-default": DrafterSettings}
SENTINELS = "redis: {mode: external, external: {url: 'rediss+sentinel://s-0:26379,s-1/main/2', ports: [26379, 6379]}}"
TLS = "tls: {mode: certManager}"


def variables(objects, part: str) -> dict[str, dict]:
    deployment = named(objects, "Deployment", f"rw-rootward-{part}")
    return {v["name"]: v for v in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize("part", SETTINGS)
async def test_services_read_the_url_of_sentinels(helm, part, monkeypatch, tmp_path):
    objects = helm.rendered(SENTINELS)
    assert not any(o["metadata"]["name"].endswith("-redis") for o in objects)
    monkeypatch.setenv("ROOTWARD_REDIS_URL", variables(objects, part)["ROOTWARD_REDIS_URL"]["value"])
    path = tmp_path / "settings.yaml"
    path.write_text(named(objects, "ConfigMap", f"rw-rootward-{part}")["data"]["settings.yaml"], encoding="utf-8")
    url = SETTINGS[part].load(["--config", str(path)]).redis_url
    client = open_redis(url, timeout_s=1.0)
    try:
        pool = client.connection_pool
        assert isinstance(pool, SentinelConnectionPool)
        sentinels = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
        assert [(s["host"], s["port"]) for s in sentinels] == [("s-0", 26379), ("s-1", 26379)]
        assert (pool.service_name, pool.connection_kwargs["db"]) == ("main", 2)
        assert "SSL" in pool.connection_class.__name__
    finally:
        await client.aclose()


def test_sentinels_and_servers_may_be_called(helm):
    for policy in of_kind(helm.rendered(SENTINELS), "NetworkPolicy"):
        if policy["metadata"]["name"].endswith(("-gateway", "-verifier", "-drafter")):
            ports = [p["port"] for rule in policy["spec"]["egress"] if "to" not in rule for p in rule["ports"]]
            assert ports == [26379, 6379]


@pytest.mark.parametrize("per_role", [False, True])
def test_an_external_redis_may_have_a_url_for_each_role(helm, per_role):
    external = f"{{existingSecret: urls, perRole: {str(per_role).lower()}, caSecret: ca}}"
    objects = helm.rendered(f"redis: {{mode: external, external: {external}}}")
    for part in SETTINGS:
        source = variables(objects, part)["ROOTWARD_REDIS_URL"]["valueFrom"]["secretKeyRef"]
        assert source == {"name": "urls", "key": part.partition("-")[0] if per_role else "url"}


def ports(objects, service: str) -> dict[str, str]:
    return {p["name"]: p["appProtocol"] for p in named(objects, "Service", service)["spec"]["ports"]}


def test_ports_have_their_protocols(helm):
    scaler = "gateway: {scaler: {port: 50053}}"
    plain, secured = helm.rendered(scaler), helm.rendered(f"{scaler}\n{TLS}")
    h2c = "kubernetes.io/h2c"
    assert ports(plain, "rw-rootward-gateway") == {"grpc": h2c, "http": "http"}
    assert ports(plain, "rw-rootward-gateway-scaler") == {"scaler": h2c}
    assert ports(secured, "rw-rootward-gateway") == dict.fromkeys(("grpc", "http"), "https")
    assert ports(secured, "rw-rootward-gateway-scaler") == {"scaler": "https"}
    assert ports(plain, "rw-rootward-verifier") == {"grpc": h2c}
    assert ports(secured, "rw-rootward-verifier") == {"grpc": "https"}


ROUTES = (
    "gateway: {route: {enabled: true, parentRefs: [{name: public}], hostnames: [x.example], grpcHostnames: [grpc.example]%s},"
    " ingress: {enabled: true, host: x.example%s}}"
)


def test_routes_call_the_gateway_over_tls_and_check_its_name(helm):
    assert not of_kind(helm.rendered(ROUTES % ("", "")), "BackendTLSPolicy")
    objects = helm.rendered(f"{ROUTES % ('', '')}\n{TLS}")
    (policy,) = of_kind(objects, "BackendTLSPolicy")
    service = named(objects, "Service", "rw-rootward-gateway")
    meant = [(t["kind"], t["name"], t["sectionName"]) for t in policy["spec"]["targetRefs"]]
    routed = {r["kind"]: r["spec"]["rules"][0]["backendRefs"][0] for r in objects if r["kind"].endswith("Route")}
    named_ports = {p["port"]: p["name"] for p in service["spec"]["ports"]}
    assert meant == [("Service", b["name"], named_ports[b["port"]]) for b in (routed["GRPCRoute"], routed["HTTPRoute"])]
    certificate = named(objects, "Certificate", "rw-rootward-gateway")["spec"]
    assert policy["spec"]["validation"]["hostname"] in certificate["dnsNames"]
    (authority,) = policy["spec"]["validation"]["caCertificateRefs"]
    assert (authority["kind"], authority["name"]) == ("Secret", certificate["secretName"])


def test_an_authority_of_ones_own_is_named(helm):
    own = ", caCertificateRef: {group: '', kind: ConfigMap, name: ca}"
    (policy,) = of_kind(helm.rendered(f"{ROUTES % (own, '')}\n{TLS}"), "BackendTLSPolicy")
    assert policy["spec"]["validation"]["caCertificateRefs"] == [{"group": "", "kind": "ConfigMap", "name": "ca"}]


def test_an_ingress_is_annotated_for_a_gateway_with_tls(helm):
    key = "nginx.ingress.kubernetes.io/backend-protocol"
    (plain,) = of_kind(helm.rendered(ROUTES % ("", "")), "Ingress")
    assert "annotations" not in plain["metadata"]
    (secured,) = of_kind(helm.rendered(f"{ROUTES % ('', '')}\n{TLS}"), "Ingress")
    assert secured["metadata"]["annotations"] == {key: "HTTPS"}
    (own,) = of_kind(helm.rendered(f"{ROUTES % ('', f', annotations: {{{key}: GRPCS}}')}\n{TLS}"), "Ingress")
    assert own["metadata"]["annotations"] == {key: "GRPCS"}
