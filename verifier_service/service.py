"""The verifier as an object: requests in, committed runs out, one engine loop for all sessions.

The event loop holds the sessions and talks to drafters; the target model runs on one worker thread. While a step computes, growth keeps
arriving. Everything that touches KV slots happens in the loop task, between steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import structlog

from rootward.core.frames import Hello
from rootward.core.requests import Committed, DraftMode, SpeculationMode, VerifierRequest
from rootward.engine.grammar import Grammars, TreeMatcher, Vocabulary
from rootward.errors import DeadlineExceeded, ModelLost, NoDrafter, ServiceError, Unavailable
from rootward.ports import Discovery, Drafter, LanguageModel, VerifierInfo
from rootward.tracing import request_span
from rootward.watchdog import Watchdog
from verifier_service.admission import Admission
from verifier_service.cost import StepCost
from verifier_service.drafters import Dial, DrafterPool
from verifier_service.link import Shape
from verifier_service.local_draft import LocalDrafts
from verifier_service.memory import Memory
from verifier_service.metrics import Metrics
from verifier_service.places import Places
from verifier_service.policy import Policy
from verifier_service.rounds import Rounds
from verifier_service.runner import Chunk, Outcome, Round, Runner
from verifier_service.scheduler import Limits, Plan, View, schedule
from verifier_service.sessions import Session, check_drafter, choose_rule
from verifier_service.spans import trace_round

log = structlog.get_logger("verifier")


class VerifierService:
    """Implements `ports.Verifier`. Use as an async context manager: it owns the loop, the model's thread and the links."""

    def __init__(
        self,
        model: LanguageModel,
        drafters: dict[str, Drafter],
        *,
        worker: str,
        incarnation: int,
        policy: Policy | None = None,
        runner: Runner | None = None,
        grammars: Grammars | None = None,
        cost: StepCost | None = None,
        sources: Sequence[tuple[str, Discovery]] = (),
        dial: Dial | None = None,
        metrics: Metrics | None = None,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """thread: of one worker, on which the model runs; not closed here. None: one of its own. Of two services in one process with models
        on several threads, each would slow the other down (`engine.threads`)."""
        self.model, self.worker, self.incarnation = model, worker, incarnation
        self.policy = policy or Policy()
        self.runner = runner or Runner(model)
        self.grammars = grammars or Grammars(lambda: Vocabulary(None, model.info.vocab_size, model.info.eos_ids))
        self.max_sessions = model.num_free_slots
        self.draining = False
        self.watchdog = Watchdog()
        self._wake = asyncio.Event()
        self.metrics = metrics or Metrics()
        self.pool = DrafterPool(
            drafters if model.info.supports_trees else {},
            self._hello,
            self._wake.set,
            sources=sources if model.info.supports_trees else (),
            dial=dial,
            prior_row_s=self.policy.draft_prior_row_s,
            zone=self.policy.zone,
            shape=Shape(*self.policy.shape),
            metrics=self.metrics.links,
        )
        self.places = Places(model, Memory(model, self.policy.num_draft_tokens))
        self.admission = Admission(model.info, self.policy)
        self._live = self.admission.live
        self._running = self.places.running
        self._num_sessions = self._num_compiling = 0
        self.rounds = Rounds(self.policy, self.pool, self._running, cost)
        local = self.policy if model.info.supports_trees else replace(self.policy, local_draft="none")
        self.local = LocalDrafts(local, model.info.vocab_size, self.rounds.gains.machine.steps)
        self.metrics.watch(self._stats, lambda: self.pool.demand)
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="target-model")
        self._own_thread = thread is None
        self._task: asyncio.Task[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> VerifierService:
        await self.pool.__aenter__()
        self._task = asyncio.create_task(self._step_forever(), name="engine")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._task, self._drain_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in self._live.copy().values():
            session.out.put_nowait(Unavailable("verifier is stopping", retry_after_s=1.0))
        await self.pool.__aexit__()
        self._thread.submit(int).result()  # after the step that may be running
        if self._own_thread:
            self._thread.shutdown()

    # -- the port -----------------------------------------------------------------------------------------------------

    async def generate(self, request: VerifierRequest) -> AsyncGenerator[Committed, None]:
        """Committed runs of one generation. Closing the iterator cancels it and frees everything at the next step."""
        deadline_s = self._deadline(request)
        matcher = await self._matcher(request, deadline_s)
        async with self._admitted(request, matcher, deadline_s) as session:
            while True:
                try:
                    async with asyncio.timeout_at(deadline_s):
                        item = await session.out.get()
                except TimeoutError:
                    raise session.late() from None
                if isinstance(item, ServiceError):
                    raise item
                yield item
                if item.finish is not None:
                    return

    async def get_info(self) -> VerifierInfo:
        if self._task is None or self._task.done():
            raise Unavailable("the engine has ended")
        return VerifierInfo(
            self.model.info,
            self.worker,
            self.incarnation,
            self.pool.up,
            len(self._running),
            self.places.num_waiting,
            self.max_sessions,
            self.draining,
            self._stats(),
        )

    def _stats(self) -> dict[str, float]:
        speedup = self.rounds.gains.speedup
        return {"spec_decode_speedup_estimate": speedup, **self.pool.gauges(), **self.places.gauges()}

    @property
    def ended(self) -> asyncio.Task[None] | None:
        """Done when the engine has failed for good; the process should end then."""
        return self._task

    @property
    def alive(self) -> bool:
        """False: only a restart helps."""
        return self._task is not None and not self._task.done() and self.watchdog.healthy

    async def drain(self) -> None:
        """Refuse new sessions; return when the running ones have ended."""
        self.draining = True
        while self._live:
            await asyncio.sleep(0.02)

    def start_draining(self, timeout_s: float) -> int:
        """Drain in the background; what still runs after timeout_s is handed back with Unavailable. Returns how many run."""
        self.draining = True
        if self._drain_task is not None:
            self._drain_task.cancel()  # the newest limit counts
        self._drain_task = asyncio.create_task(self._drain_within(timeout_s), name="drain")
        return len(self._live)

    async def _drain_within(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.drain()
        for session in list(self._live.values()):
            # In a round, only after its commit: a tree that waits must not be dropped for coming late, preempted or not.
            session.leaving = True
            if session.cap is None:
                session.hand_back("verifier is draining")

    # -- admission ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _admitted(
        self, request: VerifierRequest, matcher: TreeMatcher | None, deadline_s: float | None
    ) -> AsyncIterator[Session]:
        session = self._session(request)
        session.matcher, session.deadline_s = matcher, deadline_s
        self._live[request.request_id] = session
        self.places.wait(session)
        self._wake.set()
        about: dict[str, str | int] = {"request_id": request.request_id, "epoch": request.epoch}
        try:
            with request_span("verifier.request", request.traceparent, **about) as session.span:
                yield session
        finally:
            session.done = True  # the loop frees it between steps
            self.admission.forget(session)
            self.places.forget(session)
            self._wake.set()

    async def _matcher(self, request: VerifierRequest, deadline_s: float | None) -> TreeMatcher | None:
        """Compiling a form takes time: only for a request that would be let in, and it counts as queued meanwhile."""
        if request.structure is None:
            return None
        self._check(request)
        self._num_compiling += 1
        try:
            async with asyncio.timeout_at(deadline_s):
                return await asyncio.to_thread(self.grammars.matcher, request.structure, request.committed)
        except TimeoutError:
            passed = f"deadline of {request.deadline_s} s passed"
            raise DeadlineExceeded(passed, metadata={"phase": "queue"}) from None
        finally:
            self._num_compiling -= 1

    def _check(self, request: VerifierRequest) -> None:
        ended = self._task is None or self._task.done()
        closed = "verifier is draining" if self.draining else "verifier is not running" if ended else ""
        self.admission.check(request, num_queued=self.places.num_fresh + self._num_compiling, closed=closed)

    def _session(self, request: VerifierRequest) -> Session:
        self._check(request)
        mode, drafter = request.speculation.mode, request.speculation.drafter
        rule, law, strategy = choose_rule(request, self.policy.law, self.pool.strategy(drafter))
        check_drafter(drafter, (*self.pool.demand, *self.local.names))
        wanted = mode is not SpeculationMode.DISABLED and self.pool.possible(drafter)
        if mode is SpeculationMode.REQUIRED and not self.pool.has(drafter, law) and drafter not in self.local.names:
            raise NoDrafter("speculation.mode: 'required' and no drafter grows such trees; use 'auto', or start one")
        self.admission.fence(request, rule)
        self._num_sessions += 1
        eos = frozenset(self.model.info.eos_ids)
        session = Session(self._num_sessions, request, rule, law if wanted else None, eos, strategy)
        session.gain, session.local = self.rounds.gain(session), self.local.of(session)
        return session

    @staticmethod
    def _deadline(request: VerifierRequest) -> float | None:
        return None if request.deadline_s is None else asyncio.get_running_loop().time() + request.deadline_s

    def _hello(self) -> Hello:
        info = self.model.info
        return Hello(self.worker, self.incarnation, info.tokenizer_hash, info.vocab_size, info.max_positions)

    # -- the engine loop: schedule, run, commit -------------------------------------------------------------------------

    async def _step_forever(self) -> None:
        try:
            while True:
                await self._step()
                await asyncio.sleep(0)  # let streams and links breathe between steps
        except Exception as error:
            log.exception("engine_ended")
            for session in list(self._live.values()):
                self._abort(session, error)
            raise

    async def _step(self) -> None:
        self._wake.clear()
        self._sweep()
        self._admit()
        start_s = time.monotonic()
        step = self._plan()
        self.pool.flush()
        if step.empty:
            with suppress(TimeoutError):
                async with asyncio.timeout(step.wait_s):
                    await self._wake.wait()
            self.rounds.idle(time.monotonic() - start_s)
            return
        try:
            await self._run(step, start_s)
        except ModelLost:
            raise
        except Exception as error:  # a bug or a broken model costs the sessions of this step, not the service
            log.exception("step_failed")
            for number in {n for n, _ in (*step.prefill, *step.launches)}:
                self._abort(self._running[number], error)

    async def _run(self, step: Plan, start_s: float) -> None:
        drafted, local = any(s.cap for s in self._running.values()), self.local.used(self._running.values())
        chunks = [self._chunk(number, size) for number, size in step.chunks]
        rounds = [self._round(number, cap) for number, cap in step.launches]
        with self.watchdog.step():
            outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, self.runner.step, chunks, rounds)
        kind = "prefill" if step.prefill else "verify" if step.verify else "plain"
        self.metrics.stepped(kind, time.monotonic() - start_s)
        if step.prefill:
            for session in self._running.values():
                session.clean = False
        for (number, size), chunk in zip(step.chunks, chunks, strict=True):
            session = self._running[number]
            session.feed(size, chunk.told)
            self.rounds.began(session)
        rows, load, seconds = sum(len(r.tree) for r in rounds), self.rounds.load, time.monotonic() - start_s
        if step.prefill:
            self.rounds.prefilled()
        elif local and not drafted:
            self.local.stepped(rows, seconds)
        else:
            self.rounds.stepped(rows, seconds, trees=drafted)
        for (number, _), done, outcome in zip(step.launches, rounds, outcomes, strict=True):
            self._commit(self._running[number], done, outcome, rows, load)
        self.pool.flush()  # drafters go on while the next step is planned

    def _sweep(self) -> None:
        """End what is late, free what has ended: KV slot, drafter slot, place in the tables."""
        now_s = asyncio.get_running_loop().time()
        for session in self._live.values():
            if session.deadline_s is not None and session.deadline_s <= now_s and not session.done:
                session.done = True
                session.out.put_nowait(session.late())
        for session in self.places.sweep():
            self.pool.close(session, "ended")
            session.gain.gone(session.number)
            self.local.gone(session)

    def _admit(self) -> None:
        for session in self.places.fill(self._abort):
            self.rounds.began(session)
        self.pool.place([session for session in self._running.values() if self.rounds.drafts(session)])
        self.pool.balance(self._running.values())

    def _plan(self) -> Plan:
        """The next step, once those have been preempted that have to be."""
        p, memory = self.policy, self.places.memory
        while True:
            running = [s for s in self._running.values() if not s.done]
            now_s = time.monotonic()
            blocks, step_s = (memory.free_blocks, memory.block_size), self.rounds.gains.machine.step_s
            shape = p.max_rows, p.prefill_chunk, p.prefill_floor
            limits = Limits(*shape, *blocks, step_s, self.rounds.hold_s(now_s))
            rows = p.max_rows - (limits.floor if any(s.prefill_left for s in running) else 0)
            self.rounds.count(min(rows, memory.free_rows))
            step = schedule([self._view(session, now_s) for session in running], limits)
            self.rounds.planned(step, now_s)
            if not step.preempt:
                return step
            self.places.preempt(step.preempt)

    def _view(self, session: Session, now_s: float) -> View:
        joins = 0 < session.prefill_left <= self.policy.prefill_chunk and session.joins
        if session.cap is None and (joins or not session.prefill_left):
            self.rounds.begin(session)
        local = 0 if session.prefill_left else self._look_up(session)
        return self.rounds.view(session, now_s, *self.places.memory.held(session), local=local, joins=joins)

    def _look_up(self, session: Session) -> int:
        return self.local.plan(session, self.rounds.most(session), self.rounds.load, self.rounds.possible)

    def _chunk(self, number: int, size: int) -> Chunk:
        session = self._running[number]
        assert session.kv_slot is not None
        return Chunk(session.kv_slot, *session.chunk(size))

    def _round(self, number: int, cap: int) -> Round:
        session = self._running[number]
        assert session.kv_slot is not None
        r = session.request
        snapshot = session.draft.tree.snapshot(cap) if cap and session.draft is not None else None
        fill = tuple(session.tokens[session.fed : -1])
        if fill:
            self.rounds.began(session)
        self.rounds.launched(session, len(snapshot.ids) - 1 if snapshot is not None else 0)
        snapshot = self.local.launch(session, snapshot)
        root, length = session.tokens[-1], len(session.tokens)
        about = session.rule, r.sampling, session.key, r.epoch, snapshot, session.prefix, r.logprobs, session.shared
        return Round(session.kv_slot, root, length, *about, fill, copies=session.law is DraftMode.IID)

    def _commit(self, session: Session, done: Round, outcome: Outcome, rows: int, load: int) -> None:
        if session.done:
            return  # cancelled while the step ran; nothing was emitted
        missed = self.rounds.ended(session, outcome, rows, load, prefilled=bool(done.fill))
        trace_round(session, outcome, missed=missed)
        local = session.local is not None and session.local.launched
        self.metrics.committed(done.tree, outcome, missed=missed, local=local)
        about = outcome.logprobs, session.seen(done.tree, outcome.path)
        committed = session.advance(outcome.tokens, outcome.num_nodes, *about, missed=missed)
        session.fed = len(session.tokens) - 1
        session.cap = None
        self.rounds.began(session)
        if not session.done:
            self.rounds.begin(session)  # at once, so that the drafter knows how much it should grow
            self.pool.commit(session, committed.tokens, self.rounds.budget)
        session.out.put_nowait(committed)
        if session.leaving and not session.done:
            session.hand_back("verifier is draining")

    def _abort(self, session: Session, error: Exception) -> None:
        """Our failure, not the request's: another verifier (or this one, a moment later) may take it on from what is committed."""
        session.hand_back(f"internal error in the engine: {type(error).__name__}")
