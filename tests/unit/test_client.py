"""The SDK against a real gRPC server: results, streams, cancellation, retries, errors by class."""

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from dataclasses import replace

import grpc
import pytest
from unit.gateway.service_for_tests import IDS, TEXT, at_rest, grpc_serving, until
from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import END_ID, SpellingVerifier

from rootward import errors
from rootward.client import AsyncClient, Client, Round, SamplingParams, Speculation
from rootward.client.blocking import ClosedError
from rootward.client.codec import request_to_pb
from rootward.client.connection import parse_target
from rootward.core.requests import DraftMode, Rule, SpeculationMode, VerifiedTree
from rootward.v1 import generate_pb2, generate_pb2_grpc
from rootward.wire import status


async def test_generate_returns_all_fields_of_a_result():
    async with grpc_serving() as (_, address), AsyncClient(address) as client:
        result = await client.generate("a", sampling=SamplingParams(temperature=0, seed=9), request_id="one")
        assert (result.text, result.token_ids) == (TEXT, IDS)
        assert len(result.accepted) == len(IDS)
        assert (result.finish_reason, result.stop, result.request_id) == ("stop", END_ID, "one")
        assert (result.usage.prompt_tokens, result.usage.total_tokens) == (1, 1 + len(IDS))
        assert (result.speculation.num_target_passes, result.speculation.seed) == (3, 9)
        assert result.speculation.acceptance_histogram == (1, 0, 1)
        assert result.timing.total_ms > 0
        assert result.raw is not None


def test_calls_of_the_blocking_client_are_plain_functions_with_the_arguments_of_the_asynchronous_ones():
    """Frameworks that look for coroutine functions unwrap first."""
    for name in ("generate", "generate_many", "tokenize", "detokenize", "server_info", "load", "abort", "drain"):
        blocking, awaited = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.iscoroutinefunction(awaited)
        assert not inspect.iscoroutinefunction(inspect.unwrap(blocking))
        assert inspect.signature(blocking) == inspect.signature(awaited)
        assert (blocking.__doc__, blocking.__qualname__) == (awaited.__doc__, f"Client.{name}")


async def test_several_choices_and_one_usage():
    verifier = SpellingVerifier()
    async with grpc_serving(verifier) as (service, address), AsyncClient(address) as client:
        sampling = SamplingParams(n=3, seed=7)
        result = await client.generate("abc", sampling=sampling, request_id="r", priority=-1)
        assert [(c.index, c.text, c.finish_reason) for c in result.choices] == [(i, TEXT, "stop") for i in range(3)]
        assert result.text == TEXT
        assert result.request_id == "r"
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 3 * len(IDS))
        assert sorted((r.seed, r.choice, r.priority) for r in verifier.requests) == [(7, i, -1) for i in range(3)]
        texts = ["", "", ""]
        async for delta in client.stream("abc", sampling=sampling):
            texts[delta.index] += delta.text
        assert texts == [TEXT] * 3
        async with client.stream("abc", sampling=sampling) as stream:
            await anext(aiter(stream))
        cut = await stream.get_final_result()
        assert [c.finish_reason for c in cut.choices] == ["cancelled"] * 3
        await at_rest(service, verifier)


async def test_many_prompts_give_their_results_in_order():
    verifier = SpellingVerifier()
    async with grpc_serving(verifier) as (_, address), AsyncClient(address) as client:
        results = await client.generate_many(["a", "ab", [5, 6, 7]], at_once=2, sampling=SamplingParams(seed=3))
        assert [r.usage.prompt_tokens for r in results] == [1, 2, 3]
        assert {r.text for r in results} == {TEXT}
        assert {r.seed for r in verifier.requests} == {3}
        assert await client.generate_many([]) == []
        with pytest.raises(ValueError, match="request_id: 'r' is of one request"):
            await client.generate_many(["a", "b"], request_id="r")


