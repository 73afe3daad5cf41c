"""Log-probabilities of the output: their number is bounded, and many of them do not hold the event loop."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import httpx
import pytest
from unit.gateway.redis_for_tests import redis_server
from unit.gateway.service_for_tests import IDS, at_rest, collect, grpc_serving, serving
from unit.gateway.test_tools import with_tools
from unit.gateway.verifier_for_tests import MODEL, SpellingVerifier

from gateway import answers, planning, response_answers, servicer, streaming, tokenizer
from gateway.admission import LogprobLimit
from gateway.app import build_app
from gateway.choices import outputs
from gateway.models import Models
from gateway.planning import MAX_OUTPUT_LOGPROBS, make_plan
from gateway.redis_store import open_store
from gateway.requests import GenerateRequest, Resume
from gateway.response_schemas import LOGPROBS
from gateway.session_store import Run
from gateway.tokenizer import TokenizerPool
from rootward.errors import InvalidRequest, Overloaded
from rootward.v1 import generate_pb2 as G
from rootward.v1 import generate_pb2_grpc as G_grpc

LONG = replace(MODEL, max_positions=1 << 17)
CHAT = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
COMPLETION = {"prompt": "a", "logprobs": 20}
RESPONSE = {"input": "a", "include": [LOGPROBS], "top_logprobs": 20}


@asynccontextmanager
async def asked(text=SpellingVerifier.text):
    """(the verifier, an HTTP client) of a model with a long context that writes this text."""
    verifier = SpellingVerifier(text=text, model=LONG)
    async with serving(verifier) as service:
        service.tokenizer = with_tools()
        transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
            yield verifier, client


# -- The bound ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "field", "outputs_", "most"),
    [
        ("chat/completions", CHAT | {"max_tokens": 8192, "n": 16}, "max_tokens", " in each of 16 outputs", 3120),
        (
            "completions",
            COMPLETION | {"max_tokens": 8192, "prompt": ["a"] * 128},
            "max_tokens",
            " in each of 128 outputs",
            390,
        ),
        (
            "completions",
            COMPLETION | {"max_tokens": 8192, "prompt": ["a"] * 4, "n": 4},
            "max_tokens",
            " in each of 16 outputs",
            3120,
        ),
        ("responses", RESPONSE | {"max_output_tokens": 65536}, "max_output_tokens", "", 49932),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_with_too_many_logprobs_is_refused_before_it_runs(path, body, field, outputs_, most, stream):
    """16 outputs of 8,192 tokens with 20 likely ones each took 1 GB, and the event loop stood still for 7 s."""
    async with asked() as (verifier, client):
        answer = await client.post(f"/v1/{path}", json=body | {"stream": stream})
        assert answer.status_code == 400
        error, given = answer.json()["error"], body.get("max_tokens") or body["max_output_tokens"]
        assert (error["param"], error["code"]) == (field, "invalid_value")
        assert error["message"] == (
            f"{field}: {given} tokens{outputs_}, with 20 top log-probabilities each, are too many for one answer; "
            f"ask for at most {most}, or for fewer log-probabilities"
        )
        assert not verifier.requests
        fewer = {"max_output_tokens" if path == "responses" else "max_tokens": most}
        assert (await client.post(f"/v1/{path}", json=body | fewer)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_with_too_many_logprobs_is_refused_over_grpc(stream):
    async with (
        grpc_serving(SpellingVerifier(model=LONG)) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        request = G.GenerateRequest(
            text="a",
            sampling=G.Sampling(n=16),
            stopping=G.Stopping(max_tokens=8192),
            response=G.ResponseOptions(logprobs=20),
        )
        stub = G_grpc.InferenceStub(channel)
        call = anext(aiter(stub.GenerateStream(request))) if stream else stub.Generate(request)
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"max_tokens: 8192 tokens in each of 16 outputs.* 3120"
        ) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def most_tokens(model=LONG, **wanted):
    return make_plan(GenerateRequest((5,), **wanted), (5,), model).first.stopping.max_tokens


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize(("n", "num_prompts"), [(1, 1), (16, 1), (1, 128), (4, 4)])
def test_the_bound_is_on_all_outputs_together(num_top, n, num_prompts):
    wanted = {"logprobs": num_top, "n": n, "num_prompts": num_prompts}
    model = replace(MODEL, max_positions=1 << 21)
    most = MAX_OUTPUT_LOGPROBS // ((1 + num_top) * n * num_prompts)
    assert most_tokens(model, max_tokens=most, **wanted) == most
    with pytest.raises(InvalidRequest, match=rf"^max_tokens: {most + 1} tokens.*at most {most}\b"):
        most_tokens(model, max_tokens=most + 1, **wanted)
    assert most_tokens(model, **wanted) == most


def test_without_max_tokens_an_answer_may_have_as_many_tokens_as_context_operator_and_logprobs_allow():
    """OpenAI's servers refuse no request because its context is long: the text ends with "length"."""
    rest = LONG.max_positions - 1
    assert most_tokens() == most_tokens(logprobs=0) == most_tokens(logprobs=7) == rest
    assert most_tokens(logprobs=20) == 49932
    plan = make_plan(GenerateRequest((5,), logprobs=20), (5,), LONG, max_output=1000)
    assert plan.first.stopping.max_tokens == 1000
    short = replace(MODEL, max_positions=4096)
    assert most_tokens(short, logprobs=20) == 4095
    assert most_tokens(max_tokens=rest) == rest


