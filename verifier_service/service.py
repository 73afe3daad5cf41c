"""The verifier as an object: requests in, committed runs out, one engine loop for all sessions.

The event loop holds the sessions and talks to drafters; the target model runs on one worker thread. While a step computes, growth keeps
arriving. Everything that touches KV slots happens in the loop task, between steps.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import structlog

from rootward.core.frames import Hello
from rootward.core.requests import Committed, FinishReason, Law, SpeculationMode, VerifierRequest
from rootward.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    NoDrafter,
    Overloaded,
    ServiceError,
    StaleEpoch,
    Unavailable,
)
from rootward.ports import Drafter, LanguageModel, VerifierInfo
from verifier_service.drafters import DrafterPool
from verifier_service.gain import Gain, Pace
from verifier_service.policy import Policy
from verifier_service.runner import Chunk, Outcome, Round, Runner
from verifier_service.scheduler import Plan, View, patience_s, plan, share
from verifier_service.sessions import Session, choose_rule

log = structlog.get_logger("verifier")

MAX_EPOCHS_REMEMBERED = 65536


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
    ) -> None:
        self.model, self.worker, self.incarnation = model, worker, incarnation
        self.policy = policy or Policy()
        self.runner = runner or Runner(model)
        self.max_sessions = model.num_free_slots
        self.draining = False
        p = self.policy
        usable = drafters if model.info.supports_trees else {}
        self.pool = DrafterPool(
            usable,
            self._hello,
            self._wake_up,
            atoms=p.law_atoms,
            node_cap=p.num_draft_tokens,
            max_depth=p.max_depth,
            topk=p.topk,
        )
        self._running: dict[int, Session] = {}
        self._queue: deque[Session] = deque()
        self._live: dict[str, Session] = {}
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._num_sessions = 0
        self._wake = asyncio.Event()
        self._prefilled_last = False
        self._plain = Pace()  # of plain decoding, learned over all sessions
        self._gains: dict[tuple[Law, int], Gain] = {}  # by law and temperature in tenths
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="target-model")
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
        self._thread.shutdown(wait=True)

    # -- the port -----------------------------------------------------------------------------------------------------

    async def generate(self, request: VerifierRequest) -> AsyncGenerator[Committed, None]:
        """Committed runs of one generation. Closing the iterator cancels it and frees everything at the next step."""
        deadline_s = self._deadline(request)
        async with self._admitted(request) as session:
            while True:
                try:
                    async with asyncio.timeout_at(deadline_s):
                        item = await session.out.get()
                except TimeoutError:
                    raise DeadlineExceeded(f"deadline of {request.deadline_s} s passed") from None
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
            len(self._queue),
            self.max_sessions,
            self.draining,
            {"speedup_estimate": self._speedup()},
        )

    @property
    def ended(self) -> asyncio.Task[None] | None:
        """Done when the engine has failed for good; the process should end then."""
        return self._task

    async def drain(self) -> None:
        """Refuse new sessions; return when the running ones have ended."""
        self.draining = True
        while self._live:
            await asyncio.sleep(0.02)

    def start_draining(self, timeout_s: float) -> int:
        """Drain in the background; what still runs after timeout_s is handed back with Unavailable. Returns how many run."""
        self.draining = True
        self._drain_task = asyncio.create_task(self._drain_within(timeout_s), name="drain")
        return len(self._live)

    async def _drain_within(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.drain()
        for session in list(self._live.values()):
            # In a round, only after its commit: a tree that waits must not be dropped for coming late.
            session.leaving = True
            if session.number not in self._running or session.prefill_left:
                self._hand_back(session, "verifier is draining")

    # -- admission ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _admitted(self, request: VerifierRequest) -> AsyncIterator[Session]:
        session = self._session(request)
        self._queue.append(session)
        self._live[request.request_id] = session
        self._wake_up()
        try:
            yield session
        finally:
            session.done = True  # the loop frees it between steps
            if self._live.get(request.request_id) is session:
                del self._live[request.request_id]
            self._wake_up()

    def _session(self, request: VerifierRequest) -> Session:
        self._check(request)
        self._fence(request)
        rule, law = choose_rule(request, self.policy.law)
        mode = request.speculation.mode
        wanted = mode is not SpeculationMode.DISABLED and bool(self.pool.links)
        if mode is SpeculationMode.REQUIRED and not self.pool.up:
            raise NoDrafter("speculation.mode: 'required' and no drafter is up; use 'auto', or start a drafter")
        self._num_sessions += 1
        eos = frozenset(self.model.info.eos_ids)
        return Session(self._num_sessions, request, rule, law if wanted else None, eos, gain=self._gain(request, law))

    def _check(self, request: VerifierRequest) -> None:
        if self.draining or self._task is None or self._task.done():
            raise Unavailable("verifier is draining" if self.draining else "verifier is not running", retry_after_s=1.0)
        if len(self._queue) >= self.policy.max_queued:
            raise Overloaded(f"queue holds {len(self._queue)} requests, its limit", retry_after_s=1.0)
        info = self.model.info
        tokens = (*request.prompt, *request.committed)
        for name, ids in (("prompt", tokens), ("stop_token_ids", request.stopping.stop_token_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
                bad = next(t for t in ids if not 0 <= t < info.vocab_size)
                raise InvalidRequest(name, bad, f"is no token of a vocabulary of {info.vocab_size}")
        if len(request.committed) >= request.stopping.max_tokens:
            raise InvalidRequest(
                "max_tokens", request.stopping.max_tokens, "is not above the number of committed tokens"
            )
        if len(request.prompt) + request.stopping.max_tokens > info.max_positions:
            raise ContextLengthExceeded(
                "max_tokens",
                request.stopping.max_tokens,
                f"and a prompt of {len(request.prompt)} tokens exceed the context of {info.max_positions}; "
                f"shorten the prompt or ask for at most {max(0, info.max_positions - len(request.prompt))}",
            )

    def _fence(self, request: VerifierRequest) -> None:
        """An epoch lower than one seen is refused; a higher one ends the older attempt (protocol.md 3)."""
        seen = self._epochs.get(request.request_id, 0)
        live = self._live.get(request.request_id)
        if request.epoch < seen:
            raise StaleEpoch(f"epoch: {request.epoch} of request {request.request_id!r} is older than {seen}")
        if live is not None and request.epoch == seen:
            raise DuplicateRequest(f"request_id: {request.request_id!r} is running already; use a new id")
        if live is not None:
            live.done = True
            live.out.put_nowait(StaleEpoch(f"request {request.request_id!r} moved on to epoch {request.epoch}"))
        self._epochs[request.request_id] = request.epoch
        self._epochs.move_to_end(request.request_id)
        if len(self._epochs) > MAX_EPOCHS_REMEMBERED:
            self._epochs.popitem(last=False)

    @staticmethod
    def _deadline(request: VerifierRequest) -> float | None:
        return None if request.deadline_s is None else asyncio.get_running_loop().time() + request.deadline_s

    def _hello(self) -> Hello:
        info = self.model.info
        return Hello(self.worker, self.incarnation, info.tokenizer_hash, info.vocab_size, info.max_positions)

    def _wake_up(self) -> None:
        self._wake.set()

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
        step = self._plan()
        self.pool.flush()
        if step.empty:
            with suppress(TimeoutError):
                async with asyncio.timeout(step.wait_s):
                    await self._wake.wait()
            return
        try:
            await self._run(step)
        except Exception as error:  # a bug or a broken model costs the sessions of this step, not the service
            log.exception("step_failed")
            for number in {n for n, _ in (*step.prefill, *step.verify)} | set(step.decode):
                self._abort(self._running[number], error)

    async def _run(self, step: Plan) -> None:
        loop = asyncio.get_running_loop()
        if step.prefill:
            chunks = [self._chunk(number, size) for number, size in step.prefill]
            await loop.run_in_executor(self._thread, self.runner.prefill, chunks)
            for number, size in step.prefill:
                session = self._running[number]
                session.fed += size
                session.committed_s = time.monotonic()
        else:
            numbers = [number for number, _ in step.verify] + list(step.decode)
            rounds = [self._round(n, cap) for n, cap in step.verify] + [self._round(n, 0) for n in step.decode]
            outcomes = await loop.run_in_executor(self._thread, self.runner.verify, rounds)
            for number, outcome in zip(numbers, outcomes, strict=True):
                self._commit(self._running[number], outcome)
        self._prefilled_last = bool(step.prefill)

    def _sweep(self) -> None:
        """Free what has ended: KV slot, drafter slot, place in the tables."""
        for session in [s for s in self._running.values() if s.done]:
            self.pool.close(session, "ended")
            assert session.kv_slot is not None
            self.model.close(session.kv_slot)
            del self._running[session.number]
        if any(s.done for s in self._queue):
            self._queue = deque(s for s in self._queue if not s.done)

    def _admit(self) -> None:
        while self._queue and self.model.num_free_slots:
            session = self._queue.popleft()
            session.kv_slot = self.model.open()
            session.committed_s = time.monotonic()
            self._running[session.number] = session
        for session in self._running.values():
            if session.required or not session.gain.paused:
                self.pool.place(session)

    def _plan(self) -> Plan:
        now_s = time.monotonic()
        running = [s for s in self._running.values() if not s.done]
        nodes = share(self.policy.max_rows, sum(not s.prefill_left for s in running))
        views = [self._view(s, now_s, nodes) for s in running]
        chunk = self.policy.prefill_chunk
        return plan(views, prefill_chunk=chunk, prefill_turn=not self._prefilled_last)

    def _view(self, session: Session, now_s: float, nodes: int) -> View:
        draft, most = session.draft, self.policy.num_draft_tokens
        if (
            session.cap is None and not session.prefill_left
        ):  # the round begins: what follows must not change while a tree waits
            # Deeper than tokens_left - 1 nothing could be emitted.
            fitting = min(session.request.speculation.num_draft_tokens or most, most, nodes, session.tokens_left - 1)
            session.cap = fitting if session.gain.pays or session.required else 0
        return View(
            session.number,
            session.prefill_left,
            draft is not None,
            len(draft.tree) if draft is not None else 0,
            draft.at_rest if draft is not None else False,
            now_s - session.committed_s,
            self.policy.draft_wait_s if session.required else self._patience_s(session),
            session.cap or 0,
        )

    def _patience_s(self, session: Session) -> float:
        limit_s = self.policy.draft_wait_s
        plain_s = self._plain.seconds if self._plain.rounds else limit_s
        return patience_s(expected_tokens=session.gain.tree.tokens, plain_s=plain_s, limit_s=limit_s)

    def _chunk(self, number: int, size: int) -> Chunk:
        session = self._running[number]
        assert session.kv_slot is not None
        return Chunk(session.kv_slot, tuple(session.tokens[session.fed : session.fed + size]))

    def _round(self, number: int, cap: int) -> Round:
        session = self._running[number]
        assert session.kv_slot is not None
        r = session.request
        snapshot = session.draft.tree.snapshot(cap) if cap and session.draft is not None else None
        root, length = session.tokens[-1], len(session.tokens)
        return Round(session.kv_slot, root, length, session.rule, r.sampling, session.key, r.epoch, snapshot)

    def _commit(self, session: Session, outcome: Outcome) -> None:
        if session.done:
            return  # cancelled while the step ran; nothing was emitted
        draft = session.draft
        wanted = draft is not None and not draft.at_rest and bool(session.cap)
        missed = wanted and outcome.num_nodes == 0
        if missed or outcome.num_nodes:
            self.pool.judge(session, missed=missed)
        now_s = time.monotonic()
        if not session.required:  # those wait whether or not it pays, and would teach the others despair
            session.gain.add(
                len(outcome.tokens), now_s - session.committed_s, with_tree=bool(outcome.num_nodes) or missed
            )
        committed = session.advance(outcome.tokens, outcome.num_nodes, missed=missed)
        session.fed = len(session.tokens) - 1
        session.committed_s = now_s
        session.cap = None
        if session.gain.paused and not session.required:
            self.pool.close(session, "does not pay")  # at the beginning of a round, whatever has been grown
        elif not session.done:
            self.pool.commit(session, committed.tokens)
        session.out.put_nowait(committed)
        if session.leaving and not session.done:
            self._hand_back(session, "verifier is draining")

    def _gain(self, request: VerifierRequest, law: Law) -> Gain:
        """Sessions alike share what they learn, so that a short request does not pay for a trial of its own."""
        return self._gains.setdefault((law, round(10 * request.sampling.temperature)), Gain(self._plain))

    def _speedup(self) -> float:
        """Measured speed with trees over plain decoding, mean over the kinds of sessions that have tried both."""
        known = [gain.speedup for gain in self._gains.values() if gain.tree.rounds]
        return sum(known) / len(known) if known else 1.0

    def _abort(self, session: Session, error: Exception) -> None:
        """Our failure, not the request's: another verifier (or this one, a moment later) may take it on from what is committed."""
        self._hand_back(session, f"internal error in the engine: {type(error).__name__}")

    @staticmethod
    def _hand_back(session: Session, why: str) -> None:
        session.finish(FinishReason.ABORTED)
        session.out.put_nowait(Unavailable(why, retry_after_s=1.0))
