"""Requests taken up again by id and offset: on the same gateway, on another one, while they run and after their end."""

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from support.records import record_of
from unit.gateway.service_for_tests import IDS, TEXT, at_rest, collect, ids_of, serving, stored
from unit.gateway.verifier_for_tests import END_ID, SpellingVerifier

from gateway.detokenizer import Output, text_of
from gateway.requests import GenerateRequest, Resume
from gateway.session_store import MemoryStore, StoreUnavailable
from rootward.core.requests import DraftMode, FinishReason, Rule, Speculation
from rootward.errors import DuplicateRequest, InvalidRequest, StaleEpoch, Unavailable


def ask(offset=None, tokens=(), **more):
    resume = None if offset is None else Resume(offset, tuple(tokens))
    return GenerateRequest("a", request_id="one", resume=resume, **more)


@asynccontextmanager
async def two_gateways(verifier, **options):
    """Two services with one store, as two gateways with one Redis."""
    store = MemoryStore()
    async with AsyncExitStack() as stack:
        yield store, *[await stack.enter_async_context(serving(verifier, store=store, **options)) for _ in range(2)]


async def first_tokens(deltas, count):
    """At least `count` tokens, as a client sees them."""
    ids = []
    async for delta in deltas:
        ids += ids_of(delta)
        if len(ids) >= count:
            return ids
    raise AssertionError("it ended")


async def rest(service, request):
    """(ids, text, ending); offsets must go on from where the request says."""
    ids, text, at = [], "", request.resume.offset
    async for delta in service.generate(request):
        assert delta.offset == at + len(ids)
        ids += ids_of(delta)
        text += text_of(delta.spans)
        ending = delta.ending
    return tuple(ids), text, ending


