"""The OpenAI-compatible face, over ASGI and over a real server."""

import asyncio
import io
import json
import logging
import re
from contextlib import asynccontextmanager
from itertools import product

import httpx
import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs
from unit.gateway.service_for_tests import IDS, TEXT, at_rest, serving, settings_of, until
from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import END_ID, SpellingVerifier

import rootward
from gateway import http_errors, schemas, streaming
from gateway.answers import fingerprint
from gateway.app import build_app
from gateway.http_guard import RequestGuard
from gateway.models import Models
from gateway.router import Upstreams
from gateway.service import GatewayService
from gateway.session_store import MemoryStore
from rootward.core.requests import DraftMode, Rule, SpeculationMode
from rootward.telemetry import configure_logging
from rootward.values import LosslessLevel, ModelInfo
from rootward.wire.auth import BytesInFlight
from rootward.wire.http_server import HttpServer


@asynccontextmanager
async def api(*verifiers, **options):
    async with serving(*verifiers, **options) as service:
        transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield service, client


@asynccontextmanager
async def real_server(*verifiers, build=build_app, **options):
    """The same behind uvicorn on loopback."""
    async with serving(*verifiers, **options) as service, asyncio.TaskGroup() as group:
        server = HttpServer("127.0.0.1:0")
        group.create_task(server.run_until_stopped(build(Models([service]))))
        async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=60) as client:
            yield service, client
        server.stop()


def events(text):
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


