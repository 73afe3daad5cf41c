"""The gateway of one model: takes text, ids or a conversation, returns deltas of text. Used by the gRPC servicer and the HTTP API."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from gateway.admission import Admission, LogprobLimit, LogprobShare
from gateway.auth import Scope, caller
from gateway.choices import is_output_of
from gateway.detokenizer import Output
from gateway.generation import Aborted, Cutoff, Generation
from gateway.grammar_check import GrammarCheck
from gateway.ledger import Entry, Ledger
from gateway.metrics import GAUGES, Metrics, RequestMetrics
from gateway.planning import Plan, check_resume, make_plan, refusing, without_texts
from gateway.quotas import Account
from gateway.redis_store import Store
from gateway.requests import Chat, Delta, Ending, GenerateRequest
from gateway.resuming import beyond_log, finish_of, first_fields, with_seed
from gateway.router import Upstreams
from gateway.session_store import FINISHED, INTERRUPTED, Record, another_request, duplicate, stale
from gateway.settings import GatewaySettings
from gateway.tokenizer import CHARACTERS_PER_TOKEN, INLINE_CHARACTERS, Tokenizer, TokenizerPool, texts_in
from gateway.watching import WatchedRequest, Watching
from rootward.client.types import Timing, Usage
from rootward.core.requests import FinishReason, Sampling, SpeculationStats, check_ids
from rootward.errors import ContextLengthExceeded, InvalidRequest, ServiceError, Unavailable
from rootward.metrics import Gauges
from rootward.ports import Lease, ModelInfo
from rootward.tracing import request_span, set_attributes, traceparent_of

FIRST_VERIFIER_WAIT_S = 1.0  # for a verifier to be found after the gateway has started
LEASE_S = 5.0
ABORT_S = 2.0  # for aborted generations to release their resources
SLOW_CLIENT_S = 5.0  # after the longest request, for a client to read the answer
CHARACTERS_A_TOKEN = 16  # a prompt with more characters for each token of the context is refused before it is tokenised
MIN_CONTEXT = 2048  # tokens; models with a smaller context take as many characters as with this one
MIN_DETOKENIZED = 1 << 16  # ids that one call to detokenise may always have
TOKENISED_A_CHARGE = 64  # characters whose tokenisation costs a tenant as much as one token of a request


class GatewayService:
    """Use as an async context manager: it owns the loops that watch the verifiers and write the store."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        upstreams: Upstreams,
        store: Store,
        *,
        settings: GatewaySettings,
        served_model: str,
        watching: Watching | None = None,
        logprob_limit: LogprobLimit | None = None,
        beside_others: bool = False,
        http_sampling: Sampling | None = None,
        lease_s: float = LEASE_S,
    ):
        """store: closed by the caller. watching, logprob_limit: shared by the models of a gateway. beside_others: request ids are shared
        with services of other models, and a resumed request must name the model that it began with. http_sampling: for HTTP requests that
        give none (default: OpenAI's). lease_s: of a running request, unless renewed."""
        self.tokenizer, self.upstreams, self.served_model = tokenizer, upstreams, served_model
        self.settings, self.http_sampling = settings, http_sampling or Sampling()
        self.admission = Admission(
            max_num_seqs=self.settings.max_num_seqs,
            max_num_queued_reqs=self.settings.max_num_queued_reqs,
            max_num_queued_tokens=self.settings.max_num_queued_tokens,
        )
        self._logprob_limit = logprob_limit or LogprobLimit()
        self.worker = f"gateway-{uuid.uuid4().hex[:8]}"
        self.incarnation = secrets.randbits(64)
        self.metrics, self.watching = Metrics(), watching or Watching(loop_time)
        self._id_scope = served_model if beside_others else ""
        self._ledger = Ledger(store, now=loop_time, model=self._fingerprint, is_held=upstreams.is_held, lease_s=lease_s)
        Gauges(self.metrics.registry, GAUGES, self._gauges)
        self._live: dict[str, _Live] = {}  # by the name that the request has at verifiers
        self.tokenizer_pool, self._grammars = TokenizerPool(), GrammarCheck(tokenizer.backend_json)
        self._group = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> GatewayService:
        self.started = loop_time()
        await self._ledger.probe()
        await self._group.__aenter__()
        self._loops = [self._group.create_task(loop) for loop in (self.upstreams.run(), self._ledger.run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for loop in self._loops:
            loop.cancel()
        await self._group.__aexit__(None, None, None)
        await self._ledger.flush()
        await self._grammars.close()
        self.tokenizer_pool.close()

    @property
    def model(self) -> ModelInfo:
        """The served model. Unavailable until a verifier has answered."""
        if self.upstreams.model is None:
            raise self.unavailable()
        return self.upstreams.model

    def _gauges(self) -> dict[str, float]:
        return {
            "num_requests_running": self.admission.num_running,
            "num_requests_waiting": self.admission.num_waiting,
            "upstream_ready": sum(upstream.ready for upstream in self.upstreams),
            "session_store_up": not self._ledger.down,
        }

    def unavailable(self) -> Unavailable:
        """The error of a gateway whose verifiers have not answered."""
        cause = self.upstreams.mismatch or "none has answered yet"
        return Unavailable(f"no verifier is ready ({cause})", retry_after_s=1.0)

    def _fingerprint(self) -> str:
        return self.upstreams.model.fingerprint if self.upstreams.model else ""

    @property
    def ready(self) -> bool:
        """The service takes new requests."""
        return self.upstreams.ready and not self.admission.draining

    @property
    def uptime_s(self) -> float:
        return loop_time() - self.started

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Deltas until the one with an ending. Closing the iterator cancels the request and frees everything that it holds.

        Raises ServiceErrors: InvalidRequest and subclasses before anything ran; Overloaded and Unavailable when the request may be tried
        again; DeadlineExceeded; DuplicateRequest.
        """
        about: dict[str, str | int] = {"model": self.served_model, "choice": request.choice}
        with (
            RequestMetrics(self.metrics) as counts,
            request_span("gateway.request", request.traceparent, **about) as span,
        ):
            check_resume(request)
            self._check_allowed(request)
            request_id, traceparent = request.request_id or uuid.uuid4().hex, traceparent_of(span)
            set_attributes(span, request_id=request_id)
            request = replace(request, request_id=request_id, traceparent=traceparent or request.traceparent)
            async with aclosing(self._deltas(request, loop_time())) as deltas:
                async for delta in deltas:
                    counts.delta(delta)
                    if (ending := delta.ending) is not None:
                        set_attributes(
                            span,
                            finish_reason=ending.reason.value,
                            prompt_tokens=ending.usage.prompt_tokens,
                            completion_tokens=ending.usage.completion_tokens,
                            queue_ms=ending.timing.queue_ms,
                            ttft_ms=ending.timing.ttft_ms,
                            block_efficiency=ending.stats.block_efficiency,
                        )
                    yield delta

    async def _deltas(self, request: GenerateRequest, arrived: float) -> AsyncGenerator[Delta, None]:
        limit = min(request.deadline_s or self.settings.request_timeout_s, self.settings.request_timeout_s)
        if self.upstreams.model is None:
            await self.upstreams.wait_ready(min(limit, FIRST_VERIFIER_WAIT_S))
        size = len(request.prediction) + sum(map(len, request.bad_words))
        request = await self.tokenizer_pool.run(size, without_texts, request, self.tokenizer)
        plan = make_plan(
            request,
            await self.prompt_ids(request),
            self.model,
            max_prompt=self.settings.max_prompt_tokens,
            max_output=self.settings.max_output_tokens,
        )
        self.metrics.planned(request)
        cutoff = Cutoff(arrived + limit)
        received = request.resume.offset if request.resume else 0
        try:
            async with self._running(plan, cutoff, arrived) as generation, aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    if (new := delta.since(received)).spans or new.ending or new.rounds:
                        yield new
        except Aborted:  # while it waited for a slot
            if cutoff.error is not None:
                raise cutoff.error from None
            usage = Usage(len(plan.first.prompt), 0)
            waited_ms = 1000 * (loop_time() - arrived)
            timing = Timing(queue_ms=waited_ms, ttft_ms=waited_ms, total_ms=waited_ms)
            ending = Ending(FinishReason.ABORTED, usage, SpeculationStats(), timing)
            yield Delta(request.request_id, 0, (), ending, prompt=plan.first.prompt)

    async def tokenize(
        self, prompt: str | Chat, *, add_special_tokens: bool | None = None, tenant: str = ""
    ) -> tuple[int, ...]:
        """Token ids of a text or conversation; none for an empty text. Charged to the tenant."""
        if prompt == "":
            return ()
        self._check_characters(prompt)
        await self._charge(tenant, _characters(prompt))
        return await self.prompt_ids(GenerateRequest(prompt, add_special_tokens=add_special_tokens))

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True, tenant: str = "") -> str:
        """The text of token ids. InvalidRequest for ids that are none. Charged to the tenant."""
        longest = max(self.model.max_positions, MIN_DETOKENIZED)
        if len(ids) > longest:
            raise ContextLengthExceeded("token_ids", len(ids), f"ids are more than {longest}; send them in parts")
        with refusing():
            check_ids("token_ids", ids, self.model.vocab_size)
        await self._charge(tenant, CHARACTERS_PER_TOKEN * len(ids))
        decode = partial(self.tokenizer.decode, skip_special_tokens=skip_special_tokens)
        return await self.tokenizer_pool.run(CHARACTERS_PER_TOKEN * len(ids), decode, ids)

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, that of a part of a character with U+FFFD."""
        text_of = self.tokenizer.token_text
        return await self.tokenizer_pool.run(CHARACTERS_PER_TOKEN * len(ids), lambda: list(map(text_of, ids)))

    def abort(
        self, request_ids: Sequence[str], error: ServiceError | None = None, *, tenant: str | None = None
    ) -> list[str]:
        """End these generations, those of a tenant alone if one is given; returns the ids that were running."""
        mine = [live for live in self._live.values() if tenant in (None, live.tenant)]
        found = [live for live in mine if is_output_of(live.request_id, request_ids)]
        for live in found:
            live.cutoff.abort(error)
        return [i for i in request_ids if any(is_output_of(live.request_id, [i]) for live in found)]

    def logprob_share(self, request: GenerateRequest) -> AbstractAsyncContextManager[LogprobShare]:
        """The share of an answer, with all its outputs, in the log-probabilities that the gateway holds. Overloaded ends the largest."""
        return self._logprob_limit.share(lambda error: self.abort([request.request_id], error, tenant=request.tenant))

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, let the others end until `timeout_s`, abort the rest. Returns the number of aborted requests."""
        self.admission.draining = True
        if await self.admission.at_rest(timeout_s):
            return 0
        left = list(self._live.values())
        for live in left:
            live.cutoff.abort(Unavailable("the gateway is stopping", retry_after_s=1.0))
        await self.admission.at_rest(ABORT_S)
        return len(left)

    async def prompt_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Token ids of the prompt of a request. ContextLengthExceeded, by characters, before it is tokenised."""
        prompt = request.prompt
        if request.prompt_ids is not None:
            return request.prompt_ids
        if isinstance(prompt, tuple):
            return prompt
        self._check_characters(prompt)
        if isinstance(prompt, str):
            encode = partial(self.tokenizer.encode, add_special_tokens=request.add_special_tokens)
            return await self.tokenizer_pool.run(len(prompt), encode, prompt)
        return await self.tokenizer_pool.run(
            INLINE_CHARACTERS + _characters(prompt), self.tokenizer.encode_chat, prompt
        )

    def _check_characters(self, prompt: str | Chat) -> None:
        model = self.upstreams.model
        of_context = CHARACTERS_A_TOKEN * max(model.max_positions if model else 0, MIN_CONTEXT)
        limit = self.settings.max_prompt_characters or of_context
        if isinstance(prompt, Chat) and len(prompt.messages) * CHARACTERS_A_TOKEN > of_context:
            fix = f"are more than the {of_context // CHARACTERS_A_TOKEN} tokens of the context; send fewer"
            raise ContextLengthExceeded("messages", len(prompt.messages), fix)
        if (size := _characters(prompt)) > limit:
            field = "messages" if isinstance(prompt, Chat) else "prompt"
            raise ContextLengthExceeded(field, size, f"characters are more than this server takes, {limit}; shorten it")

    async def _charge(self, tenant: str, characters: int) -> None:
        if self.settings.tenant_rate is not None:
            await self._ledger.charge(tenant, -(-characters // TOKENISED_A_CHARGE), self.settings.tenant_rate)

    def _check_allowed(self, request: GenerateRequest) -> None:
        """InvalidRequest beyond the operator's limits, PermissionDenied beyond the scopes of the caller's key."""
        if request.n > self.settings.max_choices:
            raise InvalidRequest("n", request.n, f"is more than this server gives, {self.settings.max_choices}")
        if request.priority < 0 and (known := caller()) is not None:
            known.require(Scope.PRIORITY)

    @asynccontextmanager
    async def _running(self, plan: Plan, cutoff: Cutoff, arrived: float) -> AsyncIterator[Generation]:
        """A generation with its id, its slot and its lease, which are released at the end."""
        first, request = plan.first, plan.request
        name, fields = first.request_id, first_fields(plan, self._id_scope)
        while name in self._live:  # not `if`, since another request may resume it meanwhile
            await self._superseded(plan, fields["digest"])
        live = self._live[name] = _Live(cutoff, fields["digest"], request.request_id, first.tenant)
        try:
            async with AsyncExitStack() as held:
                account = await held.enter_async_context(Account(self._ledger, plan, self.settings.tenant_rate))
                slot = self.admission.slot(len(first.prompt), first.priority, first.tenant)
                await cutoff.wait(held.enter_async_context(slot), "queue")
                if first.structure is not None:
                    vocab_size, eos_ids = self.model.vocab_size, tuple(self.model.eos_ids)
                    check = self._grammars.check(
                        first.structure, vocab_size=vocab_size, eos_ids=eos_ids, tenant=first.tenant
                    )
                    await cutoff.wait(check, "structure")
                plan, entry, record = await self._leased(plan, fields, account)
                account.started(entry)
                watched = WatchedRequest(self.watching, request.request_id, request.session_id, request.tenant, arrived)
                held.enter_context(self._recorded(entry, watched))
                watched.begun(len(first.prompt), len(entry.tokens))
                yield await self._generation(plan, entry, record, cutoff, watched)
        finally:
            if self._live.get(name) is live:
                del self._live[name]
            live.over.set()

    @contextmanager
    def _recorded(self, entry: Entry, watched: WatchedRequest) -> Iterator[None]:
        """Reports the end of a generation to the ledger and the watchers."""
        error = ""
        try:
            yield
        except ServiceError as failure:
            error = failure.reason
            raise
        finally:
            finished = "finish" in entry.fields
            self._ledger.end(entry, FINISHED if finished else INTERRUPTED)
            reason = finish_of(entry.fields).reason if finished else None
            watched.ended(reason, error, len(entry.tokens))

    async def _superseded(self, plan: Plan, digest: str) -> None:
        """End a request that still runs here, because its client resumes it. DuplicateRequest if the client does not resume."""
        name = plan.first.request_id
        if plan.request.resume is None:
            raise duplicate(name)
        live = self._live[name]
        if live.digest != digest:
            raise another_request(name)
        live.cutoff.abort(stale(name))
        try:
            async with asyncio.timeout(ABORT_S):
                await live.over.wait()
        except TimeoutError:
            # It waits for a client that does not read, and may do so for long. When it goes on it ends, and until then it has no lease.
            if self._live.get(name) is live:
                del self._live[name]

    async def _leased(self, plan: Plan, fields: dict[str, str], account: Account) -> tuple[Plan, Entry, Record]:
        """(plan with the seed of the record, entry with the lease, record of a resumed request)"""
        name, resume = plan.first.request_id, plan.request.resume
        if resume is None:
            return plan, await self._ledger.begin(name, fields), Record()
        try:
            entry, record = await self._ledger.take_over(name, fields["digest"])
        except Unavailable:
            if resume.offset:
                raise
            # The store is down, and the client, which has received nothing, may have reached no gateway before: begin as if the record were
            # lost. Another gateway may be driving the request for nobody. That costs work only: verifiers refuse its epoch, which is
            # lower, and the store lets one of the two go on when it is back.
            entry, record = None, Record()
        plan = with_seed(plan, record)
        try:
            more = beyond_log(plan, resume, record)
            await account.resumed(record)
        except BaseException:  # also cancelled; its lease was taken, and no generation follows
            self._ledger.leave(entry, record)
            raise
        if entry is None and record.finished:
            entry = Entry(Lease(name, 0, ""), 0.0)  # no gateway drives it
            self._ledger.extend(entry, record.output)
        elif entry is None:
            # The record is lost, but a verifier may know its epochs: epochs that begin with the time are above all of them.
            entry = await self._ledger.begin(name, fields, least_epoch=int(time.time()))
        self._ledger.extend(entry, more)
        self.metrics.resumed.inc()
        return plan, entry, record

    async def _generation(
        self, plan: Plan, entry: Entry, record: Record, cutoff: Cutoff, watched: WatchedRequest
    ) -> Generation:
        request = plan.request
        keys = self._ledger.keys(plan.first)
        held = await self._ledger.held(keys)
        if known := record.fields.get("verifier"):
            held[known] = len(plan.first.prompt) + len(entry.tokens)
        detokenizer = self.tokenizer.detokenizer(plan.first.prompt, skip_special_tokens=request.skip_special_tokens)
        return Generation(
            plan,
            entry,
            Output(detokenizer, request.stop, include_stop=request.include_stop, min_tokens=request.min_tokens),
            cutoff,
            upstreams=self.upstreams,
            ledger=self._ledger,
            metrics=self.metrics,
            watched=watched,
            keys=keys,
            held=held,
            ended=finish_of(record.fields) if record.finished else None,
            redispatch_wait_s=self.settings.redispatch_wait_s,
        )


@dataclass(slots=True)
class _Live:
    """A generation that runs here. Only a request with the same digest may end it by resuming it."""

    cutoff: Cutoff
    digest: str
    request_id: str  # as its client knows it
    tenant: str
    over: asyncio.Event = field(default_factory=asyncio.Event)


def _characters(prompt: str | Chat) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    # Names of a message's own fields are the gateway's; other keys are in the prompt like texts.
    values = [value for message in prompt.messages for value in message.values()]
    return sum(map(len, texts_in([*values, prompt.template_kwargs])))


def loop_time() -> float:
    return asyncio.get_running_loop().time()
