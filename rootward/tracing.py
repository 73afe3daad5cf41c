"""Traces across the services (OpenTelemetry): a span per request in each of them, and one per round where the request is sampled.

    with request_span("gateway.request", traceparent, request_id="r1") as span:
        ...                                     # an exception ends it as an error; spans contain no prompts or texts
        traceparent_of(span)                    # is sent with the request, in our own messages

Without `configure_tracing` every span is a no-op of the API. Context is passed explicitly: generators of a request run in the
task that asks for the next item, so an ambient current span could belong to another request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN as INVALID_SPAN
from opentelemetry.trace import Span as Span
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rootward.errors import ConfigurationError

MAX_TRACEPARENT = 64  # characters; the format has 55

_W3C = TraceContextTextMapPropagator()
Attribute = str | int | float | bool


def configure_tracing(role: str, endpoint: str, share: float = 1.0) -> None:
    """Export spans of this process by OTLP over gRPC to http(s)://host:port; "" exports nothing.

    share: sampled share of the requests whose caller has not decided. ConfigurationError without the SDK."""
    if not endpoint:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"tracing_endpoint: {endpoint!r} is no URL; write http://host:4317 or https://host:4317"
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError:
        message = "tracing_endpoint: OpenTelemetry is not installed; pip install 'rootward[tracing]'"
        raise ConfigurationError(message) from None
    resource = Resource.create({"service.name": f"rootward-{role}"})
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)), resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    trace.set_tracer_provider(provider)


@contextmanager
def request_span(name: str, traceparent: str = "", **attributes: Attribute) -> Iterator[Span]:
    """A span of this process, child of the caller's. Ends with the block; an error is recorded by its kind, without its text."""
    span = start_span(name, traceparent, SpanKind.SERVER, None, **attributes)
    try:
        yield span
    except Exception as error:
        span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        raise
    finally:
        span.end()


def start_span(
    name: str,
    traceparent: str = "",
    kind: SpanKind = SpanKind.INTERNAL,
    start_s: float | None = None,
    **attributes: Attribute,
) -> Span:
    """A span that the caller ends. start_s: seconds since 1970, if it began before now."""
    start_ns = None if start_s is None else int(start_s * 1e9)
    about = {f"rootward.{key}": value for key, value in attributes.items()}
    return trace.get_tracer("rootward").start_span(name, _context(traceparent), kind, about, start_time=start_ns)


def set_attributes(span: Span, **attributes: Attribute) -> None:
    """Add attributes to a span."""
    span.set_attributes({f"rootward.{key}": value for key, value in attributes.items()})


def traceparent_of(span: Span) -> str:
    """The W3C traceparent under which other spans become its children; "" for a span that is not recorded."""
    carrier: dict[str, str] = {}
    if span.get_span_context().is_valid:
        _W3C.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def _context(traceparent: str) -> Context:
    """The caller's context; an empty one for what is no traceparent."""
    if not traceparent or len(traceparent) > MAX_TRACEPARENT:
        return Context()
    return _W3C.extract({"traceparent": traceparent}, Context())