async def test_a_completion():
    async with api() as (_, client):
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 50, "model": "demo"})
        body = response.json()
        assert response.status_code == 200
        assert body["object"] == "text_completion"
        assert body["id"] == "cmpl-" + response.headers["x-request-id"]
        assert body["model"] == "demo"
        assert re.fullmatch("rw-.+-distribution", body["system_fingerprint"])
        choice = body["choices"][0]
        assert (choice["text"], choice["index"], choice["finish_reason"], choice["stop_reason"]) == (
            TEXT,
            0,
            "stop",
            None,
        )
        assert choice["logprobs"] is None
        assert "token_ids" not in choice
        tokens = len(IDS)
        assert body["usage"] == {
            "prompt_tokens": 1,
            "completion_tokens": tokens,
            "total_tokens": 1 + tokens,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        assert "metrics" not in body


async def test_extras_answer_when_asked():
    verifier = SpellingVerifier()
    async with api(verifier) as (_, client):
        wanted = {"mode": "required", "verification": "token", "max_depth": 4, "topk": 2, "num_draft_tokens": 8}
        wanted |= {"drafter": "cheap"}
        body = {"prompt": [5, 6], "max_tokens": 50, "return_token_ids": True, "speculation": wanted, "stop": "return"}
        answer = (await client.post("/v1/completions", json=body)).json()
        choice = answer["choices"][0]
        assert choice["token_ids"] == list(IDS[: len(choice["token_ids"])])
        assert len(choice["accepted"]) == len(choice["token_ids"])
        assert choice["stop_reason"] == "return"
        assert answer["metrics"]["speculative_decoding"]["block_efficiency"] > 1
        got = verifier.requests[-1].speculation
        assert (got.mode, got.rule, got.max_depth, got.topk) == (SpeculationMode.REQUIRED, Rule.TOKEN, 4, 2)
        assert got.drafter == "cheap"
        for value, mode in [(False, "disabled"), (True, "auto"), ("disabled", "disabled"), ({}, "auto")]:
            await client.post("/v1/completions", json={"prompt": "a", "speculation": value})
            assert verifier.requests[-1].speculation.mode.value == mode


async def test_a_slash_at_the_end_of_a_path_is_refused_and_not_redirected():
    """Behind a proxy that ends TLS the gateway knows no https: a redirect sent clients to http, with their prompts."""
    async with api() as (_, client):
        for path in ("/v1/completions/", "/v1/chat/completions/", "/tokenize/"):
            told = await client.post(path, json={"prompt": "a"})
            assert told.status_code == 404
            assert told.json()["error"]["message"].endswith("lists what is, without a slash at the end")
        assert (await client.get("/v1/models/")).status_code == 200
        assert (await client.get("/page/index.html")).status_code == 200


async def test_a_stream_that_waits_for_its_first_token_has_headers_and_comments(monkeypatch):
    """Proxies end a request without headers after a minute; a long prompt or the queue may take longer."""
    monkeypatch.setattr(streaming, "SILENCE_S", 0.05)
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    async with (
        real_server(SpellingVerifier(delay_s=0.3)) as (_, client),
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        parts = [part async for part in answer.aiter_text()]
    assert parts[0] == ": keep-alive\n\n"
    (*chunks, done) = events("".join(parts))
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "def f("
    assert done == "[DONE]"


async def test_a_refusal_after_comments_is_an_event(monkeypatch):
    monkeypatch.setattr(streaming, "SILENCE_S", 0.05)
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    async with real_server(SpellingVerifier(delay_s=30)) as (_, client):
        answer = await client.post("/v1/completions", json=body, headers={"x-request-timeout-ms": "400"})
        assert (answer.status_code, json.loads(events(answer.text)[0])["error"]["code"]) == (200, "timeout")
        soon = await client.post("/v1/completions", json=body, headers={"x-request-timeout-ms": "20"})
        assert (soon.status_code, soon.json()["error"]["code"]) == (504, "timeout")


async def test_defaults_and_spellings():
    verifier = SpellingVerifier()
    async with api(verifier) as (_, client):
        await client.post("/v1/completions", json={"prompt": ["a"], "unheard_of": None, "top_k": -1, "n": 1})
        got = verifier.requests[-1]
        assert (got.stopping.max_tokens, got.sampling.temperature, got.sampling.top_k) == (16, 1.0, 0)
        await client.post("/v1/completions", json={"prompt": [[5]], "seed": -1, "temperature": 0, "user": "me"})
        got = verifier.requests[-1]
        assert (got.prompt, got.seed, got.speculation.law) == ((5,), 2**64 - 1, DraftMode.COUPLED)
        headers = {"x-request-id": "mine", "x-request-timeout-ms": "5000", "x-session-id": "talk"}
        response = await client.post(
            "/v1/completions", json={"prompt": "a", "max_completion_tokens": 3.0}, headers=headers
        )
        got = verifier.requests[-1]
        assert response.headers["x-request-id"] == got.request_id == "mine"
        assert got.deadline_s <= 5
        assert got.stopping.max_tokens == 3


@pytest.mark.parametrize("real", [False, True])
async def test_streaming(real):
    async with (real_server if real else api)() as (_, client):
        body = {
            "prompt": "a",
            "max_tokens": 50,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": True,
        }
        response = await client.post("/v1/completions", json=body)
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["cache-control"] == "no-cache"
        *chunks, usage, done = events(response.text)
        assert done == "[DONE]"
        chunks = [json.loads(c) for c in chunks]
        assert "".join(c["choices"][0]["text"] for c in chunks) == TEXT
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert all(c["usage"] is None for c in chunks)
        assert len({c["id"] for c in chunks}) == 1
        usage = json.loads(usage)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(IDS)
        assert usage["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 5


@pytest.mark.parametrize("accept", ["*/*", "application/json", "text/event-stream"])
async def test_events_have_ids_for_clients_of_server_sent_events_alone(accept):
    """vllm bench, sglang.bench_serving and llmperf take every event for one line with data."""
    async with api() as (_, client):
        body = {"prompt": "a", "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post("/v1/completions", json=body, headers={"accept": accept})
        lines = answer.text.split("\n\n")[:-1]
        if accept == "text/event-stream":
            assert lines[0].startswith("id: 3\ndata: {")
        else:
            assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        resumed = {"accept": accept, "last-event-id": "3", "x-request-id": answer.headers["x-request-id"]}
        answer = await client.post("/v1/completions", json=body, headers=resumed)
        assert answer.text.startswith(f"id: {len(IDS)}\ndata: {{")


async def test_monitors_may_ask_for_headers_alone():
    async with api() as (_, client):
        for path in ("/", "/health", "/health/live", "/health/ready"):
            assert (await client.head(path)).status_code == 200


async def test_events_have_no_line_end_that_a_client_might_cut_them_at():
    """`str.splitlines`, and with it httpx's `iter_lines`, also ends lines at U+0085, U+2028 and U+2029."""
    text = "a\x85b\u2028c\u2029d\x0be"
    async with api(SpellingVerifier(text=text)) as (_, client):
        response = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    *lines, end = filter(None, response.text.splitlines())
    assert all(line.startswith("data: ") for line in lines)
    assert "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines) == text
    assert end == "data: [DONE]"


async def test_an_error_after_the_headers_is_an_event():
    dying = SpellingVerifier(die_after=lambda r: 4)
    async with api(dying, redispatch_wait_s=0.1) as (_, client):
        response = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == 200
        *_, last = events(response.text)
        assert json.loads(last)["error"]["code"] == "stream_interrupted"


async def test_a_disconnect_cancels_streams_and_whole_answers():
    verifier = SpellingVerifier(delay_s=0.05)
    async with real_server(verifier) as (service, client):
        async with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            async for _ in response.aiter_lines():
                assert verifier.running == 1
                break
        await at_rest(service, verifier)
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json={"prompt": "a"}, timeout=httpx.Timeout(60, read=0.1))
        await at_rest(service, verifier)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"prompt": "a", "temperature": -1}, 400, "invalid_value", "temperature"),
        ({"prompt": "a", "temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"prompt": "a", "temperature": True}, 400, "invalid_value", "temperature"),
        ({"prompt": "a", "top_p": 0}, 400, "invalid_value", "top_p"),
        ({"prompt": "a", "top_p": 1.5}, 400, "invalid_value", "top_p"),
        ({"prompt": "a", "top_k": -2}, 400, "invalid_value", "top_k"),
        ({"prompt": "a", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, 400, "invalid_value", "max_tokens"),
        ({"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}, 400, "invalid_value", "max_tokens"),
        ({"prompt": "a", "max_tokens": 256}, 400, "context_length_exceeded", "max_tokens"),
        ({"prompt": "a" * 300}, 400, "context_length_exceeded", "prompt"),
        ({"prompt": []}, 400, "invalid_value", "prompt"),
        ({}, 400, "invalid_value", "prompt"),
        ({"prompt": {"text": "a"}}, 400, "invalid_value", "prompt"),
        ({"prompt": [1, "a"]}, 400, "invalid_value", "prompt"),
        ({"prompt": [1, 330]}, 400, "invalid_value", "prompt"),
        ({"prompt": ["a"] * 129}, 400, "invalid_value", "prompt"),
        ({"prompt": ["a", 1]}, 400, "invalid_value", "prompt"),
        ({"prompt": "a", "model": "gpt"}, 404, "model_not_found", "model"),
        ({"prompt": "a", "n": 0}, 400, "invalid_value", "n"),
        ({"prompt": "a", "n": 129}, 400, "invalid_value", "n"),
        ({"prompt": "a", "n": "2"}, 400, "invalid_value", "n"),
        ({"prompt": "a", "best_of": 3}, 400, "unsupported_parameter", "best_of"),
        ({"prompt": "a", "echo": 1}, 400, "invalid_value", "echo"),
        ({"prompt": "a", "suffix": "x"}, 400, "unsupported_parameter", "suffix"),
        ({"prompt": "a", "stop": [1]}, 400, "invalid_value", "stop"),
        ({"prompt": "a", "stop": ""}, 400, "invalid_value", "stop"),
        ({"prompt": "a", "seed": 2**70}, 400, "invalid_value", "seed"),
        ({"prompt": "a", "stream": "yes"}, 400, "invalid_value", "stream"),
        ({"prompt": "a", "stream_options": {}}, 400, "invalid_value", "stream_options"),
        ({"prompt": "a", "speculation": 3}, 400, "invalid_value", "speculation"),
        ({"prompt": "a", "speculation": "often"}, 400, "invalid_value", "speculation.mode"),
        ({"prompt": "a", "speculation": {"mode": ["x"]}}, 400, "invalid_value", "speculation.mode"),
        ({"prompt": "a", "speculation": {"verification": "no"}}, 400, "invalid_value", "speculation.verification"),
        ({"prompt": "a", "speculation": {"drafter": 3}}, 400, "invalid_value", "speculation.drafter"),
        ({"prompt": "a", "speculation": {"often": 3}}, 400, "unsupported_parameter", "speculation.often"),
        ({"prompt": "a", "speculation": {"topk": 0}}, 400, "invalid_value", "speculation.topk"),
        (
            {"prompt": "a", "speculation": {"max_depth": 5, "num_draft_tokens": 2}},
            400,
            "invalid_value",
            "speculation.max_depth",
        ),
        (
            {"prompt": "a", "speculation": {"draft_strategy": "no"}},
            400,
            "invalid_value",
            "speculation.draft_strategy",
        ),
        ({"prompt": "a", "speculation": {"drafter": "a" * 300}}, 400, "invalid_value", "speculation.drafter"),
        ({"prompt": "a", "unheard_of": {"x": 1}}, 400, "unsupported_parameter", "unheard_of"),
        ({"prompt": "a", "x\ud800": 1}, 400, "invalid_value", "body"),
        ({"prompt": "a", "y" * 100: 1}, 400, "unsupported_parameter", "y" * 32),
        ({"prompt": "a\ud800"}, 400, "invalid_value", "prompt"),
        ({"prompt": "a", "request_id": "a b"}, 400, "invalid_value", "request_id"),
        ([1], 400, "invalid_value", "body"),
        ("{", 400, "invalid_value", "body"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(body, status, code, param, stream):
    verifier = SpellingVerifier()
    async with api(verifier) as (_, client):
        if isinstance(body, dict) and "stream" not in body and stream and "stream_options" not in body:
            body = {**body, "stream": True}
        text = body if isinstance(body, str) else json.dumps(body)
        response = await client.post("/v1/completions", content=text)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (status, code, param)
        assert error["type"] == "invalid_request_error"
        assert "\n" not in error["message"]
        assert not verifier.requests


@pytest.mark.parametrize(("body", "shown"), [([1], "a list"), ("x", "'x'"), (3, "3"), ([], "[]"), (True, "true")])
async def test_a_body_that_is_no_object(body, shown):
    async with api() as (_, client):
        response = await client.post("/v1/completions", json=body)
        assert response.json()["error"]["message"] == f"body: {shown} is not an object"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "n": true}', "n: true is not an integer"),
        ('{"prompt": "a", "stop": {"x": 1}}', "stop: an object is not a list"),
        ('{"prompt": "a", "what": false}', "what: false is not supported by this server; leave it out"),
        ('{"prompt": "a", "temperature": NaN}', "temperature: NaN is not a finite number"),
        ("{", "body: is no JSON (Expecting property name enclosed in double quotes); send a JSON object"),
    ],
)
async def test_values_are_spelled_as_in_the_body(content, message):
    async with api() as (_, client):
        response = await client.post("/v1/completions", content=content)
        assert response.json()["error"]["message"] == message


@pytest.mark.parametrize("name", http_errors._NAMES_HERE)
async def test_fields_of_other_servers_are_refused_with_the_name_that_they_have_here(name):
    instead = http_errors._NAMES_HERE[name]
    async with api() as (_, client):
        response = await client.post("/v1/completions", json={"prompt": "a", name: 2})
    message = f"{name}: 2 is not supported by this server; use {instead}"
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)
    field, _, part = instead.partition(" ")[0].partition(".")
    assert field in schemas.CompletionRequest.model_json_schema()["properties"]
    assert not part or part in schemas.StructuredOutputs.model_json_schema()["properties"]


@pytest.mark.parametrize(("form", "text"), [("regex", "("), ("grammar", "no grammar")])
async def test_forms_have_codes_of_their_own(form, text):
    async with api() as (_, client):
        response = await client.post("/v1/completions", json={"prompt": "a", "structured_outputs": {form: text}})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, f"invalid_{form}", form)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (
            "/v1/completions",
            {"prompt": "a", "prediction": {"type": "content", "content": "\ud800"}},
            "prediction.content",
        ),
        ("/v1/completions", {"prompt": "a", "bad_words": ["\ud800"]}, "bad_words"),
        ("/v1/responses", {"input": "\ud800"}, "input"),
    ],
)
async def test_a_lone_surrogate_is_named_where_it_is(path, body, param):
    async with api() as (_, client):
        error = (await client.post(path, content=json.dumps(body))).json()["error"]
        assert (error["param"], error["code"]) == (param, "invalid_value")
        assert error["message"] == f"{param}: '\\ud800' is not valid Unicode; send no lone surrogates"


