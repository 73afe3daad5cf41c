"""/v1/responses with the `openai` package: translation into chats, output items and events, stored conversations, refusals."""

import json
from contextlib import asynccontextmanager, contextmanager
from functools import partial, reduce
from pathlib import Path

import httpx
import openai
import pytest
from unit.gateway.redis_for_tests import redis_server
from unit.gateway.service_for_tests import WAIT_S, serving
from unit.gateway.test_http_api import real_server
from unit.gateway.test_tools import CALL, SCHEMA, TEMPLATE, with_tools
from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway import auth
from gateway.app import build_app
from gateway.models import Models
from gateway.redis_store import RedisStore, open_store
from gateway.response_schemas import LOGPROBS, ResponseRequest
from gateway.session_store import MemoryStore
from gateway.stored_responses import ResponseNotFound, ResponseStore, StoredResponse
from rootward.core.requests import Form

PARAMETERS = Path(__file__).resolve().parents[3] / "docs" / "parameters.md"
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}


@asynccontextmanager
async def responding(text="Hello.", *, template=TEMPLATE, verifier=None, redispatch_wait_s=WAIT_S, **options):
    """(the openai package's responses, the verifier, an HTTP client) of a model that writes this text."""
    verifier = verifier or SpellingVerifier(text=text)
    build = partial(build_app, **options)
    async with real_server(verifier, build=build, redispatch_wait_s=redispatch_wait_s) as (service, http):
        service.tokenizer = with_tools(template)
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
            yield client.responses, verifier, http


async def both_ways(responses, **wanted):
    """The whole response; the stream's last event has the same one, and its other events build the same items."""
    wanted = {"model": "demo", "input": "hi", "store": False} | wanted
    whole = await responses.create(**wanted)
    events = [event async for event in await responses.create(**wanted, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.usage is None
    final = events[-1].response
    assert events[-1].type == ("response.completed" if final.status == "completed" else "response.incomplete")
    assert without_ids(final) == without_ids(whole)
    assert [event.item for event in events if event.type == "response.output_item.done"] == final.output
    for at, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == at]
        assert own[0].type == "response.output_item.added"
        assert own[0].item.status == "in_progress"
        assert own[0].item.id == item.id
        assert {event.item_id for event in own[1:-1]} == {item.id}
        told = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert told == (item.arguments if item.type == "function_call" else item.content[0].text)
        if item.type == "message":
            deltas = [event for event in own if event.type == "response.output_text.delta"]
            logprobs = [entry for event in deltas for entry in event.to_dict()["logprobs"]]
            assert logprobs == [entry.to_dict() for entry in item.content[0].logprobs]
    return whole


def without_ids(response):
    """What two responses to one request have in common."""
    known = response.to_dict()
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in known.pop("output")]
    return {k: v for k, v in known.items() if k not in ("id", "created_at")} | {"output": items}


def prompt_of(verifier):
    return byte_level().decode(verifier.requests[-1].prompt)


async def test_a_text():
    async with responding() as (responses, verifier, _):
        told = await both_ways(
            responses, instructions="Be short.", metadata={"a": "b"}, temperature=0, extra_body={"seed": 3}
        )
        assert prompt_of(verifier) == "<system>Be short.<user>hi"
        assert (told.object, told.status, told.model) == ("response", "completed", "demo")
        assert (told.output_text, told.output[0].role) == ("Hello.", "assistant")
        assert (told.instructions, told.metadata, told.temperature) == ("Be short.", {"a": "b"}, 0)
        assert told.usage.input_tokens == len(verifier.requests[-1].prompt)
        assert told.usage.output_tokens == len(byte_level().encode("Hello.")) + 1
        assert told.usage.total_tokens == told.usage.input_tokens + told.usage.output_tokens
        assert verifier.requests[-1].seed == 3


async def test_a_text_that_is_cut_is_incomplete():
    async with responding() as (responses, _, _):
        told = await both_ways(responses, max_output_tokens=2)
        assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert told.output[0].status == "incomplete"


