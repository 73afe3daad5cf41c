"""Trees that the verifier looks up itself: the same text in fewer passes without a drafter; plain decoding where they do not pay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest
from support.services import collect, drafter_of, in_process, request, tabular_pair, until, verifier_of

from rootward.core.frames import FromDrafter, ToDrafter
from rootward.core.lookup import WIDTH
from rootward.core.requests import DraftMode, Rule, Speculation, SpeculationMode, Stopping, VerifierRequest
from rootward.engine.tabular import TabularModel
from rootward.errors import NoDrafter, NotFound, Unavailable
from verifier_service.service import VerifierService

PERIODIC = {"sharpness": 6.0}  # its greedy text runs into a circle soon
AUTO = {"mode": SpeculationMode.AUTO, "max_tokens": 300}


def greedy_text(model: TabularModel, length: int) -> list[int]:
    text = [1, 2, 3]
    while len(text) < 3 + length:
        text.append(int(np.argmax(model.law(text))))
    return text[3:]


def rounds(verifier: VerifierService, kind: str) -> float:
    return verifier.metrics.registry.get_sample_value("rootward_spec_decode_rounds_total", {"kind": kind}) or 0.0


@pytest.mark.parametrize("kind", ["ngram", "recycling", "ngram+recycling"])
async def test_text_that_repeats_comes_several_tokens_per_pass_without_a_drafter(kind: str) -> None:
    target, _ = tabular_pair(**PERIODIC)
    async with verifier_of(target, {}, local_draft=kind) as verifier:
        wanted = VerifierRequest(
            "r", (1, 2, 3), request(temperature=0.0).sampling, Stopping(300), named(kind, SpeculationMode.REQUIRED)
        )
        tokens, last = await collect(verifier, wanted)
        assert tokens == greedy_text(target, 300)
        assert last.finish.stats.block_efficiency > 2
        assert last.finish.stats.drafter == kind
        assert rounds(verifier, "local") == last.finish.stats.num_spec_steps
        assert rounds(verifier, "tree") == 0
        await until(lambda: not verifier._running)
        target.check_idle()


def named(drafter: str, mode: SpeculationMode = SpeculationMode.AUTO) -> Speculation:
    return Speculation(mode, drafter=drafter)


class PaidByRow(TabularModel):
    """Two rows take half longer than one: where verifying costs next to nothing, trees that are hardly ever accepted may stay."""

    def forward(self, batch, **wanted):
        self.step_ms = 3.0 + 3.0 * sum(len(rows.node) for rows in batch)
        return super().forward(batch, **wanted)


@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.MATCH])
async def test_where_looked_up_trees_are_not_accepted_decoding_is_plain(rule: Rule) -> None:
    """The text is close to noise: a few trials, then none for a long while."""
    target = PaidByRow(40, seed=1, sharpness=0.2)
    async with verifier_of(target, {}, local_draft="ngram") as verifier:
        _, last = await collect(verifier, request(rule=rule, **AUTO))
        assert last.finish.stats.num_spec_steps < 60


async def test_text_under_a_seed_does_not_depend_on_what_is_looked_up() -> None:
    target, _ = tabular_pair(**PERIODIC)
    texts = []
    for kind in ("none", "ngram", "recycling"):
        async with verifier_of(target, {}, local_draft=kind) as verifier:
            wanted = request(law=DraftMode.COUPLED, seed=7, **AUTO)
            texts.append((await collect(verifier, wanted))[0])
    assert texts[0] == texts[1] == texts[2]


class Gate:
    """A drafter that can be cut off."""

    def __init__(self, drafter) -> None:
        self.drafter, self.open = drafter, asyncio.Event()
        self.open.set()

    async def session(self, inbound: AsyncIterator[ToDrafter]) -> AsyncGenerator[FromDrafter, None]:
        if not self.open.is_set():
            raise Unavailable("cut off")
        async with aclosing(self.drafter.session(inbound)) as frames:
            async for frame in frames:
                if not self.open.is_set():
                    raise Unavailable("cut off")
                yield frame


async def test_a_session_that_loses_its_drafter_continues_with_local_trees() -> None:
    target, draft = tabular_pair(**PERIODIC)
    gate = Gate(drafter_of(draft))
    async with gate.drafter, verifier_of(target, {"d": gate}, local_draft="ngram", draft_wait_ms=50) as verifier:
        await until(lambda: verifier.pool.up)
        running = asyncio.create_task(collect(verifier, request(temperature=0.0, max_tokens=800)))
        await until(lambda: rounds(verifier, "tree") > 3)
        gate.open.clear()
        tokens, last = await running
        assert tokens == greedy_text(target, 800)
        assert rounds(verifier, "local") > 3
        assert rounds(verifier, "local") + rounds(verifier, "tree") == last.finish.stats.num_spec_steps


async def test_a_request_may_name_its_drafter_and_unknown_names_are_refused() -> None:
    target, draft = tabular_pair(**PERIODIC)
    drafter = drafter_of(draft)
    async with drafter, verifier_of(target, {"d": drafter}, local_draft="ngram") as verifier:
        await until(lambda: verifier.pool.up)
        wanted = request(temperature=0.0, max_tokens=60)
        for name, kind in (("ngram", "local"), ("default", "tree")):
            before = rounds(verifier, kind)
            asked = VerifierRequest(
                name, wanted.prompt, wanted.sampling, wanted.stopping, named(name, SpeculationMode.REQUIRED)
            )
            tokens, last = await collect(verifier, asked)
            assert tokens == greedy_text(target, 60)
            assert rounds(verifier, kind) - before == last.finish.stats.num_spec_steps > 0
        unknown = VerifierRequest("u", wanted.prompt, speculation=named("cheap"))
        with pytest.raises(
            NotFound, match=r"speculation.drafter: 'cheap' is unknown here; use one of 'default', 'ngram'"
        ):
            await collect(verifier, unknown)
        for rule in (Rule.BLOCK, Rule.MULTI_STEP):  # what is looked up is no chain and no copies
            wish = Speculation(SpeculationMode.REQUIRED, rule, drafter="ngram")
            with pytest.raises(NoDrafter, match=r"speculation.mode: ") as refused:
                await collect(verifier, VerifierRequest(rule.value, (1, 2), speculation=wish))
            assert refused.value.metadata["field"] == "speculation.mode"
    async with verifier_of(target, {}) as verifier:
        asked = VerifierRequest("r", (1, 2), speculation=named("default", SpeculationMode.REQUIRED))
        with pytest.raises(NoDrafter):
            await collect(verifier, asked)


async def test_tables_of_successors_take_the_target_s_most_likely_tokens_of_every_verified_row() -> None:
    target, _ = tabular_pair(**PERIODIC)
    async with verifier_of(target, {}, local_draft="ngram+recycling") as verifier:
        wanted = request(temperature=0.0, max_tokens=2, mode=SpeculationMode.AUTO)
        tokens, _ = await collect(verifier, wanted)
        text = [*wanted.prompt, *tokens]
        (table,) = verifier.local._memories.values()
        likely = np.argsort(-np.asarray(target.law(text[:-1])), kind="stable").tolist()
        assert list(table.row(text[-2])) == likely[:WIDTH]


@asynccontextmanager
async def verifier_with(kind: str) -> AsyncIterator[VerifierService]:
    """A verifier with a drafter, or with a look-up of its own."""
    target, draft = tabular_pair(**PERIODIC)
    if kind == "drafter":
        async with in_process(target, draft) as system:
            yield system.verifier
    else:
        async with verifier_of(target, {}, local_draft=kind) as verifier:
            yield verifier


@pytest.mark.parametrize("kind", ["drafter", "ngram"])
async def test_only_trees_of_drafters_give_a_step_the_speed_factor_of_drafters(kind: str) -> None:
    """Another process may take time of the target's machine for them; a tree that is looked up takes none."""
    async with verifier_with(kind) as verifier:
        learned: list[tuple[bool, bool]] = []
        step_time = verifier.engine.rounds.controller.step_time
        step_time.add = lambda rows, seconds, *, drafted: learned.append((rows > 1, drafted))
        drafts = named("" if kind == "drafter" else kind, SpeculationMode.REQUIRED)
        await collect(verifier, VerifierRequest("r", (1, 2, 3), stopping=Stopping(60), speculation=drafts))
    assert (True, kind == "drafter") in learned
    assert all(drafted == (kind == "drafter" and has_tree) for has_tree, drafted in learned)
