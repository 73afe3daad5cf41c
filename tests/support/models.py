"""Tiny context-dependent language models: a target p and a draft q, one row per path."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent.parent / "golden"
Rows = dict[tuple[int, ...], np.ndarray]


@dataclass(frozen=True)
class Model:
    name: str
    vocab: int
    depth: int
    p: Rows  # target row after each path up to length `depth`
    q: Rows  # draft row, same keys

    def target(self, tree) -> np.ndarray:
        return np.array([self.p[path] for path in paths_of(tree)])

    def draft_row(self, path: tuple[int, ...]) -> np.ndarray:
        return self.q[path]


@cache
def paths_of(tree) -> tuple[tuple[int, ...], ...]:
    """The path of every node: the same trees are asked about for every model and every verifier."""
    return tuple(tree.path(node) for node in range(len(tree)))


def paths(vocab: int, depth: int):
    for length in range(depth + 1):
        yield from itertools.product(range(vocab), repeat=length)


def random_model(seed: int, vocab: int = 3, depth: int = 2, *, zeros_p: float = 0.0, zeros_q: float = 0.0) -> Model:
    """Rows of small integer weights; some weights are zero with the given probabilities (never all of them)."""
    rng = np.random.default_rng([seed, vocab, depth])

    def rows(zeros: float) -> Rows:
        table = {}
        for path in paths(vocab, depth):
            weight = rng.integers(1, 10, size=vocab) * (rng.random(vocab) >= zeros)
            if not weight.any():
                weight[rng.integers(vocab)] = 1
            table[path] = weight / weight.sum()
        return table

    return Model(f"seed {seed}, V = {vocab}, depth {depth}", vocab, depth, rows(zeros_p), rows(zeros_q))


def test_models() -> list[Model]:
    """Ten models: V = 3 and 4, with and without zeros, exhausted support, p close to q."""
    plain = [random_model(seed) for seed in range(3)] + [random_model(3, vocab=4)]
    zeros = [
        random_model(10, zeros_p=0.4),
        random_model(11, zeros_q=0.4),
        random_model(12, zeros_p=0.4, zeros_q=0.4),
        random_model(13, vocab=4, zeros_p=0.3, zeros_q=0.6),
        random_model(14, zeros_q=0.7),  # mostly one or two tokens: exhausted support
    ]
    same = random_model(20)
    return [*plain, *zeros, Model("p = q", 3, 2, same.p, same.p)]


test_models.__test__ = False  # not a test


def deep_models() -> list[Model]:
    """Eight models of depth 3, V = 3."""
    return [random_model(30 + i, depth=3, zeros_p=0.15 * (i % 3), zeros_q=0.15 * (i % 2)) for i in range(8)]


def load(file: str) -> dict:
    return json.loads((GOLDEN / file).read_text())


def golden_models(file: str) -> list[tuple[Model, list[dict]]]:
    """(model, expected entries) of tiny.json or random.json."""

    def rows(table: dict[str, list[str]]) -> Rows:
        return {tuple(map(int, key.split())): np.array([float(Fraction(x)) for x in row]) for key, row in table.items()}

    return [
        (Model(m["name"], m["vocab"], m["depth"], rows(m["p"]), rows(m["q"])), m["expected"])
        for m in load(file)["models"]
    ]
