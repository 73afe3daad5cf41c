"""Metrics of the links to drafters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rootward.core.frames import ToDrafter
from rootward.core.living_tree import Received

if TYPE_CHECKING:
    from verifier_service.drafter_link import Link

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class LinkMetrics:
    """Counters of all links, in the verifier's registry. `RemoteDrafter` calls `frame` for every message, with its size on the wire."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        self._frames = self._counter("draft_frames", "Frames of drafting streams.", "direction")
        self._bytes = self._counter("draft_bytes", "Bytes of these frames.", "direction")
        self._feature_bytes = self._counter(
            "draft_feature_bytes", "Bytes of hidden states sent to drafters with a head."
        )
        self._received = self._counter("draft_nodes_received", "Nodes that arrived below the root.")
        self._stale = self._counter("draft_nodes_stale", "Nodes that arrived too late to be below the root.")
        self._carried = self._counter("draft_nodes_carried", "Nodes that stayed alive across a commit.")
        self._commits = self._counter("draft_commits", "Commits to trees: had the new root been grown?", "root")
        self._discarded = self._counter("draft_frames_discarded", "Growth that was not used.", "reason")
        self._lost = self._counter("drafter_resyncs", "Trees that ended before their session did.", "reason")
        self._transport = self._seconds("draft_transport", "Commit to its first growth, less the time in the drafter.")
        self._queue = self._seconds("draft_wait", "Time in the drafter until the first growth after a commit.")
        self._compute = self._seconds("draft_frame", "Compute time of the drafter for a frame.")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"rootward_{name}", meaning, labels, registry=self._registry)

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"rootward_{name}_seconds", meaning, registry=self._registry, buckets=SECONDS)

    def watch(self, links: Callable[[], Sequence[Link]]) -> None:
        """Register the gauges of these links."""
        self._registry.register(_Drafters(links))

    def frame(self, direction: str, num_bytes: int) -> None:
        self._frames.labels(direction).inc()
        self._bytes.labels(direction).inc(num_bytes)

    def sent_features(self, frame: ToDrafter) -> None:
        """Count the bytes of all features of a frame."""
        found = [message.features for message in frame.commits] + [message.features for message in frame.features]
        self._feature_bytes.inc(sum(features.num_bytes for features in found if features is not None))

    def grew(self, received: Received, draft_us: int) -> None:
        self._received.inc(received.kept)
        self._stale.inc(received.stale)
        if received.reason:
            self._discarded.labels(received.reason).inc()
        self._compute.observe(draft_us / 1e6)

    def discarded(self, reason: str) -> None:
        self._discarded.labels(reason).inc()

    def answered(self, latency_s: float, drafter_s: float) -> None:
        """Record the first growth since a commit. drafter_s: time in queue and computing, by the drafter's report."""
        self._transport.observe(max(0.0, latency_s - drafter_s))
        self._queue.observe(drafter_s)

    def rerooted(self, *, grown: bool, num_nodes: int) -> None:
        """Record a commit. grown: its last token was a node already; num_nodes: nodes alive below it."""
        self._commits.labels("grown" if grown else "new").inc()
        self._carried.inc(num_nodes)

    def orphaned(self, reason: str) -> None:
        self._lost.labels(reason if reason in REASONS else "refused").inc()


# Label values. Reasons that a drafter gives are unbounded, and are counted as "refused".
REASONS = ("lost step", "stream lost", "malformed", "gap", "stale_base", "late", "forgotten", "quarantine")


class _Drafters(Collector):
    """Gauges by drafter, read at every scrape."""

    def __init__(self, links: Callable[[], Sequence[Link]]) -> None:
        self._links = links

    def collect(self) -> Iterator[GaugeMetricFamily]:
        up = GaugeMetricFamily("rootward_drafter_up", "1 while there is a stream.", labels=["drafter"])
        state = GaugeMetricFamily(
            "rootward_drafter_circuit_state", "0 closed, 1 half-open, 2 open.", labels=["drafter"]
        )
        now_s = time.monotonic()
        for link in self._links():
            up.add_metric([link.name], float(link.ack is not None))
            state.add_metric([link.name], float(link.breaker.state(now_s)))
        yield from (up, state)
