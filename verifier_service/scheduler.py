"""The decision about the next engine step: a pure function of values (protocol.md 1.3).

Per session: PREFILL a chunk, VERIFY the tree that has arrived, DECODE one token, or WAIT for growth; one forward may hold all of them.
Under ratio tests the tokens, the probabilities and the size of the arrived tree must not decide how much of it is verified. This module
reads the number of arrived nodes only to stop waiting and to count rows and blocks. A round then verifies all nodes that have arrived,
up to a maximum fixed when it began (a stopping time of the draws), and DECODE happens only if none has arrived or the maximum is 0. A
maximum that followed the load while a tree waits would cut nodes because they did not bring their tree to rest earlier (exact error up
to 0.1). So a session for which a step has no room *waits* with its tree and its maximum: for another step if rows are short, for its KV
to be computed again if blocks are.

    rows      sessions that have waited longest come first; prefill takes the rest, at least a floor and at most a chunk, half of it for
              the best-ranked session, so that short prompts need not wait for a long one (`_prefill_order`)
    blocks    a session that lacks blocks preempts those of worse rank, the worst first; so the best-ranked session always continues
    gathering sessions with trees wait for others that are nearly ready, where sharing a step saves more time (`gathering_s`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

LATE = 1.25  # a tree is awaited for so many times as long as it should take


@dataclass(frozen=True, slots=True)
class SessionView:
    """One session as the scheduler sees it.

    prefill_left  tokens whose KV is missing; 0: ready for rounds
    drafting      a drafter holds a tree for it
    arrived       live nodes below the root
    at_rest       the drafter has said that nothing more will come before the next commit
    waited_s      time since the last commit;  patience_s  when waiting for more of its tree stops to pay (`draft_pace.launch_time`)
    max_nodes     most nodes to verify, fixed when the round began
    target_nodes  nodes with which a tree is not waited for any longer, if there are fewer than max_nodes
    local         nodes of the tree that stands in for plain decoding when nothing has arrived
    due_s         until so many nodes should have arrived; below 0: they are late
    late_s        the same if they take LATE times as long as they should; 0: not known, or overdue
    joins         its first round has begun, and may be launched by the step that ends its prefill
    rank          lower is better: preempted later. No two are equal
    room          rows it can write without taking a block;  blocks  at most so many come free if it is preempted
    """

    session: int
    prefill_left: int = 0
    drafting: bool = False
    arrived: int = 0
    at_rest: bool = False
    waited_s: float = 0.0
    patience_s: float = 0.0
    max_nodes: int = 0
    rank: tuple[int, int] = (0, 0)
    room: int = 0
    blocks: int = 0
    local: int = 0
    joins: bool = False
    due_s: float = 0.0
    late_s: float = 0.0
    target_nodes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one step.

    rows         of the forward, about
    chunk        most of them for prefill
    floor        rows that are kept for prefill while there is any
    free_blocks  KV blocks;  block_size  rows of a block
    step_s       seconds of a step with trees, by its rows; 0: not known
    hold_s       how long ready sessions may still wait for others
    """

    rows: int
    chunk: int
    floor: int = 1
    free_blocks: int = 1 << 62
    block_size: int = 1
    step_s: Callable[[int], float] = lambda rows: 0.0
    hold_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine step. An empty plan: sleep for wait_s (None: until something happens).

    prefill  (session, tokens) of each chunk; a session that is launched in the same step has its whole rest here
    verify   (session, most nodes) of each round with a tree
    decode   sessions that decode one token
    preempt  sessions that lose their KV. Such a plan does nothing else: blocks may be shared, so the caller counts the free ones again
    held     a session is ready, and waits for others
    """

    prefill: tuple[tuple[int, int], ...] = ()
    verify: tuple[tuple[int, int], ...] = ()
    decode: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    wait_s: float | None = None
    held: bool = False

    @property
    def launches(self) -> tuple[tuple[int, int], ...]:
        """(session, most nodes) of every round."""
        return (*self.verify, *((session, 0) for session in self.decode))

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Chunks of sessions that are not launched in the same step."""
        launched = {session for session, _ in self.launches}
        return tuple((session, size) for session, size in self.prefill if session not in launched)

    @property
    def empty(self) -> bool:
        return not (self.prefill or self.verify or self.decode or self.preempt)


