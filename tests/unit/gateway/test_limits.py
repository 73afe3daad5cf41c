"""What one client asks for costs the others little: tokenising is bounded and charged, choices and priority are limited."""

import asyncio
import json
import re
import threading

import grpc
import httpx
import pytest
from unit.gateway.service_for_tests import at_rest, collect, grpc_serving, serving

from gateway import auth, schemas, servicer, tokenizer
from gateway.app import build_app
from gateway.auth import Caller, Scope
from gateway.choices import outputs
from gateway.http_guard import MAX_CONTAINERS
from gateway.models import Models
from gateway.requests import Chat, GenerateRequest
from gateway.service import MIN_CONTEXT
from gateway.session_store import Rate
from gateway.tokenizer import LARGE_CHARACTERS, TokenizerPool
from rootward.client import AsyncClient
from rootward.errors import ContextLengthExceeded, InvalidRequest, Overloaded, PermissionDenied, RateLimited
from rootward.v1 import generate_pb2 as G
from rootward.v1 import generate_pb2_grpc as G_grpc
from rootward.wire import public_codec


@pytest.mark.parametrize("prompt", ["x" * 101, Chat(({"role": "user", "content": "x" * 101},))], ids=["text", "chat"])
async def test_a_prompt_is_refused_by_its_characters_before_it_is_tokenised(prompt, monkeypatch):
    async with serving(max_prompt_characters=100) as service:
        monkeypatch.setattr(service, "tokenizer", None)
        for call in (service.tokenize(prompt), collect(service, GenerateRequest(prompt))):
            with pytest.raises(ContextLengthExceeded, match="characters are more than this server takes, 100"):
                await call


def chat_with(arguments, **template_kwargs):
    """A conversation of 40 characters and those of the arguments and variables."""
    call = {"id": "", "type": "function", "function": {"name": "", "arguments": arguments}}
    return Chat(({"role": "", "content": "abcde", "tool_calls": [call]},), template_kwargs=template_kwargs)


@pytest.mark.parametrize(
    ("chat", "size"),
    [
        (chat_with({}), 40),
        (chat_with({"k" * 55: "v" * 5}), 100),
        (chat_with({"k" * 56: "v" * 5}), 101),
        (chat_with({"a": [{"k" * 60: 1}]}), 101),
        (chat_with({}, tools=[{"k" * 56: {}}]), 101),
    ],
)
async def test_keys_are_counted_as_they_are_in_the_prompt_and_names_of_fields_of_messages_are_not(
    chat, size, monkeypatch
):
    async with serving(max_prompt_characters=100, tenant_rate=Rate(0.001, 2)) as service:
        monkeypatch.setattr(service.tokenizer_pool, "run", lambda *_: asyncio.sleep(0, (1,)))
        if size > 100:
            with pytest.raises(ContextLengthExceeded, match=f"messages: {size} characters are more than"):
                await service.tokenize(chat)
            return
        await service.tokenize(chat, tenant="t")
        if size > 64:  # costs two units
            with pytest.raises(RateLimited):
                await service.tokenize("x", tenant="t")


async def test_without_a_setting_the_context_bounds_the_characters():
    async with serving() as service:
        with pytest.raises(ContextLengthExceeded, match="characters are more than"):
            await service.tokenize("x" * 10_000_000)


async def test_messages_without_text_are_counted_too(monkeypatch):
    """A template writes at least a token for each."""
    async with serving() as service:
        monkeypatch.setattr(service, "tokenizer", None)
        chat = Chat(({"role": "", "content": ""},) * (MIN_CONTEXT + 1))
        for call in (service.tokenize(chat), collect(service, GenerateRequest(chat))):
            with pytest.raises(
                ContextLengthExceeded, match=f"messages: {MIN_CONTEXT + 1} are more than the {MIN_CONTEXT}"
            ):
                await call


