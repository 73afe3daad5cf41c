"""One request from dispatch to its end: attempts at verifiers, joined into one stream.

A verifier that dies is replaced: a new epoch makes late results of the lost attempt stale, and the next verifier continues after the
committed tokens. A request whose verifier died before the first token is tried once more, one such request at a time; if a verifier dies
again, the request is refused from then on (`Ledger.refuse_poison`), because it may be the cause.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from gateway.detokenizer import Output, Span, text_of
from gateway.ledger import Entry, Ledger
from gateway.metrics import Metrics
from gateway.planning import Plan
from gateway.requests import Delta, Ending
from gateway.resuming import FINISH, StreamInterrupted
from gateway.router import PrefixKeys, Stream, Upstream, Upstreams, choose
from gateway.session_store import Run
from gateway.watching import WatchedRequest
from rootward.client.types import Round, Timing, Usage
from rootward.core.requests import (
    Committed,
    Finish,
    FinishReason,
    Prefilled,
    SpeculationStats,
)
from rootward.errors import DeadlineExceeded, Overloaded, ServiceError, StaleEpoch, Unavailable

log = structlog.get_logger()

MAX_FRUITLESS = 3  # attempts in a row that add no token before the request fails
REFUSED_PAUSE_S = 1.0  # before a full verifier is asked again that does not say when it may have room
REPLAYED_TOKENS = 512  # of a resumed request that are written at a time: each takes tens of microseconds
MAX_DEATHS = 2  # of verifiers before the first token of a request

T = TypeVar("T")


class Aborted(Exception):
    """The request was aborted while it waited."""


class Cutoff:
    """Ends the waiting of a request: at its deadline, in seconds of the loop's clock, or by an abort before it."""

    def __init__(self, deadline: float):
        self.deadline = deadline
        self.aborted = False
        self.error: ServiceError | None = None  # of an aborted request; None = it ends with reason ABORTED
        self._lost: ServiceError | None = None
        self._timer: asyncio.Timeout | None = None

    def abort(self, error: ServiceError | None = None) -> None:
        """May be called from another task at any time. The first call counts."""
        if self.aborted:
            return
        self.aborted, self.error = True, error
        if self._timer is not None and not self._timer.expired():  # then the work is being cancelled already
            self._timer.reschedule(asyncio.get_running_loop().time())

    def lose(self, error: ServiceError) -> None:
        """End the present wait with this error, because its verifier is lost. May be called from another task at any time."""
        if self._timer is not None and not self._timer.expired() and not self.aborted:
            self._lost = error
            self._timer.reschedule(asyncio.get_running_loop().time())

    async def wait(self, work: Coroutine[Any, Any, T], phase: str) -> T:
        """The result of `work`. Raises Aborted, the error of `lose`, or DeadlineExceeded naming the phase."""
        if self.aborted:
            work.close()
            raise Aborted
        try:
            async with asyncio.timeout_at(self.deadline) as self._timer:
                return await work
        except TimeoutError:
            if self.aborted:
                raise Aborted from None
            if self._lost is not None:
                raise self._lost from None
            message = f"the deadline of the request passed (phase: {phase})"
            raise DeadlineExceeded(message, metadata={"phase": phase}) from None
        finally:
            self._timer = self._lost = None


