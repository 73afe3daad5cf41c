"""The verifier and its drafter together: laws, lengths, stops, cancellation, bad peers. Nothing may leak."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from support.services import (
    assert_at_rest,
    collect,
    drafter_of,
    in_process,
    over_grpc,
    request,
    tabular_pair,
    until,
    verifier_of,
)
from support.tabular import perturbed

from rootward.core.frames import FromDrafter, Grow, HelloAck, NeedSync, ToDrafter
from rootward.core.requests import DraftMode, FinishReason, Rule, SpeculationMode, Stopping
from rootward.engine.tabular import TabularModel
from rootward.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    NoDrafter,
    NotFound,
    Overloaded,
    StaleEpoch,
    Unavailable,
)


def greedy_text(model: TabularModel, prompt: tuple[int, ...], length: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + length:
        text.append(int(np.argmax(model.law(text))))
    return text[len(prompt) :]


@pytest.mark.parametrize("connect", [in_process, over_grpc])
async def test_greedy_text_is_the_target_s_own_and_several_tokens_come_per_pass(connect) -> None:
    target, draft = tabular_pair(noise=0.3)
    async with connect(target, draft) as system:
        tokens, last = await collect(system.verifier, request(temperature=0.0, max_tokens=60))
        assert tokens == greedy_text(target, (1, 2, 3), 60)
        stats = last.finish.stats
        assert stats.block_efficiency > 1.5
        assert sum(stats.acceptance_histogram) == stats.num_spec_steps + stats.num_plain_steps
        await assert_at_rest(system)


async def test_local_and_remote_drafting_are_the_same_under_coupled_noise() -> None:
    """The text is a function of (target, seed): the same with any drafter, over any link, and without one."""
    wanted = {"rule": Rule.MATCH, "law": DraftMode.COUPLED, "seed": 11, "max_tokens": 50}
    texts = []
    for connect, noise in ((in_process, 0.2), (over_grpc, 2.0)):
        target, draft = tabular_pair(noise=noise)
        async with connect(target, draft) as system:
            texts.append((await collect(system.verifier, request(**wanted)))[0])
            texts.append((await collect(system.verifier, request("p", **wanted, mode=SpeculationMode.DISABLED)))[0])
    assert all(text == texts[0] for text in texts)


async def test_many_sessions_share_steps_and_leave_nothing_behind() -> None:
    target, draft = tabular_pair(slots=4)
    async with in_process(target, draft) as system:
        jobs = [
            collect(system.verifier, request(f"r{i}", temperature=float(i % 2), max_tokens=1 + 3 * i, seed=i))
            for i in range(12)
        ]
        results = await asyncio.gather(*jobs)
        assert [len(tokens) for tokens, _ in results] == [1 + 3 * i for i in range(12)]
        await assert_at_rest(system)


async def test_a_stop_token_ends_the_run_and_beats_length() -> None:
    target, draft = tabular_pair(noise=0.1)
    text = greedy_text(target, (1, 2, 3), 30)
    stop = text[4]
    first = text.index(stop)
    async with in_process(target, draft) as system:
        stopping = Stopping(first + 1, stop_token_ids=(stop,))
        tokens, last = await collect(system.verifier, request(temperature=0.0, stopping=stopping))
        assert tokens == text[: first + 1]
        assert last.finish.reason is FinishReason.STOP
        assert last.finish.stop_token_id == stop


async def test_end_of_sequence_is_never_drafted_below() -> None:
    target = TabularModel(4, seed=5, eos=2, max_slots=8)
    draft = perturbed(target, 0.2, seed=1)
    async with in_process(target, draft) as system:
        for i in range(10):
            tokens, last = await collect(system.verifier, request(f"r{i}", (1, 3), seed=i, max_tokens=200))
            assert tokens.count(2) == 1
            assert tokens[-1] == 2
            assert last.finish.reason is FinishReason.STOP
        await assert_at_rest(system)


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_cancelling_frees_everything(after: int) -> None:
    target, draft = tabular_pair(slots=2)
    async with in_process(target, draft) as system:
        for i in range(5):
            async with aclosing(system.verifier.generate(request(f"r{i}", max_tokens=500))) as runs:
                for _ in range(after):
                    await anext(runs)
        assert len((await collect(system.verifier, request("after")))[0]) == 40
        await assert_at_rest(system)


async def test_a_deadline_ends_a_generation_in_the_queue_and_under_way() -> None:
    target, draft = tabular_pair(slots=1)
    async with in_process(target, draft) as system:
        hog = asyncio.create_task(collect(system.verifier, request("hog", max_tokens=3000)))
        await until(lambda: system.service._running)
        with pytest.raises(DeadlineExceeded):
            await collect(system.verifier, request("queued", deadline_s=0.05))
        hog.cancel()
        with pytest.raises(DeadlineExceeded):
            await collect(system.verifier, request("slow", max_tokens=3000, deadline_s=0.1))
        await assert_at_rest(system)


async def test_a_text_that_another_verifier_began_goes_on_though_the_queue_is_full() -> None:
    """Those of a verifier that was lost would break in the middle, since the others are busiest then."""
    target, draft = tabular_pair(slots=1)
    async with in_process(target, draft, max_num_queued_reqs=1) as system:
        waiting = system.service.slots.waiting
        async with asyncio.TaskGroup() as group:
            hog = group.create_task(collect(system.verifier, request("hog", max_tokens=3000)))
            await until(lambda: system.service._running)
            group.create_task(collect(system.verifier, request("new")))
            await until(lambda: len(waiting) == 1)
            with pytest.raises(Overloaded, match="queue holds 1 requests"):
                await collect(system.verifier, request("newer"))
            begun = request("begun", epoch=2, committed=(1, 2, 3), max_tokens=10)
            moved = group.create_task(collect(system.verifier, begun))
            await until(lambda: len(waiting) == 2 or moved.done())
            with pytest.raises(Overloaded, match="queue holds 2 requests"):  # twice the limit holds for all
                await collect(system.verifier, request("begun, too", epoch=2, committed=(1, 2, 3), max_tokens=10))
            hog.cancel()
        tokens, _ = moved.result()
        assert (tokens[:3], len(tokens)) == ([1, 2, 3], 10)
        await assert_at_rest(system)


async def test_epochs_fence_older_owners() -> None:
    target, draft = tabular_pair()
    async with in_process(target, draft) as system:
        old = system.verifier.generate(request("x", max_tokens=3000, epoch=4))
        run = await anext(old)
        with pytest.raises(DuplicateRequest):
            await collect(system.verifier, request("x", epoch=4))
        with pytest.raises(StaleEpoch):
            await collect(system.verifier, request("x", epoch=3))
        resumed = request("x", epoch=5, committed=run.tokens, max_tokens=len(run.tokens) + 10)
        tokens, last = await collect(system.verifier, resumed)
        assert len(tokens) == len(run.tokens) + 10
        assert last.epoch == 5
        with pytest.raises(StaleEpoch):
            async for _ in old:
                pass
        await assert_at_rest(system)


@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.TOKEN, Rule.MATCH])
async def test_one_epoch_never_tosses_its_coins_twice(rule: Rule) -> None:
    """What a drafter grows after a verdict may have heard of it: were the stream lost and the verdict not committed, the same coins
    would meet a tree that follows them. Matching tosses none: asked again it says the same again."""
    target, draft = tabular_pair()
    async with in_process(target, draft) as system:
        wanted = request("x", rule=rule, seed=5, epoch=2)
        text, _ = await collect(system.verifier, wanted)
        if rule is Rule.MATCH:
            again, _ = await collect(system.verifier, wanted)
            assert again == text
        else:
            for committed in ((), text[:3]):
                with pytest.raises(StaleEpoch):
                    await collect(system.verifier, replace(wanted, committed=tuple(committed)))
        for fresh in (replace(wanted, epoch=3), replace(wanted, epoch=3, seed=6), replace(wanted, request_id="y")):
            assert len((await collect(system.verifier, fresh))[0]) == len(text)
        await assert_at_rest(system)


@pytest.mark.parametrize(
    ("bad", "error", "word"),
    [
        (request(prompt=(1, 9)), InvalidRequest, "vocabulary of 5"),
        (request(max_tokens=5000), ContextLengthExceeded, "context of 4096"),
        (request(committed=(1, 2), max_tokens=2), InvalidRequest, "max_tokens"),
    ],
)
async def test_bad_requests_are_refused_with_field_and_fix_and_others_continue(bad, error, word: str) -> None:
    target, draft = tabular_pair()
    async with in_process(target, draft) as system:
        running = asyncio.create_task(collect(system.verifier, request("good", temperature=0.0, max_tokens=80)))
        with pytest.raises(error, match=word):
            await collect(system.verifier, bad)
        assert (await running)[0] == greedy_text(target, (1, 2, 3), 80)


@pytest.mark.parametrize("wish", [{"mode": SpeculationMode.REQUIRED}, {"drafter": "of another release"}])
async def test_a_text_that_another_verifier_began_goes_on_without_the_drafter_that_it_asks_for(wish) -> None:
    """As it does where the drafter is lost: only new requests are refused."""
    target, _ = tabular_pair()
    wanted = request(temperature=0.0, max_tokens=20)
    wanted = replace(wanted, speculation=replace(wanted.speculation, **{"mode": SpeculationMode.AUTO} | wish))
    begun = tuple(greedy_text(target, wanted.prompt, 5))
    async with verifier_of(target, {}) as verifier:
        with pytest.raises((NoDrafter, NotFound)):
            await collect(verifier, wanted)
        tokens, _ = await collect(verifier, replace(wanted, epoch=2, committed=begun))
    assert tokens == greedy_text(target, wanted.prompt, 20)


async def test_required_speculation_without_a_drafter_is_refused_and_auto_decodes_plainly() -> None:
    target, _ = tabular_pair()
    async with verifier_of(target, {}) as verifier:
        with pytest.raises(NoDrafter):
            await collect(verifier, request())
        tokens, last = await collect(verifier, request(temperature=0.0, mode=SpeculationMode.AUTO))
        assert tokens == greedy_text(target, (1, 2, 3), 40)
        assert last.finish.stats.num_plain_steps == 40


async def test_draining_refuses_new_work_and_finishes_the_rest() -> None:
    target, draft = tabular_pair()
    async with in_process(target, draft) as system:
        running = asyncio.create_task(collect(system.verifier, request(max_tokens=200)))
        await until(lambda: system.service._running)
        drained = asyncio.create_task(system.service.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await collect(system.verifier, request("late"))
        assert len((await running)[0]) == 200
        await drained


async def test_a_draining_drafter_hands_its_sessions_to_another() -> None:
    target, draft = tabular_pair()
    first, second = drafter_of(draft, incarnation=1), drafter_of(perturbed(target, 0.8, 2), incarnation=2)
    verifier = verifier_of(target, {"one": first, "two": second})
    async with first, second, verifier:
        await until(lambda: len(verifier.pool.up) == 2)
        running = asyncio.create_task(collect(verifier, request(temperature=0.0, max_tokens=400)))
        await until(lambda: first.grower.trees or second.grower.trees)
        busy, spare = (first, second) if first.grower.trees else (second, first)
        await busy.drain()
        await until(lambda: spare.grower.trees or running.done())
        tokens, last = await running
        assert tokens == greedy_text(target, (1, 2, 3), 400)
        assert last.finish.stats.num_spec_steps > 0


class Liar:
    """A drafter that answers the handshake and then sends one kind of nonsense for ever."""

    def __init__(self, kind: str) -> None:
        self.kind, self.num_opens = kind, 0

    async def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncIterator[FromDrafter]:
        yield FromDrafter(ack=HelloAck("liar", 1, "", 5, 4096, tuple(DraftMode), 8, 64))
        async for frame in inbound:
            if self.kind == "dies":
                return
            for o in frame.opens:
                self.num_opens += 1
                if self.kind == "need sync":
                    yield FromDrafter(need_syncs=(NeedSync(o.slot, 0, 0),))
                else:
                    yield FromDrafter(grows=(self._grow(o.slot, len(o.prefix)),))

    def _grow(self, slot: int, length: int) -> Grow:
        column = lambda *values: np.array(values, dtype=np.int64)  # noqa: E731
        hash_ = 1 if self.kind == "foreign hash" else 0
        first = 5 if self.kind == "gap" else 1
        token = 99 if self.kind == "token" else 1
        return Grow(slot, length, hash_, first, column(0), column(token), np.array([False]))


@pytest.mark.parametrize("kind", ["gap", "foreign hash", "token", "dies"])
async def test_a_lying_drafter_costs_nothing_but_its_trees(kind: str) -> None:
    target, _ = tabular_pair()
    async with verifier_of(target, {"liar": Liar(kind)}, draft_wait_ms=20) as verifier:
        await until(lambda: verifier.pool.up or kind == "dies")
        tokens, _ = await collect(verifier, request(temperature=0.0, mode=SpeculationMode.AUTO))
        assert tokens == greedy_text(target, (1, 2, 3), 40)


@pytest.mark.parametrize("kind", ["gap", "foreign hash", "need sync"])
async def test_a_drafter_whose_trees_all_break_is_asked_a_few_times_only(kind: str) -> None:
    """Not by each session in each step, with its whole text."""
    target, _ = tabular_pair()
    liar = Liar(kind)
    async with verifier_of(target, {"liar": liar}, draft_wait_ms=20) as verifier:
        await until(lambda: verifier.pool.up)
        await asyncio.gather(*(collect(verifier, request(f"r{i}", max_tokens=100)) for i in range(4)))
        assert verifier.pool.links[0].breaker.opened
    assert liar.num_opens < 20  # the circuit is tested after 1, 2, 4, ... seconds


async def test_a_drafter_with_a_shorter_context_stops_growing_and_generation_continues() -> None:
    target, _ = tabular_pair()
    draft = TabularModel(5, seed=1, noise=0.3, noise_seed=2, max_positions=24)
    async with in_process(target, draft) as system:
        tokens, last = await collect(system.verifier, request(temperature=0.0, max_tokens=60))
        assert tokens == greedy_text(target, (1, 2, 3), 60)
        assert last.finish.stats.num_spec_steps > 0
        await assert_at_rest(system)


@pytest.mark.parametrize("second", [False, True])
async def test_a_text_that_outgrows_its_drafter_is_drafted_by_another_or_by_the_verifier(second: bool) -> None:
    target, draft = tabular_pair(sharpness=6.0)  # its greedy text soon repeats itself
    short = TabularModel(5, seed=1, noise=0.3, noise_seed=2, max_positions=24)
    first, longer = (
        drafter_of(short),
        drafter_of(draft, incarnation=8, capacity=4),
    )  # the one with more room is taken first
    drafters = {"short": first, "long": longer} if second else {"short": first}
    async with first, longer, verifier_of(target, drafters, local_draft="ngram") as verifier:
        await until(lambda: len(verifier.pool.up) == len(drafters))
        running = asyncio.create_task(collect(verifier, request(temperature=0.0, max_tokens=120)))
        await until(lambda: first.grower.trees)
        tokens, last = await running
        assert tokens == greedy_text(target, (1, 2, 3), 120)
        assert last.finish.stats.drafter == ("long" if second else "ngram")


async def test_vocabularies_that_differ_are_refused_and_the_verifier_decodes_plainly() -> None:
    target, _ = tabular_pair()
    drafter = drafter_of(TabularModel(6, seed=1))
    async with drafter, verifier_of(target, {"d": drafter}) as verifier:
        await until(lambda: any(link.refusal for link in verifier.pool.links))
        assert "target has 5, draft 6" in verifier.pool.links[0].refusal
        tokens, _ = await collect(verifier, request(temperature=0.0, mode=SpeculationMode.AUTO))
        assert tokens == greedy_text(target, (1, 2, 3), 40)


async def test_a_step_that_fails_costs_its_sessions_and_not_the_service() -> None:
    target, draft = tabular_pair()
    async with in_process(target, draft) as system:
        honest = system.service.runner.step
        system.service.runner.step = lambda chunks, rounds: 1 / 0
        with pytest.raises(Unavailable, match="ZeroDivisionError"):
            await collect(system.verifier, request("bad"))
        system.service.runner.step = honest
        assert len((await collect(system.verifier, request("good")))[0]) == 40
        await assert_at_rest(system)


async def test_a_drafter_that_cannot_compute_gives_its_trees_up_and_recovers() -> None:
    target, draft = tabular_pair()
    async with in_process(target, draft, draft_wait_ms=50) as system:
        honest = draft.forward
        draft.forward = lambda *a, **k: 1 / 0
        tokens, _ = await collect(system.verifier, request("a", temperature=0.0))
        assert tokens == greedy_text(target, (1, 2, 3), 40)
        draft.forward = honest
        await until(lambda: not system.drafter.grower.trees)
        await until(lambda: system.service.pool.links[0].room)  # it asked to be left alone for a while
        _, last = await collect(system.verifier, request("b"))
        assert last.finish.stats.num_spec_steps > 0
