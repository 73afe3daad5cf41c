"""A drafter that cheats is caught through the services, no request fails, and what match verifies has the target's distribution."""

from __future__ import annotations

import asyncio

import pytest
from statistical.test_law_through_the_wire import VOCAB
from support.services import System, collect, in_process, request, tabular_pair

from benchmarks import dishonest
from benchmarks.results import p_value
from rootward.core.distribution import DraftDistribution
from rootward.core.requests import DraftMode, Rule
from rootward.engine.tabular import TabularModel
from rootward.ports import DEFAULT_POOL

RATIO = {"rule": Rule.TRAVERSAL, "law": DraftMode.SAMPLED}
SHAPE = {"num_draft_tokens": 6, "topk": 3}


@pytest.fixture
def cheating(monkeypatch: pytest.MonkeyPatch):
    """Makes every drafter of this process cheat."""

    def install(spec: str) -> None:
        monkeypatch.setattr(DraftDistribution, "draw", DraftDistribution.draw)  # to be restored
        dishonest.install(dishonest.cheat_of(spec))

    return install


async def texts_of(system: System, name: str, *, num_requests: int, length: int) -> list[list[int]]:
    jobs = [
        collect(system.verifier, request(f"{name}{i}", max_tokens=length, seed=i, **RATIO)) for i in range(num_requests)
    ]
    results = await asyncio.gather(*jobs)
    assert all(last.finish.stats.num_spec_steps for _, last in results)
    assert all(len(tokens) == length for tokens, _ in results)
    return [[1, 2, 3, *tokens] for tokens, _ in results]


def pair() -> tuple[TabularModel, TabularModel]:
    return tabular_pair(vocab=VOCAB, noise=1.0, slots=16)


@pytest.mark.parametrize("spec", ["argmax", "temperature:0.6", "boost:0"])
async def test_a_cheating_drafter_is_caught_and_no_request_fails(spec: str, cheating) -> None:
    cheating(spec)
    async with in_process(*pair(), **SHAPE) as system:
        audit = system.service.audit
        await texts_of(system, "a", num_requests=8, length=400)
        assert not audit.trusts("d", DEFAULT_POOL)
        info = await system.verifier.get_info()
        assert info.stats["drafter_caught/d"] == 1.0
        draws = audit._drafters["d"].record.num_draws
        await texts_of(system, "b", num_requests=4, length=60)
        assert audit._drafters["d"].record.num_draws - draws <= 256  # draws of match are not looked at


async def test_an_honest_drafter_is_not_caught() -> None:
    async with in_process(*pair(), **SHAPE) as system:
        await texts_of(system, "a", num_requests=8, length=300)
        assert system.service.audit.trusts("d", DEFAULT_POOL)
        assert system.service.audit._drafters["d"].record.num_draws > 1000


async def test_a_cheating_drafter_changes_the_distribution_under_ratio_tests(cheating, monkeypatch) -> None:
    """The wrong twin: without the audit."""
    cheating("argmax")
    target, draft = pair()
    async with in_process(target, draft, **SHAPE) as system:
        monkeypatch.setattr(system.service.audit, "trusts", lambda drafter, pool: True)
        texts = await texts_of(system, "a", num_requests=16, length=400)
    assert p_value(target, texts, least_freedom=60) < 1e-6


async def test_after_the_alarm_the_distribution_is_the_targets_again(cheating) -> None:
    cheating("argmax")
    target, draft = pair()
    async with in_process(target, draft, **SHAPE) as system:
        await texts_of(system, "a", num_requests=8, length=100)
        assert not system.service.audit.trusts("d", DEFAULT_POOL)
        texts = await texts_of(system, "b", num_requests=16, length=400)
    assert p_value(target, texts, least_freedom=60) > 1e-4


async def test_an_untrusted_pool_cannot_change_the_distribution(cheating) -> None:
    cheating("argmax")
    target, draft = pair()
    async with in_process(target, draft, untrusted_pools=[DEFAULT_POOL], **SHAPE) as system:
        texts = await texts_of(system, "a", num_requests=16, length=400)
        assert not any(audited.record.num_draws for audited in system.service.audit._drafters.values())
    assert p_value(target, texts, least_freedom=60) > 1e-4


async def test_a_drafter_that_peeks_at_the_target_is_caught(cheating, monkeypatch) -> None:
    from rootward.engine import grower

    target, draft = pair()
    for owner, name in (
        (grower.Grower, "_tree_of"),
        (grower.Grower, "_reroot"),
        (grower, "_expand"),
        (grower, "rows_of"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be restored
    dishonest.install_peeking(TabularModel(VOCAB, seed=1, max_slots=2))
    cheating("peek")
    async with in_process(target, draft, **SHAPE) as system:
        await texts_of(system, "a", num_requests=8, length=300)
        assert not system.service.audit.trusts("d", DEFAULT_POOL)
