"""The distribution of emitted tokens under a link between verifier and drafter whose delay changes.

Jitter and loss delay frames, so that rounds verify incomplete trees. From time to time the delay is longer than rounds wait, so that
rounds are decoded plainly and growth for earlier roots arrives late. A χ² test as in `test_law_through_the_wire` compares the tokens with
the target's distribution.
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
FAR = Conditions(delay_s=0.15)  # a round trip is longer than rounds wait, and shorter than opens a circuit
DRAFT_WAIT_S = 0.1


def num_rounds(system: System, kind: str) -> float:
    return system.service.metrics.registry.get_sample_value("rootward_spec_decode_rounds_total", {"kind": kind}) or 0.0


async def vary_delay(system: System, *, phase: int) -> None:
    """By turns: NEAR for `phase` rounds with trees, FAR for a third as many plain rounds."""
    assert system.link is not None
    for conditions, kind, rounds in cycle(((NEAR, "tree", phase), (FAR, "plain", phase // 3))):
        system.link.conditions = conditions
        end = num_rounds(system, kind) + rounds
        await until(lambda: num_rounds(system, kind) >= end, 300)  # noqa: B023  # called before the next turn


async def emitted(rule: str, *, num_requests: int, length: int) -> tuple[float, list[int]]:
    """(p value of the texts, [number of rounds with a tree, number of plain rounds])"""
    target, draft = tabular_pair(vocab=VOCAB, noise=1.0, slots=num_requests)
    shape = {"num_draft_tokens": 6, "topk": 3, "draft_wait_ms": 1e3 * DRAFT_WAIT_S}
    async with over_grpc(target, draft, conditions=NEAR, **shape) as system:
        varying = asyncio.create_task(vary_delay(system, phase=10 * num_requests))
        jobs = [
            collect(system.verifier, request(f"r{i}", max_tokens=length, seed=i, **RULES[rule]))
            for i in range(num_requests)
        ]
        results = await asyncio.gather(*jobs)
        varying.cancel()
    stats = [last.finish.stats for _, last in results]
    rounds = [sum(s.num_spec_steps for s in stats), sum(s.num_plain_steps for s in stats)]
    return p_value(target, [[1, 2, 3, *tokens] for tokens, _ in results], least_freedom=60), rounds


async def test_a_link_of_varying_delay_does_not_change_the_distribution() -> None:
    p, (with_tree, plain) = await emitted("traversal-sampled", num_requests=16, length=330)
    assert with_tree > 300
    assert plain > 200
    assert p > ALPHA


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
async def test_a_link_of_varying_delay_changes_the_distribution_under_no_rule(rule: str) -> None:
    p, (with_tree, plain) = await emitted(rule, num_requests=64, length=1600)
    assert with_tree > 3000
    assert plain > 2000
    assert p > ALPHA / len(RULES)
