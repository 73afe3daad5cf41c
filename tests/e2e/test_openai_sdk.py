"""The `openai` package against the running services: what its users do, with its own types and exceptions."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import ExitStack

import httpx
import openai
import pytest
from pydantic import BaseModel
from support.processes import gateway

from rootward import demo

CHAT = [{"role": "system", "content": "Python 3."}, {"role": "user", "content": "Read a file line by line"}]
UNICODE = "naïve 😀 日本語 e\u0301 ☃️"


@pytest.fixture(scope="module")
def client(stack):
    with openai.OpenAI(base_url=f"{stack.gateway.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def chunks_of(stream):
    return [chunk for chunk in stream if chunk.choices]


def text_of(chunks, index=0):
    parts = [c.choices[0] for c in chunks if c.choices[0].index == index]
    return "".join((p.delta.content or "") if hasattr(p, "delta") else p.text for p in parts)


def test_models(client, model) -> None:
    card = client.models.retrieve(model)
    assert (card.id, card.object, card.owned_by) == (model, "model", "rootward")
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("other")
    assert refused.value.code == "model_not_found"


def test_a_chat_whole_and_streamed(client, model) -> None:
    wanted = {"model": model, "messages": CHAT, "temperature": 0, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**wanted)
    choice = whole.choices[0]
    assert whole.object == "chat.completion"
    assert whole.id == f"chatcmpl-{whole._request_id}"
    assert (choice.message.role, choice.finish_reason in ("stop", "length")) == ("assistant", True)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.completion_tokens <= 40
    events = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    *parts, last = events
    assert {e.object for e in events} == {"chat.completion.chunk"}
    assert len({e.id for e in events}) == len({e.system_fingerprint for e in events}) == 1
    assert parts[0].choices[0].delta.role == "assistant"
    assert [p.choices[0].finish_reason for p in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
    assert parts[-1].choices[0].delta.content is None
    assert text_of(parts) == choice.message.content
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert all(p.usage is None for p in parts)


def test_the_streaming_helper_puts_it_together(client, model) -> None:
    ends = {"structured_outputs": {"choice": ["for line in file:"]}}  # the package takes a cut text for a failure
    with client.chat.completions.stream(model=model, messages=CHAT, max_tokens=24, extra_body=ends) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text == "for line in file:"


def test_completions_whole_and_streamed(client, model) -> None:
    wanted = {"model": model, "prompt": demo.prompts()[0], "temperature": 0, "max_tokens": 32}
    whole = client.completions.create(**wanted, extra_body={"speculation": {"mode": "auto", "max_depth": 4}})
    assert whole.choices[0].text == text_of(chunks_of(client.completions.create(**wanted, stream=True)))
    assert whole.metrics["speculative_decoding"]["block_efficiency"] >= 1
    echoed = client.completions.create(**wanted, echo=True)
    assert echoed.choices[0].text == demo.prompts()[0] + whole.choices[0].text
    assert client.completions.create(model=model, prompt="x = ").usage.completion_tokens <= 16


async def test_the_async_client_many_at_once(stack, model) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.gateway.http}/v1", api_key="none") as client:

        async def streamed(i: int) -> str:
            stream = await client.completions.create(
                model=model, prompt=demo.prompts()[i], temperature=0, max_tokens=24, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def whole(i: int) -> str:
            wanted = {"model": model, "prompt": demo.prompts()[i], "temperature": 0, "max_tokens": 24}
            return (await client.completions.create(**wanted)).choices[0].text

        texts = await asyncio.gather(*map(streamed, range(8)))
        assert texts == await asyncio.gather(*map(whole, range(8)))
        broken = await client.completions.create(model=model, prompt="x", max_tokens=400, stream=True)
        async for _ in broken:
            break
        await broken.close()


def test_tools_and_what_else_is_not_offered_are_refused(client, model) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    for param, more in (
        ("tools", {"tools": [tool]}),
        ("reasoning_effort", {"reasoning_effort": "high"}),
        ("messages[0].content[0].type", {"messages": image}),
        ("messages[0].role", {"messages": [{"role": "function", "content": "x", "name": "f"}]}),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{"model": model, "messages": CHAT} | more)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt="x", best_of=3)
    assert refused.value.param == "best_of"


@pytest.mark.parametrize("speculation", ["auto", "disabled"])
def test_forced_tool_calls_are_valid_and_the_same_without_speculation(client, model, speculation) -> None:
    """Of the demo pair, whose template knows no tools: the form of the output alone makes them calls."""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["read", "write"]}, "line": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["name", "line"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "edit", "parameters": schema}}]
    wanted = {"model": model, "messages": CHAT, "temperature": 0, "max_tokens": 300, "tools": tools}
    more = {"extra_body": {"speculation": speculation}}
    for choice in ("required", {"type": "function", "function": {"name": "edit"}}):
        told = client.chat.completions.create(**wanted, tool_choice=choice, parallel_tool_calls=False, **more)
        assert told.choices[0].message.tool_calls, told.choices[0]
        (call,) = told.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "edit"
        assert (arguments["name"] in ("read", "write"), arguments["line"] in range(100)) == (True, True)
        assert told.choices[0].message.content is None
        plain = client.chat.completions.create(**wanted, tool_choice=choice, parallel_tool_calls=False)
        assert plain.choices[0].message.tool_calls[0].function == call.function


TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{% for m in messages %}{{ m.content }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}'
)


@pytest.fixture(scope="module")
def tools_client(stack, tmp_path_factory):
    """Of a gateway in front of the same verifier, whose chat template shows how calls are written."""
    folder = tmp_path_factory.mktemp("tools") / "target"
    folder.mkdir()
    for file in demo.paths().target.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with ExitStack() as running:
        front = running.enter_context(gateway(str(folder), [stack.verifier.address]))
        made = openai.OpenAI(base_url=f"{front.http}/v1", api_key="none", max_retries=0)
        yield running.enter_context(made)


def test_calls_that_the_model_chooses_are_the_same_without_speculation(tools_client) -> None:
    """Calls or JSON of a form: a bias towards the first character of their mark makes the model choose calls."""
    (token,) = httpx.post(str(tools_client.base_url.copy_with(path="/tokenize")), json={"prompt": "<"}).json()["tokens"]
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    schema["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "switch", "parameters": schema, "strict": True}}]
    wanted = {"model": "target", "messages": CHAT, "temperature": 0, "max_tokens": 200, "tools": tools}
    form = {"response_format": {"type": "json_object"}, "parallel_tool_calls": False, "logit_bias": {str(token): 100}}
    disabled = {"speculation": "disabled"}
    for more, calls in (({}, False), (form, True)):
        told = tools_client.chat.completions.create(**wanted, **more).choices[0]
        plain = tools_client.chat.completions.create(**wanted, **more, extra_body=disabled).choices[0]
        functions = [call.function for call in told.message.tool_calls or []]
        assert functions == [call.function for call in plain.message.tool_calls or []]
        assert (told.message.content, told.finish_reason) == (plain.message.content, plain.finish_reason)
        assert [(f.name, type(json.loads(f.arguments)["on"])) for f in functions] == [("switch", bool)] * calls
        streamed = list(tools_client.chat.completions.create(**wanted, **more, stream=True))
        assert text_of(streamed) == (told.message.content or "")
        pieces = [c.function for part in streamed for c in part.choices[0].delta.tool_calls or []]
        assert "".join(piece.arguments for piece in pieces) == "".join(f.arguments for f in functions)
        assert (len(pieces) > 2) is calls, told


@pytest.mark.parametrize(
    ("param", "code", "more"),
    [
        ("temperature", "invalid_value", {"temperature": -1}),
        ("top_logprobs", "invalid_value", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", "invalid_value", {"top_logprobs": 2}),
        ("max_tokens", "context_length_exceeded", {"max_tokens": 100_000}),
        ("max_tokens", "invalid_value", {"max_tokens": 3, "max_completion_tokens": 4}),
        ("messages", "context_length_exceeded", {"messages": [{"role": "user", "content": "x = 1\n" * 500}]}),
        ("chat_template_kwargs", "invalid_value", {"extra_body": {"chat_template_kwargs": {"tokenize": True}}}),
        ("messages", "invalid_value", {"messages": []}),
        ("messages[0].role", "invalid_value", {"messages": [{"role": "king", "content": "x"}]}),
        ("messages[0].content", "invalid_value", {"messages": [{"role": "user", "content": None}]}),
        ("n", "invalid_value", {"n": 0}),
        ("stream_options", "invalid_value", {"stream_options": {"include_usage": True}}),
    ],
)
def test_mistakes_name_the_parameter(client, model, param, code, more) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": model, "messages": CHAT} | more)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.request_id


def test_an_unknown_model_is_not_found(client) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="other", messages=CHAT)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_logprobs_of_chats_and_completions(client, model) -> None:
    wanted = {"model": model, "messages": CHAT, "temperature": 0, "max_tokens": 20}
    chat = client.chat.completions.create(**wanted, logprobs=True, top_logprobs=3)
    entries = chat.choices[0].logprobs.content
    assert len(entries) == chat.usage.completion_tokens
    assert b"".join(bytes(e.bytes) for e in entries).decode(errors="ignore").startswith(chat.choices[0].message.content)
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy
    stream = client.chat.completions.create(**wanted, logprobs=True, top_logprobs=3, stream=True)
    told = [e for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.token for e in told] == [e.token for e in entries]
    assert [e.logprob for e in told] == pytest.approx([e.logprob for e in entries], abs=1e-3)
    text = client.completions.create(model=model, prompt="import os", temperature=0, max_tokens=20, logprobs=2)
    told = text.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == text.usage.completion_tokens
    assert all(tops[t] == p for t, p, tops in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True))


@pytest.mark.parametrize("chat", [False, True])
def test_three_choices_contain_the_first(client, model, chat) -> None:
    def texts(n: int, seed: int) -> list[str]:
        if chat:
            made = client.chat.completions.create(model=model, messages=CHAT, n=n, seed=seed, max_tokens=24)
            return [c.message.content for c in made.choices]
        made = client.completions.create(model=model, prompt="import os\n", n=n, seed=seed, max_tokens=24)
        return [c.text for c in made.choices]

    three = texts(3, 11)
    assert texts(1, 11) == three[:1]
    assert texts(3, 11) == three
    assert len({*three, *texts(1, 12)}) > 1


def test_the_prompt_of_three_choices_counts_once(client, model) -> None:
    wanted = {"model": model, "prompt": "import os\n", "max_tokens": 8, "seed": 1}
    one, three = (client.completions.create(**wanted, n=n).usage for n in (1, 3))
    assert three.prompt_tokens == one.prompt_tokens
    assert one.completion_tokens < three.completion_tokens <= 24
    stream = client.completions.create(**wanted, n=3, stream=True, stream_options={"include_usage": True})
    parts = list(stream)
    assert parts[-1].usage == three
    whole = client.completions.create(**wanted, n=3)
    assert [text_of(parts[:-1], i) for i in range(3)] == [c.text for c in whole.choices]


def test_a_stop_across_chunks(client, model) -> None:
    wanted = {"model": model, "prompt": demo.prompts()[1], "temperature": 0, "max_tokens": 60}
    pieces = [c.choices[0].text for c in client.completions.create(**wanted, stream=True)]
    text = "".join(pieces)
    ends = [len("".join(pieces[:i])) for i in range(1, len(pieces))]
    stops = [text[end - 3 : end + 3] for end in ends if 6 < end < len(text) - 3]
    assert stops
    for stop in stops[:6]:
        cut = client.completions.create(**wanted, stop=[stop, "never occurs"])
        streamed = text_of(chunks_of(client.completions.create(**wanted, stop=stop, stream=True)))
        assert cut.choices[0].text == streamed == text[: text.index(stop)]
        assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", stop)


def test_characters_of_several_tokens_arrive_whole(client, model) -> None:
    body = {"structured_outputs": {"choice": [UNICODE]}}
    parts = chunks_of(
        client.chat.completions.create(model=model, messages=CHAT, max_tokens=80, stream=True, extra_body=body)
    )
    assert text_of(parts) == UNICODE
    assert not any("\ufffd" in (p.choices[0].delta.content or "") for p in parts)
    assert len(parts) > 3
    cut = client.chat.completions.create(model=model, messages=CHAT, max_tokens=80, stop="本", extra_body=body)
    assert cut.choices[0].message.content == UNICODE[: UNICODE.index("本")]


def test_structured_output_is_parsed_by_the_package(client, model) -> None:
    class Point(BaseModel):
        x: int
        label: bool

    form = client.chat.completions.parse(model=model, messages=CHAT, response_format=Point, max_tokens=120, seed=3)
    if form.choices[0].finish_reason == "stop":
        assert isinstance(form.choices[0].message.parsed, Point)
    free = client.chat.completions.create(
        model=model, messages=CHAT, response_format={"type": "json_object"}, max_tokens=200, seed=4
    )
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)


def test_a_prediction_and_the_other_parameters(client, model) -> None:
    wanted = {"model": model, "messages": CHAT, "temperature": 0, "max_tokens": 40}
    plain = client.chat.completions.create(**wanted)
    text = plain.choices[0].message.content
    predicted = client.chat.completions.create(**wanted, prediction={"type": "content", "content": text})
    assert predicted.choices[0].message.content == text
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
    changed = client.chat.completions.create(
        **wanted,
        frequency_penalty=1.5,
        presence_penalty=0.5,
        top_p=0.9,
        extra_body={"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 4, "priority": -1},
    )
    assert changed.usage.completion_tokens >= 4
    required = client.chat.completions.create(**wanted, extra_body={"speculation": "required"})
    assert required.choices[0].message.content == text
    assert required.metrics["speculative_decoding"]["num_accepted_draft_tokens"] >= 0


def test_responses_whole_streamed_and_continued(client, model) -> None:
    """The text is the chat's, with and without speculation."""
    wanted = {"model": model, "temperature": 0, "max_output_tokens": 40}
    whole = client.responses.create(**wanted, instructions="Python 3.", input=CHAT[1]["content"])
    chat = client.chat.completions.create(model=model, messages=CHAT, temperature=0, max_tokens=40)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    plain = client.responses.create(**wanted, input=CHAT, extra_body={"speculation": "disabled"})
    assert plain.output_text == whole.output_text
    assert plain.metrics["speculative_decoding"]["num_spec_steps"] == 0
    with client.responses.stream(**wanted, input=CHAT) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response() if whole.status == "completed" else None
    assert text == whole.output_text
    assert final is None or final.output_text == text
    again = client.responses.create(**wanted, input="And the next one?", previous_response_id=plain.id)
    said = [
        *CHAT,
        {"role": "assistant", "content": plain.output_text},
        {"role": "user", "content": "And the next one?"},
    ]
    stateless = client.responses.create(**wanted, input=said, store=False)
    assert again.output_text == stateless.output_text
    assert again.usage.input_tokens == stateless.usage.input_tokens
    assert client.responses.retrieve(again.id).to_dict() == again.to_dict()
    client.responses.delete(again.id)
    for gone in (again.id, stateless.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)


def test_responses_call_functions(client, model) -> None:
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "switch", "parameters": schema, "strict": True}
    wanted = {"model": model, "input": CHAT, "temperature": 0, "max_output_tokens": 300, "tools": [tool]}
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.responses.create(**wanted, **forced).output
    assert (call.name, type(json.loads(call.arguments)["on"])) == ("switch", bool)
    events = list(client.responses.create(**wanted, **forced, stream=True))
    assert events[-1].response.output[0].arguments == call.arguments
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=model, input="x", tools=[{"type": "web_search"}])
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools[0].type")
