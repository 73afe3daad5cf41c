"""Metrics of the gateway. Names and meanings are those of vLLM where vLLM has the metric; labels never contain ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry

from gateway.requests import Delta, Ending, GenerateRequest
from rootward import metrics
from rootward.errors import DeadlineExceeded, Overloaded, ServiceError, Unavailable

# Below vLLM's first bucket: speculative tokens come in runs, and share the time of their run.
FAST = (0.001, 0.0025, 0.005)
WIDE = (1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST_TOKEN = (*FAST, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, *WIDE, 160, 640, 2560)
BETWEEN = (*FAST, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *WIDE)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
CHOICES = (1, 2, 5, 10, 20)

GAUGES = {
    "num_requests_running": "Requests at verifiers.",
    "num_requests_waiting": "Requests waiting for a slot.",
    "upstream_ready": "Verifiers that take requests.",
    "session_store_up": "1 while the session store answers.",
}


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        # Totals since the start, of tokens that clients were sent. Every round ends with one bonus token.
        self.num_requests = self.num_tokens = self.num_rounds = 0
        counter, histogram = partial(metrics.counter, registry), partial(metrics.histogram, registry)
        self.success = counter("request_success", "Generations that ended.", "finished_reason")
        self.refused = counter("requests_refused", "Requests that failed, by cause.", "reason")
        self.rejected = counter("requests_rejected", "Requests that may be tried again elsewhere or later.", "reason")
        self.cancelled = counter("requests_cancelled", "Requests whose client disconnected.", "phase")
        self.late = counter("request_deadline_exceeded", "Requests whose deadline passed.", "phase")
        self.prompt = counter("prompt_tokens", "Prompt tokens of ended generations.")
        self.cached = counter("cached_prompt_tokens", "Prompt tokens of ended generations that were in the KV cache.")
        self.generated = counter("generation_tokens", "Tokens delivered to clients.")
        self.redispatched = counter("redispatch", "Attempts lost and begun anew.")
        self.resumed = counter("requests_resumed", "Requests taken up again by clients.")
        self.routed = counter("route_decisions", "Attempts by why their verifier was chosen.", "outcome")
        self.poisoned = counter("requests_poisoned", "Requests refused because verifiers died of them.")
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN)
        self.itl = histogram("inter_token_latency_seconds", "Between runs of tokens, per token of the run.", BETWEEN)
        self.chunk = histogram("inter_chunk_latency_seconds", "Between runs of tokens, as a client sees it.", BETWEEN)
        self.tpot = histogram("request_time_per_output_token_seconds", "Mean of a request, after its first.", BETWEEN)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", WHOLE)
        self.queue = histogram("request_queue_time_seconds", "Arrival to dispatch.", WHOLE)
        self.prefill = histogram("request_prefill_time_seconds", "Dispatch to first token.", WHOLE)
        self.decode = histogram("request_decode_time_seconds", "First token to last token.", WHOLE)
        self.inference = histogram("request_inference_time_seconds", "Dispatch to last token.", WHOLE)
        self.prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request.", COUNTS)
        self.output_size = histogram("request_generation_tokens", "Output tokens of a request.", COUNTS)
        self.max_tokens = histogram("request_params_max_tokens", "What requests set as max_tokens.", COUNTS)
        self.n = histogram("request_params_n", "What requests set as n.", CHOICES)

    def planned(self, request: GenerateRequest) -> None:
        """Count the numbers of a request whose values were checked: one that is refused may have any, also beyond all floats."""
        if request.index == 0:
            self.n.observe(request.n)
        if request.max_tokens is not None:
            self.max_tokens.observe(request.max_tokens)


class CallMetrics:
    """Counts the calls of both fronts, and of all models, that are refused before a generation begins."""

    def __init__(self, registry: CollectorRegistry) -> None:
        meaning = "Calls of gRPC and HTTP that were refused before a generation, by cause."
        self._refused = metrics.counter(registry, "calls_refused", meaning, "reason")

    def refused(self, error: Exception) -> None:
        self._refused.labels(reason_of(error)).inc()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the error of this block."""
        try:
            yield
        except Exception as error:
            self.refused(error)
            raise


class RequestMetrics:
    """Counts one generation from its deltas, from its arrival on. A context manager, which also counts errors and cancellations."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._now = asyncio.get_running_loop().time
        self._last: float | None = None  # time of the last run of tokens
        self._over = False

    def delta(self, delta: Delta) -> None:
        if delta.spans:
            now = self._now()
            if self._last is not None:
                self._metrics.chunk.observe(now - self._last)
                self._metrics.itl.observe((now - self._last) / len(delta.spans))
            self._last = now
            self._metrics.generated.inc(len(delta.spans))
            self._metrics.num_tokens += len(delta.spans)
            self._metrics.num_rounds += sum(not span.accepted for span in delta.spans)
        if delta.ending is not None:
            self._ended(delta.ending)

    def __enter__(self) -> RequestMetrics:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._over:
            return
        if not isinstance(error, Exception):
            self._metrics.cancelled.labels(self._phase).inc()
            return
        reason = reason_of(error)
        self._metrics.refused.labels(reason).inc()
        if isinstance(error, Overloaded | Unavailable):
            self._metrics.rejected.labels(reason).inc()
        if isinstance(error, DeadlineExceeded):
            self._metrics.late.labels(error.metadata.get("phase", self._phase)).inc()

    @property
    def _phase(self) -> str:
        return "first_token" if self._last is None else "decode"

    def _ended(self, ending: Ending) -> None:
        self._over = True
        own, usage, timing = self._metrics, ending.usage, ending.timing
        own.success.labels(ending.reason.value).inc()
        own.prompt.inc(usage.prompt_tokens)
        own.cached.inc(usage.cached_tokens)
        own.num_requests += 1
        own.prompt_size.observe(usage.prompt_tokens)
        own.output_size.observe(usage.completion_tokens)
        own.e2e.observe(timing.total_ms / 1000)
        own.queue.observe(timing.queue_ms / 1000)
        if self._last is None:  # aborted before its first token: it has no time to it
            return
        own.ttft.observe(timing.ttft_ms / 1000)
        own.prefill.observe((timing.ttft_ms - timing.queue_ms) / 1000)
        own.decode.observe(timing.decode_ms / 1000)
        own.inference.observe((timing.total_ms - timing.queue_ms) / 1000)
        if usage.completion_tokens > 1:
            own.tpot.observe(timing.decode_ms / 1000 / (usage.completion_tokens - 1))


def reason_of(error: Exception) -> str:
    """The cause of a failure as a label."""
    return error.reason.lower() if isinstance(error, ServiceError) else "internal"