async def test_many_chats_go_through_the_template(monkeypatch):
    asked = []

    async def generate(self, prompt=None, **options):
        asked.append(request_to_pb(prompt, **options))
        return asked[-1]

    monkeypatch.setattr(AsyncClient, "generate", generate)
    chats = [[{"role": "user", "content": text}] for text in ("one", "two")]
    async with AsyncClient("127.0.0.1:1") as client:
        await client.generate_many([*chats, "three", [4, 5]], model="demo")
    assert [[m.content for m in one.chat.messages] for one in asked[:2]] == [["one"], ["two"]]
    assert (asked[2].text, list(asked[3].token_ids.ids)) == ("three", [4, 5])
    assert {one.model for one in asked} == {"demo"}


@pytest.mark.parametrize("at_once", [0, -1])
async def test_many_prompts_none_at_once_are_refused(at_once):
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=f"at_once: {at_once} is below 1"):
            await client.generate_many(["a"], at_once=at_once)


async def test_many_prompts_need_no_more_tasks_than_run_at_once(monkeypatch):
    most = running = 0

    async def generate(self, prompt, **options):
        nonlocal most, running
        running += 1
        most = max(most, len(asyncio.all_tasks()) - before)
        assert running <= 3
        await asyncio.sleep(0)
        running -= 1
        return prompt

    monkeypatch.setattr(AsyncClient, "generate", generate)
    prompts = [f"{i}" for i in range(50)]
    async with AsyncClient("127.0.0.1:1") as client:
        before = len(asyncio.all_tasks())
        assert await client.generate_many(prompts, at_once=3) == prompts
    assert most == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.tokenize(5), "text: 5 is out of range or of the wrong type"),
        (lambda c: c.tokenize("a", model=5), "model: 5 "),
        (lambda c: c.detokenize([-1]), r"token_ids: \[-1\] "),
        (lambda c: c.detokenize(5), "token_ids: 5 "),
        (lambda c: c.abort([5]), r"request_ids: \[5\] "),
        (lambda c: c.abort(5), "request_ids: 5 "),
        (lambda c: c.generate("a", model=5), "model: 5 "),
        (lambda c: c.generate("a", session_id=5), "session_id: 5 "),
        (lambda c: c.generate("a", request_id=5), "request_id: 5 "),
        (lambda c: c.drain(timeout_s=float("nan")), "timeout_s: nan is no time to wait"),
        (lambda c: c.drain(timeout_s=-1), "timeout_s: -1 is no time to wait"),
    ],
)
async def test_arguments_that_no_message_can_hold_are_named(call, words):
    async with AsyncClient("127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(ValueError, match=words):
            await call(client)


def test_text_parts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chat = request_to_pb(messages=[{"role": "user", "content": parts, "name": "ada"}]).chat
    assert [(m.role, m.content, m.name) for m in chat.messages] == [("user", "one \ntwo", "ada")]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "content": "", "tool_calls": []}, r"messages\[1\].tool_calls: is not carried by gRPC"),
        ({"role": "tool", "content": "5", "tool_call_id": "x"}, r"messages\[1\].tool_call_id: .* over HTTP"),
        ({"role": "assistant", "content": "a", "reasoning_content": "b"}, r"messages\[1\].reasoning_content: "),
        ({"role": "assistant", "content": None}, r"messages\[1\].content: is missing"),
        ({"role": "assistant"}, r"messages\[1\].content: is missing"),
        ({"role": "user", "content": 3}, r"messages\[1\].content: 3 is out of range or of the wrong type"),
        ({"role": None, "content": "a"}, r"messages\[1\].role: None"),
        ({"role": "user", "content": ["a"]}, r"messages\[1\].content\[0\]: 'a' is no text part"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\]: .*is no text part"),
        ("hello", r"messages\[1\]: 'hello' is no mapping"),
    ],
)
def test_what_a_chat_message_cannot_carry_is_refused_by_name(message, words):
    with pytest.raises(ValueError, match=words):
        request_to_pb(messages=[{"role": "user", "content": "x"}, message])


async def test_one_failure_among_many_prompts_ends_the_others():
    verifier = SpellingVerifier(delay_s=0.02)
    async with grpc_serving(verifier) as (service, address), AsyncClient(address) as client:
        with pytest.raises(errors.BadRequestError, match="leave no room"):
            await client.generate_many(["a", "b", "c " * 400])
        await at_rest(service, verifier)


