"""Three times as many sessions as the KV cache holds: all finish with the text they would have had alone, and nothing leaks.

Sessions give their KV to others while their trees wait, come back, and find what is left of it in the prefix cache.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from support.services import System, assert_at_rest, collect, in_process, request, until, verifier_of
from transformers import AutoTokenizer

from rootward import demo
from rootward.core.requests import DraftMode, Rule, SpeculationMode, VerifierRequest
from rootward.engine.loading import load_model
from rootward.engine.tabular import TabularModel
from rootward.ports import LanguageModel

NUM = 64
LONG_S = 240.0  # on a machine that does other things as well
ROOM = {"max_positions": 96, "tree_room": 32, "block_size": 4, "max_slots": NUM}


def mixed(seed: int) -> list[VerifierRequest]:
    """Short and long prompts and outputs; half of them greedy, half under shared noise: every text is a function of the request."""
    rng = random.Random(seed)
    law = {"rule": Rule.MATCH, "law": DraftMode.COUPLED, "temperature": 1.0}
    return [
        request(
            f"r{i}",
            tuple(rng.randrange(5) for _ in range(rng.randint(1, 12))),
            max_tokens=rng.randint(1, 80),
            seed=i,
            **(law if i % 2 else {"temperature": 0.0}),
        )
        for i in range(NUM)
    ]


def third(jobs: Sequence[VerifierRequest], least: int = 0) -> int:
    """KV tokens for a third of what the sessions take together."""
    return max(least, sum(len(job.prompt) + job.stopping.max_tokens for job in jobs) // 3)


def tight_pair(jobs: Sequence[VerifierRequest]) -> tuple[TabularModel, TabularModel]:
    target = TabularModel(5, seed=1, kv_cache_tokens=third(jobs), **ROOM)
    return target, TabularModel(5, seed=1, noise=0.5, noise_seed=2, **ROOM)


async def alone(model: LanguageModel, jobs: Sequence[VerifierRequest]) -> list[list[int]]:
    """One at a time, plainly."""
    async with verifier_of(model, {}) as verifier:
        plain = [replace(job, speculation=replace(job.speculation, mode=SpeculationMode.DISABLED)) for job in jobs]
        return [(await collect(verifier, job))[0] for job in plain]


async def assert_nothing_is_held(system: System) -> None:
    await until(lambda: not system.service.slots.waiting._waiting, LONG_S)
    await assert_at_rest(system)
    for model in (system.service.model, system.drafter.grower.model):
        assert model.num_free_blocks == model.num_blocks  # free + kept for their content = all


async def test_all_finish_with_the_text_they_would_have_had_alone() -> None:
    jobs = mixed(seed=5)
    target, draft = tight_pair(jobs)
    texts = await alone(TabularModel(5, seed=1, **ROOM), jobs)
    async with in_process(target, draft) as system:
        results = await asyncio.gather(*(collect(system.verifier, job) for job in jobs))
        assert [tokens for tokens, _ in results] == texts
        stats = (await system.verifier.get_info()).stats
        assert stats["num_preemptions_total"] > 0
        assert sum(last.finish.stats.num_accepted_draft_tokens for _, last in results) > 0
        await assert_nothing_is_held(system)


@pytest.mark.parametrize("seed", [1, 2])
async def test_cancelling_half_of_them_at_random_moments_leaves_nothing_behind(seed: int) -> None:
    jobs = mixed(seed)
    rng = random.Random(seed)
    doomed = set(rng.sample(range(NUM), NUM // 2))
    target, draft = tight_pair(jobs)
    texts = await alone(TabularModel(5, seed=1, **ROOM), jobs)
    async with in_process(target, draft) as system:

        async def cancelled(job: VerifierRequest) -> None:
            async with aclosing(system.verifier.generate(job)) as runs:
                for _ in range(rng.randint(0, 12)):
                    await anext(runs, None)

        async def dropped(job: VerifierRequest) -> None:
            task = asyncio.create_task(collect(system.verifier, job))
            moment = rng.randint(0, 40)
            await until(lambda: system.service.slots.num_preemptions >= moment or task.done(), LONG_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        async def dropped_while_away(job: VerifierRequest) -> None:
            task, waiting = asyncio.create_task(collect(system.verifier, job)), system.service.slots.waiting._waiting
            await until(
                lambda: any(one.request is job and one.has_run for one in waiting.values()) or task.done(), LONG_S
            )
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        ends = [rng.choice([cancelled, dropped, dropped_while_away]) if i in doomed else None for i in range(NUM)]
        results = await asyncio.gather(
            *(collect(system.verifier, job) if end is None else end(job) for end, job in zip(ends, jobs, strict=True))
        )
        survivors = [i for i in range(NUM) if i not in doomed]
        assert [results[i][0] for i in survivors] == [texts[i] for i in survivors]
        await assert_nothing_is_held(system)


async def test_cached_prefixes_are_not_computed_again_except_for_another_tenant() -> None:
    first = request("a", tuple(range(5)) * 6, temperature=0.0, tenant="one")
    target, draft = tight_pair(mixed(seed=5))
    async with in_process(target, draft) as system:
        text, _ = await collect(system.verifier, first)
        for name, tenant, hits in (("b", "one", 28), ("c", "two", 0)):
            before = (await system.verifier.get_info()).stats["prefix_cache_hits_total"]
            again, _ = await collect(system.verifier, replace(first, request_id=name, tenant=tenant))
            after = (await system.verifier.get_info()).stats["prefix_cache_hits_total"]
            assert (again, after - before) == (text, hits)
        await assert_nothing_is_held(system)


async def test_the_demo_pair_under_pressure() -> None:
    """Greedily; the two best logits of these texts are never closer than 1.5e-4, far above rounding."""
    paths, rng = demo.paths(), random.Random(3)
    encode = AutoTokenizer.from_pretrained(paths.target).encode
    prompts = [tuple(encode(text)) for text in demo.prompts()[:16]]
    jobs = [
        request(f"r{i}", prompts[i % len(prompts)][: rng.randint(2, 8)], temperature=0.0, max_tokens=rng.randint(2, 28))
        for i in range(NUM)
    ]
    texts = await alone(load_model(str(paths.target), max_slots=1, max_len=96), jobs)
    size = {"max_slots": NUM, "max_len": 96}
    target = load_model(str(paths.target), kv_cache_tokens=third(jobs), **size)
    async with in_process(target, load_model(str(paths.draft), **size)) as system:
        results = await asyncio.gather(*(collect(system.verifier, job) for job in jobs))
        assert [tokens for tokens, _ in results] == texts
        await assert_nothing_is_held(system)
