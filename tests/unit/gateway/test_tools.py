"""Tool calls: found in texts however they are cut, forced by a schema, and told as OpenAI's clients expect them."""

import json
import re
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise

import httpx
import jsonschema_rs
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast
from unit.gateway.service_for_tests import IDS, serving
from unit.gateway.test_http_api import events, real_server
from unit.gateway.tokenizers_for_tests import END, byte_level
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway import streaming
from gateway.app import build_app
from gateway.models import Models
from gateway.schemas import FunctionTool
from gateway.settings import GatewaySettings
from gateway.tokenizer import HuggingFaceTokenizer
from gateway.tools import (
    MARKS,
    CallFormat,
    CallParser,
    CallPart,
    Tools,
    call_format_of,
    forced_schema,
    grammar_of_choice,
)
from rootward.core.requests import MAX_FORM, Form, Structure
from rootward.core.tree import root_only
from rootward.engine.grammar import Grammars, Vocabulary

CALL_IN_TEMPLATE = (
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
)
TEMPLATE = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    + CALL_IN_TEMPLATE
    + "{% endfor %}{% endfor %}"
)


def template_of(call):
    """TEMPLATE with calls written in another way."""
    return TEMPLATE.replace(CALL_IN_TEMPLATE, call)


NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
LLAMA = template_of(f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}')
MISTRAL = template_of(f'[TOOL_CALLS] [{{"name": "{NAME}", "arguments": {ARGUMENTS}, "id": "{{{{ c.id }}}}"}}]')
NEW_MISTRAL = template_of(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}")
QWEN_CODER = template_of(f"<tool_call>\n<function={NAME}>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>")
DEEPSEEK = template_of(f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "What time is it?"}}
CHAT = [{"role": "user", "content": "hi"}]
PARIS, NOON = ("weather", '{"city": "Paris"}'), ("clock", "{}")
W, C = '{"name": "weather", "arguments": {"city": "Paris"}}', '{"name": "clock", "arguments": {}}'
INFINITE = '{"arguments": {"a": 1e999}, "name": "clock"}'
HERMES = CallFormat.HERMES
TEXTS = [
    (HERMES, f"Well.<tool_call>{W}</tool_call>", ["Well.", PARIS]),
    (HERMES, f"<tool_call>\n{W}\n</tool_call>\n<tool_call>\n{C}\n</tool_call>", [PARIS, NOON]),
    (HERMES, f"<tool_call>{W}</tool_call>\nThat is <all>.", [PARIS, "\nThat is <all>."]),
    (HERMES, "a <tool_cab> is yellow <", ["a <tool_cab> is yellow <"]),
    (HERMES, "  ", ["  "]),
    (HERMES, '<tool_call>{"name": "weather", "argum', ['<tool_call>{"name": "weather", "argum']),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Pa', [("weather", '{"city": "Pa')]),
    (HERMES, "<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
    (HERMES, f"<tool_call>{{bad}}</tool_call><tool_call>{C}</tool_call>", ["<tool_call>{bad}</tool_call>", NOON]),
    (HERMES, f"<tool_call>{W[:-1]}</tool_call><tool_call>{C}}}</tool_call>", [PARIS, NOON]),  # too few brackets, too many
    (HERMES, f'<tool_call>{C[:-2]}"a": [1}}</tool_call><tool_call>{W}</tool_call>', [("clock", '{"a": [1}'), PARIS]),
    (HERMES, '<tool_call>{"name": "clock", "arguments": null}</tool_call>', [NOON]),
    (HERMES, '<tool_call>{"name": "clock", "arguments": NaN}</tool_call>', ['<tool_call>{"name": "clock", "arguments": NaN}</tool_call>']),
    (HERMES, '<tool_call>{"arguments": {"a": "</tool_call>\\""}, "name": "clock"}</tool_call>', [("clock", '{"a": "</tool_call>\\""}')]),
    (HERMES, '<tool_call>{"arguments": {"a": "\\ud83d é"}, "name": "clock"}</tool_call>', [("clock", '{"a": "\\ud83d \\u00e9"}')]),
    (HERMES, f"<tool_call>{INFINITE}</tool_call>", [f"<tool_call>{INFINITE}</tool_call>"]),
    (HERMES, '<tool_call>{"name": "Alice", "arguments": {}}</tool_call>', ['<tool_call>{"name": "Alice", "arguments": {}}</tool_call>']),
    (CallFormat.MISTRAL, f"[TOOL_CALLS][{W}, {C}]", [PARIS, NOON]),
    (CallFormat.MISTRAL, f'So: [TOOL_CALLS] [{W[:-1]}, "id": "abc{{}}xyz"}}]', ["So: ", PARIS]),
    (CallFormat.MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[CALL_ID]a1[ARGS]{}', [PARIS, NOON]),
    (CallFormat.MISTRAL, "[TOOL_CALLS]other[ARGS]{}", ["[TOOL_CALLS]other[ARGS]{}"]),
    (CallFormat.JSON, W.replace("arguments", "parameters"), [PARIS]),
    (CallFormat.JSON, f'{W}; {{"name": "clock"}}', [PARIS, NOON]),
    (CallFormat.JSON, f'{{"type": "function", {W[1:]}', [PARIS]),
    (CallFormat.JSON, '[{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}]', [PARIS]),
    (CallFormat.JSON, f"[{W}]\n\nDone.", [PARIS, "Done."]),
    (CallFormat.JSON, "It is [late].", ["It is [late]."]),
    (CallFormat.JSON, ' {"name": "Alice", "age": 30}', [' {"name": "Alice", "age": 30}']),
    (CallFormat.JSON, '{"name": "Alice", "arguments": {}}', ['{"name": "Alice", "arguments": {}}']),
    (CallFormat.JSON, '{"name": "clock", "age": 30}', ['{"name": "clock", "age": 30}']),
]  # fmt: skip


def parser_of(form, **options):
    return CallParser(form, names=["weather", "clock"], **options)


def read(parser, text, cuts):
    """Texts and (name, arguments) of the calls in their order, the text arriving in pieces that end at `cuts`."""
    parts = [part for begin, end in pairwise([0, *cuts, len(text)]) for part in parser.push(text[begin:end])]
    told = []
    for part in [*parts, *parser.finish()]:
        if isinstance(part, str):
            told[-1:] = [told[-1] + part] if told and isinstance(told[-1], str) else [*told[-1:], part]
        elif part.name:
            assert part.arguments == ""
            assert part.index == sum(isinstance(one, tuple) for one in told)
            told.append((part.name, ""))
        else:
            told[-1] = (told[-1][0], told[-1][1] + part.arguments)
    return told


@pytest.mark.parametrize(("form", "text", "told"), TEXTS)
def test_calls_are_found_however_the_text_is_cut(form, text, told):
    for cuts in ([], range(1, len(text)), *([at] for at in range(len(text)))):
        assert read(parser_of(form), text, cuts) == told


FRAGMENTS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "weather", W, C, '"arguments": ']
FRAGMENTS += '{"name":}[]<,; \n\\a'


@given(st.sampled_from(CallFormat), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.data())
def test_parts_of_a_text_in_pieces_equal_those_of_the_whole_text(form, fragments, data):
    text = "".join(fragments)
    whole = read(parser_of(form), text, [])
    assert read(parser_of(form), text, sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))) == whole
    if all(isinstance(part, str) for part in whole):
        assert "".join(whole) == text


