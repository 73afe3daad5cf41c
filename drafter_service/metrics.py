"""What the drafter counts; no label ever holds an id."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from rootward.metrics import Gauges, Read

READINGS = {
    "drafter_sessions_open": "Trees held.",
    "drafter_sessions_cap": "Trees that can be held at once.",
    "drafter_rows_used_ratio": "Share of the trees in use, 0 to 1.",
    "drafter_streams": "Verifiers connected.",
}


class Metrics:
    """One registry per drafter, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def watch(self, read: Read) -> None:
        """Where the values of READINGS come from."""
        Gauges(self.registry, READINGS, read)
