"""What a round is given when it begins, how long it may wait, and what is learned when it ends.

Decided before the tree is looked at and kept until the round is over (docs/decisions/0005).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

from rootward.core.requests import DraftMode
from verifier_service.cost import Machine, StepCost
from verifier_service.drafters import DrafterPool
from verifier_service.gain import Gain, Gains, Spent
from verifier_service.launching import launch_s
from verifier_service.local_draft import learn
from verifier_service.policy import Policy
from verifier_service.runner import Outcome
from verifier_service.scheduler import Plan, View, share
from verifier_service.sessions import Draft, Session

LATE = 1.25  # a tree is awaited for so many times as long as it should take


class Rounds:
    """`running`: the sessions that share steps, by number."""

    def __init__(
        self, policy: Policy, pool: DrafterPool, running: Mapping[int, Session], cost: StepCost | None = None
    ) -> None:
        self.policy, self.pool, self._running = policy, pool, running
        self.gains = Gains(Machine(cost or StepCost()))
        self.load, self.nodes = 1, policy.num_draft_tokens
        self._idle_s = 0.0  # the engine stood idle for so long in all, waiting for something to happen
        self._held_until_s = math.inf  # the end of the wait for others that has begun; infinite: none has

    def count(self, max_rows: int) -> None:
        """Who shares the rows of a step: sessions whose round has begun, or may. Looked up once a step."""
        begun = [s for s in self._running.values() if not s.done and (s.cap is not None or not s.prefill_left)]
        self.load = max(1, len(begun))
        self.nodes = share(max_rows, self.load)

    def gain(self, session: Session) -> Gain:
        """Of sessions like this one."""
        request = session.request
        kind = session.law or DraftMode.SAMPLED, round(10 * request.sampling.temperature), request.structure is not None
        return self.gains.of(kind)

    def drafts(self, session: Session) -> bool:
        """Whether a tree should grow for it."""
        return session.required or session.gain.uses_trees(session.number)

    @property
    def possible(self) -> int:
        """Nodes that a round may verify now, if its request asks for no fewer and goes on for long enough."""
        return min(self.policy.num_draft_tokens, self.nodes)

    def most(self, session: Session) -> int:
        """Nodes that a round of this session may verify now."""
        # Deeper than tokens_left - 1 nothing could be emitted.
        return min(
            session.request.speculation.num_draft_tokens or self.possible, self.possible, session.tokens_left - 1
        )

    def begin(self, session: Session) -> None:
        """Fix the cap. Whoever gains nothing by trees leaves its drafter, whatever has been grown."""
        most = self.most(session)
        session.at_once = False
        if session.required and session.law is not None:
            session.cap = session.enough = most
        elif session.law is None or not self.pool.up:
            session.cap = session.enough = 0
        else:
            session.enough = session.gain.nodes(session.number, most, self.load, self.possible)
            session.cap = session.gain.room(session.enough, most)
            if 0 < session.enough < session.tokens_left - 1:
                session.gain.usual_nodes = session.enough
            if not self.drafts(session):
                self.pool.close(session, "does not pay")

    def patience_s(self, session: Session) -> float:
        """How long after the last commit its round is launched, if nothing more arrives. A drafter that still reads the prompt is not
        waited for."""
        limit_s, draft = self.policy.draft_wait_s, session.draft
        if session.required:
            return limit_s
        if session.at_once:
            return 0.0
        if draft is None or not draft.heard:
            return 0.0
        return min(limit_s, self._launch_s(session, draft, max(0.0, draft.grown_s - session.committed_s)))

    def due_s(self, session: Session, now_s: float) -> float:
        """Until it should have enough nodes, by the pace of its drafter; 0: not known, or it should be here by now."""
        draft, enough = session.draft, session.enough
        if draft is None or not draft.rooted_s or not draft.pace.first_s or len(draft.tree) >= enough:
            return 0.0
        node_s = draft.pace.node_s
        last_s = draft.grown_s if draft.goes_on else draft.rooted_s + draft.pace.first_s - node_s
        takes_s = last_s + node_s * (enough - len(draft.tree)) - draft.rooted_s
        return max(0.0, draft.rooted_s + LATE * takes_s - now_s)

    def budget(self, session: Session, draft: Draft) -> int | None:
        """Nodes that the drafter should grow for the round that has begun. What is launched with the nodes that were kept leaves the
        drafter the whole round for what comes after it."""
        enough, kept = session.enough, len(draft.tree)
        if not enough or not kept or session.required or self._launch_s(session, draft, 0.0) > 0.0:
            return enough
        if draft is session.draft:  # and not the one that it moves to
            session.at_once = True
        return min(kept, session.cap or 0)

    def _launch_s(self, session: Session, draft: Draft, since_s: float) -> float:
        """What was kept is launched by the rule. Where growth below the root has begun, enough nodes are waited for: so many that the
        last ones are worth their time, and would not stay so if nobody ever saw them."""
        enough = session.enough
        tokens = session.gain.worth.tokens(enough)
        verify_s = self.gains.machine.step_s(self.load * (enough + 1)) or self.policy.draft_wait_s
        kept = 0 if draft.goes_on else min(len(draft.tree), enough)
        due = {"next_s": draft.pace.first_s, "node_s": draft.pace.node_s}
        return launch_s(kept, since_s if kept else 0.0, tokens=tokens, verify_s=verify_s, **due)

    def began(self, session: Session) -> None:
        """Its clock starts: it has a place, or its truth has advanced."""
        session.committed_s, session.idle_mark_s, session.clean = time.monotonic(), self._idle_s, True
        session.grown_mark_s = None

    def launched(self, session: Session, num_nodes: int) -> None:
        """Its step begins. Whether its tree came too late is settled now: what arrives while the step runs may be kept for the next
        round, whose cap must not follow from it."""
        draft = session.draft
        session.launched_s = time.monotonic()
        session.missed = draft is not None and not draft.at_rest and bool(session.cap) and not num_nodes
        session.waited = session.missed and draft is not None and (draft.heard or session.required)
        enough = session.enough
        session.told = min(enough, num_nodes) if session.at_once and num_nodes else enough

    def view(self, session: Session, now_s: float, room: int, blocks: int, *, local: int, joins: bool) -> View:
        """The session as the scheduler sees it. room, blocks: its KV; local: nodes looked up for it; joins: see `View`."""
        draft = session.draft
        if session.grown_mark_s is None and draft is not None and (draft.at_rest or len(draft.tree) >= session.enough):
            session.grown_mark_s = self._idle_s
        return View(
            session.number,
            session.prefill_left,
            draft is not None,
            len(draft.tree) if draft is not None else 0,
            draft.at_rest if draft is not None else False,
            now_s - session.committed_s,
            self.patience_s(session),
            session.cap or 0,
            (session.priority, session.number),
            room,
            blocks,
            local,
            joins,
            self.due_s(session, now_s),
            session.enough,
        )

    def stepped(self, rows: int, seconds: float, *, trees: bool) -> None:
        """A step without prefill is over. trees: some session was in a round with a tree when it began."""
        self.gains.machine.stepped(rows, seconds, trees=trees)

    def prefilled(self) -> None:
        """A step that read prompts is over: it says nothing of what steps cost."""
        self.gains.machine.steps.unseen += 1

    def planned(self, step: Plan, now_s: float) -> None:
        """What comes next: sessions that wait for others do so until a moment that later news does not put off."""
        if not step.held:
            self._held_until_s = math.inf
        elif step.wait_s is not None:
            self._held_until_s = min(self._held_until_s, now_s + step.wait_s)

    def hold_s(self, now_s: float) -> float:
        """How long sessions that are ready may still wait for others."""
        return self._held_until_s - now_s

    def idle(self, seconds: float) -> None:
        """Nothing was launched for so long."""
        self._idle_s += seconds

    def ended(self, session: Session, outcome: Outcome, rows: int, load: int, *, prefilled: bool = False) -> bool:
        """A verdict: learn from it. rows: of the whole step; prefilled: so was the end of its own prefill.

        Returns whether a tree was waited for in vain."""
        local = session.local is not None and session.local.launched
        drafted, path = (0, ()) if local else (outcome.num_nodes, outcome.path)
        if session.missed or drafted:
            self.pool.judge(session, missed=session.missed, tokens=len(outcome.tokens))
        self.pool.round(session, time.monotonic())
        cap = session.enough if drafted or session.waited else 0
        seen = session.told if cap else 0
        # Waiting whether or not it pays, or prefill: such seconds would teach the others despair.
        if session.required or prefilled:
            session.gain.worth.add(seen if drafted else 0, path)
            return session.waited
        grown_s = self._idle_s if session.grown_mark_s is None else session.grown_mark_s  # then it waited for others
        seconds, idle_s = time.monotonic() - session.committed_s, grown_s - session.idle_mark_s
        spent = Spent(len(outcome.tokens), seconds, idle_s, rows, load, outcome.num_nodes, outcome.path, session.clean)
        if not drafted:
            learn(session, spent)
        tokens = 1 if local else spent.tokens  # what a local tree gave is no merit of a drafter
        judged = replace(spent, cap=cap, path=path, tokens=tokens, seen=seen, kept=session.at_once)
        session.gain.add(session.number, judged)
        return session.waited
