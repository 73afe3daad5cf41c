"""Two rounds with re-rooting against the golden vectors: what a cut, a verdict and the kept subtree are worth."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rootward.core import Law, verification
from rootward.core.living_tree import ROOT, LivingTree

CASES = json.loads((Path(__file__).parents[2] / "golden" / "living.json").read_text())["living"]


def draws(weights: list[int], branching: list[int]) -> Iterator[tuple[float, tuple[tuple[int, int], ...]]]:
    """Every RSD-C tree as (probability, ((parent id, token), …) in draw order), families in the order of their parents."""

    def level(nodes: tuple[tuple[int, int], ...], parents: list[int], depth: int, probability: float):
        if depth == len(branching):
            yield probability, nodes
            return
        families = [
            list(itertools.permutations(range(len(weights)), min(branching[depth], len(weights)))) for _ in parents
        ]
        for choice in itertools.product(*families):
            grown, mass = list(nodes), probability
            for parent, family in zip(parents, choice, strict=True):
                left = sum(weights)
                for token in family:
                    mass *= weights[token] / left
                    left -= weights[token]
                    grown.append((parent, token))
            yield from level(tuple(grown), list(range(len(nodes) + 1, len(grown) + 1)), depth + 1, mass)

    yield from level((), [ROOT], 0, 1.0)


def planted(nodes: tuple[tuple[int, int], ...], weights: list[int]) -> LivingTree:
    tree = LivingTree(3, 0, vocab_size=len(weights))
    row = (np.arange(len(weights)), np.array(weights))
    for parent, token in nodes:
        tree.at(parent).row = row
        tree.draw(parent, token, sampled=True)
    return tree


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['model']}-{c['branching']}-{c['verified']}")
def test_two_rounds_equal_the_golden_vectors(case: dict) -> None:
    p, q = (np.array(case[k]) / sum(case[k]) for k in ("p_weights", "q_weights"))

    @cache
    def law(tree) -> Law:
        rows = np.tile(p, (len(tree), 1)), np.tile(q, (len(tree), 1))
        return verification.law("traversal", tree, *rows)

    round_1 = round_2 = salvage = 0.0
    for probability, nodes in draws(case["q_weights"], case["branching"]):
        first = planted(nodes, case["q_weights"]).snapshot(case["verified"])
        verdict = law(first.tree)
        round_1 += probability * verdict.block_efficiency
        for stop in np.flatnonzero(verdict.stop):
            for bonus in np.flatnonzero(verdict.residual[stop]):
                mass = probability * verdict.stop[stop] * verdict.residual[stop][bonus]
                tree = planted(nodes, case["q_weights"])
                tree.commit([*first.tree.path(int(stop)), int(bonus)])
                salvage += mass * (len(tree) > 0)
                round_2 += mass * law(tree.snapshot(len(tree)).tree).block_efficiency
    assert round_1 == pytest.approx(case["tokens_round_1_float"], abs=1e-9)
    assert round_2 == pytest.approx(case["tokens_round_2_float"], abs=1e-9)
    assert salvage == pytest.approx(case["salvage_float"], abs=1e-9)
