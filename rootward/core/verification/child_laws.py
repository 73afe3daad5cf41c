"""The law each child was drawn from at its turn, and the checks of everything that enters a verification.

A sampled child: the draft row of its parent without the tokens of ALL earlier siblings, drawn or chosen,
renormalised; with replacement the row unchanged. A chosen child: one-hot at its token. Siblings come in index order,
which is draw order.

Legend: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Bools, Floats
from rootward.core.tree import TokenTree

TOLERANCE = 1e-6  # on the sum of a used row


def child_laws(tree: TokenTree, draft: Floats, node: int, replacement: bool) -> Iterator[tuple[int, int, Floats]]:
    """(child, its token, its law Q) for the children of a node in draw order."""
    row, whole = draft[node], True
    for child in tree.children[node]:
        token = int(tree.token[child])
        if not tree.sampled[child]:
            law = np.zeros_like(row)
            law[token] = 1.0
        else:
            if not row[token] > 0.0:
                raise ValueError(f"draft: no mass on token {token} of node {child}; declare the law it was drawn from")
            law = row if whole else row / row.sum()
        yield child, token, law
        if not replacement:
            row, whole = row.copy(), False
            row[token] = 0.0


def checked(tree: TokenTree, target: ArrayLike, draft: ArrayLike, replacement: bool) -> tuple[Floats, Floats]:
    """target and draft as float64[N, V], or a ValueError: only rows that are used must be laws."""
    p = np.array(target, dtype=np.float64)
    q = np.array(draft, dtype=np.float64)
    for name, rows in (("target", p), ("draft", q)):
        if rows.ndim != 2 or rows.shape[0] != len(tree) or rows.shape[1] == 0:
            raise ValueError(f"{name}: shape {rows.shape}; give one row over the vocabulary per node, {len(tree)} rows")
    if p.shape != q.shape:
        raise ValueError(f"draft: shape {q.shape}; use the vocabulary of target, {p.shape}")
    check_tokens(tree, p.shape[1])
    if not replacement:
        check_siblings(tree)
    check_rows("target", p, np.ones(len(tree), dtype=np.bool_))
    check_rows("draft", q, expanded(tree))
    return p, q


def expanded(tree: TokenTree) -> Bools:
    """bool[N]: nodes with a sampled child, whose draft rows are used."""
    used = np.zeros(len(tree), dtype=np.bool_)
    used[tree.parent[1:][tree.sampled[1:]]] = True
    return used


def check_tokens(tree: TokenTree, vocabulary: int) -> None:
    if len(tree) > 1 and int(tree.token[1:].max()) >= vocabulary:
        raise ValueError(f"token: {tree.token[1:].max()} in a vocabulary of {vocabulary}; use ids below it")


def check_siblings(tree: TokenTree) -> None:
    """No two children of a node share a token."""
    for family in tree.children:
        if len(family) > 1 and len({int(tree.token[child]) for child in family}) < len(family):
            raise ValueError(f"token: siblings {family} repeat a token; copies need replacement=True")


def check_rows(name: str, rows: Floats, used: Bools) -> None:
    """Used rows are finite, not negative, and sum to 1."""
    with np.errstate(invalid="ignore"):  # inf − inf
        sums = rows.sum(axis=1)
    wrong = used & ~((np.abs(sums - 1.0) <= TOLERANCE) & (rows.min(axis=1) >= 0.0))  # NaN fails every comparison
    if wrong.any():
        node = int(np.argmax(wrong))
        raise ValueError(
            f"{name}: row {node} has sum {sums[node]} and minimum {rows[node].min()}; give a finite law that sums to 1"
        )