async def test_tokenising_is_charged_to_the_tenant():
    async with serving(tenant_rate=Rate(0.001, 10)) as service:
        for _ in range(10):
            await service.tokenize("x" * 64, tenant="t")
        with pytest.raises(RateLimited, match="'t'"):
            await service.tokenize("x", tenant="t")
        with pytest.raises(RateLimited):
            await service.detokenize([65], tenant="t")
        await service.tokenize("x", tenant="u")


async def test_short_texts_do_not_wait_for_long_ones():
    release = threading.Event()
    pool = TokenizerPool()
    large = [asyncio.create_task(pool.run(LARGE_CHARACTERS + 1, release.wait, 30)) for _ in range(4)]
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert await pool.run(5000, lambda: "short") == "short"
    release.set()
    await asyncio.gather(*large)
    pool.close()


async def test_the_queue_for_the_tokenizer_is_bounded(monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_CALLS", 2)
    release = threading.Event()
    pool = TokenizerPool()
    waiting = [asyncio.create_task(pool.run(5000, release.wait, 30)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 texts wait for the tokenizer"):
        await pool.run(5000, release.wait)
    assert await pool.run(10, lambda: "in the loop") == "in the loop"
    release.set()
    await asyncio.gather(*waiting)
    pool.close()


async def test_a_call_that_raises_stop_iteration_ends():
    """asyncio cannot put it into a future: the caller would wait for ever, and its place would be gone."""
    pool = TokenizerPool()
    async with asyncio.timeout(20):
        for size in (10, 5000, LARGE_CHARACTERS + 1):
            with pytest.raises(RuntimeError, match="StopIteration"):
                await pool.run(size, next, iter(()))
        assert await pool.run(LARGE_CHARACTERS + 1, lambda: "next") == "next"
    pool.close()


async def test_a_long_text_leaves_the_tokenizer_to_others_over_the_wire():
    async with grpc_serving(max_prompt_characters=50) as (_, address), AsyncClient(address) as client:
        with pytest.raises(Exception, match="characters are more than"):
            await client.tokenize("x" * 51)


async def test_choices_are_bounded():
    async with serving(max_choices=3) as service:
        for request in outputs(GenerateRequest("a", n=4)):
            with pytest.raises(InvalidRequest, match="n: 4 is more than this server gives, 3"):
                await collect(service, request)
        for request in outputs(GenerateRequest("a", n=3)):
            await collect(service, request)
        await at_rest(service)


@pytest.mark.parametrize("scope", [Scope.PRIORITY, Scope.ADMIN, Scope.GENERATE])
async def test_priority_needs_a_scope(scope):
    async with serving() as service:
        token = auth._CALLER.set(Caller(name="k", sha256="0" * 64, tenant="t", scopes=[Scope.GENERATE, scope]))
        try:
            await collect(service, GenerateRequest("a", priority=1))
            if scope is Scope.GENERATE:
                with pytest.raises(PermissionDenied, match="priority"):
                    await collect(service, GenerateRequest("a", priority=-1))
            else:
                await collect(service, GenerateRequest("a", priority=-1))
        finally:
            auth._CALLER.reset(token)


async def test_tokenising_over_http_is_charged_too():
    async with serving(tenant_rate=Rate(0.001, 1)) as service:
        transport = httpx.ASGITransport(build_app(Models([service])))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = [
                await client.post("/tokenize", json={"prompt": "x"}, headers={"x-rootward-tenant": "t"}) for _ in "12"
            ]
    assert [answer.status_code for answer in answers] == [200, 429]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * 4097}, "messages"),
        ("completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ("completions", {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ("completions", {"prompt": [70_000] * 257}, "prompt"),  # by its length, not by its first token
    ],
)
async def test_long_lists_are_refused_by_their_length(path, body, field):
    async with serving() as service:
        app = httpx.ASGITransport(build_app(Models([service])))
        async with httpx.AsyncClient(transport=app, base_url="http://gateway") as client:
            answer = await client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert re.search("more than|leave no room", answer.json()["error"]["message"])


