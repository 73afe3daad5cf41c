"""The gRPC face as a plain client sees it: messages, statuses, health, reflection."""

import math
from contextlib import suppress

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.gateway.service_for_tests import IDS, TEXT, at_rest, grpc_serving, until
from unit.gateway.verifier_for_tests import END_ID, SpellingVerifier

from gateway.servicer import request_from_pb
from rootward.errors import InvalidRequest
from rootward.v1 import control_pb2, control_pb2_grpc, generate_pb2, generate_pb2_grpc
from rootward.wire.columns import unpack_u32

Request = generate_pb2.GenerateRequest


async def stream(address, request, metadata=()):
    async with grpc.aio.insecure_channel(address) as channel:
        call = generate_pb2_grpc.InferenceStub(channel).GenerateStream(request, timeout=60, metadata=metadata)
        return [chunk async for chunk in call]


async def test_chunks():
    async with grpc_serving() as (_, address):
        request = Request(text="a", response=generate_pb2.ResponseOptions(speculation_detail=True))
        chunks = await stream(address, request, (("x-request-id", "mine"),))
        assert {c.request_id for c in chunks} == {"mine"}
        assert "".join(c.text for c in chunks) == TEXT
        assert tuple(t for c in chunks for t in unpack_u32(c.token_ids)) == IDS
        for chunk in chunks:
            ends = unpack_u32(chunk.text_ends)
            assert len(ends) == len(chunk.accepted) == len(chunk.token_ids) / 4
            assert ends[-1:] in ((), (len(chunk.text),))
        *others, last = chunks
        assert not any(c.HasField("finish") or c.HasField("usage") for c in others)
        assert (last.finish.reason, last.finish.eos_token_id) == (generate_pb2.Finish.STOP, END_ID)
        assert last.finish.speculation.acceptance_histogram == [1, 0, 1]
        assert last.usage.completion_tokens == len(IDS)


async def test_response_options():
    async with grpc_serving() as (_, address):
        no_ids = generate_pb2.ResponseOptions(token_ids=False, stream_interval=7)
        chunks = await stream(address, Request(text="a", response=no_ids))
        assert not any(c.token_ids or c.accepted or c.text_ends for c in chunks)
        assert "".join(c.text for c in chunks) == TEXT
        assert [c.offset for c in chunks] == [0, 9][: len(chunks)]
        no_text = await stream(address, Request(text="a", response=generate_pb2.ResponseOptions(text=False)))
        assert not any(c.text for c in no_text)


async def test_unary():
    async with grpc_serving() as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = generate_pb2_grpc.InferenceStub(channel)
        answer = await stub.Generate(Request(text="a", stopping=generate_pb2.Stopping(stop=["return"])), timeout=60)
        (choice,) = answer.choices
        assert (answer.model, choice.text, choice.finish.stop_string) == ("demo", TEXT.partition("return")[0], "return")
        assert answer.usage.completion_tokens == len(choice.accepted)
        assert not choice.HasField("logprobs")
        told = generate_pb2.ResponseOptions(logprobs=2)
        (choice,) = (await stub.Generate(Request(text="a", response=told), timeout=60)).choices
        columns = choice.logprobs.emitted, choice.logprobs.top_token_ids, choice.logprobs.top_logprobs
        assert [len(column) for column in columns] == [4 * len(IDS), 8 * len(IDS), 8 * len(IDS)]
        ids = await stub.Tokenize(generate_pb2.TokenizeRequest(text="def"), timeout=60)
        assert ids.max_model_len == 256
        text = await stub.Detokenize(generate_pb2.DetokenizeRequest(token_ids=ids.token_ids), timeout=60)
        assert text.text == "def"


