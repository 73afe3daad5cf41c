"""Traces across three real processes, collected by a real OTLP receiver."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from support.processes import drafter, gateway, verifier, wait_until

from rootward import Client, SamplingParams, Speculation

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps (service, span) of what it is sent."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, object]] = []
        self._lock = threading.Lock()

    def Export(self, request, context):
        with self._lock:
            for block in request.resource_spans:
                service = next(a.value.string_value for a in block.resource.attributes if a.key == "service.name")
                self.spans += [(service, span) for scope in block.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[tuple[str, object]]:
        with self._lock:
            return [(service, span) for service, span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server, kept = grpc.server(futures.ThreadPoolExecutor(4)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(0)


def attributes(span) -> dict[str, object]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_one_trace_through_all_three_services_and_nothing_of_the_text_in_it(collector) -> None:
    kept, url = collector
    traced = ("--tracing-endpoint", url)
    pair = "tabular:vocab=64,seed=3"
    with ExitStack() as stack:
        grower = stack.enter_context(drafter(pair, *traced))
        target = stack.enter_context(verifier(pair, [grower.address], *traced))
        front = stack.enter_context(gateway(pair, [target.address], *traced))
        client = stack.enter_context(Client(front.address, metadata={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}))
        wait_until(lambda: client.server_info().drafters, what="the drafter")
        wanted = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True)
        client.generate([5, 6, 7], sampling=wanted, speculation=Speculation(mode="required"), request_id="traced")
    wait_until(lambda: kept.named("drafter.tree") and kept.named("gateway.request"), what="the spans")
    ours = [(service, span) for service, span in kept.spans if span.trace_id.hex() == TRACE]
    by_name = {span.name: (service, span) for service, span in ours}
    assert {name: service for name, (service, _) in by_name.items()} == {
        "gateway.request": "rootward-gateway",
        "verifier.request": "rootward-verifier",
        "verifier.round": "rootward-verifier",
        "drafter.tree": "rootward-drafter",
    }
    request, verifying, tree = (by_name[name][1] for name in ("gateway.request", "verifier.request", "drafter.tree"))
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    assert verifying.parent_span_id == request.span_id
    assert tree.parent_span_id == verifying.span_id
    rounds = [span for _, span in ours if span.name == "verifier.round"]
    assert {span.parent_span_id for span in rounds} == {verifying.span_id}
    told = [attributes(span) for span in rounds]
    assert sum(one["rootward.accepted"] + 1 for one in told) >= 12
    assert all(one["rootward.wait_ms"] >= 0 and one["rootward.verify_ms"] > 0 for one in told)
    assert attributes(request)["rootward.completion_tokens"] == 12
    assert attributes(tree)["rootward.nodes"] > 0