def test_a_call_is_streamed_while_it_is_generated():
    parser = parser_of(HERMES)
    told = parser.push('<tool_call>{"name": "weather", "arguments": {"ci')
    assert told == [CallPart(0, "weather", ""), CallPart(0, "", '{"ci')]
    assert parser.push('ty": "Pa') == [CallPart(0, "", 'ty": "Pa')]


def test_forced_calls_are_returned_as_far_as_they_came():
    assert read(parser_of(CallFormat.JSON, function="weather"), '{"city":', [2]) == [("weather", '{"city":')]
    assert read(parser_of(CallFormat.JSON, function="weather"), "", []) == [("weather", "")]
    assert read(parser_of(CallFormat.JSON, forced=True), f"[{W}, {C[:-2]}", [9]) == [PARIS, ("clock", "{")]
    assert read(parser_of(CallFormat.JSON, forced=True), '[{"name": "wea', [9]) == []


def test_only_the_first_of_calls_that_may_not_be_parallel():
    for form, text, told in TEXTS:
        calls = [part for part in told if isinstance(part, tuple)]
        read_back = read(parser_of(form, parallel=False), text, range(1, len(text)))
        assert [part for part in read_back if isinstance(part, tuple)] == calls[:1]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, Tools.NONE),
        ("{{ messages }}", Tools.NONE),
        ("{{ messages[0].content }} no tools are supported here", Tools.NONE),
        ("{% if tools %}with tools{% endif %}", Tools.NONE),
        ("{{ tools }}<tool_call>", Tools.UNKNOWN),
        ("{{ tools }}{% if messages[1] %}{{ raise_exception('no') }}{% endif %}", Tools.UNKNOWN),
        (TEMPLATE, HERMES),
        (LLAMA, CallFormat.JSON),
        (MISTRAL, CallFormat.MISTRAL),
        (NEW_MISTRAL, CallFormat.MISTRAL),
        (QWEN_CODER, Tools.UNKNOWN),
        (DEEPSEEK, Tools.UNKNOWN),
    ],
)
def test_the_template_shows_how_calls_are_written(template, form):
    assert call_format_of(with_tools(template)) is form


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
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}, "x": {"const": {"$ref": "#"}}}}
    other = nested | {"$defs": {"X": {"type": "string"}}}
    given = [FunctionTool(name=n, parameters=p) for n, p in zip("fgt", (nested, other, tree), strict=True)]
    valid = jsonschema_rs.validator_for(forced_schema(given, parallel=True)).is_valid
    deep = {"name": "t", "arguments": {"next": {"next": {}}, "x": {"$ref": "#"}}}
    assert valid([call, {"name": "g", "arguments": {"x": "1"}}, deep])
    assert not valid([{"name": "g", "arguments": {"x": 1}}])
    assert not valid([{"name": "t", "arguments": {"next": [call]}}])


