"""A span per round of a sampled request: what it verified, and where its time went."""

from __future__ import annotations

import time

from rootward.tracing import begin, traceparent_of
from verifier_service.runner import Outcome
from verifier_service.sessions import Session


def trace_round(session: Session, outcome: Outcome, *, missed: bool) -> None:
    """A round has ended. wait: for a tree, a place in a step and the step itself; verify: the step's forward and verdict."""
    if not session.span.is_recording():
        return
    now_s, draft = time.monotonic(), session.draft
    lasted_s = now_s - session.committed_s
    begin(
        "verifier.round",
        traceparent_of(session.span),
        start_s=time.time() - lasted_s,
        nodes=outcome.num_nodes,
        accepted=len(outcome.tokens) - 1,
        missed=missed,
        wait_ms=1e3 * (session.launched_s - session.committed_s),
        verify_ms=1e3 * (now_s - session.launched_s),
        draft_queue_ms=1e3 * draft.queued_s if draft is not None else 0.0,
        drafter=session.drafter_name,
    ).end()
