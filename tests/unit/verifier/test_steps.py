"""Engine steps: prefill and rounds share a forward, sessions past their deadline take no part, commits leave before the next plan."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.services import collect, in_process, request, tabular_pair, verifier_of

from rootward.core.living_tree import ROOT, LivingTree
from rootward.core.requests import DraftMode, Rule, Sampling, SpeculationMode
from rootward.core.rng import Key
from rootward.engine.tabular import TabularModel
from rootward.errors import DeadlineExceeded, Unavailable
from verifier_service.runner import Chunk, Round, Runner
from verifier_service.session import Session


def round_of(slot: int, text: list[int]) -> Round:
    return Round(slot, text[-1], len(text), Rule.TRAVERSAL, Sampling(), Key(7), 1)


def test_a_mixed_step_is_its_two_halves_in_one_forward() -> None:
    texts = [1, 2, 3, 4], [2, 2, 1]
    outcomes, lengths, forwards = [], [], []
    for mixed in (True, False):
        model = TabularModel(5, seed=1)
        runner, calls = Runner(model), []
        honest = model.forward
        model.forward = lambda *a, calls=calls, honest=honest, **k: calls.append(1) or honest(*a, **k)
        old, new = model.open(), model.open()
        runner.step([Chunk(old, tuple(texts[0][:-1]))], [])
        chunk = Chunk(new, tuple(texts[1][:-1]))
        if mixed:
            outcomes.append(runner.step([chunk], [round_of(old, texts[0])]))
        else:
            assert runner.step([chunk], []) == []
            outcomes.append(runner.step([], [round_of(old, texts[0])]))
        lengths.append((model.length(old), model.length(new)))
        forwards.append(len(calls))
    assert outcomes[0] == outcomes[1]
    assert lengths[0] == lengths[1] == (4, 2)
    assert forwards == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_draft_head_observes_the_states_of_committed_rows_in_their_type(dtype: torch.dtype) -> None:
    class Exposing(TabularModel):
        states = torch.arange(14, dtype=dtype).view(7, 2)

        def expose(self, states: Sequence[int]) -> None: ...

    observed: dict[int, tuple[int, torch.Tensor]] = {}
    heads: Any = SimpleNamespace(model=SimpleNamespace(reads=(0,)))
    heads.observe = lambda session, first, states: observed.update({session: (first, states)})
    model = Exposing(5, seed=1)
    runner = Runner(model, heads=heads)
    text = [1, 2, 3]
    verified = replace(round_of(model.open(), text), snapshot=drafted(text).snapshot(8), fill=(1, 2), session=1)
    (outcome,) = runner.step([Chunk(model.open(), (4, 3), session=2)], [verified])
    path = [4 + node for node in outcome.path]  # behind the chunk, the fill and the root
    assert observed[2][0] == observed[1][0] == 0
    assert torch.equal(observed[2][1], Exposing.states[:2])
    assert torch.equal(observed[1][1], Exposing.states[[2, 3, 4, *path]])


def drafted(text: list[int]) -> LivingTree:
    """A path of two chosen nodes, which every rule may verify."""
    tree = LivingTree(len(text), 0, vocab_size=5)
    tree.root.token = text[-1]
    tree.draw(tree.draw(ROOT, 1, sampled=False), 2, sampled=False)
    return tree


@pytest.mark.parametrize("grown", [False, True])
def test_a_first_round_takes_the_end_of_its_prefill_along(grown: bool) -> None:
    text, model = [2, 2, 1, 3], TabularModel(5, seed=1)
    runner, found = Runner(model), []
    first = replace(round_of(0, text), rule=Rule.MATCH, snapshot=drafted(text).snapshot(8) if grown else None)
    for num in (0, 1, 3):  # of the prefill's three tokens go along
        slot = model.open()
        if num < 3:
            runner.step([Chunk(slot, tuple(text[: 3 - num]))], [])
        (outcome,) = runner.step([], [replace(first, fill=tuple(text[3 - num : 3]))])
        found.append((outcome, model.length(slot)))
        assert model.length(slot) == len(text) + len(outcome.tokens) - 1
        model.close(slot)
    assert found == found[:1] * 3


async def test_the_first_token_comes_with_the_end_of_the_prompt() -> None:
    target, _ = tabular_pair()
    honest, rows = target.forward, []
    target.forward = lambda batch, **k: rows.append([len(r.node) for r in batch]) or honest(batch, **k)
    service = verifier_of(target, {}, max_num_batched_tokens=4)
    async with service:
        for i, (size, forwards) in enumerate([(1, [1]), (5, [5]), (6, [4, 2]), (10, [4, 4, 2])]):
            rows.clear()
            prompt = tuple(1 + n % 3 for n in range(size))
            wanted = request(f"r{i}", prompt, max_tokens=1, mode=SpeculationMode.AUTO, cache_salt=str(i))
            assert len([run async for run in service.generate(wanted)]) == 1
            assert [size for step in rows for size in step] == forwards


class BrokenTarget(TabularModel):
    """Its logits are NaN in rows behind the token 4."""

    def forward(self, batch, **options):
        logits = super().forward(batch, **options)
        counts = options.get("num_logits") or [1] * len(batch)
        behind = [
            token for rows, num in zip(batch, counts, strict=True) for token in rows.token[len(rows.token) - num :]
        ]
        logits[[token == 4 for token in behind]] = float("nan")
        return logits


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.MATCH])
async def test_logits_that_are_no_numbers_end_their_own_request_alone(rule: Rule, temperature: float) -> None:
    def wanted(name: str, prompt: tuple[int, ...]):
        one = request(name, prompt, seed=5, mode=SpeculationMode.AUTO, rule=rule)
        return replace(one, sampling=Sampling(temperature, allowed_token_ids=(0, 1, 2, 3)))

    async with verifier_of(BrokenTarget(5, seed=1), {}) as service:
        alone, _ = await collect(service, wanted("good", (1, 2, 3)))
    async with verifier_of(BrokenTarget(5, seed=1), {}) as service:
        good, *broken = await asyncio.gather(
            collect(service, wanted("good", (1, 2, 3))),
            *(collect(service, wanted(f"broken {i}", (2, 3, 4))) for i in range(3)),
            return_exceptions=True,
        )
        assert service.alive
    assert good[0] == alone
    assert [type(one) for one in broken] == [Unavailable] * 3


def session(service, number: int = 1, **about) -> Session:
    wanted = request(f"r{number}", mode=SpeculationMode.AUTO, **about)
    one = Session(number, wanted, Rule.TRAVERSAL, DraftMode.SAMPLED, frozenset(), uses_drafters=False)
    service._live[wanted.request_id] = one
    service.slots.waiting.push(one)
    return one


@pytest.mark.parametrize(("phase", "fed"), [("queue", None), ("prefill", 1), ("decode", 2)])
async def test_a_session_past_its_deadline_ends_before_the_next_step(phase: str, fed: int | None) -> None:
    service = verifier_of(tabular_pair()[0], {})
    late, other = session(service, 1, deadline_s=5.0), session(service, 2, deadline_s=500.0)
    now_s = asyncio.get_running_loop().time()
    if fed is not None:
        service.engine.prepare()
        late.fed = other.fed = fed
    late.deadline_s, other.deadline_s = now_s, now_s + 1000.0
    service.engine.prepare()
    assert late.done
    error = late.out.get_nowait()
    assert isinstance(error, DeadlineExceeded)
    assert error.metadata == {"phase": phase}
    assert list(service._running) == [2]
    step = service.engine.plan()
    assert {n for n, _ in step.prefill} | set(step.decode) == {2}


async def test_commits_leave_before_the_next_step_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[str] = []

    def noted(owner: object, name: str) -> None:
        act = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (acts.append(name), act(*args))[1])

    async with in_process(*tabular_pair()) as system:
        noted(system.service.pool, "commit")
        noted(system.service.pool, "flush")
        noted(system.service.engine, "plan")
        await collect(system.verifier, request(max_tokens=20))
    following = [after for act, after in pairwise(acts) if act == "commit"]
    assert len(following) > 2
    assert set(following) == {"flush"}
