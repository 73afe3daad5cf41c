"""The table of tree constructions, and which rules may verify each (algorithms.md, section 4).

A construction turns rows and node budgets into one tree per context and budget. Shapes that are too large are cut to
the budget in draw order, which looks at no value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import calibrated, shapes
from benchmarks.lockstep import Drafted, View, build, first, first_all, grow
from benchmarks.ranked import Floats, RankedRows
from rootward.core import drafting
from rootward.core.growth import Policy
from rootward.core.requests import DraftMode
from rootward.core.tree import TokenTree

DRAWN = ("token", "traversal", "match")
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8)
COUPLED_ACCEPTANCES = (0.6, 0.7, 0.8)
EAGLE_DEPTH = 8

Make = Callable[[View, np.random.Generator, int], tuple[TokenTree, Floats]]
Trees = Callable[[RankedRows, int], list[Drafted]]


@dataclass(frozen=True)
class Construction:
    """name; its rules; trees(rows, budget) -> a tree per context.

    baseline     what the field does: RSD, chains, i.i.d. trees and EAGLE-2
    replacement  copies kept: laws with replacement
    """

    name: str
    rules: tuple[str, ...]
    trees: Trees
    baseline: bool = False
    replacement: bool = False

    @property
    def coupled(self) -> bool:
        return "coupled" in self.rules


def constructions(acceptances: Sequence[float] = ACCEPTANCES) -> dict[str, Construction]:
    """All of them, by name."""
    listed = [*_chains(), *_rsd(), *_independent(), *_greedy(), *_best_first(acceptances), *_chosen(), *_coupled()]
    return {construction.name: construction for construction in listed}


def levelwise(make: Make, *, level_order: bool = True) -> Trees:
    """A construction from a builder of the library and a budget, cut to the budget."""

    def trees(rows: RankedRows, budget: int) -> list[Drafted]:
        def builder(view: View, rng: np.random.Generator) -> tuple[TokenTree, Floats]:
            return first(Drafted(*make(view, rng, budget)), budget)

        return build(rows, builder, level_order=level_order)

    return trees


def binary(budget: int) -> list[int]:
    """Two children everywhere, deep enough to hold the budget."""
    return [2] * ((budget + 1).bit_length() - 1)


def narrow(budget: int) -> list[int]:
    """Two chains, or four from 32 nodes on."""
    width = 2 if budget < 32 else 4
    return [width] + [1] * (-(-budget // width) - 1)


def tapered(budget: int) -> list[int]:
    """Three children, then two each, then single ones."""
    head = [3, 2]
    return head if budget <= 9 else head + [1] * -(-(budget - 9) // 6)


def beam_of(budget: int) -> int:
    """EAGLE-2's beam for a node budget: it takes 10 for 60 nodes."""
    return min(max(budget // 4, 2), 10)


def square(budget: int) -> tuple[int, int]:
    """(width, depth) of a beam as wide as deep, or half as wide."""
    width = max(1, 1 << ((budget.bit_length() - 1) // 2))
    return width, -(-budget // width)


def _chains() -> list[Construction]:
    drawn = levelwise(lambda row, rng, n: drafting.chain(row, n, rng))
    top = levelwise(lambda row, rng, n: drafting.top_k(row, [1] * n))
    return [
        Construction("chain", ("token", "block", "traversal", "match"), drawn, baseline=True),
        Construction("chain_chosen", ("match",), top, baseline=True),
    ]


def _rsd() -> list[Construction]:
    shapes_c = {"bushy": binary, "narrow": narrow, "tapered": tapered}
    beams: dict[str, Callable[[int], tuple[int, int]]] = {
        "w2": lambda n: (2, -(-n // 2)),
        "w4": lambda n: (min(4, n), -(-n // 4)),
        "square": square,
    }
    by_shape = [
        Construction(f"rsd_c_{name}", DRAWN, _branching(drafting.rsd_c, shape), baseline=True)
        for name, shape in shapes_c.items()
    ]
    by_beam = [Construction(f"rsd_s_{name}", DRAWN, _beam(size), baseline=True) for name, size in beams.items()]
    return by_shape + by_beam


Branching = Callable[[View, Sequence[int], np.random.Generator], tuple[TokenTree, Floats]]


def _branching(build_tree: Branching, shape: Callable[[int], list[int]]) -> Trees:
    def make(row: View, rng: np.random.Generator, n: int) -> tuple[TokenTree, Floats]:
        return build_tree(row, shape(n), rng)

    return levelwise(make)


def _beam(size: Callable[[int], tuple[int, int]]) -> Trees:
    def make(row: View, rng: np.random.Generator, n: int) -> tuple[TokenTree, Floats]:
        width, depth = size(n)
        return drafting.rsd_s(row, width, depth, rng)

    return levelwise(make)


def _independent() -> list[Construction]:
    def paths(row: View, rng: np.random.Generator, n: int) -> tuple[TokenTree, Floats]:
        num = 2 if n < 16 else 4
        return drafting.iid_paths(row, num, -(-n // num), rng)

    def late(row: View, rng: np.random.Generator, n: int) -> tuple[TokenTree, Floats]:
        trunk = max(1, n // 8)
        return drafting.delayed(row, trunk, [2] + [1] * -(-(n - trunk) // 2), rng)

    copies = _branching(drafting.iid, binary)
    rules = ("token", "multi_step", "traversal", "match")
    return [
        Construction("iid_paths", DRAWN, levelwise(paths, level_order=False), baseline=True),
        Construction("delayed", DRAWN, levelwise(late), baseline=True),
        Construction("iid_copies", rules, copies, baseline=True, replacement=True),
    ]


def _greedy() -> list[Construction]:
    by_shape = {"bushy": binary, "narrow": narrow, "tapered": tapered}
    return [
        Construction(f"greedy_{name}", DRAWN, _branching(drafting.greedy, shape)) for name, shape in by_shape.items()
    ]


def _shaped(make: shapes.Maker, acceptance: float, family: int = 0) -> Trees:
    return levelwise(
        lambda view, rng, n: shapes.drawn_in_shape(view, shapes.best_first(n, acceptance, family), make, rng)
    )


def _best_first(acceptances: Sequence[float]) -> list[Construction]:
    sampled = [Construction(f"best_first_{a:g}", DRAWN, _shaped(shapes.drawn, a)) for a in acceptances]
    greedy = [
        Construction(f"greedy_root{k}_{a:g}", DRAWN, _shaped(shapes.greedy_root, a, k))
        for k in shapes.FAMILIES
        for a in (0.7, 0.8)
    ]
    measured = [
        Construction("calibrated", DRAWN, lambda rows, n: calibrated.trees(rows, n, shapes.drawn)),
        Construction("calibrated_greedy", DRAWN, lambda rows, n: calibrated.trees(rows, n, shapes.greedy)),
    ]
    return sampled + greedy + measured


def _chosen() -> list[Construction]:
    def growth(rows: RankedRows, budget: int) -> list[Drafted]:
        policy = Policy(DraftMode.TOP_K, budget, min(shapes.DEEPEST, budget), 16, 1)
        return first_all([one.drafted for one in grow(rows, policy, budget)], budget)

    eagle = levelwise(lambda row, rng, n: drafting.eagle2(row, beam_of(n), min(EAGLE_DEPTH, n), n))
    return [
        Construction("top_k_best_first", ("match",), growth),
        Construction("eagle2", ("match",), eagle, baseline=True),
    ]


def _coupled() -> list[Construction]:
    return [Construction(f"coupled_{a:g}", ("coupled",), _shaped(shapes.coupled, a)) for a in COUPLED_ACCEPTANCES]
