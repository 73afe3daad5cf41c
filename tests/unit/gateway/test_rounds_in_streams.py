"""`return_trees` of streams: every round is in one of the chunks, also while no text is final."""

import json
from contextlib import asynccontextmanager

import httpx
import pytest
from unit.gateway.service_for_tests import IDS, TEXT, serving
from unit.gateway.test_tools import CALL, WEATHER, with_tools
from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import END_ID, SpellingVerifier

from gateway.app import build_app
from gateway.models import Models

ALMOST = TEXT[:-1] + "2"  # differs from the text in the last character: all of it is held back
THOUGHTS = "<think>one two</think>\n\nthree four"


@asynccontextmanager
async def asked(text, run=3):
    """An HTTP client of a model that writes this text in rounds of this many tokens."""
    async with serving(SpellingVerifier(text=text, run=run)) as service:
        service.tokenizer = with_tools()
        transport = httpx.ASGITransport(
            build_app(Models([service]), reasoning_content=True), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client


async def chunks_of(client, path, **fields):
    body = {"stream": True, "return_trees": True, "temperature": 0, "max_tokens": 200} | fields
    answer = await client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def tokens_of(chunks):
    """The tokens of each round."""
    return [
        "".join(one["tokens"]) for chunk in chunks for choice in chunk["choices"] for one in choice.get("rounds", ())
    ]


def rounds_of(text, run=3):
    """The tokens of each round, as the verifier writes them."""
    ids, decode = [*byte_level().encode(text), END_ID], byte_level().decode
    return [decode(ids[i : i + run], skip_special_tokens=False) for i in range(0, len(ids), run)]


PROMPTS = {
    "completions": {"prompt": "a"},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {}},
}


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("interval", [0, 4])
@pytest.mark.parametrize("stop", [[], ["def f(x): return x + 2"], [ALMOST], ["return"]])
async def test_no_round_is_lost_while_a_stop_string_could_match(path, interval, stop):
    async with asked(TEXT) as client:
        chunks = await chunks_of(client, path, **PROMPTS[path], stop=stop, stream_interval=interval)
        expected = rounds_of(TEXT)
        told = tokens_of(chunks)
        assert told == expected[: len(told)]
        if stop != ["return"]:
            assert len(told) == len(expected) == -(-len(IDS) // 3)
        written = "".join(
            choice["text"] if path == "completions" else choice["delta"].get("content", "")
            for chunk in chunks
            for choice in chunk["choices"]
        )
        assert written == (TEXT if stop != ["return"] else TEXT.partition("return")[0])


@pytest.mark.parametrize("run", [1, 2, 7])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (THOUGHTS, {}),
        (f"Well. {CALL}", {"tools": [WEATHER]}),
        (f"<think>a</think>{CALL}", {"tools": [WEATHER], "stop": [CALL + "!"]}),
        (TEXT, {"stop": [ALMOST], "n": 2}),
        (TEXT, {"stop": [ALMOST], "logprobs": True}),
    ],
    ids=["thoughts", "calls", "both", "choices", "logprobs"],
)
async def test_no_round_is_lost_while_a_parser_holds_text(text, fields, run):
    async with asked(text, run) as client:
        chunks = await chunks_of(client, "chat/completions", **PROMPTS["chat/completions"], **fields)
        for index in range(fields.get("n", 1)):
            own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert tokens_of(own) == rounds_of(text, run)


async def test_a_chunk_of_a_round_alone_has_an_empty_content():
    async with asked(TEXT) as client:
        chunks = await chunks_of(client, "chat/completions", **PROMPTS["chat/completions"], stop=[ALMOST])
        first, *held, last = [chunk["choices"][0] for chunk in chunks]
        assert first["delta"] == {"role": "assistant", "content": ""}
        empty = [choice for choice in held if choice["delta"] == {"content": ""}]
        assert len(empty) >= 2
        for choice in empty:
            assert (choice["finish_reason"], choice["logprobs"], len(choice["rounds"])) == (None, None, 1)
        assert last["finish_reason"] == "stop"


async def test_without_return_trees_nothing_is_sent_while_no_text_is_final():
    async with asked(TEXT) as client:
        fields = PROMPTS["chat/completions"] | {"stop": [ALMOST], "return_trees": False}
        chunks = await chunks_of(client, "chat/completions", **fields)
        assert not any("rounds" in choice for chunk in chunks for choice in chunk["choices"])
        assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == [TEXT, None]


async def test_responses_have_no_rounds():
    """Events of OpenAI's have no place for them."""
    async with asked(TEXT) as client:
        answer = await client.post("/v1/responses", json={"input": "a", "stream": True, "return_trees": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_trees")
