"""Draft distributions of bounded support: the declared distribution is exactly the sampled one (algorithms.md, section 7).

    logits → processors → K most likely tokens (atoms) → integer weights n_x in 1…65535 → children drawn from n_x / Σ n

Drafter and verifier have the same integers, so nothing is rounded after a draw. To draw without replacement, take an unbiased integer below
the sum of weights, invert the cumulative sum, remove the weight, and repeat.

Legend: B rows, K atoms, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rootward.core.arrays import Bools, Floats, Ints, integers, read_only

LARGEST = 65535  # weights travel as u16


@dataclass(frozen=True, init=False, eq=False)
class DraftDistribution:
    """A draft distribution of k atoms: weight / total on ids, by decreasing weight and then increasing id.

    ids int64[k], weight int64[k] in 1…65535.

    It may be empty (k = 0): nothing can be drawn from it.
    """

    ids: Ints
    weight: Ints

    def __init__(self, ids: ArrayLike, weight: ArrayLike) -> None:
        atoms, weights = integers("ids", ids), integers("weight", weight)
        if len(atoms) != len(weights):
            raise ValueError(f"weight: {len(weights)} for {len(atoms)} ids; give one per id")
        if len(atoms) and (weights.min() < 1 or weights.max() > LARGEST):
            raise ValueError(f"weight: from {weights.min()} to {weights.max()}; use integers in 1..{LARGEST}")
        if len(atoms) and (atoms.min() < 0 or len(np.unique(atoms)) < len(atoms)):
            raise ValueError("ids: negative or repeated; name each token once")
        order = np.lexsort((atoms, -weights))
        self._set(atoms[order], weights[order])

    def _set(self, ids: Ints, weight: NDArray[Any]) -> None:
        object.__setattr__(self, "ids", read_only(ids))
        object.__setattr__(self, "weight", read_only(weight))

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftDistribution):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.weight, other.weight)

    def __hash__(self) -> int:
        return hash((self.ids.tobytes(), self.weight.tobytes()))

    @property
    def total(self) -> float:
        """Sum of the weights; an int here."""
        return int(self.weight.sum())

    def draw(self, words: Iterable[int], bits: int = 64) -> int:
        """One token from exactly weight / total. words: uniform integers of so many bits, one and a spare (one is rejected with
        probability below 2⁻³⁶ at 64 bits and K ≤ 4096)."""
        if len(self) == 0:
            raise ValueError("row: empty; nothing is left to draw")
        cumulative = self.weight.cumsum()
        number = below(int(cumulative[-1]), words, bits)
        return int(self.ids[cumulative.searchsorted(number, side="right")])

    @property
    def law(self) -> Floats:
        """float64[k]: probabilities of ids."""
        return self.weight / self.total if len(self) else np.zeros(0)

    def dense(self, vocabulary: int) -> Floats:
        """float64[V]: probabilities over the vocabulary."""
        row = np.zeros(vocabulary)
        row[self.ids] = self.law
        return row

    def without(self, tokens: Iterable[int]) -> DraftDistribution:
        """The distribution with some tokens removed: that of the next child after these siblings."""
        keep = np.ones(len(self.ids), dtype=np.bool_)
        for token in tokens:
            keep &= self.ids != token
        return self._of(self.ids[keep], self.weight[keep])

    def after(self, num_atoms: int) -> DraftDistribution:
        """The distribution without its `num_atoms` most likely atoms."""
        return self._of(self.ids[num_atoms:], self.weight[num_atoms:])

    @classmethod
    def _of(cls, ids: Ints, weight: NDArray[Any]) -> DraftDistribution:
        """A distribution from arrays that are valid and in order."""
        row = object.__new__(cls)
        row._set(ids, weight)
        return row


class DenseDistribution(DraftDistribution):
    """A draft distribution with float weights, for tests and the library; services use integers. weight float64[k] sums to 1 at first."""

    def __init__(self, law: ArrayLike) -> None:
        row = np.asarray(law, dtype=np.float64)
        ids = top(row, len(row))
        self._set(ids, row[ids])

    @property
    def total(self) -> float:
        return float(self.weight.sum())

    def draw(self, words: Iterable[int], bits: int = 64) -> int:
        """One token by inverse distribution function from the high 53 bits of a word."""
        cumulative = np.cumsum(self.weight)
        uniform = (int(next(iter(words))) >> 11) * 2.0**-53
        place = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        return int(self.ids[min(place, len(self) - 1)])


class GreedyFamily(NamedTuple):
    """One event: the sampled child first, then the chosen ones in decreasing q; `row` is q′, what it was drawn from."""

    token: Ints
    sampled: Bools
    row: DraftDistribution


def rows_of(ids_BK: Ints, weight_BK: Ints, most: Iterable[int]) -> list[DraftDistribution]:
    """Rows of ids and integer weights in order, 0 where there is no atom, each of at most so many atoms."""
    support = np.minimum((weight_BK > 0).sum(axis=1), np.fromiter(most, dtype=np.int64)).tolist()
    return [DraftDistribution._of(ids_BK[i, :k], weight_BK[i, :k]) for i, k in enumerate(support)]


def top(law: Floats, k: int) -> Ints:
    """The k ids of largest mass in decreasing order, ties to the smaller id; ids without mass are left out."""
    if k < 1:
        raise ValueError(f"k: {k}; keep at least one atom")
    order = np.argsort(-law, kind="stable")[:k]
    return order[law[order] > 0.0].astype(np.int64)


def integer_weights(probs: NDArray[np.floating]) -> Ints:
    """int64[B, K]: mass in units of 1/65535 of the row's largest, at least 1 where there is any."""
    largest = probs.max(axis=1, keepdims=True, initial=0.0)
    share = probs / np.where(largest > 0.0, largest, 1.0)
    return np.where(probs > 0.0, np.clip(np.rint(share * LARGEST), 1, LARGEST), 0).astype(np.int64)


def below(bound: int, words: Iterable[int], bits: int = 64) -> int:
    """An unbiased integer in [0, bound) from uniform words of so many bits: multiply, take the high part, and reject
    the 2^bits mod bound products that would make some values likelier."""
    rejected = (1 << bits) % bound
    for word in words:
        product = int(word) * bound
        if product & ((1 << bits) - 1) >= rejected:
            return product >> bits
    raise ValueError("words: used up by rejections; give a few more than there are draws")


def greedy_family(row: DraftDistribution, num_children: int, words: Iterable[int]) -> GreedyFamily:
    """k children: one drawn from q′ = q without its k−1 most likely tokens D, then D ("Towards Optimal Multi-draft
    Speculative Decoding", 2502.18779). Support not larger than k−1: all of it is chosen and nothing drawn (q′ is
    empty)."""
    if num_children < 1:
        raise ValueError(f"num_children: {num_children}; a family has at least one child")
    chosen, rest = row.ids[: num_children - 1], row.after(num_children - 1)
    drawn = [rest.draw(words)] if len(rest) else []
    sampled = np.arange(len(drawn) + len(chosen)) < len(drawn)
    return GreedyFamily(np.array([*drawn, *chosen], dtype=np.int64), sampled, rest)
