"""The engine loop: one step after another, for all sessions of a verifier.

    prepare()                                   sessions that came or ended, trees that have arrived
    snapshots = [SessionView, ...]              what the scheduler sees of each session, frozen
    plan      = schedule(snapshots, limits)     a pure function
    outcomes  = runner.step(chunks, rounds)     on the model's thread
    apply(plan, outcomes)                       sessions, KV accounts, drafters, controller

Sessions change in `prepare` and `apply` only (`session.Session` says which part writes what), and nothing runs between them but the model:
growth that arrives meanwhile extends trees, which are looked at again in the next step.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import structlog

from rootward.clock import Watchdog
from rootward.core.requests import DraftMode, Rule
from rootward.errors import ModelLost, Unavailable
from verifier_service.audit import DrafterAudit
from verifier_service.drafter_pool import DrafterPool
from verifier_service.head_drafts import TextFeatures
from verifier_service.kv_admission import Slots
from verifier_service.local_drafts import LocalDrafts
from verifier_service.metrics import Metrics, trace_round
from verifier_service.rounds import Rounds
from verifier_service.runner import Chunk, Outcome, Round, Runner
from verifier_service.scheduler import Limits, Plan, SessionView, schedule
from verifier_service.session import Event, Session
from verifier_service.settings import VerifierSettings
from verifier_service.step_time import StepTime

log = structlog.get_logger("verifier")


class EngineLoop:
    """Runs the steps of one verifier.

    live: sessions that run or wait, by request id. wake: set by every event that the next step may depend on. `thread` runs the model.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        settings: VerifierSettings,
        pool: DrafterPool,
        live: dict[str, Session],
        metrics: Metrics,
        wake: asyncio.Event,
        audit: DrafterAudit,
        step_time: StepTime | None = None,
    ) -> None:
        model = runner.model
        self.audit = audit
        self.runner, self.settings, self.pool, self.live, self.metrics = runner, settings, pool, live, metrics
        self.slots = Slots(model, settings.num_draft_tokens)
        self.running = self.slots.running
        self.rounds = Rounds(settings, pool, self.running, step_time)
        local = settings if model.info.supports_trees else settings.model_copy(update={"local_draft": "none"})
        self.local = LocalDrafts(local, model.info.vocab_size, self.rounds.controller)
        self.watchdog = Watchdog()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="target-model")
        self._wake = wake

    async def run(self) -> None:
        """Step until cancelled. A model that is lost ends the loop."""
        try:
            while True:
                await self.step()
                await asyncio.sleep(0)  # streams and links run between steps
        except Exception as error:
            log.exception("engine_ended")
            for session in list(self.live.values()):
                self.abort(session, error)
            raise

    async def step(self) -> None:
        self._wake.clear()
        start_s = time.monotonic()
        plan = self.plan()
        self.pool.flush()
        if plan.empty:
            with suppress(TimeoutError):
                async with asyncio.timeout(plan.wait_s):
                    await self._wake.wait()
            self.rounds.idle(time.monotonic() - start_s)
            return
        try:
            chunks = [self._chunk(number, size) for number, size in plan.chunks]
            rounds = [self._launch(number, max_nodes) for number, max_nodes in plan.launches]
            self.pool.flush()
            with self.watchdog.step():
                loop = asyncio.get_running_loop()
                outcomes = await loop.run_in_executor(self.thread, self.runner.step, chunks, rounds)
            self.apply(plan, chunks, rounds, outcomes, start_s=start_s)
        except ModelLost:
            raise
        except Exception as error:  # a bug or a broken model costs the sessions of this step, not the service
            log.exception("step_failed")
            for number in {n for n, _ in (*plan.prefill, *plan.launches)}:
                self.abort(self.running[number], error)

    # -- prepare and schedule -----------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The next step. Sessions that have to be preempted for it lose their KV slots first."""
        self.prepare()
        while True:
            now_s = time.monotonic()
            self._begin_rounds()
            limits = self._limits(now_s)
            plan = schedule([self.snapshot(session, now_s) for session in self._unfinished()], limits)
            self.rounds.planned(plan, now_s)
            if not plan.preempt:
                return plan
            self.slots.preempt(plan.preempt)

    def prepare(self) -> None:
        """Apply the events since the last step: deadlines, ended sessions, free KV slots, drafters with room."""
        now_s = asyncio.get_running_loop().time()
        for session in self.live.values():
            if session.deadline_s is not None and session.deadline_s <= now_s and not session.done:
                session.out.put_nowait(session.late())
                session.end()
        for session in self.slots.release_done():
            self.pool.close(session, "ended")
            for statistics in (session.statistics, *(local.statistics for local in session.local_drafts)):
                statistics.forget_session(session.number)
            self.runner.forget(session.number)
        entered = self.slots.admit(self.abort)
        for session in entered:
            self.rounds.start_round_timer(session)
        if entered:
            self.rounds.plan()
        self.pool.place([session for session in self.running.values() if self.rounds.drafts(session)])
        self.pool.balance(self.running.values())

    def _begin_rounds(self) -> None:
        """Fix the sizes of the rounds that begin, look local trees up, and note trees that have all their nodes."""
        model, settings = self.slots.model, self.settings
        prefilling = any(session.prefill_left for session in self._unfinished())
        rows = settings.max_num_batched_tokens - (settings.prefill_floor if prefilling else 0)
        self.rounds.count(min(rows, model.num_free_blocks * model.block_size))
        for session in self._unfinished():
            if session.round.max_nodes is None and (self._joins(session) or not session.prefill_left):
                self.rounds.plan_round(session)
            if not session.prefill_left:
                self.local.plan(session, self.rounds.most(session), self.rounds.load)
            self.rounds.note_ready(session)

    def snapshot(self, session: Session, now_s: float) -> SessionView:
        """The session as the scheduler sees it."""
        draft, local = session.draft, session.local
        room, blocks = self.slots.held(session)
        due_s, late_s = self.rounds.due(session, now_s)
        return SessionView(
            session=session.number,
            prefill_left=session.prefill_left,
            drafting=draft is not None,
            arrived=len(draft.tree) if draft is not None else 0,
            at_rest=draft.at_rest if draft is not None else False,
            waited_s=now_s - session.round.committed_s,
            patience_s=self.rounds.patience_s(session),
            max_nodes=session.round.max_nodes or 0,
            rank=(session.request.priority, session.number),
            room=room,
            blocks=blocks,
            local=local.num_nodes if local is not None and not session.prefill_left else 0,
            joins=self._joins(session),
            due_s=due_s,
            late_s=late_s,
            target_nodes=session.round.target_nodes,
        )

    def _limits(self, now_s: float) -> Limits:
        settings, model = self.settings, self.slots.model
        return Limits(
            rows=settings.max_num_batched_tokens,
            chunk=settings.max_num_batched_tokens,
            floor=settings.prefill_floor,
            free_blocks=model.num_free_blocks,
            block_size=model.block_size,
            step_s=self.rounds.controller.step_time.seconds,
            hold_s=self.rounds.hold_s(now_s),
        )

    def _unfinished(self) -> list[Session]:
        return [session for session in self.running.values() if not session.done]

    def _joins(self, session: Session) -> bool:
        """Whether the session's first round may share a forward with the end of its prefill: no log-probabilities of the prompt are asked
        for, and the round need not wait for a tree."""
        fits = 0 < session.prefill_left <= self.settings.max_num_batched_tokens
        return fits and session.request.prompt_logprobs is None and not session.required

    # -- run ----------------------------------------------------------------------------------------------------------

    def _chunk(self, number: int, size: int) -> Chunk:
        session = self.running[number]
        assert session.kv_slot is not None
        start, end = session.fed, session.fed + size
        num_top = session.request.prompt_logprobs if session.num_held_logprobs else None
        num_features = 0
        # A drafter with a head gets the features of the last positions of the prompt.
        if (features := self._features_of(session)) is not None:
            num_features = max(0, size - max(0, session.prefill_left - features.most))
        return Chunk(
            session.kv_slot,
            tuple(session.tokens[start:end]),
            follow=() if num_top is None else session.request.prompt[start + 1 : end + 1],
            num_top=num_top or 0,
            session=number,
            first=start,
            num_features=num_features,
        )

    def _features_of(self, session: Session) -> TextFeatures | None:
        """The store of the session's fused features; None while no drafter needs them."""
        if self.runner.head is None or not self.pool.wants_features(session):
            session.features = None
        elif session.features is None:
            most = self.settings.feature_window
            session.features = TextFeatures(min(self.runner.head.window or most, most))
        return session.features

    def _launch(self, number: int, max_nodes: int) -> Round:
        """The input of the runner for the session's round, which begins to run."""
        session = self.running[number]
        assert session.kv_slot is not None
        session.on(Event.LAUNCH)
        request = session.request
        draft = session.draft if max_nodes else None  # None: no node of a drafter is verified
        snapshot = None if draft is None else draft.tree.snapshot(max_nodes)
        fill = tuple(session.tokens[session.fed : -1])
        if fill:
            self.rounds.start_round_timer(session)
        self.rounds.on_launch(session, len(snapshot.ids) - 1 if snapshot is not None else 0)
        verified, head_request = self.local.launch(session, snapshot), self.local.wanted(session)
        self.pool.launch(session)
        return Round(
            kv_slot=session.kv_slot,
            root=session.tokens[-1],
            length=len(session.tokens),
            rule=self._rule(session),
            sampling=request.sampling,
            key=session.key,
            epoch=request.epoch,
            snapshot=verified,
            prefix=session.prefix,
            logprobs=request.logprobs,
            shared=session.shared,
            drafter="" if draft is None else draft.link.name,
            fill=fill,
            num_successors=self.local.num_successors(session, self.rounds.load),
            copies=session.draft_mode is DraftMode.IID and (snapshot is not None or head_request is not None),
            wanted=head_request,
            session=number,
            wants_features=self._features_of(session) is not None,
        )

    def _rule(self, session: Session) -> Rule:
        """The rule of the round that begins: match, which is lossless for any tree, while an untrusted drafter grows the session's tree,
        since it may draw nodes otherwise than it declares."""
        draft = session.draft
        trusted = draft is None or self.audit.trusts(draft.link.name, draft.pool)
        return session.rule if trusted else Rule.MATCH

    # -- apply --------------------------------------------------------------------------------------------------------

    def apply(
        self, plan: Plan, chunks: list[Chunk], rounds: list[Round], outcomes: list[Outcome], *, start_s: float
    ) -> None:
        """Apply the outcomes of a step that began at start_s (seconds of the monotonic clock)."""
        draft_s = self.runner.draft_s
        kind = "prefill" if plan.prefill else "verify" if plan.verify else "plain"
        self.metrics.record_step(kind, time.monotonic() - start_s, draft_s=draft_s)
        if plan.prefill:
            self.rounds.prefill_ran()
        for (number, size), chunk in zip(plan.chunks, chunks, strict=True):
            session = self.running[number]
            if session.features is not None and chunk.num_features:
                session.features.add(chunk.first + size - chunk.num_features, *chunk.features)
            session.feed(size, chunk.prompt_logprobs)
            self.rounds.start_round_timer(session)
        for (number, _), launched, outcome in zip(plan.launches, rounds, outcomes, strict=True):
            if outcome.failure is None:
                self._commit(self.running[number], launched, outcome)
            else:
                log.error("round_failed", request_id=self.running[number].request.request_id, exc_info=outcome.failure)
                self.abort(self.running[number], outcome.failure)
        self.pool.flush()  # drafters go on while the next step is planned
        if not plan.prefill:
            seconds = time.monotonic() - start_s - draft_s
            rows = sum(len(outcome.tree) for outcome in outcomes)
            drafted = any(r.drafter and o.num_nodes for r, o in zip(rounds, outcomes, strict=True))
            self.rounds.controller.step_time.add(rows, seconds, drafted=drafted)
        self.rounds.plan()

    def _commit(self, session: Session, launched: Round, outcome: Outcome) -> None:
        """Commit the verdict of a round to the session, its drafter, the statistics and the client's stream."""
        if session.done:
            return  # cancelled while the step ran; nothing was emitted
        session.on(Event.COMMIT)
        if launched.drafter and outcome.draws is not None:
            self.audit.observe(launched.drafter, outcome.draws)
        draft_s = None if self.runner.catches_up else self.runner.draft_s
        missed = self.rounds.ended(session, outcome, prefilled=bool(launched.fill), draft_s=draft_s)
        local = session.local
        is_local = local is not None and local.launched and outcome.num_nodes > 0
        drafter = local.name if local is not None and is_local else launched.drafter
        trace_round(session, outcome, missed=missed, drafter=drafter)
        self.local.learn_successors(session, outcome.successors)
        self.metrics.record_round(outcome, missed=missed, local=is_local)
        if session.features is not None and outcome.features is not None:
            session.features.add(launched.first, outcome.features)
        tree = session.seen(outcome.tree, outcome.path)
        committed = session.advance(
            outcome.tokens, outcome.num_nodes, outcome.logprobs, tree, missed=missed, drafter=drafter
        )
        if session.matcher is not None and session.matcher.broken:
            log.warning("form_given_up", request_id=session.request.request_id, reason=session.matcher.broken)
        self.rounds.begin_next(session)
        if not session.done:
            self.pool.commit(session, committed.tokens, self.rounds.budget)
        session.out.put_nowait(committed)

    def abort(self, session: Session, error: Exception) -> None:
        """End a session after an internal error. Another verifier, or this one later, may continue from its committed tokens."""
        if not session.done:
            session.end()
            why = f"internal error in the engine: {type(error).__name__}"
            session.out.put_nowait(Unavailable(why, retry_after_s=1.0))