SUB = {"$ref": "#/$defs/Sub"}
NAMES = ("examples", "default", "enum", "const", "$ref", "properties", "$defs")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "parameters",
    [
        lambda name: {"properties": {name: SUB}},
        lambda name: {"properties": {name: {"type": "array", "items": SUB}}, "required": [name]},
        lambda name: {"patternProperties": {re.escape(name): SUB}},
        lambda name: {"properties": {name: {"$ref": f"#/$defs/{name}"}}, "$defs": {name: SUB}},
        lambda name: {"properties": {name: {"$ref": f"#/definitions/{name}"}}, "definitions": {name: SUB}},
        lambda name: {"properties": {"properties": {"properties": {name: SUB}}}},
    ],
    ids=["property", "items", "pattern", "$defs", "definitions", "inner"],
)
def test_references_below_properties_named_as_keywords_lead_to_definitions_of_their_own_function(name, parameters):
    """Another function has the name of the definition. The compiler of forms agrees."""
    schema = {"type": "object", "$defs": {}, "additionalProperties": False} | parameters(name)
    schema["$defs"] = schema["$defs"] | {"Sub": {"type": "integer"}}
    other = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    functions = [FunctionTool(name=n, parameters=p, strict=True) for n, p in (("f", schema), ("Sub", other))]
    forced = forced_schema(functions, parallel=True)
    valid, expected = jsonschema_rs.validator_for(forced).is_valid, jsonschema_rs.validator_for(schema).is_valid
    written = grammar_of_choice(CallFormat.JSON, functions, parallel=True, output=None, marks=())
    values = (1, "x", {"a": "x"}, [1], ["x"], [{"a": "x"}], {name: 1}, {name: "x"}, {name: {"a": "x"}})
    texts = {}
    for key in (name, "properties"):
        for value in values:
            fits = expected({key: value})
            assert valid([{"name": "f", "arguments": {key: value}}]) is fits, (key, value)
            texts[json.dumps({"name": "f", "arguments": {key: value}})] = fits
    assert set(texts.values()) == {True, False}
    forms = {
        Structure(Form.JSON_SCHEMA, json.dumps(forced)): "[%s]",
        Structure(Form.GRAMMAR, written): "%s",
    }
    for structure, form in forms.items():
        for text, fits in texts.items():
            assert fitting(structure, form % text) is fits, text


