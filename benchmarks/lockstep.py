"""Tree builders and growth, driven over all contexts at once: one forward a level.

A builder asks for one row after another. It is run until it asks for a row that is not there; the missing rows of all
contexts are fetched together and the builder runs again from the same generator state.

Legend: N nodes, K atoms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from benchmarks.ranked import Floats, Path, RankedRows
from rootward.core.distribution import DraftDistribution
from rootward.core.growth import Growth, Policy
from rootward.core.living_tree import ROOT, LivingTree
from rootward.core.requests import DraftMode
from rootward.core.tree import TokenTree


class Drafted(NamedTuple):
    """A tree in rank space and what it declares: draft float64[N, K]."""

    tree: TokenTree
    draft: Floats


class Incomplete(Exception):
    """Rows are missing; run again when they are there."""


class View:
    """What a builder sees of one context: `row(path)`, and the shared noise for coupled drafts.

    level_order  the builder asks for all rows of a level before any row below it
    """

    def __init__(self, rows: RankedRows, context: int, *, level_order: bool = True) -> None:
        self.rows, self.context, self.level_order = rows, context, level_order
        self.missing: dict[Path, None] = {}
        self._unknown: set[Path] = set()  # missing paths, and paths below them: of these nothing is known

    def __call__(self, path: Path) -> Floats:
        """float64[K]: the draft law after these ranks; uniform where it is not known yet."""
        found = self.rows.get(self.context, path)
        if found is not None:
            return found.q
        if path and path[:-1] in self._unknown:
            if self.level_order:
                raise Incomplete
        else:
            self.missing[path] = None
        self._unknown.add(path)
        return np.full(self.rows.num_atoms, 1.0 / self.rows.num_atoms)

    def noise(self, path: Path) -> Floats:
        """float64[K]: the shared noise at the atoms of a row."""
        found = self.rows.get(self.context, path)
        return np.zeros(self.rows.num_atoms) if found is None else found.noise.astype(np.float64)

    def wanted(self) -> list[tuple[int, Path]]:
        """The missing rows of the highest level: what lies below may rest on rows that are not known."""
        highest = min(map(len, self.missing)) if self.level_order else 0
        return [(self.context, path) for path in self.missing if not self.level_order or len(path) == highest]


Builder = Callable[[View, np.random.Generator], tuple[TokenTree, Floats]]


def generator(rows: RankedRows, context: int) -> np.random.Generator:
    """The draws of one context: the same for every construction, so that comparisons are paired."""
    return np.random.default_rng([rows.seed, 104, int(rows.temperature * 1000), rows.first_context + context])


def build(
    rows: RankedRows, builder: Builder, *, level_order: bool = True, num_contexts: int | None = None
) -> list[Drafted]:
    """One tree per context, or for the first so many."""
    done: dict[int, Drafted] = {}
    waiting = list(range(num_contexts or len(rows)))
    while waiting:
        wanted: list[tuple[int, Path]] = []
        for context in waiting:
            view = View(rows, context, level_order=level_order)
            with suppress(Incomplete):
                tree, draft = builder(view, generator(rows, context))
            if view.missing:
                wanted += view.wanted()
            else:
                done[context] = Drafted(tree, draft)
        rows.fetch(wanted)
        waiting = [context for context in waiting if context not in done]
    return [done[context] for context in sorted(done)]


class Grown(NamedTuple):
    """A tree grown to the end, and its number of drawn nodes after each level."""

    drafted: Drafted
    after_level: list[int]


def grow(rows: RankedRows, policy: Policy, num_levels: int, num_contexts: int | None = None) -> list[Grown]:
    """`Growth` as the drafter service drives it: a forward over every frontier, then a level's worth of draws."""
    plants = [_Plant(rows, context, policy) for context in range(num_contexts or len(rows))]
    for _ in range(num_levels):
        for plant in plants:
            plant.look()
        rows.fetch([(plant.context, plant.path[node]) for plant in plants for node in plant.frontier])
        for plant in plants:
            plant.level()
    return [plant.finish() for plant in plants]


class _Plant:
    """The living tree of one context, in rank space."""

    def __init__(self, rows: RankedRows, context: int, policy: Policy) -> None:
        self.rows, self.context, self.ratio = rows, context, policy.law in (DraftMode.SAMPLED, DraftMode.GREEDY)
        self.tree = LivingTree(1, 0, vocab_size=rows.num_atoms + 1, node_cap=policy.node_cap)
        self.growth = Growth(self.tree, policy)
        self.path: dict[int, Path] = {ROOT: ()}
        self.frontier: list[int] = []
        self.after_level: list[int] = []
        self._rng = generator(rows, context)

    def look(self) -> None:
        self.frontier = self.growth.frontier(1 << 30) if self.growth.root_expanded else [ROOT]

    def level(self) -> None:
        for node in self.frontier:
            found = self.rows.at(self.context, self.path[node])
            support = int(np.count_nonzero(found.weight))
            row = DraftDistribution(np.arange(support), found.weight[:support])
            self.growth.expand(node, row, found.noise[:support].astype(np.float64))
        for node in self.growth.draw(self._words):
            record = self.tree.nodes[node]
            self.path[node] = (*self.path[record.parent], record.token)
        self.after_level.append(len(self.tree))

    def _words(self, num_words: int) -> np.ndarray:
        return self._rng.integers(1 << 64, size=num_words, dtype=np.uint64)

    def finish(self) -> Grown:
        records = list(self.tree.nodes.values())  # ids count draws from 1
        tree = TokenTree(
            [0, *(r.token for r in records)], [-1, *(r.parent for r in records)], [False, *(r.sampled for r in records)]
        )
        draft = np.zeros((len(tree), self.rows.num_atoms))
        for node in sorted(set(tree.parent[1:].tolist())) if self.ratio else []:
            declared = self.tree.at(node).row  # q, or q′ of a GREEDY family
            if declared is not None:
                draft[node, declared[0]] = declared[1] / declared[1].sum()
        return Grown(Drafted(tree, draft), self.after_level)


def first(drafted: Drafted, num_nodes: int) -> Drafted:
    """The first so many nodes below the root in draw order."""
    keep = min(num_nodes + 1, len(drafted.tree))
    return Drafted(drafted.tree.first(keep), drafted.draft[:keep])


def first_all(drafted: Sequence[Drafted], num_nodes: int) -> list[Drafted]:
    return [first(one, num_nodes) for one in drafted]