async def test_an_answer_without_text_has_an_empty_message():
    async with responding("") as (responses, _, _):
        told = await both_ways(responses)
        assert (told.output_text, len(told.output)) == ("", 1)


async def test_logprobs_are_of_the_answer_alone():
    async with responding("<think>a</think>bc", reasoning_content=True) as (responses, _, _):
        told = await both_ways(responses, include=[LOGPROBS], top_logprobs=2)
        entries = told.output[1].content[0].logprobs
        assert [entry.token for entry in entries][:2] == ["b", "c"]
        assert len(entries) + told.usage.output_tokens_details.reasoning_tokens == told.usage.output_tokens
        assert len(entries[0].top_logprobs) == 2


@pytest.mark.parametrize("run", [1, 3, 100])
@pytest.mark.parametrize("text", ["Hello.", "<b>", "<think>a</think>bc"])
async def test_logprobs_are_the_same_however_many_tokens_arrive_together(text, run):
    verifier = SpellingVerifier(text=text, run=run)
    async with responding(verifier=verifier, reasoning_content=True) as (responses, _, _):
        told = await both_ways(responses, include=[LOGPROBS])
        entries = told.output[-1].content[0].logprobs
        assert "".join(entry.token for entry in entries[:-1]) == told.output_text
        thoughts = told.usage.output_tokens_details.reasoning_tokens
        assert len(entries) + thoughts == told.usage.output_tokens  # the end token has one too


@pytest.mark.parametrize("run", [1, 3, 100])
async def test_logprobs_of_calls_are_not_told(run):
    async with responding(verifier=SpellingVerifier(text="Let me see. " + CALL, run=run)) as (responses, _, _):
        told = await both_ways(responses, tools=[WEATHER], include=[LOGPROBS])
        assert [item.type for item in told.output] == ["message", "function_call"]
        tokens = "".join(entry.token for entry in told.output[0].content[0].logprobs)
        assert tokens.strip() == told.output_text.strip() == "Let me see."


async def test_thoughts_are_an_item_of_their_own():
    async with responding("<think>one</think>Two.", reasoning_content=True) as (responses, _, _):
        told = await both_ways(responses)
        thoughts, message = told.output
        assert (thoughts.type, thoughts.content[0].text, thoughts.status) == ("reasoning", "one", "completed")
        assert (message.content[0].text, told.output_text) == ("Two.", "Two.")


async def test_calls_that_the_model_chooses():
    async with responding("Let me see. " + CALL) as (responses, verifier, _):
        told = await both_ways(responses, tools=[WEATHER])
        message, call = told.output
        assert (message.content[0].text, message.status) == ("Let me see. ", "completed")
        assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Paris"}', "completed")
        assert prompt_of(verifier) == "<weather><user>hi"
        assert told.tools[0].name == "weather"
        plain = await both_ways(responses, tools=[WEATHER], tool_choice="none")
        assert plain.output_text == "Let me see. " + CALL


async def test_text_between_and_after_calls():
    async with responding(f"One. {CALL}{CALL} Two.") as (responses, verifier, _):
        told = await both_ways(responses, tools=[WEATHER], store=True)
        kinds = ["message", "function_call", "function_call", "message"]
        assert [item.type for item in told.output] == kinds
        assert told.output_text == "One.  Two."
        one = await both_ways(responses, tools=[WEATHER], parallel_tool_calls=False)
        assert [item.type for item in one.output] == ["message", "function_call", "message"]
        await responses.create(model="demo", input="And?", previous_response_id=told.id)
        assert prompt_of(verifier) == f"<user>hi<assistant>One.  Two.{CALL}{CALL}<user>And?"


async def test_a_call_that_is_cut_is_incomplete():
    async with responding(CALL) as (responses, _, _):
        told = await both_ways(responses, tools=[WEATHER], max_output_tokens=len(byte_level().encode(CALL)) - 20)
        (call,) = told.output
        assert (told.status, call.status, call.name) == ("incomplete", "incomplete", "weather")
        assert '{"city": "Paris"}'.startswith(call.arguments)