def fitting(structure, text):
    """Whether the text has this form."""
    tokenizer, end = byte_level(), IDS[-1]
    made = LLTokenizer(tokenizer.backend_json, n_vocab=tokenizer.num_ids, eos_token=[end])
    matcher = Grammars(lambda: Vocabulary(made, tokenizer.num_ids, (end,))).matcher(structure)
    if not matcher.advance(tokenizer.encode(text)):
        return False
    return bool(np.unpackbits(matcher.masks(root_only()), axis=1, bitorder="little")[0][end])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keyword", ["properties", "patternProperties", "dependentSchemas", "dependencies", "$defs"])
def test_references_move_and_data_that_looks_like_references_stays(keyword, name):
    """`name` is a name below the keyword, and a keyword below the name."""
    data = {"$ref": "#/$defs/Sub", "properties": {"enum": SUB}}
    kept = {"const": data, "enum": [data], "default": data, "examples": [data]}
    moved = {"$ref": "#/$defs/f/$defs/Sub"}
    given, expected = ({keyword: {name: kept | {"items": [one]}}, "not": one} for one in (SUB, moved))
    schema = forced_schema([FunctionTool(name="f", parameters=given)], parallel=True)
    assert schema["$defs"] == {"f": expected}


def with_tools(template=TEMPLATE):
    fast = byte_level()._tokenizer.backend_tokenizer
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END, chat_template=template))


@asynccontextmanager
async def asked(text=None, template=TEMPLATE):
    """(the verifier, an HTTP client without a server between) of a model that writes this text."""
    verifier = SpellingVerifier() if text is None else SpellingVerifier(text=text)
    async with serving(verifier) as service:
        service.tokenizer = with_tools(template)
        transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield verifier, client


@asynccontextmanager
async def chatting(text, template=TEMPLATE, *, tokenizer=None, **options):
    """(the openai package's client, the verifier) of a model that writes this text."""
    verifier = SpellingVerifier(text=text)
    async with real_server(verifier, build=partial(build_app, **options)) as (service, http):
        service.tokenizer = tokenizer or with_tools(template)
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
            if call.id:
                assert (call.index, call.type, call.function.arguments) == (len(streamed), "function", "")
                streamed.append((call.function.name, ""))
            else:
                assert (call.index, call.function.name) == (len(streamed) - 1, None)
                streamed[-1] = (streamed[-1][0], streamed[-1][1] + call.function.arguments)
        reason = part.finish_reason
    assert (text, streamed, reason) == (choice.message.content or "", calls, choice.finish_reason)
    return text, calls, reason


