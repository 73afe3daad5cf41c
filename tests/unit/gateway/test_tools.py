"""Tool calls: found in texts however they are cut, forced by a schema, and told as OpenAI's clients expect them."""

import json
from contextlib import asynccontextmanager

import httpx
import jsonschema_rs
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from unit.gateway.service_for_tests import serving
from unit.gateway.test_http_api import real_server
from unit.gateway.tokenizers_for_tests import END, byte_level
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.app import build_app
from gateway.models import Models
from gateway.schemas import FunctionTool
from gateway.tokenizer import HuggingFaceTokenizer
from gateway.tools import CallFormat, CallParser, ToolCall, forced_schema
from rootward.core.requests import Form
from rootward.errors import InvalidRequest

TEMPLATE = (
    "{% if tools %}{% for t in tools %}<{{ t.function.name }}>{% endfor %}as <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "What time is it?"}}
CHAT = [{"role": "user", "content": "hi"}]
PARIS, NOON = ToolCall("weather", '{"city": "Paris"}'), ToolCall("clock", "{}")


def read(form, text, size, function=""):
    """(text, calls), the text arriving in pieces of this size."""
    parser = CallParser(form, function=function)
    free = "".join(parser.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = parser.finish()
    return free + rest, calls


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("form", "text", "rest", "calls"),
    [
        (CallFormat.HERMES, 'Well.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>', "Well.", [PARIS]),
        (
            CallFormat.HERMES,
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
            "",
            [PARIS, NOON],
        ),
        (CallFormat.HERMES, "a <tool_cab> is yellow <", "a <tool_cab> is yellow <", []),
        (CallFormat.HERMES, '<tool_call>{"name": "weather", "argum', '<tool_call>{"name": "weather", "argum', []),
        (CallFormat.HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (CallFormat.MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
        (CallFormat.MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[ARGS]{}', "", [PARIS, NOON]),
        (CallFormat.JSON, '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        (CallFormat.JSON, '{"name":"weather","parameters":{"city":"Paris"}}; {"name": "clock"}', "", [PARIS, NOON]),
        (CallFormat.JSON, '[{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}]', "", [PARIS]),
        (CallFormat.JSON, "It is [late].", "It is [late].", []),
        (CallFormat.JSON, '{"a": 1}', '{"a": 1}', []),
    ],
)  # fmt: skip
def test_calls_are_found_however_the_text_is_cut(form, text, rest, calls, size):
    assert read(form, text, size) == (rest, calls)


@given(st.sampled_from(CallFormat), st.text(st.sampled_from('<tool_call>[]{}":;na{}')), st.integers(1, 9))
def test_no_text_is_lost_and_no_text_breaks_the_parser(form, text, size):
    rest, calls = read(form, text, size)
    assert rest == text or calls


def test_the_text_is_the_arguments_of_the_one_function():
    assert read(CallFormat.JSON, '{"city": "Paris"}', 2, "weather") == ("", [PARIS])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>", CallFormat.HERMES),
        ("{% if tools %}[TOOL_CALLS]", CallFormat.MISTRAL),
        ("{% if tools %}", CallFormat.JSON),
    ],
)
def test_the_template_says_how_calls_are_written(template, form):
    assert CallFormat.of_template(template) is form


def test_the_schema_of_forced_calls():
    nested = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}
    schema = forced_schema(
        [FunctionTool(name="f", parameters=nested), FunctionTool(name="g", parameters={})], parallel=True
    )
    call = {"name": "f", "arguments": {"x": 1}}
    valid = jsonschema_rs.validator_for(schema).is_valid
    assert valid([call])
    assert valid([call, {"name": "g", "arguments": {"any": "thing"}}])
    for wrong in (
        [],
        call,
        [{"name": "h", "arguments": {}}],
        [{"name": "f", "arguments": {"x": "1"}}],
        [{"name": "g"}],
    ):
        assert not valid(wrong)
    once = jsonschema_rs.validator_for(
        forced_schema([FunctionTool(name="f", parameters=nested)], parallel=False)
    ).is_valid
    assert once([call])
    assert not once([call, call])
    other = nested | {"$defs": {"X": {"type": "string"}}}
    with pytest.raises(InvalidRequest, match="tools: 'X' is defined twice"):
        forced_schema(
            [FunctionTool(name="f", parameters=nested), FunctionTool(name="g", parameters=other)], parallel=True
        )


def with_tools(template=TEMPLATE):
    fast = byte_level()._tokenizer.backend_tokenizer
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END, chat_template=template))