@pytest.mark.parametrize("num_top", [-1, 21, 1 << 32])
def test_numbers_of_logprobs_out_of_range_are_refused_by_their_field(num_top):
    with pytest.raises(InvalidRequest, match=rf"^logprobs: {num_top} is outside \[0, 20\]"):
        most_tokens(logprobs=num_top)


def test_outputs_know_the_number_of_prompts():
    made = outputs(GenerateRequest("a", n=2), ["a", "b", "c"])
    assert {(one.n, one.num_prompts) for one in made} == {(2, 3)}
    assert {one.num_prompts for one in outputs(GenerateRequest("a", n=2))} == {1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_without_max_tokens_ends_where_its_logprobs_are_as_many_as_an_answer_may_have(stream, monkeypatch):
    monkeypatch.setattr(planning, "MAX_OUTPUT_LOGPROBS", 24)
    async with asked() as (_, client):
        body = CHAT | {"top_logprobs": 1, "n": 2, "stream": stream}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        told = answer.json()["choices"] if not stream else choices_of(answer.text)
        for index in (0, 1):
            own = [choice for choice in told if choice["index"] == index]
            entries = [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            assert len(entries) == 6 < len(IDS)
            assert own[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "held"),
    [
        ("chat/completions", CHAT, True),
        ("chat/completions", CHAT | {"stream": True}, False),
        ("completions", COMPLETION | {"max_tokens": 100}, True),
        ("completions", COMPLETION | {"max_tokens": 100, "stream": True}, False),
        ("completions", {"prompt": "x" * 200, "max_tokens": 100, "prompt_logprobs": 2, "stream": True}, True),
        ("completions", {"prompt": "x" * 200, "max_tokens": 100, "prompt_logprobs": 2}, True),
        ("responses", RESPONSE, True),
        ("responses", RESPONSE | {"stream": True}, True),
    ],
)
async def test_the_logprobs_of_all_answers_in_progress_are_bounded(path, body, held):
    """Each answer has fewer than one may have, but 256 of them took tens of gigabytes."""
    verifier = SpellingVerifier("x" * 90, model=LONG, delay_s=0.005)
    async with serving(verifier) as service:
        service.tokenizer, service._logprob_limit = with_tools(), LogprobLimit(200)
        transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
            small = {"prompt": "a", "max_tokens": 90, "logprobs": 0}
            other = asyncio.create_task(client.post("/v1/completions", json=small))
            answer = await client.post(f"/v1/{path}", json=body)
            assert ("more than 200" in answer.text) is held
            if held and not body.get("stream"):
                assert answer.status_code == 429
                assert answer.headers["retry-after"]
            assert len((await other).json()["choices"][0]["logprobs"]["tokens"]) == 90
        assert not service._logprob_limit._shares
        await at_rest(service)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_logprobs_of_all_answers_are_bounded_over_grpc(stream):
    async with (
        grpc_serving(SpellingVerifier("x" * 90, model=LONG)) as (service, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        service._logprob_limit = LogprobLimit(200)
        stub = G_grpc.InferenceStub(channel)
        request = G.GenerateRequest(text="a", response=G.ResponseOptions(logprobs=20))
        if stream:  # a client has the first ones before the last ones are there
            assert [chunk async for chunk in stub.GenerateStream(request)]
            return
        with pytest.raises(grpc.aio.AioRpcError, match="more than 200") as caught:
            await stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# -- The event loop -----------------------------------------------------------------------------------------------------


@pytest.fixture
def threads(monkeypatch):
    """Names of the threads in which log-probabilities and rounds are written."""
    names = []

    def recorded(call):
        def recording(*arguments):
            names.append(threading.current_thread().name)
            return call(*arguments)

        return recording

    for module, name in (
        (answers, "token_logprobs"),
        (answers, "completion_logprobs"),
        (answers, "prompt_logprobs"),
        (answers, "round_object"),
        (response_answers, "token_logprobs"),
        (servicer, "logprobs_to_pb"),
    ):
        monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    return names


HTTP_ANSWERS = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT),
        ("chat/completions", CHAT | {"n": 3}),
        ("chat/completions", CHAT | {"stream": True, "stream_interval": 100}),
        ("completions", COMPLETION | {"max_tokens": 100}),
        ("completions", COMPLETION | {"max_tokens": 60, "prompt": ["a", "b"]}),
        ("completions", COMPLETION | {"max_tokens": 200, "stream": True, "stream_interval": 100}),
        ("responses", RESPONSE),
        (
            "completions",
            {"prompt": "a", "return_trees": True, "stream": True, "stream_interval": 1000, "max_tokens": 900},
        ),
    ],
)


