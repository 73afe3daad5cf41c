"""Which requests are let in: checked, fenced by epoch, bounded in number."""

from __future__ import annotations

from collections import OrderedDict

from rootward.core.requests import Rule, VerifierRequest
from rootward.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    StaleEpoch,
    Unavailable,
)
from rootward.ports import ModelInfo
from verifier_service.policy import Policy
from verifier_service.sessions import Session, check_tokens

MAX_EPOCHS_REMEMBERED = 65536


class Admission:
    """`live`: sessions that run or wait, by request id."""

    def __init__(self, info: ModelInfo, policy: Policy) -> None:
        self._info, self._policy = info, policy
        self.live: dict[str, Session] = {}
        self._epochs: OrderedDict[str, tuple[int, int]] = OrderedDict()  # and the seed of the newest attempt

    def check(self, request: VerifierRequest, *, num_queued: int, closed: str) -> None:
        """Raises what speaks against the request. closed: why nothing at all is let in, "" if it is not so."""
        if closed:
            raise Unavailable(closed, retry_after_s=1.0)
        if num_queued >= self._policy.max_queued:
            raise Overloaded(f"queue holds {num_queued} requests, its limit", retry_after_s=1.0)
        info, asked = self._info, request.stopping.max_tokens
        check_tokens(request, info.vocab_size, info.eos_ids)
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
            live.done = True
            live.out.put_nowait(StaleEpoch(f"request {request.request_id!r} moved on to epoch {request.epoch}"))
        self._epochs[request.request_id] = request.epoch, request.seed
        self._epochs.move_to_end(request.request_id)
        if len(self._epochs) > MAX_EPOCHS_REMEMBERED:
            self._epochs.popitem(last=False)

    def forget(self, session: Session) -> None:
        """Its generation has ended; its epoch is remembered."""
        if self.live.get(session.request.request_id) is session:
            del self.live[session.request.request_id]
