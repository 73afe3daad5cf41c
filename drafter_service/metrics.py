"""Metrics of the drafter, and a span per tree in the trace of its request."""

from __future__ import annotations

from collections import Counter

from rootward.core.frames import Grow, Open
from rootward.tracing import Span, set_attributes, start_span

GAUGES = {
    "drafter_sessions_open": "Trees held.",
    "drafter_sessions_cap": "Trees that can be held at once.",
    "drafter_rows_used_ratio": "Share of the trees in use, 0 to 1.",
    "drafter_streams": "Verifiers connected.",
}

Key = tuple[int, int]  # (stream, slot)


class Spans:
    """Spans of the trees of traced requests."""

    def __init__(self) -> None:
        self._trees: dict[Key, tuple[Span, Counter[str]]] = {}  # with totals of their growth

    def opened(self, key: Key, message: Open) -> None:
        if message.traceparent:
            num_prefix = len(message.prefix)
            span = start_span("drafter.tree", message.traceparent, prefix_tokens=num_prefix)
            self._trees[key] = span, Counter()

    def grew(self, key: Key, grow: Grow) -> None:
        if key in self._trees:
            _, totals = self._trees[key]
            totals.update(nodes=len(grow.token), frames=1, draft_us=grow.draft_us, queue_us=grow.queue_us)

    def closed(self, key: Key) -> None:
        if key in self._trees:
            span, totals = self._trees.pop(key)
            times = {"draft_ms": totals["draft_us"] / 1e3, "queue_ms": totals["queue_us"] / 1e3}
            set_attributes(span, nodes=totals["nodes"], frames=totals["frames"], **times)
            span.end()
