"""The law of what is emitted while the link between verifier and drafter comes and goes.

Jitter and loss delay frames, so that trees are launched half grown; every now and then the link is so slow that rounds are decoded plainly
in between and growth of old bases arrives late. None of it may show in the tokens: χ² as in `test_law_through_the_wire`.
"""

from __future__ import annotations

import asyncio
from itertools import cycle

import pytest
from statistical.test_law_through_the_wire import ALPHA, RULES, VOCAB
from support.services import System, collect, over_grpc, request, tabular_pair, until

from benchmarks.results import p_value
from benchmarks.slow_link import Conditions

NEAR = Conditions(delay_s=0.001, jitter_s=0.002, loss=0.02)
FAR = Conditions(delay_s=0.15)  # there and back longer than anybody waits, and too short for a breaker
PATIENCE_S = 0.1


def num_rounds(system: System, kind: str) -> float:
    return system.service.metrics.registry.get_sample_value("rootward_spec_decode_rounds_total", {"kind": kind}) or 0.0


async def come_and_go(system: System, *, phase: int) -> None:
    """The link is near for so many rounds with trees, then far for a third as many plain ones."""
    assert system.link is not None
    for conditions, kind, rounds in cycle(((NEAR, "tree", phase), (FAR, "plain", phase // 3))):
        system.link.conditions = conditions
        end = num_rounds(system, kind) + rounds
        await until(lambda: num_rounds(system, kind) >= end, 300)  # noqa: B023  # called before the next turn


async def emitted(rule: str, *, num_requests: int, length: int) -> tuple[float, list[int]]:
    """p value of the texts, and the rounds (with a tree, plain) they took."""
    target, draft = tabular_pair(vocab=VOCAB, noise=1.0, slots=num_requests)
    shape = {"num_draft_tokens": 6, "topk": 3, "draft_wait_ms": 1e3 * PATIENCE_S}
    async with over_grpc(target, draft, conditions=NEAR, **shape) as system:
        weather = asyncio.create_task(come_and_go(system, phase=10 * num_requests))
        jobs = [
            collect(system.verifier, request(f"r{i}", max_tokens=length, seed=i, **RULES[rule]))
            for i in range(num_requests)
        ]
        results = await asyncio.gather(*jobs)
        weather.cancel()
    stats = [last.finish.stats for _, last in results]
    rounds = [sum(s.num_spec_steps for s in stats), sum(s.num_plain_steps for s in stats)]
    return p_value(target, [[1, 2, 3, *tokens] for tokens, _ in results], least_freedom=60), rounds


async def test_a_link_that_comes_and_goes_does_not_show_in_the_law() -> None:
    p, (with_tree, plain) = await emitted("traversal-sampled", num_requests=16, length=330)
    assert with_tree > 300
    assert plain > 200
    assert p > ALPHA


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
async def test_a_link_that_comes_and_goes_shows_under_no_rule(rule: str) -> None:
    p, (with_tree, plain) = await emitted(rule, num_requests=64, length=1600)
    assert with_tree > 3000
    assert plain > 2000
    assert p > ALPHA / len(RULES)
