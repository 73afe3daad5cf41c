"""Admission of requests, and the KV slots and blocks of sessions.

Admission     checks requests, fences their epochs, bounds the queue
WaitingQueue  sessions without a slot: by priority, preempted ones first, then tenants in turn
Slots         sessions with a slot, and those that wait for one; the KV blocks that they hold and want
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from rootward.core.requests import Rule, VerifierRequest
from rootward.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    StaleEpoch,
    Unavailable,
)
from rootward.ports import LanguageModel, ModelInfo
from verifier_service.session import Event, Session
from verifier_service.settings import VerifierSettings


class Slots:
    """`running`: sessions with a KV slot, by number; `waiting`: those without one. num_draft_tokens: nodes of the largest tree."""

    def __init__(self, model: LanguageModel, num_draft_tokens: int) -> None:
        self.model, self._num_draft_tokens = model, num_draft_tokens
        self.running: dict[int, Session] = {}
        self.num_preemptions = self.num_asked = self.num_cached = 0  # the latter in tokens, by the prefix cache
        self.waiting = WaitingQueue()

    def gauges(self) -> dict[str, float]:
        """Values of the metrics with these names."""
        total, free = self.model.num_blocks, self.model.num_free_blocks
        return {
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "num_preemptions_total": self.num_preemptions,
            "kv_cache_usage_ratio": 1.0 - free / total,
            "prefix_cache_queries_total": self.num_asked,
            "prefix_cache_hits_total": self.num_cached,
        }

    def admit(self, failed: Callable[[Session, Exception], None]) -> list[Session]:
        """Give slots to waiting sessions in the order of the queue, while slots and blocks suffice. Returns them. A session for which there
        is no room is not overtaken.

        failed: called with a session that the model refused, and the error; it ends that session, and others go on.
        """
        entered = []
        while (
            self.model.num_free_slots
            and (session := self.waiting.head(list(self.running.values()))) is not None
            and self.admits(session)
        ):
            try:
                kv_slot = self.model.open(session.tokens, salt=session.salt)
            except Exception as error:
                failed(session, error)
                continue
            self.waiting.pop(session)
            # From a text with the same prefix, or from its own before it was preempted.
            num_cached = self.model.length(kv_slot)
            session.take_slot(kv_slot, num_cached)
            self.num_asked += len(session.tokens)
            self.num_cached += num_cached
            self.running[session.number] = session
            entered.append(session)
        return entered

    def preempt(self, numbers: Iterable[int]) -> None:
        """Take slots and blocks from these sessions, which wait again and will recompute the KV of their text. Round and tree stay: memory
        decides on preemption, but whether a tree is still waiting depends on its values (docs/decisions/0005)."""
        for number in numbers:
            session = self._leave(number)
            session.on(Event.PREEMPT)
            if session.local is not None:
                session.local.drop()  # planned before the prefill that it needs now
            self.waiting.push(session)
            self.num_preemptions += 1

    def release_done(self) -> list[Session]:
        """Free the slots of ended sessions. Returns these and those that have ended while they waited: a preempted one may hold a tree."""
        return [self._leave(s.number) for s in list(self.running.values()) if s.done] + self.waiting.remove_done()

    def _leave(self, number: int) -> Session:
        session = self.running.pop(number)
        self.model.close(session.leave_slot())
        return session

    def held(self, session: Session) -> tuple[int, int]:
        """(rows it can write without taking a block, blocks it holds, shared ones included)."""
        length = 0 if session.kv_slot is None else self.model.length(session.kv_slot)
        return -length % self.model.block_size, self._blocks(length)

    def admits(self, session: Session) -> bool:
        """Whether there are blocks for its text and one tree beside those that running sessions may still take. A single session is always
        admitted: the longest one fits (`ports.LanguageModel`)."""
        promised = sum(max(0, self._wanted(other) - self.held(other)[1]) for other in self.running.values())
        return not self.running or self._wanted(session) <= self.model.num_free_blocks - promised

    def _wanted(self, session: Session) -> int:
        """Blocks of its text so far and of one round."""
        wish = session.request.speculation.num_draft_tokens or self._num_draft_tokens
        nodes = min(wish, self._num_draft_tokens) if session.uses_drafters else 0
        return self._blocks(len(session.tokens) + nodes)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.model.block_size)


MAX_EPOCHS_REMEMBERED = 65536
# Log-probabilities of prompts that sessions hold at once, those of likely tokens included: each takes about 130 bytes.
MAX_HELD_LOGPROBS = 1 << 20
MAX_SEEDS_REMEMBERED = 16  # of the newest epoch of a request


class Admission:
    """`live`: sessions that run or wait, by request id."""

    def __init__(self, info: ModelInfo, settings: VerifierSettings) -> None:
        self._info, self._settings = info, settings
        self.live: dict[str, Session] = {}
        self._epochs: OrderedDict[str, tuple[int, tuple[int, ...]]] = OrderedDict()  # and the seeds used in the newest

    def check(self, request: VerifierRequest, *, num_queued: int, closed: str) -> None:
        """The ServiceError of a request that is refused. closed: why all requests are refused; "": they are not."""
        if closed:
            raise Unavailable(closed, retry_after_s=1.0)
        # What another verifier began was admitted there. It comes when that one is lost and the queues of the others are full.
        most = self._settings.max_num_queued_reqs * (2 if request.committed else 1)
        if num_queued >= most:
            raise Overloaded(f"queue holds {num_queued} requests, its limit", retry_after_s=1.0)
        info, asked = self._info, request.stopping.max_tokens
        try:
            request.check_tokens(info.vocab_size, info.eos_ids)
        except ValueError as error:
            raise InvalidRequest.from_message(str(error)) from error
        if len(request.committed) >= asked:
            raise InvalidRequest("max_tokens", asked, "is not above the number of committed tokens")
        if len(request.prompt) + asked > info.max_positions:  # the longest that the KV cache is made for
            raise ContextLengthExceeded(
                "max_tokens",
                asked,
                f"and a prompt of {len(request.prompt)} tokens exceed the context of {info.max_positions}; "
                f"shorten the prompt or ask for at most {max(0, info.max_positions - len(request.prompt))}",
            )

    def fence(self, request: VerifierRequest, rule: Rule) -> None:
        """Refuse an epoch that is lower than the last one; a higher one ends the older attempt (protocol.md 3). An equal one with the same
        seed would use the same coins, of whose verdicts a drafter may know (algorithms.md 9); matching uses none."""
        live = self.live.get(request.request_id)
        forgotten = (0, ()) if live is None else (live.request.epoch, (live.request.seed,))
        seen, seeds = self._epochs.get(request.request_id, forgotten)
        # A gateway whose store has forgotten the id goes on above this epoch, which must not end what runs for another client.
        known = {} if live is not None else {"epoch": str(seen)}
        if request.epoch < seen:
            older = f"epoch: {request.epoch} of request {request.request_id!r} is older than {seen}"
            raise StaleEpoch(older, metadata=known)
        if live is not None and request.epoch == seen:
            raise DuplicateRequest(f"request_id: {request.request_id!r} is running already; use a new id")
        seeds = seeds if request.epoch == seen else ()
        if rule is not Rule.MATCH and (request.seed in seeds or len(seeds) >= MAX_SEEDS_REMEMBERED):
            with_what = "this seed" if request.seed in seeds else f"{len(seeds)} seeds"
            used = f"epoch: {seen} of request {request.request_id!r} was used with {with_what}; give a higher epoch or a new id"
            raise StaleEpoch(used, metadata=known)
        if live is not None:
            live.end()
            live.out.put_nowait(StaleEpoch(f"request {request.request_id!r} is driven under epoch {request.epoch}"))
        if request.seed not in seeds and len(seeds) < MAX_SEEDS_REMEMBERED:
            seeds = (*seeds, request.seed)
        self._epochs[request.request_id] = request.epoch, seeds
        self._epochs.move_to_end(request.request_id)
        if len(self._epochs) > MAX_EPOCHS_REMEMBERED:
            self._epochs.popitem(last=False)

    def forget(self, session: Session) -> None:
        """Remove an ended session. Its epoch stays known."""
        if self.live.get(session.request.request_id) is session:
            del self.live[session.request.request_id]


class WaitingQueue:
    """Sessions that wait for a slot. The next one has the lowest priority value; of equal ones, preempted sessions come first, by arrival;
    then sessions of the tenant with the fewest running ones, then of the tenant that was served longest ago, then by arrival.
    The first of those that ask for log-probabilities of their prompts waits, and with it all others that do, until they are at most
    MAX_HELD_LOGPROBS with those of sessions that have run, or until none of these holds any. Ended sessions are skipped and not counted
    until `remove_done`."""

    def __init__(self) -> None:
        self._waiting: dict[int, Session] = {}  # by number
        self._served: dict[str, int] = {}  # by tenant that waits: number of the slot that it got last
        self._num_served = 0

    def __len__(self) -> int:
        return sum(not one.done for one in self._waiting.values())

    @property
    def num_fresh(self) -> int:
        """Sessions that have never had a slot; the limit of the queue applies to them."""
        return sum(not one.done and not one.has_run for one in self._waiting.values())

    def push(self, one: Session) -> None:
        self._waiting[one.number] = one

    def remove_done(self) -> list[Session]:
        """Remove the ended sessions. Returns them."""
        return [self._waiting.pop(one.number) for one in list(self._waiting.values()) if one.done]

    def head(self, running: Sequence[Session] = ()) -> Session | None:
        """The next session; `running` have slots. None: none waits, or none has room for its log-probabilities."""
        tenants = Counter(one.request.tenant for one in running)

        def order(one: Session) -> tuple[int, ...]:
            priority, tenant = one.request.priority, one.request.tenant
            if one.has_run:
                return priority, 0, one.number
            return priority, 1, tenants[tenant], self._served.get(tenant, 0), one.number

        waiting = [one for one in self._waiting.values() if not one.done]
        begun = [*running, *(one for one in waiting if one.has_run)]
        held = sum(one.num_held_logprobs for one in begun)
        first = min((one for one in waiting if not one.has_run and one.num_held_logprobs), key=order, default=None)
        fits = first is not None and (not held or held + first.num_held_logprobs <= MAX_HELD_LOGPROBS)
        others = [one for one in waiting if one.has_run or not one.num_held_logprobs]
        return min([*others, first] if first is not None and fits else others, key=order, default=None)

    def pop(self, one: Session) -> None:
        """Remove a session that gets a slot."""
        del self._waiting[one.number]
        self._num_served += 1
        tenants = {other.request.tenant for other in self._waiting.values()}
        self._served = {name: at for name, at in self._served.items() if name in tenants}
        if one.request.tenant in tenants:
            self._served[one.request.tenant] = self._num_served
