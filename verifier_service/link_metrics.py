"""Metrics of the links to drafters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        self.carried = self._counter("draft_nodes_carried", "Nodes that stayed alive across a commit.")
        self.commits = self._counter("draft_commits", "Commits to trees: had the new root been grown?", "root")
        self.discarded = self._counter("draft_frames_discarded", "Growth that was not used.", "reason")
        self._lost = self._counter("drafter_resyncs", "Trees that ended before their session did.", "reason")
        self.transport = self._seconds("draft_transport", "Commit to its first growth, less the time in the drafter.")
        self.wait = self._seconds("draft_wait", "Time in the drafter until the first growth after a commit.")
        self._compute = self._seconds("draft_frame", "Compute time of the drafter for a frame.")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"rootward_{name}", meaning, labels, registry=self._registry)

    def _seconds(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"rootward_{name}_seconds", meaning, registry=self._registry, buckets=SECONDS)

    def watch(self, links: Callable[[], Sequence[Link]]) -> None:
        """Register the gauges of these links."""

        def read() -> dict[str, tuple[float, float]]:
            now_s = time.monotonic()
            return {link.name: (link.ack is not None, link.breaker.state(now_s)) for link in links()}

        meanings = {
            "drafter_up": "1 while there is a stream.",
            "drafter_circuit_state": "0 closed, 1 half-open, 2 open.",
        }
        DrafterGauges(self._registry, meanings, read)

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
            self.discarded.labels(received.reason).inc()
        self._compute.observe(draft_us / 1e6)

    def orphaned(self, reason: str) -> None:
        self._lost.labels(reason if reason in REASONS else "refused").inc()


# Label values. Reasons that a drafter gives are unbounded, and are counted as "refused".
REASONS = ("lost step", "stream lost", "malformed", "gap", "stale_base", "late", "forgotten", "quarantine")


class DrafterGauges(Collector):
    """Gauges by drafter, read at every scrape.

    meanings: by name, without the prefix `rootward_`; read: values of each drafter, in the order of `meanings`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        meanings: Mapping[str, str],
        read: Callable[[], Mapping[str, Sequence[float]]],
    ) -> None:
        self._meanings, self._read = meanings, read
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        values = self._read()
        for number, (name, meaning) in enumerate(self._meanings.items()):
            family = GaugeMetricFamily(f"rootward_{name}", meaning, labels=["drafter"])
            for drafter, row in values.items():
                family.add_metric([drafter], float(row[number]))
            yield family