async def test_busy_gone_late_and_doubled():
    verifier = SpellingVerifier(delay_s=0.1)
    async with api(verifier, max_num_seqs=1, max_num_queued_reqs=0, redispatch_wait_s=0.2) as (service, client):
        async with asyncio.TaskGroup() as group:
            first = group.create_task(client.post("/v1/completions", json={"prompt": "a", "request_id": "one"}))
            await until(lambda: verifier.running)
            busy = await client.post("/v1/completions", json={"prompt": "a"})
            doubled = await client.post("/v1/completions", json={"prompt": "a", "request_id": "one"})
        assert first.result().status_code == 200
        assert (busy.status_code, busy.json()["error"]["code"]) == (429, "server_overloaded")
        assert busy.headers["retry-after"] == "1"
        assert busy.headers["retry-after-ms"] == "1000"
        refused = doubled.json()["error"]
        assert (doubled.status_code, refused["code"], refused["param"]) == (400, "duplicate_request_id", "request_id")
        late = await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout-ms": "150"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        for value in ("soon", "0", "9" * 400, "9" * 5000):
            bad = await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-timeout-ms": value})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-request-timeout-ms")
        verifier.up = False
        gone = await client.post("/v1/completions", json={"prompt": "a"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "service_unavailable")
        await at_rest(service, verifier)


async def test_a_request_waits_for_the_first_answer_of_a_verifier():
    class Late(SpellingVerifier):
        async def get_info(self):
            await up.wait()
            return await super().get_info()

    up, upstreams = asyncio.Event(), Upstreams({"v0": Late()}, poll_s=0.02)
    service = GatewayService(byte_level(), upstreams, MemoryStore(), settings=settings_of(), served_model="demo")
    async with service:
        transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            answered = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 50}))
            await asyncio.wait({answered}, timeout=0.1)
            assert upstreams.model is None
            up.set()
            response = await answered
            assert (response.status_code, response.json()["choices"][0]["text"]) == (200, TEXT)