def call_with(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def item_with(arguments):
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}


LISTS = "[" + "[]," * (MAX_CONTAINERS // 2) + "[]]"


@pytest.mark.parametrize("first", ["{}", '"', LISTS], ids=["object", "broken", "lists"])
async def test_arguments_of_calls_are_bounded_together_as_a_body_is(first, monkeypatch):
    """They are JSON in texts, which the check of the body does not count: 2 MB of them held the event loop for more than a second."""
    monkeypatch.setattr(schemas, "json", None)  # nothing is parsed
    async with serving() as service:
        app = httpx.ASGITransport(build_app(Models([service])))
        async with httpx.AsyncClient(transport=app, base_url="http://gateway") as client:
            texts = [first, LISTS, LISTS]
            messages = [{"role": "user", "content": LISTS}, *map(call_with, texts)]
            chat = await client.post("/v1/chat/completions", json={"messages": messages})
            response = await client.post("/v1/responses", json={"input": [*map(item_with, texts)]})
    for answer, field in ((chat, "messages"), (response, "input")):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert "arrays and objects are more than" in answer.json()["error"]["message"]


def test_brackets_in_the_texts_of_arguments_do_not_count():
    text = json.dumps({"content": "[" * MAX_CONTAINERS})
    messages = [call_with(text), call_with(text)]
    assert len(schemas.ChatRequest.model_validate({"messages": messages}).messages) == 2


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (G.GenerateRequest(chat=G.ChatPrompt(messages=[G.ChatMessage()] * 4097)), "chat.messages"),
        (
            G.GenerateRequest(
                chat=G.ChatPrompt(messages=[G.ChatMessage()], template_kwargs_json=f'{{"a":[{LISTS},{LISTS}]}}')
            ),
            "chat.template_kwargs_json",
        ),
        (
            G.GenerateRequest(
                chat=G.ChatPrompt(messages=[G.ChatMessage()], template_kwargs_json="[" * 9999 + "]" * 9999)
            ),
            "chat.template_kwargs_json",
        ),
        (G.GenerateRequest(text="a", decoding=G.Decoding(bad_sequences=[G.TokenIds()] * 257)), "bad_words"),
        (G.GenerateRequest(text="a", decoding=G.Decoding(logit_bias=dict.fromkeys(range(1025), 1.0))), "logit_bias"),
    ],
    ids=["messages", "lists", "depth", "bad words", "biases"],
)
def test_messages_that_take_long_to_convert_are_refused_before(message, field, monkeypatch):
    monkeypatch.setattr(servicer, "Chat", None)
    monkeypatch.setattr(public_codec, "Sampling", None)
    with pytest.raises(InvalidRequest) as refused:
        servicer.request_from_pb(message)
    assert refused.value.field == field


async def test_allowed_tokens_beyond_the_vocabulary_are_refused_before_they_are_sorted():
    async with grpc_serving() as (service, address), grpc.aio.insecure_channel(address) as channel:
        most = service.model.vocab_size
        request = G.GenerateRequest(text="a", decoding=G.Decoding(allowed_token_ids=[65] * (most + 1)))
        with pytest.raises(grpc.aio.AioRpcError, match=f"allowed_token_ids: {most + 1} ids are more than"):
            await G_grpc.InferenceStub(channel).Generate(request)


def test_texts_are_found_at_any_depth():
    value = "x"
    for _ in range(100_000):
        value = [{"key": value}, 1, None]
    assert sorted(tokenizer.texts_in(value)) == ["key"] * 100_000 + ["x"]
    assert sorted(tokenizer.texts_in({"a": ["b", {"c": "d"}], "e": 1.0, "f": "g"})) == [
        "a",
        "b",
        "c",
        "d",
        "e",
        "f",
        "g",
    ]
