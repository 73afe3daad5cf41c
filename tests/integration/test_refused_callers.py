"""Who is refused by the real processes, with which code, and what they write about it: never a key."""

from __future__ import annotations

import re
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from support.certificates import Authority, spiffe
from support.processes import Service, drafter, gateway, verifier, wait_until

from rootward.client import Client
from rootward.errors import (
    APIConnectionError,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
)
from rootward.keys import digest, new_key
from rootward.v1 import control_pb2, drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from rootward.wire.tls import Certificates

pytestmark = pytest.mark.services

MODEL = "tabular:vocab=40,seed=1"
ADMIN, USER, OTHER_MODEL, PAST, WRONG = (new_key() for _ in range(5))


@dataclass
class Guarded:
    authority: Authority
    roles: dict[str, Certificates]
    foreign: Certificates
    expired: Certificates
    drafter: Service
    verifier: Service
    gateway: Service

    def trust(self, own: Certificates | None) -> grpc.ChannelCredentials:
        pair = (own.key.read_bytes(), own.certificate.read_bytes()) if own else (None, None)
        return grpc.ssl_channel_credentials(self.authority.file.read_bytes(), *pair)

    def http(self, own: Certificates | None, key: str | None) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.gateway.http, verify=context, headers=headers, timeout=30)

    def client(self, own: Certificates | None, key: str | None) -> Client:
        return Client(f"grpcs://{self.gateway.address}", api_key=key, tls=self.trust(own), max_retries=0)


def flags(files: Certificates, *peers: str) -> list[str]:
    given = ["--tls-certificate", files.certificate, "--tls-key", files.key, "--tls-authority", files.authority]
    listed = ["--tls-peers", ",".join(map(spiffe, peers))] if peers else []
    return [*map(str, given), *listed]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "foreign").mkdir()
    authority = Authority(folder)
    roles = {role: authority.issue(role) for role in ("gateway", "verifier", "drafter", "client")}
    theirs = Authority(folder / "foreign").issue("client")
    keys = folder / "keys.yaml"
    entries = [
        f"  - {{name: admin, sha256: {digest(ADMIN)}, scopes: [admin]}}",
        f"  - {{name: user, sha256: {digest(USER)}}}",
        f"  - {{name: other, sha256: {digest(OTHER_MODEL)}, models: [another]}}",
        f"  - {{name: past, sha256: {digest(PAST)}, expires: 2020-01-01T00:00:00Z}}",
    ]
    keys.write_text("keys:\n" + "\n".join(entries))
    with ExitStack() as running:
        enter = running.enter_context
        grower = enter(drafter(MODEL, *flags(roles["drafter"], "verifier")))
        target = enter(verifier(MODEL, [grower.address], *flags(roles["verifier"], "gateway")))
        front = enter(gateway(MODEL, [target.address], "--api-keys", str(keys), *flags(roles["gateway"], "client")))
        made = Guarded(
            authority,
            roles,
            Certificates(theirs.certificate, theirs.key, authority.file),
            authority.issue("expired", expired=True),
            grower,
            target,
            front,
        )
        with made.client(roles["client"], USER) as client:
            wait_until(lambda: client.server_info().models, what="a verifier behind its certificate")
        yield made


@pytest.fixture(autouse=True)
def no_secret_is_written(guarded: Guarded) -> Iterator[None]:
    yield
    for service in (guarded.gateway, guarded.verifier, guarded.drafter):
        written = service.output()
        for secret in (ADMIN, USER, OTHER_MODEL, PAST, WRONG):
            assert secret not in written
            assert digest(secret) not in written


def refusals(service: Service) -> list[str]:
    return [line for line in service.output().splitlines() if "call_refused" in line]


def test_admitted_callers_get_answers(guarded: Guarded) -> None:
    with guarded.client(guarded.roles["client"], USER) as client:
        assert client.generate([1, 2]).token_ids
    with guarded.http(guarded.roles["client"], USER) as http:
        assert http.post("/v1/completions", json={"prompt": [1, 2]}).status_code == 200