async def test_rounds_carry_their_trees_where_they_are_asked_for():
    tree = VerifiedTree(tokens=(7, 8, 9), parents=(0, 0, 1), path=(1, 3))

    def with_tree(run):
        return [replace(run, tree=tree if len(run.tokens) == 3 else None)]

    verifier = SpellingVerifier(spoil=with_tree)
    async with grpc_serving(verifier) as (_, address), AsyncClient(address) as client:
        stream = client.stream("a", return_trees=True)
        told = [one async for delta in stream for one in delta.rounds]
        assert verifier.requests[-1].trees
        result = await stream.get_final_result()
        assert list(result.rounds) == told
        assert tuple(token for one in told for token in one.token_ids) == IDS
        assert told[0] == Round(told[0].token_ids, tree.tokens, tree.parents, tree.path)
        assert {len(one.tree_tokens) for one in told} <= {0, 3}
        plain = await client.generate("a")
        assert plain.rounds == ()
        assert not verifier.requests[-1].trees


async def test_trees_are_for_streams():
    async with grpc_serving() as (_, address), grpc.aio.insecure_channel(address) as channel:
        request = generate_pb2.GenerateRequest(text="a", response=generate_pb2.ResponseOptions(trees=True))
        with pytest.raises(grpc.aio.AioRpcError, match=r"response\.trees: True is for GenerateStream"):
            await generate_pb2_grpc.InferenceStub(channel).Generate(request)


async def test_drain_is_for_one_gateway_and_lets_nothing_new_in():
    async with grpc_serving() as (_, address):
        async with AsyncClient(f"{address},{address}") as client:
            with pytest.raises(ValueError, match="are several gateways"):
                await client.drain()
        async with AsyncClient(address, max_retries=0) as client:
            assert await client.drain(timeout_s=1) == 0
            with pytest.raises(errors.UnavailableError):
                await client.generate("a")


async def test_stream_yields_spans_per_token():
    async with grpc_serving() as (_, address), AsyncClient(address) as client:
        stream = client.stream("a")
        deltas = [d async for d in stream]
        assert "".join(text for d in deltas for text, _ in d.spans) == TEXT
        assert [flag for d in deltas for _, flag in d.spans] == [f for d in deltas for f in d.accepted]
        assert [d.offset for d in deltas] == [sum(len(d.token_ids) for d in deltas[:i]) for i in range(len(deltas))]
        assert all(len(d.spans) == len(d.token_ids) for d in deltas)
        result = await stream.get_final_result()
        assert (result.text, result.token_ids, result.finish_reason) == (TEXT, IDS, "stop")


async def test_get_final_result_reads_what_is_left():
    async with grpc_serving() as (_, address), AsyncClient(address) as client, client.stream("a") as stream:
        deltas = aiter(stream)
        await anext(deltas)
        assert (await stream.get_final_result()).text == TEXT
        assert (await client.stream("a").get_final_result()).text == TEXT


async def test_breaking_out_cancels_on_the_server():
    verifier = SpellingVerifier(delay_s=0.02)
    async with grpc_serving(verifier) as (service, address), AsyncClient(address) as client:
        async for _ in client.stream("a"):
            break
        await at_rest(service, verifier)
        async with client.stream("a") as stream:
            async for _ in stream:
                break
        result = await stream.get_final_result()
        assert result.finish_reason == "cancelled"
        assert TEXT.startswith(result.text)
        assert result.text
        await at_rest(service, verifier)
        task = asyncio.create_task(client.generate("a"))
        await until(lambda: verifier.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await at_rest(service, verifier)


async def test_the_request_carries_all_options():
    verifier = SpellingVerifier()
    async with grpc_serving(verifier) as (_, address), AsyncClient(address) as client:
        params = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, max_tokens=4, stop_token_ids=[3], ignore_eos=True)
        wish = Speculation(
            "required", "token", draft_strategy="rsd_s:4,3", max_depth=3, topk=2, num_draft_tokens=8, drafter="cheap"
        )
        await client.generate([5, 6], sampling=params, speculation=wish)
        got = verifier.requests[-1]
        assert got.prompt == (5, 6)
        assert (got.sampling.temperature, got.sampling.top_p, got.sampling.top_k) == (0.5, 0.9, 7)
        assert (got.stopping.max_tokens, got.stopping.stop_token_ids, got.stopping.ignore_eos) == (4, (3,), True)
        assert (got.speculation.mode, got.speculation.rule) == (SpeculationMode.REQUIRED, Rule.TOKEN)
        assert (got.speculation.max_depth, got.speculation.topk, got.speculation.num_draft_tokens) == (3, 2, 8)
        assert (got.speculation.drafter, str(got.speculation.strategy)) == ("cheap", "rsd_s:4,3")
        await client.generate("a", speculation=False)
        assert verifier.requests[-1].speculation.mode is SpeculationMode.DISABLED
        await client.generate("a", speculation=Speculation(verification="coupled"))
        assert verifier.requests[-1].speculation.law is DraftMode.COUPLED


