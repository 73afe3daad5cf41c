"""From logits to probability distributions and tokens, for batches of rows with different sampling parameters.

Logits may be on any device. Distributions stay there as tensors; tokens and log-probabilities are returned as numpy arrays. Ties always go
to the smaller id. float64 logits (`TabularModel`) stay float64.

Legend: T rows, R rows of emitted tokens, V vocabulary, K atoms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.arrays import Ints
from rootward.core.requests import Sampling, TokenLogprob
from rootward.engine import verify_kernels as kernels
from rootward.engine.atoms import host_can_read, largest, smaller_ids_first
from rootward.engine.cpu_kernels import follow_torch_threads

NUM_CANDIDATES = (256, 1024, 4096)  # most likely tokens that top-p sorts on a device before it sorts the whole row


@torch.inference_mode()
def distributions(scores_TV: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """Distributions [T, V] of scores (`processors.adjusted`) after temperature, min-p, top-k and top-p, in this order.

    float32, or float64 if the scores are. A row of temperature 0 becomes one-hot.
    """
    if len(sampling) != len(scores_TV):
        raise ValueError(f"sampling: {len(sampling)} entries for {len(scores_TV)} rows; give one each")
    scores = scores_TV if scores_TV.dtype == torch.float64 else scores_TV.float()
    scores = _cooled(scores, [s.temperature for s in sampling])
    scores = _min_p(scores, [s.min_p for s in sampling])
    scores = _top_k(scores, [s.top_k for s in sampling])
    scores = _top_p(scores, [1.0 if s.greedy else s.top_p for s in sampling])
    probs_TV = torch.softmax(scores, -1)
    greedy = [i for i, s in enumerate(sampling) if s.greedy]
    if greedy:
        rows = torch.tensor(greedy, device=scores.device)
        probs_TV[rows] = torch.nn.functional.one_hot(scores[rows].argmax(-1), scores.shape[1]).to(scores.dtype)
    return probs_TV


@torch.inference_mode()
def greedy_choice(logits_TV: torch.Tensor) -> Ints:
    """int64[T]: the most likely token of each row. ValueError on a row with NaN."""
    if logits_TV.device.type == "cpu" and logits_TV.dtype in (torch.float32, torch.float64):
        logits = logits_TV.numpy()  # numpy's argmax is many times faster there
        choice: Ints = logits.argmax(-1).astype(np.int64)
        best = logits[np.arange(len(logits)), choice]
    else:
        choice_T = logits_TV.argmax(-1)  # the first of several maxima, by its documentation
        broken_T = logits_TV.gather(1, choice_T[:, None])[:, 0].isnan()
        choice = torch.where(broken_T, -1, choice_T).cpu().numpy()  # the host waits once
        best = np.where(choice < 0, np.nan, 0.0)
    if np.isnan(best).any():
        raise ValueError("logits: a row holds NaN; the model's weights or its input are broken")
    return choice


@torch.inference_mode()
def top_atoms(probs_TV: torch.Tensor, num_atoms: int) -> tuple[Ints, NDArray[np.float32]]:
    """The K = min(num_atoms, V) largest atoms of each row, most likely first: ids and probabilities, [T, K] each."""
    probs_TK, ids_TK = smaller_ids_first(*largest(probs_TV, min(num_atoms, int(probs_TV.shape[1]))))
    return ids_TK.cpu().numpy(), probs_TK.cpu().numpy()


@torch.inference_mode()
def token_logprobs(logits_RV: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities under the model's own distribution, before any processor: of one token per row, and of the `num_top` most likely
    tokens of the row; ties go to the smaller id."""
    logprobs = torch.log_softmax(logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float(), -1).float()
    index = torch.tensor(tokens, device=logprobs.device)[:, None]
    own = logprobs.gather(1, index)[:, 0].tolist()
    if not num_top:
        return [TokenLogprob(value) for value in own]
    ids, values = top_atoms(logprobs, num_top)
    pairs = zip(own, ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprob(value, tuple(zip(row, best, strict=True))) for value, row, best in pairs]


