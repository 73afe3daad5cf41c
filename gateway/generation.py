"""The moment at which a request stops waiting: its deadline, or earlier when somebody aborts it.

Speculation counts of attempts that did not live to report them, and of all attempts together.

One request from dispatch to its end: attempts at verifiers, joined into one stream without a seam.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar

import structlog

from gateway.planning import Plan
from gateway.requests import Delta, Ending, Seen, Timing, Usage
from gateway.router import Outcome, Upstream, Upstreams
from gateway.session_store import Entry, Ledger, Run, StreamInterrupted, finish_to_field
from gateway.tokenizer import Output, Span
from gateway.watching import Told
from rootward.core.requests import (
    Committed,
    Finish,
    FinishReason,
    Prefilled,
    SpeculationStats,
    TokenLogprob,
    VerifierRequest,
)
from rootward.errors import DeadlineExceeded, Overloaded, ServiceError, Unavailable

T = TypeVar("T")


class Aborted(Exception):
    """The request was aborted while it waited."""


class Cutoff:
    """One per request. `deadline` is in seconds of the loop's clock; None = never."""

    def __init__(self, deadline: float | None):
        self.deadline = deadline
        self.aborted = False
        self.error: ServiceError | None = None  # what the client is told; None = a normal end with reason ABORTED
        self._timer: asyncio.Timeout | None = None

    def abort(self, error: ServiceError | None = None) -> None:
        """May be called from another task at any time. The first call counts."""
        if self.aborted:
            return
        self.aborted, self.error = True, error
        if self._timer is not None:
            self._timer.reschedule(asyncio.get_running_loop().time())

    async def wait(self, work: Coroutine[Any, Any, T], phase: str) -> T:
        """The result of `work`. Raises Aborted, or DeadlineExceeded naming the phase."""
        if self.aborted:
            work.close()
            raise Aborted
        try:
            async with asyncio.timeout_at(self.deadline) as self._timer:
                return await work
        except TimeoutError:
            if self.aborted:
                raise Aborted from None
            message = f"the deadline of the request passed (phase: {phase})"
            raise DeadlineExceeded(message, metadata={"phase": phase}) from None
        finally:
            self._timer = None


def derived(accepted: Sequence[bool]) -> SpeculationStats:
    """Counts as far as committed tokens tell: every round ends with its bonus token.

    A round without accepted tokens counts as plain, though a tree may have been verified; nodes verified are unknown, so
    only the accepted ones are counted.
    """
    lengths, length = [], 0
    for flag in accepted:
        if flag:
            length += 1
        else:
            lengths.append(length)
            length = 0
    if length:  # cut inside a round
        lengths.append(length)
    histogram = [lengths.count(n) for n in range(max(lengths, default=-1) + 1)]
    num_tree = sum(n > 0 for n in lengths)
    total = sum(lengths)
    return SpeculationStats(num_tree, len(lengths) - num_tree, total, total, tuple(histogram))


def predicted(prediction: Sequence[int], output: Sequence[int]) -> tuple[int, int] | None:
    """(tokens of the prediction that the output has, the others), wherever they stand; None without a prediction."""
    if not prediction:
        return None
    both = (Counter(prediction) & Counter(output)).total()
    return both, len(prediction) - both


def joined(first: SpeculationStats, second: SpeculationStats) -> SpeculationStats:
    """Both together; names are those of the second."""
    pairs = zip_longest(first.acceptance_histogram, second.acceptance_histogram, fillvalue=0)
    return SpeculationStats(
        first.num_spec_steps + second.num_spec_steps,
        first.num_plain_steps + second.num_plain_steps,
        first.num_draft_tokens + second.num_draft_tokens,
        first.num_accepted_draft_tokens + second.num_accepted_draft_tokens,
        tuple(a + b for a, b in pairs),
        first.num_drafter_misses + second.num_drafter_misses,
        second.drafter,
        second.verification,
        second.seed,
    )


log = structlog.get_logger()

MAX_FRUITLESS = 3  # attempts in a row that add no token before the request fails


