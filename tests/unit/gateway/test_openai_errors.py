"""What the `openai` package makes of our refusals: its exception classes, and what it tries again."""

import asyncio
import importlib
from contextlib import asynccontextmanager

import openai
import pytest
from unit.gateway.service_for_tests import TEXT, at_rest
from unit.gateway.test_http_api import real_server
from unit.gateway.test_tools import with_tools
from unit.gateway.verifier_for_tests import SpellingVerifier

from gateway.http_errors import _KINDS, http_error
from rootward.errors import NotFound, ServiceError

WANTED = {"model": "demo", "prompt": "a", "max_tokens": 50}


@asynccontextmanager
async def package(*verifiers, max_retries=1, **limits):
    """(service, client, the requests that it made)."""
    made = []

    async def note(request):
        made.append(request)

    async with real_server(*verifiers, **limits) as (service, http):
        hooked = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]})
        base_url = f"{http.base_url}/v1"
        async with openai.AsyncOpenAI(
            base_url=base_url, api_key="none", max_retries=max_retries, http_client=hooked
        ) as client:
            yield service, client, made


@pytest.mark.parametrize(
    ("kind", "code", "more"),
    [
        (openai.BadRequestError, "invalid_value", {"temperature": -1}),
        (openai.BadRequestError, "unsupported_parameter", {"suffix": "x"}),
        (openai.BadRequestError, "context_length_exceeded", {"max_tokens": 10_000}),
        (openai.NotFoundError, "model_not_found", {"model": "other"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_mistakes_are_not_tried_again(kind, code, more, stream):
    async with package() as (_, client, made):
        with pytest.raises(kind) as refused:
            await client.completions.create(**WANTED | more, stream=stream)
        assert (refused.value.code, len(made)) == (code, 1)
        assert refused.value.body["type"] == "invalid_request_error"


async def test_paths_that_are_not_served_are_not_found():
    async with package() as (_, client, _):
        for ask in (
            client.embeddings.create(model="demo", input="a"),
            client.responses.input_items.list("resp_1"),
            client.responses.cancel("resp_1"),
        ):
            with pytest.raises(openai.NotFoundError, match="is not served") as refused:
                await ask
            assert refused.value.code == "not_found"


def test_only_a_model_that_is_not_found_is_a_model():
    for field, code in (("model", "model_not_found"), ("speculation.drafter", "not_found")):
        error = http_error(NotFound(f"{field}: 'x' is unknown", metadata={"field": field})).body["error"]
        assert (error["code"], error["param"]) == (code, field)


async def test_an_id_that_is_in_use_is_a_mistake_and_not_tried_again():
    verifier = SpellingVerifier(delay_s=0.1)
    async with package(verifier) as (service, client, made):
        headers = {"x-request-id": "one"}
        first = asyncio.create_task(client.completions.create(**WANTED, extra_headers=headers))
        while not verifier.running:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(**WANTED, extra_headers=headers)
        assert (refused.value.code, len(made)) == ("duplicate_request_id", 2)
        assert (await first).choices[0].text == TEXT
        await at_rest(service, verifier)


async def test_an_overloaded_server_is_retried_after_retry_after():
    verifier = SpellingVerifier(delay_s=0.02)
    async with package(verifier, max_num_seqs=1, max_num_queued_reqs=0) as (service, client, made):
        first = asyncio.create_task(client.completions.create(**WANTED))
        while not verifier.running:
            await asyncio.sleep(0.005)
        second = await client.completions.create(**WANTED)  # after a second, when the first has long been served
        assert second.choices[0].text == (await first).choices[0].text == TEXT
        assert len(made) == 3
        await at_rest(service, verifier)


async def test_what_stays_full_is_a_rate_limit_error():
    verifier = SpellingVerifier(delay_s=5)
    async with package(verifier, max_num_seqs=1, max_num_queued_reqs=0) as (service, client, made):
        first = asyncio.create_task(client.completions.create(**WANTED))
        while not verifier.running:
            await asyncio.sleep(0.005)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.with_options(max_retries=0).completions.create(**WANTED)
        assert refused.value.code == "server_overloaded"
        assert refused.value.response.headers["retry-after-ms"] == "1000"
        assert len(made) == 2
        first.cancel()
        await at_rest(service, verifier)


async def test_no_ready_verifier_is_retried_and_then_an_internal_server_error():
    verifier = SpellingVerifier()
    async with package(verifier, redispatch_wait_s=0.1) as (_, client, made):
        verifier.up = False
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(**WANTED)
        assert (refused.value.status_code, refused.value.code) == (503, "service_unavailable")
        assert len(made) == 2


async def test_a_bug_is_not_tried_again():
    verifier = SpellingVerifier(spoil=lambda run: 1 / 0)
    async with package(verifier) as (_, client, made):
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(**WANTED)
        assert (refused.value.status_code, refused.value.code, len(made)) == (500, "internal_error", 1)


async def test_an_error_after_the_headers_is_raised_while_reading():
    dying = SpellingVerifier(die_after=lambda r: 4)
    async with package(dying, redispatch_wait_s=0.1) as (_, client, made):
        parts = []

        async def read(stream):
            async for chunk in stream:
                parts.append(chunk.choices[0].text)

        stream = await client.completions.create(**WANTED, stream=True)
        with pytest.raises(openai.APIError) as broken:
            await read(stream)
        text = "".join(parts)
        assert (broken.value.code, len(made)) == ("stream_interrupted", 1)
        assert text
        assert TEXT.startswith(text)


async def test_the_deadline_of_the_request():
    verifier = SpellingVerifier(delay_s=5)
    async with package(verifier, max_retries=0) as (service, client, _):
        with pytest.raises(openai.InternalServerError) as late:
            await client.completions.create(**WANTED, extra_headers={"x-request-timeout-ms": "100"})
        assert (late.value.status_code, late.value.code) == (504, "timeout")
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.1).completions.create(**WANTED)
        await at_rest(service, verifier)


def test_every_refusal_has_a_status_of_its_own():
    """500 is for our own mistakes: no kind of error is answered so because nobody thought of it."""
    importlib.import_module("gateway.generation")

    def kinds(error):
        return {error}.union(*map(kinds, error.__subclasses__()))

    reasons = {kind.reason for kind in kinds(ServiceError)} - {ServiceError.reason}
    assert "POISON_REQUEST" in reasons
    assert reasons <= set(_KINDS)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_long_prompt_is_refused_under_the_name_of_the_field_that_the_client_sent(n):
    async with package() as (service, client, _):
        service.tokenizer = with_tools()
        long, asked = "a" * 300, {"model": "demo", "n": n}
        for field, ask in (
            ("prompt", client.completions.create(prompt=long, **asked)),
            ("messages", client.chat.completions.create(messages=[{"role": "user", "content": long}], **asked)),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await ask
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", field)
            assert refused.value.body["message"].startswith(f"{field}: ")
