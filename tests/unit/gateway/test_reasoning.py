"""Thoughts in tags: found however the text is cut, told apart in whole answers and streams, by setting only."""

import json
import re
import time
from contextlib import asynccontextmanager
from functools import partial

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.gateway.test_http_api import real_server
from unit.gateway.test_tools import CALL, TEMPLATE, WEATHER, with_tools
from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.app import build_app
from gateway.reasoning import ThoughtParser

FORM = {"type": "json_object"}
CHAT = [{"role": "user", "content": "hi"}]
OPENING = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% endfor %}{{ '<think>\\n' }}"


def read(text, size, *, opened=False):
    """(thoughts, answer), the text arriving in pieces of this size."""
    parser = ThoughtParser(opened=opened)
    pieces = [*(parser.push(text[i : i + size]) for i in range(0, len(text), size)), parser.finish()]
    return "".join(thoughts for thoughts, _ in pieces), "".join(answer for _, answer in pieces)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("<think>one < two</think>\n\nYes.", False, ("one < two", "\n\nYes.")),
        (" \n<think></think>Yes.", False, ("", "Yes.")),
        ("one</think>Yes. </think>", True, ("one", "Yes. </think>")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("  <thi", False, ("", "  <thi")),
        ("Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
        ("", True, ("", "")),
    ],
)
def test_thoughts_are_found_however_the_text_is_cut(text, opened, parts, size):
    assert read(text, size, opened=opened) == parts


@given(
    st.lists(st.sampled_from(["<", "think>", "/", "<think>", "</think>", " ", "a"])), st.integers(1, 9), st.booleans()
)
def test_pieces_of_any_size_give_the_parts_of_the_whole(parts, size, opened):
    text = "".join(parts)
    begin = 0 if opened else (found := re.match(r"\s*<think>", text)) and found.end()
    thoughts, _, answer = ("", "", text) if begin is None else text[begin:].partition("</think>")
    assert read(text, size, opened=opened) == (thoughts, answer)


@given(
    st.lists(st.sampled_from(["", " ", "\n\n", "<", "th", "ink>", "<think>", " <think>a", "</th", "ink>b", "a"])),
    st.booleans(),
)
def test_tokens_of_different_lengths_give_the_parts_of_the_whole(tokens, opened):
    parser = ThoughtParser(opened=opened)
    pieces = [*map(parser.push, tokens), parser.finish()]
    assert tuple(map("".join, zip(*pieces, strict=True))) == read("".join(tokens), 1000, opened=opened)


@pytest.mark.parametrize("end", ["<think>one</think>two", "two"])
def test_blanks_before_the_text_take_time_in_proportion_to_their_number(end):
    blanks = [" " * 32] * (1 << 15)
    start_s = time.thread_time()
    parser = ThoughtParser(opened=False)
    pieces = [parser.push(text) for text in [*blanks, end]]
    assert time.thread_time() - start_s < 1.0
    assert pieces[-1] == (("one", "two") if end.startswith("<") else ("", "".join(blanks) + "two"))
    assert set(pieces[:-1]) == {("", "")}


@asynccontextmanager
async def chatting(
    text, *, template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", told_apart=True
):
    """(the openai package's chat completions, the verifier) of a model that writes this text."""
    verifier = SpellingVerifier(text=text)
    build = partial(build_app, reasoning_content=told_apart)
    async with real_server(verifier, build=build) as (service, http):
        service.tokenizer = with_tools(template)
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
            yield client.chat.completions, verifier