CALL = f"<tool_call>{W}</tool_call>"


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (TEMPLATE, CALL),
        (MISTRAL, f"[TOOL_CALLS] [{W}]"),
        (NEW_MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'),
        (LLAMA, W.replace("arguments", "parameters")),
    ],
)
async def test_calls_that_the_model_chooses(template, written):
    before = "" if template == LLAMA else "Let me see. "
    async with chatting(before + written, template) as (chats, verifier):
        assert await both_ways(chats, tools=[WEATHER, CLOCK]) == (before, [PARIS], "tool_calls")
        assert byte_level().decode(verifier.requests[-1].prompt) == "<weather><clock><user>hi"
        assert verifier.requests[-1].structure is None
        text, calls, reason = await both_ways(chats, tools=[WEATHER], tool_choice="none")
        assert (text, calls, reason) == (before + written, [], "stop")
        assert byte_level().decode(verifier.requests[-1].prompt) == "<user>hi"
        text, calls, _ = await both_ways(chats, tools=[CLOCK])
        assert (text, calls) == (before + written, [])


async def test_special_tokens_begin_the_calls_of_mistral(monkeypatch):
    fast = Fast.from_str(byte_level().backend_json)
    fast.add_special_tokens(["[TOOL_CALLS]"])
    own = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END, chat_template=MISTRAL))
    monkeypatch.setattr("unit.gateway.verifier_for_tests.byte_level", lambda: own)
    async with chatting(f"[TOOL_CALLS] [{W}, {C}]", tokenizer=own) as (chats, _):
        assert await both_ways(chats, tools=[WEATHER, CLOCK]) == ("", [PARIS, NOON], "tool_calls")
        one = await both_ways(chats, tools=[WEATHER, CLOCK], parallel_tool_calls=False)
        assert one == ("", [PARIS], "tool_calls")


async def test_calls_that_are_cut_are_returned_as_far_as_they_came():
    cut = len(byte_level().encode(CALL)) - 20
    async with chatting(CALL) as (chats, _):
        text, ((name, arguments),), reason = await both_ways(chats, tools=[WEATHER], max_tokens=cut)
        assert (text, name, reason) == ("", "weather", "length")
        assert PARIS[1].startswith(arguments)
    async with chatting(f"[{W}]") as (chats, _):
        wanted = {"tools": [WEATHER], "tool_choice": "required"}
        assert await both_ways(chats, **wanted, max_tokens=4) == ("", [], "length")


async def test_a_silent_stream_has_comments(monkeypatch):
    """Also while tokens come whose text is held back."""
    monkeypatch.setattr(streaming, "SILENCE_S", 1e-9)
    verifier = SpellingVerifier(text='<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>')
    async with real_server(verifier) as (service, http):
        service.tokenizer = with_tools()
        wanted = {"model": "demo", "messages": CHAT, "max_tokens": 150, "tools": [WEATHER], "stream": True}
        answer = await http.post("/v1/chat/completions", json=wanted)
    events = answer.text.split("\n\n")
    first = next(i for i, event in enumerate(events) if "tool_calls" in event)
    assert ": keep-alive" in events[1:first]


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


async def test_what_cannot_change_the_answer_is_taken():
    hint = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "hi"}
    labels = {"prompt_cache_retention": "24h", "include_reasoning": True, "return_tokens_as_token_ids": False}
    template = TEMPLATE.replace("<{{ t.function.name }}>", "{{ t | tojson }}")
    async with asked("x", template) as (verifier, client):
        for more, label in (({}, {}), (labels | {"cache_prompt": True}, hint)):
            said = [{"role": "user", "content": [part | label]}]
            body = {"messages": said, "tools": [WEATHER | label], "max_tokens": 9} | more
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        plain, hinted = (request.prompt for request in verifier.requests)
        assert plain == hinted
        labels = {"client_metadata": {"a": "b"}, "prompt_cache_retention": "24h"}
        body = {"input": "hi", "stream": True, "stream_options": {"include_usage": True}} | labels
        assert (await client.post("/v1/responses", json=body)).status_code == 200


