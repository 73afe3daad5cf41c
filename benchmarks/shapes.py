"""Fixed shapes: best-first growth with a constant acceptance is one, and it is grown here level by level.

A shape is int[N] of parents in draw order; -1 at the root. `drawn_in_shape` fills it with tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from benchmarks.lockstep import View
from benchmarks.ranked import Floats, Path
from rootward.core.distribution import DraftDistribution
from rootward.core.drafting.coupled import coupled_children
from rootward.core.drafting.families import Family, greedy_family, top_family, without_replacement
from rootward.core.growth import Growth, Policy
from rootward.core.living_tree import ROOT, LivingTree
from rootward.core.requests import DraftMode
from rootward.core.tree import TokenTree

Maker = Callable[[View, Path, int, np.random.Generator], Family]
WIDEST, DEEPEST = 8, 32
FAMILIES = {  # size of a GREEDY family at the root: what its children take, in order of trial (measured on the demo pair)
    2: (0.37, 0.27),
    3: (0.33, 0.27, 0.11),
    5: (0.27, 0.27, 0.11, 0.06, 0.03),
}


@lru_cache(maxsize=256)
def best_first(num_nodes: int, acceptance: float, family: int = 0) -> tuple[int, ...]:
    """The shape `Growth` takes when every draw goes to the best place; family > 0: a GREEDY family of that size at the root."""
    policy = policy_of(DraftMode.GREEDY if family else DraftMode.SAMPLED, num_nodes, acceptance, family)
    tree = LivingTree(1, 0, vocab_size=64, node_cap=num_nodes + family)
    growth = Growth(tree, policy)
    row = DraftDistribution(np.arange(64), np.full(64, 1))
    rng = np.random.default_rng(0)
    frontier = [ROOT]
    while frontier:
        for node in frontier:
            growth.expand(node, row)
        growth.draw(lambda n: rng.integers(1 << 64, size=n, dtype=np.uint64))
        frontier = growth.frontier(1 << 30)
    return (-1, *(record.parent for record in tree.nodes.values()))


def policy_of(law: DraftMode, num_nodes: int, acceptance: float, family: int = 0) -> Policy:
    """One draw at a time, as deep as the budget allows."""
    policy = Policy(law, num_nodes, min(DEEPEST, num_nodes), WIDEST, 1, acceptance)
    return replace(policy, family=FAMILIES[family]) if family else policy


def drawn(view: View, path: Path, k: int, rng: np.random.Generator) -> Family:
    return without_replacement(view(path), k, rng)


def greedy(view: View, path: Path, k: int, rng: np.random.Generator) -> Family:
    return greedy_family(view(path), k, rng)


def greedy_root(view: View, path: Path, k: int, rng: np.random.Generator) -> Family:
    """A GREEDY family at the root, draws without replacement below it."""
    return drawn(view, path, k, rng) if path else greedy(view, path, k, rng)


def likeliest(view: View, path: Path, k: int, rng: np.random.Generator) -> Family:
    return top_family(view(path), k, rng)


def coupled(view: View, path: Path, k: int, rng: np.random.Generator) -> Family:
    """The k largest of log q + shared noise."""
    row = view(path)
    tokens = coupled_children(np.arange(len(row)), row, view.noise(path), k).tolist()
    return Family(tokens, [False] * len(tokens), row)


def drawn_in_shape(
    view: View, shape: tuple[int, ...], make: Maker, rng: np.random.Generator
) -> tuple[TokenTree, Floats]:
    """(tree, draft float64[N, K]): the tokens of a shape, families level by level. Where a row has fewer atoms than
    the shape has children, the places below stay empty."""
    families: list[list[int]] = [[] for _ in shape]
    for node, parent in enumerate(shape[1:], start=1):
        families[parent].append(node)
    path: dict[int, Path] = {0: ()}
    flag, rows = {0: False}, {}
    level = [0]
    while level:
        below: list[int] = []
        for node in (n for n in level if families[n]):
            family = make(view, path[node], len(families[node]), rng)
            rows[node] = family.row
            for child, token, sampled in zip(families[node], family.tokens, family.sampled, strict=False):
                path[child], flag[child] = (*path[node], token), sampled
                below.append(child)
        level = below
    return _assembled(shape, path, flag, rows)


def _assembled(
    shape: tuple[int, ...], path: dict[int, Path], flag: dict[int, bool], rows: dict[int, Floats]
) -> tuple[TokenTree, Floats]:
    nodes = sorted(path)
    index = {node: i for i, node in enumerate(nodes)}
    tree = TokenTree(
        [0, *(path[n][-1] for n in nodes[1:])],
        [-1, *(index[shape[n]] for n in nodes[1:])],
        [flag[n] for n in nodes],
    )
    draft = np.zeros((len(nodes), len(rows[0])))
    for node, row in rows.items():
        draft[index[node]] = row
    return tree, draft