@pytest.mark.parametrize("tell", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("count", [0, 1, 4, 6])
async def test_another_gateway_continues_where_one_stopped(count, tell):
    verifier = SpellingVerifier(run=2, delay_s=0.005)
    async with two_gateways(verifier) as (_, one, two):
        async with aclosing(one.generate(ask())) as deltas:
            got = await first_tokens(deltas, count) if count else []
        await stored(one)
        ids, text, ending = await rest(two, ask(len(got), got if tell else ()))
        assert (*got, *ids) == IDS
        assert TEXT.endswith(text)
        assert (ending.reason, ending.eos_token_id) == (FinishReason.STOP, END_ID)
        assert ending.usage.completion_tokens == len(IDS)
        assert len({r.seed for r in verifier.requests}) == 1
        assert [r.epoch for r in verifier.requests] == [1, 2] if count else [1]
        await at_rest(one, verifier)
        await at_rest(two, verifier)


async def test_what_runs_elsewhere_is_taken_from_it():
    verifier = SpellingVerifier(run=1, delay_s=0.02)
    async with two_gateways(verifier, lease_s=0.3) as (store, one, two):
        deltas = one.generate(ask())
        got = await first_tokens(deltas, 3)
        ids, _, _ = await rest(two, ask(len(got), got))
        assert (*got, *ids) == IDS
        with pytest.raises(StaleEpoch):
            [_ async for _ in deltas]
        await at_rest(one, verifier)
        await at_rest(two, verifier)
        assert (await record_of(store, "one")).output.tokens == IDS


async def test_what_runs_on_the_same_gateway_gives_way():
    verifier = SpellingVerifier(run=1, delay_s=0.02)
    async with serving(verifier) as service:
        deltas = service.generate(ask())
        got = await first_tokens(deltas, 3)
        old = asyncio.create_task(first_tokens(deltas, 100))
        with pytest.raises(DuplicateRequest, match="running already"):
            await collect(service, ask())
        with pytest.raises(DuplicateRequest, match="asks something else"):
            await rest(service, GenerateRequest("b", request_id="one", resume=Resume(3)))
        with pytest.raises(Unavailable, match="0 are known"):
            await rest(service, ask(3, tenant="another"))
        assert not old.done()
        ids, _, _ = await rest(service, ask(len(got)))
        assert (*got, *ids) == IDS
        with pytest.raises(StaleEpoch):
            await old
        await at_rest(service, verifier)


async def test_an_id_may_be_used_again_when_its_record_has_expired():
    """Verifiers remember its epochs longer."""
    now = 0.0
    store, verifier = MemoryStore(now=lambda: now), SpellingVerifier()
    async with serving(verifier, store=store) as service:
        for _ in range(2):
            assert (await collect(service, ask())).text == TEXT
            await at_rest(service, verifier)
        now += 1000.0
        assert (await collect(service, ask())).text == TEXT
        await at_rest(service, verifier)
    assert [r.epoch for r in verifier.requests] == [1, 2, 1, 3]
    assert verifier.requests[-1].committed == ()


async def test_a_request_that_another_gateway_has_taken_over_takes_no_higher_epoch():
    verifier = SpellingVerifier(run=1, die_after=lambda r: 3 if r.epoch == 1 else None)
    store = MemoryStore()
    async with serving(verifier, store=store, redispatch_wait_s=60) as service:
        deltas = service.generate(ask())
        await first_tokens(deltas, 2)
        verifier.epochs["one"] = 5
        lease, _ = await store.take_over("one", "another gateway", 60, store._requests["one"].fields["digest"])
        with pytest.raises(StaleEpoch):
            [_ async for _ in deltas]
        assert store._requests["one"].epoch == lease.epoch
        await at_rest(service, verifier)


async def test_a_stream_whose_client_does_not_read_gives_way_on_the_same_gateway():
    """The connection of a client that has gone without a word stays open for long, and its stream waits for room in it."""
    verifier = SpellingVerifier(run=1)
    async with serving(verifier) as service:
        deltas = service.generate(ask())
        got = await first_tokens(deltas, 3)
        ids, _, _ = await rest(service, ask(len(got)))
        assert (*got, *ids) == IDS
        with pytest.raises(StaleEpoch):
            [_ async for _ in deltas]
        await at_rest(service, verifier)


async def test_two_clients_that_resume_a_stream_that_nobody_reads_give_way_in_turn():
    verifier = SpellingVerifier(run=1, delay_s=0.01)
    async with serving(verifier) as service:
        deltas = service.generate(ask())
        got = await first_tokens(deltas, 3)
        ends = await asyncio.gather(*(rest(service, ask(len(got))) for _ in range(2)), return_exceptions=True)
        assert sorted(isinstance(end, StaleEpoch) for end in ends) == [False, True]
        assert next((*got, *end[0]) for end in ends if not isinstance(end, StaleEpoch)) == IDS
        await deltas.aclose()
        await at_rest(service, verifier)


@pytest.mark.parametrize("offset", [0, 5, len(IDS)])
async def test_a_finished_request_is_replayed_without_a_verifier(offset):
    verifier = SpellingVerifier()
    async with two_gateways(verifier) as (_, one, two):
        first = await collect(one, ask(seed=3))
        await at_rest(one, verifier)
        verifier.up = False
        ids, text, ending = await rest(two, ask(offset, seed=3))
        assert (ids, ending.reason, ending.stats) == (IDS[offset:], FinishReason.STOP, first.ending.stats)
        assert text == "".join(s.text for s in first.spans[offset:])
        assert len(verifier.requests) == 1
        await at_rest(two, verifier)


@pytest.mark.parametrize(("options", "words"), [({"stop": ("return",)}, "def f(x): "), ({"max_tokens": 4}, None)])
async def test_other_endings_are_replayed_too(options, words):
    async with two_gateways(SpellingVerifier()) as (_, one, two):
        first = await collect(one, ask(**options))
        await at_rest(one)
        _, text, ending = await rest(two, ask(0, **options))
        assert text == first.text
        assert (ending.reason, ending.stop_string) == (first.ending.reason, first.ending.stop_string)
        assert words is None or text == words


async def test_a_gateway_that_died_with_the_last_token_out_is_finished_by_another():
    verifier = SpellingVerifier()
    async with two_gateways(verifier) as (store, one, two):
        await collect(one, ask())
        await stored(one)
        store._requests["one"].fields |= {"state": "running"}  # as if the end had not been written
        ids, _, ending = await rest(two, ask(2))
        assert (ids, ending.reason, ending.eos_token_id) == (IDS[2:], FinishReason.STOP, END_ID)
        assert len(verifier.requests) == 1


async def test_resume_tokens_of_the_client_may_exceed_the_stored_log():
    """The log is behind by what the gateway had not written when it died; or there is none, for Redis died with it."""
    for known in (0, 3):
        verifier, store = SpellingVerifier(), MemoryStore()
        async with serving(verifier, store=store) as service:
            if known:
                await collect(service, ask(max_tokens=200))
                await stored(service)
                kept = store._requests["one"]
                kept.log, kept.fields["state"] = kept.log.__class__(IDS[:known], (True,) * known), "running"
            held = IDS[:7]
            ids, text, _ = await rest(service, ask(7, held, max_tokens=200))
            assert ids == IDS[7:]
            assert TEXT.endswith(text)
            assert verifier.requests[-1].committed == held
            await at_rest(service, verifier)
            assert (await record_of(store, "one")).output.tokens == IDS


async def test_a_record_that_was_lost_does_not_bring_back_epochs_that_verifiers_refuse():
    def die_after(request):
        return 2 if request.epoch == 1 else None

    verifiers = [SpellingVerifier(run=1, die_after=die_after) for _ in range(2)]
    store = MemoryStore()
    async with serving(*verifiers, store=store) as service:
        async with aclosing(service.generate(ask())) as deltas:
            got = await first_tokens(deltas, 5)
        await at_rest(service, *verifiers)
        assert max(r.epoch for v in verifiers for r in v.requests) == 2
        store._requests.clear()
        for verifier in verifiers:
            verifier.up = True
        ids, _, _ = await rest(service, ask(len(got), got))
        assert (*got, *ids) == IDS


class Away(MemoryStore):
    """Answers no call about a request or a ping while it is away."""

    away = True

    async def _check(self):
        if self.away:
            raise StoreUnavailable("away")

    async def ping(self):
        await self._check()
        await super().ping()

    async def begin(self, *args, **options):
        await self._check()
        return await super().begin(*args, **options)

    async def take_over(self, *args):
        await self._check()
        return await super().take_over(*args)

    async def write(self, *args):
        await self._check()
        return await super().write(*args)


async def test_a_client_that_received_nothing_begins_while_the_store_is_away():
    """Its first attempt may have reached no gateway, or a full one."""
    verifier, store = SpellingVerifier(), Away()
    verifier.epochs["one"] = 3  # from attempts of another gateway, which this request must be above
    async with serving(verifier, store=store) as service:
        ids, text, _ = await rest(service, ask(0))
        assert (ids, text) == (IDS, TEXT)
        assert [r.epoch > 3 and not r.committed for r in verifier.requests] == [True]
        for resume in (ask(3), ask(3, IDS[:3])):
            with pytest.raises(Unavailable, match="cannot be resumed while the session store is gone"):
                await rest(service, resume)
        store.away = False
        await at_rest(service, verifier)
        record = await record_of(store, "one")
        assert (record.output.tokens, record.finished) == (IDS, True)
        ids, _, _ = await rest(service, ask(3))
        assert ids == IDS[3:]
        assert len(verifier.requests) == 1


async def test_more_received_than_known_is_repeated_if_it_can_be_and_else_refused():
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        ids, text, _ = await rest(service, ask(5, seed=1))  # coupled: the same tokens come again
        assert ids == IDS[5:]
        assert TEXT.endswith(text)
        with pytest.raises(Unavailable, match="5 tokens were received and 0 are known") as caught:
            await rest(service, GenerateRequest("a", request_id="two", resume=Resume(5)))
        assert caught.value.reason == "STREAM_INTERRUPTED"


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        (Resume(2, (5,)), "resume_offset: 2 "),
        (Resume(1, (10**6,)), "resume_tokens: "),
        (Resume(-1), "resume_offset: -1"),
    ],
)
async def test_what_cannot_be_resumed_is_named(resume, words):
    async with serving() as service:
        with pytest.raises(InvalidRequest, match=words):
            await collect(service, GenerateRequest("a", request_id="one", resume=resume))
        with pytest.raises(InvalidRequest, match="request_id: "):
            await collect(service, GenerateRequest("a", resume=Resume(0)))