async def both_ways(chats, **wanted):
    """(thoughts, text, usage) of the whole answer, which a stream tells as well."""
    wanted = {"model": "demo", "messages": CHAT, "max_tokens": 150} | wanted
    whole = await chats.create(**wanted)
    message = whole.choices[0].message
    thoughts, text, usage = "", "", None
    async for chunk in await chats.create(**wanted, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for part in chunk.choices:
            thoughts += getattr(part.delta, "reasoning_content", "")
            assert getattr(part.delta, "reasoning", "") == getattr(part.delta, "reasoning_content", "")
            text += part.delta.content or ""
    assert getattr(message, "reasoning", "") == getattr(message, "reasoning_content", "")
    assert usage == whole.usage
    assert (thoughts, text) == (getattr(message, "reasoning_content", ""), message.content or "")
    return thoughts, text, usage


async def test_thoughts_are_separated_in_answers_and_streams():
    async with chatting("<think>one, two</think>Three.") as (chats, _):
        thoughts, text, usage = await both_ways(chats)
        assert (thoughts, text) == ("one, two", "Three.")
        tags = len(byte_level().encode("<think>one, two</think>"))
        assert tags <= usage.completion_tokens_details.reasoning_tokens <= tags + 2  # one token may hold both


async def test_text_stays_as_it_is_by_default():
    async with chatting("<think>one</think>Two.", told_apart=False) as (chats, _):
        thoughts, text, usage = await both_ways(chats)
        assert (thoughts, text) == ("", "<think>one</think>Two.")
        assert usage.completion_tokens_details.reasoning_tokens == 0


async def test_a_template_may_open_the_thoughts_and_reads_those_of_earlier_answers():
    for name in ("reasoning_content", "reasoning"):
        before = {"role": "assistant", "content": "two", name: "one"}
        async with chatting("three</think>four", template=OPENING) as (chats, verifier):
            assert (await both_ways(chats, messages=[*CHAT, before]))[:2] == ("three", "four")
            assert byte_level().decode(verifier.requests[-1].prompt) == "<user>hi<assistant>onetwo<think>\n"


async def test_an_output_of_a_form_has_no_thoughts():
    async with chatting("{}", template=OPENING) as (chats, _):
        assert (await both_ways(chats, response_format={"type": "json_object"}))[:2] == ("", "{}")


async def test_calls_follow_thoughts():
    async with chatting("<think>weather?</think>" + CALL, template=TEMPLATE) as (chats, _):
        told = await chats.create(model="demo", messages=CHAT, max_tokens=150, tools=[WEATHER])
        message = told.choices[0].message
        assert (message.reasoning_content, message.content) == ("weather?", None)
        assert message.tool_calls[0].function.name == "weather"


async def test_streams_are_not_resumed_where_thoughts_are_separated():
    async with chatting("x") as (chats, _):
        with pytest.raises(openai.BadRequestError) as refused:
            await chats.create(model="demo", messages=CHAT, extra_headers={"last-event-id": "3"})
        assert refused.value.param == "last-event-id"


@pytest.mark.parametrize("has_form", [True, False], ids=["form", "thoughts"])
async def test_a_stream_has_ids_of_events_exactly_if_it_can_be_resumed(has_form):
    text = '{"a": [1, 2, 3]}' if has_form else "<think>one</think>two"
    body = {"messages": CHAT, "max_tokens": 50, "stream": True} | ({"response_format": FORM} if has_form else {})
    async with real_server(SpellingVerifier(text=text), build=partial(build_app, reasoning_content=True)) as (
        service,
        http,
    ):
        service.tokenizer = with_tools(OPENING if has_form else TEMPLATE)

        async def read(**headers):
            """(status, the ids of the events, the text after each event)."""
            answer = await http.post(
                "/v1/chat/completions",
                json=body,
                headers={"x-request-id": "one", "accept": "text/event-stream"} | headers,
            )
            ids = [int(line.removeprefix("id: ")) for line in answer.text.splitlines() if line.startswith("id: ")]
            data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [choice for event in map(json.loads, data) for choice in event.get("choices", [])]
            return answer.status_code, ids, [choice["delta"].get("content", "") for choice in choices]

        status, ids, parts = await read()
        assert status == 200
        if has_form:
            assert len(ids) == len(parts) > 3
            status, more, rest = await read(**{"last-event-id": str(ids[1])})
            assert (status, more[-1]) == (200, ids[-1])
            assert "".join(parts[:2]) + "".join(rest) == "".join(parts) == text
        else:
            assert not ids
            status, _, _ = await read(**{"last-event-id": "2"})
            assert status == 400