async def test_tokenize_detokenize_info_and_load():
    async with grpc_serving() as (service, address), AsyncClient(address, metadata={"X-Team": "a"}) as client:
        ids = await client.tokenize("def f")
        assert ids == byte_level().encode("def f")
        assert await client.detokenize(ids) == "def f"
        info = await client.server_info()
        assert (info.role, info.models[0].name, info.models[0].max_positions) == ("gateway", "demo", 256)
        assert [(w.address, w.ready) for w in info.verifiers] == [("v0", True)]
        assert [w.name for w in info.drafters] == ["draft-1"]
        load = await client.load()
        assert (load.num_running, load.max_sessions, load.draining) == (0, 256, False)
        assert await client.abort("unknown") == ()
        assert info.worker == service.worker


async def test_abort_ends_a_running_stream():
    verifier = SpellingVerifier(delay_s=0.05)
    async with grpc_serving(verifier) as (_, address), AsyncClient(address) as client:
        stream = client.stream("a", request_id="mine")
        async for _ in stream:
            if not stream.over and (aborted := await client.abort(["mine"])):
                assert aborted == ("mine",)
        assert (await stream.get_final_result()).finish_reason == "aborted"


@pytest.mark.parametrize(
    ("options", "kind", "reason", "words"),
    [
        ({"sampling": SamplingParams(temperature=-1)}, errors.BadRequestError, "INVALID_VALUE", "temperature: -1"),
        ({"sampling": SamplingParams(top_p=0)}, errors.BadRequestError, "INVALID_VALUE", "top_p: 0.0"),
        ({"sampling": SamplingParams(max_tokens=0)}, errors.BadRequestError, "INVALID_VALUE", "max_tokens: 0"),
        ({"sampling": SamplingParams(max_tokens=999)}, errors.BadRequestError, "CONTEXT_LENGTH_EXCEEDED", "at most"),
        ({"model": "other"}, errors.NotFoundError, "NOT_FOUND", "use 'demo'"),
        (
            {"speculation": Speculation(max_depth=9, num_draft_tokens=3)},
            errors.BadRequestError,
            "INVALID_VALUE",
            "max_d",
        ),
        (
            {"prompt": None, "messages": [{"role": "user", "content": "x"}]},
            errors.BadRequestError,
            "UNSUPPORTED_PARAMETER",
            "template",
        ),
    ],
)
async def test_refusals_have_their_class_and_one_line(options, kind, reason, words):
    async with grpc_serving() as (_, address), AsyncClient(address) as client:
        with pytest.raises(kind, match=words) as caught:
            await client.generate(**{"prompt": "a", **options})
        assert caught.value.reason == reason
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"sampling": SamplingParams(top_k=-1)},
        {"sampling": SamplingParams(max_tokens=-5)},
        {"sampling": SamplingParams(seed=2**64)},
        {"sampling": SamplingParams(bad_words="abc")},
        {"speculation": "sometimes"},
        {"speculation": Speculation(verification="maybe")},
    ],
)
async def test_values_outside_the_message_types_are_value_errors_with_their_name(bad):
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=r"(top_k|max_tokens|seed|bad_words|speculation\.\w+): "):
            await client.generate("a", **bad)
        with pytest.raises(TypeError):
            await client.generate()