def schedule(views: Sequence[SessionView], limits: Limits) -> Plan:
    """The next step. While a session is ready or has prefill left it is empty only if a session of better rank waits for its tree, or if
    ready sessions wait for others. Both end."""
    filling = sorted((v for v in views if v.prefill_left), key=lambda v: v.rank)
    rounds = [v for v in views if not v.prefill_left]
    ready = sorted((v for v in rounds if _launches(v)), key=lambda v: (-v.waited_s, v.rank))
    growing = [v for v in rounds if not _launches(v)]
    if not filling and (held_s := min(limits.hold_s, gathering_s(ready, growing, limits))) > 0.0:
        return Plan(wait_s=held_s, held=True)
    blocks = _Blocks(views, limits)
    kept = min(limits.floor, limits.chunk, sum(v.prefill_left for v in filling))
    launched, used = _launch(ready, limits.rows - kept, blocks)
    prefill, joined = _chunks(filling, min(limits.chunk, max(kept, limits.rows - used)), blocks)
    launched += joined
    verify = tuple((v.session, v.max_nodes) for v in launched if _num_nodes(v))
    decode = tuple(v.session for v in launched if not _num_nodes(v))
    if blocks.preempted:
        return Plan(preempt=tuple(v.session for v in blocks.preempted))
    step = Plan(prefill, verify, decode)
    if not step.empty:
        return step
    return Plan(wait_s=min((v.patience_s - v.waited_s for v in growing), default=None))


