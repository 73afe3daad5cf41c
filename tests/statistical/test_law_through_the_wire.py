"""The law of what the running system emits: verifier and drafter over gRPC, a tabular target, χ² against its exact law.

The statistic is that of `benchmarks.results.p_value`. Family-wise error of this file: ALPHA in all, ALPHA / (number of tests) each.
All cases together have more than 200 000 tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.heads import TabularHead, eagle3
from support.services import collect, over_grpc, request, tabular_pair
from unit.engine import networks

from benchmarks.results import p_value
from rootward.core.frames import ToDrafter
from rootward.core.growth import BestFirst
from rootward.core.requests import DraftMode, Rule
from rootward.engine.head_growth import TreeBatch, compile_growth, compiled_trees
from rootward.engine.head_model import HeadModel
from rootward.engine.heads import load_head
from rootward.engine.tabular import TabularModel
from rootward.engine.verify import ForestLaw, forest_law
from verifier_service.audit import DrafterAudit
from verifier_service.head_drafts import TextFeatures
from verifier_service.send_buffer import SendBuffer

ALPHA = 1e-4
VOCAB = 4
RULES = {
    "traversal-sampled": {"rule": Rule.TRAVERSAL, "law": DraftMode.SAMPLED},
    "traversal-greedy": {"rule": Rule.TRAVERSAL, "law": DraftMode.GREEDY},
    "token-sampled": {"rule": Rule.TOKEN, "law": DraftMode.SAMPLED},
    "match-coupled": {"rule": Rule.MATCH, "law": DraftMode.COUPLED},
}


async def texts_of(
    target: TabularModel,
    draft: TabularModel,
    *,
    num_requests: int,
    length: int,
    decide=None,
    ahead: int = 0,
    system: dict | None = None,
    **wish,
):
    prompt = (1, 2, 3)
    shape = {"num_draft_tokens": 6, "topk": 3, "num_ahead_tokens": ahead, **(system or {})}
    async with over_grpc(target, draft, decide=decide, **shape) as system:
        jobs = [
            collect(system.verifier, request(f"r{i}", prompt, max_tokens=length, seed=i, **wish))
            for i in range(num_requests)
        ]
        results = await asyncio.gather(*jobs)
    rounds = sum(last.finish.stats.num_spec_steps for _, last in results)
    assert rounds > 0.9 * sum(
        last.finish.stats.num_plain_steps + last.finish.stats.num_spec_steps for _, last in results
    )
    return [[*prompt, *tokens] for tokens, _ in results]


CASES = [*((rule, 0) for rule in RULES), ("traversal-sampled", 24), ("traversal-greedy", 24)]
HEAD_CASES = [("right", False), ("right", True), ("stale", False), ("missing", True), ("lost", False)]
COMPILED_CASES = ["traversal-sampled", "traversal-greedy"]
NUM_TESTS = len(CASES) + len(HEAD_CASES) + len(COMPILED_CASES)


@pytest.mark.parametrize(("rule", "ahead"), CASES)
async def test_the_system_emits_exactly_the_target_s_law(rule: str, ahead: int) -> None:
    target, draft = tabular_pair(vocab=VOCAB, noise=1.0, slots=32)
    texts = await texts_of(target, draft, num_requests=64, length=320, ahead=ahead, **RULES[rule])
    assert sum(map(len, texts)) - 3 * len(texts) >= 20_000
    assert p_value(target, texts) > ALPHA / NUM_TESTS


class Spoiled:
    """What becomes of features on their way to a drafter with a head."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def right(self) -> None:
        """Nothing."""

    def stale(self) -> None:
        """They are those of other positions."""
        add = TextFeatures.add

        def late(features: TextFeatures, first: int, rows: np.ndarray) -> None:
            add(features, first, np.roll(rows, 1, axis=0) if len(rows) > 1 else np.zeros_like(rows))

        self.patch.setattr(TextFeatures, "add", late)

    def missing(self) -> None:
        """Half of the commits have none."""
        self._edit(
            lambda frame: replace(
                frame,
                commits=tuple(replace(c, features=None) if c.base_len % 2 else c for c in frame.commits),
            )
        )

    def lost(self) -> None:
        """Half of the parts that an Open announces do not arrive, the others in reverse order."""
        self._edit(lambda frame: replace(frame, features=frame.features[::-2]))
        self.patch.setattr("rootward.core.frames.FEATURE_NUMBERS", 2)  # a part for every token

    def _edit(self, edit: Callable[[ToDrafter], ToDrafter]) -> None:
        take = SendBuffer.take

        async def edited(buffer: SendBuffer) -> ToDrafter:
            return edit(await take(buffer))

        self.patch.setattr(SendBuffer, "take", edited)