async def test_bytes_are_no_token_ids():
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="prompt: b'abc'"):
            await client.generate(b"abc")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"seed": -1}, "seed: -1 .*; use a whole number from 0 to 18446744073709551615$"),
        ({"max_tokens": 2**32}, "max_tokens: 4294967296 .*; use a whole number from 0 to 4294967295$"),
        ({"temperature": "hot"}, "temperature: 'hot' .*; use a number$"),
        ({"logit_bias": 3}, "logit_bias: 3 .*; use a mapping$"),
        ({"stop": 3}, "stop: 3 .*; use a list, each item text$"),
    ],
)
async def test_refused_values_come_with_those_that_are_possible(bad, words):
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=words):
            await client.generate("a", sampling=SamplingParams(**bad))


async def test_a_port_for_http_is_named_as_one():
    async def refuse(reader, writer):
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}", max_retries=0) as client:
            with pytest.raises(
                errors.APIConnectionError, match=f":{port} is a port for HTTP; use the gateway's address"
            ):
                await client.server_info()


@pytest.mark.parametrize("timeout", [0, -1.0, 1e12, float("inf"), float("nan")])
async def test_times_that_no_call_can_have_are_refused(timeout):
    """gRPC would take the largest for deadlines that have passed, and every call would fail at once."""
    async with AsyncClient("127.0.0.1:1") as client:
        for made in (lambda: AsyncClient("127.0.0.1:1", timeout=timeout), lambda: client.with_options(timeout=timeout)):
            with pytest.raises(ValueError, match=r"timeout: \S+ is no time to wait"):
                made()


async def test_the_longest_timeout_is_long():
    async with grpc_serving() as (_, address), AsyncClient(address, timeout=365 * 86400) as client:
        assert (await client.generate("a")).text == TEXT


async def test_a_watch_of_a_session_and_of_a_request_is_refused():
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match="request_id: 'r' beside session_id 's'"):
            await anext(client.watch(session_id="s", request_id="r"))


async def test_a_stream_that_breaks_keeps_its_partial_result():
    dying = SpellingVerifier(die_after=lambda r: 5)
    once = {"max_retries": 0}
    async with grpc_serving(dying, redispatch_wait_s=0.1) as (_, address), AsyncClient(address, **once) as client:
        with pytest.raises(errors.StreamInterruptedError) as caught:
            await client.generate("a")
        assert caught.value.partial.token_ids == IDS[:3]


class Flaky(generate_pb2_grpc.InferenceServicer):
    """Refuses the first calls."""

    def __init__(self, refusals):
        self.refusals, self.ids = list(refusals), []

    async def GenerateStream(self, request, context):
        self.ids.append(request.request_id)
        if self.refusals:
            await context.abort(self.refusals.pop(0), "not now", (("retry-after-ms", "10"),))
        yield generate_pb2.GenerateChunk(request_id=request.request_id, text="ok", finish=generate_pb2.Finish(reason=1))


async def flaky_server(servicer):
    server = grpc.aio.server()
    generate_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_retries_before_the_first_delta_with_the_same_id():
    codes = grpc.StatusCode
    for refusals, attempts in [([codes.UNAVAILABLE, codes.RESOURCE_EXHAUSTED], 3), ([codes.INVALID_ARGUMENT], 1)]:
        servicer = Flaky(refusals)
        server, address = await flaky_server(servicer)
        async with AsyncClient(address) as client:
            try:
                assert (await client.generate("a")).text == "ok"
            except errors.BadRequestError:
                assert attempts == 1
            assert len(servicer.ids) == attempts
            assert len(set(servicer.ids)) == 1
        async with AsyncClient(address, max_retries=0) as client:
            servicer.refusals = [codes.UNAVAILABLE]
            with pytest.raises(errors.APIError):
                await client.generate("a")
        await server.stop(0)


async def test_no_server_is_a_connection_error_and_a_deadline_a_timeout():
    async with AsyncClient("127.0.0.1:1", max_retries=1) as client:
        with pytest.raises(errors.APIConnectionError):
            await client.generate("a")
        with pytest.raises(errors.APIConnectionError):
            await client.load()
    verifier = SpellingVerifier(delay_s=0.3)
    async with grpc_serving(verifier) as (service, address), AsyncClient(address) as client:
        with pytest.raises((errors.APITimeoutError, errors.DeadlineExceededError)):
            await client.with_options(timeout=0.1).generate("a")
        await at_rest(service, verifier)