async def test_a_bug_is_an_internal_error_without_details():
    verifier = SpellingVerifier(spoil=lambda run: 1 / 0)
    async with api(verifier) as (service, client):
        response = await client.post("/v1/completions", json={"prompt": "secret"})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "internal error (ZeroDivisionError)"
        assert response.headers["x-should-retry"] == "false"
        await at_rest(service, verifier)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_logged_under_the_id_of_its_request(stream):
    """In an answer, in a stream that has begun, and in a route."""
    verifier = SpellingVerifier(spoil=lambda run: run if run.offset == 0 and stream else 1 / 0)
    headers = {"x-request-id": "mine"}
    async with api(verifier) as (service, client):
        with capture_logs() as logs:
            await client.post("/v1/completions", json={"prompt": "secret", "stream": stream}, headers=headers)
            service.tokenizer = None
            await client.post("/tokenize", json={"prompt": "secret"}, headers=headers)
    found = [line for line in logs if line["event"] == "http_handler_failed"]
    assert [line.get("request_id") for line in found] == ["mine", "mine"]
    assert "secret" not in str(found)


@pytest.fixture
def log():
    """What is written after `configure_logging` with this stream."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield io.StringIO()
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("json_lines", [False, True])
async def test_the_server_logs_a_bug_without_its_text_which_may_be_a_prompt(json_lines, log):
    configure_logging("gateway", json=json_lines, stream=log)

    def guarded(models):
        return RequestGuard(build_app(models), max_body_bytes=1000, in_flight=BytesInFlight(1000))

    async def broken(prompt, **options):
        raise ValueError(f"{prompt} is not expected")

    async with real_server(build=guarded) as (service, client):
        service.tokenize = broken
        answer = await client.post("/tokenize", json={"prompt": "secret"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert (await client.get("/health")).status_code == 200
    assert "ValueError" in log.getvalue()
    assert "in broken" in log.getvalue()
    assert "secret" not in log.getvalue()


async def test_the_framework_exports_nothing_of_its_own(monkeypatch):
    """Exceptions and bodies would be in its spans and logs."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    async with api() as (_, client):
        for body in ({"prompt": "secret"}, {"prompt": {"secret": 1}}):
            await client.post("/v1/completions", json=body)
    assert {span.name for span in exporter.get_finished_spans()} <= {"gateway.request"}


