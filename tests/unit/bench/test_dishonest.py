"""Dishonest drafters: what they draw is not what they declare, and the audit notices."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.dishonest import KINDS, cheat_of, peeked
from benchmarks.rows import quantise
from rootward.core.audit import Draws, Record

VOCAB = 300


def draws_of(spec: str, num: int, seed: int = 0) -> Draws:
    """Draws that the verifier of a cheating drafter sees; the target is close to the draft."""
    rng, cheat = np.random.default_rng(seed), cheat_of(spec)
    q, offered = np.empty((num, 32)), np.empty((num, 32))
    ids, column = np.empty((num, 32), dtype=np.int64), np.empty(num, dtype=np.int64)
    for i in range(num):
        logits = rng.gumbel(size=VOCAB)
        target = np.exp(logits + rng.normal(size=VOCAB))
        target /= target.sum()
        row = quantise(np.exp(logits) / np.exp(logits).sum(), 32)
        token = cheat(peeked(row, target), rng)
        ids[i], q[i], offered[i] = row.ids, row.law, target[row.ids]
        column[i] = int(np.flatnonzero(row.ids == token)[0])
    return Draws(ids, q, offered, column)


@pytest.mark.parametrize("spec", ["argmax", "argmax:0.3", "temperature:0.6", "best-of:2", "peek", "boost:0.2"])
def test_the_audit_catches_every_cheat(spec: str) -> None:
    record = Record()
    for seed in range(40):
        record.observe(draws_of(spec, 100, seed))
        if record.caught():
            break
    assert record.caught()


def test_a_temperature_of_one_is_honest() -> None:
    record = Record()
    for seed in range(10):
        record.observe(draws_of("temperature:1.0", 100, seed))
    assert not record.caught(alpha=1e-3)


def test_favoured_tokens_are_drawn_more_often() -> None:
    row, rng = quantise(np.full(4, 0.25), 4), np.random.default_rng(0)
    tokens = [cheat_of("boost:1,2")(row, rng) for _ in range(800)]
    share = np.bincount(tokens, minlength=4) / 800
    np.testing.assert_allclose(share, [1 / 8, 3 / 8, 3 / 8, 1 / 8], atol=0.06)


def test_refuses_unknown_cheats_and_peeking_without_a_target() -> None:
    with pytest.raises(ValueError, match=f"choose from {', '.join(KINDS)}"):
        cheat_of("steal")
    with pytest.raises(ValueError, match="--target"):
        cheat_of("peek")(quantise(np.full(4, 0.25), 4), np.random.default_rng(0))
