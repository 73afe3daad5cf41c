"""Log-probabilities of prompts, prefix salts and cached tokens, through a real verifier: exact against the model's own law."""

import asyncio

import numpy as np
import pytest
from support.services import collect, in_process, over_grpc, request, tabular_pair

from rootward.ports import Rows
from verifier_service import kv_admission
from verifier_service.session import Session


def own_logprobs(model, prompt):
    """Of each prompt token but the first, from one forward of its own."""
    slot = model.open()
    logits = model.forward([Rows.chain(slot, 0, prompt)]).double().numpy()
    model.close(slot)
    law = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return [float(law[i, token]) for i, token in enumerate(prompt[1:])], law


async def first(verifier, wanted):
    """The first message and all that come after it."""
    runs = [run async for run in verifier.generate(wanted)]
    assert all(run.prefilled is None for run in runs[1:])
    return runs[0]


@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("remote", [False, True])
async def test_they_are_the_models_own(remote, chunk):
    target, draft = tabular_pair()
    prompt = (1, 2, 3, 0, 4, 2, 2, 1)
    wanted, law = own_logprobs(target, prompt)
    async with (over_grpc if remote else in_process)(target, draft, max_num_batched_tokens=chunk) as system:
        for k in (0, 2):
            told = (await first(system.verifier, request(f"a{k}", prompt, prompt_logprobs=k))).prefilled
            assert told is not None
            assert told.num_cached == 0
            assert [one.logprob for one in told.logprobs] == pytest.approx(wanted, abs=1e-5)
            for i, one in enumerate(told.logprobs):
                assert [p for _, p in one.top] == pytest.approx(sorted(law[i], reverse=True)[:k], abs=1e-5)
        alone = await first(system.verifier, request("b", (3,), prompt_logprobs=1))
        assert alone.prefilled.logprobs == ()
        none = await first(system.verifier, request("c", prompt))
        assert none.prefilled.logprobs == ()


async def test_side_by_side_with_other_work():
    """Chunks with and without them, and rounds, share forwards; each gets its own rows."""
    target, draft = tabular_pair()
    prompts = [tuple(int(t) for t in np.random.default_rng(i).integers(0, 5, 6 + i)) for i in range(6)]
    wanted = [own_logprobs(target, prompt)[0] for prompt in prompts]
    async with in_process(target, draft, max_num_batched_tokens=4) as system:
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(collect(system.verifier, request(f"o{i}", (1, 2)))) for i in range(2)]
            asked = [
                group.create_task(first(system.verifier, request(f"r{i}", p, prompt_logprobs=0)))
                for i, p in enumerate(prompts)
            ]
        assert all(len(one.result()[0]) == 40 for one in others)
    for task, logprobs in zip(asked, wanted, strict=True):
        assert [one.logprob for one in task.result().prefilled.logprobs] == pytest.approx(logprobs, abs=1e-5)


async def test_sessions_take_turns_when_theirs_are_too_many(monkeypatch):
    monkeypatch.setattr(kv_admission, "MAX_HELD_LOGPROBS", 12)
    target, draft = tabular_pair()
    prompts = [(1, 2, 3, 4, i) for i in range(5)]
    held, most, feed = {}, [], Session.feed

    def watched(session, size, logprobs):
        feed(session, size, logprobs)
        live = {number: one for number, one in held.items() if not one.done} | {session.number: session}
        held.update(live)
        most.append(sum(len(one.prompt_logprobs) * 2 for one in live.values()))

    monkeypatch.setattr(Session, "feed", watched)
    async with in_process(target, draft, max_num_batched_tokens=4) as system, asyncio.TaskGroup() as group:
        asked = [
            group.create_task(first(system.verifier, request(f"r{i}", p, prompt_logprobs=1)))
            for i, p in enumerate(prompts)
        ]
        other = group.create_task(collect(system.verifier, request("other", (1, 2))))
    for prompt, one in zip(prompts, asked, strict=True):
        wanted = own_logprobs(target, prompt)[0]
        assert [own.logprob for own in one.result().prefilled.logprobs] == pytest.approx(wanted, abs=1e-5)
    assert len(other.result()[0]) == 40
    assert max(most) == 8  # of one session; without turns they are up to 40


async def test_salts_and_cached_tokens():
    target, draft = tabular_pair()
    prompt = tuple(int(t) for t in np.random.default_rng(0).integers(0, 5, 3 * target.block_size + 1))

    async def num_cached(name, **more):
        return (await first(system.verifier, request(name, prompt, max_tokens=4, **more))).prefilled.num_cached

    async with in_process(target, draft) as system:
        assert await num_cached("a") == 0
        held = await num_cached("b")
        assert held in (0, 3 * target.block_size)  # a model may have no prefix cache
        assert await num_cached("c", cache_salt="x") == 0
        assert await num_cached("d", cache_salt="x") == held
        assert await num_cached("e", cache_salt="x", tenant="t") == 0
        assert await num_cached("f", prompt_logprobs=0) == 0
        assert await num_cached("g", prompt_logprobs=0) == 0
        assert await num_cached("h") == held
