"""What a drafter keeps of rows, made where their logits are: the atoms of its laws as integer weights, all in one array.

    logits → temperature → min-p, top-k, top-p → K likeliest → weights in units of 1/65535 of the likeliest (`core/rows.py`)

Weights are relative to the likeliest token and nothing below the K atoms is kept, so no law is ever normalised. All of it is a function of
tensors of fixed shapes: on a device nothing is read on the way, and it can be recorded with the forward. The host reads the array, once.

A top-k beyond MOST_CANDIDATES keeps the same atoms; only top-p behind it then counts from the whole law. Draft laws may be anything as
long as children are drawn from what is declared.

Legend: T rows, V vocabulary, K atoms, A tokens for noise to choose among, C candidates (at least K and A).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.core.arrays import Ints
from rootward.core.distribution import LARGEST
from rootward.core.requests import Sampling
from rootward.ports import Reduction

MOST_CANDIDATES = 4096
ID = 0xFFFFFFFF  # the low half of a packed number is the token


class Found(NamedTuple):
    """ids, weight int64[T, K] in the order of `Row`, weight 0 where there is no atom; likely int64[T, A]: tokens with their mass, for
    `likely_tokens`."""

    ids: Ints
    weight: Ints
    likely: Ints


def likely_tokens(likely: Ints) -> tuple[Ints, NDArray[np.float64]]:
    """Tokens and their mass, in units of the likeliest's and in no order, of as many rows as are given."""
    return likely & ID, (likely >> 32).astype(np.int32).view(np.float32).astype(np.float64)


class Atoms(NamedTuple):
    """What is static. `cuts`: some row has a min-p, top-k or top-p."""

    num_atoms: int
    num_likely: int
    num_candidates: int
    cuts: bool

    def reduce(self, logits_TV: torch.Tensor, table_Tn: torch.Tensor) -> torch.Tensor:
        """int64[T, K + A]; `read` tells what is in it."""
        temperature, floor, rank, share = table_Tn.to(logits_TV.dtype)[:, :, None].unbind(1)
        score_TV = (logits_TV - logits_TV.amax(-1, keepdim=True)) / temperature
        if not self.num_atoms and not self.cuts:
            best_TA, ids_TA = some(score_TV, self.num_likely)
            return _packed(best_TA.exp(), ids_TA)
        if not self.cuts:
            best_TK, ids_TK = likeliest(score_TV, self.num_atoms)
            weights_TK = _weights(best_TK.exp(), ids_TK)  # whatever order ties are in
            if not self.num_likely:
                return weights_TK
            best_TA, ids_TA = some(score_TV, self.num_likely)
            return torch.cat([weights_TK, _packed(best_TA.exp(), ids_TA)], 1)
        best_TC, ids_TC = in_order(*likeliest(score_TV, self.num_candidates))
        mass_TC = torch.where(_survive(score_TV, best_TC, floor, rank.long(), share), best_TC.exp(), 0.0)
        atoms, likely = slice(0, self.num_atoms), slice(0, self.num_likely)
        weights_TK = _weights(mass_TC[:, atoms], ids_TC[:, atoms])
        return torch.cat([weights_TK, _packed(mass_TC[:, likely], ids_TC[:, likely])], 1)

    def read(self, table: Ints) -> Found:
        """What lies in an array that `reduce` made."""
        atoms, likely = table[:, : self.num_atoms], table[:, self.num_atoms :]
        return Found(atoms & ID, LARGEST - (atoms >> 32), likely)


def fetched(parts: Sequence[torch.Tensor]) -> list[Ints]:
    """Arrays of several reductions: the one place where the host waits."""
    if not parts:
        return []
    whole = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    ends = np.cumsum([part.numel() for part in parts])[:-1]
    return [flat.reshape(part.shape) for flat, part in zip(np.split(whole, ends), parts, strict=True)]


