"""A gRPC client that knows nothing but the address: messages and methods come from reflection, no generated stub is used."""

from __future__ import annotations

from uuid import uuid4

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from rootward import demo


class Reflected:
    """Calls by name, requests and answers as messages made at run time."""

    def __init__(self, channel: grpc.Channel):
        self.channel = channel
        self.database = ProtoReflectionDescriptorDatabase(channel)
        self.pool = descriptor_pool.DescriptorPool(self.database)

    def message(self, name: str):
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(f"rootward.v1.{name}"))

    def call(self, service: str, method: str, request, **options):
        found = self.pool.FindServiceByName(f"rootward.v1.{service}").FindMethodByName(method)
        kind = self.channel.unary_stream if found.server_streaming else self.channel.unary_unary
        answer = message_factory.GetMessageClass(found.output_type)
        made = kind(
            f"/{found.containing_service.full_name}/{method}",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return made(request, timeout=60, **options)


@pytest.fixture(scope="module")
def client(stack):
    with grpc.insecure_channel(stack.gateway.address) as channel:
        yield Reflected(channel)


def details_of(error: grpc.RpcError) -> dict:
    trailing = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    kinds = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RequestInfo)
    found = {}
    for detail in status.details:
        for kind in kinds:
            if detail.Is(kind.DESCRIPTOR):
                found[kind.DESCRIPTOR.name] = kind.FromString(detail.value)
    return found


def test_services_and_their_methods_are_listed(client) -> None:
    services = set(client.database.get_services())
    assert {"rootward.v1.Inference", "rootward.v1.Control", "grpc.health.v1.Health"} <= services
    methods = {m.name for m in client.pool.FindServiceByName("rootward.v1.Inference").methods}
    assert methods == {"Generate", "GenerateStream", "Tokenize", "Detokenize"}


def test_it_generates_whole_and_streamed(client) -> None:
    request = client.message("GenerateRequest")(text=demo.prompts()[0])
    request.sampling.temperature = 0
    request.stopping.max_tokens = 32
    whole = client.call("Inference", "Generate", request)
    call = client.call("Inference", "GenerateStream", request, metadata=(("x-request-id", "reflected"),))
    assert dict(call.initial_metadata())["x-request-id"] == "reflected"
    chunks = list(call)
    assert "".join(c.text for c in chunks) == whole.choices[0].text
    assert b"".join(c.token_ids for c in chunks) == whole.choices[0].token_ids
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    ids = client.call("Inference", "Tokenize", client.message("TokenizeRequest")(text=whole.choices[0].text)).token_ids
    back = client.call("Inference", "Detokenize", client.message("DetokenizeRequest")(token_ids=ids))
    assert back.text == whole.choices[0].text


def test_three_choices(client) -> None:
    request = client.message("GenerateRequest")(text="import os\n")
    request.sampling.n, request.sampling.seed, request.stopping.max_tokens = 3, 5, 12
    whole = client.call("Inference", "Generate", request)
    texts = ["", "", ""]
    for chunk in client.call("Inference", "GenerateStream", request):
        texts[chunk.index] += chunk.text
    assert texts == [c.text for c in whole.choices]


def test_it_cancels_and_aborts(client) -> None:
    def begun(name: str):
        request = client.message("GenerateRequest")(request_id=name, text="import os\n")
        request.stopping.max_tokens, request.stopping.ignore_eos = 900, True
        call = client.call("Inference", "GenerateStream", request)
        next(call)
        return call

    running = begun("cancelled")
    running.cancel()
    with pytest.raises(grpc.RpcError) as ended:
        list(running)
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    running = begun("aborted")
    abort = client.message("AbortRequest")(request_ids=["aborted", "unknown"])
    assert list(client.call("Control", "Abort", abort).aborted) == ["aborted"]
    *_, last = running
    assert last.finish.reason == last.finish.DESCRIPTOR.enum_types_by_name["Reason"].values_by_name["ABORTED"].number
    load = client.message("GetLoadRequest")()
    for _ in range(200):
        if client.call("Control", "GetLoad", load).num_running == 0:
            break
    assert client.call("Control", "GetLoad", load).num_running == 0


@pytest.mark.parametrize(
    ("change", "code", "reason", "field"),
    [
        (lambda m: setattr(m.sampling, "temperature", -1), "INVALID_ARGUMENT", "INVALID_VALUE", "temperature"),
        (lambda m: setattr(m.stopping, "max_tokens", 0), "INVALID_ARGUMENT", "INVALID_VALUE", "max_tokens"),
        (lambda m: setattr(m, "text", ""), "OK", "", ""),
        (lambda m: m.ClearField("text"), "INVALID_ARGUMENT", "INVALID_VALUE", "prompt"),
        (lambda m: setattr(m.speculation, "drafter", "x"), "NOT_FOUND", "NOT_FOUND", "speculation.drafter"),
        (lambda m: setattr(m.stopping, "max_tokens", 99_999), "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED", "max_tokens"),
        (lambda m: setattr(m, "model", "other"), "NOT_FOUND", "NOT_FOUND", None),
    ],
)  # fmt: skip
def test_it_reads_errors(client, change, code, reason, field) -> None:
    name = f"mine-{uuid4().hex}"
    request = client.message("GenerateRequest")(text="x", request_id=name)
    request.stopping.max_tokens = 2
    change(request)
    if code == "OK":
        assert client.call("Inference", "Generate", request).usage.completion_tokens
        return
    with pytest.raises(grpc.RpcError) as refused:
        client.call("Inference", "Generate", request)
    details = details_of(refused.value)
    assert (refused.value.code().name, details["ErrorInfo"].reason) == (code, reason)
    assert details["ErrorInfo"].domain == "rootward"
    assert details["RequestInfo"].request_id == name
    if field is not None:
        named = [v.field for v in details["BadRequest"].field_violations] if "BadRequest" in details else None
        assert (named or [details["ErrorInfo"].metadata["field"]]) == [field]
