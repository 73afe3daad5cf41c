"""The `openai` package on a real model, SmolLM2-135M-Instruct with its draft head: every kind of answer, the same without speculation.

Skipped where the model is neither in the cache nor to be had from the package index.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ContentDoneEvent
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from support.processes import gateway, verifier

from benchmarks import smollm2
from rootward import demo
from rootward.engine.gguf_files import local_model

HEAD = demo.paths().target.with_name("smollm2_head")
QUESTION = "Name three colours of the rainbow."
CHAT = [{"role": "user", "content": QUESTION}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
MODES = ("auto", "disabled")  # of speculation
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "Weather of a city", "parameters": CITY}
NAMED = {"type": "function", "function": {"name": TOOL["name"]}}
TEMPLATE = (  # SmolLM2's knows no tools: these are Hermes'
    "{% if tools %}<|im_start|>system\nFunctions: {{ tools | tojson }}\nTo call one, write "
    '<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    try:
        target = Path(local_model(str(smollm2.fetch(Console()))))
    except smollm2.ModelUnavailable as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("tools")  # what a gateway reads of a model, with another template
    for file in target.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    name = ("--served-model-name", smollm2.NAME)
    with ExitStack() as running:
        head = ("--local-draft", f"head:{HEAD}", "--max-num-seqs", "4", "--max-model-len", "1024")
        worker = running.enter_context(verifier(str(target), [], *head, *name))
        front = running.enter_context(gateway(str(folder), [worker.address], *name))
        yield running.enter_context(openai.OpenAI(base_url=f"{front.http}/v1", api_key="none", max_retries=0))


def chat(client: openai.OpenAI, mode: str = "auto", **more: Any) -> Any:
    """Greedy; `more` wins."""
    wanted = {"model": smollm2.NAME, "messages": CHAT, "temperature": 0, "max_tokens": 40}
    return client.chat.completions.create(**wanted | more, extra_body={"speculation": mode})


def completion(client: openai.OpenAI, mode: str = "auto", **more: Any) -> Any:
    wanted = {"model": smollm2.NAME, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 24}
    return client.completions.create(**wanted | more, extra_body={"speculation": mode})


def response(client: openai.OpenAI, mode: str = "auto", **more: Any) -> Any:
    wanted = {"model": smollm2.NAME, "input": QUESTION, "temperature": 0, "max_output_tokens": 40}
    return client.responses.create(**wanted | more, extra_body={"speculation": mode})


def test_a_chat_whole_and_streamed_is_the_same_without_speculation(client) -> None:
    drafted, plain = (chat(client, mode) for mode in MODES)
    text = plain.choices[0].message.content
    assert "Red" in text  # a real model answers
    assert drafted.choices[0] == plain.choices[0]
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens == 40
    assert drafted.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert plain.metrics["speculative_decoding"]["num_spec_steps"] == 0
    for mode in MODES:
        parts = list(chat(client, mode, stream=True, stream_options={"include_usage": True}))
        assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == text
        assert parts[-1].usage.completion_tokens == 40


def test_a_conversation_continues(client) -> None:
    said = [*CHAT, {"role": "assistant", "content": "Red, green, blue."}, {"role": "user", "content": "Which is warm?"}]
    drafted, plain = (chat(client, mode, messages=said).choices[0] for mode in MODES)
    assert drafted == plain
    assert plain.message.content != chat(client).choices[0].message.content


def test_three_choices_contain_the_first(client) -> None:
    """At temperature 1: the seed fixes them, with speculation on."""
    wanted = {"temperature": 1, "seed": 5, "max_tokens": 16}
    three, one = ([c.message.content for c in chat(client, n=n, **wanted).choices] for n in (3, 1))
    assert one == three[:1]
    assert len(set(three)) == 3


def test_completions_whole_streamed_echoed_and_stopped(client) -> None:
    whole = completion(client, "disabled").choices[0]
    assert whole.text.startswith(" Paris")
    parts = [part.choices[0].text for part in completion(client, stream=True) if part.choices]
    assert "".join(parts) == whole.text
    assert completion(client, echo=True).choices[0].text == f"The capital of France is{whole.text}"
    stop = whole.text[8:12]
    for mode in MODES:
        cut = completion(client, mode, stop=[stop, "never occurs"]).choices[0]
        assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


def test_logprobs_of_completions_and_chats(client) -> None:
    drafted, plain = (completion(client, mode, logprobs=2).choices[0].logprobs for mode in MODES)
    assert drafted.tokens == plain.tokens
    assert drafted.token_logprobs == pytest.approx(plain.token_logprobs, abs=1e-3)
    assert all(top[token] == max(top.values()) for token, top in zip(plain.tokens, plain.top_logprobs, strict=True))
    drafted, plain = (chat(client, mode, logprobs=True, top_logprobs=2).choices[0].logprobs.content for mode in MODES)
    assert [entry.token for entry in drafted] == [entry.token for entry in plain]
    assert [entry.logprob for entry in drafted] == pytest.approx([entry.logprob for entry in plain], abs=1e-3)


class Colours(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colours: list[str] = Field(min_length=2, max_length=3)
    warm: bool


@pytest.mark.parametrize("mode", MODES)
def test_json_of_a_schema_is_parsed_by_the_package(client, mode) -> None:
    wanted = {"model": smollm2.NAME, "messages": CHAT, "temperature": 0, "max_tokens": 160}
    bounded = Colours.model_json_schema()
    bounded["properties"]["colours"]["items"]["maxLength"] = 12
    form = {"type": "json_schema", "json_schema": {"name": "colours", "schema": bounded, "strict": True}}
    told = chat(client, mode, max_tokens=160, response_format=form).choices[0]
    assert told.finish_reason == "stop"
    found = Colours.model_validate_json(told.message.content)
    assert 2 <= len(found.colours) <= 3
    assert told.message.content == chat(client, max_tokens=160, response_format=form).choices[0].message.content
    with client.chat.completions.stream(**wanted, response_format=form, extra_body={"speculation": mode}) as stream:
        (done,) = [event for event in stream if isinstance(event, ContentDoneEvent)]
    assert done.content == told.message.content


def calls(choice: Any) -> list[tuple[str, Any]]:
    found = choice.message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_whole_and_streamed(client, choice) -> None:
    tools = [{"type": "function", "function": TOOL}]
    wanted = {
        "messages": WEATHER,
        "max_tokens": 80,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    for mode in MODES:
        told = chat(client, mode, **wanted).choices[0]
        assert calls(told) == [("get_weather", {"city": "Paris"})]
        assert told.message.content is None
        deltas = [part.choices[0].delta for part in chat(client, mode, stream=True, **wanted) if part.choices]
        pieces = [call.function for delta in deltas for call in delta.tool_calls or []]
        assert "".join(piece.name or "" for piece in pieces) == "get_weather"
        assert "".join(piece.arguments for piece in pieces) == told.message.tool_calls[0].function.arguments


def test_calls_that_the_model_chooses(client) -> None:
    """Text; or calls, which a bias towards the first character of their mark makes the model choose."""
    tools = [{"type": "function", "function": {**TOOL, "strict": True}}]
    wanted = {"messages": WEATHER, "max_tokens": 80, "tools": tools}
    for more in ({"tool_choice": "none"}, {}):
        drafted, plain = (chat(client, mode, **wanted, **more).choices[0] for mode in MODES)
        assert (drafted.message.content, calls(drafted)) == (plain.message.content, calls(plain))
    form = {"response_format": {"type": "json_object"}, "parallel_tool_calls": False}
    (token,) = httpx.post(str(client.base_url.copy_with(path="/tokenize")), json={"prompt": "<"}).json()["tokens"]
    chosen = {**wanted, **form, "logit_bias": {str(token): 100}}
    for mode in MODES:
        told = chat(client, mode, **chosen).choices[0]
        assert ([name for name, _ in calls(told)], told.finish_reason) == (["get_weather"], "tool_calls")
        deltas = [part.choices[0].delta for part in chat(client, mode, stream=True, **chosen) if part.choices]
        pieces = [call.function for delta in deltas for call in delta.tool_calls or []]
        assert "".join(piece.arguments for piece in pieces) == told.message.tool_calls[0].function.arguments


def test_the_result_of_a_call_is_read(client) -> None:
    called = chat(
        client, messages=WEATHER, tools=[{"type": "function", "function": TOOL}], tool_choice=NAMED, max_tokens=80
    ).choices[0]
    (call,) = called.message.tool_calls
    said = [
        *WEATHER,
        called.message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"},
    ]
    drafted, plain = (chat(client, mode, messages=said).choices[0].message.content for mode in MODES)
    assert drafted == plain
    assert "sunny" in plain


def test_responses_whole_streamed_continued_and_with_a_call(client) -> None:
    drafted, plain = (response(client, mode) for mode in MODES)
    assert drafted.output_text == plain.output_text == chat(client).choices[0].message.content
    for mode in MODES:
        events = list(response(client, mode, stream=True))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == plain.output_text
        assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")  # of 40 tokens
    asked = {"input": "Which of them is warm?", "previous_response_id": plain.id}
    drafted, plain = (response(client, mode, **asked) for mode in MODES)
    assert drafted.output_text == plain.output_text
    assert plain.usage.input_tokens > 40  # the conversation is read
    forced = {"tools": [{"type": "function", "strict": True, **TOOL}], "tool_choice": "required"}
    for mode in MODES:
        (call,) = response(
            client, mode, input=WEATHER, max_output_tokens=80, parallel_tool_calls=False, **forced
        ).output
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


def test_errors_are_the_packages_own(client) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="other")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as missing:
        response(client, previous_response_id="resp_none")
    assert missing.value.code == "response_not_found"
    for param, code, more in (
        ("temperature", "invalid_value", {"temperature": 3e9}),
        ("max_tokens", "context_length_exceeded", {"max_tokens": 100_000}),
        ("reasoning_effort", "unsupported_parameter", {"reasoning_effort": "high"}),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, **more)
        assert (refused.value.param, refused.value.code) == (param, code)