def _cooled(scores_TV: torch.Tensor, temperature: list[float]) -> torch.Tensor:
    if all(t in (0.0, 1.0) for t in temperature):
        return scores_TV
    cooled_TV = scores_TV - scores_TV.amax(-1, keepdim=True)  # the largest score stays finite at any temperature
    divisor = [t or 1.0 for t in temperature]  # greedy rows are one-hot, whatever the divisor
    if len(set(divisor)) == 1:
        return cooled_TV / divisor[0]
    divisor_T1 = torch.tensor(divisor, dtype=scores_TV.dtype, device=scores_TV.device)[:, None]
    # The difference makes equal what has only its last bit to tell it apart: rows of temperature 1 stay as they are alone.
    return torch.where(divisor_T1 == 1.0, scores_TV, cooled_TV / divisor_T1)


def _min_p(scores_TV: torch.Tensor, min_p: list[float]) -> torch.Tensor:
    """Removes tokens that are less likely than this fraction of the most likely token's probability."""
    if not any(min_p):
        return scores_TV
    share = torch.tensor(min_p, dtype=scores_TV.dtype, device=scores_TV.device)[:, None]
    return scores_TV.masked_fill(scores_TV < scores_TV.amax(-1, keepdim=True) + share.log(), -torch.inf)


def _top_k(scores_TV: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """Removes tokens with a score below the k-th largest; ties with it are kept."""
    vocab = scores_TV.shape[1]
    rows = [i for i, k in enumerate(top_k) if 0 < k < vocab]
    if not rows:
        return scores_TV
    index = torch.tensor(rows, device=scores_TV.device)
    kth = torch.tensor([top_k[i] - 1 for i in rows], device=scores_TV.device)[:, None]
    some = scores_TV[index]
    edge = torch.topk(some, max(top_k[i] for i in rows), dim=-1).values.gather(1, kth)
    return scores_TV.index_copy(0, index, some.masked_fill(some < edge, -torch.inf))


def _top_p(scores_TV: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """Keeps a token if the mass of all more likely ones is below p; equally likely ones of smaller id count as more likely."""
    rows = [i for i, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return scores_TV
    index = torch.tensor(rows, device=scores_TV.device)
    if host_can_read(scores_TV.device):
        some = scores_TV[index]  # a copy
        follow_torch_threads()
        kernels.cut_tail(some.numpy(), some.softmax(-1).numpy(), np.array([top_p[i] for i in rows]))
        return some if len(rows) == len(top_p) else scores_TV.index_copy(0, index, some)
    p_T1 = torch.tensor([top_p[i] for i in rows], dtype=torch.float64, device=scores_TV.device)[:, None]
    return scores_TV.index_copy(0, index, _cut_tail(scores_TV[index], p_T1, NUM_CANDIDATES))


def _cut_tail(scores_TV: torch.Tensor, p_T1: torch.Tensor, num_candidates: tuple[int, ...]) -> torch.Tensor:
    """Scores with -inf outside the nucleus, on a device. Rows that too few candidates leave undecided are tried with the next number."""
    vocab = scores_TV.shape[1]
    num = min(num_candidates[0], vocab) if num_candidates else vocab
    cut, decided = _nucleus(scores_TV, p_T1, num)
    if num < vocab and not bool(decided.all()):
        hard = ~decided
        cut[hard] = _cut_tail(scores_TV[hard], p_T1[hard], num_candidates[1:])
    return cut


def _nucleus(scores_TV: torch.Tensor, p_T1: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores with -inf outside the nucleus, bool[T]: whether this many candidates were enough to decide the row)."""
    if num_candidates == scores_TV.shape[1]:
        best_TC, ids_TC = scores_TV.sort(dim=-1, descending=True, stable=True)
    else:
        best_TC, ids_TC = smaller_ids_first(*torch.topk(scores_TV, num_candidates, dim=-1))
    mass_TC = scores_TV.softmax(-1).gather(1, ids_TC).double()
    size_T1 = (mass_TC.cumsum(-1) - mass_TC < p_T1).sum(-1, keepdim=True).clamp(min=1)
    outside_TC = torch.arange(num_candidates, device=scores_TV.device) >= size_T1
    cut = torch.full_like(scores_TV, -torch.inf).scatter_(1, ids_TC, best_TC.masked_fill(outside_TC, -torch.inf))
    edge_T1 = best_TC.gather(1, size_T1 - 1)
    return cut, (edge_T1 > best_TC[:, -1:])[:, 0]  # all tokens as likely as the last one kept are candidates