class Breaking(generate_pb2_grpc.InferenceServicer):
    """Sends tokens 0 to 9, one a chunk, and breaks where it is told: the n-th call after `breaks[n]` tokens."""

    def __init__(self, *breaks, code=grpc.StatusCode.UNAVAILABLE):
        self.breaks, self.code, self.calls = list(breaks), code, []

    async def GenerateStream(self, request, context):
        resumed = request.HasField("resume_offset")
        self.calls.append((request.request_id, tuple(request.resume_tokens.ids) if resumed else None))
        left = self.breaks.pop(0) if self.breaks else 99
        for token in range(request.resume_offset, 10):
            if not left and self.code is grpc.StatusCode.ABORTED:
                await status.abort(context, errors.StaleEpoch("request 'one' is driven by another gateway now"))
            if not left:
                await context.abort(self.code, "broken", (("retry-after-ms", "10"),))
            left -= 1
            finish = generate_pb2.Finish(reason=1) if token == 9 else None
            ids = token.to_bytes(4, "little")
            yield generate_pb2.GenerateChunk(offset=token, text=str(token), token_ids=ids, accepted=b"1", finish=finish)


async def test_a_broken_stream_is_resumed_at_its_offset():
    servicer = Breaking(0, 3, 0, 0, 0, 0, 2)
    server, address = await flaky_server(servicer)
    async with AsyncClient(address) as client:
        result = await client.generate("a", request_id="one")
        assert (result.text, result.token_ids) == ("0123456789", tuple(range(10)))
        assert {name for name, _ in servicer.calls} == {"one"}
        told = [received for _, received in servicer.calls]
        assert told == [None, (), *[(0, 1, 2)] * 5, (0, 1, 2, 3, 4)]
    for code, retries in ((grpc.StatusCode.UNAVAILABLE, 0), (grpc.StatusCode.INTERNAL, 2)):
        servicer.breaks, servicer.code = [4], code
        async with AsyncClient(address, max_retries=retries) as client:
            with pytest.raises(errors.APIError) as caught:
                await client.generate("a")
        if code is grpc.StatusCode.UNAVAILABLE:
            assert caught.value.partial.token_ids == (0, 1, 2, 3)
    await server.stop(0)


async def test_a_stream_that_another_gateway_took_over_is_taken_back_three_times_at_most():
    """It took the request over for an attempt that this client has given up. After more than three times it is another client's."""
    servicer = Breaking(0, 3, 1, code=grpc.StatusCode.ABORTED)
    server, address = await flaky_server(servicer)
    async with AsyncClient(address) as client:
        assert (await client.generate("a")).token_ids == tuple(range(10))
        assert [received for _, received in servicer.calls] == [None, (), (0, 1, 2), (0, 1, 2, 3)]
        servicer.breaks, servicer.calls = [0, 3, 1, 1], []
        with pytest.raises(errors.ConflictError, match="driven by another gateway"):
            await client.generate("a")
        assert len(servicer.calls) == 4
        servicer.breaks = [1]
        with pytest.raises(errors.ConflictError):
            await client.with_options(max_retries=0).generate("a")
    await server.stop(0)


async def test_a_generation_lost_by_one_gateway_is_resumed_at_another():
    one, two = Breaking(3), Breaking()
    servers = [await flaky_server(servicer) for servicer in (one, two)]
    async with AsyncClient(",".join(address for _, address in servers)) as client:
        for _ in range(2):
            assert (await client.generate("a")).token_ids == tuple(range(10))
        assert sorted(received for _, received in one.calls + two.calls if received) == [(0, 1, 2)]
    for server, _ in servers:
        await server.stop(0)


async def test_a_gateway_that_is_down_is_not_tried_while_another_is_up():
    servicer = Breaking()
    server, address = await flaky_server(servicer)
    async with AsyncClient(f"127.0.0.1:1,{address}", max_retries=1) as client:
        results = await asyncio.gather(*(client.generate("a") for _ in range(40)))
    assert [result.token_ids for result in results] == [tuple(range(10))] * 40
    await server.stop(0)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("h:1", (["h:1"], False)),
        ("h:1,i:2", (["h:1", "i:2"], False)),
        ("grpc://h:1", (["h:1"], False)),
        ("grpcs://h:1,i:2/", (["h:1", "i:2"], True)),
        ("dns:///h:1", (["dns:///h:1"], False)),
    ],
)
def test_targets(target, expected):
    assert parse_target(target) == expected