async def test_more_resume_tokens_than_the_request_may_have_are_refused():
    """Each of them takes tens of microseconds of the gateway, and a message has room for a million."""
    async with serving() as service:
        with pytest.raises(
            InvalidRequest, match="resume_tokens: 3 tokens, for max_tokens of this request, are more than 2"
        ):
            await collect(service, ask(3, IDS[:3], max_tokens=2))


async def test_other_streams_run_while_a_long_output_is_resumed(monkeypatch):
    monkeypatch.setattr("gateway.generation.REPLAYED_TOKENS", 2)
    verifier = SpellingVerifier()
    async with serving(verifier) as service:
        turns, running = 0, True

        async def others():
            nonlocal turns
            while running:
                turns += 1
                await asyncio.sleep(0)

        held = IDS[:9]
        told = service.generate(ask(len(held), held))
        other = asyncio.create_task(others())
        seen = []
        push = Output.push

        def watched(self, tokens, accepted, logprobs=()):
            if len(seen) < 5:
                seen.append((len(tokens), turns))
            return push(self, tokens, accepted, logprobs)

        monkeypatch.setattr(Output, "push", watched)
        ids = [token async for delta in told for token in ids_of(delta)]
        running = False
        await other
        assert (*held, *ids) == IDS
        assert [size for size, _ in seen] == [2, 2, 2, 2, 1]
        assert len({turn for _, turn in seen}) == 5  # the others had a turn between two of them
        await at_rest(service, verifier)


