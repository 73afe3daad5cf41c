"""Requests that are let in, the queue for KV slots and blocks, and sessions that hold them.

Admission    checks a request, fences its epoch, bounds the queue
Memory       KV blocks as numbers: held, wanted, free
WaitingLine  the queue: by priority, preempted sessions first, then tenants in turn
Slots        sessions with a KV slot; those that wait for one; those that had to give theirs up
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

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
    """`running`: sessions with a KV slot, by number."""

    def __init__(self, model: LanguageModel, memory: Memory) -> None:
        self.model, self.memory = model, memory
        self.running: dict[int, Session] = {}
        self.num_preemptions = self.num_asked = self.num_cached = 0  # the latter in tokens, by the prefix cache
        self._waiting = WaitingLine()
        self._away: dict[int, Session] = {}  # preempted ones: they wait, and may still hold a tree at a drafter

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def gauges(self) -> dict[str, float]:
        """What is worth watching, by the names of serving.md."""
        total, free = self.model.num_blocks, self.model.num_free_blocks
        return {
            "num_requests_running": float(len(self.running)),
            "num_requests_waiting": float(self.num_waiting),
            "num_preemptions_total": float(self.num_preemptions),
            "kv_cache_usage_ratio": 1.0 - free / total,
            "prefix_cache_queries_total": float(self.num_asked),
            "prefix_cache_hits_total": float(self.num_cached),
        }

    def wait(self, session: Session) -> None:
        self._waiting.push(session)

    @property
    def num_fresh(self) -> int:
        """Requests that wait and have not run yet: what the length of the queue is counted by."""
        return self._waiting.num_fresh

    def forget(self, session: Session) -> None:
        """It has ended; if it waits it waits no longer."""
        self._waiting.discard(session)

    def fill(self, failed: Callable[[Session, Exception], None]) -> list[Session]:
        """Give the next in line a place while slots and blocks suffice. Nobody overtakes one for whom there is no room yet.

        failed(session, error): the model would not take it; that costs the one session.
        """
        entered = []
        running = self.running.values()
        while (
            self.model.num_free_slots
            and (session := self._waiting.head(running)) is not None
            and self.memory.admits(session, running)
        ):
            self._waiting.pop(session)
            try:
                session.kv_slot = self.model.open(session.tokens, salt=session.salt)
            except Exception as error:
                failed(session, error)  # one that was preempted stays away until `sweep`: it may hold a tree
                continue
            self._away.pop(session.number, None)
            # Of a text that begins alike, or its own before it was preempted.
            session.fed = self.model.length(session.kv_slot)
            if session.num_cached is None:
                session.num_cached = min(session.fed, len(session.request.prompt))
            self.num_asked += len(session.tokens)
            self.num_cached += session.fed
            session.on(Event.ADMIT)
            self.running[session.number] = session
            entered.append(session)
        return entered

    def preempt(self, numbers: Iterable[int]) -> None:
        """These give their KV to others; what is committed is computed again. Round, cap and the tree that waits stay as they are:
        memory decides this, but whether a tree still waits depends on its values (docs/decisions/0005)."""
        for number in numbers:
            session = self._leave(number)
            session.on(Event.PREEMPT)
            if session.local is not None:
                session.local.drop()  # it comes back with prefill, and has no rows for a tree that was planned before
            self._away[number] = session
            self._waiting.push(session, preempted=True)
            self.num_preemptions += 1

    def sweep(self) -> list[Session]:
        """Take their KV from those that are done; returns them and any that were done while they had none."""
        ended = [self._leave(s.number) for s in list(self.running.values()) if s.done]
        gone = [s for s in self._away.values() if s.done]
        for session in gone:
            del self._away[session.number]
        return ended + gone

    def _leave(self, number: int) -> Session:
        session = self.running.pop(number)
        assert session.kv_slot is not None
        self.model.close(session.kv_slot)
        session.kv_slot, session.fed = None, 0
        return session


class Memory:
    """The KV cache of the target as the scheduler counts it. num_draft_tokens: nodes of the largest tree, root excluded."""

    def __init__(self, model: LanguageModel, num_draft_tokens: int) -> None:
        self._model, self._num_draft_tokens = model, num_draft_tokens

    @property
    def block_size(self) -> int:
        return self._model.block_size

    @property
    def free_blocks(self) -> int:
        return self._model.num_free_blocks

    @property
    def free_rows(self) -> int:
        return self.free_blocks * self.block_size

    def held(self, session: Session) -> tuple[int, int]:
        """(rows it can write without taking a block, blocks it holds, shared ones included)."""
        length = 0 if session.kv_slot is None else self._model.length(session.kv_slot)
        return -length % self.block_size, self._blocks(length)

    def admits(self, session: Session, running: Iterable[Session]) -> bool:
        """Whether there is a slot, and blocks for all its text and one tree beside what the running ones were let in with.

        Whoever is alone is let in: one session at its longest always fits (`ports.LanguageModel`)."""
        others = list(running)
        if not self._model.num_free_slots:
            return False
        promised = sum(max(0, self._wanted(other) - self.held(other)[1]) for other in others)
        return not others or self._wanted(session) <= self.free_blocks - promised

    def _wanted(self, session: Session) -> int:
        """Blocks of its text so far and of one round on top."""
        wish = session.request.speculation.num_draft_tokens or self._num_draft_tokens
        nodes = min(wish, self._num_draft_tokens) if session.law is not None else 0
        return self._blocks(len(session.tokens) + nodes)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


MAX_EPOCHS_REMEMBERED = 65536


class Admission:
    """`live`: sessions that run or wait, by request id."""

    def __init__(self, info: ModelInfo, settings: VerifierSettings) -> None:
        self._info, self._settings = info, settings
        self.live: dict[str, Session] = {}
        self._epochs: OrderedDict[str, tuple[int, int]] = OrderedDict()  # and the seed of the newest attempt

    def check(self, request: VerifierRequest, *, num_queued: int, closed: str) -> None:
        """Raises what speaks against the request. closed: why nothing at all is let in, "" if it is not so."""
        if closed:
            raise Unavailable(closed, retry_after_s=1.0)
        if num_queued >= self._settings.max_num_queued_reqs:
            raise Overloaded(f"queue holds {num_queued} requests, its limit", retry_after_s=1.0)
        info, asked = self._info, request.stopping.max_tokens
        try:
            request.check_tokens(info.vocab_size, info.eos_ids)
        except ValueError as error:
            raise InvalidRequest.from_message(str(error)) from error
        if len(request.committed) >= asked:
            raise InvalidRequest("max_tokens", asked, "is not above the number of committed tokens")
        if len(request.prompt) + asked > info.max_positions:  # the KV cache holds any session of that length
            raise ContextLengthExceeded(
                "max_tokens",
                asked,
                f"and a prompt of {len(request.prompt)} tokens exceed the context of {info.max_positions}; "
                f"shorten the prompt or ask for at most {max(0, info.max_positions - len(request.prompt))}",
            )

    def fence(self, request: VerifierRequest, rule: Rule) -> None:
        """An epoch lower than one seen is refused; a higher one ends the older attempt (protocol.md 3). The same one again would toss
        the same coins, of whose verdicts a drafter may have heard (algorithms.md 9); matching tosses none."""
        seen, seed = self._epochs.get(request.request_id, (0, 0))
        live = self.live.get(request.request_id)
        if request.epoch < seen:
            raise StaleEpoch(f"epoch: {request.epoch} of request {request.request_id!r} is older than {seen}")
        if live is not None and request.epoch == seen:
            raise DuplicateRequest(f"request_id: {request.request_id!r} is running already; use a new id")
        if rule is not Rule.MATCH and (request.epoch, request.seed) == (seen, seed):
            raise StaleEpoch(
                f"epoch: {seen} of request {request.request_id!r} was used with this seed; give a higher epoch or a new id"
            )
        if live is not None:
            live.end()
            live.out.put_nowait(StaleEpoch(f"request {request.request_id!r} moved on to epoch {request.epoch}"))
        self._epochs[request.request_id] = request.epoch, request.seed
        self._epochs.move_to_end(request.request_id)
        if len(self._epochs) > MAX_EPOCHS_REMEMBERED:
            self._epochs.popitem(last=False)

    def forget(self, session: Session) -> None:
        """Its generation has ended; its epoch is remembered."""
        if self.live.get(session.request.request_id) is session:
            del self.live[session.request.request_id]


class WaitingLine:
    """Who gets the next slot: the lowest priority; of those the preempted, by arrival; then the tenant with the fewest running sessions, of
    several the one that was served longest ago; then by arrival. Those that are `done` are passed over and not counted."""

    def __init__(self) -> None:
        self._waiting: dict[int, Session] = {}  # by number
        self._preempted: set[int] = set()
        self._served: dict[str, int] = {}  # by tenant that waits: when it was served last, counted in services
        self._num_served = 0

    def __len__(self) -> int:
        return sum(not one.done for one in self._waiting.values())

    @property
    def num_fresh(self) -> int:
        """Those that have never had a slot."""
        return sum(not one.done for number, one in self._waiting.items() if number not in self._preempted)

    def push(self, one: Session, *, preempted: bool = False) -> None:
        self._waiting[one.number] = one
        if preempted:
            self._preempted.add(one.number)

    def discard(self, one: Session) -> None:
        """It waits no longer."""
        self._waiting.pop(one.number, None)
        self._preempted.discard(one.number)

    def head(self, running: Iterable[Session] = ()) -> Session | None:
        """The next one, beside those that run."""
        held = Counter(one.tenant for one in running)

        def order(one: Session) -> tuple[int, ...]:
            if one.number in self._preempted:
                return one.priority, 0, one.number
            return one.priority, 1, held[one.tenant], self._served.get(one.tenant, 0), one.number

        return min((one for one in self._waiting.values() if not one.done), key=order, default=None)

    def pop(self, one: Session) -> None:
        """It gets a slot."""
        self.discard(one)
        self._num_served += 1
        tenants = {other.tenant for other in self._waiting.values()}
        self._served = {name: at for name, at in self._served.items() if name in tenants}
        if one.tenant in tenants:
            self._served[one.tenant] = self._num_served
