"""Several models in one gateway: each request runs on the model that it names, and what the gateway tells is about all of them."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import httpx
import pytest
from prometheus_client import generate_latest
from unit.gateway.service_for_tests import collect, settings_of
from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.app import build_app
from gateway.auth import Access, Caller, Scope
from gateway.models import Models
from gateway.requests import GenerateRequest, Resume
from gateway.router import Upstreams
from gateway.service import GatewayService
from gateway.servicer import register
from gateway.session_store import MemoryStore
from gateway.settings import GatewaySettings
from rootward.errors import ConfigurationError, DuplicateRequest, InvalidRequest, NotFound, PermissionDenied
from rootward.v1 import control_pb2, control_pb2_grpc, generate_pb2, generate_pb2_grpc
from rootward.wire.server import RpcServer


@asynccontextmanager
async def several(**verifiers):
    """Models of one gateway, by name, as a list in its settings gives them."""
    store, services = MemoryStore(), []
    async with AsyncExitStack() as stack:
        for name, verifier in verifiers.items():
            upstreams = Upstreams({name: verifier} if verifier else {}, poll_s=0.02)
            service = GatewayService(
                byte_level(), upstreams, store, settings=settings_of(), served_model=name, beside_others=True
            )
            services.append(await stack.enter_async_context(service))
            if verifier:
                assert await upstreams.wait_ready(60.0)
        yield Models(services, by_model=True)


async def test_a_request_runs_on_the_model_that_it_names():
    large, small = SpellingVerifier(text="large"), SpellingVerifier(text="small")
    async with several(large=large, small=small) as models:
        for name in ("large", "small"):
            assert (await collect(models.of(name), GenerateRequest("a", model=name))).text == name
        with pytest.raises(InvalidRequest, match=r"model: .* is missing, .* use 'large' or 'small'"):
            models.of("")
        with pytest.raises(NotFound, match="model: 'medium' is not served here; use 'large' or 'small'"):
            models.of("medium")
    assert (len(large.requests), len(small.requests)) == (1, 1)


async def test_one_model_needs_no_name():
    async with several(only=SpellingVerifier()) as models:
        assert models.of("") is models.of("only")


async def test_both_faces_list_the_models_whose_verifiers_answer():
    async with several(large=SpellingVerifier(), small=SpellingVerifier(), absent=None) as models:
        assert models.ready
        transport = httpx.ASGITransport(build_app(models), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            cards = (await http.get("/v1/models")).json()["data"]
            assert [card["id"] for card in cards] == ["large", "small"]
            assert (await http.get("/v1/models/small")).json() in cards
            assert (await http.get("/v1/models/absent")).status_code == 503
            refused = await http.post("/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        async with RpcServer("127.0.0.1:0", grace_s=0) as server:
            register(models, server, shutdown_timeout_s=1.0)
            await server.start()
            async with grpc.aio.insecure_channel(server.address) as channel:
                control = control_pb2_grpc.ControlStub(channel)
                listed = await control.ListModels(control_pb2.ListModelsRequest(), timeout=5)
                assert [model.name for model in listed.models] == ["large", "small"]
                info = await control.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=5)
                assert [worker.address for worker in info.verifiers] == ["large", "small"]
                stub = generate_pb2_grpc.InferenceStub(channel)
                answer = await stub.Generate(generate_pb2.GenerateRequest(model="small", text="a"), timeout=5)
                assert answer.model == "small"


async def test_a_request_id_is_not_resumed_on_another_model():
    """Both have the same tokenizer, so the prompt alone does not tell them apart."""
    async with several(large=SpellingVerifier(), small=SpellingVerifier()) as models:
        await collect(models.of("large"), GenerateRequest("a", request_id="r", model="large", seed=1))
        again = GenerateRequest("a", request_id="r", model="small", seed=1, resume=Resume(0))
        with pytest.raises(DuplicateRequest, match="asks something else"):
            await collect(models.of("small"), again)


async def test_metrics_and_load_are_by_model_and_together():
    async with several(large=SpellingVerifier(), small=SpellingVerifier()) as models:
        await collect(models.of("large"), GenerateRequest("a"))
        text = generate_latest(models.registry).decode()
        for name, count in (("large", 1), ("small", 0)):
            assert f'rootward_request_params_n_count{{model_name="{name}"}} {count}.0' in text
        assert text.count("# TYPE rootward_num_requests_running gauge") == 1
        assert models.load.max_sessions == sum(s.admission.max_num_seqs for s in models)
        await models.drain(1.0)
        assert models.load.draining
        assert not models.ready


async def test_a_list_of_one_model_is_labelled_too():
    """The autoscaler and the alerts of a model ask for its label, whatever the number of models."""
    async with several(only=SpellingVerifier()) as models:
        assert 'rootward_num_requests_waiting{model_name="only"} 0.0' in generate_latest(models.registry).decode()
        unlabelled = generate_latest(Models(list(models)).registry).decode()
        assert "rootward_num_requests_waiting 0.0" in unlabelled


async def test_a_key_for_one_model_does_not_open_another(monkeypatch):
    known = Caller(name="k", sha256="0" * 64, tenant="t", models=["small"])
    async with several(large=SpellingVerifier(), small=SpellingVerifier()) as models:
        monkeypatch.setattr("gateway.models.caller", lambda: known)
        assert models.of("small").served_model == "small"
        assert [service.served_model for service in models.listed()] == ["small"]
        with pytest.raises(PermissionDenied, match="does not allow model 'large'"):
            models.of("large")

    class OneKey:
        def caller(self, authorization):
            return known

    assert Access(OneKey(), models.names)._admit(OneKey(), Scope.GENERATE, None) is known
    with pytest.raises(PermissionDenied):
        Access(OneKey(), ["large"])._admit(OneKey(), Scope.GENERATE, None)


def test_a_file_names_several_models(tmp_path):
    path = tmp_path / "gateway.yaml"
    entries = (
        "models:\n- {model: /m/large, verifiers: ['redis:']}\n- {model: /m/l2, served_model_name: %s, verifiers: a:1}\n"
    )
    path.write_text(entries % "small", encoding="utf-8")
    settings = GatewaySettings.load(["--config", str(path)])
    assert [(s.name, s.sources[0].target) for s in settings.served] == [("large", "large"), ("small", "a:1")]
    path.write_text(entries % "large", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="models: two have the same name"):
        GatewaySettings.load(["--config", str(path)])
    with pytest.raises(ConfigurationError, match="models: cannot stand beside model"):
        GatewaySettings.load(["--config", str(path), "--model", "x", "--redis-url", "redis://u:secret@h:1/0"])
    with pytest.raises(ConfigurationError, match="model: is required; give --model, ROOTWARD_MODEL"):
        GatewaySettings.load([])


def test_errors_of_wrong_settings_have_no_secret():
    with pytest.raises(ConfigurationError) as told:
        GatewaySettings.load(["--redis-url", "redis://u:secret@h:1/0"])
    assert "secret" not in str(told.value)