async def test_an_aborted_response_has_status_incomplete():
    async with real_server(SpellingVerifier(text="word " * 40, delay_s=0.02)) as (service, http):
        service.tokenizer = with_tools()
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.responses.create(model="demo", input="hi", stream=True)
            told = []
            async for event in stream:
                service.abort([event.response.id.removeprefix("resp_")] if not told else [])
                told.append(event)
    last = told[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert (last.response.incomplete_details.reason, last.response.output[-1].status) == ("aborted", "incomplete")


async def test_forced_calls_are_a_form_of_the_output():
    text = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
    async with responding(text, template="{{ messages[0].content }}") as (responses, verifier, _):
        told = await both_ways(responses, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
        (call,) = told.output
        assert json.loads(call.arguments) == {"city": "Paris"}
        form = json.loads(verifier.requests[-1].structure.text)
        assert (form["type"], form["maxItems"]) == ("array", 1)
    async with responding('{"city": "Paris"}') as (responses, verifier, _):
        named = {"type": "function", "name": "weather"}
        told = await both_ways(responses, tools=[WEATHER], tool_choice=named)
        assert (told.output[0].name, told.tool_choice.name) == ("weather", "weather")
        assert json.loads(verifier.requests[-1].structure.text) == SCHEMA


async def test_a_form_of_the_output():
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    async with responding('{"city": "Rome"}') as (responses, verifier, _):
        told = await both_ways(responses, text={"format": form})
        assert told.text.format.to_dict() == form
        structure = verifier.requests[-1].structure
        assert (structure.form, json.loads(structure.text)) == (Form.JSON_SCHEMA, SCHEMA)
        await both_ways(responses, text={"format": {"type": "json_object"}, "verbosity": "medium"})
        assert verifier.requests[-1].structure.form is Form.JSON_OBJECT


async def test_speculation_is_reported():
    async with responding() as (responses, _, _):
        told = await both_ways(responses, extra_body={"speculation": "disabled", "seed": 1})
        assert told.metrics["speculative_decoding"]["num_draft_tokens"] == 10


async def test_the_package_parses_and_accumulates():
    async with responding('{"city": "Rome"}') as (responses, _, _):
        async with responses.stream(model="demo", input="hi", store=False) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            final = await stream.get_final_response()
        assert final.output_text == text == '{"city": "Rome"}'


# -- Conversations ------------------------------------------------------------------------------------------------------


def messages_of(*items):
    made = ResponseRequest.model_validate({"input": list(items)})
    return [message.model_dump(exclude_defaults=True) for message in made.messages]


def test_items_become_messages():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    called = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    text = {"type": "output_text", "text": "one", "annotations": [], "logprobs": []}
    assert messages_of(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [text]},
        call | {"id": "x", "status": "completed"},
        call | {"call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so"}]},
        call,
    ) == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "one",
            "reasoning_content": "hm",
            "tool_calls": [called, called | {"id": "d"}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
        {"role": "assistant", "reasoning_content": "so", "tool_calls": [called]},
    ]


async def test_a_conversation_continues_a_stored_response():
    async with responding("<think>hm</think>Yes. " + CALL, reasoning_content=True) as (responses, verifier, _):
        first = await responses.create(model="demo", input="hi", instructions="Once.", tools=[WEATHER])
        assert first.store is True
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        wanted = {"model": "demo", "input": [result], "tools": [WEATHER]}
        events = [e async for e in await responses.create(**wanted, previous_response_id=first.id, stream=True)]
        assert prompt_of(verifier) == f"<weather><user>hi<assistant>Yes. {CALL}<tool>rain"
        second = events[-1].response
        assert second.previous_response_id == first.id
        third = await responses.create(model="demo", input="And?", previous_response_id=second.id)
        assert prompt_of(verifier).endswith(f"<tool>rain<assistant>Yes. {CALL}<user>And?")
        stateless = [{"role": "user", "content": "hi"}, *[item.to_dict() for item in first.output], result]
        await responses.create(**wanted | {"input": stateless}, store=False)
        assert prompt_of(verifier) == f"<weather><user>hi<assistant>Yes. {CALL}<tool>rain"
        assert (await responses.retrieve(third.id)).to_dict() == third.to_dict()


