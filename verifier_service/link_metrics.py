"""Metrics of the links to drafters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from rootward import metrics
from rootward.core.frames import ToDrafter
from rootward.core.living_tree import Received
from rootward.metrics import Gauges

if TYPE_CHECKING:
    from verifier_service.drafter_link import Link

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class LinkMetrics:
    """Counters of all links, in the verifier's registry. `RemoteDrafter` calls `frame` for every message, with its size on the wire."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        counter = partial(metrics.counter, self._registry)
        seconds = partial(metrics.histogram, self._registry, buckets=SECONDS)
        self._frames = counter("draft_frames", "Frames of drafting streams.", "direction")
        self._bytes = counter("draft_bytes", "Bytes of these frames.", "direction")
        self._feature_bytes = counter("draft_feature_bytes", "Bytes of hidden states sent to drafters with a head.")
        self._received = counter("draft_nodes_received", "Nodes that arrived below the root.")
        self._stale = counter("draft_nodes_stale", "Nodes that arrived too late to be below the root.")
        self.carried = counter("draft_nodes_carried", "Nodes that stayed alive across a commit.")
        self.commits = counter("draft_commits", "Commits to trees: had the new root been grown?", "root")
        self.discarded = counter("draft_frames_discarded", "Growth that was not used.", "reason")
        self._lost = counter("drafter_resyncs", "Trees that ended before their session did.", "reason")
        self.transport = seconds("draft_transport_seconds", "Commit to its first growth, less the time in the drafter.")
        self.wait = seconds("draft_wait_seconds", "Time in the drafter until the first growth after a commit.")
        self._compute = seconds("draft_frame_seconds", "Compute time of the drafter for a frame.")

    def watch(self, links: Callable[[], Sequence[Link]]) -> None:
        """Register the gauges of these links."""

        def read() -> dict[str, dict[str, float]]:
            now_s = time.monotonic()
            return {
                "drafter_up": {link.name: link.ack is not None for link in links()},
                "drafter_circuit_state": {link.name: link.breaker.state(now_s) for link in links()},
            }

        meanings = {
            "drafter_up": "1 while there is a stream.",
            "drafter_circuit_state": "0 closed, 1 half-open, 2 open.",
        }
        Gauges(self._registry, meanings, read)

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
REASONS = ("lost step", "stream lost", "malformed", "gap", "stale_base", "late", "forgotten", "empty", "quarantine")
