"""Trees from the marginals of a block head (DFlash) in the verifier's process, of a tiny real target: greedy text is plain text, sampled
text has the target's law.

Law: given everything before it, token t has the law p_t of one cache-free forward. So the sums of (one-hot of the token - p_t), by the
token before, have mean 0 and covariance sum of (diag p_t - p_t p_t'), whatever the rounds were; their quadratic form is chi-square.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from support.heads import dflash
from support.services import collect, over_grpc, request, until, verifier_of, verifier_settings
from unit.engine import networks

from rootward.core.distribution import DraftDistribution
from rootward.core.requests import DraftMode, DraftStrategy, Rule, Speculation, SpeculationMode
from rootward.engine.block_head_model import BlockHeadModel
from rootward.engine.head_loading import fingerprint
from rootward.engine.heads import load_head
from rootward.engine.model import HuggingFaceModel
from rootward.plan.__main__ import is_head
from verifier_service.target import load_local_head

ALPHA = 1e-6
VOCAB, LENGTH, SESSIONS = 8, 24, 16


def pair(folder: Path, *, vocab: int = VOCAB) -> tuple[HuggingFaceModel, BlockHeadModel]:
    """A target, and the head that its verifier loads."""
    network = networks.tiny("LlamaConfig", num_hidden_layers=4, vocab_size=vocab)
    model = HuggingFaceModel(network, name="target", max_slots=SESSIONS, max_len=96)
    dflash(folder, network, layer_ids=(0, 3), block_size=6, scale=0.2)
    settings = verifier_settings(local_draft=f"head:{folder}", max_num_seqs=SESSIONS)
    head = load_local_head(settings, model)
    assert isinstance(head, BlockHeadModel)
    assert is_head(str(folder))  # for `rootward plan`
    return model, head


async def texts_of(
    model: HuggingFaceModel, head: BlockHeadModel, *, num_requests: int, **wanted: Any
) -> list[list[int]]:
    async with verifier_of(
        model, {}, head=head, num_draft_tokens=8, max_num_queued_reqs=num_requests, max_num_seqs=SESSIONS
    ) as verifier:
        jobs = [
            request(f"r{i}", (3, 2 + i % 5, 4), **({"max_tokens": LENGTH, "seed": i} | wanted))
            for i in range(num_requests)
        ]
        results = await asyncio.gather(*(collect(verifier, job) for job in jobs))
        await until(lambda: not verifier._running)
    drafted = any(job.speculation.mode is SpeculationMode.REQUIRED for job in jobs)
    assert (sum(last.finish.stats.num_accepted_draft_tokens for _, last in results) > 0) == drafted
    assert head.num_free_slots == SESSIONS
    model.check_idle()
    head.check_idle()
    return [tokens for tokens, _ in results]


STRATEGIES = {
    "best_first": Speculation(SpeculationMode.REQUIRED),
    "marginals": Speculation(SpeculationMode.REQUIRED, strategy=DraftStrategy("marginals")),
    "coupled": Speculation(SpeculationMode.REQUIRED, Rule.MATCH, DraftMode.COUPLED),
    "rsd_s:3,3": Speculation(SpeculationMode.REQUIRED, strategy=DraftStrategy("rsd_s", (3, 3))),
    "chain:4": Speculation(SpeculationMode.REQUIRED, Rule.BLOCK, strategy=DraftStrategy("chain", (4,))),
    "iid:2,2": Speculation(SpeculationMode.REQUIRED, Rule.MULTI_STEP, strategy=DraftStrategy("iid", (2, 2))),
}


@pytest.mark.parametrize("strategy", ["best_first", "marginals"])
async def test_greedy_text_is_plain_text(tmp_path: Path, strategy: str) -> None:
    model, head = pair(tmp_path, vocab=24)
    wanted = {"temperature": 0.0, "num_requests": SESSIONS}
    texts = await texts_of(model, head, wish=STRATEGIES[strategy], **wanted)
    assert texts == await texts_of(model, head, mode=SpeculationMode.DISABLED, **wanted)


async def test_a_block_head_in_a_drafter_service_drafts_greedy_text_from_features(tmp_path: Path) -> None:
    model, head = pair(tmp_path, vocab=24)
    loaded, files = load_head(str(tmp_path), model.network), fingerprint(str(tmp_path))
    own = BlockHeadModel(loaded, model.info, name="own", max_slots=SESSIONS, fingerprint=files)
    jobs = [request(f"r{i}", (3, 2 + i, 4), temperature=0.0, max_tokens=LENGTH) for i in range(4)]
    async with over_grpc(model, own, fuse=head, num_draft_tokens=8, max_num_seqs=SESSIONS) as system:
        found = await asyncio.gather(*(collect(system.verifier, job) for job in jobs))
    async with verifier_of(model, {}, max_num_seqs=SESSIONS) as verifier:
        disabled = Speculation(SpeculationMode.DISABLED)
        plain = await asyncio.gather(*(collect(verifier, replace(job, speculation=disabled)) for job in jobs))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
    assert sum(last.finish.stats.num_accepted_draft_tokens for _, last in found) > 0


@torch.inference_mode()
def p_value(model: HuggingFaceModel, texts: list[list[int]]) -> float:
    sums = np.zeros((VOCAB, VOCAB))
    covariance = np.zeros((VOCAB, VOCAB, VOCAB))
    for i, text in enumerate(texts):
        whole = [3, 2 + i % 5, 4, *text]
        with networks.own_attention(model.network):
            logits = model.network(input_ids=torch.tensor([whole]), use_cache=False).logits[0, 2:-1]
        for law, before, token in zip(logits.double().softmax(-1).numpy(), whole[2:], text, strict=False):
            sums[before] += np.eye(VOCAB)[token] - law
            covariance[before] += np.diag(law) - np.outer(law, law)
    statistic, freedom = 0.0, 0
    for s, c in zip(sums, covariance, strict=True):
        seen = np.flatnonzero(np.diag(c) >= 5)[:-1]  # the last one follows from the others
        statistic += float(s[seen] @ np.linalg.solve(c[np.ix_(seen, seen)], s[seen]))
        freedom += len(seen)
    assert freedom >= 20
    return float(chi2.sf(statistic, freedom))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_sampled_text_has_the_law_of_the_target(tmp_path: Path, strategy: str) -> None:
    model, head = pair(tmp_path)
    texts = await texts_of(model, head, num_requests=120, wish=STRATEGIES[strategy])
    assert p_value(model, texts) > ALPHA / len(STRATEGIES)


async def test_the_same_test_fails_where_children_are_not_drawn_as_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftDistribution, "draw", lambda row, words: int(row.ids[0]))
    model, head = pair(tmp_path)
    texts = await texts_of(model, head, num_requests=120, wish=STRATEGIES["best_first"])
    assert p_value(model, texts) < 1e-12