async def test_a_response_is_stored_unless_store_is_false_and_until_it_is_deleted():
    async with responding() as (responses, _, http):
        kept = await responses.create(model="demo", input="hi")
        assert (await responses.retrieve(kept.id)).output_text == "Hello."
        deleted = await http.delete(f"/v1/responses/{kept.id}")
        assert deleted.json() == {"id": kept.id, "object": "response", "deleted": True}
        other = await responses.create(model="demo", input="hi", store=False)
        assert other.store is False
        for gone in (kept.id, other.id, "resp_none"):
            for ask in (
                responses.retrieve(gone),
                responses.delete(gone),
                responses.create(model="demo", input="x", previous_response_id=gone),
            ):
                with pytest.raises(openai.NotFoundError) as refused:
                    await ask
                assert refused.value.code == "response_not_found"
                assert refused.value.param in ("response_id", "previous_response_id")


async def test_a_tenant_does_not_find_the_responses_of_another():
    async with responding() as (responses, _, _):
        mine = {"extra_headers": {"x-rootward-tenant": "a"}}
        kept = await responses.create(model="demo", input="hi", **mine)
        for headers in ({}, {"x-rootward-tenant": "b"}):
            with pytest.raises(openai.NotFoundError):
                await responses.retrieve(kept.id, extra_headers=headers)
            with pytest.raises(openai.NotFoundError):
                await responses.delete(kept.id, extra_headers=headers)
            with pytest.raises(openai.NotFoundError):
                await responses.create(model="demo", input="x", previous_response_id=kept.id, extra_headers=headers)
        assert (await responses.retrieve(kept.id, **mine)).id == kept.id


@pytest.mark.parametrize("options", [{"max_bytes": 100}, {"lifetime_s": 0}])
async def test_a_response_that_is_not_stored_has_store_false(options):
    async with responding(stored=ResponseStore(**options)) as (responses, _, _):
        told = await responses.create(model="demo", input="hi")
        assert told.store is False
        with pytest.raises(openai.NotFoundError, match="max_stored_response_bytes"):
            await responses.retrieve(told.id)


async def test_a_store_that_is_away_is_no_reason_not_to_answer():
    async with responding(stored=ResponseStore(open_store("redis://127.0.0.1:9"))) as (responses, _, _):
        told = await responses.create(model="demo", input="hi")
        assert (told.output_text, told.store) == ("Hello.", False)
        with pytest.raises(openai.InternalServerError) as refused:
            await responses.retrieve(told.id)
        assert refused.value.status_code == 503


def answer_of(name):
    return StoredResponse({"id": name}, [])


@contextmanager
def calling(tenant):
    """As the handler of a call with a key of this tenant."""
    before = auth._CALLER.set(auth.Caller(name=tenant, sha256="0" * 64))
    yield
    auth._CALLER.reset(before)


async def stores_the_newest(store):
    """Two of each tenant, until they are deleted; those without keys count together."""
    responses = ResponseStore(store, lifetime_s=100.0, max_responses=2)
    with calling("a"):
        assert await responses.keep("a", "r2", answer_of("a2"))
    for name in ("r1", "r2", "r1", "r3"):  # r1 is stored again: r2 is the oldest
        assert await responses.keep("", name, answer_of(name))
    with calling("a"):
        assert (await responses.find("a", "r2")).answer == {"id": "a2"}
    assert (await responses.find("", "r1")).answer == {"id": "r1"}
    for gone in ("r2", "r4"):
        with pytest.raises(ResponseNotFound):
            await responses.find("", gone)
    assert await responses.keep("named", "r2", answer_of("n2"))
    with pytest.raises(ResponseNotFound):
        await responses.find("", "r1")
    await responses.delete("", "r3")
    with pytest.raises(ResponseNotFound):
        await responses.delete("", "r3")
    assert (await responses.find("named", "r2")).answer == {"id": "n2"}