class Generation:
    """Iterate `deltas` once. `arrived` and all other times are seconds of the loop's clock.

    An entry that has tokens already is one that is resumed: they come first, and `ended` says how it ended if it has.
    """

    def __init__(
        self,
        plan: Plan,
        entry: Entry,
        output: Output,
        cutoff: Cutoff,
        *,
        upstreams: Upstreams,
        ledger: Ledger,
        arrived: float,
        held: dict[str, int] | None = None,
        ended: Finish | None = None,
        on_redispatch: Callable[[], None] = lambda: None,
        on_routed: Callable[[Outcome], None] = lambda outcome: None,
        told: Told | None = None,
        redispatch_wait_s: float = 10.0,
    ):
        self._plan, self._entry, self._output, self._cutoff = plan, entry, output, cutoff
        self._upstreams, self._ledger = upstreams, ledger
        self._held, self._on_redispatch, self._on_routed = held or {}, on_redispatch, on_routed
        self._ended, self._told = ended, told
        self._redispatch_wait_s = redispatch_wait_s
        self._now = asyncio.get_running_loop().time
        self._arrived, self._started = arrived, self._now()
        self._first_at: float | None = None
        self._flags: list[bool] = []  # accepted or bonus, of the running attempt
        self._lost_stats = SpeculationStats()  # of the attempts before it
        self._heard, self._prefilled = False, Prefilled()  # of the first attempt
        self._hidden: Span | None = None  # the last token, when it is one that ends the text and is not shown
        self._num_sent = 0
        self._failed: set[str] = set()
        self._fruitless = 0

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Closing it cancels the verifier's stream. The last delta has an ending."""
        if self._entry.tokens or self._ended:
            delta = self._resumed()
            yield delta
            if delta.ending:
                return
        while (reason := self._over()) is None:
            try:
                upstream = await self._cutoff.wait(self._choose(), "dispatch")
            except Aborted:
                continue
            try:
                async with aclosing(self._attempt(upstream)) as runs:
                    async for run in runs:
                        delta = self._take(run)
                        if delta.spans or delta.ending or delta.rounds:
                            yield delta
                        if delta.ending:
                            return
            except (Unavailable, Overloaded) as error:
                await self._recover(upstream, error)
        yield self._last(Finish(reason))

    def _over(self) -> FinishReason | None:
        """Whether it is over though no verifier said so: aborted, or the verifier was lost with the last token out."""
        if self._cutoff.aborted:
            if self._cutoff.error is not None:
                raise self._cutoff.error
            return FinishReason.ABORTED
        if self._hidden is not None:
            return FinishReason.STOP
        full = len(self._entry.tokens) >= self._plan.first.stopping.max_tokens
        return FinishReason.LENGTH if full else None

    async def _choose(self) -> Upstream:
        request = self._plan.request
        key = request.session_id or request.request_id
        await self._upstreams.wait_ready(self._patience())
        choice = self._upstreams.choose(key, held=self._held, avoid=self._failed)
        if choice is None:
            reason = self._upstreams.mismatch or "none answers, or all are draining"
            raise self._interrupted(f"no verifier is ready ({reason})")
        self._on_routed(choice.outcome)
        self._ledger.note(self._entry, verifier=choice.name)
        self._ledger.computed(self._plan.first, (), choice.name)
        if self._told is not None:
            self._told.sent(choice.name, self._entry.epoch)
        return self._upstreams.get(choice.name)

    async def _attempt(self, upstream: Upstream) -> AsyncGenerator[Committed, None]:
        """Runs of one verifier, until aborted or the deadline. Unavailable when it ends without a finish."""
        with upstream.busy():
            async with aclosing(upstream.verifier.generate(self._request())) as stream:
                while (run := await self._next(stream)) is not None:
                    yield run
        if not self._cutoff.aborted:
            raise Unavailable("the verifier ended its stream without a finish")

    async def _next(self, stream: AsyncIterator[Committed]) -> Committed | None:
        """The next run; None at the end of the stream and when aborted."""
        try:
            return await self._cutoff.wait(_next_or_none(stream), "generate")
        except Aborted:
            return None
        except DeadlineExceeded as error:  # who asks again would pay for these tokens twice
            error.metadata["emitted"] = str(len(self._entry.tokens))
            raise

    def _request(self) -> VerifierRequest:
        deadline = self._cutoff.deadline
        left = None if deadline is None else max(0.001, deadline - self._now())
        entry = self._entry
        return replace(self._plan.first, committed=tuple(entry.tokens), epoch=entry.epoch, deadline_s=left)

    def _take(self, run: Committed) -> Delta:
        """Tokens of this epoch that are new; everything else is dropped."""
        known = len(self._entry.tokens)
        if run.epoch != self._entry.epoch:
            return self._delta([])
        if run.offset > known:
            raise Unavailable(f"the verifier skipped output positions {known} to {run.offset}")
        self._read_prompt(run)
        new = Run(run.tokens, run.accepted, self._logprobs(run)).since(known - run.offset)
        self._note(new)
        rounds = (Seen(run.tree, run.tokens),) if self._plan.first.trees and run.tokens else ()
        return self._shown(new, run.finish, rounds)

    def _resumed(self) -> Delta:
        """What was committed before this gateway took over. The whole of it, whatever the client has received."""
        self._first_at = self._now()
        self._flags += self._entry.accepted
        return self._shown(self._entry.output(), self._ended)

    def _shown(self, run: Run, finish: Finish | None, rounds: tuple[Seen, ...] = ()) -> Delta:
        """Text and tokens that may leave now."""
        tokens, flags, logprobs = list(run.tokens), list(run.accepted), list(run.logprobs)
        if tokens and tokens[-1] in self._plan.stop_ids:
            self._hidden = Span(tokens.pop(), "", flags.pop(), logprobs.pop() if logprobs else None)
        spans = self._output.push(tokens, flags, logprobs)
        if finish is None and self._output.stop is None:
            return self._delta(spans, rounds=rounds)
        return self._last(finish, spans, rounds)

    def _read_prompt(self, run: Committed) -> None:
        """What the first attempt told of the prompt counts; to later ones it may be cached."""
        if self._heard:
            return
        first, prefilled = self._plan.first, run.prefilled or Prefilled()
        told = len(prefilled.logprobs)
        if first.prompt_logprobs is not None and told != len(first.prompt) - 1:
            raise Unavailable(f"the verifier sent {told} logprobs for a prompt of {len(first.prompt)} tokens")
        self._heard, self._prefilled = True, prefilled

    def _logprobs(self, run: Committed) -> tuple[TokenLogprob, ...]:
        """One per token where the client asked for them."""
        if self._plan.first.logprobs is not None and len(run.logprobs) != len(run.tokens):
            raise Unavailable(f"the verifier sent {len(run.logprobs)} logprobs for {len(run.tokens)} tokens")
        return run.logprobs

    def _note(self, run: Run) -> None:
        if run:
            if self._told is not None:
                self._told.round(len(self._entry.tokens), run.accepted)
            self._ledger.extend(self._entry, run)
            self._flags += run.accepted
            self._first_at = self._first_at or self._now()
            self._fruitless = 0

    def _delta(self, spans: list[Span], ending: Ending | None = None, rounds: tuple[Seen, ...] = ()) -> Delta:
        offset = self._num_sent
        self._num_sent += len(spans)
        name, prompt, told = self._plan.request.request_id, self._plan.first.prompt, self._prefilled.logprobs
        return Delta(name, offset, tuple(spans), ending, prompt=prompt, prompt_logprobs=told, rounds=rounds)

    def _last(self, finish: Finish | None, spans: list[Span] | None = None, rounds: tuple[Seen, ...] = ()) -> Delta:
        """The closing delta. `finish` is the verifier's; None when a stop string ended the text before it did."""
        spans = [*(spans or []), *self._output.finish(self._hidden)]
        stop_string = self._output.stop
        hidden = self._hidden.token if self._hidden and stop_string is None else None
        request = self._plan.request
        named = hidden is not None and hidden in request.stop_token_ids
        ending = Ending(
            FinishReason.STOP if finish is None or stop_string is not None else finish.reason,
            self._usage(self._num_sent + len(spans)),
            self._stats(finish),
            self._timing(),
            eos_token_id=None if named else hidden,
            stop_token_id=hidden if named else None,
            stop_string=stop_string,
            warnings=self._plan.warnings,
        )
        if (verifier := self._entry.fields.get("verifier")) is not None:
            self._ledger.computed(self._plan.first, self._entry.tokens, verifier, request.session_id)
        self._ledger.note(self._entry, finish=finish_to_field(Finish(ending.reason, None, ending.stats)))
        return self._delta(spans, ending, rounds)

    def _usage(self, num_output: int) -> Usage:
        first = self._plan.first
        shown = self._entry.tokens[:num_output]
        return Usage(len(first.prompt), num_output, self._prefilled.num_cached, predicted(first.prediction, shown))

    def _stats(self, finish: Finish | None) -> SpeculationStats:
        reported = finish is not None and finish.stats != SpeculationStats()
        last = finish.stats if finish is not None and reported else derived(self._flags)
        return replace(joined(self._lost_stats, last), seed=self._plan.first.seed)

    def _timing(self) -> Timing:
        now, since = self._now(), self._arrived
        first = self._first_at or now
        return Timing(*(1000 * s for s in (self._started - since, first - since, now - first, now - since)))

    async def _recover(self, upstream: Upstream, error: Unavailable | Overloaded) -> None:
        """After a lost attempt: a new epoch, so that nothing of the old one counts, and a verifier that answers."""
        self._lost_stats = joined(self._lost_stats, derived(self._flags))
        self._flags = []
        self._failed.add(upstream.name)
        self._fruitless += 1
        others = any(u.ready and u.name not in self._failed for u in self._upstreams)
        full = isinstance(error, Overloaded)
        if self._fruitless > MAX_FRUITLESS or (full and not others):
            raise self._interrupted(str(error)) if self._num_sent else error
        if not full:
            self._upstreams.lost(upstream.name)
        log.warning("redispatch", request_id=self._plan.request.request_id, verifier=upstream.name, error=str(error))
        self._on_redispatch()
        await self._ledger.next_epoch(self._entry)

    def _patience(self) -> float:
        """Before the first token a client had better try again itself, and soon."""
        wait = self._redispatch_wait_s if self._entry.tokens else self._redispatch_wait_s / 10
        deadline = self._cutoff.deadline
        return wait if deadline is None else min(wait, max(0.0, deadline - self._now()))

    def _interrupted(self, cause: str) -> Unavailable:
        if not self._num_sent:
            return Unavailable(cause, retry_after_s=1.0)
        metadata = {"emitted": str(self._num_sent)}
        return StreamInterrupted(f"the stream broke after {self._num_sent} tokens: {cause}", metadata=metadata)


async def _next_or_none(stream: AsyncIterator[Committed]) -> Committed | None:
    return await anext(stream, None)
