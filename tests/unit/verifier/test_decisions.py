"""Verdicts of a batch: those of each round alone, and few waits for the device, whatever the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.random_trees import random_round
from support.waits import Waits

from rootward.core.living_tree import Snapshot
from rootward.core.requests import Rule, Sampling
from rootward.core.rng import Key
from rootward.engine.verify import ForestLaw, LawFunction, decide, forest_law
from verifier_service.runner import Round

VOCAB, ATOMS, MOST_CHOSEN = 24, 5, 13


def rounds_of(rng: np.random.Generator, num: int, rule: Rule, sampling: Sampling) -> tuple[list[Round], torch.Tensor]:
    rounds, rows = [], []
    made = {"chosen": 0.0, "copies": True} if rule is Rule.MULTI_STEP else {"chosen": 0.3}
    for i in range(num):
        r = random_round(rng, vocab=VOCAB, num_atoms=ATOMS, num_nodes=int(rng.integers(1, 14)), **made)
        declared = tuple(
            (ids[ids >= 0], weight[ids >= 0]) if (ids >= 0).any() else None
            for ids, weight in zip(r.atoms, r.weight, strict=True)
        )
        snapshot = Snapshot(r.tree, tuple(range(len(r.tree))), declared)
        rounds.append(Round(i, 1, 9 + i, rule, sampling, Key(int(rng.integers(1 << 40))), 1 + i, snapshot))
        rows.append(np.log(np.maximum(r.target, 1e-30)))
    return rounds, torch.from_numpy(np.concatenate(rows))


def test_rounds_of_several_rules_are_decided_as_each_alone() -> None:
    rng = np.random.default_rng(3)
    kinds = [(rule, s) for rule in Rule for s in (Sampling(), Sampling(0.0), Sampling(0.7, top_k=9, top_p=0.9))]
    for _ in range(6):
        mine = [rounds_of(rng, 1, rule, s) for rule, s in kinds]
        rounds = [replace(r, shared=bool(rng.integers(2))) for (r,), _ in mine]
        lengths_together: list[float] = []
        lengths_alone: list[float] = []
        together = decide(rounds, torch.cat([logits for _, logits in mine]), law_with_lengths(lengths_together))
        alone = [
            decide([r], logits, law_with_lengths(lengths_alone))[0] for r, (_, logits) in zip(rounds, mine, strict=True)
        ]
        assert [(d.stop, d.bonus) for d in together] == [(d.stop, d.bonus) for d in alone]
        by_ratio_tests = [r for r in rounds if r.rule is not Rule.MATCH and (r.shared or len(r.tree) > 1)]
        assert len(lengths_together) == len(by_ratio_tests) > 4
        np.testing.assert_allclose(lengths_together, lengths_alone, atol=1e-9)


def law_with_lengths(lengths: list[float]) -> LawFunction:
    """`forest_law`, which also appends the expected number of tokens of each of its rounds."""

    def law(*arguments: Any) -> ForestLaw:
        found = forest_law(*arguments)
        lengths.extend(1.0 + np.add.reduceat(found.stop * found.forest.depth, found.forest.start[:-1]))
        return found

    return law


@pytest.mark.parametrize(
    ("rule", "sampling", "dtype"),
    [
        (Rule.TRAVERSAL, Sampling(), torch.float32),
        (Rule.TOKEN, Sampling(0.7), torch.float32),
        (Rule.MULTI_STEP, Sampling(), torch.float32),
        (Rule.MATCH, Sampling(), torch.float32),
        (Rule.MATCH, Sampling(0.0), torch.bfloat16),  # a type for which the CPU goes the way of devices
    ],
    ids=["traversal", "token", "multi_step", "match", "greedy"],
)
def test_the_host_waits_for_the_device_at_most_twice_whatever_the_batch(
    rule: Rule, sampling: Sampling, dtype, monkeypatch
) -> None:
    for module in ("verify", "noise"):  # the way of devices, elsewhere too
        monkeypatch.setattr(f"rootward.engine.{module}.host_can_read", lambda device: False)
    for num in (1, 8):
        rounds, logits = rounds_of(np.random.default_rng(num), num, rule, sampling)
        with Waits(monkeypatch) as waits:
            decide(rounds, logits.to(dtype))
        size = sum(len(r.tree) for r in rounds)
        if rule is Rule.MATCH:
            assert waits.count == {"cpu": 1}
            assert waits.values <= size
        else:  # for gathered atoms, and for bonus tokens of the tail
            assert waits.count["cpu"] == waits.count.total() <= 2
            assert waits.values <= size * (ATOMS + MOST_CHOSEN + 1) + num


def test_a_local_tree_of_chosen_nodes_is_verified_under_multi_step() -> None:
    """It stands in for a drafter's copies, beside rounds that have them."""
    rng = np.random.default_rng(4)
    (local,), logits = rounds_of(rng, 1, Rule.TOKEN, Sampling())
    (copies,), more = rounds_of(rng, 1, Rule.MULTI_STEP, Sampling())
    local = replace(local, rule=Rule.MULTI_STEP)
    assert not local.tree.sampled[1:].all()
    decisions = decide([local, copies], torch.cat([logits, more]))
    assert decisions[0].stop == decide([replace(local, rule=Rule.TOKEN)], logits)[0].stop
