"""Nonsense from outside, at the running services: over HTTP from the published schema, over gRPC as mutated messages.

No crash, no 5xx, no INTERNAL; every refusal names its field; and afterwards a text is what it was before.
"""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import jsonschema_rs
import pytest
import schemathesis
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from rootward import SamplingParams, demo
from rootward.v1 import control_pb2, generate_pb2, generate_pb2_grpc

FEW_TOKENS = 4  # a request that is served costs no more
CANARY = "zyzzyva-317 "  # in prompts: no log may have it


@pytest.fixture(autouse=True)
def undisturbed(stack):
    wanted = SamplingParams(temperature=0, max_tokens=24)
    before = stack.client.generate(demo.prompts()[2], sampling=wanted).text
    yield
    for service in (stack.gateway, stack.verifier, stack.drafter):
        assert service.process.poll() is None, service.output()[-2000:]
    assert stack.client.generate(demo.prompts()[2], sampling=wanted).text == before
    raised = [line for line in stack.gateway.output().splitlines() if "Unexpected [" in line or "failed" in line]
    assert all("[DecodeError]" in line for line in raised), raised  # gRPC's own words for what is no message
    assert "Traceback" not in stack.verifier.output()
    for service in (stack.gateway, stack.verifier, stack.drafter):
        assert CANARY.strip() not in service.output(), "a prompt in the log"


# -- HTTP ---------------------------------------------------------------------------------------------------------------


def check(case) -> None:
    body = case.body
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
            if isinstance(body.get(name), int | float) and body[name] > FEW_TOKENS:
                body[name] = FEW_TOKENS
        if "messages" in body and "max_tokens" in properties_of(case) and not body.get("max_completion_tokens"):
            body.setdefault("max_tokens", FEW_TOKENS)
        if "input" in body:
            body.setdefault("max_output_tokens", FEW_TOKENS)
        for name in ("prompt", "input"):
            if isinstance(body.get(name), str):
                body[name] = CANARY + body[name]
    response = case.call()
    seen = (response.status_code, response.text[:1000], body)
    assert response.status_code in (200, 400, 404, 405), seen
    if response.status_code == 200:
        check_answer(case, response)
        return
    error = jsonschema_of(case, "Error")(response.json())["error"]
    assert error["code"], seen
    if response.status_code == 400 or error["code"] in ("model_not_found", "response_not_found"):
        names_its_field(case, error)


def names_its_field(case, error: dict) -> None:
    """One of the request, or what all requests have; and the message begins with it."""
    param = error["param"]
    assert param, error
    if error["code"] == "unsupported_parameter" and param in {name[:32] for name in case.body}:
        assert error["message"].startswith(param), error  # a name that the API does not have
        return
    known = {*properties_of(case), *EVERYWHERE}
    assert re.split(r"[.\[]", param)[0] in known, error
    assert error["message"].startswith(re.split(r"[.\[]", param)[0]), error


EVERYWHERE = {"response_id", "body", "model", "x-request-id", "request_id", "session_id", "x-session-id"}


def properties_of(case) -> set[str]:
    """Fields that the description has for the body of an operation, at any depth."""
    described = case.operation.schema.raw_schema
    body = described["paths"][case.operation.path][case.operation.method].get("requestBody", {})
    return set(names_in(body, described))


def names_in(schema: object, described: dict) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", ())
        if "$ref" in schema:
            yield from names_in(resolved(schema, described), described)
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from names_in(part, described)