@pytest.mark.parametrize(
    ("key", "kind", "status", "code", "words"),
    [
        (None, AuthenticationError, 401, "invalid_api_key", "no API key was sent"),
        (WRONG, AuthenticationError, 401, "invalid_api_key", "the API key is not known"),
        (PAST, AuthenticationError, 401, "invalid_api_key", "'past' has expired"),
        (OTHER_MODEL, PermissionDeniedError, 403, "permission_denied", "'other' does not allow model"),
    ],
    ids=["none", "wrong", "expired", "model"],
)
def test_keys(guarded: Guarded, key, kind, status, code, words) -> None:
    before = len(refusals(guarded.gateway))
    with guarded.client(guarded.roles["client"], key) as client, pytest.raises(kind, match=words) as refused:
        client.generate([1, 2])
    assert refused.value.code == {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}[status]
    with guarded.http(guarded.roles["client"], key) as http:
        answer = http.post("/v1/completions", json={"prompt": [1, 2]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    wait_until(lambda: len(refusals(guarded.gateway)) == before + 2, what="both refusals in the log")
    for line, path in zip(refusals(guarded.gateway)[before:], ("GenerateStream", "/v1/completions"), strict=True):
        assert words in line
        assert path in line


def test_refused_calls_are_counted_on_both_fronts(guarded: Guarded) -> None:
    """By cause, whichever front they came by, and apart from requests that failed later."""
    own = guarded.roles["client"]

    def counts() -> Counter[str]:
        with guarded.http(own, ADMIN) as http:
            found = re.findall(
                r'^rootward_calls_refused_total\{reason="(\w+)"\} (\d+)', http.get("/metrics").text, re.M
            )
        return Counter({reason: int(number) for reason, number in found})

    before = counts()
    with guarded.http(own, WRONG) as http:
        http.post("/v1/completions", json={"prompt": [1, 2]})
    with guarded.client(own, WRONG) as client, pytest.raises(AuthenticationError):
        client.generate([1, 2])
    with guarded.http(own, USER) as http:
        assert http.get("/metrics").status_code == 403
        for body in (b"no JSON", b"a" * (3 << 20), b'{"prompt": [1], "n": 0}', b'{"prompt": [1], "model": "another"}'):
            assert http.post("/v1/completions", content=body).status_code >= 400
        assert http.get("/v1/nothing").status_code == 404
        assert http.post("/v1/completions", json={"prompt": [1] * 9999}).status_code == 400  # fails later
        assert http.post("/v1/completions", json={"prompt": [1, 2]}).status_code == 200
    with guarded.client(own, USER) as client:
        with pytest.raises(BadRequestError):
            client.generate([1, 2], request_id="{}")
        with pytest.raises(NotFoundError):
            client.generate([1, 2], model="another")
        assert client.generate([1, 2]).token_ids
    new = counts() - before
    assert new == {"invalid_api_key": 2, "permission_denied": 1, "invalid_value": 4, "not_found": 3}


def peak_bytes(service: Service) -> int:
    """The most memory that its process has had resident."""
    assert service.process is not None
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) << 10


def test_large_messages_of_callers_without_a_key_cost_no_memory(guarded: Guarded) -> None:
    """Decoded, each of these would take ten times its size."""
    before = peak_bytes(guarded.gateway)
    trust, options = guarded.trust(guarded.roles["client"]), [("grpc.max_send_message_length", -1)]
    with grpc.secure_channel(guarded.gateway.address, trust, options) as channel:
        detokenize = channel.unary_unary("/rootward.v1.Inference/Detokenize")
        calls = [detokenize.future(b"\x12\x80\x80\x80\x0f" + bytes(30 << 20), timeout=60) for _ in range(4)]
        codes = {call.code() for call in calls}
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}
    assert peak_bytes(guarded.gateway) - before < 64 << 20


