"""The verifier as an object: requests in, committed runs out. Its sessions are run by the engine loop (`engine_loop.py`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from redis.asyncio import Redis, RedisCluster

import rootward
from rootward.core.frames import Hello
from rootward.core.requests import Committed, SpeculationMode, VerifierRequest
from rootward.engine.grammar import Grammars, TreeMatcher, Vocabulary
from rootward.errors import DeadlineExceeded, NoDrafter, ServiceError, Unavailable
from rootward.ports import Discovery, LanguageModel, VerifierInfo
from rootward.tracing import request_span
from verifier_service.audit import DrafterAudit
from verifier_service.drafter_pool import Dial, DrafterPool
from verifier_service.engine_loop import EngineLoop
from verifier_service.head_drafts import HeadDrafts
from verifier_service.kv_admission import Admission
from verifier_service.metrics import Metrics
from verifier_service.runner import Runner
from verifier_service.session import Session, check_drafter, choose_rule
from verifier_service.settings import VerifierSettings
from verifier_service.step_time import StepTime

if TYPE_CHECKING:  # a verifier without a head loads none
    from rootward.engine.head_model import DraftHead


class VerifierService:
    """Implements `ports.Verifier`. Use as an async context manager: it owns the loop, the model's thread and the links."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        settings: VerifierSettings,
        incarnation: int,
        runner: Runner | None = None,
        grammars: Grammars | None = None,
        step_time: StepTime | None = None,
        sources: Sequence[tuple[str, Discovery]] = (),
        dial: Dial | None = None,
        metrics: Metrics | None = None,
        redis: Redis | RedisCluster | None = None,
        head: DraftHead | None = None,
        secret: int = 0,
    ) -> None:
        """sources, dial: see `DrafterPool`. redis: where the audit keeps the records of drafters. head: of the target, for local drafts and
        for the features that drafters want. secret: a number that no drafter knows (`Session.key`); only tests may leave it out."""
        self.model, self.settings, self._secret = model, settings, secret
        self.worker, self.incarnation = f"verifier-{incarnation:016x}", incarnation
        # Drafters are told the incarnation and the key of draws.
        heads = HeadDrafts(head, incarnation=secret) if head is not None and settings.grows_head else None
        self.runner = runner or Runner(model, heads=heads, head=head)
        self.grammars = grammars or Grammars(lambda: Vocabulary(None, model.info.vocab_size, model.info.eos_ids))
        self.max_sessions = model.num_free_slots
        self.draining = False
        self._wake = asyncio.Event()
        self.metrics = metrics or Metrics()
        self.admission = Admission(model.info, settings)
        self._live = self.admission.live
        self._num_sessions = self._num_compiling = 0
        self.audit = DrafterAudit(
            self.metrics.registry,
            self.worker,
            untrusted_pools=settings.untrusted_pools,
            redis=redis,
            prefix=settings.redis_prefix,
        )
        self.pool = DrafterPool(
            self._hello,
            self._wake.set,
            sources=sources if model.info.supports_trees else (),
            dial=dial,
            prior_row_s=settings.draft_prior_row_ms / 1e3,
            zone=settings.zone,
            shape=settings.shape,
            metrics=self.metrics.links,
        )
        self.engine = EngineLoop(
            self.runner,
            settings=settings,
            pool=self.pool,
            live=self._live,
            metrics=self.metrics,
            wake=self._wake,
            audit=self.audit,
            step_time=step_time,
        )
        self.slots, self.local, self._running = self.engine.slots, self.engine.local, self.engine.running
        self.metrics.watch(self._stats, lambda: self.pool.demand)
        self._task: asyncio.Task[None] | None = None
        self._audit_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> VerifierService:
        await self.pool.__aenter__()
        self._task = asyncio.create_task(self.engine.run(), name="engine")
        self._audit_task = asyncio.create_task(self.audit.run(lambda: self.pool.up), name="audit of drafters")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._task, self._audit_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in self._live.copy().values():
            session.out.put_nowait(Unavailable("verifier is stopping", retry_after_s=1.0))
        await self.pool.__aexit__()
        self.engine.thread.shutdown()  # after the step that may be running

    # -- the port -----------------------------------------------------------------------------------------------------

    async def generate(self, request: VerifierRequest) -> AsyncGenerator[Committed, None]:
        """Committed runs of one generation. Closing the iterator cancels it and frees everything at the next step."""
        now_s = asyncio.get_running_loop().time()
        deadline_s = None if request.deadline_s is None else now_s + request.deadline_s
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
        if not self.alive:  # also of one that hangs: its callers go on with another verifier
            raise Unavailable("the engine has ended, or its step does not")
        return VerifierInfo(
            self.model.info,
            self.worker,
            self.incarnation,
            self.pool.up,
            len(self._running),
            len(self.slots.waiting),
            self.max_sessions,
            self.draining,
            self._stats(),
            rootward.__version__,
            time.time(),
        )

    def _stats(self) -> dict[str, float]:
        speedup = self.engine.rounds.controller.speedup
        gauges = {**self.pool.gauges(), **self.slots.gauges(), **self.audit.gauges()}
        age_s = self.model.evicted_age_s
        evicted = {"kv_evicted_age_s": age_s} if math.isfinite(age_s) else {}
        return {"spec_decode_speedup_estimate": speedup, **gauges, **evicted}

    @property
    def ended(self) -> asyncio.Task[None] | None:
        """Done when the engine has failed for good; the process should end then."""
        return self._task

    @property
    def alive(self) -> bool:
        """False: only a restart helps."""
        return self._task is not None and not self._task.done() and self.engine.watchdog.healthy

    async def drain(self) -> None:
        """Refuse new sessions; return when the running ones have ended."""
        self.draining = True
        while self._live:
            await asyncio.sleep(0.02)

    # -- admission ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _admitted(
        self, request: VerifierRequest, matcher: TreeMatcher | None, deadline_s: float | None
    ) -> AsyncIterator[Session]:
        session = self._session(request)
        session.matcher, session.deadline_s = matcher, deadline_s
        self._live[request.request_id] = session
        self.slots.waiting.push(session)
        self._wake.set()
        about: dict[str, str | int] = {"request_id": request.request_id, "epoch": request.epoch}
        try:
            with request_span("verifier.request", request.traceparent, **about) as session.span:
                yield session
        finally:
            session.end()  # the loop frees it between steps
            self.admission.forget(session)
            self._wake.set()

    async def _matcher(self, request: VerifierRequest, deadline_s: float | None) -> TreeMatcher | None:
        """The matcher of a requested form. It is compiled for requests that pass the checks, which count as queued meanwhile."""
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
        self.admission.check(request, num_queued=self.slots.waiting.num_fresh + self._num_compiling, closed=closed)

    def _session(self, request: VerifierRequest) -> Session:
        self._check(request)
        mode, drafter = request.speculation.mode, request.speculation.drafter
        rule, draft_mode, strategy = choose_rule(request, self.settings.law, self.pool.strategy(drafter))
        # What another verifier began goes on with the drafters that are here, or with none.
        is_new = not request.committed
        if is_new:
            check_drafter(drafter, (*self.pool.demand, *self.local.names))
        wanted = mode is not SpeculationMode.DISABLED and self.pool.possible(drafter)
        if (
            mode is SpeculationMode.REQUIRED
            and is_new
            and not self.pool.has(drafter, draft_mode)
            and not self.local.grows(drafter, rule)
        ):
            field = "speculation.mode"
            why = f"{field}: 'required' and no drafter grows such trees; use 'auto', or start one"
            raise NoDrafter(why, metadata={"field": field})
        self.admission.fence(request, rule)
        self._num_sessions += 1
        eos = frozenset(self.model.info.eos_ids)
        session = Session(self._num_sessions, request, rule, draft_mode, eos, strategy, wanted, self._secret)
        session.statistics = self.engine.rounds.statistics(session)
        self.local.attach(session)
        return session

    def _hello(self) -> Hello:
        info = self.model.info
        head = "" if self.runner.head is None else self.runner.head.info.fingerprint
        return Hello(self.worker, self.incarnation, info.tokenizer_hash, info.vocab_size, info.max_positions, head=head)