async def test_the_memory_stores_within_its_bounds():
    now = [0.0]
    store = MemoryStore(now=lambda: now[0])
    await stores_the_newest(store)
    now[0] = 99.0
    assert await store.response("a", "a r2")
    now[0] = 100.0
    assert await store.response("a", "a r2") is None
    now[0] = 102.0
    assert await store.response("a", "a r2") is None
    assert not store._responses


async def test_redis_stores_within_its_bounds():
    with redis_server() as url:
        store = open_store(url)
        assert isinstance(store, RedisStore)
        await stores_the_newest(store)
        keys = {"rw:response:{:}:named r2", "rw:response:{:a}:a r2", "rw:responses:{:}", "rw:responses:{:a}"}
        assert set(await store._client.keys("rw:*")) == keys
        assert all([0 < await store._client.pttl(key) <= 100_000 for key in keys])
        assert await store._client.zrange("rw:responses:{:}", 0, -1) == ["named r2"]
        await store.close()


# -- Refusals -----------------------------------------------------------------------------------------------------------

IMAGE = {"type": "input_image", "image_url": "data:,"}
# Schemas that no answer could have: JSON that the serialiser does not write.
UNREPEATABLE = [{"maximum": 2**64}, {"title": "\ud800"}, reduce(lambda inner, _: {"items": inner}, range(300), {})]


def schema_of(schema):
    """The option for a text of this form."""
    return {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}