@pytest.mark.parametrize(("spoiled", "int8"), HEAD_CASES)
async def test_a_head_in_a_drafter_emits_the_target_s_law_whatever_its_features_are(
    spoiled: str, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = tabular_pair(vocab=VOCAB, slots=32)
    heads = [TabularHead(target, noise=0.5, beside=300.0 if int8 else 0.0, max_slots=32) for _ in range(2)]
    getattr(Spoiled(monkeypatch), spoiled)()
    system = {"fuse": heads[1], "int8": int8}
    texts = await texts_of(target, heads[0], num_requests=64, length=320, system=system, **RULES["traversal-sampled"])
    assert sum(map(len, texts)) - 3 * len(texts) >= 20_000
    assert p_value(target, texts) > ALPHA / NUM_TESTS


class TableOfFeatures(TabularHead):
    """Makes the features of a head with hidden states from the tokens of a tabular target: a random vector for each."""

    feature_size = 32

    def fuse(self, states_NS: torch.Tensor) -> torch.Tensor:
        table = torch.randn((self.vocab, self.feature_size), generator=torch.Generator().manual_seed(1))
        return table[states_NS[:, 0].long() % self.vocab]


async def texts_of_a_compiled_head(folder: Path, target: TabularModel, rule: str) -> list[list[int]]:
    """A head of random weights in a drafter, whose trees compiled code grows."""
    network = networks.tiny("LlamaConfig", vocab_size=VOCAB, num_hidden_layers=6, max_position_embeddings=4096)
    head = load_head(str(eagle3(folder, network, draft_ids=None, scale=0.3)), network)
    fuse = TableOfFeatures(target, max_slots=32)
    draft = HeadModel(head, target.info, name="head", max_slots=32, fingerprint=fuse.info.fingerprint)
    assert compiled_trees(draft, incarnation=1, best_first=BestFirst()) is not None
    compile_growth(draft)  # as a drafter does when it starts: rounds do not wait for a compiler
    system = {"fuse": fuse, "law_atoms": VOCAB - 1}
    return await texts_of(target, draft, num_requests=64, length=320, system=system, **RULES[rule])


@pytest.mark.parametrize("rule", COMPILED_CASES)
async def test_a_head_that_compiled_code_grows_in_a_drafter_leaves_the_target_s_law(rule: str, tmp_path: Path) -> None:
    target, _ = tabular_pair(vocab=VOCAB, slots=32)
    texts = await texts_of_a_compiled_head(tmp_path, target, rule)
    assert sum(map(len, texts)) - 3 * len(texts) >= 20_000
    assert p_value(target, texts) > ALPHA / NUM_TESTS


async def test_the_same_test_fails_when_a_drafter_declares_other_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = TreeBatch.declared

    def flatter(batch: TreeBatch, b: int, node: int) -> tuple[Any, Any] | None:
        row = declared(batch, b, node)
        return None if row is None else (row[0], np.ceil(np.sqrt(row[1])).astype(np.int64))

    monkeypatch.setattr(TreeBatch, "declared", flatter)
    monkeypatch.setattr(DrafterAudit, "trusts", lambda self, drafter, pool: True)
    target, _ = tabular_pair(vocab=VOCAB, slots=32)
    assert p_value(target, await texts_of_a_compiled_head(tmp_path, target, "traversal-sampled")) < 1e-12


def against_a_stale_row(forest, ids, weight, target_at, tail) -> ForestLaw:
    """Wrong: the ratio tests use another law than the one the children were drawn from (here: a flatter one)."""
    return forest_law(forest, ids, np.ceil(np.sqrt(weight)).astype(np.int64), target_at, tail)


async def test_the_same_test_fails_when_the_verifier_uses_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    # The audit sees that children were not drawn from this row, and turns to match, which is right whatever the row is.
    monkeypatch.setattr(DrafterAudit, "trusts", lambda self, drafter, pool: True)
    target, draft = tabular_pair(vocab=VOCAB, noise=1.0, slots=32)
    texts = await texts_of(
        target, draft, num_requests=32, length=640, decide=against_a_stale_row, **RULES["traversal-sampled"]
    )
    assert p_value(target, texts) < 1e-12