@pytest.mark.parametrize("target", ["http://h:1", "h", "grpc://h", "", "h:1,i", "unix:/tmp/x"])
def test_bad_targets(target):
    with pytest.raises(ValueError, match="target: "):
        parse_target(target)


async def test_the_sync_client_is_the_same():
    verifier = SpellingVerifier(delay_s=0.01)
    async with grpc_serving(verifier) as (service, address):

        def use():
            with Client(address) as client:
                assert client.generate("a").token_ids == IDS
                with client.stream("a") as stream:
                    text = "".join(d.text for d in stream)
                    assert text == stream.get_final_result().text == TEXT
                for _ in client.stream("a"):
                    break
                with client.stream("a") as stream:
                    for _ in stream:
                        break
                assert stream.get_final_result().finish_reason == "cancelled"
                assert client.detokenize(client.tokenize("def f")) == "def f"
                assert client.server_info().role == "gateway"
                assert client.load().max_sessions == 256
                assert client.abort("x") == ()
                assert [r.text for r in client.generate_many(["a", "b"])] == [TEXT, TEXT]
                with pytest.raises(errors.BadRequestError):
                    client.with_options(timeout=5).generate("a", sampling=SamplingParams(temperature=-1))
            with pytest.raises(errors.APIError, match="closed"):
                client.generate("a")
            client.close()

        await asyncio.to_thread(use)
        await at_rest(service, verifier)


@pytest.mark.parametrize(
    ("items", "end"),
    [
        ('client.stream("a")', ""),
        ('client.watch(session_id="s")', ""),
        ('client.stream("a")', "in_loop(items.close)"),
        ('client.watch(session_id="s")', "in_loop(items.close)"),
        ('client.stream("a")', "client.close(); del items"),
        ('client.watch(session_id="s")', "client.close(); del items"),
    ],
)
async def test_an_iterator_that_is_dropped_unfinished_holds_up_nothing(items, end):
    """Neither the exit of the interpreter nor the client's loop, in whose thread the garbage collector may end it."""
    code = f"""
import sys, threading
from rootward.client import Client

def in_loop(function):
    done = threading.Event()
    client._thread._loop.call_soon_threadsafe(lambda: (function(), done.set()))
    assert done.wait(60)
    client.load()

client = Client(sys.argv[1])
running = iter(client.stream("a", session_id="s"))
next(running)
items = iter({items})
next(items)
{end}
print("end")
"""
    verifier = SpellingVerifier(run=1, delay_s=0.2)
    async with grpc_serving(verifier) as (service, address):
        script = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            async with asyncio.timeout(60):
                out, errors_of_script = await script.communicate()
        finally:
            if script.returncode is None:
                script.kill()
                await script.wait()
        assert (script.returncode, out, errors_of_script) == (0, b"end\n", b"")
        await at_rest(service, verifier)


def test_the_sdk_loads_neither_models_nor_services():
    heavy = ("torch", "transformers", "rootward.core", "pydantic", "gateway")
    code = f"import sys, rootward.client; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_results_are_values():
    params = SamplingParams(temperature=0)
    assert replace(params, seed=1) != params
    assert hash(Speculation()) == hash(Speculation())


def test_a_blocking_client_that_is_closed_ends_the_calls_of_other_threads():
    client, raised = Client("127.0.0.1:1", max_retries=9), []

    def wait():
        try:
            client.generate("a")
        except Exception as error:
            raised.append(type(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.3)  # it pauses between two attempts
    client.close()
    waiting.join(60)
    assert raised == [ClosedError]


def test_a_client_of_a_process_that_was_forked_says_so():
    """Its thread is in the other process, so a call waited for ever."""
    code = """
import os
from rootward.client import Client
from rootward.client.blocking import ClosedError

client = Client("127.0.0.1:1")
child = os.fork()
if not child:
    try:
        client.generate("a")
    except ClosedError as error:
        print(error, flush=True)
    client.close()
    os._exit(0)
os.waitpid(child, 0)
client.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "the client was created before this process was forked; create one in each process\n"