class Generation:
    """One request on this gateway. Iterate `deltas` once. All times are seconds of the loop's clock.

    An entry that has tokens is resumed: the first deltas have these tokens. ended: how the request had finished, if it had. keys, held: of
    the prefixes of the prompt; tokens of it whose KV each verifier is thought to hold, by name.
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
        metrics: Metrics,
        watched: WatchedRequest,
        keys: PrefixKeys,
        held: dict[str, int],
        ended: Finish | None,
        redispatch_wait_s: float,
    ):
        self._plan, self._entry, self._output, self._cutoff = plan, entry, output, cutoff
        self._upstreams, self._ledger, self._metrics = upstreams, ledger, metrics
        self._watched, self._keys, self._held, self._ended = watched, keys, held, ended
        self._redispatch_wait_s = redispatch_wait_s
        self._now = asyncio.get_running_loop().time
        self._started = self._now()
        self._first_at: float | None = None
        self._in_one_attempt = True  # until now, so that the counts of one verifier cover all of it
        # Of the first attempt: later ones may find more of the prompt cached.
        self._prefilled: Prefilled | None = None
        self._hidden: Span | None = None  # the last token, if it ends the text and is not shown
        self._num_sent = self._num_characters = 0
        self._process = ""  # of the verifier that was chosen last
        self._failed: set[str] = set()
        self._fruitless = 0  # attempts in a row without a token
        self._full_since: float | None = None  # first time since the last token at which all verifiers were full
        self._deaths = 0  # of verifiers before the first token

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Closing it cancels the verifier's stream. The last delta has an ending."""
        if self._entry.tokens or self._ended:
            # All tokens that were committed before this gateway took over, whether or not the client has received them.
            self._first_at = self._now()
            self._in_one_attempt = self._ended is not None
            num_known = len(self._entry.tokens)
            for begin in range(0, max(1, num_known), REPLAYED_TOKENS):
                is_last = begin + REPLAYED_TOKENS >= num_known
                delta = self._shown(self._entry.output(begin, REPLAYED_TOKENS), self._ended if is_last else None)
                yield delta
                if delta.ending:
                    return
                await asyncio.sleep(0)  # other streams run meanwhile
        await self._ledger.refuse_poison(self._plan.first)
        try:
            while (reason := self._over()) is None:
                async with AsyncExitStack() as exclusive:
                    if self._deaths:
                        await self._cutoff.wait(exclusive.enter_async_context(self._ledger.suspicion()), "dispatch")
                    upstream = await self._cutoff.wait(self._choose(), "dispatch")
                    incarnation = upstream.incarnation
                    try:
                        async with aclosing(self._attempt(upstream)) as runs:
                            async for run in runs:
                                delta = self._take(run)
                                if self._entry.tokens:
                                    await exclusive.aclose()
                                if delta.spans or delta.ending or delta.rounds:
                                    yield delta
                                if delta.ending:
                                    return
                    except (Unavailable, Overloaded) as error:
                        await self._recover(upstream, incarnation, error)
                    except StaleEpoch as error:
                        await self._raise_epoch(error)
        except Aborted:
            if self._cutoff.error is not None:
                raise self._cutoff.error from None
            reason = FinishReason.ABORTED
        yield self._last(Finish(reason))

    def _over(self) -> FinishReason | None:
        """Why the output is complete although its verifier was lost before it reported the finish; None: it is not. Raises Aborted."""
        if self._cutoff.aborted:
            raise Aborted
        if self._hidden is not None:
            return FinishReason.STOP
        full = len(self._entry.tokens) >= self._plan.first.stopping.max_tokens
        return FinishReason.LENGTH if full else None

    async def _choose(self) -> Upstream:
        # The wait is short before the first token, when the client can still send the request to another gateway.
        wait_s = self._redispatch_wait_s if self._entry.tokens else self._redispatch_wait_s / 10
        await self._upstreams.wait_ready(min(wait_s, max(0.0, self._cutoff.deadline - self._now())))
        key = self._plan.request.session_id or self._plan.request.request_id
        choice = choose(self._upstreams, key, held=self._held, avoid=self._failed, now=self._now())
        if choice is None:
            reason = self._upstreams.mismatch or "none answers, or all are draining"
            raise self._interrupted(f"no verifier is ready ({reason})")
        self._metrics.routed.labels(choice.outcome.value).inc()
        upstream = choice.upstream
        self._ledger.note(self._entry, verifier=upstream.name)
        self._process = upstream.holder
        self._ledger.computed(self._keys, (), self._process)
        self._watched.sent(upstream.name, self._entry.epoch)
        return upstream

    async def _attempt(self, upstream: Upstream) -> AsyncGenerator[Committed, None]:
        """Runs of one verifier. Raises Aborted, DeadlineExceeded, and Unavailable when it ends without a finish."""
        left_s = max(0.001, self._cutoff.deadline - self._now())
        committed, epoch = tuple(self._entry.tokens), self._entry.epoch
        request = replace(self._plan.first, committed=committed, epoch=epoch, deadline_s=left_s)
        stream = Stream(self._cutoff.lose, heard_at=self._now())
        upstream.num_in_flight += 1
        upstream.streams.add(stream)
        try:
            async with aclosing(upstream.verifier.generate(request)) as runs:
                while (run := await self._cutoff.wait(_next_or_none(runs), "generate")) is not None:
                    stream.heard_at = self._now()
                    yield run
        except DeadlineExceeded as error:  # a client that asks again would pay for these tokens twice
            error.metadata["emitted"] = str(len(self._entry.tokens))
            raise
        finally:
            upstream.num_in_flight -= 1
            upstream.streams.remove(stream)
        raise Unavailable("the verifier ended its stream without a finish")

    def _take(self, run: Committed) -> Delta:
        """Take the new tokens of a run of this epoch; others are dropped. Unavailable for a run that does not continue the output."""
        first, known = self._plan.first, len(self._entry.tokens)
        if run.epoch != self._entry.epoch:
            return self._delta([])
        if run.offset > known:
            raise Unavailable(f"the verifier skipped output positions {known} to {run.offset}")
        if first.logprobs is not None and len(run.logprobs) != len(run.tokens):
            raise Unavailable(f"the verifier sent {len(run.logprobs)} logprobs for {len(run.tokens)} tokens")
        if self._prefilled is None:
            prefilled = run.prefilled or Prefilled()
            num_logprobs, num_prompt = len(prefilled.logprobs), len(first.prompt)
            if first.prompt_logprobs is not None and num_logprobs != num_prompt - 1:
                raise Unavailable(f"the verifier sent {num_logprobs} logprobs for a prompt of {num_prompt} tokens")
            self._prefilled = prefilled
        new = Run(run.tokens, run.accepted, run.logprobs).since(known - run.offset)
        if new:
            self._watched.round(known, new.accepted)
            self._ledger.extend(self._entry, new)
            self._first_at = self._first_at or self._now()
            self._fruitless, self._full_since = 0, None
        rounds: tuple[Round, ...] = ()
        if first.trees and run.tokens:
            tree = (run.tree.tokens, run.tree.parents, run.tree.path) if run.tree else ()
            rounds = (Round(run.tokens, *tree),)
        return self._shown(new, run.finish, rounds)

    def _shown(self, run: Run, finish: Finish | None, rounds: tuple[Round, ...] = ()) -> Delta:
        """The delta of the text and tokens that are final after this run."""
        tokens, flags, logprobs = list(run.tokens), list(run.accepted), list(run.logprobs)
        if tokens and tokens[-1] in self._plan.stop_ids:
            self._hidden = Span(tokens.pop(), "", flags.pop(), logprobs.pop() if logprobs else None)
        spans = self._output.push(tokens, flags, logprobs)
        if finish is None and self._output.stop is None:
            return self._delta(spans, rounds=rounds)
        return self._last(finish, spans, rounds)

    def _delta(self, spans: list[Span], ending: Ending | None = None, rounds: tuple[Round, ...] = ()) -> Delta:
        offset, text_offset = self._num_sent, self._num_characters
        self._num_sent += len(spans)
        self._num_characters += len(text_of(spans))
        return Delta(
            self._plan.request.request_id,
            offset,
            tuple(spans),
            ending,
            prompt=self._plan.first.prompt,
            prompt_logprobs=self._prefilled.logprobs if self._prefilled else (),
            rounds=rounds,
            text_offset=text_offset,
        )

    def _last(self, finish: Finish | None, spans: list[Span] | None = None, rounds: tuple[Round, ...] = ()) -> Delta:
        """The closing delta. `finish` is the verifier's; None when a stop string ended the text before it did."""
        spans = [*(spans or []), *self._output.finish(self._hidden)]
        first, entry, stop_string = self._plan.first, self._entry, self._output.stop
        reason = FinishReason.STOP if finish is None or stop_string is not None else finish.reason
        num_output = self._num_sent + len(spans)
        cached = self._prefilled.num_cached if self._prefilled else 0
        predicted = prediction_counts(first.prediction, entry.tokens[:num_output])
        stats = finish.stats if finish is not None else SpeculationStats()
        if not self._in_one_attempt or stats == SpeculationStats():
            stats = counted(entry.accepted, stats)
        now, arrived = self._now(), self._watched.arrived
        first_at = self._first_at or now
        hidden = self._hidden.token if self._hidden and stop_string is None else None
        is_client_stop = hidden is not None and hidden in self._plan.request.stop_token_ids
        ending = Ending(
            reason,
            Usage(len(first.prompt), num_output, cached, *predicted),
            replace(stats, seed=first.seed),
            Timing(
                queue_ms=1000 * (self._started - arrived),
                ttft_ms=1000 * (first_at - arrived),
                decode_ms=1000 * (now - first_at),
                total_ms=1000 * (now - arrived),
            ),
            eos_token_id=None if is_client_stop else hidden,
            stop_token_id=hidden if is_client_stop else None,
            stop_string=stop_string,
            warnings=self._plan.warnings,
        )
        if self._process:
            self._ledger.computed(self._keys, entry.tokens, self._process)
        self._ledger.note(entry, finish=FINISH.dump_json(Finish(reason, None, ending.stats)).decode())
        return self._delta(spans, ending, rounds)

    async def _recover(self, upstream: Upstream, incarnation: int, error: Unavailable | Overloaded) -> None:
        """Prepare the next attempt after a lost one: a new epoch, and another verifier."""
        self._in_one_attempt = False
        self._failed.add(upstream.name)
        others = any(u.ready and u.name not in self._failed for u in self._upstreams)
        full = isinstance(error, Overloaded)
        if full and not others:
            await self._wait_for_room(error)
        elif not (full and self._entry.tokens):  # a running stream asks every verifier before it waits
            self._fruitless += 1
        if not full:
            await self._count_death(upstream, incarnation, error)
        if self._fruitless > MAX_FRUITLESS:
            raise self._interrupted(str(error)) if self._num_sent else error
        if not full:
            self._upstreams.lost(upstream)
        log.warning("redispatch", request_id=self._plan.request.request_id, verifier=upstream.name, error=str(error))
        self._metrics.redispatched.inc()
        await self._ledger.next_epoch(self._entry)

    async def _wait_for_room(self, error: Unavailable | Overloaded) -> None:
        """Pause before all verifiers, which are full, are asked again: a running stream has nowhere else to go. The error, if the client
        can still send the request to another gateway, or when there has been no room for `redispatch_wait_s`."""
        now = self._now()
        if self._full_since is None:
            self._full_since = now
        left_s = self._full_since + self._redispatch_wait_s - now
        if not self._entry.tokens or left_s <= 0:
            raise self._interrupted(str(error)) if self._num_sent else error
        pause_s = REFUSED_PAUSE_S if error.retry_after_s is None else error.retry_after_s
        await self._cutoff.wait(asyncio.sleep(min(pause_s, left_s)), "dispatch")

    async def _raise_epoch(self, error: StaleEpoch) -> None:
        """Go on above the epoch that a verifier remembers of an earlier request of this id, of which the store knows nothing any more: its
        record has expired, or was lost with a Redis. StaleEpoch when another gateway drives the request now."""
        self._fruitless += 1
        known = error.metadata.get("epoch", "")
        if not known.isdecimal() or self._fruitless > MAX_FRUITLESS:
            raise error
        await self._ledger.next_epoch(self._entry, above=int(known))

    async def _count_death(self, upstream: Upstream, incarnation: int, error: ServiceError) -> None:
        """PoisonRequest when this was the second verifier that accepted the request and died before its first token."""
        if self._entry.tokens or "failed to connect" in str(error):  # it was gone before it saw the request
            return
        if upstream.info is not None and upstream.info.draining:  # it was told to end
            return
        if not await self._upstreams.has_died(upstream, incarnation):
            return
        self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            await self._ledger.add_poison(self._plan.first)
            self._metrics.poisoned.inc()
            await self._ledger.refuse_poison(self._plan.first)

    def _interrupted(self, cause: str) -> Unavailable:
        if not self._num_sent:
            return Unavailable(cause, retry_after_s=1.0)
        metadata = {"emitted": str(self._num_sent)}
        return StreamInterrupted(f"the stream broke after {self._num_sent} tokens: {cause}", metadata=metadata)


async def _next_or_none(stream: AsyncIterator[Committed]) -> Committed | None:
    return await anext(stream, None)


def counted(accepted: Sequence[bool], last: SpeculationStats) -> SpeculationStats:
    """Counts of a generation of several attempts, from its committed tokens: every round ends with its bonus token. `last`: statistics of
    the last verifier, for its names.

    A round without accepted tokens counts as plain, though a tree may have been verified. The number of verified nodes is unknown, so
    only the accepted ones are counted.
    """
    stats, length = SpeculationStats(drafter=last.drafter, verification=last.verification), 0
    for flag in accepted:
        length += flag
        if not flag:
            stats, length = stats.after_round(length, length), 0
    return stats.after_round(length, length) if length else stats  # cut inside a round


def prediction_counts(prediction: Sequence[int], output: Sequence[int]) -> tuple[int | None, int | None]:
    """(tokens of the prediction that the output has, at any position, and the others); None without a prediction."""
    if not prediction:
        return None, None
    both = (Counter(prediction) & Counter(output)).total()
    return both, len(prediction) - both