@asynccontextmanager
async def chatting(text, template=TEMPLATE):
    """(the openai package's client, the verifier) of a model that writes this text."""
    verifier = SpellingVerifier(text=text)
    async with real_server(verifier) as (service, http):
        service.tokenizer = with_tools(template)
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
            yield client.chat.completions, verifier


async def both_ways(chats, **wanted):
    """(text, calls, finish reason) of the whole answer, which a stream tells as well."""
    wanted = {"model": "demo", "messages": CHAT, "max_tokens": 150} | wanted
    (choice,) = (await chats.create(**wanted)).choices
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    text, streamed, reason = "", [], None
    async for chunk in await chats.create(**wanted, stream=True):
        (part,) = chunk.choices
        text += part.delta.content or ""
        for call in part.delta.tool_calls or []:
            assert call.index == len(streamed)
            assert call.id
            streamed.append((call.function.name, call.function.arguments))
        reason = part.finish_reason
    assert (text, streamed, reason) == (choice.message.content or "", calls, choice.finish_reason)
    return text, calls, reason


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


async def test_calls_that_the_model_chooses():
    async with chatting("Let me see. " + CALL) as (chats, verifier):
        told = await both_ways(chats, tools=[WEATHER, CLOCK])
        assert told == ("Let me see. ", [("weather", '{"city": "Paris"}')], "tool_calls")
        prompt = byte_level().decode(verifier.requests[-1].prompt)
        assert prompt == "<weather><clock>as <tool_call><user>hi"
        assert verifier.requests[-1].structure is None
        text, calls, reason = await both_ways(chats, tools=[WEATHER], tool_choice="none")
        assert (text, calls, reason) == ("Let me see. " + CALL, [], "stop")
        assert byte_level().decode(verifier.requests[-1].prompt) == "<user>hi"


async def test_forced_calls_are_a_form_of_the_output():
    async with chatting('[{"name": "weather", "arguments": {"city": "Paris"}}]') as (chats, verifier):
        told = await both_ways(chats, tools=[WEATHER, CLOCK], tool_choice="required")
        assert told == ("", [("weather", '{"city": "Paris"}')], "tool_calls")
        form = verifier.requests[-1].structure
        assert (form.form, json.loads(form.text)["type"]) == (Form.JSON_SCHEMA, "array")
    named = {"type": "function", "function": {"name": "weather"}}
    async with chatting('{"city": "Paris"}', template="{{ messages[0].content }}") as (chats, verifier):
        told = await both_ways(chats, tools=[WEATHER, CLOCK], tool_choice=named)
        assert told == ("", [("weather", '{"city": "Paris"}')], "stop")
        assert json.loads(verifier.requests[-1].structure.text) == SCHEMA


async def test_results_go_back_to_the_model():
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    talk = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk += [{"role": "tool", "content": "rain", "tool_call_id": "a"}]
    async with chatting("It rains.") as (chats, verifier):
        assert await both_ways(chats, messages=talk, tools=[WEATHER]) == ("It rains.", [], "stop")
        prompt = byte_level().decode(verifier.requests[-1].prompt)
        assert prompt == "<weather>as <tool_call><user>hi<assistant>weather:Paris<tool>rain"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "invalid_value", "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value", "tools[0].function.name"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "often"}, "invalid_value", "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "invalid_value", "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "invalid_value", "tool_choice"),
        ({"messages": [{"role": "assistant"}]}, "invalid_value", "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "invalid_value",
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "function", "content": "x"}]}, "unsupported_parameter", "messages[0].role"),
    ],
)  # fmt: skip
async def test_refusals_name_the_parameter(body, code, param):
    async with serving() as service:
        service.tokenizer = with_tools()
        transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            answer = await client.post("/v1/chat/completions", json={"messages": CHAT} | body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


async def test_a_template_without_tools_takes_forced_calls_only():
    async with chatting("x", template="{{ messages[0].content }}") as (chats, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await chats.create(model="demo", messages=CHAT, tools=[WEATHER])
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")