async def test_parts_of_a_message_are_lines():
    """As with vLLM and llama.cpp. Cursor sends parts of the Responses API to chats."""
    async with asked("x") as (verifier, client):
        for kind in ("text", "input_text", "output_text"):
            parts = [{"type": kind, "text": text} for text in ("one", "two")]
            said = [{"role": "user", "content": parts}]
            for path, name in (("chat/completions", "messages"), ("responses", "input")):
                assert (await client.post(f"/v1/{path}", json={name: said})).status_code == 200
                assert byte_level().decode(verifier.requests[-1].prompt) == "<user>one\ntwo"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_told_of_the_prompt_is_where_vllm_has_it(stream):
    """Of completions in their choices, of chats beside them; of a stream once, with its first chunk."""
    wanted = {"max_tokens": 9, "return_token_ids": True, "prompt_logprobs": 0, "stream": stream}
    async with asked() as (_, client):
        for path, more in (("completions", {"prompt": "ab"}), ("chat/completions", {"messages": CHAT})):
            answer = await client.post(f"/v1/{path}", json=wanted | more)
            chunks = [json.loads(e) for e in events(answer.text)[:-1]] if stream else [answer.json()]
            told = [chunk if "messages" in more else chunk["choices"][0] for chunk in chunks]
            prompt = byte_level().encode("<user>hi" if "messages" in more else "ab")
            assert told[0]["prompt_token_ids"] == list(prompt)
            assert [list(entry or {}) for entry in told[0]["prompt_logprobs"]] == [[], *([str(i)] for i in prompt[1:])]
            assert not any({"prompt_token_ids", "prompt_logprobs"} & one.keys() for one in told[1:])
            assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == list(IDS[:9])


async def test_results_go_back_to_the_model():
    call = {"id": "a", "index": 0, "type": "function", "function": {"name": "weather", "arguments": PARIS[1]}}
    talk = [*CHAT, {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}]
    talk += [{"role": "tool", "content": "rain", "tool_call_id": "a"}]
    async with chatting("It rains.") as (chats, verifier):
        told = await both_ways(chats, messages=talk, tools=[WEATHER], prompt_cache_key="k")
        assert told == ("It rains.", [], "stop")
        prompt = byte_level().decode(verifier.requests[-1].prompt)
        assert prompt == f"<weather><user>hi<assistant>{CALL}<tool>rain"


async def test_arguments_that_are_no_json_go_back_as_the_model_wrote_them():
    """An answer with such a call can be sent back as it came, in both APIs, or an agent could not tell the model of its mistake."""
    wrong = '{"city": Paris}'
    wrote, shown = CALL.replace(PARIS[1], wrong), CALL.replace(PARIS[1], json.dumps(wrong))
    prompt = f"<weather><user>hi<assistant>{shown}<tool>no JSON"
    async with asked(wrote) as (verifier, client):
        body = {"messages": CHAT, "tools": [WEATHER]}
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert call["function"]["arguments"] == wrong
        result = {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"}
        told = await client.post("/v1/chat/completions", json=body | {"messages": [*CHAT, message, result]})
        assert told.status_code == 200
        assert byte_level().decode(verifier.requests[-1].prompt) == prompt
        body = {"tools": [{"type": "function", **WEATHER["function"]}]}
        first = (await client.post("/v1/responses", json=body | {"input": "hi"})).json()
        result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "no JSON"}
        said = {"role": "user", "content": "hi"}
        for more in (
            {"input": [said, *first["output"], result]},
            {"input": [result], "previous_response_id": first["id"]},
        ):
            assert (await client.post("/v1/responses", json=body | more)).status_code == 200
            assert byte_level().decode(verifier.requests[-1].prompt) == prompt


async def test_arguments_nested_too_deeply_are_refused():
    async with serving() as service:
        service.tokenizer = with_tools()
        transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for depth in (63, 64, 65, *range(700, 1000)):
                arguments = "[" * depth + "]" * depth
                call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
                item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
                chat = await client.post("/v1/chat/completions", json={"messages": [*CHAT, call]})
                response = await client.post("/v1/responses", json={"input": [item], "store": False})
                assert [chat.status_code, response.status_code] == [200 if depth <= 64 else 400] * 2


