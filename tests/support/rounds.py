"""Rounds of the production path as a random program that can be enumerated: Growth draws, LivingTree cuts and re-roots, the batched
law decides. V = 3; p and q depend on the last two tokens; the law of the first LENGTH committed tokens is compared with the target's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from support.batched import batched_law

from rootward.core.distribution import DraftDistribution
from rootward.core.growth import BestFirst, Growth
from rootward.core.law import VerificationLaw
from rootward.core.living_tree import LivingTree, Snapshot
from rootward.core.requests import DraftMode

V, LENGTH = 3, 3  # tokens of committed text that are compared


class Chooser:
    """Enumerates a random program: every `choose` is a branch point, walked depth first like an odometer."""

    def __init__(self) -> None:
        self.path: list[tuple[int, list[int]]] = []  # (position in options, options)
        self.depth, self.mass = 0, 1.0

    def runs(self, program: Callable[[], None]) -> None:
        while True:
            self.depth, self.mass = 0, 1.0
            program()
            while self.path and self.path[-1][0] + 1 == len(self.path[-1][1]):
                self.path.pop()
            if not self.path:
                return
            at, options = self.path[-1]
            self.path[-1] = (at + 1, options)

    def choose(self, law: Sequence[float] | np.ndarray) -> int:
        if self.depth == len(self.path):
            self.path.append((0, [int(i) for i in np.flatnonzero(law)]))
        at, options = self.path[self.depth]
        self.depth += 1
        self.mass *= float(law[options[at]])
        return options[at]


class Model:
    """p and q depend on the last two tokens. q has integer weights, so it is declared exactly."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        contexts = list(itertools.product(range(V), repeat=2))
        keep = rng.random((len(contexts), V)) > (0.25 if seed % 2 else 0.0)
        p = rng.integers(1, 9, (len(contexts), V)) * keep
        p[:, seed % V] += 1
        q = rng.integers(1, 9, (len(contexts), V)) * (rng.random((len(contexts), V)) > (0.3 if seed % 3 == 0 else 0.0))
        q[:, (seed + 1) % V] += 1
        self.p = {c: row / row.sum() for c, row in zip(contexts, p, strict=True)}
        self.q = {c: DraftDistribution(np.flatnonzero(row), row[row > 0]) for c, row in zip(contexts, q, strict=True)}
        self.decided: dict[Hashable, VerificationLaw] = {}  # by all that the law of a round depends on


def start(text: list[int], law: DraftMode, *, root_family: tuple[float, ...] = (0.4, 0.3)) -> tuple[LivingTree, Growth]:
    tree = LivingTree(len(text), 0, vocab_size=V)
    shape = BestFirst(law, max_depth=3, topk=3, draws_per_level=2, root_family=root_family)
    return tree, Growth(tree, shape, node_cap=5)


def grow_level(model: Model, tree: LivingTree, growth: Growth, text: list[int]) -> None:
    """One level as the drafter does it."""

    def expand(node: int, path: list[int]) -> None:
        growth.expand(node, model.q[tuple((text + path)[-2:])])

    if not growth.root_expanded:
        expand(tree.root_id, [])
    else:
        snapshot = tree.snapshot(64)
        for node in growth.frontier(8):
            expand(node, list(snapshot.tree.path(snapshot.ids.index(node))))
    growth.draw(lambda n: np.zeros(n, np.uint64))


def decide(model: Model, snapshot: Snapshot, text: list[int]) -> VerificationLaw:
    """The law of the round. An enumeration repeats the beginning of its program for every end, so it is computed once for equal trees."""
    rows = tuple(row and (row[0].tobytes(), row[1].tobytes()) for row in snapshot.rows)
    key = snapshot.tree, rows, tuple(text[-2:])
    if key not in model.decided:
        model.decided[key] = _decide(model, snapshot, text)
    return model.decided[key]


def _decide(model: Model, snapshot: Snapshot, text: list[int]) -> VerificationLaw:
    tree = snapshot.tree
    target = np.stack([model.p[tuple((text + list(tree.path(i)))[-2:])] for i in range(len(tree))])
    atoms = np.full((len(tree), V), -1)
    weight = np.zeros((len(tree), V), dtype=np.int64)
    for i, row in enumerate(snapshot.rows):
        if row is not None:
            atoms[i, : len(row[0])], weight[i, : len(row[0])] = row
    return batched_law("traversal", tree, atoms, weight, target)


def tail_law(model: Model, text: list[int], done: int, length: int = LENGTH) -> np.ndarray:
    """float64[V, …]: law of the remaining tokens under the target."""
    if done >= length:
        return np.ones(())
    row = model.p[tuple(text[-2:])]
    return np.stack([row[x] * tail_law(model, [*text, x], done + 1, length) for x in range(V)])


def put(out: np.ndarray, model: Model, text: list[int], base: int, mass: float) -> None:
    emitted = text[base : base + out.ndim]
    out[tuple(emitted)] += mass * tail_law(model, text, len(emitted), out.ndim)


def draw_by(chooser: Chooser, monkeypatch) -> None:
    """Every draw of the production code becomes a branch point."""

    monkeypatch.setattr(DraftDistribution, "draw", lambda row, words: int(row.ids[chooser.choose(row.law)]))
