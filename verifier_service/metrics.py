"""Metrics of the verifier. Names and meanings are those of vLLM where vLLM has the metric; labels never contain ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry

from rootward import metrics
from rootward.demand import DemandCollector, VerifierDemand
from rootward.metrics import Gauges, Read
from rootward.tracing import start_span, traceparent_of
from verifier_service.link_metrics import LinkMetrics
from verifier_service.runner import Outcome
from verifier_service.session import Session

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
TOKEN_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
SIZE_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 240)
MAX_INDEX_LABEL = 63  # larger positions and ranks are counted under this label
GAUGES = {
    "num_requests_running": "Running sessions.",
    "num_requests_waiting": "Requests waiting for a KV slot.",
    "num_preemptions_total": "Sessions returned to the queue to free KV blocks.",
    "kv_cache_usage_ratio": "Fraction of KV blocks in use, 0 to 1.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache.",
    "drafters_up": "Drafters with an open stream.",
    "drafters_draining": "Drafters that are draining or that discovery no longer lists.",
    "drafters_left_alone": "Drafters whose circuit breaker is open or half-open.",
    "drafter_moves_total": "Sessions moved from one drafter to another.",
    "spec_decode_speedup_estimate": "Estimated tokens per second with draft trees divided by those of plain decoding.",
}


class Metrics:
    """One registry per verifier, so that several can live in one process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.links = LinkMetrics(registry)
        counter, histogram = partial(metrics.counter, registry), partial(metrics.histogram, registry)
        self._drafts = counter("spec_decode_num_drafts", "Rounds that verified a tree.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Nodes verified, roots excluded.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted, bonus excluded.")
        self._emitted = counter("generation_tokens", "Tokens committed.")
        kinds = "Rounds by kind: tree (grown by a drafter), local (tree grown by the verifier), plain (no tree)."
        self._rounds = counter("spec_decode_rounds", kinds, "kind")
        self._misses = counter("draft_misses", "Rounds that waited for a tree and ran without one.")
        depth = "Accepted draft tokens by depth; position 0 is the first token of a tree."
        self._depths = counter("spec_decode_num_accepted_tokens_per_pos", depth, "position")
        rank = "Accepted draft tokens by rank among their siblings; rank 0 was tested first."
        self._ranks = counter("spec_decode_accepted_rank", rank, "rank")
        self._nodes = histogram("spec_decode_tree_nodes", "Nodes of a verified tree, root excluded.", SIZE_BUCKETS)
        self._max_depth = histogram("spec_decode_tree_depth", "Longest path of a verified tree.", SIZE_BUCKETS)
        self._leaves = histogram("spec_decode_tree_leaves", "Leaves of a verified tree.", SIZE_BUCKETS)
        tokens = "Tokens committed by a round with a tree, bonus included: block efficiency."
        self._tokens = histogram("spec_decode_tokens_per_round", tokens, TOKEN_BUCKETS)
        self._head = counter(
            "draft_head_seconds", "Time of engine steps, prefill excluded, in which a draft head grew trees."
        )
        self._steps = histogram("step_duration_seconds", "One engine step.", STEP_BUCKETS, "kind")

    def watch(self, read: Read, demand: Callable[[], Mapping[str, VerifierDemand]]) -> None:
        """Export the values of GAUGES, read at every scrape, and the demand of each drafter pool, for the autoscaler."""
        Gauges(self.registry, GAUGES, read)
        self.registry.register(DemandCollector(demand))

    def record_step(self, kind: str, seconds: float, *, draft_s: float = 0.0) -> None:
        """A step took so long, draft_s of it for a draft head."""
        self._steps.labels(kind).observe(seconds)
        if kind != "prefill":
            self._head.inc(draft_s)

    def record_round(self, outcome: Outcome, *, missed: bool, local: bool = False) -> None:
        """Count a round. missed: it waited for a tree that did not arrive; local: the verifier grew its tree."""
        tree = outcome.tree
        self._rounds.labels("local" if local else "tree" if outcome.num_nodes else "plain").inc()
        self._emitted.inc(len(outcome.tokens))
        if missed:
            self._misses.inc()
        if outcome.num_nodes:
            self._drafts.inc()
            self._draft_tokens.inc(outcome.num_nodes)
            self._accepted.inc(len(outcome.tokens) - 1)
            self._tokens.observe(len(outcome.tokens))
            self._nodes.observe(outcome.num_nodes)
            self._max_depth.observe(int(tree.depth.max()))
            self._leaves.observe(len(tree) - len(set(tree.parent[1:].tolist())))
        for depth, node in enumerate(outcome.path):
            rank = int((tree.parent[1:node] == tree.parent[node]).sum())
            self._depths.labels(min(depth, MAX_INDEX_LABEL)).inc()
            self._ranks.labels(min(rank, MAX_INDEX_LABEL)).inc()


def trace_round(session: Session, outcome: Outcome, *, missed: bool, drafter: str) -> None:
    """Export the span of a round that has ended. wait_ms: from the previous commit to the launch; verify_ms: forward and verdict."""
    if not session.span.is_recording():
        return
    now_s, draft = time.monotonic(), session.draft
    duration_s = now_s - session.round.committed_s
    start_span(
        "verifier.round",
        traceparent_of(session.span),
        start_s=time.time() - duration_s,
        nodes=outcome.num_nodes,
        accepted=len(outcome.tokens) - 1,
        missed=missed,
        wait_ms=1e3 * (session.round.launched_s - session.round.committed_s),
        verify_ms=1e3 * (now_s - session.round.launched_s),
        draft_queue_ms=1e3 * draft.queued_s if draft is not None else 0.0,
        drafter=drafter,
    ).end()