async def test_models_health_version_and_metrics():
    verifier = SpellingVerifier()
    async with api(verifier) as (service, client):
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"], card["object"]) == ("demo", 256, "model")
        assert (await client.get("/v1/models/demo")).json() == card
        assert (await client.get("/v1/models/")).json()["data"] == [card]
        missing = await client.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        for path, ready in [("/health", 200), ("/health/live", 200), ("/health/ready", 200)]:
            assert (await client.get(path)).status_code == ready
        assert (await client.get("/version")).json()["version"]
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 50})
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 10**6})
        metrics = (await client.get("/metrics")).text
        assert f"rootward_generation_tokens_total {len(IDS)}.0" in metrics
        assert 'rootward_requests_refused_total{reason="context_length_exceeded"} 1.0' in metrics
        assert "rootward_upstream_ready 1.0" in metrics
        assert "rootward_num_requests_running 0.0" in metrics
        service.admission.draining = True
        for path, ready in [("/health", 503), ("/health/live", 200), ("/health/ready", 503)]:
            assert (await client.get(path)).status_code == ready
        assert (await client.get("/nowhere")).status_code == 404
        wrong = await client.post("/v1/models")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
        assert wrong.json()["error"]["code"] == "method_not_allowed"
        assert (await client.get("/nowhere")).json()["error"]["code"] == "not_found"