async def test_a_refusal_has_rich_details():
    async with grpc_serving() as (_, address), grpc.aio.insecure_channel(address) as channel:
        request = Request(text="a", request_id="mine", sampling=generate_pb2.Sampling(temperature=-1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
        error = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith("temperature: -1.0")
        details = {d.TypeName().rpartition(".")[2]: d for d in rpc_status.from_call(error).details}
        request_info = error_details_pb2.RequestInfo()
        details["RequestInfo"].Unpack(request_info)
        assert request_info.request_id == "mine"
        assert set(details) == {"ErrorInfo", "RequestInfo", "BadRequest"}


async def test_a_number_of_tokens_that_is_refused_is_named_and_not_in_the_histogram():
    async with grpc_serving() as (service, address):
        for most in (0, 2**32 - 1):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream(address, Request(text="a", stopping=generate_pb2.Stopping(max_tokens=most)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(f"max_tokens: {most} ")
        await stream(address, Request(text="a", stopping=generate_pb2.Stopping(max_tokens=50)))
        number, total = (
            service.metrics.registry.get_sample_value(f"rootward_request_params_max_tokens_{of}")
            for of in ("count", "sum")
        )
        assert (number, total) == (1, 50)


async def test_cancelling_frees_everything():
    verifier = SpellingVerifier(delay_s=0.05)
    async with grpc_serving(verifier) as (service, address), grpc.aio.insecure_channel(address) as channel:
        call = generate_pb2_grpc.InferenceStub(channel).GenerateStream(Request(text="a"), timeout=60)
        await call.read()
        assert verifier.running == 1
        call.cancel()
        await at_rest(service, verifier)
        unary = generate_pb2_grpc.InferenceStub(channel).Generate(Request(text="a"), timeout=60)
        await until(lambda: verifier.running == 1)
        unary.cancel()
        await at_rest(service, verifier)


async def test_control():
    verifier = SpellingVerifier(text=TEXT * 5, delay_s=0.05)
    async with grpc_serving(verifier) as (service, address), grpc.aio.insecure_channel(address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        models = await stub.ListModels(control_pb2.ListModelsRequest(), timeout=60)
        assert [m.name for m in models.models] == ["demo"]
        info = await stub.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=60)
        assert info.lossless == info.models[0].lossless == control_pb2.ServerInfo.DISTRIBUTION
        assert (await stub.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=60)).vocab_size == 330
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(control_pb2.GetModelInfoRequest(model="other"), timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        call = generate_pb2_grpc.InferenceStub(channel).GenerateStream(Request(text="a"), timeout=60)
        await call.read()
        assert (await stub.GetLoad(control_pb2.GetLoadRequest(), timeout=60)).num_running == 1
        for wrong in (math.nan, math.inf, -1.0):
            with pytest.raises(grpc.RpcError, match="timeout_s: "):
                await stub.Drain(control_pb2.DrainRequest(timeout_s=wrong), timeout=60)
        assert (await stub.Drain(control_pb2.DrainRequest(timeout_s=0.05), timeout=60)).num_running == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [await call.read() for _ in range(100)]
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await stub.GetLoad(control_pb2.GetLoadRequest(), timeout=60)).draining
        await at_rest(service, verifier)


async def test_server_info_while_no_verifier_is_up():
    verifier = SpellingVerifier(up=False)
    async with grpc_serving(verifier, redispatch_wait_s=0.1) as (_, address), grpc.aio.insecure_channel(address) as ch:
        info = await control_pb2_grpc.ControlStub(ch).GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=60)
        assert not info.models
        assert not info.verifiers[0].ready
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate_pb2_grpc.InferenceStub(ch).Generate(Request(text="a"), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_health_and_reflection():
    async with grpc_serving() as (_, address), grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "rootward.v1.Inference", "rootward.v1.Control"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask, timeout=60)
        names = {s.name async for answer in call for s in answer.list_services_response.service}
        assert {"rootward.v1.Inference", "rootward.v1.Control", "grpc.health.v1.Health"} <= names


G = generate_pb2


def test_the_requested_drafter_is_passed_on():
    assert request_from_pb(Request(text="a", speculation=G.Speculation(drafter="cheap"))).speculation.drafter == "cheap"


def test_values_that_mean_off_are_fine():
    decoding = G.Decoding(repetition_penalty=1)
    request_from_pb(Request(text="a", sampling=G.Sampling(n=1), decoding=decoding, priority=0))


@pytest.mark.parametrize(
    "message",
    [
        Request(),
        Request(token_ids=G.TokenIds()),
        Request(chat=G.ChatPrompt()),
        Request(chat=G.ChatPrompt(messages=[G.ChatMessage(role="user")], template_kwargs_json="[1]")),
        Request(text="a", speculation=G.Speculation(mode=9)),
        Request(text="a", speculation=G.Speculation(verification=9)),
        Request(text="a", speculation=G.Speculation(topk=0)),
        Request(text="a", sampling=G.Sampling(temperature=float("nan"))),
        Request(text="a", sampling=G.Sampling(top_p=float("inf"))),
        Request(text="a", sampling=G.Sampling(min_p=-0.1)),
        Request(text="a", decoding=G.Decoding(presence_penalty=2.5)),
        Request(text="a", decoding=G.Decoding(repetition_penalty=0)),
        Request(text="a", decoding=G.Decoding(logit_bias={3: 1000.0})),
        Request(text="a", decoding=G.Decoding(regex="")),
    ],
    ids=str,
)
def test_bad_values_name_their_field(message):
    with pytest.raises(InvalidRequest, match=r"^[\w.]+: "):
        request_from_pb(message)


def test_arguments_of_a_template_have_the_bounds_of_other_json_objects():
    def asked(text):
        return Request(chat=G.ChatPrompt(messages=[G.ChatMessage(role="user")], template_kwargs_json=text))

    request_from_pb(asked('{"a": ' + "[" * 63 + "]" * 63 + "}"))
    wrong = {
        '{"a": ' + "[" * 64 + "]" * 64 + "}": "is nested 65 deep; the limit is 64",
        '{"a": 18446744073709551616}': "cannot be written as JSON",
        '{"a": "\\ud800"}': "cannot be written as JSON",
    }
    for text, why in wrong.items():
        with pytest.raises(InvalidRequest, match=why) as refused:
            request_from_pb(asked(text))
        assert refused.value.field == "chat.template_kwargs_json"


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_message_is_a_request_or_an_invalid_request(data):
    try:
        message = Request.FromString(data)
    except Exception:
        return
    with suppress(InvalidRequest):
        request_from_pb(message)