def share(max_rows: int, num_sessions: int) -> int:
    """Nodes per session when a step of max_rows is shared, its root row included: shrinks with load, down to plain decoding."""
    return max(0, max_rows // max(num_sessions, 1) - 1)


class _Blocks:
    """Free blocks of one step, and the sessions that are preempted for more."""

    def __init__(self, views: Sequence[SessionView], limits: Limits) -> None:
        self._free, self._size = limits.free_blocks, limits.block_size
        self._holders = sorted((v for v in views if v.blocks), key=lambda v: v.rank)
        self._served: set[int] = set()
        self.preempted: list[SessionView] = []

    def take(self, view: SessionView, rows: int) -> bool:
        """Take the blocks for `rows` more rows of a session. False, and nothing has changed: too few are free, even with those of all
        sessions of worse rank."""
        if view in self.preempted:
            return False
        lacking = self._needs(view, rows) - self._free
        victims: list[SessionView] = []
        while lacking > 0:
            victim = self._worst(view, victims)
            if victim is None:
                return False
            victims.append(victim)
            lacking -= victim.blocks
        self.preempted += victims
        self._free += sum(v.blocks for v in victims) - self._needs(view, rows)
        self._served.add(view.session)
        return True

    def fitting(self, view: SessionView, rows: int) -> int:
        """As many of these rows as fit without a preemption."""
        return min(rows, view.room + self._free * self._size)

    def _needs(self, view: SessionView, rows: int) -> int:
        return -(-max(0, rows - view.room) // self._size)

    def _worst(self, view: SessionView, but: Iterable[SessionView]) -> SessionView | None:
        out = {v.session for v in (*self.preempted, *but)} | self._served
        return next((v for v in reversed(self._holders) if v.rank > view.rank and v.session not in out), None)


def _launch(ready: Iterable[SessionView], rows: int, blocks: _Blocks) -> tuple[list[SessionView], int]:
    """Sessions whose round runs, and their rows. The first one may exceed the budget: it has waited longest."""
    launched: list[SessionView] = []
    used = 0
    for view in ready:
        size = 1 + (_num_nodes(view) or view.local)
        if (not launched or used + size <= rows) and blocks.take(view, size):
            launched.append(view)
            used += size
    return launched, used


def _prefill_order(filling: Sequence[SessionView], budget: int) -> list[tuple[SessionView, int]]:
    """The sessions, by rank, in the order in which they take rows for prefill; and most rows of each.

    Of equal priority, those with the fewest tokens left come first, which makes the mean wait shortest; but half of the rows are for the
    best-ranked session, if it wants them: so every session comes to its turn."""
    if not filling:
        return []
    first, *others = filling
    shorter = sum(v.prefill_left for v in others if v.rank[0] == first.rank[0] and v.prefill_left < first.prefill_left)
    ordered = sorted(others, key=lambda v: (v.rank[0], v.prefill_left, v.rank))
    return [(first, max(-(-budget // 2), budget - shorter)), *((view, budget) for view in ordered)]


def _chunks(
    filling: Sequence[SessionView], budget: int, blocks: _Blocks
) -> tuple[tuple[tuple[int, int], ...], list[SessionView]]:
    """Chunks of prefill, and the sessions that are launched together with the end of theirs."""
    chunks: list[tuple[int, int]] = []
    joined: list[SessionView] = []
    for view, most in _prefill_order(filling, budget):
        size = min(view.prefill_left, most, budget)
        if size <= 0:
            break
        whole = size + 1 + _num_nodes(view)
        joins = view.joins and size == view.prefill_left and _launches(view) and (whole <= budget or not chunks)
        if joins and blocks.take(view, whole):
            joined.append(view)
            budget -= whole - size
        elif not blocks.take(view, size):
            size = blocks.fitting(view, size)
            if size <= 0 or not blocks.take(view, size):
                continue
        chunks.append((view.session, size))
        budget -= size
    return tuple(chunks), joined


def _num_nodes(view: SessionView) -> int:
    return min(view.arrived, view.max_nodes) if view.drafting else 0


def _launches(view: SessionView) -> bool:
    if not view.drafting or view.max_nodes < 1 or view.arrived >= min(view.max_nodes, view.target_nodes):
        return True
    return view.at_rest or view.waited_s >= view.patience_s


def gathering_s(ready: Sequence[SessionView], growing: Iterable[SessionView], limits: Limits) -> float:
    """Seconds for which the ready sessions should wait for growing ones; 0: not at all.

    R ready sessions and W growing ones whose trees are d seconds away, s the time of a step. If the ready ones wait, all N = R + W commit
    after d + s(R + W). If not, the trees of the others arrive during their step: R commit after s(R), and W after s(R) + s(W). So waiting
    costs each of the N sessions d + s(R + W) - s(R), and saves each of the W a step s(W). It pays while the sum of the costs is smaller.
    A step of a large model costs nearly the same for any few rows; then sessions wait while d is below s·W/N.

    A tree that is late is expected to take as long again as it is late. No wait is longer than LATE times the d up to which it pays.

    No session waits for one that is overdue, of worse priority, or without room in the step. A session that decodes plainly waits for none.
    """
    if not ready or not all(_num_nodes(v) for v in ready):
        return 0.0
    max_rows = min(limits.rows, limits.free_blocks * limits.block_size)
    urgent = min(v.rank[0] for v in ready)
    ready_rows, rows, best_s = sum(1 + _num_nodes(v) for v in ready), 0, 0.0
    awaited = [v for v in growing if v.rank[0] <= urgent and v.late_s > 0.0 and v.patience_s > v.waited_s]
    due = sorted(((min(abs(v.due_s), v.patience_s - v.waited_s), v) for v in awaited), key=lambda one: one[0])
    for num, (due_s, view) in enumerate(due, 1):
        rows += 1 + min(view.max_nodes, view.target_nodes)
        if ready_rows + rows > max_rows:
            break
        delay_s = limits.step_s(ready_rows + rows) - limits.step_s(ready_rows)
        worth_s = num * limits.step_s(rows) / (len(ready) + num) - delay_s
        if due_s < worth_s:
            best_s = max(best_s, min(view.late_s, view.patience_s - view.waited_s, LATE * worth_s))
    return best_s