async def test_too_few_tokens_have_one_message() -> None:
    async with api() as (_, client):
        for field, most in product(("max_tokens", "max_completion_tokens"), (0, -1)):
            refused = await client.post("/v1/completions", json={"prompt": "a", field: most})
            assert refused.status_code == 400
            told = refused.json()["error"]
            assert (told["param"], told["code"]) == ("max_tokens", "invalid_value")
            assert told["message"] == f"max_tokens: {most} is below 1; ask for at least one token"


async def test_only_requests_that_are_not_refused_count_in_the_histograms_of_parameters() -> None:
    async with api() as (_, client):
        for field, most in product(
            ("max_tokens", "max_completion_tokens"), (10**309, 10**308, 10**308, -5, -(10**309))
        ):
            body = json.dumps({"prompt": "a", "n": 3, field: most})
            refused = await client.post("/v1/completions", content=body)
            assert refused.status_code == 400
            told = refused.json()["error"]
            assert told["param"] == "max_tokens"
            assert told["code"] == ("context_length_exceeded" if most > 0 else "invalid_value")
        accepted = await client.post("/v1/completions", json={"prompt": "a", "n": 2, "max_tokens": 50})
        assert accepted.status_code == 200
        counted = (await client.get("/metrics")).text.splitlines()
    for line in ("max_tokens_count 2.0", "max_tokens_sum 100.0", "n_count 1.0", "n_sum 2.0"):
        assert f"rootward_request_params_{line}" in counted


async def test_store_names_the_endpoint_that_stores() -> None:
    async with api() as (_, client):
        for harmless in (False, None):
            body = {"prompt": "a", "max_tokens": 2, "store": harmless}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        chat = {"messages": [{"role": "user", "content": "a"}], "store": True}
        refused = (await client.post("/v1/chat/completions", json=chat)).json()["error"]
    assert (refused["param"], refused["code"]) == ("store", "unsupported_parameter")
    assert "/v1/responses" in refused["message"]


async def test_an_echo_is_the_prompt_in_front_of_the_text():
    async with api() as (_, client):
        for prompt, shown in (("abc", "abc"), ([5, 6, 7], byte_level().decode([5, 6, 7])), ("é\u0301 x", "é\u0301 x")):
            body = {"prompt": prompt, "max_tokens": 50, "echo": True}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == shown + TEXT
            assert answer["usage"]["completion_tokens"] == len(IDS)
            stream = (await client.post("/v1/completions", json=body | {"stream": True})).text
            told = [json.loads(event) for event in events(stream)[:-1]]
            assert "".join(chunk["choices"][0]["text"] for chunk in told) == shown + TEXT


@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("echo", [False, True])
async def test_text_offsets_of_a_resumed_stream_count_from_the_beginning(echo, interval):
    async with api() as (_, client):
        body = {"prompt": "abc def", "max_tokens": 50, "logprobs": 1, "stream": True, "echo": echo}

        async def offsets(**headers):
            headers = {"x-request-id": "one"} | headers
            answer = await client.post("/v1/completions", json=body | {"stream_interval": interval}, headers=headers)
            told = [json.loads(event)["choices"][0]["logprobs"] for event in events(answer.text)[:-1]]
            return [offset for one in told for offset in one["text_offset"]]

        whole = await offsets()
        assert await offsets(**{"last-event-id": "3"}) == whole[3 - len(IDS) :]


