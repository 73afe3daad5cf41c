"""Random trees with rows of bounded support, for comparing the forms of one law."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.rows import quantise
from rootward.core import TokenTree
from rootward.core.distribution import DraftDistribution


@dataclass(frozen=True)
class Round:
    """What one verification is given, in both forms."""

    tree: TokenTree
    target: np.ndarray  # float64[N, V]
    draft: np.ndarray  # float64[N, V]
    atoms: np.ndarray  # int64[N, K], -1 pad
    weight: np.ndarray  # int64[N, K]


def random_round(
    rng: np.random.Generator,
    *,
    vocab: int = 40,
    num_atoms: int = 8,
    num_nodes: int = 12,
    chosen: float = 0.25,
    copies: bool = False,
    chain: bool = False,
) -> Round:
    """Nodes under random parents; a child is drawn from its parent's row without its siblings (copies: from the whole row), or chosen."""
    target = softmax(rng.gumbel(size=(num_nodes, vocab)) * rng.choice([0.5, 2.0, 8.0], size=(num_nodes, 1)))
    noisy = np.log(target + 1e-9) + rng.normal(size=target.shape) * rng.choice([0.0, 0.5, 2.0])
    rows = [quantise(row, num_atoms) for row in softmax(noisy)]
    taken: list[set[int]] = [set() for _ in range(num_nodes)]
    token, parent, sampled = [0], [-1], [False]
    while len(token) < num_nodes:
        node = len(token) - 1 if chain else int(rng.integers(len(token)))
        left = rows[node].without(taken[node])
        flag = len(left) > 0 and rng.random() >= chosen
        free = sorted(set(range(vocab)) - taken[node])
        x = int(rng.choice(left.ids, p=left.law)) if flag else int(rng.choice(free))
        if not copies:
            taken[node].add(x)
        token.append(x)
        parent.append(node)
        sampled.append(flag)
    tree = TokenTree(token, parent, sampled)
    return Round(tree, target, *declared(tree, rows, vocab, num_atoms))


def declared(
    tree: TokenTree, rows: list[DraftDistribution], vocab: int, num_atoms: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dense draft, atoms, weight); zero rows where nothing was drawn."""
    draft = np.zeros((len(tree), vocab))
    atoms = np.full((len(tree), num_atoms), -1)
    weight = np.zeros((len(tree), num_atoms), dtype=np.int64)
    for node, family in enumerate(tree.children):
        if any(tree.sampled[child] for child in family):
            row = rows[node]
            draft[node] = row.dense(vocab)
            atoms[node, : len(row)], weight[node, : len(row)] = row.ids, row.weight
    return draft, atoms, weight


def softmax(logits: np.ndarray) -> np.ndarray:
    mass = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return mass / mass.sum(axis=-1, keepdims=True)
