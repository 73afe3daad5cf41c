"""Who may call what: certificates between the services, API keys at the gateway, over real handshakes on loopback."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from support.certificates import Authority, spiffe
from support.fake_clock import FakeClock
from support.processes import free_port
from unit.gateway.service_for_tests import serving
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.app import build_app
from gateway.auth import Access, Keys
from gateway.autoscaling import scaler_port
from gateway.models import Models
from gateway.servicer import register
from gateway.settings import GatewaySettings
from rootward.cli import main as cli
from rootward.client import AsyncClient
from rootward.discovery.registry import open_registry
from rootward.errors import (
    APIConnectionError,
    APIError,
    AuthenticationError,
    ConfigurationError,
    PermissionDenied,
    PermissionDeniedError,
    ServiceError,
    Unavailable,
)
from rootward.keys import digest, new_key
from rootward.v1.external_scaler_pb2 import ScaledObjectRef
from rootward.v1.external_scaler_pb2_grpc import ExternalScalerStub
from rootward.wire.clients import RemoteVerifier
from rootward.wire.http_server import HttpServer
from rootward.wire.server import RpcServer
from rootward.wire.tls import Certificates, ClientTls, ServerTls

ROLES = ("gateway", "verifier", "drafter")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def verifier_port(files: Certificates, *peers: str):
    """A verifier's port that admits gateways only. (No servicer: GetInfo then answers UNIMPLEMENTED to whoever gets in.)"""
    from rootward.v1 import verifier_pb2_grpc

    async with RpcServer("127.0.0.1:0", tls=ServerTls(files, peers=peers), grace_s=0) as server:
        verifier_pb2_grpc.add_VerifierServicer_to_server(verifier_pb2_grpc.VerifierServicer(), server.grpc)
        await server.start()
        yield server.address


async def answer(address: str, files: Certificates | None, name: str = "") -> str:
    """What a caller with these certificates hears: "in", or the kind of refusal."""
    async with RemoteVerifier(address, tls=ClientTls(files, name) if files else None, rpc_timeout_s=60) as remote:
        try:
            await remote.get_info()
        except PermissionDenied as error:
            return "denied" if "tls_peers" in str(error) else str(error)
        except Unavailable:
            return "no handshake"
        except ServiceError as error:
            return "in" if "not implemented" in str(error).lower() else str(error)
        raise AssertionError("nothing is registered")


async def test_a_verifier_takes_gateways_only(authority: Authority, tmp_path: Path) -> None:
    gateway, verifier, drafter = (authority.issue(role) for role in ROLES)
    (tmp_path / "foreign").mkdir()
    foreign = Authority(tmp_path / "foreign").issue("gateway")
    expired = authority.issue("expired", expired=True)
    async with verifier_port(verifier, spiffe("gateway")) as address:
        assert await answer(address, gateway) == "in"
        assert await answer(address, gateway, "verifier.llm.svc") == "in"
        assert await answer(address, gateway, "another.llm.svc") == "no handshake"
        assert await answer(address, drafter) == "denied"
        assert await answer(address, foreign) == "no handshake"
        assert await answer(address, Certificates(foreign.certificate, foreign.key, authority.file)) == "no handshake"
        assert await answer(address, expired) == "no handshake"
        assert await answer(address, None) == "no handshake"


async def test_the_scaler_asks_for_a_certificate_where_clients_need_none(authority: Authority) -> None:
    gateway, keda = authority.issue("gateway"), authority.issue("keda")
    port = free_port()
    settings = GatewaySettings(
        model="m",
        redis_url="redis://127.0.0.1:1/0",
        scaler_listen=f"127.0.0.1:{port}",
        tls_certificate=gateway.certificate,
        tls_key=gateway.key,
        tls_authority=gateway.authority,
    )
    root = authority.file.read_bytes()
    with_key = grpc.ssl_channel_credentials(root, keda.key.read_bytes(), keda.certificate.read_bytes())
    async with open_registry(settings.redis_url) as registry, scaler_port(settings, registry):
        for credentials, admitted in ((with_key, True), (grpc.ssl_channel_credentials(root), False)):
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
                asked = ScaledObjectRef(name="d", scalerMetadata={"pool": "p"})
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await ExternalScalerStub(channel).IsActive(asked, timeout=60)
            said = refused.value.details() or ""
            assert ("demand is unknown" in said) is admitted, said


async def test_renewed_certificates_are_taken_up_on_both_ends(tmp_path: Path) -> None:
    """All roles move to a new authority while a server and a caller live on."""
    old = Authority(tmp_path)
    gateway, verifier = old.issue("gateway"), old.issue("verifier")
    async with verifier_port(verifier, spiffe("gateway")) as address:
        async with RemoteVerifier(address, tls=ClientTls(gateway), rpc_timeout_s=60) as remote:
            with pytest.raises(Exception, match="not implemented"):
                await remote.get_info()
            await asyncio.sleep(1.1)  # the files are looked at once a second
            new = Authority(tmp_path)
            assert {new.issue("gateway"), new.issue("verifier")} == {gateway, verifier}
            with pytest.raises(Exception, match="not implemented"):
                await remote.get_info()
            assert await answer(address, gateway) == "in"
        stale = tmp_path / "stale"
        stale.mkdir()
        assert await answer(address, Authority(stale).issue("gateway")) == "no handshake"


