"""Every parameter of a generation reaches the verifier as it was said, over HTTP, gRPC and the SDK, or is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast
from unit.gateway.service_for_tests import IDS, TEXT, collect, grpc_serving, serving
from unit.gateway.tokenizers_for_tests import END, byte_level, sentence_piece
from unit.gateway.verifier_for_tests import SpellingVerifier, logprob_of

from gateway.answers import completion_logprobs, round_object, token_name
from gateway.app import build_app
from gateway.detokenizer import Span
from gateway.http_errors import invalid_body
from gateway.models import Models
from gateway.requests import GenerateRequest
from gateway.response_schemas import ResponseRequest
from gateway.sampling_defaults import recommended_sampling
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.tokenizer import HuggingFaceTokenizer
from rootward.client import AsyncClient, SamplingParams
from rootward.client.types import Round
from rootward.core.requests import Form, Sampling, Structure, TokenLogprob
from rootward.errors import BadRequestError, ConfigurationError, InvalidRequest

SAMPLING = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "allowed_token_ids": [3, 5],
}
WANTED = Sampling(**(SAMPLING | {"allowed_token_ids": (3, 5)}), logit_bias=((5, 1.5), (7, -100.0)))


HELLO = [{"role": "user", "content": "hello"}]


async def post(service, body: dict[str, object], path: str = "completions") -> httpx.Response:
    transport = httpx.ASGITransport(build_app(Models([service])), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        fields = {"max_tokens": 50} | ({"prompt": "a"} if path == "completions" else {}) | body
        return await client.post(f"/v1/{path}", content=json.dumps(fields))


@pytest.mark.parametrize(("depth", "told"), [(100, "is nested 101 deep"), (20_000, "Recursion limit")])
@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_a_schema_that_is_nested_too_deeply_is_refused(field, depth, told) -> None:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    forms = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "structured_outputs": {"json": schema},
    }
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"prompt": "a", field: forms[field]})
    error = invalid_body([one | {"loc": ("body", *one["loc"])} for one in refused.value.errors()])
    assert error.field.startswith(f"{field}.")
    assert told in str(error)


async def test_processors_over_http_and_the_sdk() -> None:
    verifier = SpellingVerifier()
    async with grpc_serving(verifier) as (service, address), AsyncClient(address) as client:
        body = SAMPLING | {"logit_bias": {"7": -100, "5": 1.5}, "min_tokens": 4, "logprobs": 2}
        assert (await post(service, body)).status_code == 200
        biased = SamplingParams(**SAMPLING, logit_bias={7: -100, 5: 1.5}, min_tokens=4, logprobs=2, max_tokens=50)
        await client.generate("a", sampling=biased)
        over_http, over_grpc = verifier.requests
        for got in (over_http, over_grpc):
            assert got.sampling == WANTED
            assert got.stopping.min_tokens == 4
            assert got.logprobs == 2


async def test_parameters_that_a_request_does_not_give_are_those_recommended_for_the_model(tmp_path) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    found, verifier = recommended_sampling(str(tmp_path)), SpellingVerifier()
    some = {"temperature": 1, "top_k": -1, "top_p": None}
    async with serving(verifier) as service:
        service.http_sampling = found
        assert (await post(service, {})).status_code == (await post(service, some)).status_code == 200
    chats = [ChatRequest.model_validate({"messages": HELLO} | given) for given in ({}, some)]
    responses = [ResponseRequest.model_validate({"input": "hello"} | given) for given in ({}, some)]
    of_chats = [chat.request({}, found) for chat in (*chats, *(one.chat(one.messages) for one in responses))]
    by_model, by_client = Sampling(temperature=0.6, top_p=0.95, top_k=20), Sampling(temperature=1.0, top_p=0.95)
    assert [one.sampling for one in (*verifier.requests, *of_chats)] == [by_model, by_client] * 3


def test_without_a_file_nothing_is_recommended_and_a_broken_one_is_named(tmp_path) -> None:
    assert recommended_sampling(str(tmp_path)) == Sampling()
    for text, wrong in (
        ("{", "Expecting"),
        ('{"top_p": 2}', "top_p: 2"),
        ('{"top_k": "many"}', "top_k|str"),
        ("[]", "list"),
    ):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ConfigurationError, match=f"generation_config.json.*({wrong}).*http_sampling_defaults"):
            recommended_sampling(str(tmp_path))


async def test_bad_words_become_token_sequences() -> None:
    verifier, encode = SpellingVerifier(), byte_level().encode
    async with grpc_serving(verifier) as (service, address), AsyncClient(address) as client:
        await post(service, {"bad_words": ["def", " return"]})
        await client.generate("a", sampling=SamplingParams(bad_words=["def", " return"]))
        for got in verifier.requests:
            assert got.sampling.bad_sequences == tuple(map(encode, ["def", " def", "return", " return"]))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_TEXT = json.dumps(SCHEMA)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structure(Form.JSON_OBJECT)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Structure(Form.JSON_SCHEMA, SCHEMA_TEXT),
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Structure(Form.JSON_SCHEMA, SCHEMA_TEXT)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, Structure(Form.JSON_SCHEMA, SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, Structure(Form.JSON_SCHEMA, SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA_TEXT, "regex": None}}, Structure(Form.JSON_SCHEMA, SCHEMA_TEXT)),
        ({"structured_outputs": {"json_object": True}}, Structure(Form.JSON_OBJECT)),
        ({"structured_outputs": {"regex": "[0-9]+"}}, Structure(Form.REGEX, "[0-9]+")),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Structure(Form.GRAMMAR, "start: /a/")),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, Structure(Form.GRAMMAR, 'start: "yes" | "n\\"o"')),
    ],
)
async def test_forms_over_http(body, wanted) -> None:
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        assert (await post(service, body)).status_code == 200
        assert verifier.requests[-1].structure == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"json_object": True}, Structure(Form.JSON_OBJECT)),
        ({"json_schema": SCHEMA}, Structure(Form.JSON_SCHEMA, SCHEMA_TEXT)),
        ({"json_schema": SCHEMA_TEXT}, Structure(Form.JSON_SCHEMA, SCHEMA_TEXT)),
        ({"regex": "a|b"}, Structure(Form.REGEX, "a|b")),
        ({"grammar": "start: /a/"}, Structure(Form.GRAMMAR, "start: /a/")),
        ({}, None),
    ],
)
async def test_forms_over_the_sdk(given, wanted) -> None:
    verifier = SpellingVerifier()
    async with grpc_serving(verifier) as (_, address), AsyncClient(address) as client:
        await client.generate("a", sampling=SamplingParams(**given))
        assert verifier.requests[-1].structure == wanted
        with pytest.raises(ValueError, match="one form"):
            await client.generate("a", sampling=SamplingParams(json_object=True, regex="a"))
        with pytest.raises(BadRequestError, match=r"^structured_output: .* cannot be combined with ignore_eos"):
            await client.generate("a", sampling=SamplingParams(json_object=True, ignore_eos=True))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "big"}}, "logit_bias.5"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"min_tokens": 51}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_k": 10**30}, "top_k"),
        ({"structured_outputs": {"regex": "\ud800"}}, "regex"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": {}}}},
            "response_format",
        ),
        ({"prompt_cache_retention": "forever"}, "prompt_cache_retention"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "structured_outputs"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x" * 65]}, "bad_words"),
        ({"bad_words": ["x"], "allowed_token_ids": [5]}, "bad_words"),
        ({"bad_words": ["x"], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"echo": "yes"}, "echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
async def test_refusals_name_the_parameter(body, param) -> None:
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        response = await post(service, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert not verifier.requests


@pytest.mark.parametrize("stop", [None, "return"])
async def test_logprobs_over_http(stop) -> None:
    """One entry per emitted token, cut where the text is cut; the parts of a stream make up the whole."""
    async with serving(SpellingVerifier()) as service:
        whole = (await post(service, {"logprobs": 2, "stop": stop})).json()
        choice, told = whole["choices"][0], whole["choices"][0]["logprobs"]
        count = whole["usage"]["completion_tokens"]
        assert [len(column) for column in told.values()] == [count] * 4
        assert told["token_logprobs"] == [-0.5 * (i + 1) for i in range(count)]
        for i in range(count):
            top = told["top_logprobs"][i]
            assert top == {"token_id:100": -0.25, told["tokens"][i]: told["token_logprobs"][i]}
        if stop is None:
            assert "".join(told["tokens"][:-1]) == choice["text"] == TEXT  # the last one ends the text and is not shown
        assert [TEXT[at:].startswith(t) for at, t in zip(told["text_offset"], told["tokens"][:-1], strict=False)]
        stream = (await post(service, {"logprobs": 2, "stop": stop, "stream": True})).text
        events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
        parts = [json.loads(event)["choices"][0]["logprobs"] for event in events]
        assert {name: [x for part in parts for x in part[name]] for name in told} == told


async def test_logprobs_of_the_emitted_token_alone() -> None:
    async with serving(SpellingVerifier()) as service:
        told = (await post(service, {"logprobs": 0})).json()["choices"][0]["logprobs"]
        assert told["top_logprobs"] == [
            {token: logprob} for token, logprob in zip(told["tokens"], told["token_logprobs"], strict=True)
        ]


async def test_logprobs_over_grpc() -> None:
    async with grpc_serving(SpellingVerifier()) as (_, address), AsyncClient(address) as client:
        async with client.stream("a", sampling=SamplingParams(logprobs=2)) as stream:
            deltas = [delta async for delta in stream]
            result = await stream.get_final_result()
        wanted = [logprob_of(i, token, 2) for i, token in enumerate(IDS)]
        assert [(one.logprob, one.top) for one in result.logprobs] == [(one.logprob, one.top) for one in wanted]
        assert [one for delta in deltas for one in delta.logprobs] == list(result.logprobs)
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
        assert not (await client.generate("a")).logprobs


async def test_logprobs_survive_a_lost_verifier() -> None:
    dying, other = SpellingVerifier(die_after=lambda r: 4), SpellingVerifier()
    async with serving(dying, other) as service:
        for i in range(6):
            generated = await collect(service, GenerateRequest("a", request_id=f"r{i}", logprobs=1))
            wanted = [logprob_of(i, token, 1) for i, token in enumerate(IDS)]
            assert [span.logprob for span in generated.spans] == wanted


async def test_a_verifier_that_sends_no_logprobs_is_refused() -> None:
    async with serving(SpellingVerifier(spoil=lambda run: [replace(run, logprobs=())])) as service:
        with pytest.raises(Exception, match="logprobs"):
            await collect(service, GenerateRequest("a", logprobs=1))


def test_tokens_with_equal_texts_are_named_by_id() -> None:
    """Parts of characters, and two tokens that decode alike, go by their ids."""
    texts = {1: "x", 2: "x", 3: "\ufffd", 4: "y"}

    class Texts:
        def token_text(self, token):
            return texts[token]

        def token_bytes(self, token):
            return None

    spans = [Span(2, "x", True, TokenLogprob(-1.0, ((1, -0.5), (2, -1.0), (3, -float("inf")))))]
    told = completion_logprobs(spans, 10, partial(token_name, Texts()))
    assert told["top_logprobs"] == [{"x": -0.5, "token_id:2": -1.0, "token_id:3": -9999.0}]
    assert told["text_offset"] == [10]


@pytest.mark.parametrize("tokenizer", [sentence_piece, byte_level])
@pytest.mark.parametrize("text", ["the cat sat.", "the\ncat  sat", "the 日本 é😀 \ufffd cat"])
def test_bytes_of_tokens_in_a_row_are_those_of_their_text(tokenizer, text) -> None:
    """Also of blanks in front of words, which decoders drop from a token by itself, of bytes and of parts of characters."""
    names = partial(token_name, tokenizer())
    ids = tokenizer().encode(f"{text} a")
    written = text if tokenizer is byte_level else f" {text}"  # SentencePiece writes a blank in front of a text
    assert b"".join(bytes(names(i).bytes) for i in ids).decode() == f"{written} a"
    whole = [name for name in map(names, ids) if not name.text.startswith("token_id:")]
    assert [bytes(name.bytes).decode() for name in whole] == [name.text for name in whole]


def test_names_of_sentence_piece_tokens() -> None:
    pieces = sentence_piece()._tokenizer.get_vocab()
    names = {piece: token_name(sentence_piece(), i) for piece, i in pieces.items()}
    assert (names["▁the"].text, names["▁the"].bytes) == (" the", list(b" the"))
    assert (names["▁"].text, names["▁"].bytes) == (" ", [32])
    assert (names["s"].text, names["<0x0A>"].text, names[END].text) == ("s", "\n", END)
    assert [names[f"<0x{byte:02X}>"].bytes for byte in range(256)] == [[byte] for byte in range(256)]
    assert names["<0xE6>"].text == f"token_id:{pieces['<0xE6>']}"
    beyond = token_name(sentence_piece(), 10**6)  # padding of the model's vocabulary
    assert (beyond.text, beyond.bytes) == ("", [])


def test_a_token_without_other_tokens_is_named_as_it_is_decoded() -> None:
    """A vocabulary of bytes and special tokens has none that a token could be decoded behind."""
    pieces = [END, *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = Fast(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token=END))
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END))
    names = [token_name(tokenizer, i) for i in (0, 1 + ord("a"), 1 + 0xE6)]
    assert [(name.text, name.bytes) for name in names] == [
        (END, list(END.encode())),
        ("a", [97]),
        (f"token_id:{1 + 0xE6}", [0xE6]),
    ]


def sentence_piece_ids(*pieces: str) -> list[int]:
    return [sentence_piece()._tokenizer.get_vocab()[piece] for piece in pieces]


@pytest.fixture
def spelling_pieces(monkeypatch) -> None:
    """The text of a verifier is the pieces of SentencePiece between its bars."""

    class Pieces:
        def encode(self, text):
            return sentence_piece_ids(*text.split("|"))

    monkeypatch.setattr("unit.gateway.verifier_for_tests.byte_level", Pieces)


@pytest.mark.usefixtures("spelling_pieces")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "echo", "text"),
    [
        (("▁the", "▁cat"), False, " cat a b the.\n"),
        (("▁the", "▁cat"), True, "the cat cat a b the.\n"),
        ((END, "▁the"), True, f"{END} the cat a b the.\n"),
        ((END,), False, "cat a b the.\n"),
    ],
)
async def test_names_of_tokens_joined_are_the_text(prompt, echo, text, stream) -> None:
    """Of a tokenizer whose decoder drops the first blank; at the beginning of the whole text it is in no name either."""
    async with serving(SpellingVerifier(text="▁cat|▁|a|▁|b|▁the|.|<0x0A>")) as service:
        service.tokenizer = sentence_piece()
        body = {"prompt": sentence_piece_ids(*prompt), "echo": echo, "logprobs": 2, "stream": stream}
        answer = await post(service, body)
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(event)["choices"][0] for event in (events if stream else [answer.text])]
        assert "".join(choice["text"] for choice in choices) == text
        told = {name: [x for c in choices for x in c["logprobs"][name]] for name in choices[0]["logprobs"]}
        tokens = told["tokens"][:-1]  # the last one ends the text and is not shown
        assert "".join(tokens) == text
        assert told["text_offset"][:-1] == [len("".join(tokens[:i])) for i in range(len(tokens))]
        for token, top in zip(told["tokens"], told["top_logprobs"], strict=True):
            assert top is None or token in top


@pytest.mark.usefixtures("spelling_pieces")
@pytest.mark.parametrize(
    ("template", "content"), [("{{ messages[0].content }}", " the cat\n日 sat"), (END, "the cat\n日 sat")]
)
async def test_bytes_of_tokens_of_a_chat_joined_are_its_text(template, content) -> None:
    """The second template writes no text before the answer."""
    pieces = "▁the|▁cat|<0x0A>|<0xE6>|<0x97>|<0xA5>|▁sat"
    async with serving(SpellingVerifier(text=pieces)) as service:
        fast = sentence_piece()._tokenizer.backend_tokenizer
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END, bos_token=END, chat_template=template)
        service.tokenizer = HuggingFaceTokenizer(tokenizer)
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
        choice = (await post(service, body, "chat/completions")).json()["choices"][0]
        assert choice["message"]["content"] == content
        entries = [(entry["token"], bytes(entry["bytes"])) for entry in choice["logprobs"]["content"]][:-1]
        assert b"".join(spelled for _, spelled in entries) == content.encode()
        assert [spelled.decode() for _, spelled in entries[:3]] == [token for token, _ in entries[:3]]
        assert [spelled for _, spelled in entries[3:6]] == [b"\xe6", b"\x97", b"\xa5"]
        told = choice["logprobs"]["content"]
        assert all(e["bytes"] in [top["bytes"] for top in e["top_logprobs"]] for e in told)


async def test_texts_of_tokens_that_tokenize_returns_have_their_blanks() -> None:
    async with serving() as service:
        service.tokenizer = sentence_piece()
        ids = sentence_piece_ids("▁the", "▁", "<0x0A>", "s")
        assert await service.token_texts(ids) == [" the", " ", "\n", "s"]


def test_tokens_of_rounds_have_their_blanks() -> None:
    tree, path = sentence_piece_ids("▁cat", "▁"), sentence_piece_ids("▁cat", "s")
    told = round_object(Round(tuple(path), tuple(tree), (0, 0), (1,)), partial(token_name, sentence_piece()))
    assert told == {
        "nodes": [{"token": " cat", "parent": 0}, {"token": " ", "parent": 0}],
        "path": [1],
        "tokens": [" cat", "s"],
    }


async def test_no_stop_before_min_tokens() -> None:
    """A stop string that is complete within the first tokens is text; one that ends later counts."""
    verifier = SpellingVerifier(text="ab ab ab ab")
    async with serving(verifier) as service:
        for least in range(12):
            generated = await collect(service, GenerateRequest("a", stop=("ab",), min_tokens=least, max_tokens=12))
            tokens = byte_level().encode(verifier.text)
            ends = [len(byte_level().decode(tokens[: i + 1])) for i in range(len(tokens))]
            found = [at for at in (0, 3, 6, 9) if sum(end < at + 2 for end in ends) + 1 > least]
            expected = verifier.text[: found[0]] if found else verifier.text
            assert generated.text == expected, least
        with pytest.raises(InvalidRequest, match="min_tokens: 13 is outside"):
            await collect(service, GenerateRequest("a", min_tokens=13, max_tokens=12))


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (ChatRequest, {}, "messages: is missing; send it"),
        (ChatRequest, {"messages": []}, "messages: [] is too short; at least 1 needed"),
        (ResponseRequest, {"input": []}, "input: [] is too short; at least 1 needed"),
        (ResponseRequest, {"input": 3}, "input: 3 is not a string or a list"),
        (
            CompletionRequest,
            {"prompt": []},
            "prompt: [] is neither a text nor token ids; send a string or a list of token ids",
        ),
    ],
)
def test_messages_show_the_value_or_that_it_is_missing(model, body, message) -> None:
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    located = [{**one, "loc": ("body", *one["loc"])} for one in found.value.errors()]
    assert str(invalid_body(located)) == message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = [*SAMPLING, "logit_bias", "min_tokens", "logprobs", "bad_words", "response_format", "structured_outputs"]
forms = st.fixed_dictionaries({}, optional={n: json_values for n in ("type", "json", "regex", "choice", "json_schema")})


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), json_values | forms | st.dictionaries(st.just("5"), json_values)))
def test_any_body_is_a_request_or_an_invalid_request(body) -> None:
    value = json.loads(json.dumps({"prompt": "a"} | body))
    try:
        with suppress(InvalidRequest):
            CompletionRequest.model_validate(value).request({})
    except ValidationError as error:
        located = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]  # as FastAPI tells them
        assert invalid_body(located).field.partition(".")[0] in {*body, "prompt"}