async def test_tokens_that_are_not_the_output_are_refused():
    async with serving() as service:
        await collect(service, ask())
        await stored(service)
        with pytest.raises(InvalidRequest, match="resume_tokens"):
            await collect(service, ask(2, (IDS[0], IDS[0])))


async def test_an_aborted_one_stays_aborted():
    verifier = SpellingVerifier(run=1, delay_s=0.02)
    async with serving(verifier) as service:
        deltas = service.generate(ask())
        got = await first_tokens(deltas, 3)
        service.abort(["one"])
        got += [t async for d in deltas for t in ids_of(d)]
        await stored(service)
        ids, _, ending = await rest(service, ask(len(got)))
        assert (ids, ending.reason) == ((), FinishReason.ABORTED)


async def test_replayed_tokens_have_logprobs():
    async with two_gateways(SpellingVerifier()) as (_, one, two):
        first = await collect(one, ask(logprobs=2))
        await stored(one)
        told = [span async for delta in two.generate(ask(4, logprobs=2)) for span in delta.spans]
        assert told == list(first.spans[4:])


async def test_a_prompt_whose_logprobs_are_no_longer_known_is_not_told_without_them():
    asked = {"prompt_logprobs": 1, "logprobs": 0}
    async with two_gateways(SpellingVerifier()) as (_, one, two):
        await collect(one, ask(**asked))
        await stored(one)
        with pytest.raises(InvalidRequest, match=r"resume_offset: 0 .* log-probabilities of the prompt"):
            await rest(two, ask(0, **asked))
        ids, _, _ = await rest(two, ask(3, **asked))  # the first chunk was received
        assert ids == IDS[3:]
        told = [delta async for delta in two.generate(ask(0, **asked, tenant="another"))]  # no output is known
        assert len(told[0].prompt_logprobs) == len(told[0].prompt) - 1


@pytest.mark.parametrize(
    "wrong", [ask(2, (IDS[0], IDS[0])), ask(2, logprobs=1), ask(200)], ids=["tokens", "logprobs", "offset"]
)
async def test_what_is_refused_after_it_was_taken_is_left_to_others(wrong):
    verifier = SpellingVerifier(run=1, delay_s=0.02)
    async with two_gateways(verifier) as (_, one, two):
        async with aclosing(one.generate(ask())) as deltas:
            got = await first_tokens(deltas, 3)
        await at_rest(one, verifier)
        with pytest.raises((InvalidRequest, Unavailable)):
            await collect(two, wrong)
        await at_rest(two, verifier)
        ids, _, _ = await rest(two, ask(len(got)))
        assert (*got, *ids) == IDS


async def test_two_that_come_back_at_once_follow_one_another():
    verifier = SpellingVerifier(run=1, delay_s=0.02)
    async with serving(verifier) as service:
        deltas = service.generate(ask())
        got = await first_tokens(deltas, 3)
        both = [asyncio.create_task(rest(service, ask(len(got)))) for _ in range(2)]
        old = asyncio.create_task(first_tokens(deltas, 100))
        ends = await asyncio.gather(*both, old, return_exceptions=True)
        told = [end for end in ends[:2] if not isinstance(end, Exception)]
        assert [(*got, *ids) for ids, _, _ in told] == [IDS]
        assert sum(isinstance(end, StaleEpoch) for end in ends) == 2
        await at_rest(service, verifier)


async def test_shared_noise_of_a_lost_seed_is_not_repeated():
    coupled = Speculation(rule=Rule.MATCH, law=DraftMode.COUPLED)
    async with serving() as service:
        with pytest.raises(Unavailable, match="3 tokens were received and 0 are known"):
            await collect(service, ask(3, speculation=coupled))
        ids, _, _ = await rest(service, ask(3, speculation=coupled, seed=7))
        assert ids == IDS[3:]