def function_of(parameters, **more):
    """A tool with these parameters."""
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


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
        ({"messages": [{"role": "user", "content": "a", "id": 1}]}, "unsupported_parameter", "messages[0].id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "unsupported_parameter", "messages[0].role"),
        ({"tools": [WEATHER], "tool_choice": {"type": "auto", "function": {"name": "weather"}}}, "invalid_value", "tool_choice"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "invalid_value", "response_format"),
        ({"tools": [WEATHER], "structured_outputs": {"regex": "a"}}, "unsupported_parameter", "tools"),
        ({"tools": [WEATHER], "structured_outputs": {"json": "3"}}, "invalid_value", "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "invalid_value", "regex"),
        ({"structured_outputs": {"grammar": " "}}, "invalid_value", "grammar"),
        ({"tools": [function_of({"title": "\ud800"})]}, "invalid_value", "tools[0].function.parameters"),
        ({"tools": [function_of({"title": "x" * MAX_FORM}, strict=True)]}, "invalid_value", "tools"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": "\ud800"}}}},
            "invalid_value",
            "response_format.json_schema.schema",
        ),
    ],
)  # fmt: skip
async def test_refusals_name_the_parameter(body, code, param):
    async with serving() as service:
        service.tokenizer = with_tools()
        transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            text = json.dumps({"messages": CHAT} | body)  # as text, since httpx does not write lone surrogates
            answer = await client.post("/v1/chat/completions", content=text)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


@pytest.mark.parametrize(
    ("template", "param", "more"),
    [
        ("{{ messages[0].content }}", "tools", {"tools": [WEATHER]}),
        (QWEN_CODER, "tools", {"tools": [WEATHER]}),
        (LLAMA, "tools", {"tools": [WEATHER], "response_format": {"type": "json_object"}}),
        (MISTRAL, "tools[1].function.strict", {"tools": [CLOCK, STRICT]}),
    ],
)
async def test_calls_that_cannot_be_found_or_kept_valid_are_refused(template, param, more):
    async with chatting("x", template=template) as (chats, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await chats.create(model="demo", messages=CHAT, **more)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)


async def test_a_setting_names_the_format_of_calls():
    async with chatting(CALL, QWEN_CODER, call_formats={"demo": HERMES}) as (chats, _):
        assert await both_ways(chats, tools=[WEATHER]) == ("", [PARIS], "tool_calls")
    one = {"model": "a/one", "verifiers": ["x:1"], "tool_call_format": "json"}
    several = [one, {"model": "a/two", "verifiers": ["x:1"]}]
    assert GatewaySettings(models=several).call_formats == {"one": CallFormat.JSON}
    assert GatewaySettings(model="a/two", tool_call_format="hermes").call_formats == {"two": HERMES}


# -- Calls that are kept valid, though the model chooses them -----------------------------------------------------------

