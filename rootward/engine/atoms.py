"""Draft distributions of a forward, computed where the logits are: the K most likely tokens (atoms) with integer weights, in one array.

    logits → temperature → min-p, top-k, top-p → K most likely → weights in units of 1/65535 of the largest (`core/distribution.py`)

Weights are relative to the most likely token and only the K atoms are kept, so nothing is normalised. The computation is a function of
tensors of fixed shapes: it never synchronises with a device and can be recorded with the forward. The host reads the array once.

A top-k above MOST_CANDIDATES is ignored, which does not change the K atoms, only the mass that top-p counts. A draft distribution may be
anything, as long as children are drawn from the declared one.

Legend: T rows, V vocabulary, K atoms, A tokens among which noise chooses, C candidates (at least K and A).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.arrays import Ints
from rootward.core.distribution import LARGEST
from rootward.core.requests import Sampling
from rootward.engine import verify_kernels as kernels
from rootward.ports import Reduction

MOST_CANDIDATES = 4096
MOST_SORTED_ATOMS = 64  # that `verify_kernels.likeliest` keeps
ID = 0xFFFFFFFF  # the low half of a packed number is the token
NO_TOKENS: Ints = np.empty(0, np.int64)


class Found(NamedTuple):
    """ids, weight int64[T, K] in the order of `DraftDistribution`, weight 0 where there is no atom; likely int64[T, A]: tokens with their
    mass, for `likely_tokens`."""

    ids: Ints
    weight: Ints
    likely: Ints


def likely_tokens(likely: Ints) -> tuple[Ints, NDArray[np.float64]]:
    """(tokens, masses in units of the largest) of rows of `Found.likely`, in no order."""
    return likely & ID, (likely >> 32).astype(np.int32).view(np.float32).astype(np.float64)


class Atoms(NamedTuple):
    """Static part of a reduction: sizes, and whether some row has a min-p, top-k or top-p (`cuts`)."""

    num_atoms: int
    num_likely: int
    num_candidates: int
    cuts: bool

    def reduce(
        self, logits_TV: torch.Tensor, table_Tn: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int64[T, K + A], decoded by `read`. table_Tn: the numbers of `_numbers`; tokens int64[V]: the tokens of the columns, ascending;
        None: token i has column i. There must be more columns than candidates."""
        if self._fits_kernel(logits_TV):
            packed_TK = np.empty((len(logits_TV), self.num_atoms), np.int64)
            ids = NO_TOKENS if tokens is None else tokens.numpy()
            kernels.likeliest(logits_TV.contiguous().numpy(), table_Tn.contiguous().numpy(), ids, packed_TK)
            return torch.from_numpy(packed_TK)
        found = self._by_tensors(logits_TV, table_Tn)
        return found if tokens is None else found & ~ID | tokens[found & ID]  # ids ascend, so ties stay in order

    def _by_tensors(self, logits_TV: torch.Tensor, table_Tn: torch.Tensor) -> torch.Tensor:
        """`reduce` on any device."""
        temperature, floor, rank, share = table_Tn.to(logits_TV.dtype)[:, :, None].unbind(1)
        score_TV = (logits_TV - logits_TV.amax(-1, keepdim=True)) / temperature
        if not self.num_atoms and not self.cuts:
            best_TA, ids_TA = largest_unordered(score_TV, self.num_likely)
            return _packed(best_TA.exp(), ids_TA)
        if not self.cuts:
            best_TK, ids_TK = largest(score_TV, self.num_atoms)
            weights_TK = _weights(best_TK.exp(), ids_TK)  # sorts, so the order of ties does not matter
            if not self.num_likely:
                return weights_TK
            best_TA, ids_TA = largest_unordered(score_TV, self.num_likely)
            return torch.cat([weights_TK, _packed(best_TA.exp(), ids_TA)], 1)
        best_TC, ids_TC = smaller_ids_first(*largest(score_TV, self.num_candidates))
        mass_TC = torch.where(_survive(score_TV, best_TC, floor, rank.long(), share), best_TC.exp(), 0.0)
        atoms, likely = slice(0, self.num_atoms), slice(0, self.num_likely)
        weights_TK = _weights(mass_TC[:, atoms], ids_TC[:, atoms])
        return torch.cat([weights_TK, _packed(mass_TC[:, likely], ids_TC[:, likely])], 1)

    def _fits_kernel(self, logits_TV: torch.Tensor) -> bool:
        """On a CPU one loop takes a fraction of the time of some fifteen operations on tensors."""
        plain = not self.cuts and not self.num_likely and 0 < self.num_atoms <= MOST_SORTED_ATOMS
        return plain and logits_TV.device.type == "cpu" and logits_TV.dtype == torch.float32

    def read(self, table: Ints) -> Found:
        """Decodes an array that `reduce` made."""
        atoms, likely = table[:, : self.num_atoms], table[:, self.num_atoms :]
        return Found(atoms & ID, LARGEST - (atoms >> 32), likely)


def fetched(parts: Sequence[torch.Tensor]) -> list[Ints]:
    """The arrays of several reductions, with one synchronisation."""
    if len(parts) <= 1:
        return [part.cpu().numpy() for part in parts]
    whole = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    ends = np.cumsum([part.numel() for part in parts])[:-1]
    return [flat.reshape(part.shape) for flat, part in zip(np.split(whole, ends), parts, strict=True)]


