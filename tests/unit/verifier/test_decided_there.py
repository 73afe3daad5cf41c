"""Verdicts where the logits are: those of the host, and the host waits once for a rule, whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.random_trees import random_round
from support.waits import Waits

from rootward.core.living_tree import Snapshot
from rootward.core.requests import Rule, Sampling
from rootward.core.rng import Key, bonus_coin, bonus_coins
from rootward.core.verification.batched import forest_law
from verifier_service.runner import Round, Runner

VOCAB, ATOMS = 24, 5


class Commits:
    """Of a model, all that verdicts ask for."""

    def commit(self, slot: int, node: int, *, keep_below: bool) -> None:
        pass


def rounds_of(rng: np.random.Generator, num: int, rule: Rule, sampling: Sampling) -> tuple[list[Round], torch.Tensor]:
    rounds, rows = [], []
    for i in range(num):
        r = random_round(rng, vocab=VOCAB, num_atoms=ATOMS, num_nodes=int(rng.integers(1, 14)), chosen=0.3)
        declared = tuple(
            (ids[ids >= 0], weight[ids >= 0]) if (ids >= 0).any() else None
            for ids, weight in zip(r.atoms, r.weight, strict=True)
        )
        snapshot = Snapshot(r.tree, tuple(range(len(r.tree))), declared)
        rounds.append(Round(i, 1, 9 + i, rule, sampling, Key(int(rng.integers(1 << 40))), 1 + i, snapshot))
        rows.append(np.log(np.maximum(r.target, 1e-30)))
    return rounds, torch.from_numpy(np.concatenate(rows))


@pytest.mark.parametrize("rule", [Rule.TRAVERSAL, Rule.TOKEN])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=9, top_p=0.9)], ids=["plain", "cut"])
def test_they_are_those_of_the_host(rule: Rule, sampling: Sampling) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        rounds, logits = rounds_of(rng, 4, rule, sampling)
        here, there = (Runner(Commits(), there=there)._decided(rounds, logits) for there in (False, True))
        for ours, theirs in zip(here, there, strict=True):
            assert (ours.tokens, ours.path, ours.num_nodes) == (theirs.tokens, theirs.path, theirs.num_nodes)
            assert ours.expected == pytest.approx(theirs.expected, abs=1e-9)


def test_the_coins_of_every_depth_are_those_of_each() -> None:
    rounds = [(Key(3), 1, 10), (Key(3, 1), 2, 10), (Key(1 << 50), 7, 4000)]
    table = bonus_coins(rounds, 5)
    assert table.tolist() == [[bonus_coin(key, e, at + d) for d in range(5)] for key, e, at in rounds]


@pytest.mark.parametrize(
    ("rule", "sampling", "dtype"),
    [
        (Rule.TRAVERSAL, Sampling(), torch.float32),
        (Rule.TOKEN, Sampling(0.7), torch.float32),
        (Rule.MATCH, Sampling(), torch.float32),
        (Rule.MATCH, Sampling(0.0), torch.bfloat16),  # a type for which the CPU goes the way of devices
    ],
    ids=["traversal", "token", "match", "greedy"],
)
def test_the_host_waits_once_whatever_the_batch(rule: Rule, sampling: Sampling, dtype, monkeypatch) -> None:
    for num in (1, 8):
        rounds, logits = rounds_of(np.random.default_rng(num), num, rule, sampling)
        runner = Runner(Commits(), there=True)
        with Waits(monkeypatch) as waits:
            runner._decided(rounds, logits.to(dtype))
        assert waits.count == {"cpu": 1}
        assert waits.values <= (4 * num if rule is not Rule.MATCH else sum(len(r.tree) for r in rounds))


def test_another_law_and_a_cpu_are_decided_by_the_host(monkeypatch) -> None:
    rounds, logits = rounds_of(np.random.default_rng(0), 3, Rule.TRAVERSAL, Sampling())
    seen: list[int] = []

    def counted(*about):
        seen.append(1)
        return forest_law(*about)

    Runner(Commits(), decide=counted, there=True)._decided(rounds, logits)
    assert seen == [1]
    with Waits(monkeypatch) as waits:
        Runner(Commits())._decided(rounds, logits)
    assert waits.count["cpu"] > 1