async def test_a_call_in_the_middle_of_a_renewal_goes_on_with_the_old_certificates(tmp_path: Path) -> None:
    old = Authority(tmp_path)
    gateway, verifier = old.issue("gateway"), old.issue("verifier")
    async with (
        verifier_port(verifier, spiffe("gateway")) as address,
        RemoteVerifier(address, tls=ClientTls(gateway), rpc_timeout_s=60) as remote,
    ):
        with pytest.raises(ServiceError, match="not implemented"):
            await remote.get_info()
        await asyncio.sleep(1.1)  # the files are looked at once a second
        gateway.key.unlink()
        with pytest.raises(ServiceError, match="not implemented"):
            await remote.get_info()
        await asyncio.sleep(1.1)
        new = Authority(tmp_path)
        assert {new.issue("gateway"), new.issue("verifier")} == {gateway, verifier}
        with pytest.raises(ServiceError, match="not implemented"):
            await remote.get_info()
        assert len(remote._channels) == 2  # the new ones are taken up all the same


def keys_file(folder: Path, *entries: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text("keys:\n" + "\n".join(entries))
    return path


def entry(key: str, name: str, scopes: str = "generate", more: str = "") -> str:
    return f"  - {{name: {name}, sha256: {digest(key)}, scopes: [{scopes}]{more}}}"


@asynccontextmanager
async def guarded_gateway(
    path: Path, tls: Certificates | None = None, verifier: SpellingVerifier | None = None, peers: tuple[str, ...] = ()
):
    """(gRPC address, HTTP url) of a gateway with keys."""
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(*([verifier] if verifier else [])))
        access = Access(Keys(path), ["demo"])
        front = ServerTls(tls, mutual=bool(peers), peers=peers) if tls else None
        server = await stack.enter_async_context(
            RpcServer("127.0.0.1:0", tls=front, checks=(access.check_rpc,), grace_s=0)
        )
        register(Models([service]), server, shutdown_timeout_s=1.0)
        await server.start()
        await server.set_ready(True)
        http = HttpServer("127.0.0.1:0", tls=front)
        running = asyncio.create_task(http.run_until_stopped(access.around(build_app(Models([service])))))
        try:
            yield server.address, f"{http.scheme}://{http.address}"
        finally:
            http.stop()
            await running


async def test_keys_at_both_faces_of_the_gateway(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    user, admin, other, past = (new_key() for _ in range(4))
    path = keys_file(
        tmp_path,
        entry(user, "user"),
        entry(admin, "admin", "admin"),
        entry(other, "other", more=", models: [another]"),
        entry(past, "past", more=", expires: 2020-01-01T00:00:00Z"),
    )
    async with guarded_gateway(path) as (address, url), httpx.AsyncClient(base_url=url) as http:
        for key, status in ((user, 200), (admin, 200), (other, 403), (past, 401), ("rw-wrong", 401), (None, 401)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            reply = await http.post("/v1/completions", json={"model": "demo", "prompt": "x"}, headers=headers)
            assert reply.status_code == status, reply.text
            if status != 200:
                error = reply.json()["error"]
                assert error["code"] == {401: "invalid_api_key", 403: "permission_denied"}[status]
                assert not key or key not in reply.text
                assert (reply.headers.get("www-authenticate") == "Bearer") == (status == 401)
        for path_open in ("/health", "/health/live", "/version"):
            assert (await http.get(path_open)).status_code == 200
        assert (await http.get("/metrics", headers={"authorization": f"Bearer {user}"})).status_code == 403
        assert (await http.get("/metrics", headers={"authorization": f"Bearer {admin}"})).status_code == 200
        async with AsyncClient(f"grpc://{address}", api_key=user) as client:
            assert (await client.generate("x")).text
            assert (await client.generate("x")).text
            stream = client.stream("x")  # a handler that writes, behind the same door
            assert "".join([delta.text async for delta in stream])
        for key, kind in (
            (None, AuthenticationError),
            ("rw-wrong", AuthenticationError),
            (other, PermissionDeniedError),
        ):
            async with AsyncClient(f"grpc://{address}", api_key=key) as client:
                with pytest.raises(kind):
                    await client.generate("x")
    said = caplog.text
    assert not any(secret in said for secret in (user, admin, other, past, "rw-wrong"))


async def test_the_openai_package_knows_refused_keys_and_does_not_try_again(tmp_path: Path) -> None:
    user, other = new_key(), new_key()
    path = keys_file(tmp_path, entry(user, "user"), entry(other, "other", more=", models: [another]"))
    made: list[httpx.Request] = []

    async def note(request: httpx.Request) -> None:
        made.append(request)

    kinds = {"rw-wrong": openai.AuthenticationError, other: openai.PermissionDeniedError}
    async with guarded_gateway(path) as (_, url):
        for key, kind in kinds.items():
            hooked = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]})
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key=key, max_retries=2, http_client=hooked
            ) as client:
                for stream in (False, True):
                    made.clear()
                    with pytest.raises(kind) as refused:
                        await client.completions.create(model="demo", prompt="x", stream=stream)
                    assert refused.value.code in ("invalid_api_key", "permission_denied")
                    assert key not in str(refused.value)
                    assert len(made) == 1
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=user) as client:
            assert (await client.completions.create(model="demo", prompt="x")).choices[0].text