def resolved(schema: dict, described: dict) -> dict:
    return described["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def jsonschema_of(case, name: str) -> Callable[[object], object]:
    """Checks a value against a schema of the description; the value."""
    components = case.operation.schema.raw_schema["components"]
    raw = {"$ref": f"#/components/schemas/{name}", "components": components}

    def valid(value: object) -> object:
        jsonschema_rs.validate(raw, value)
        return value

    return valid


def check_answer(case, response) -> None:
    """What is answered is what the description promises, event by event."""
    kind = response.headers["content-type"][0]
    if not kind.startswith("text/event-stream"):
        case.validate_response(response, checks=[response_schema_conformance, content_type_conformance])
        return
    assert not response.stream_cut_short  # by the client that fuzzes
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    if "responses" in case.operation.path:
        check_response_events(case, [json.loads(event) for event in events])
        return
    valid = jsonschema_of(case, "ChatChunk" if "chat" in case.operation.path else "Completion")
    *chunks, last = events
    if last != "[DONE]":  # it failed after it had begun
        jsonschema_of(case, "Error")(json.loads(last))
        assert json.loads(last)["error"]["code"] != "internal_error", last
    for chunk in chunks:
        valid(json.loads(chunk))


def check_response_events(case, events: list[dict]) -> None:
    valid = jsonschema_of(case, "ResponseEvent")
    assert [valid(event)["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    if last["type"] == "error":
        assert last["code"] != "internal_error", last
    else:
        assert last["type"] in ("response.completed", "response.incomplete"), last
        jsonschema_of(case, "Response")(last["response"])


def fuzz(stack, max_examples: int) -> None:
    """Bodies that fit the published schema and bodies that do not."""
    described = schemathesis.openapi.from_url(f"{stack.gateway.http}/openapi.json")
    # Streams are read to their end: by default the client stops, without a word, after some events or seconds.
    described.config.max_stream_events, described.config.request_timeout = 100_000, 120.0
    for found in described.get_all_operations():
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            # What fails is told as it is: making it smaller takes more requests than a test has time for.
            @settings(
                max_examples=max_examples,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
                phases=[Phase.generate],
            )
            @given(found.ok().as_strategy(generation_mode=mode))
            def run(case) -> None:
                check(case)

            with suppress(Unsatisfiable):  # nothing is wrong for an operation without parameters
                run()


def test_http(stack) -> None:
    fuzz(stack, 12)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_http_for_long(stack) -> None:
    fuzz(stack, 1000)


def test_the_schema_names_every_field_that_is_read(stack) -> None:
    with urllib.request.urlopen(f"{stack.gateway.http}/openapi.json", timeout=30) as answer:
        described = json.load(answer)
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        properties = resolved(body, described)["properties"]
        assert {"temperature", "seed", "speculation", "prediction", "n", "stop"} <= set(properties)
    body = described["paths"]["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"input", "previous_response_id", "text", "speculation"} <= set(resolved(body, described)["properties"])


# -- gRPC ---------------------------------------------------------------------------------------------------------------

ODD_NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, 2**64 - 1)
ODD_REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), -float("inf"), float("nan"), 101.0)
ODD_TEXTS = ("", "x", "é😀", "\x00", "a" * 3000, "{}", "[", "(a|b)*", "start: /x/", "{{", "none", " ", "#")


def odd_value(field: FieldDescriptor, rng: random.Random) -> object:
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice(ODD_REALS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        text = rng.choice(ODD_TEXTS)
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    return rng.choice(ODD_NUMBERS)


def mutate(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Change one field somewhere in the message."""
    field = rng.choice(message.DESCRIPTOR.fields)
    try:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[rng.choice(ODD_NUMBERS)] = rng.choice(ODD_REALS)
        elif field.is_repeated:
            values = getattr(message, field.name)
            if field.message_type is None:
                values.extend(odd_value(field, rng) for _ in range(rng.choice((1, 2, 20, 300))))
            else:
                mutate(values.add(), rng, depth + 1)
        elif field.message_type is not None:
            child = getattr(message, field.name)
            child.SetInParent()
            mutate(child, rng, depth + 1)
        elif rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, odd_value(field, rng))
    except (ValueError, TypeError):
        pass  # out of the field's own range: it could not be sent


def scrambled(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, dropped or put in."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(raw) + 1)
        raw[at : at + rng.choice((0, 1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 3)))
    return bytes(raw)


def start(rng: random.Random) -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest(text=f"{CANARY}x = 1")
    request.stopping.max_tokens = FEW_TOKENS
    request.sampling.temperature = rng.choice((0.0, 1.0))
    return request


def message_of(rng: random.Random) -> tuple[str, bytes]:
    """(method, bytes of a request). Every fourth one is mutated below protobuf."""
    method, request = rng.choice(
        (
            ("Inference/Generate", start(rng)),
            ("Inference/Generate", start(rng)),
            ("Inference/GenerateStream", start(rng)),
            ("Inference/Tokenize", generate_pb2.TokenizeRequest(text=f"{CANARY}x = 1")),
            ("Inference/Detokenize", generate_pb2.DetokenizeRequest(token_ids=[5, 6])),
            ("Control/GetModelInfo", control_pb2.GetModelInfoRequest()),
            ("Control/Abort", control_pb2.AbortRequest(request_ids=["a"])),
        )
    )
    for _ in range(rng.choice((1, 1, 2, 4))):
        mutate(request, rng)
    if isinstance(request, generate_pb2.GenerateRequest):  # what is served must not run for long
        tokens = request.stopping.max_tokens
        if not request.stopping.HasField("max_tokens") or FEW_TOKENS < tokens < 1000:
            request.stopping.max_tokens = FEW_TOKENS
        if FEW_TOKENS < request.sampling.n <= 128:
            request.sampling.n = FEW_TOKENS
    data = request.SerializeToString()
    return method, scrambled(data, rng) if rng.random() < 0.25 else data


def refusal_of(call: Callable[..., Any], data: bytes, stream: bool) -> grpc.RpcError | None:
    try:
        answer = call(data, timeout=60)
        if stream:
            for _ in answer:
                pass
    except grpc.RpcError as error:
        return error
    return None


MAY = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED"}


def throw(channel: grpc.Channel, seed: int, count: int) -> dict[str, int]:
    """`count` messages; how many ended how."""
    rng, seen = random.Random(seed), {}
    for i in range(count):
        method, data = message_of(rng)
        stream = method.endswith("Stream")
        kind = channel.unary_stream if stream else channel.unary_unary
        error = refusal_of(kind(f"/rootward.v1.{method}"), data, stream)
        code = "OK" if error is None else error.code().name
        seen[code] = seen.get(code, 0) + 1
        where = f"seed {seed}, message {i}, {method}: {code} {error and error.details()}\n{data!r}"
        unknown = error is not None and "send resume_tokens" in error.details()  # another gateway may know the request
        if error is None or unknown or _undecodable(method, data):
            continue
        assert code in MAY, where
        if code == "INVALID_ARGUMENT":
            status = rpc_status.from_call(error)
            assert status is not None, where
            bad = [d for d in status.details if d.Is(error_details_pb2.BadRequest.DESCRIPTOR)]
            assert bad, where
            (violation,) = error_details_pb2.BadRequest.FromString(bad[0].value).field_violations
            assert violation.field, where
    return seen


def _undecodable(method: str, data: bytes) -> bool:
    """What is no message of the kind is refused by gRPC itself."""
    kinds = {"Tokenize": generate_pb2.TokenizeRequest, "Detokenize": generate_pb2.DetokenizeRequest}
    kinds |= {"GetModelInfo": control_pb2.GetModelInfoRequest, "Abort": control_pb2.AbortRequest}
    try:
        kinds.get(method.split("/")[1], generate_pb2.GenerateRequest).FromString(data)
    except DecodeError:
        return True
    return False


def many(stack, count: int) -> None:
    with ThreadPoolExecutor(8) as pool, grpc.insecure_channel(stack.gateway.address) as channel:
        seen: dict[str, int] = {}
        for part in pool.map(lambda seed: throw(channel, seed, count // 8), range(8)):
            seen = {code: seen.get(code, 0) + part.get(code, 0) for code in {*seen, *part}}
    assert seen["OK"] > count / 20, seen  # most of the way is walked by some
    assert seen["INVALID_ARGUMENT"] > count / 20, seen


def test_mutated_messages(stack) -> None:
    many(stack, 2_000)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_fifty_thousand_mutated_messages(stack) -> None:
    many(stack, 50_000)


def test_the_stub_still_works(stack) -> None:
    with grpc.insecure_channel(stack.gateway.address) as channel:
        stub = generate_pb2_grpc.InferenceStub(channel)
        assert stub.Generate(start(random.Random(0)), timeout=30).choices[0].text
