"""Trees of a draft head in the verifier's process: the target's text in fewer passes; wrong or missing features cost acceptance only."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.heads import STRATEGIES, TabularHead
from support.services import collect, request, tabular_pair, until, verifier_of, verifier_settings

from rootward.core.requests import DraftMode, Speculation, SpeculationMode
from rootward.core.rng import DrawWords, Key
from rootward.engine.tabular import TabularModel
from verifier_service.head_drafts import HeadDrafts
from verifier_service.service import VerifierService

VOCAB = 12


def target_of(**law: Any) -> TabularModel:
    return TabularModel(VOCAB, seed=1, **({"sharpness": 2.0, "max_slots": 8} | law))


async def efficiency(
    target: TabularModel, head: TabularHead, *, sessions: int = 1, check: bool = True, **wanted: Any
) -> tuple[list[list[int]], float]:
    """Texts of some sessions at once, and tokens per round."""
    async with verifier_of(target, {}, head=head) as verifier:
        jobs = [collect(verifier, request(f"r{i}", (1, 2, 3 + i), **wanted)) for i in range(sessions)]
        found = await asyncio.gather(*jobs)
        await until(lambda: not verifier._running)
    if check:
        target.check_idle()
        head.check_idle()
        assert head.num_free_slots == 8
    stats = [last.finish.stats for _, last in found]
    assert all(one.drafter == "head" for one in stats)
    rounds = sum(one.num_spec_steps + one.num_plain_steps for one in stats)
    return [tokens for tokens, _ in found], sum(len(tokens) for tokens, _ in found) / rounds


def greedy_text(model: TabularModel, prompt: tuple[int, ...], length: int) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + length:
        text.append(int(np.argmax(model.law(text))))
    return text[len(prompt) :]


@pytest.mark.parametrize("sessions", [1, 5])
async def test_greedy_text_is_that_of_plain_decoding_in_fewer_passes(sessions: int) -> None:
    target = target_of()
    texts, tokens = await efficiency(target, TabularHead(target), sessions=sessions, temperature=0.0, max_tokens=80)
    assert texts == [greedy_text(target, (1, 2, 3 + i), 80) for i in range(sessions)]
    assert tokens > 2.5


async def test_wrong_and_missing_features_cost_acceptance_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of()
    wanted = {"temperature": 0.0, "max_tokens": 80}
    expected = greedy_text(target, (1, 2, 3), 80)
    _, right = await efficiency(target, TabularHead(target), **wanted)
    texts, wrong = await efficiency(target, TabularHead(target, wrong=3), **wanted)
    assert texts == [expected]
    assert 1.0 < wrong < right - 0.3

    observe, count = HeadDrafts.observe, 0

    def forgetful(self: HeadDrafts, session: int, first: int, states: Any) -> None:
        nonlocal count
        count += 1
        if count % 5 == 0:
            self.forget(session)
        if count % 3:
            observe(self, session, first, states)

    monkeypatch.setattr(HeadDrafts, "observe", forgetful)
    texts, missing = await efficiency(target, TabularHead(target), **wanted)
    assert texts == [expected]
    assert 1.0 < missing < right - 0.3


async def test_text_under_a_seed_does_not_depend_on_the_head() -> None:
    target = target_of()
    wanted = {"law": DraftMode.COUPLED, "seed": 7}
    texts, tokens = await efficiency(target, TabularHead(target), **wanted)
    async with verifier_of(target, {}) as verifier:
        plain, _ = await collect(verifier, request("r0", mode=SpeculationMode.DISABLED, **wanted))
    assert texts == [plain]
    assert tokens > 1.5


@pytest.mark.parametrize("name", STRATEGIES)
async def test_a_head_grows_by_every_strategy(name: str) -> None:
    strategy, rule = STRATEGIES[name]
    wish = Speculation(SpeculationMode.REQUIRED, strategy=strategy, **rule)
    target = target_of()
    _, tokens = await efficiency(target, TabularHead(target), wish=wish, max_tokens=60)
    assert tokens > 1.2


async def test_a_prompt_longer_than_the_window_is_read_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_service.head_drafts.MOST_POSITIONS", 16)
    target = target_of()
    prompt = tuple(i % VOCAB for i in range(100))
    wanted = request(prompt=prompt, temperature=0.0, max_tokens=60)
    async with verifier_of(target, {}, head=TabularHead(target), max_num_batched_tokens=24) as verifier:
        tokens, last = await collect(verifier, wanted)
    assert tokens == greedy_text(target, prompt, 60)
    assert last.finish.stats.block_efficiency > 2.0


async def test_a_preempted_session_gets_trees_again() -> None:
    target = target_of(kv_cache_tokens=128, max_positions=96, tree_room=16)
    head = TabularHead(target)
    async with verifier_of(target, {}, head=head) as verifier:
        jobs = [collect(verifier, request(f"r{i}", (1, 2, i), temperature=0.0, max_tokens=70)) for i in range(4)]
        found = await asyncio.gather(*jobs)
        assert verifier.slots.num_preemptions > 0
        await until(lambda: not verifier._running)
    assert [tokens for tokens, _ in found] == [greedy_text(target, (1, 2, i), 70) for i in range(4)]
    # the first round after each return is plain
    assert all(last.finish.stats.num_spec_steps > 0 for _, last in found)


async def test_a_request_may_ask_for_n_grams_beside_a_head() -> None:
    target, _ = tabular_pair(sharpness=6.0)
    async with verifier_of(target, {}, head=TabularHead(target)) as verifier:
        wish = Speculation(SpeculationMode.REQUIRED, drafter="ngram")
        _, last = await collect(verifier, request(wish=wish))
    assert last.finish.stats.drafter == "ngram"


async def test_the_head_that_a_verifier_process_has_loaded_grows_its_trees() -> None:
    target = target_of()
    settings = verifier_settings(local_draft="head:of a test")
    async with VerifierService(target, incarnation=1, settings=settings, head=TabularHead(target)) as verifier:
        _, last = await collect(verifier, request(max_tokens=40))
    assert last.finish.stats.num_accepted_draft_tokens > 0


async def test_no_drafter_can_compute_the_draws_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told the same key and the verifier's incarnation. One that is not trusted could leave when the draws suit it."""
    drawn: list[tuple[Key, int, int]] = []

    class Recorded(DrawWords):
        def __init__(self, key: Key, incarnation: int, number: int) -> None:
            super().__init__(key, incarnation, number)
            drawn.append((key, number, int(self(1)[0])))

    monkeypatch.setattr("rootward.engine.grower.DrawWords", Recorded)
    target, settings = target_of(), verifier_settings(local_draft="head:of a test")
    async with VerifierService(
        target, incarnation=1, settings=settings, head=TabularHead(target), secret=5
    ) as verifier:
        await collect(verifier, request(max_tokens=8))
        told = verifier._hello().incarnation
    assert drawn
    assert not any(word == DrawWords(key, told, number)(1)[0] for key, number, word in drawn)