FORM = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
AB = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/X"}, "b": {"$ref": "#"}},
    "$defs": {"X": {"type": "integer"}},
}
FUNCTIONS = [FunctionTool(name="weather", parameters=AB, strict=True), FunctionTool(name="clock", parameters=AB)]
GOOD, LOOSE = '{"name": "weather", "arguments": {"a": 1, "b": {}}}', '{"name": "clock", "arguments": {"a": "x"}}'
BAD = '{"name": "weather", "arguments": {"a": "x"}}'
CALLS = "<tool_call>\n%s\n</tool_call>\n<tool_call>%s</tool_call>"


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("form", "options", "texts"),
    [
        (HERMES, {}, {"": True, "Hi <tool>": True, f"So {CALLS % (GOOD, LOOSE)} more": True, CALLS % (LOOSE, BAD): False}),
        (HERMES, {}, {"<tool_call>hm": False, "<tool_call>" + GOOD: None}),
        (HERMES, {}, {f"<think>\nHm {{</think>\nSo {CALLS % (GOOD, LOOSE)}": True, "Hm</think><tool_call>" + BAD: False}),
        (CallFormat.JSON, {}, {"<think>{</think>" + GOOD: True, "Hm {": True}),
        (HERMES, {"parallel": False}, {f"a<tool_call>{GOOD}</tool_call>": True, CALLS % (GOOD, LOOSE): False}),
        (HERMES, {"output": FORM}, {'{"answer": 3}': True, CALLS % (GOOD, LOOSE): True, "Hi": False, "": None}),
        (HERMES, {"output": FORM}, {'{"answer": 3}<tool_call>': False, CALLS % (GOOD, BAD): False}),
        (HERMES, {"output": FORM, "parallel": False}, {'{"answer": 3}': True, CALLS % (GOOD, LOOSE): False}),
        (CallFormat.JSON, {}, {"Hi {": True, "": True, f"{GOOD}; {LOOSE}": True, BAD: False, '{"a": 1}': False}),
        (CallFormat.JSON, {"parallel": False}, {GOOD: True, GOOD.replace("arguments", "parameters"): True, f"{GOOD};": False}),
    ],
)  # fmt: skip
def test_a_grammar_of_calls_that_the_model_chooses(form, options, texts, marked):
    fast = Fast.from_str(byte_level().backend_json)
    if marked:
        fast.add_tokens([AddedToken(mark, special=False) for mark in (*MARKS, "</tool_call>")])
    end = fast.token_to_id(END)
    tokenizer = LLTokenizer(fast.to_str(), n_vocab=fast.get_vocab_size(), eos_token=[end])
    grammars = Grammars(lambda: Vocabulary(tokenizer, fast.get_vocab_size(), (end,)))
    given = {"parallel": True, "output": None} | options
    structure = Structure(Form.GRAMMAR, grammar_of_choice(form, FUNCTIONS, marks=MARKS * marked, **given))
    for text, fits in texts.items():  # None: the text must go on
        matcher = grammars.matcher(structure)
        assert matcher.advance(fast.encode(text).ids) is (fits is not False), text
        allowed = np.unpackbits(matcher.masks(root_only()), axis=1, bitorder="little")[0]
        assert fits is False or bool(allowed[end]) is bool(fits), text
    if form is HERMES and marked:  # nor does the text spell the mark without its token
        spelled = [token for part in ("<tool_", "call>", BAD) for token in fast.encode(part).ids]
        assert not grammars.matcher(structure).advance(spelled)


async def test_strict_functions_and_forms_are_asked_of_the_verifier():
    async with chatting(CALL) as (chats, verifier):
        assert await both_ways(chats, tools=[STRICT, CLOCK]) == ("", [PARIS], "tool_calls")
        assert verifier.requests[-1].structure.form is Form.GRAMMAR
        form = {"type": "json_schema", "json_schema": {"name": "f", "schema": FORM}}
        assert await both_ways(chats, tools=[WEATHER], response_format=form) == ("", [PARIS], "tool_calls")
        assert "answer" in verifier.requests[-1].structure.text
        assert await both_ways(chats, tools=[WEATHER], response_format=form, tool_choice="none") == (CALL, [], "stop")
        assert verifier.requests[-1].structure.form is Form.JSON_SCHEMA


async def test_parameters_that_do_not_compile_are_refused_as_tools():
    bad = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
    named = {"type": "function", "function": {"name": "f"}}
    async with chatting(CALL) as (chats, _):
        for choice in ("auto", "required", named):
            with pytest.raises(openai.BadRequestError, match="not") as refused:
                await chats.create(model="demo", messages=CHAT, tools=[bad], tool_choice=choice)
            assert (refused.value.code, refused.value.param) == ("invalid_json_schema", "tools")
