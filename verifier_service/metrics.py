"""What the verifier counts. Names and meanings as in vLLM where it has them; no label ever holds an id."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from rootward.readings import Read, Readings

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TOKEN_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
READINGS = {
    "num_requests_running": "Sessions that run.",
    "num_requests_waiting": "Requests that wait for a place.",
    "num_preemptions_total": "Sessions put back into the queue to free KV blocks.",
    "kv_cache_usage_ratio": "Share of KV blocks in use, 0 to 1.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found there.",
    "drafters_up": "Drafters with a stream.",
    "spec_decode_speedup_estimate": "Tokens per second with trees over plain decoding, as measured here.",
}


class Metrics:
    """One registry per verifier, so that several can live in one process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._drafts = Counter("rootward_spec_decode_num_drafts", "Rounds that verified a tree.", registry=registry)
        self._draft_tokens = Counter(
            "rootward_spec_decode_num_draft_tokens", "Nodes verified, roots excluded.", registry=registry
        )
        self._accepted = Counter(
            "rootward_spec_decode_num_accepted_tokens", "Draft tokens accepted, bonus excluded.", registry=registry
        )
        self._emitted = Counter("rootward_generation_tokens", "Tokens committed.", registry=registry)
        self._rounds = Counter("rootward_spec_decode_rounds", "Rounds.", ["kind"], registry=registry)
        self._misses = Counter("rootward_draft_misses", "Rounds that waited for a tree in vain.", registry=registry)
        self._tokens = Histogram(
            "rootward_spec_decode_tokens_per_round",
            "Tokens committed by a round with a tree, bonus included: block efficiency.",
            registry=registry,
            buckets=TOKEN_BUCKETS,
        )
        self._steps = Histogram(
            "rootward_step_duration_seconds", "One engine step.", ["kind"], registry=registry, buckets=STEP_BUCKETS
        )

    def watch(self, read: Read) -> None:
        """Where the values of READINGS come from."""
        Readings(self.registry, READINGS, read)

    def stepped(self, kind: str, seconds: float) -> None:
        self._steps.labels(kind).observe(seconds)

    def committed(self, num_tokens: int, num_nodes: int, *, missed: bool) -> None:
        """A round ended with so many tokens, after verifying so many nodes."""
        self._rounds.labels("tree" if num_nodes else "plain").inc()
        self._emitted.inc(num_tokens)
        if missed:
            self._misses.inc()
        if num_nodes:
            self._drafts.inc()
            self._draft_tokens.inc(num_nodes)
            self._accepted.inc(num_tokens - 1)
            self._tokens.observe(num_tokens)
