"""The law of what the running system emits with processors that look at the text: verifier and drafter over gRPC, χ².

Given everything before it, token t has the law p_t of plain decoding at that text, which is computed from scratch. So the sums of
(one-hot of the token − p_t), taken apart by the token before, have mean 0 and covariance Σ (diag p_t − p_t p_tᵀ), whatever the rounds
were. Their quadratic form is χ². Family-wise error of this file: ALPHA.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2
from support.processed_law import STOP, processed_law
from support.services import collect, over_grpc, request, tabular_pair

from rootward.core.requests import DraftMode, Rule, Sampling, Stopping
from rootward.core.tree import TokenTree
from rootward.engine.processors import History
from rootward.engine.tabular import TabularModel

ALPHA = 1e-6
VOCAB, LENGTH, MIN_TOKENS = 8, 24, 12
PROMPT = (1, 2, 3)
RULES = {
    "traversal": {"rule": Rule.TRAVERSAL, "law": DraftMode.SAMPLED},
    "match-chosen": {"rule": Rule.MATCH, "law": DraftMode.TOP_K},
    "match-coupled": {"rule": Rule.MATCH, "law": DraftMode.COUPLED},
}
SAMPLING = Sampling(
    0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.8,
    frequency_penalty=0.4,
    logit_bias=((4, 0.7),),
)


def p_value(target: TabularModel, texts: list[list[int]]) -> float:
    sums = np.zeros((VOCAB, VOCAB))
    covariance = np.zeros((VOCAB, VOCAB, VOCAB))
    for text in texts:
        for t, token in enumerate(text):
            logits = target.log_law([*PROMPT, *text[:t]])
            law = processed_law(logits, PROMPT, text[:t], SAMPLING, MIN_TOKENS)
            group = text[t - 1] if t else PROMPT[-1]
            sums[group] += np.eye(VOCAB)[token] - law
            covariance[group] += np.diag(law) - np.outer(law, law)
    statistic, freedom = 0.0, 0
    for s, c in zip(sums, covariance, strict=True):
        seen = np.flatnonzero(np.diag(c) >= 5)[:-1]  # the last one follows from the others
        statistic += float(s[seen] @ np.linalg.solve(c[np.ix_(seen, seen)], s[seen]))
        freedom += len(seen)
    assert freedom >= 40
    return float(chi2.sf(statistic, freedom))


async def texts_of(target: TabularModel, draft: TabularModel, *, num_requests: int, **wish) -> list[list[int]]:
    stopping = Stopping(LENGTH, (STOP,), min_tokens=MIN_TOKENS)
    async with over_grpc(target, draft, num_draft_tokens=6, topk=3, max_num_queued_reqs=num_requests) as system:
        jobs = [
            replace(request(f"r{i}", PROMPT, stopping=stopping, seed=i, **wish), sampling=SAMPLING)
            for i in range(num_requests)
        ]
        results = await asyncio.gather(*(collect(system.verifier, job) for job in jobs))
    assert sum(last.finish.stats.num_accepted_draft_tokens for _, last in results) > 0
    return [tokens for tokens, _ in results]


@pytest.mark.parametrize("rule", RULES)
async def test_the_system_emits_exactly_the_processed_law(rule: str) -> None:
    target, draft = tabular_pair(vocab=VOCAB, noise=0.7, slots=32)
    texts = await texts_of(target, draft, num_requests=400, **RULES[rule])
    assert sum(map(len, texts)) > 5000
    assert p_value(target, texts) > ALPHA / len(RULES)


def under_the_root(history: History, tree: TokenTree):
    """Wrong: every node under the text of the root."""
    ids, counts, present = below(history, tree)
    return ids, np.broadcast_to(counts[0], counts.shape).copy(), np.broadcast_to(present[0], present.shape).copy()


below = History.below


async def test_the_same_test_fails_with_the_text_of_the_root_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "below", under_the_root)
    target, draft = tabular_pair(vocab=VOCAB, noise=0.7, slots=32)
    texts = await texts_of(target, draft, num_requests=400, **RULES["traversal"])
    assert p_value(target, texts) < 1e-12
