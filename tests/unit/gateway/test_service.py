"""The gateway service around an in-test verifier: no token lost or repeated whatever breaks, everything given back."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest
from support.records import record_of
from unit.gateway.service_for_tests import IDS, TEXT, WAIT_S, at_rest, collect, ids_of, serving, until
from unit.gateway.tokenizers_for_tests import byte_level
from unit.gateway.verifier_for_tests import END_ID, SpellingVerifier, older_epoch

from gateway import router
from gateway.detokenizer import text_of
from gateway.http_errors import http_error
from gateway.requests import GenerateRequest
from gateway.session_store import MemoryStore, StoreUnavailable
from rootward.core.requests import FinishReason
from rootward.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    Overloaded,
    StaleEpoch,
    Unavailable,
)


async def test_deltas_are_together_the_text_with_ids_flags_and_offsets():
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        deltas = [d async for d in service.generate(GenerateRequest("a", seed=5))]
        assert "".join(text_of(d.spans) for d in deltas) == TEXT
        assert tuple(t for d in deltas for t in ids_of(d)) == IDS
        offset = 0
        for delta in deltas:
            assert delta.offset == offset
            offset += len(delta.spans)
        ending = deltas[-1].ending
        assert (ending.reason, ending.eos_token_id, ending.stop_string) == (FinishReason.STOP, END_ID, None)
        assert (ending.usage.prompt_tokens, ending.usage.completion_tokens) == (1, len(IDS))
        assert (ending.stats.drafter, ending.stats.seed) == ("draft-1", 5)
        assert ending.timing.total_ms >= ending.timing.ttft_ms >= ending.timing.queue_ms >= 0
        assert sum(span.accepted for d in deltas for span in d.spans) == sum(i % 3 != 2 for i in range(len(IDS))) - (
            len(IDS) % 3 > 0
        )
        await at_rest(service, verifier)


@pytest.mark.parametrize("deaths", [[0], [2], [3], [0, 3], [3, 0, 0], [2, 0, 2, 0, 2, 0]])
async def test_a_lost_verifier_loses_and_repeats_no_token(deaths):
    """Two verifiers that die in turn and come back: the text is the same."""
    plan = list(deaths)
    verifiers = []

    def die_after(request):
        for other in verifiers:
            other.up = True
        return plan.pop(0) if plan else None

    verifiers += [SpellingVerifier(die_after=die_after, run=2) for _ in range(2)]
    async with serving(*verifiers) as service:
        deltas = [d async for d in service.generate(GenerateRequest("a"))]
        assert tuple(t for d in deltas for t in ids_of(d)) == IDS
        assert "".join(text_of(d.spans) for d in deltas) == TEXT
        assert deltas[-1].ending.usage.completion_tokens == len(IDS)
        requests = sorted((r for v in verifiers for r in v.requests), key=lambda r: r.epoch)
        assert [r.epoch for r in requests] == list(range(1, len(deaths) + 2))
        assert len({r.seed for r in requests}) == 1
        await at_rest(service, *verifiers)


async def test_one_verifier_that_restarts_is_waited_for():
    dying = SpellingVerifier(die_after=lambda r: 5 if r.epoch == 1 else None)

    async def restart():
        await until(lambda: not dying.up)
        await asyncio.sleep(0.2)
        dying.up = True

    async with serving(dying) as service, asyncio.TaskGroup() as group:
        group.create_task(restart())
        generated = await collect(service, GenerateRequest("a"))
        assert generated.text == TEXT
        assert (
            generated.ending.stats.num_accepted_draft_tokens == 2 + 4
        )  # as the committed tokens tell: the end token is not among them


class Hanging(SpellingVerifier):
    """Answers nothing from its second run on, until it may go on."""

    def __init__(self, **options):
        super().__init__(run=2, **options)
        self.hangs, self.go_on, self.num_polls = False, asyncio.Event(), 0

    async def get_info(self):
        self.num_polls += 1
        if self.hangs:
            await self.go_on.wait()
        return await super().get_info()

    async def _runs(self, request):
        num_runs = 0
        async for run in super()._runs(request):
            yield run
            num_runs += 1
            if num_runs == 2:
                self.hangs = True
                await self.go_on.wait()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(router, "POLL_TIMEOUT_S", 0.02)
    monkeypatch.setattr(router, "SILENT_S", 0.05)


async def test_a_verifier_that_hangs_loses_its_streams(impatient):
    hanging, other = Hanging(), SpellingVerifier(up=False)
    async with serving(hanging, other) as service, asyncio.timeout(WAIT_S):
        running = asyncio.create_task(collect(service, GenerateRequest("a")))
        await until(lambda: hanging.hangs)
        other.up = True
        assert (await running).text == TEXT
        assert [r.epoch for r in (*hanging.requests, *other.requests)] == [1, 2]
        assert other.requests[0].committed == IDS[:4]
        hanging.go_on.set()
        await at_rest(service, hanging, other)


async def test_a_verifier_that_hangs_keeps_its_streams_while_no_other_is_ready(impatient):
    hanging = Hanging()
    async with serving(hanging) as service, asyncio.timeout(WAIT_S):
        running = asyncio.create_task(collect(service, GenerateRequest("a")))
        await until(lambda: hanging.hangs)
        upstream = next(iter(service.upstreams))
        failed_polls = hanging.num_polls + 6
        await until(lambda: hanging.num_polls > failed_polls)
        assert not upstream.ready
        hanging.hangs = False
        hanging.go_on.set()
        assert (await running).text == TEXT
        assert len(hanging.requests) == 1
        await at_rest(service, hanging)


async def test_a_verifier_that_answers_no_polls_but_goes_on_keeps_its_streams(impatient):
    busy, other = SpellingVerifier(run=1, delay_s=0.02), SpellingVerifier(up=False)
    polls = 0

    async def answers_nothing():
        nonlocal polls
        polls += 1
        raise Unavailable("busy")

    async with serving(busy, other) as service, asyncio.timeout(WAIT_S):
        router.SILENT_S = 5.0  # well above the pauses between its tokens
        upstream = next(iter(service.upstreams))
        running = asyncio.create_task(collect(service, GenerateRequest("a")))
        await until(lambda: busy.running)
        busy.get_info, other.up = answers_nothing, True
        await until(lambda: polls > 1)
        upstream.failing_since -= 10  # as if it had been silent for long
        assert (await running).text == TEXT
        assert len(busy.requests) == 1
        await at_rest(service, busy)


async def test_a_verifier_that_hangs_does_not_slow_the_polls_of_others(monkeypatch):
    monkeypatch.setattr(router, "POLL_TIMEOUT_S", 0.02)
    hanging, other = Hanging(), Hanging()
    async with serving(hanging, other) as service:
        hanging.hangs = True
        first = next(iter(service.upstreams))
        await until(lambda: not first.answers)
        monkeypatch.setattr(router, "POLL_TIMEOUT_S", 3600.0)
        num_polls = hanging.num_polls
        await until(lambda: hanging.num_polls > num_polls)
        num_polls = other.num_polls
        await until(lambda: other.num_polls > num_polls + 5)


class Full(SpellingVerifier):
    """Breaks its first stream, then refuses `refusals` attempts."""

    def __init__(self, refusals):
        super().__init__(die_after=lambda r: 5 if r.epoch == 1 else None)
        self.refusals = refusals

    async def generate(self, request):
        if self.epochs and self.refusals:
            self.refusals -= 1
            raise Overloaded("calls are under way, the limit", retry_after_s=0.01)
        async for run in super().generate(request):
            yield run


async def test_a_running_stream_waits_for_room_at_the_only_verifier():
    full = Full(refusals=6)
    async with serving(full) as service, asyncio.TaskGroup() as group:
        group.create_task(revive(full))
        assert (await collect(service, GenerateRequest("a"))).text == TEXT
        await at_rest(service, full)


async def test_a_running_stream_waits_for_room_only_so_long():
    full = Full(refusals=10**6)
    async with serving(full, redispatch_wait_s=1.0) as service, asyncio.TaskGroup() as group:
        group.create_task(revive(full))
        with pytest.raises(Unavailable, match="after 3 tokens: calls are under way"):
            await collect(service, GenerateRequest("a"))
        assert full.refusals < 10**6 - 1
        with pytest.raises(Overloaded):
            await collect(service, GenerateRequest("b"))
        await at_rest(service, full)


@pytest.mark.parametrize("num_full", [3, 5])
async def test_a_running_stream_asks_all_verifiers_before_it_waits_for_room(num_full):
    full = Full(refusals=0)
    others = [Full(refusals=2) for _ in range(num_full)]
    for one in others:
        one.epochs["another request"] = 1  # so that it refuses its first request, too
    async with serving(full, *others) as service:
        busier = list(service.upstreams)[1:]
        for upstream in busier:
            upstream.num_in_flight += 1  # so that the first one is chosen
        assert (await collect(service, GenerateRequest("a"))).text == TEXT
        assert all(one.refusals < 2 for one in others)
        for upstream in busier:
            upstream.num_in_flight -= 1
        await at_rest(service, *others)


async def revive(verifier):
    await until(lambda: not verifier.up)
    verifier.up = True


async def test_no_other_verifier_is_stream_interrupted_after_tokens_and_unavailable_before():
    dying = SpellingVerifier(die_after=lambda r: 5)
    async with serving(dying, redispatch_wait_s=0.1) as service:
        with pytest.raises(Unavailable, match="after 3 tokens: no verifier is ready") as caught:
            await collect(service, GenerateRequest("a"))
        assert (caught.value.reason, caught.value.metadata["emitted"]) == ("STREAM_INTERRUPTED", "3")
        with pytest.raises(Unavailable, match="no verifier is ready") as caught:
            await collect(service, GenerateRequest("a"))
        assert caught.value.reason == "UNAVAILABLE"
        assert caught.value.retry_after_s
        await at_rest(service, dying)


async def test_a_verifier_lost_with_the_last_token_out_is_not_asked_again():
    def lose_finish(run):
        return [run] if run.finish is None else [replace(run, finish=None)]

    verifier = SpellingVerifier(spoil=lose_finish)
    async with serving(verifier) as service:
        generated = await collect(service, GenerateRequest("a"))
        assert (generated.text, generated.ending.reason, generated.ending.eos_token_id) == (
            TEXT,
            FinishReason.STOP,
            END_ID,
        )
        generated = await collect(service, GenerateRequest("a", max_tokens=6))
        assert (len(generated.spans), generated.ending.reason) == (6, FinishReason.LENGTH)
        assert len(verifier.requests) == 2


@pytest.mark.parametrize("seed", range(20))
async def test_stale_epochs_and_duplicates_are_dropped_and_gaps_lead_to_a_new_attempt(seed):
    rng = random.Random(seed)
    seen = []

    def spoil(run):
        out = [run]
        if seen and rng.random() < 0.5:
            out.insert(0, rng.choice(seen))  # a duplicate
        if rng.random() < 0.5:
            out.insert(0, older_epoch(run))
        if len(run.tokens) > 1 and rng.random() < 0.3:  # overlaps with what was sent
            half = replace(run, tokens=run.tokens[:1], accepted=run.accepted[:1], finish=None)
            out.insert(0, half)
        if rng.random() < 0.1:
            out = []  # a gap, unless it was the last
        seen.append(replace(run, finish=None))
        return out

    verifier = SpellingVerifier(spoil=spoil)
    async with serving(verifier) as service:
        generated = await collect(service, GenerateRequest("a"))
        assert tuple(s.token for s in generated.spans) == IDS


async def test_stop_strings_cut_text_ids_and_usage_and_beat_length():
    verifier = SpellingVerifier(run=4)
    async with serving(verifier) as service:
        generated = await collect(service, GenerateRequest("a", stop=("return",)))
        assert generated.text == "def f(x): "
        ending = generated.ending
        assert (ending.reason, ending.stop_string, ending.eos_token_id) == (FinishReason.STOP, "return", None)
        assert ending.usage.completion_tokens == len(generated.spans)
        assert ending.stats.num_accepted_draft_tokens > 0
        count = len(byte_level().encode("def f(x): return"))
        generated = await collect(service, GenerateRequest("a", stop=("return",), max_tokens=count))
        assert (generated.text, generated.ending.reason) == ("def f(x): ", FinishReason.STOP)
        generated = await collect(service, GenerateRequest("a", max_tokens=count))
        assert (generated.text, generated.ending.reason) == ("def f(x): return", FinishReason.LENGTH)
        await at_rest(service, verifier)


async def test_stop_token_ids_end_it_without_their_text():
    stop_id = byte_level().encode("x")[0]
    verifier = SpellingVerifier(text="ax")
    async with serving(verifier) as service:
        generated = await collect(service, GenerateRequest("a", stop_token_ids=(stop_id,), max_tokens=2))
        assert (generated.text, generated.ending.stop_token_id) == ("a", stop_id)
        assert [s.token for s in generated.spans][-1] == stop_id


async def test_closing_the_stream_frees_everything():
    verifier = SpellingVerifier(delay_s=0.01)
    async with serving(verifier) as service:
        async with aclosing(service.generate(GenerateRequest("a"))) as deltas:
            async for _ in deltas:
                assert verifier.running == 1
                break
        await at_rest(service, verifier)
        task = asyncio.create_task(collect(service, GenerateRequest("a")))
        await until(lambda: verifier.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await at_rest(service, verifier)


async def test_a_request_that_is_aborted_while_it_waits_has_waited_and_has_no_time_to_a_first_token():
    verifier = SpellingVerifier(delay_s=0.2)
    async with serving(verifier, max_num_seqs=1) as service, asyncio.TaskGroup() as group:
        running = group.create_task(collect(service, GenerateRequest("a", request_id="r1")))
        await until(lambda: any(entry.tokens for entry in service._ledger._entries))
        waiting = group.create_task(collect(service, GenerateRequest("a", request_id="r2")))
        await until(lambda: service.admission.num_waiting)
        await asyncio.sleep(0.1)
        service.abort(["r2"])
        timing = (await waiting).ending.timing
        assert timing.queue_ms == timing.total_ms >= 90
        value = service.metrics.registry.get_sample_value
        for name, count in (("e2e_request_latency", 1), ("request_queue_time", 1), ("time_to_first_token", 0)):
            assert value(f"rootward_{name}_seconds_count") == count
        assert value("rootward_request_queue_time_seconds_sum") >= 0.09
        service.abort(["r1"])
        await running
        assert value("rootward_time_to_first_token_seconds_count") == 1
        await at_rest(service, verifier)


async def test_abort_ends_running_and_waiting_requests():
    verifier = SpellingVerifier(delay_s=0.05)
    async with serving(verifier, max_num_seqs=1) as service, asyncio.TaskGroup() as group:
        running = group.create_task(collect(service, GenerateRequest("a", request_id="r1")))
        await until(lambda: any(entry.tokens for entry in service._ledger._entries))
        waiting = group.create_task(collect(service, GenerateRequest("a", request_id="r2")))
        await until(lambda: service.admission.num_waiting)
        assert service.admission.num_waiting == 1
        assert service.abort(["r2"], tenant="another") == []
        assert service.abort(["r2", "unknown"], tenant="") == ["r2"]
        assert (await waiting).ending.reason is FinishReason.ABORTED
        assert service.abort(["r1"]) == ["r1"]
        partial = await running
        assert partial.ending.reason is FinishReason.ABORTED
        assert 0 < len(partial.spans) < len(IDS)
        assert TEXT.startswith(partial.text)
        await at_rest(service, verifier)


async def test_a_deadline_names_its_phase():
    verifier = SpellingVerifier(delay_s=0.1)
    async with serving(verifier, max_num_seqs=1) as service, asyncio.TaskGroup() as group:
        first = group.create_task(collect(service, GenerateRequest("a")))
        await until(lambda: verifier.running)
        with pytest.raises(DeadlineExceeded) as caught:
            await collect(service, GenerateRequest("a", deadline_s=0.05))
        assert caught.value.metadata["phase"] == "queue"
        service.abort(list(service._live))
        await first
        with pytest.raises(DeadlineExceeded) as caught:
            await collect(service, GenerateRequest("a", deadline_s=0.05))
        assert caught.value.metadata["phase"] == "generate"
        await at_rest(service, verifier)


async def test_a_full_queue_refuses_and_running_requests_continue():
    verifier = SpellingVerifier(delay_s=0.02)
    async with serving(verifier, max_num_seqs=1, max_num_queued_reqs=1) as service:
        results = await asyncio.gather(
            *(collect(service, GenerateRequest("a")) for _ in range(4)), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, Overloaded)]
        assert len(refused) == 2
        assert refused[0].retry_after_s
        assert all(r.text == TEXT for r in results if not isinstance(r, Exception))
        await at_rest(service, verifier)


async def test_a_live_id_is_refused_and_an_ended_one_may_be_used_again():
    verifier = SpellingVerifier(delay_s=0.02)
    store = MemoryStore()
    async with serving(verifier, store=store) as service, asyncio.TaskGroup() as group:
        first = group.create_task(collect(service, GenerateRequest("a", request_id="one")))
        await until(lambda: verifier.running)
        with pytest.raises(DuplicateRequest):
            await collect(service, GenerateRequest("a", request_id="one"))
        assert (await first).text == TEXT
        await at_rest(service, verifier)
        assert (await record_of(store, "one")).output.tokens == IDS
        assert (await collect(service, GenerateRequest("a", request_id="one", max_tokens=2))).request_id == "one"
        await at_rest(service, verifier)
        assert (await record_of(store, "one")).output.tokens == IDS[:2]


async def test_an_id_may_be_used_again_before_its_end_is_stored():
    store = MemoryStore()
    async with serving(store=store) as service:
        for most in (3, 2, 1):
            await collect(service, GenerateRequest("a", request_id="one", max_tokens=most))
        await service.drain(5.0)
    assert (await record_of(store, "one")).output.tokens == IDS[:1]


async def test_a_lease_taken_by_another_gateway_ends_the_generation():
    verifier = SpellingVerifier(delay_s=0.02)
    store = MemoryStore()
    async with serving(verifier, store=store, lease_s=0.3) as service:
        running = asyncio.create_task(collect(service, GenerateRequest("a", request_id="one")))
        await until(lambda: verifier.running)
        store._requests["one"].lease_until = 0.0
        await store.begin("one", "another gateway", 5, {})
        with pytest.raises(StaleEpoch):
            await running
        await at_rest(service, verifier)


async def test_a_store_that_dies_stops_no_request():
    class Dying(MemoryStore):
        dead = False

        async def _check(self):
            if self.dead:
                raise StoreUnavailable("gone")

        async def begin(self, *args, **options):
            await self._check()
            return await super().begin(*args, **options)

        async def next_epoch(self, *args):
            await self._check()
            return await super().next_epoch(*args)

        async def write(self, *args):
            await self._check()
            return await super().write(*args)

    store = Dying()
    dying = SpellingVerifier(delay_s=0.01, die_after=lambda r: 5 if r.epoch == 1 else None)
    other = SpellingVerifier(delay_s=0.01)
    async with serving(dying, other, store=store) as service:
        deltas = service.generate(GenerateRequest("a", request_id="one", session_id="s"))
        await anext(deltas)
        store.dead = dying.up = True
        *_, last = [d async for d in deltas]
        assert last.ending.usage.completion_tokens == len(IDS)
        assert (await collect(service, GenerateRequest("a", request_id="two"))).text == TEXT
        store.dead = False
        await at_rest(service, dying, other)
        assert (await record_of(store, "one")).output.tokens == IDS
        assert (await record_of(store, "two")).output.tokens == IDS


async def test_turns_of_a_session_go_to_the_verifier_that_holds_them():
    verifiers = [SpellingVerifier() for _ in range(4)]
    async with serving(*verifiers) as service:
        for _ in range(5):
            await collect(service, GenerateRequest(tuple(range(1, 70)), session_id="talk"))
            # until it is known that its verifier is idle again
            await until(lambda: not any(_busy(u) for u in service.upstreams))
        assert sorted(len(v.requests) for v in verifiers) == [0, 0, 0, 5]
        routed = service.metrics.registry.get_sample_value
        outcomes = ("least_load", "affinity", "fallback")
        counts = [routed("rootward_route_decisions_total", {"outcome": outcome}) for outcome in outcomes]
        assert counts == [1.0, 4.0, None]


def _busy(upstream):
    """As far as the gateway knows: what verifiers say of themselves is as old as the last poll."""
    return upstream.num_in_flight > 0 or upstream.info.num_running > 0


async def test_draining_refuses_new_requests_lets_others_end_and_then_ends_them():
    verifier = SpellingVerifier(text=TEXT * 5, delay_s=0.1)
    async with serving(verifier) as service, asyncio.TaskGroup() as group:
        short = group.create_task(collect(service, GenerateRequest("a", max_tokens=3)))
        stuck = group.create_task(_outcome(service, GenerateRequest("a")))
        await until(lambda: verifier.running == 2)
        assert await service.drain(1.5) == 1
        assert (await short).ending.reason is FinishReason.LENGTH
        assert isinstance(await stuck, Unavailable)
        with pytest.raises(Unavailable, match="draining"):
            await collect(service, GenerateRequest("a"))
        assert not service.ready
        await at_rest(service, verifier)


async def _outcome(service, request):
    try:
        return await collect(service, request)
    except Unavailable as error:
        return error


async def test_a_deadline_error_has_the_number_of_emitted_tokens():
    async with serving(SpellingVerifier(text=TEXT * 5, run=1, delay_s=0.1)) as service:
        with pytest.raises(DeadlineExceeded) as caught:
            await collect(service, GenerateRequest("a", deadline_s=2.0))
        error = http_error(caught.value)
        assert int(caught.value.metadata["emitted"]) > 0
        assert (error.status, error.headers["x-should-retry"]) == (504, "false")


async def test_rounds_are_reported_while_their_text_is_held_back():
    async with serving() as service:
        request = GenerateRequest("a", stop=(f"{TEXT}!",), trees=True)
        deltas = [delta async for delta in service.generate(request)]
        assert tuple(t for d in deltas for r in d.rounds for t in r.token_ids) == IDS
        assert "".join(text_of(d.spans) for d in deltas) == TEXT
