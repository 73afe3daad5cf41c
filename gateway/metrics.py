"""What the gateway counts. Names and meanings as in the reference of metrics; no label ever holds an id."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.requests import Ending
from rootward.errors import ServiceError

_LATENCY_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    30,
    60,
)


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._success = Counter(
            "rootward_request_success", "Generations that ended.", ["finished_reason"], registry=registry
        )
        self._refused = Counter("rootward_requests_refused", "Requests that failed.", ["reason"], registry=registry)
        self._prompt = Counter("rootward_prompt_tokens", "Prompt tokens of ended generations.", registry=registry)
        self._generated = Counter("rootward_generation_tokens", "Tokens emitted.", registry=registry)
        self._redispatched = Counter("rootward_redispatch", "Attempts lost and begun anew.", registry=registry)
        self._resumed = Counter("rootward_requests_resumed", "Requests taken up again by clients.", registry=registry)
        self._running = Gauge("rootward_num_requests_running", "Requests at verifiers.", registry=registry)
        self._waiting = Gauge("rootward_num_requests_waiting", "Requests waiting for a place.", registry=registry)
        self._ready = Gauge("rootward_upstream_ready", "Verifiers that take requests.", registry=registry)
        self._ttft = Histogram(
            "rootward_time_to_first_token_seconds",
            "Arrival to first token.",
            registry=registry,
            buckets=_LATENCY_BUCKETS,
        )
        self._e2e = Histogram(
            "rootward_e2e_request_latency_seconds", "Arrival to end.", registry=registry, buckets=_LATENCY_BUCKETS
        )

    def watch(self, running: Callable[[], float], waiting: Callable[[], float], ready: Callable[[], float]) -> None:
        """Gauges are read when they are asked for."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        self._ready.set_function(ready)

    def ended(self, ending: Ending) -> None:
        self._success.labels(ending.reason.value).inc()
        self._prompt.inc(ending.usage.prompt_tokens)
        self._generated.inc(ending.usage.completion_tokens)
        self._ttft.observe(ending.timing.ttft_ms / 1000)
        self._e2e.observe(ending.timing.total_ms / 1000)

    def refused(self, error: Exception) -> None:
        self._refused.labels(error.reason.lower() if isinstance(error, ServiceError) else "internal").inc()

    def redispatched(self) -> None:
        self._redispatched.inc()

    def resumed(self) -> None:
        self._resumed.inc()
