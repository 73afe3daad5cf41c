"""What the next engine step does: a pure function of values (protocol.md 1.3).

Per session: PREFILL a chunk, VERIFY the tree that has arrived, DECODE one token, or WAIT for growth. Under ratio tests the values, the
probabilities and the size of the arrived tree must not decide how much of it is verified. What is decided here looks at the number
of arrived nodes only to stop waiting, and then everything that has arrived, up to a cap fixed when the round began, is verified
(a stopping time of the draws); DECODE happens only when nothing has arrived or the cap is 0. A cap that followed the load while a tree
waits would cut nodes because they did not bring their tree to rest earlier (exact error up to 0.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """One session as the scheduler sees it.

    prefill_left  prompt tokens whose KV is missing; 0: ready for rounds
    drafting      a drafter holds a tree for it
    arrived       live nodes below the root
    at_rest       the drafter has said that nothing more will come before the next commit
    waited_s      time since the last commit;  patience_s  the longest wait that can pay
    cap           most nodes to verify, fixed when the round began; a tree of this size is not waited for any longer
    """

    session: int
    prefill_left: int = 0
    drafting: bool = False
    arrived: int = 0
    at_rest: bool = False
    waited_s: float = 0.0
    patience_s: float = 0.0
    cap: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine step. Empty: sleep for wait_s (None: until something happens)."""

    prefill: tuple[tuple[int, int], ...] = ()  # (session, tokens)
    verify: tuple[tuple[int, int], ...] = ()  # (session, cap in nodes)
    decode: tuple[int, ...] = ()
    wait_s: float | None = None

    @property
    def empty(self) -> bool:
        return not (self.prefill or self.verify or self.decode)


def plan(views: Sequence[View], *, prefill_chunk: int, prefill_turn: bool) -> Plan:
    """Prefill and rounds take turns when both have work, so that neither starves and neither pads the other's rows."""
    filling = [v for v in views if v.prefill_left]
    rounds = [v for v in views if not v.prefill_left]
    launch = _round_step(rounds)
    if filling and (prefill_turn or launch.empty):
        return Plan(prefill=_chunks(filling, prefill_chunk))
    return launch


def share(max_rows: int, num_sessions: int) -> int:
    """Nodes per session when a step of max_rows is shared, its root row included: shrinks with load, down to plain decoding."""
    return max(0, max_rows // max(num_sessions, 1) - 1)


def patience_s(*, expected_tokens: float, plain_s: float, limit_s: float) -> float:
    """The longest wait for a tree that can pay: remaining wait < (E − 1)·t_plain, never beyond the limit."""
    return min(limit_s, max(0.0, (expected_tokens - 1.0) * plain_s))


def _chunks(filling: Sequence[View], budget: int) -> tuple[tuple[int, int], ...]:
    chunks: list[tuple[int, int]] = []
    for view in filling:
        if budget <= 0:
            break
        size = min(view.prefill_left, budget)
        chunks.append((view.session, size))
        budget -= size
    return tuple(chunks)


def _round_step(rounds: Sequence[View]) -> Plan:
    verify: list[tuple[int, int]] = []
    decode: list[int] = []
    waiting: list[View] = []
    for view in rounds:
        if not view.drafting or view.cap < 1:
            decode.append(view.session)
        elif view.arrived >= view.cap or (view.arrived and _done_waiting(view)):
            verify.append((view.session, view.cap))
        elif _done_waiting(view):
            decode.append(view.session)
        else:
            waiting.append(view)
    if verify or decode:
        return Plan(verify=tuple(verify), decode=tuple(decode))
    return Plan(wait_s=min((v.patience_s - v.waited_s for v in waiting), default=None))


def _done_waiting(view: View) -> bool:
    return view.at_rest or view.waited_s >= view.patience_s
