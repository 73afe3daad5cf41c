"""Several outputs (prompts x choices) of one request, read as one stream."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from unit.gateway.service_for_tests import IDS, at_rest, ids_of, serving
from unit.gateway.verifier_for_tests import MODEL, SpellingVerifier

from gateway.choices import Tally, coalesced, concurrent_deltas, outputs, tokenised
from gateway.requests import Delta, Ending, GenerateRequest
from gateway.tokenizer import INLINE_CHARACTERS
from rootward.client.types import Timing, Usage
from rootward.core.requests import FinishReason, SpeculationStats
from rootward.engine.prefix_keys import chain
from rootward.errors import InvalidRequest, RootwardError

ENDING = Ending(FinishReason.STOP, Usage(1, 1), SpeculationStats(), Timing())


def test_a_request_becomes_one_request_for_each_prompt_and_choice():
    request = GenerateRequest("a", request_id="r", n=2, seed=3)
    made = outputs(request, ["a", (5, 6)])
    assert [(m.prompt, m.request_id, m.choice, m.index, m.n) for m in made] == [
        ("a", "r", 0, 0, 2),
        ("a", "r#1", 1, 1, 2),
        ((5, 6), "r#2", 0, 2, 2),
        ((5, 6), "r#3", 1, 3, 2),
    ]
    (alone,) = outputs(GenerateRequest("a", request_id="r", seed=3))
    assert (alone.request_id, alone.choice, alone.seed) == (made[0].request_id, made[0].choice, made[0].seed)
    assert outputs(GenerateRequest("a"))[0].request_id
    for n, prompts in ((0, ["a"]), (129, ["a"]), (64, ["a"] * 3)):
        with pytest.raises(InvalidRequest):
            outputs(GenerateRequest("a", n=n), prompts)


async def test_all_outputs_arrive_and_usage_counts_each_prompt_once():
    verifier = SpellingVerifier(max_sessions=8)
    async with serving(verifier) as service:
        made = outputs(GenerateRequest("abc", request_id="r", n=3, seed=5), ["abc", "ab"])
        tally, tokens = Tally(3), {}
        async for delta in concurrent_deltas(service.generate, made):
            tally.add(delta)
            assert delta.request_id == "r"
            assert delta.offset == len(tokens.setdefault(delta.index, []))
            tokens[delta.index] += ids_of(delta)
        assert tokens == {i: list(IDS) for i in range(6)}
        assert (tally.usage.prompt_tokens, tally.usage.completion_tokens) == (5, 6 * len(IDS))
        assert tally.only is None
        assert {(r.seed, r.choice) for r in verifier.requests} == {(5, 0), (5, 1), (5, 2)}
        await at_rest(service, verifier)


async def test_many_long_prompts_of_one_request_take_one_place_of_the_tokenizer():
    """Tokenised all at once they took all places: the request was refused as one too many, and so were those of others meanwhile."""
    verifier = SpellingVerifier(model=replace(MODEL, max_positions=4096), max_sessions=8)
    async with serving(verifier) as service:
        most, run = 0, service.tokenizer_pool.run

        async def counted(size, call, *arguments):
            nonlocal most
            most = max(most, service.tokenizer_pool._num_calls)
            return await run(size, call, *arguments)

        service.tokenizer_pool.run = counted
        made = outputs(GenerateRequest("", request_id="r", max_tokens=1), ["a" * INLINE_CHARACTERS + "b"] * 100)
        tally = Tally()
        async for delta in concurrent_deltas(service.generate, await tokenised(made, service.prompt_ids)):
            tally.add(delta)
        assert len(tally.endings) == 100
        assert most <= 1


async def test_others_run_between_the_beginnings_of_the_outputs():
    """Each takes tens of milliseconds with a long prompt; all of them together held the event loop for a second."""
    turn, began = 0, []

    async def turns():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def generate(request):
        began.append(turn)
        yield Delta("r", 0, (), ENDING, request.index)

    others = asyncio.create_task(turns())
    async for _ in concurrent_deltas(generate, outputs(GenerateRequest("abc", n=8))):
        pass
    others.cancel()
    assert len(set(began)) == 8


async def test_the_prompt_of_several_choices_is_hashed_once(monkeypatch):
    """On the event loop: three times for each choice, a prompt of 131,000 tokens holds up the others."""
    num_hashed = 0

    def counted(first, tokens, block_size, num_blocks):
        nonlocal num_hashed
        num_hashed += num_blocks * block_size
        return chain(first, tokens, block_size, num_blocks)

    monkeypatch.setattr("gateway.router.chain", counted)
    verifier = SpellingVerifier(delay_s=0.02)
    async with serving(verifier) as service:
        async for _ in concurrent_deltas(service.generate, outputs(GenerateRequest((5,) * 160, n=4))):
            pass
        assert len(verifier.requests) == 4
        assert num_hashed == 160  # the output has no whole block
        await at_rest(service, verifier)


@pytest.mark.parametrize("num_read", [0, 1, 4])
async def test_closing_the_stream_ends_all_outputs(num_read):
    verifier = SpellingVerifier(delay_s=0.02)
    async with serving(verifier) as service:
        made = outputs(GenerateRequest("abc", n=3))
        async with aclosing(concurrent_deltas(service.generate, made)) as deltas:
            for _ in range(num_read):
                await anext(deltas)
        await at_rest(service, verifier)


def test_an_id_leaves_room_for_the_numbers_of_outputs():
    assert outputs(GenerateRequest("abc", request_id="r" * 128))[0].request_id == "r" * 128
    assert outputs(GenerateRequest("abc", request_id="r" * 126, n=10))[9].request_id == "r" * 126 + "#9"
    for length, n in ((127, 2), (126, 11)):
        with pytest.raises(InvalidRequest, match=f"request_id: 'rrrrrrrrrrrrrrrr…' with #{n - 1} behind it"):
            outputs(GenerateRequest("abc", request_id="r" * length, n=n))


async def test_failure_of_one_output_ends_all():
    verifier = SpellingVerifier(delay_s=0.02)
    async with serving(verifier, max_num_seqs=1, max_num_queued_reqs=1) as service:
        with pytest.raises(RootwardError, match="queue"):
            async for _ in concurrent_deltas(service.generate, outputs(GenerateRequest("abc", n=3))):
                pass
        await at_rest(service, verifier)


async def test_abort_of_the_request_id_ends_all_outputs():
    verifier = SpellingVerifier(delay_s=0.05)
    async with serving(verifier) as service:
        reasons = []
        aborted = None
        async for delta in concurrent_deltas(service.generate, outputs(GenerateRequest("abc", request_id="r", n=3))):
            aborted = aborted or service.abort(["r", "other"])
            if delta.ending:
                reasons.append(delta.ending.reason.value)
        assert (reasons, aborted) == (["aborted"] * 3, ["r"])
        await at_rest(service, verifier)


async def test_deltas_are_coalesced_for_each_output_separately():
    async with serving() as service:
        made = outputs(GenerateRequest("abc", n=2))
        tokens = {0: [], 1: []}
        async for delta in coalesced(concurrent_deltas(service.generate, made), 7):
            assert delta.offset == len(tokens[delta.index])
            assert len(delta.spans) >= 7 or delta.ending
            tokens[delta.index] += ids_of(delta)
        assert tokens == {0: list(IDS), 1: list(IDS)}