@pytest.mark.parametrize(
    ("code", "param", "more"),
    [
        ("unsupported_parameter", "tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("unsupported_parameter", "background", {"background": True}),
        ("unsupported_parameter", "conversation", {"conversation": "conv_1"}),
        ("unsupported_parameter", "truncation", {"truncation": "auto"}),
        ("unsupported_parameter", "prompt", {"prompt": {"id": "p"}}),
        ("unsupported_parameter", "reasoning.effort", {"reasoning": {"effort": "high"}}),
        ("unsupported_parameter", "include", {"include": ["reasoning.encrypted_content"]}),
        ("unsupported_parameter", "n", {"n": 2}),
        ("unsupported_parameter", "input[0].content[0].type", {"input": [{"role": "user", "content": [IMAGE]}]}),
        ("unsupported_parameter", "input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("invalid_value", "input[0].call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
        ("invalid_value", "input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("invalid_value", "input", {"input": []}),
        ("invalid_value", "input", {"input": None}),
        ("invalid_value", "input", {"input": [{"type": "reasoning", "summary": []}]}),
        ("invalid_value", "temperature", {"temperature": -1}),
        ("invalid_value", "max_output_tokens", {"max_output_tokens": 0}),
        ("context_length_exceeded", "max_output_tokens", {"max_output_tokens": 10_000}),
        ("context_length_exceeded", "input", {"input": "word " * 300}),
        ("invalid_value", "text.format", {"text": {"format": {"type": "json_schema"}}}),
        ("invalid_value", "tool_choice", {"tool_choice": "required"}),
        ("invalid_value", "tool_choice.type", {"tools": [WEATHER], "tool_choice": {"type": "web_search"}}),
        ("invalid_value", "tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "auto", "name": "weather"}}),
        ("invalid_value", "text.format", {"text": {"format": {"type": "text", "schema": SCHEMA}}}),
        ("invalid_value", "top_logprobs", {"top_logprobs": 2}),
        ("invalid_value", "metadata", {"metadata": {"a": 1}}),
        ("invalid_value", "previous_response_id", {"previous_response_id": "a b"}),
        *(("invalid_value", "tools[0].parameters", {"tools": [WEATHER | {"parameters": s}]}) for s in UNREPEATABLE),
        *(("invalid_value", "text.format.schema", schema_of(s)) for s in UNREPEATABLE),
    ],
)
async def test_refusals_name_the_parameter(code, param, more):
    async with serving() as service:
        service.tokenizer = with_tools()
        transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            text = json.dumps({"input": "hi"} | more)  # as text, since httpx does not write lone surrogates
            told = await client.post("/v1/responses", content=text)
        error = told.json()["error"]
        assert (told.status_code, error["code"], error["param"].partition(".a")[0]) == (400, code, param)
        assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("user", {"user": "\ud83d"}),
        ("tools[0].description", {"tools": [WEATHER | {"description": "\ud83d"}]}),
        ("text.format.name", {"text": {"format": {"type": "text", "name": "\ud83d"}}}),
        ("text.format.description", {"text": {"format": {"type": "json_object", "description": "\ud83d"}}}),
        ("input[0].call_id", {"input": [{"type": "function_call_output", "call_id": "\ud83d", "output": "x"}]}),
    ],
)
async def test_texts_that_no_answer_can_repeat_are_refused_before_anything_runs(param, more):
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        service.tokenizer = with_tools()
        transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            told = await client.post("/v1/responses", content=json.dumps({"input": "hi"} | more))
        error = told.json()["error"]
        assert (told.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
        assert not verifier.requests


async def test_options_of_a_stored_response_are_refused():
    async with responding() as (responses, _, _):
        kept = await responses.create(model="demo", input="hi")
        with pytest.raises(openai.BadRequestError) as refused:
            await responses.retrieve(kept.id, stream=True)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "stream")


async def test_fields_of_chats_are_refused_under_the_names_that_the_client_sent():
    """They were refused under those of this path, so the advice took out the right ones."""
    async with responding() as (_, _, http):
        for wrong, value in (("max_tokens", 3), ("messages", [{"role": "user", "content": "hi"}])):
            told = await http.post("/v1/responses", json={"input": "x", "max_output_tokens": 3, wrong: value})
            assert (told.status_code, told.json()["error"]["param"]) == (400, wrong)
            assert told.json()["error"]["message"].startswith(f"{wrong}: ")
        told = await http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1 << 30})
        assert told.json()["error"]["param"] == "max_output_tokens"


async def test_endpoints_that_are_not_served_are_documented():
    document = PARAMETERS.read_text(encoding="utf-8")
    async with responding() as (responses, _, http):
        kept = await responses.create(model="demo", input="hi")
        for method, path in (
            ("GET", "/v1/responses/{id}/input_items"),
            ("POST", "/v1/responses/{id}/cancel"),
            ("POST", "/v1/responses/input_tokens"),
            ("POST", "/v1/responses/compact"),
        ):
            told = await http.request(method, path.format(id=kept.id), json={"model": "demo", "input": "hi"})
            assert told.status_code in (404, 405)
            assert "is not served" in told.json()["error"]["message"]
            assert f"`{path}`" in document
    assert "`store: true`" in document.partition("## Refused")[2]


async def test_a_stream_is_not_resumed():
    async with responding() as (responses, _, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await responses.create(model="demo", input="hi", extra_headers={"last-event-id": "1"})
        assert refused.value.param == "last-event-id"


async def test_a_failure_in_mid_stream_is_raised_and_nothing_is_stored():
    dying = SpellingVerifier(text="a long text that breaks", die_after=lambda request: 4)
    async with responding(verifier=dying, redispatch_wait_s=0.1) as (responses, _, _):
        events = aiter(await responses.create(model="demo", input="hi", stream=True))
        response_id = (await anext(events)).response.id
        with pytest.raises(openai.APIError) as failed:
            [event async for event in events]
        assert failed.value.code in ("service_unavailable", "stream_interrupted")
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(response_id)