@HTTP_ANSWERS
async def test_many_logprobs_are_written_on_a_thread(path, body, threads):
    async with asked("x" * (900 if "return_trees" in body else 200)) as (_, client):
        assert (await client.post(f"/v1/{path}", json=body)).status_code == 200
        assert threads
        assert all(name.startswith("tokenizer") for name in threads)


@HTTP_ANSWERS
async def test_few_logprobs_are_written_in_the_event_loop(path, body, threads):
    async with asked("xyz") as (_, client):
        assert (await client.post(f"/v1/{path}", json=body)).status_code == 200
        assert set(threads) == {threading.current_thread().name}


@pytest.mark.parametrize(("size", "on_a_thread"), [(3, False), (100, True)])
async def test_logprobs_of_a_prompt_count_with_the_likely_ones(size, on_a_thread, threads):
    async with asked() as (_, client):
        body = {"prompt": "x" * size, "max_tokens": 1, "prompt_logprobs": 20}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert [name.startswith("tokenizer") for name in threads] == [on_a_thread]


async def test_tokens_that_are_final_together_are_written_on_a_thread(threads):
    """Tokens without text are held until the end of a stream."""
    async with asked("x" * 200) as (_, client):
        body = CHAT | {"stream": True, "stop": ["x" * 201]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert any(name.startswith("tokenizer") for name in threads)


@pytest.mark.parametrize(("size", "on_a_thread"), [(3, False), (700, True)])
async def test_many_logprobs_are_written_on_a_thread_over_grpc(size, on_a_thread, threads):
    async with (
        grpc_serving(SpellingVerifier(text="x" * size, model=LONG)) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = G_grpc.InferenceStub(channel)
        response = G.ResponseOptions(logprobs=20, stream_interval=size)
        answer = await stub.Generate(G.GenerateRequest(text="a", response=response))
        (choice,) = answer.choices
        assert len(choice.logprobs.emitted) == len(choice.token_ids)
        chunks = [chunk async for chunk in stub.GenerateStream(G.GenerateRequest(text="a", response=response))]
        assert b"".join(chunk.logprobs.emitted for chunk in chunks) == choice.logprobs.emitted
        of_answer, of_first_chunk, *_ = threads
        assert of_answer.startswith("tokenizer") is on_a_thread
        assert of_first_chunk.startswith("tokenizer") is on_a_thread


async def test_answers_wait_for_a_thread_where_texts_are_refused(monkeypatch):
    """They are generated already; and they take no places of texts."""
    monkeypatch.setattr(tokenizer, "MAX_CALLS", 1)
    release = threading.Event()
    pool = TokenizerPool()
    waiting = [asyncio.create_task(pool.answer(5000, release.wait, 30)) for _ in range(4)]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(pool.run(5000, release.wait, 30)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await pool.run(5000, release.wait)
    waiting.append(asyncio.create_task(pool.answer(5000, release.wait, 30)))
    await asyncio.sleep(0)
    release.set()
    assert await asyncio.gather(*waiting) == [True] * 6
    pool.close()


async def test_the_log_of_a_resumed_request_is_read_on_a_thread(monkeypatch):
    names, joined = [], Run.joined

    def recording(items):
        names.append(threading.current_thread())
        return joined(items)

    monkeypatch.setattr(Run, "joined", staticmethod(recording))
    with redis_server() as url:
        async with serving(store=open_store(url)) as service:
            request = GenerateRequest("a", request_id="r", logprobs=2)
            whole = await collect(service, request)
            await at_rest(service)
            again = await collect(service, replace(request, resume=Resume(0)))
            assert again.spans == whole.spans
    assert names
    assert threading.current_thread() not in names


# -- Large answers ------------------------------------------------------------------------------------------------------


async def sent(app, path, body):
    """The messages of an answer."""
    messages, received = [], [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message):
        messages.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    return messages


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION | {"max_tokens": 30}),
        ("/v1/completions", COMPLETION | {"max_tokens": 30, "stream": True}),
        ("/v1/responses", RESPONSE | {"stream": True, "store": False}),
    ],
)
async def test_a_large_answer_is_sent_in_parts(path, body, monkeypatch):
    """The server copies each of them at once."""
    async with serving() as service:
        service.tokenizer = with_tools()
        app = build_app(Models([service]))
        _, *whole = await sent(app, path, body)
        monkeypatch.setattr(streaming, "PART_BYTES", 64)
        start, *parts = await sent(app, path, body)
    assert max(len(message["body"]) for message in whole) > 500
    assert all(len(part["body"]) < 64 + 50 for part in parts)  # and what stands around the JSON of a short event
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    text = b"".join(part["body"] for part in parts)
    assert len(text) == sum(len(message["body"]) for message in whole)
    lengths = [int(value) for name, value in start["headers"] if name == b"content-length"]
    assert lengths == ([] if body.get("stream") else [len(text)])
    for event in events(text.decode()) if body.get("stream") else [text]:
        assert event == "[DONE]" or json.loads(event)


async def test_a_stored_response_has_the_logprobs_of_the_answer():
    async with asked() as (_, client):
        answer = (await client.post("/v1/responses", json=RESPONSE)).json()
        assert answer["store"] is True
        assert len(answer["output"][0]["content"][0]["logprobs"]) == len(IDS)
        assert (await client.get(f"/v1/responses/{answer['id']}")).json() == answer


async def test_a_response_with_too_many_logprobs_to_be_stored_is_answered_all_the_same():
    async with asked("x" * 1500) as (_, client):
        answer = (await client.post("/v1/responses", json=RESPONSE)).json()
        assert answer["store"] is False
        assert len(answer["output"][0]["content"][0]["logprobs"]) == 1501


def events(text):
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def choices_of(text):
    """The choices of a stream."""
    return [choice for event in events(text)[:-1] for choice in json.loads(event)["choices"]]