async def test_the_command_line_sends_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_key()
    async with guarded_gateway(keys_file(tmp_path, entry(key, "user"))) as (address, _):
        command = ["generate", "x", "--url", f"grpc://{address}", "--max-tokens", "2"]
        assert await asyncio.to_thread(cli.main, command) == cli.USAGE
        monkeypatch.setenv("ROOTWARD_API_KEY", key)
        assert await asyncio.to_thread(cli.main, command) == cli.OK
        assert await asyncio.to_thread(cli.main, ["status", "--url", f"grpc://{address}"]) == cli.OK


async def test_a_key_added_or_withdrawn_counts_without_a_restart(tmp_path: Path) -> None:
    first, second = new_key(), new_key()
    path = keys_file(tmp_path, entry(first, "first"))
    clock = FakeClock()
    keys = Keys(path, clock)
    assert keys.caller(f"Bearer {first}").tenant == "first"
    await clock.advance(1.0)  # the file is looked at once a second
    keys_file(tmp_path, entry(second, "second", more=", tenant: t"))
    assert keys.caller(f"Bearer {second}").tenant == "t"
    with pytest.raises(Exception, match="not known"):
        keys.caller(f"Bearer {first}")
    await clock.advance(1.0)
    path.write_text("keys: [")  # broken: what was known stays so
    assert keys.caller(f"bearer {second}").name == "second"


async def test_a_key_aborts_what_its_tenant_runs(tmp_path: Path) -> None:
    mine, colleague, stranger, admin = (new_key() for _ in range(4))
    path = keys_file(
        tmp_path,
        entry(mine, "mine", more=", tenant: t"),
        entry(colleague, "colleague", more=", tenant: t"),
        entry(stranger, "stranger"),
        entry(admin, "admin", "admin"),
    )
    async with guarded_gateway(path, verifier=SpellingVerifier(run=1, delay_s=0.5)) as (address, _):
        for name, key, ended in (("a", stranger, ()), ("b", colleague, ("b",)), ("c", admin, ("c",))):
            async with AsyncClient(f"grpc://{address}", api_key=mine) as client:
                stream = client.stream("x", request_id=name)
                deltas = aiter(stream)
                await anext(deltas)
                async with AsyncClient(f"grpc://{address}", api_key=key) as other:
                    assert await other.abort(name) == ended
                stream.cancel()


def test_a_broken_file_of_keys_is_not_quoted(tmp_path: Path) -> None:
    secret = digest(new_key())
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  - name: a\n   sha256: {secret}\n")
    with pytest.raises(ConfigurationError, match="line 3") as caught:
        Keys(path)
    assert secret not in str(caught.value)


async def test_the_gateway_serves_both_faces_with_tls(authority: Authority, tmp_path: Path) -> None:
    key = new_key()
    files = authority.issue("gateway")
    async with guarded_gateway(keys_file(tmp_path, entry(key, "user")), files) as (address, url):
        assert url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(authority.file))
        async with httpx.AsyncClient(base_url=url, verify=trust) as http:
            reply = await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 200
        root = grpc.ssl_channel_credentials(authority.file.read_bytes())
        async with AsyncClient(f"grpcs://{address}", api_key=key, tls=root) as client:
            assert (await client.generate("x")).text
        async with AsyncClient(f"grpc://{address}", api_key=key, max_retries=0) as client:
            with pytest.raises(APIConnectionError):
                await client.generate(
                    "x",
                )


async def test_listed_peers_alone_get_in_at_both_faces(authority: Authority, tmp_path: Path) -> None:
    key = new_key()
    files, listed, other = (authority.issue(name) for name in ("gateway", "verifier", "drafter"))
    path = keys_file(tmp_path, entry(key, "user"))
    async with guarded_gateway(path, files, peers=(spiffe("verifier"),)) as (address, url):
        for own, gets_in in ((listed, True), (other, False), (None, False)):
            trust = ssl.create_default_context(cafile=str(authority.file))
            if own is not None:
                trust.load_cert_chain(own.certificate, own.key)
            async with httpx.AsyncClient(base_url=url, verify=trust) as http:
                ask = http.get("/health/live")
                if gets_in:
                    assert (await ask).status_code == 200
                else:
                    with pytest.raises(httpx.TransportError):
                        await ask
            pair = (own.key.read_bytes(), own.certificate.read_bytes()) if own else (None, None)
            root = grpc.ssl_channel_credentials(authority.file.read_bytes(), *pair)
            async with AsyncClient(f"grpcs://{address}", api_key=key, tls=root, max_retries=0) as client:
                if gets_in:
                    assert (await client.generate("x")).text
                else:
                    with pytest.raises(APIError):
                        await client.generate("x")