def test_a_scope_that_is_missing(guarded: Guarded) -> None:
    def watch(client: Client) -> None:
        next(client.watch(request_id="one"))

    def drain(key: str) -> grpc.StatusCode:
        with grpc.secure_channel(guarded.gateway.address, guarded.trust(guarded.roles["client"])) as channel:
            call = channel.unary_unary(
                "/rootward.v1.Control/Drain", request_serializer=control_pb2.DrainRequest.SerializeToString
            )
            with pytest.raises(grpc.RpcError) as refused:
                call(control_pb2.DrainRequest(), metadata=(("authorization", f"Bearer {key}"),), timeout=30)
            return refused.value.code()

    before = len(refusals(guarded.gateway))
    with guarded.client(guarded.roles["client"], USER) as client, pytest.raises(PermissionDeniedError, match="admin"):
        watch(client)
    assert drain(USER) is grpc.StatusCode.PERMISSION_DENIED
    assert drain(WRONG) is grpc.StatusCode.UNAUTHENTICATED
    with guarded.http(guarded.roles["client"], USER) as http:
        assert http.get("/metrics").status_code == 403
        assert http.get("/health").status_code == 200
    with guarded.http(guarded.roles["client"], ADMIN) as http:
        assert http.get("/metrics").status_code == 200
    wait_until(lambda: len(refusals(guarded.gateway)) == before + 4, what="the refusals in the log")
    paths = ("WatchSession", "Drain", "Drain", "/metrics")
    assert all(p in line for p, line in zip(paths, refusals(guarded.gateway)[before:], strict=True))


def test_the_certificate_of_a_drafter_does_not_open_the_gateway(guarded: Guarded) -> None:
    """Even with a good key. It is a certificate of the house, so the gRPC face answers with a code; the other hangs up."""
    before = len(refusals(guarded.gateway))
    own = guarded.roles["drafter"]
    with guarded.client(own, ADMIN) as client, pytest.raises(PermissionDeniedError, match="tls_peers") as refused:
        client.generate([1, 2])
    assert refused.value.code == "PERMISSION_DENIED"
    with guarded.http(own, ADMIN) as http, pytest.raises(httpx.TransportError):
        http.get("/v1/models")
    wait_until(lambda: len(refusals(guarded.gateway)) > before, what="the refusal in the log")
    assert spiffe("drafter") in refusals(guarded.gateway)[before]


@pytest.mark.parametrize("kind", ["foreign", "expired", "none"])
def test_certificates_of_an_unknown_authority_or_expired_ones_are_refused(guarded: Guarded, kind: str) -> None:
    own = {"foreign": guarded.foreign, "expired": guarded.expired, "none": None}[kind]
    with guarded.client(own, ADMIN) as client, pytest.raises(APIConnectionError):
        client.generate([1, 2])
    with guarded.http(own, ADMIN) as http, pytest.raises(httpx.TransportError):
        http.get("/health")
    for service, make, ask in (
        (guarded.verifier, verifier_pb2_grpc.VerifierStub, verifier_pb2.GetVerifierInfoRequest()),
        (guarded.drafter, drafter_pb2_grpc.DrafterStub, drafter_pb2.GetDrafterInfoRequest()),
    ):
        with grpc.secure_channel(service.address, guarded.trust(own)) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                make(channel).GetInfo(ask, timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_every_service_admits_its_own_callers_only(guarded: Guarded) -> None:
    asks = {
        "verifier": (guarded.verifier, verifier_pb2_grpc.VerifierStub, verifier_pb2.GetVerifierInfoRequest()),
        "drafter": (guarded.drafter, drafter_pb2_grpc.DrafterStub, drafter_pb2.GetDrafterInfoRequest()),
    }
    may = {("gateway", "verifier"), ("verifier", "drafter")}
    for caller, own in guarded.roles.items():
        for called, (service, make, ask) in asks.items():
            before = len(refusals(service))
            with grpc.secure_channel(service.address, guarded.trust(own)) as channel:
                if (caller, called) in may:
                    make(channel).GetInfo(ask, timeout=30)
                    continue
                with pytest.raises(grpc.RpcError) as refused:
                    make(channel).GetInfo(ask, timeout=30)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED, (caller, called)
            wait_until(lambda s=service, b=before: len(refusals(s)) == b + 1, what="the refusal in the log")
            assert spiffe(caller) in refusals(service)[-1]