def _weights(mass_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """Integer weight and id in one number each, in the order of `DraftDistribution`."""
    weight_TK = (mass_TK * LARGEST).round().clamp(1, LARGEST).long()
    weight_TK = torch.where(mass_TK > 0.0, weight_TK, 0)  # 0 for NaN too
    return ((LARGEST - weight_TK) << 32 | ids_TK).sort(-1).values


def _packed(mass_TA: torch.Tensor, ids_TA: torch.Tensor) -> torch.Tensor:
    """Mass (float32) and id in one number each."""
    return mass_TA.float().contiguous().view(torch.int32).long() << 32 | ids_TA


def atoms_of(sampling: Sequence[Sampling], vocab: int, num_atoms: int, num_likely: int = 0) -> tuple[Atoms, Reduction]:
    """(decoder, reduction) for a forward whose wanted rows have these sampling parameters, none of them greedy."""
    table = np.array([_numbers(s) for s in sampling])
    cuts = [s for s in sampling if s.min_p or 0 < s.top_k < vocab or s.top_p < 1.0]
    rank = min(max([s.top_k for s in cuts], default=1), MOST_CANDIDATES)
    num_candidates = max(num_atoms, num_likely, 1 << (max(rank, 1) - 1).bit_length())
    kind = Atoms(min(num_atoms, vocab), min(num_likely, vocab), min(num_candidates, vocab), bool(cuts))
    table[:, 2][table[:, 2] > kind.num_candidates] = 0
    return kind, Reduction(kind, kind.reduce, table)


def _numbers(s: Sampling) -> tuple[float, float, float, float]:
    """temperature, log min-p, top-k (0: none), top-p (infinite: none)."""
    if s.greedy:
        raise ValueError("sampling: greedy; a distribution with one atom is not worth a tree, rank by a temperature")
    return s.temperature, math.log(s.min_p) if s.min_p else -math.inf, s.top_k, s.top_p if s.top_p < 1.0 else math.inf


def largest(score_TV: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest scores [T, num] of each row, decreasing, and their ids; ties at the edge go to the smaller ids."""
    vocab = score_TV.shape[1]
    best, ids = torch.topk(score_TV, min(num + 1, vocab), dim=-1)
    if num == vocab or (host_can_read(score_TV.device) and not bool((best[:, num - 1] == best[:, num]).any())):
        return best[:, :num], ids[:, :num]
    best, ids = best[:, :num], ids[:, :num]
    edge = best[:, -1:]
    place = -torch.arange(vocab, device=score_TV.device, dtype=torch.float32)  # exact below 2^24
    tied = -torch.topk(torch.where(score_TV == edge, place, 1.0 - vocab), num, dim=-1).values
    which = torch.arange(num, device=ids.device) - (best > edge).sum(-1, keepdim=True)  # index among those at the edge
    return best, torch.where(which < 0, ids, tied.gather(1, which.clamp(min=0)).long())


def largest_unordered(score_TV: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest scores [T, num] of each row and their ids, in no order; ties at the edge are broken arbitrarily."""
    vocab = score_TV.shape[1]
    if num < vocab:
        best, ids = torch.topk(score_TV, num, dim=-1, sorted=False)
        return best, ids
    return score_TV, torch.arange(vocab, device=score_TV.device).expand(score_TV.shape)


def host_can_read(device: torch.device) -> bool:
    """Whether the host reads values of tensors on this device without a synchronisation."""
    return device.type == "cpu"


def smaller_ids_first(best_TC: torch.Tensor, ids_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates by decreasing score, of equal scores the smaller ids first."""
    ids_TC, order = ids_TC.sort(-1)
    best_TC, by_score = best_TC.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return best_TC, ids_TC.gather(1, by_score)


def _survive(
    score_TV: torch.Tensor, best_TC: torch.Tensor, floor: torch.Tensor, rank: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """bool[T, C]: candidates that min-p (floor), top-k (rank; 0: none) and top-p (share) keep."""
    ranked = best_TC.gather(1, (rank - 1).clamp(min=0))
    edge = torch.where(rank > 0, ranked, -torch.inf).maximum(floor)
    mass_TC = best_TC.exp()
    whole = torch.where(score_TV >= edge, score_TV.exp(), 0.0).sum(-1, keepdim=True)
    return (best_TC >= edge) & (mass_TC.cumsum(-1) - mass_TC < share * whole)


def reduced(logits_TV: torch.Tensor, reduction: Reduction | None) -> torch.Tensor:
    """The reduction of rows of logits; without a reduction the rows themselves."""
    if reduction is None:
        return logits_TV
    return reduction.of(logits_TV, torch.from_numpy(reduction.table).to(logits_TV.device, non_blocking=True))


def reduced_part(
    logits_TV: torch.Tensor, reduction: Reduction | None, tokens: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """The reduction of logits [T, V'] of a part of the vocabulary, whose tokens int64[V'] ascend; the logits of other tokens are -inf."""
    kind: Any = reduction.kind if reduction is not None else None
    if reduction is not None and isinstance(kind, Atoms) and kind.num_candidates < len(tokens):
        table = torch.from_numpy(reduction.table).to(logits_TV.device, non_blocking=True)
        return kind.reduce(logits_TV, table, tokens)
    whole = logits_TV.new_full((len(logits_TV), vocab_size), -torch.inf)
    return reduced(whole.index_copy_(1, tokens, logits_TV), reduction)
