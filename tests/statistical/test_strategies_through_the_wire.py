"""Each draft strategy with each rule that may verify it, through running services: drafter service, wire, verifier service. The counts
of the emitted tokens are compared with the target's exact law by one χ² statistic each. Family-wise error of this file: ALPHA in all."""

from __future__ import annotations

import asyncio

import pytest
from statistical.test_law_through_the_wire import ALPHA, VOCAB
from support.services import collect, over_grpc, request, tabular_pair

from benchmarks.results import p_value
from rootward.core.pairing import check_rule
from rootward.core.requests import DraftMode, DraftStrategy, Rule, Speculation, SpeculationMode

STRATEGIES = {  # as asked for: mode of the trees
    "best_first": DraftMode.SAMPLED,
    "chain:4": DraftMode.SAMPLED,
    "iid:2,2": DraftMode.IID,
    "rsd_c:2,2": DraftMode.SAMPLED,
    "rsd_s:2,3": DraftMode.SAMPLED,
    "greedy": DraftMode.GREEDY,
    "greedy:2,2": DraftMode.GREEDY,
    "top_k": DraftMode.TOP_K,
    "top_k:2,2": DraftMode.TOP_K,
    "marginals:3": DraftMode.TOP_K,
    "coupled": DraftMode.COUPLED,
    "coupled:2,2": DraftMode.COUPLED,
}


def served(strategy: DraftStrategy, mode: DraftMode, rule: Rule) -> bool:
    try:
        check_rule(strategy, mode, rule)
    except ValueError:
        return False
    return mode.ratio is (rule is not Rule.MATCH)  # drawn trees by ratio tests, the others by the target's own tokens


PAIRS = [
    (text, rule) for text, mode in STRATEGIES.items() for rule in Rule if served(DraftStrategy.parse(text), mode, rule)
]
NUM_REQUESTS, LENGTH = 32, 224


def test_every_strategy_and_every_rule_is_there() -> None:
    assert {text for text, _ in PAIRS} == set(STRATEGIES)
    assert {rule for _, rule in PAIRS} == set(Rule)


@pytest.mark.parametrize(("text", "rule"), PAIRS, ids=lambda value: getattr(value, "value", value))
async def test_the_services_emit_exactly_the_target_s_law(text: str, rule: Rule) -> None:
    target, draft = tabular_pair(vocab=VOCAB, noise=1.0, slots=NUM_REQUESTS)
    mode, strategy, prompt = STRATEGIES[text], DraftStrategy.parse(text), (1, 2, 3)
    law = mode if text == "best_first" else None
    async with over_grpc(target, draft, num_draft_tokens=8, topk=3) as system:
        jobs = []
        for seed in range(NUM_REQUESTS):
            wish = Speculation(SpeculationMode.REQUIRED, rule, law, strategy=strategy)
            jobs.append(collect(system.verifier, request(f"r{seed}", prompt, max_tokens=LENGTH, seed=seed, wish=wish)))
        results = await asyncio.gather(*jobs)
    stats = [last.finish.stats for _, last in results]
    assert {one.verification for one in stats} == {rule.value}
    assert sum(one.num_spec_steps for one in stats) > 0.9 * sum(
        one.num_spec_steps + one.num_plain_steps for one in stats
    )
    assert p_value(target, [[*prompt, *tokens] for tokens, _ in results]) > ALPHA / len(PAIRS)
    per_pass = 1 + sum(one.num_accepted_draft_tokens for one in stats) / sum(one.num_spec_steps for one in stats)
    print(f"{text:12} {rule.value:10} {per_pass:.2f} tokens a pass")
    assert per_pass > 1.15
