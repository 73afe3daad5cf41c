"""Drafters without a model under the real verifier: the same text, the same law, in fewer passes where text repeats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from scipy.stats import chi2
from support.processes import drafter as drafter_process
from support.random_tokens import random_drafter
from support.services import collect, drafter_of, request, tabular_pair, until, verifier_of
from support.tabular import perturbed
from transformers import AutoTokenizer

from benchmarks.lookup import replayed
from benchmarks.results import p_value
from drafter_service.__main__ import build_lookup, recipe_of
from drafter_service.growth_loop import DrafterService, without_model
from drafter_service.lookup_grower import LookupGrower
from drafter_service.servicer import DrafterServicer
from drafter_service.settings import DrafterSettings
from rootward import demo
from rootward.core.lookup import Prediction, Recycling, Successors
from rootward.core.requests import DraftMode, Rule, SpeculationMode
from rootward.core.rng import Key
from rootward.engine.loading import load_model
from rootward.engine.tabular import TabularModel
from rootward.ports import Drafter, LanguageModel, ModelInfo
from rootward.wire.channel import DRAFTING
from rootward.wire.clients import RemoteDrafter
from rootward.wire.server import RpcServer
from verifier_service.service import VerifierService
from verifier_service.session import Session

SPECS = ["ngram:", "recycling:", "ngram+recycling:", "random"]
PERIODIC = {"sharpness": 6.0}  # its greedy text runs into a circle soon
PROMPT = (1, 2, 3)


def lookup_of(spec: str, **settings) -> DrafterService:
    """The drafter of a model setting; "random": pseudo-random tokens of a vocabulary of five."""
    if spec == "random":
        return random_drafter(5, seed=1)
    return build_lookup(recipe_of(spec), DrafterSettings(model=spec, **settings))


def predicting(text: list[int]) -> DrafterService:
    """A drafter that is told what will be said."""
    lookup = LookupGrower(
        ModelInfo("prediction", 0, 4096),
        lambda message, _: Prediction(text, prefix=len(PROMPT)),
        incarnation=1,
    )
    return DrafterService(lookup, capacity=8, agree=without_model)


@asynccontextmanager
async def in_process(target: LanguageModel, drafter: DrafterService, **policy) -> AsyncIterator[VerifierService]:
    verifier = verifier_of(target, {"d": drafter}, **policy)
    async with drafter, verifier:
        await until(lambda: verifier.pool.up)
        yield verifier
        await until(lambda: not verifier._running and not drafter.grower.trees)


@asynccontextmanager
async def over_grpc(target: LanguageModel, drafter: DrafterService, **policy) -> AsyncIterator[VerifierService]:
    async with drafter, RpcServer("127.0.0.1:0", transport=DRAFTING, grace_s=0.1) as server:
        DrafterServicer(drafter, drafter.describe).register(server)
        await server.start()
        async with RemoteDrafter(server.address) as remote, verifier_of(target, {"d": remote}, **policy) as verifier:
            await until(lambda: verifier.pool.up)
            yield verifier
            await until(lambda: not verifier._running and not drafter.grower.trees)


def greedy_text(model: TabularModel, length: int) -> list[int]:
    text = list(PROMPT)
    while len(text) < len(PROMPT) + length:
        text.append(int(np.argmax(model.law(text))))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("connect", [in_process, over_grpc])
@pytest.mark.parametrize("spec", SPECS)
async def test_greedy_text_is_the_target_s_own(spec: str, connect) -> None:
    target, _ = tabular_pair()
    async with connect(target, lookup_of(spec)) as verifier:
        tokens, last = await collect(verifier, request(temperature=0.0, max_tokens=60))
        assert tokens == greedy_text(target, 60)
        assert last.finish.stats.num_spec_steps > 0


@pytest.mark.parametrize("spec", ["ngram:", "recycling:", "ngram+recycling:"])
@pytest.mark.parametrize("law", [DraftMode.TOP_K, DraftMode.COUPLED, None])
async def test_text_that_repeats_comes_several_tokens_per_pass(spec: str, law: DraftMode | None) -> None:
    target, _ = tabular_pair(**PERIODIC)
    async with in_process(target, lookup_of(spec)) as verifier:
        wanted = request(temperature=0.0, max_tokens=120, law=law)
        tokens, last = await collect(verifier, wanted)
        assert tokens == greedy_text(target, 120)
        assert last.finish.stats.block_efficiency > 1.5


@pytest.mark.parametrize("spec", ["ngram:", "ngram+recycling:"])
async def test_the_benchmark_counts_the_rounds_of_the_verifier(spec: str) -> None:
    target, _ = tabular_pair(**PERIODIC)
    recipe = recipe_of(spec)
    async with in_process(target, lookup_of(spec), num_draft_tokens=8, max_depth=8, topk=4) as verifier:
        tokens, last = await collect(verifier, request(temperature=0.0, max_tokens=120))
    counted = replayed(recipe.source(DraftMode.TOP_K, Successors()), PROMPT, tokens, 8)
    stats = last.finish.stats
    assert counted.rounds == stats.num_spec_steps + stats.num_plain_steps
    assert counted.block_efficiency == pytest.approx(stats.block_efficiency, abs=0.02)  # the last bonus may be cut off


@pytest.mark.parametrize("law", [DraftMode.SAMPLED, DraftMode.GREEDY])
@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.TOKEN])
async def test_chosen_nodes_are_accepted_by_ratio_tests(law: DraftMode, rule: Rule) -> None:
    target, _ = tabular_pair(**PERIODIC)
    async with in_process(target, lookup_of("ngram:")) as verifier:
        _, last = await collect(verifier, request(max_tokens=200, law=law, rule=rule))
        assert last.finish.stats.block_efficiency > 1.5


async def test_a_right_prediction_is_accepted_whole_and_a_wrong_one_changes_nothing() -> None:
    target, _ = tabular_pair()
    text = greedy_text(target, 60)
    for predicted, least in ((text, 4.0), ([(t + 1) % 5 for t in text], 1.0)):
        async with in_process(target, predicting(predicted)) as verifier:
            tokens, last = await collect(verifier, request(temperature=0.0, max_tokens=60))
            assert tokens == text
            assert last.finish.stats.block_efficiency >= least


async def test_many_sessions_share_a_drafter_and_leave_nothing_behind() -> None:
    target, _ = tabular_pair(slots=4, **PERIODIC)
    async with in_process(target, lookup_of("ngram+recycling:")) as verifier:
        jobs = [
            collect(verifier, request(f"r{i}", temperature=float(i % 2), max_tokens=1 + 5 * i, seed=i))
            for i in range(12)
        ]
        results = await asyncio.gather(*jobs)
        assert [len(tokens) for tokens, _ in results] == [1 + 5 * i for i in range(12)]


async def test_a_draining_drafter_hands_its_sessions_to_another() -> None:
    target, _ = tabular_pair()
    first, second = lookup_of("ngram:"), lookup_of("recycling:")
    verifier = verifier_of(target, {"one": first, "two": second})
    async with first, second, verifier:
        await until(lambda: len(verifier.pool.up) == 2)
        running = asyncio.create_task(collect(verifier, request(temperature=0.0, max_tokens=600)))
        await until(lambda: first.grower.trees or second.grower.trees)
        busy, spare = (first, second) if first.grower.trees else (second, first)
        await busy.drain()
        await until(lambda: spare.grower.trees or running.done())
        tokens, _ = await running
        assert tokens == greedy_text(target, 600)


async def test_the_same_drafter_as_a_process() -> None:
    target, _ = tabular_pair(**PERIODIC)
    with drafter_process("ngram:") as process:
        async with RemoteDrafter(process.address) as remote, verifier_of(target, {"d": remote}) as verifier:
            await until(lambda: verifier.pool.up)
            tokens, last = await collect(verifier, request(temperature=0.0, max_tokens=120))
            assert tokens == greedy_text(target, 120)
            assert last.finish.stats.block_efficiency > 1.5
        assert process.stop() == 0


# -- the law ----------------------------------------------------------------------------------------------------------

ALPHA = 1e-4
PAIRS = 600  # of requests


@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.TOKEN])
async def test_the_law_under_ratio_tests_is_the_target_s(rule: Rule) -> None:
    target, _ = tabular_pair(vocab=4, slots=16)
    async with in_process(target, lookup_of("ngram+recycling:")) as verifier:
        wishes = [request(f"r{i}", max_tokens=400, seed=i, rule=rule, law=DraftMode.SAMPLED) for i in range(32)]
        results = await asyncio.gather(*(collect(verifier, wish) for wish in wishes))
    assert sum(last.finish.stats.num_spec_steps for _, last in results) > 32 * 100
    assert p_value(target, [[*PROMPT, *tokens] for tokens, _ in results], least_freedom=30) > ALPHA / 2


async def first_tokens_of_the_second_of_two(drafter: DrafterService, target: TabularModel) -> np.ndarray:
    """Pairs of requests with one seed and one id, one after the other: what the second says first. The verifier has forgotten the first,
    as after many others."""
    counts = np.zeros(target.info.vocab_size)
    async with in_process(target, drafter, topk=1) as verifier:
        for seed in range(PAIRS):
            for _ in range(2):
                wish = request(f"{seed}", max_tokens=4, seed=seed, rule=Rule.TRAVERSAL, law=DraftMode.SAMPLED)
                tokens, _ = await collect(verifier, wish)
                verifier.admission._epochs.clear()
            counts[tokens[0]] += 1
    return counts


async def test_a_memory_of_the_session_s_own_coins_changes_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """If requests of one seed shared their coins, what one has said would have to stay out of the tree of the other. They share none: every
    session has a key of its own. Here, two have the same."""
    monkeypatch.setattr(Session, "key", property(lambda session: Key(session.request.seed, session.request.choice)))
    target = TabularModel(5, seed=4, sharpness=0.5)
    wanted = target.law(PROMPT) * PAIRS

    def p(counts: np.ndarray) -> float:
        return float(chi2.sf(float(((counts - wanted) ** 2 / wanted).sum()), 4))

    lookup = LookupGrower(
        ModelInfo("recycling:", 0, 4096),
        lambda message, shared: Recycling(shared),  # wrong: whatever the law
        incarnation=1,
    )
    wrong = DrafterService(lookup, capacity=8, agree=without_model)
    assert p(await first_tokens_of_the_second_of_two(lookup_of("recycling:"), target)) > ALPHA
    assert p(await first_tokens_of_the_second_of_two(wrong, target)) < 1e-6


# -- five drafters, one text ------------------------------------------------------------------------------------------


async def text_under(target: LanguageModel, drafter: Drafter | None, prompt: tuple[int, ...], length: int, **wish):
    """Tokens and statistics of one request at temperature 1 with a seed."""
    drafters = {} if drafter is None else {"d": drafter}
    mode = SpeculationMode.DISABLED if drafter is None else SpeculationMode.REQUIRED
    async with verifier_of(target, drafters) as verifier:
        await until(lambda: verifier.pool.up or drafter is None)
        tokens, last = await collect(
            verifier, request("r", prompt, seed=11, max_tokens=length, mode=mode, rule=Rule.MATCH, **wish)
        )
        await until(lambda: not verifier._running)  # the slot is free again
    return tokens, last.finish.stats


async def one_text(target: LanguageModel, drafters: dict[str, DrafterService | None], prompt, length: int) -> None:
    texts = {}
    for name, drafter in drafters.items():
        if drafter is None:
            texts[name], _ = await text_under(target, None, prompt, length)
            continue
        async with drafter:
            texts[name], stats = await text_under(target, drafter, prompt, length, law=DraftMode.COUPLED)
        assert stats.num_spec_steps > 0, name
    assert all(len(text) == length for text in texts.values())
    assert len({tuple(text) for text in texts.values()}) == 1, texts


async def test_five_drafters_one_text() -> None:
    target, draft = tabular_pair(vocab=20, sharpness=2.0)
    drafters = {
        "none": None,
        "draft": drafter_of(draft),
        "noisy": drafter_of(perturbed(target, 2.0, seed=9)),
        "ngram": lookup_of("ngram:"),
        "random": random_drafter(20, seed=1),
    }
    await one_text(target, drafters, PROMPT, 120)


async def test_all_drafters_give_one_text_with_the_demo_pair() -> None:
    paths = demo.paths()
    target = load_model(str(paths.target), max_slots=1)
    drafters = {
        "none": None,
        "draft": drafter_of(load_model(str(paths.draft), max_slots=1)),
        "ngram": lookup_of("ngram:"),
        "random": random_drafter(target.info.vocab_size, seed=1),
    }
    prompt = tuple(AutoTokenizer.from_pretrained(paths.target)(demo.prompts()[0])["input_ids"])
    await one_text(target, drafters, prompt, 40)
