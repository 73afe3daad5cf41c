"""The rounds of the sessions: numbers of nodes, waiting times, and the statistics of their outcomes.

Numbers of nodes are decided before the tree is looked at and kept until the round is over (docs/decisions/0005).
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping

from verifier_service.draft_pace import launch_time
from verifier_service.drafter_pool import DrafterPool
from verifier_service.local_drafts import learn
from verifier_service.runner import Outcome
from verifier_service.scheduler import LATE, Plan, share
from verifier_service.session import Draft, Session
from verifier_service.settings import VerifierSettings
from verifier_service.speculation import RoundResult, SpeculationController, Statistics
from verifier_service.step_time import StepTime


class Rounds:
    """Plans the rounds of all sessions of a verifier. running: the sessions that share steps, by number.

    load: sessions that share the rows of a step. nodes: draft nodes for which each of them has rows.
    """

    def __init__(
        self,
        settings: VerifierSettings,
        pool: DrafterPool,
        running: Mapping[int, Session],
        step_time: StepTime | None = None,
    ) -> None:
        self.settings, self.pool, self._running = settings, pool, running
        self.controller = SpeculationController(step_time or StepTime())
        self.load, self.nodes = 1, settings.num_draft_tokens
        self._idle_s = 0.0  # total seconds in which the engine had no step to run
        self._held_until_s = math.inf  # end of the present wait for other sessions; infinite: there is none

    def count(self, max_rows: int) -> None:
        """Count the sessions that share the rows of a step: those whose round has begun or may begin. Called once a step."""
        running = [session for session in self._running.values() if not session.done]
        self.load = max(1, sum(session.round.max_nodes is not None or not session.prefill_left for session in running))
        self.nodes = share(max_rows, self.load)

    def plan(self) -> None:
        """Decide how many nodes the rounds that begin from now on wait for."""
        by_source: defaultdict[str, Counter[Statistics]] = defaultdict(Counter)
        running = [session for session in self._running.values() if not session.done]
        for session in running:
            if session.required:
                continue
            if session.uses_drafters and self.pool.up:
                by_source["drafter"][session.statistics] += 1
            for local in session.local_drafts:
                by_source["head" if local.source is None else "look-up"][local.statistics] += 1
        for source, counts in by_source.items():
            plain, from_drafters = len(running) - counts.total(), source == "drafter"
            self.controller.plan(counts, plain=plain, most=self.possible, from_drafters=from_drafters)

    def statistics(self, session: Session) -> Statistics:
        """Statistics of the rounds of sessions of the same kind."""
        drafts = session.uses_drafters, session.draft_mode, session.strategy, session.request.speculation.drafter
        return self.controller.of((*drafts, *session.text_kind))

    def drafts(self, session: Session) -> bool:
        """Whether a drafter should grow a tree for the session."""
        return session.required or session.statistics.uses_trees(session.number)

    @property
    def possible(self) -> int:
        """Nodes that a round may verify now, if its request does not limit them and is not about to end."""
        return min(self.settings.num_draft_tokens, self.nodes)

    def most(self, session: Session) -> int:
        """Nodes that a round of this session may verify now."""
        # Deeper than tokens_left - 1 nothing could be emitted.
        return min(
            session.request.speculation.num_draft_tokens or self.possible, self.possible, session.tokens_left - 1
        )

    def plan_round(self, session: Session) -> None:
        """Fix the numbers of nodes of the session's round. A session that gains nothing by trees leaves its drafter, whatever was grown."""
        most, current = self.most(session), session.round
        current.launch_immediately = False
        if session.required and session.uses_drafters:
            current.max_nodes = current.target_nodes = most
        elif not session.uses_drafters or not self.pool.up:
            current.max_nodes = current.target_nodes = 0
        else:
            current.target_nodes, current.max_nodes = session.statistics.begin_round(session.number, most)
            if not self.drafts(session):
                self.pool.close(session, "does not pay")

    def patience_s(self, session: Session) -> float:
        """Seconds after the last commit at which the session's round is launched if no more growth arrives. No round waits for a drafter
        that still reads the prompt."""
        limit_s, draft, current = self.settings.draft_wait_s, session.draft, session.round
        if session.required:
            return limit_s
        if current.launch_immediately or draft is None or not draft.has_growth:
            return 0.0
        return min(limit_s, self._launch_s(session, draft, max(0.0, draft.last_growth_s - current.committed_s)))

    def due(self, session: Session, now_s: float) -> tuple[float, float]:
        """`due_s` and `late_s` of its `SessionView`, by the pace of its drafter."""
        draft, target_nodes = session.draft, session.round.target_nodes
        if draft is None or not draft.rerooted_s or not draft.link.pace.first_s or len(draft.tree) >= target_nodes:
            return 0.0, 0.0
        first_s, node_s = draft.link.pace.first_s, draft.link.pace.node_s(target_nodes)
        last_s = draft.last_growth_s if draft.has_current_growth else draft.rerooted_s + first_s - node_s
        takes_s = last_s + node_s * (target_nodes - len(draft.tree)) - draft.rerooted_s
        since_s = now_s - draft.rerooted_s
        return takes_s - since_s, max(0.0, LATE * takes_s - since_s)

    def budget(self, session: Session, draft: Draft) -> int | None:
        """Nodes that the drafter should grow for the round that has begun. A round that is launched with its kept nodes needs no others, so
        the drafter has all of its time for the next one."""
        target_nodes, kept = session.round.target_nodes, len(draft.tree)
        if not target_nodes or not kept or session.required or self._launch_s(session, draft, 0.0) > 0.0:
            return target_nodes
        if draft is session.draft:  # and not the one that it moves to
            session.round.launch_immediately = True
        return min(kept, session.round.max_nodes or 0)

    def _launch_s(self, session: Session, draft: Draft, since_s: float) -> float:
        """Seconds after the commit at which the round is launched. Kept nodes are launched by the rule of `launch_time`. Once growth below
        the root has begun, the round waits for all target nodes: otherwise the acceptance of the last ones would never be observed."""
        target_nodes = session.round.target_nodes
        tokens = session.statistics.tokens(target_nodes)
        verify_s = self.controller.step_time.seconds(self.load * (target_nodes + 1)) or self.settings.draft_wait_s
        kept = 0 if draft.has_current_growth else min(len(draft.tree), target_nodes)
        due = {"next_s": draft.link.pace.first_s, "node_s": draft.link.pace.node_s(target_nodes)}
        return launch_time(kept, since_s if kept else 0.0, tokens=tokens, verify_s=verify_s, **due)

    def start_round_timer(self, session: Session) -> None:
        """Start the clock of the session's round, after it has got a KV slot or its text has grown."""
        current = session.round
        current.committed_s, current.idle_mark_s = time.monotonic(), self._idle_s
        current.had_prefill, current.tree_ready_at = False, None

    def begin_next(self, session: Session) -> None:
        """Plan the next round of a session at the commit of the last one, so that the drafter knows how many nodes to grow."""
        session.round.max_nodes = None
        self.start_round_timer(session)
        if not session.done:
            self.plan_round(session)

    def prefill_ran(self) -> None:
        """The step that has ended held a prefill, which all present rounds waited for."""
        for session in self._running.values():
            session.round.had_prefill = True

    def on_launch(self, session: Session, num_nodes: int) -> None:
        """The step of the session's round begins, with `num_nodes` nodes of its drafter. Whether the tree came too late is decided now:
        nodes that arrive while the step runs may be kept for the next round, whose number of nodes must not depend on them."""
        draft, current = session.draft, session.round
        current.launched_s = time.monotonic()
        current.missed = draft is not None and not draft.at_rest and bool(current.max_nodes) and not num_nodes
        current.stalled = current.missed and draft is not None and (draft.has_growth or session.required)
        at_rest = draft is not None and draft.at_rest and not draft.closed
        current.empty = at_rest and bool(current.max_nodes) and not num_nodes
        partial = current.launch_immediately and num_nodes > 0
        current.observed_nodes = min(current.target_nodes, num_nodes) if partial else current.target_nodes

    def note_ready(self, session: Session) -> None:
        """Note when the session's tree has all its nodes: from then on the round waits for other sessions, not for the drafter."""
        draft, current = session.draft, session.round
        ready = draft is not None and (draft.at_rest or len(draft.tree) >= current.target_nodes)
        if ready and current.tree_ready_at is None:
            current.tree_ready_at = self._idle_s

    def planned(self, step: Plan, now_s: float) -> None:
        """Note the plan of the next step. Sessions that wait for others do so until a time that later plans may not postpone. The time
        holds until a plan holds no session; a plan that preempts sessions for them does not change it."""
        if step.held and step.wait_s is not None:
            self._held_until_s = min(self._held_until_s, now_s + step.wait_s)
        elif not step.preempt:
            self._held_until_s = math.inf

    def hold_s(self, now_s: float) -> float:
        """How long sessions that are ready may still wait for others."""
        return self._held_until_s - now_s

    def idle(self, seconds: float) -> None:
        """The engine had no step to run for these seconds."""
        self._idle_s += seconds

    def ended(
        self, session: Session, outcome: Outcome, *, prefilled: bool = False, draft_s: float | None = 0.0
    ) -> bool:
        """Learn from a verdict. prefilled: the forward of the round also held the end of the session's prefill; draft_s: seconds of the
        draft head in the step, None if it took longer than usual.

        Returns whether the round waited for a tree in vain."""
        current = session.round
        local = session.local is not None and session.local.launched
        drafted, path = (0, ()) if local else (outcome.num_nodes, outcome.path)
        self.pool.record_round(session, missed=current.missed, num_nodes=drafted, tokens=len(outcome.tokens))
        target = current.target_nodes if drafted or current.stalled else 0
        observed = current.observed_nodes if target else 0
        # A round that waits whether or not this pays, or that waited for prefill, tells nothing about waits for drafts.
        if session.required or prefilled:
            if drafted:
                session.statistics.add(session.number, RoundResult(target, observed, path))
            return current.stalled
        speed = self.controller.step_time.speed
        # From `tree_ready_at` on the round waited for other sessions.
        ready_at = self._idle_s if current.tree_ready_at is None else current.tree_ready_at
        wait_s = (ready_at - current.idle_mark_s) / speed
        if not drafted:
            learn(session, outcome.num_nodes, outcome.path, draft_s=draft_s, load=self.load, speed=speed)
        wait = None if current.had_prefill else wait_s
        session.statistics.add(session.number, RoundResult(target, observed, path, wait))
        return current.stalled
