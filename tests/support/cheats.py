"""Drafters that declare one distribution and draw from another, simulated on synthetic rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.random_trees import softmax

from rootward.core.audit import Draws

VOCAB, ATOMS, SPREAD = 500, 32, 1.0
FAVOUR = 3.0  # weight of favoured tokens


def rows(rng: np.random.Generator, num: int) -> Draws:
    """Draws without tokens: ids, declared rows, and target rows of the whole budget."""
    ids = rng.random((num, VOCAB)).argpartition(ATOMS, axis=1)[:, :ATOMS]
    logits = SPREAD * rng.gumbel(size=(num, ATOMS))
    target = 0.95 * softmax(logits + rng.normal(size=logits.shape))
    return Draws(ids, softmax(logits), target, np.zeros(num, dtype=np.int64))


def inverse(rng: np.random.Generator, law: np.ndarray) -> np.ndarray:
    """A column of each row, drawn."""
    cumulative = law.cumsum(axis=1)
    return (cumulative < rng.random((len(law), 1)) * cumulative[:, -1:]).sum(axis=1).clip(max=law.shape[1] - 1)


def drawn_by(cheat: str, rng: np.random.Generator, num: int) -> Draws:
    """Draws of a drafter that cheats as named; "honest" does not."""
    d = rows(rng, num)
    name, _, value = cheat.partition(":")
    column = inverse(rng, d.q)
    match name:
        case "argmax":
            share = float(value or 1.0)
            column = np.where(rng.random(num) < share, d.q.argmax(axis=1), column)
        case "temperature":
            column = inverse(rng, d.q ** (1.0 / float(value)))
        case "best-of":
            others = np.stack([column, *(inverse(rng, d.q) for _ in range(int(value) - 1))])
            ratio = np.take_along_axis(d.offered / d.q, others.T, axis=1)
            column = others.T[np.arange(num), ratio.argmax(axis=1)]
        case "peek":
            column = inverse(rng, d.offered)
        case "boost":
            column = inverse(rng, d.q * np.where(d.ids < VOCAB * float(value), FAVOUR, 1.0))
        case "honest":
            pass
    return replace(d, column=column)
