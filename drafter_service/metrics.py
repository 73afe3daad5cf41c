"""Metrics of the drafter, and a span per tree in the trace of its request."""

from __future__ import annotations

from dataclasses import dataclass

from rootward.core.frames import Grow, Open
from rootward.tracing import Span, set_attributes, start_span

GAUGES = {
    "drafter_sessions_open": "Trees held.",
    "drafter_sessions_cap": "Trees that can be held at once.",
    "drafter_rows_used_ratio": "Share of the trees in use, 0 to 1.",
    "drafter_streams": "Verifiers connected.",
}


Key = tuple[int, int]  # (stream, slot)


@dataclass(slots=True)
class _Tree:
    span: Span
    nodes: int = 0
    frames: int = 0
    draft_us: int = 0
    queue_us: int = 0


class Spans:
    """Spans of the trees of traced requests."""

    def __init__(self) -> None:
        self._trees: dict[Key, _Tree] = {}

    def opened(self, key: Key, message: Open) -> None:
        if message.traceparent:
            num_prefix = len(message.prefix)
            span = start_span("drafter.tree", message.traceparent, request_id=message.session, prefix_tokens=num_prefix)
            self._trees[key] = _Tree(span)

    def grew(self, key: Key, grow: Grow) -> None:
        if (tree := self._trees.get(key)) is not None:
            tree.nodes += len(grow.token)
            tree.frames += 1
            tree.draft_us += grow.draft_us
            tree.queue_us += grow.queue_us

    def closed(self, key: Key) -> None:
        if (tree := self._trees.pop(key, None)) is not None:
            times = {"draft_ms": tree.draft_us / 1e3, "queue_ms": tree.queue_us / 1e3}
            set_attributes(tree.span, nodes=tree.nodes, frames=tree.frames, **times)
            tree.span.end()

    def left(self, stream: int) -> None:
        """The verifier of this stream is gone."""
        for key in [key for key in self._trees if key[0] == stream]:
            self.closed(key)