def _weights(mass_TK: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
    """Integer weights and ids in one number each, in the order of `Row`."""
    weight_TK = (mass_TK * LARGEST).round().clamp(1, LARGEST).long()
    weight_TK = torch.where(mass_TK > 0.0, weight_TK, 0)  # also where there is no law (NaN)
    return ((LARGEST - weight_TK) << 32 | ids_TK).sort(-1).values


def _packed(mass_TA: torch.Tensor, ids_TA: torch.Tensor) -> torch.Tensor:
    """Both in one number each."""
    return mass_TA.float().contiguous().view(torch.int32).long() << 32 | ids_TA


def atoms_of(sampling: Sequence[Sampling], vocab: int, num_atoms: int, num_likely: int = 0) -> tuple[Atoms, Reduction]:
    """What to ask of a forward whose wanted rows have these parameters (no greedy ones), and how to read the answer."""
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
        raise ValueError("sampling: greedy; a law with one atom is not worth a tree, rank by a temperature")
    return s.temperature, math.log(s.min_p) if s.min_p else -math.inf, s.top_k, s.top_p if s.top_p < 1.0 else math.inf


def likeliest(score_TV: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest scores [T, num] of each row, decreasing, and their ids; ties on the border go to the smaller ids."""
    vocab = score_TV.shape[1]
    best, ids = torch.topk(score_TV, min(num + 1, vocab), dim=-1)
    if num == vocab or (readable(score_TV.device) and not bool((best[:, num - 1] == best[:, num]).any())):
        return best[:, :num], ids[:, :num]
    best, ids = best[:, :num], ids[:, :num]
    edge = best[:, -1:]
    place = -torch.arange(vocab, device=score_TV.device, dtype=torch.float32)  # exact below 2^24
    tied = -torch.topk(torch.where(score_TV == edge, place, 1.0 - vocab), num, dim=-1).values
    which = torch.arange(num, device=ids.device) - (best > edge).sum(-1, keepdim=True)  # of those on the border
    return best, torch.where(which < 0, ids, tied.gather(1, which.clamp(min=0)).long())


def some(score_TV: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest scores [T, num] of each row and their ids, in no order; of ties on the border any."""
    vocab = score_TV.shape[1]
    if num < vocab:
        best, ids = torch.topk(score_TV, num, dim=-1, sorted=False)
        return best, ids
    return score_TV, torch.arange(vocab, device=score_TV.device).expand(score_TV.shape)


def readable(device: torch.device) -> bool:
    """Whether the host can look at values there without waiting."""
    return device.type == "cpu"


def in_order(best_TC: torch.Tensor, ids_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of equal scores the smaller ids first."""
    ids_TC, order = ids_TC.sort(-1)
    best_TC, by_score = best_TC.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return best_TC, ids_TC.gather(1, by_score)


def _survive(
    score_TV: torch.Tensor, best_TC: torch.Tensor, floor: torch.Tensor, rank: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """bool[T, C]: not below the floor nor the rank-th score (0: none); and the mass of what is likelier is below the share."""
    ranked = best_TC.gather(1, (rank - 1).clamp(min=0))
    edge = torch.where(rank > 0, ranked, -torch.inf).maximum(floor)
    mass_TC = best_TC.exp()
    whole = torch.where(score_TV >= edge, score_TV.exp(), 0.0).sum(-1, keepdim=True)
    return (best_TC >= edge) & (mass_TC.cumsum(-1) - mass_TC < share * whole)


def relabelled(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """An array that `Atoms.reduce` made of a part of the vocabulary, in the ids int64[V'] of the whole, which ascend."""
    return table & ~ID | ids[table & ID]


def reduced(logits_TV: torch.Tensor, reduction: Reduction | None) -> torch.Tensor:
    """What a reduction makes of rows; the rows themselves without one."""
    if reduction is None:
        return logits_TV
    return reduction.of(logits_TV, torch.from_numpy(reduction.table).to(logits_TV.device, non_blocking=True))