@pytest.mark.parametrize("most", [0, 50])
async def test_an_echo_with_logprobs(most):
    """One entry for every token of prompt and text; the first has no law. Offsets are those of prompt and text together."""
    async with api() as (_, client):
        body = {"prompt": "abc def", "max_tokens": most, "echo": True, "logprobs": 1, "return_token_ids": True}
        answer = (await client.post("/v1/completions", json=body)).json()
        choice, told = answer["choices"][0], answer["choices"][0]["logprobs"]
        prompt = list(byte_level().encode("abc def"))
        assert choice["token_ids"] == prompt + (list(IDS) if most else [])
        assert choice["text"] == "abc def" + (TEXT if most else "")
        assert len({len(told[name]) for name in told}) == 1
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert told["token_logprobs"][1 : len(prompt)] == [-0.5 * (101 + i) for i in range(len(prompt) - 1)]
        assert told["text_offset"][len(prompt) :][:1] == ([7] if most else [])
        assert answer["usage"]["completion_tokens"] == (len(IDS) if most else 0)
        pieces = (await client.post("/v1/completions", json=body | {"stream": True})).text
        parts = [json.loads(event)["choices"][0]["logprobs"] for event in events(pieces)[:-1]]
        assert {name: [x for part in parts for x in part[name]] for name in told} == told


async def test_prompt_logprobs_in_vllms_shape():
    async with api() as (_, client):
        prompt = byte_level().encode("abc")
        body = {"prompt": "abc", "prompt_logprobs": 1}
        told = (await client.post("/v1/completions", json=body)).json()["choices"][0]["prompt_logprobs"]
        assert told[0] is None
        assert len(told) == len(prompt)
        assert told[1][str(prompt[1])] == {"logprob": -50.5, "decoded_token": byte_level().decode([prompt[1]])}


async def test_a_prediction_counts_what_the_text_has_of_it():
    verifier = SpellingVerifier()
    async with api(verifier) as (_, client):
        body = {"prompt": "abc", "max_tokens": 50, "prediction": {"type": "content", "content": TEXT + "zz"}}
        details = (await client.post("/v1/completions", json=body)).json()["usage"]["completion_tokens_details"]
        assert details == {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": len(IDS) - 1,
            "rejected_prediction_tokens": 2,
        }
        assert verifier.requests[-1].prediction == (*IDS[:-1], *byte_level().encode("zz"))
        parts = [{"type": "text", "text": TEXT[:4]}, {"type": "text", "text": TEXT[4:]}]
        body["prediction"] = {"type": "content", "content": parts}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert verifier.requests[-1].prediction == IDS[:-1]


async def test_several_prompts_and_choices_in_one_answer():
    verifier = SpellingVerifier(max_sessions=8)
    async with api(verifier) as (_, client):
        body = {"prompt": ["abc", "ab"], "n": 2, "max_tokens": 50, "seed": 4, "speculation": True}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, TEXT) for i in range(4)]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 4 * len(IDS))
        assert answer["metrics"] is None
        body |= {"stream": True, "stream_options": {"continuous_usage_stats": True}, "stream_interval": 5}
        *chunks, done = events((await client.post("/v1/completions", json=body)).text)
        assert done == "[DONE]"
        texts, chunks = [""] * 4, [json.loads(c) for c in chunks]
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == [TEXT] * 4
        counts = [c["usage"]["completion_tokens"] for c in chunks]
        assert counts == sorted(counts)
        assert (chunks[-1]["usage"]["prompt_tokens"], counts[-1]) == (5, 4 * len(IDS))


async def test_tokenize_detokenize_and_load():
    async with api() as (_, client):
        ids = list(byte_level().encode("abc é"))
        answer = (await client.post("/tokenize", json={"prompt": "abc é", "return_token_strs": True})).json()
        assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 256)
        assert len(answer["token_strs"]) == len(ids)
        assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "abc é"}
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": 3}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
            ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
        ):
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        load = (await client.get("/load")).json()
        assert (load["server_load"], load["max_num_seqs"], load["draining"]) == (0, 256, False)


async def test_stop_token_ids():
    async with api() as (_, client):
        body = {"prompt": "a", "max_tokens": 50, "stop_token_ids": [END_ID], "ignore_eos": True}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == (TEXT, END_ID, "stop")


def test_the_fingerprint_has_the_lossless_level_of_the_model():
    exact = ModelInfo(
        name="m", vocab_size=8, max_positions=8, fingerprint="0123456789abcdef", lossless=LosslessLevel.BITWISE
    )
    assert fingerprint(exact) == f"rw-{rootward.__version__}-0123456789ab-bitwise"
