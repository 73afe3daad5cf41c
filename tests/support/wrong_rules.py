"""Tempting rules that are biased. A test of losslessness that does not catch each of them tests nothing.

Two kinds: what is done to a tree after it was drawn (Weighted → Weighted), and verifiers (tree, target, draft) → Law.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
from support.enumeration import Verifier, Weighted, merged
from support.models import Model

from rootward.core import Law, TokenTree
from rootward.core.verification.step import step
from rootward.core.verification.token import stop_from_the_top
from rootward.core.verification.traversal import stop_in_post_order

Families = tuple[tuple[int, ...], ...]


# ---- done to a tree after it was drawn


def rebuilt(tree: TokenTree, draft: np.ndarray, families: Families) -> tuple[TokenTree, np.ndarray]:
    """The tree with other families: each a selection of its children in some order."""
    token, parent, sampled, old = [0], [-1], [False], [0]
    for new, node in enumerate(old):
        for child in families[node]:
            token.append(int(tree.token[child]))
            parent.append(new)
            sampled.append(bool(tree.sampled[child]))
            old.append(child)
    return TokenTree(token, parent, sampled), draft[old]


def sorted_by_q(trees: Weighted) -> Weighted:
    """Siblings tried in order of decreasing q instead of draw order."""

    def outcome(tree, draft):
        by_q = lambda child: (-draft[tree.parent[child], tree.token[child]], child)  # noqa: E731
        return rebuilt(tree, draft, tuple(tuple(sorted(family, key=by_q)) for family in tree.children))

    return merged((probability, *outcome(tree, draft)) for probability, tree, draft in trees)


def shuffled(trees: Weighted) -> Weighted:
    """Siblings tried in a uniformly random order."""
    outcomes = []
    for probability, tree, draft in trees:
        orders = list(itertools.product(*(itertools.permutations(family) for family in tree.children)))
        outcomes += [(probability / len(orders), *rebuilt(tree, draft, families)) for families in orders]
    return merged(iter(outcomes))


def cut_by_own_value(trees: Weighted, least: float = 0.35) -> Weighted:
    """The tree ends before the first node whose own q is small."""

    def size(tree, draft):
        q = draft[tree.parent[1:], tree.token[1:]]
        return 1 + (int(np.argmax(q < least)) if (q < least).any() else len(q))

    return merged((probability, *first(tree, draft, size(tree, draft))) for probability, tree, draft in trees)


def first(tree: TokenTree, draft: np.ndarray, num_nodes: int) -> tuple[TokenTree, np.ndarray]:
    return _first(tree, num_nodes), draft[:num_nodes]


_first = cache(TokenTree.first)  # batches repeat the same cuts


def pruned_by_path(trees: Weighted, keep: int = 3) -> Weighted:
    """The `keep` nodes of largest draft path probability stay (a re-ranked tree)."""

    def outcome(tree, draft):
        reach = np.ones(len(tree))
        for node in range(1, len(tree)):
            reach[node] = reach[tree.parent[node]] * draft[tree.parent[node], tree.token[node]]
        kept = set(sorted(range(1, len(tree)), key=lambda i: (-reach[i], i))[:keep])
        return rebuilt(tree, draft, tuple(tuple(c for c in family if c in kept) for family in tree.children))

    return merged((probability, *outcome(tree, draft)) for probability, tree, draft in trees)


def lost_in_the_middle(trees: Weighted) -> Weighted:
    """The first child of the root never arrives; later child laws come from the siblings that did."""
    return merged(
        (probability, *rebuilt(tree, draft, (tree.children[0][1:], *tree.children[1:])))
        for probability, tree, draft in trees
    )


def greedy_child_drawn_late(model: Model) -> Weighted:
    """A GREEDY family whose sampled child is drawn after the chosen one has grown, only if that growth was unlikely,
    and is tried first all the same."""

    def outcomes():
        row = model.q[()]
        chosen = int(np.argmax(row))
        below, rest = model.q[(chosen,)], removed(row, [chosen])
        for x in np.flatnonzero(below).tolist():
            late = below[x] < 0.4 and rest.any()
            for s in np.flatnonzero(rest).tolist() if late else [None]:
                token, parent, sampled = [0, chosen, x], [-1, 0, 1], [False, False, True]
                if s is not None:
                    token, parent, sampled = [0, s, chosen, x], [-1, 0, 0, 2], [False, True, False, True]
                draft = np.zeros((len(token), model.vocab))
                draft[0], draft[-2] = rest, below
                yield below[x] * (rest[s] if late else 1.0), TokenTree(token, parent, sampled), draft

    return merged(outcomes())


def shared_noise(model: Model) -> Weighted:
    """Two children of the root, drawn honestly. Both draw their own child with one uniform (noise keyed by position), the
    second only if the first one's was likely: growth by value, honest with fresh noise."""

    def outcomes():
        row = model.q[()]
        for first, second in itertools.permutations(np.flatnonzero(row).tolist(), 2):
            chance = row[first] * row[second] / (1.0 - row[first])
            below = [model.q[(x,)] for x in (first, second)]
            edges = np.unique(np.concatenate([[0.0], *(np.cumsum(r) for r in below)]))
            for low, high in itertools.pairwise(edges.tolist()):
                u = (low + high) / 2
                x, y = (min(int(np.searchsorted(np.cumsum(r), u, side="right")), model.vocab - 1) for r in below)
                n = 5 if below[0][x] >= 0.4 else 4
                draft = np.zeros((n, model.vocab))
                draft[0], draft[1], draft[2] = row, below[0], below[1] * (n == 5)
                tree = TokenTree(
                    [0, first, second, x, y][:n], [-1, 0, 0, 1, 2][:n], [False, True, True, True, True][:n]
                )
                yield chance * (high - low), tree, draft

    return merged(outcomes())


# ---- budgets over a batch: rounds [(tree, draft), ...] → rounds

Rounds = list[tuple[TokenTree, np.ndarray]]


def path_probabilities(tree: TokenTree, draft: np.ndarray) -> np.ndarray:
    reach = np.ones(len(tree))
    for node in range(1, len(tree)):
        reach[node] = reach[tree.parent[node]] * draft[tree.parent[node], tree.token[node]]
    return reach


def selection(tree: TokenTree, draft: np.ndarray, kept: set[int]) -> tuple[TokenTree, np.ndarray]:
    return rebuilt(tree, draft, tuple(tuple(c for c in family if c in kept) for family in tree.children))


def batch_by_own_probability(rounds: Rounds, budget: int) -> Rounds:
    """TETRIS as published: the drafted nodes of largest path probability of the whole batch."""
    reach = [path_probabilities(*r) for r in rounds]
    order = sorted((-reach[b][i], b, i) for b, (tree, _) in enumerate(rounds) for i in range(1, len(tree)))[:budget]
    return [selection(*r, {i for _, owner, i in order if owner == b}) for b, r in enumerate(rounds)]


def batch_in_draw_order_by_own_probability(rounds: Rounds, budget: int) -> Rounds:
    """The same in draw order: the next node of the session whose next NODE is likelier, looked at before it is in."""
    reach, size = [path_probabilities(*r) for r in rounds], [1] * len(rounds)
    for _ in range(budget):
        waiting = [(-reach[b][size[b]], b) for b, (tree, _) in enumerate(rounds) if size[b] < len(tree)]
        if waiting:
            size[min(waiting)[1]] += 1
    return [first(*r, n) for r, n in zip(rounds, size, strict=True)]


def batch_in_proportion_to_probability(rounds: Rounds, budget: int) -> Rounds:
    """Shares in proportion to the summed path probabilities of the trees."""
    return in_proportion(rounds, budget, [float(path_probabilities(*r)[1:].sum()) for r in rounds])


def batch_in_proportion_to_size(rounds: Rounds, budget: int) -> Rounds:
    """Shares in proportion to the sizes of the trees, which depend on values."""
    return in_proportion(rounds, budget, [float(len(tree) - 1) for tree, _ in rounds])


def in_proportion(rounds: Rounds, budget: int, weight: list[float]) -> Rounds:
    shares = [round(budget * w / max(sum(weight), 1e-9)) for w in weight]
    return [first(*r, min(1 + n, len(r[0]))) for r, n in zip(rounds, shares, strict=True)]


def pruned_early(early: Callable[[tuple[int, ...]], np.ndarray], rounds: Rounds, least: float = 0.3) -> Rounds:
    """ProPD as published: nodes to which an early layer of the target gives little are dropped, with all below them."""

    def kept(tree: TokenTree) -> set[int]:
        return {i for i in range(1, len(tree)) if early(tree.path(int(tree.parent[i])))[tree.token[i]] >= least}

    return [selection(tree, draft, kept(tree)) for tree, draft in rounds]


def called_drawn(trees: Weighted) -> Weighted:
    """Chosen nodes verified as if they had been drawn: p/q tests on a top-k tree."""
    return merged((p, TokenTree(t.token, t.parent, np.ones(len(t), bool)), draft) for p, t, draft in trees)


def truncated(row: np.ndarray) -> np.ndarray:
    """Declares the two likeliest tokens of a row that was sampled whole."""
    kept = np.where(row >= np.sort(row)[-2], row, 0.0)
    return kept / kept.sum()


def quantised(row: np.ndarray) -> np.ndarray:
    """Declares sixths of a row that was sampled as it is."""
    units = np.maximum(np.rint(6 * row), row > 0)
    return units / units.sum()


# ---- verifiers


def lenient(q_law: Callable[[np.ndarray, list[int], int], np.ndarray], algorithm: str, missing: str) -> Verifier:
    """Token-level or traversal with a child law of one's own, and with an opinion on children that have no draft mass:

    skip    as if they were not there. Lossless: a copy is then merged, and what is in a truncated support has its law
    accept  p/q = ∞ passes every test
    reject  p/q := 0, and the residual distribution is updated all the same
    """

    def verifier(tree: TokenTree, target: np.ndarray, draft: np.ndarray) -> Law:
        residual, entry, budget = target.copy(), np.ones(len(tree)), np.ones(len(tree))
        for node, family in enumerate(tree.children):
            w, p = entry[node] if algorithm == "traversal" else 1.0, target[node]
            for rank, child in enumerate(family):
                x = int(tree.token[child])
                q = q_law(draft[node], [int(tree.token[c]) for c in family[:rank]], x)
                entry[child], absent = 0.0, q[x] == 0.0
                if absent and (missing == "skip" or not q.any()):
                    continue
                a, after, p = step(w, p, q, int(np.argmax(q)) if absent else x)
                entry[child] = a if not absent else float(missing == "accept")
                w = after if algorithm == "traversal" else 1.0
            residual[node], budget[node] = p, w
        stop = stop_in_post_order(tree, budget) if algorithm == "traversal" else stop_from_the_top(tree, entry)
        return Law(algorithm, tree, stop, residual, entry, budget)

    return verifier


def removed(row: np.ndarray, earlier: list[int], token: int = -1) -> np.ndarray:
    """The law without replacement."""
    rest = row.copy()
    rest[earlier] = 0.0
    return rest / rest.sum() if rest.any() else rest


def removed_but_own(row: np.ndarray, earlier: list[int], token: int) -> np.ndarray:
    """The law without replacement, patched so that a copy has mass."""
    return removed(row, [x for x in earlier if x != token])


def budget_without_the_rest(tree: TokenTree, target: np.ndarray, draft: np.ndarray) -> Law:
    """Traversal with w' = ΣR / Σq instead of S / (S + 1 − w)."""
    residual, entry, budget = target.copy(), np.ones(len(tree)), np.ones(len(tree))
    for node, family in enumerate(tree.children):
        w, p = entry[node], target[node]
        for rank, child in enumerate(family):
            q = removed(draft[node], [int(tree.token[c]) for c in family[:rank]])
            rest = np.maximum(w * p - q, 0.0).sum()
            entry[child], _, p = step(w, p, q, int(tree.token[child]))
            w = rest / q.sum()
        residual[node], budget[node] = p, w if node else 1.0
    return Law("traversal", tree, stop_in_post_order(tree, budget), residual, entry, budget)


def bonus_from_p(verifier: Verifier) -> Verifier:
    """The bonus token drawn from the target row instead of the residual distribution."""

    def wrong(tree: TokenTree, target: np.ndarray, draft: np.ndarray) -> Law:
        law = verifier(tree, target, draft)
        return Law(law.algorithm, tree, law.stop, target.copy(), law.entry, law.budget)

    return wrong


def uncapped_last(tree: TokenTree, target: np.ndarray, draft: np.ndarray) -> Law:
    """Block verification of a chain whose last test uses the joint ratio without the caps before it
    (the public code of 2601.05724)."""
    n = len(tree)
    ratio = np.ones(n)
    for node in range(1, n):
        ratio[node] = target[node - 1, tree.token[node]] / draft[node - 1, tree.token[node]]
    entry, budget, residual = np.ones(n), np.ones(n), target.copy()
    for node in range(1, n):
        entry[node] = min(1.0, entry[node - 1] * ratio[node]) if node < n - 1 else min(1.0, float(ratio.prod()))
    for node in range(n - 1):
        _, budget[node], residual[node] = step(float(entry[node]), target[node], draft[node], int(tree.token[node + 1]))
    budget[-1] = entry[-1]
    return Law("block", tree, stop_in_post_order(tree, budget), residual, entry, budget)


def published_loop(choose: Callable[[TokenTree, list[int]], int]) -> Verifier:
    """Traversal verification as published: take a leaf; accept it, or delete it, update its parent, recompute the
    descendants.

    choose(tree, leaves) names the next leaf. The right choice is the first leaf in post-order.
    """

    def verifier(tree: TokenTree, target: np.ndarray, draft: np.ndarray) -> Law:
        gone: list[int] = []
        stop, survive, residual = np.zeros(len(tree)), 1.0, target.copy()
        while len(gone) < len(tree):
            alive = [node for node in range(len(tree)) if node not in gone]
            leaf = choose(tree, [node for node in alive if all(child in gone for child in tree.children[node])])
            w, p = budget_now(tree, target, draft, gone, leaf)
            w = w if leaf else 1.0
            stop[leaf], residual[leaf] = survive * w, p
            survive *= 1.0 - w
            gone.append(leaf)
        return Law("traversal", tree, stop, residual, np.ones(len(tree)), np.ones(len(tree)))

    return verifier


def budget_now(tree, target, draft, gone: list[int], node: int) -> tuple[float, np.ndarray]:
    """(budget, law) of a node given the nodes deleted so far, recomputed from the root."""
    w = 1.0
    if node:
        parent = int(tree.parent[node])
        above, p = budget_now(tree, target, draft, gone, parent)
        w, _, _ = step(above, p, child_law(tree, draft, node), int(tree.token[node]))
    p = target[node]
    for child in gone:
        if tree.parent[child] == node:
            _, w, p = step(w, p, child_law(tree, draft, child), int(tree.token[child]))
    return w, p


def child_law(tree: TokenTree, draft: np.ndarray, child: int) -> np.ndarray:
    parent = int(tree.parent[child])
    return removed(draft[parent], [int(tree.token[c]) for c in tree.children[parent] if c < child])


def first_in_post_order(tree: TokenTree, leaves: list[int]) -> int:
    return next(node for node in tree.post_order.tolist() if node in leaves)


def deepest(tree: TokenTree, leaves: list[int]) -> int:
    return max(leaves, key=lambda node: (tree.depth[node], -node))


def smallest_index(tree: TokenTree, leaves: list[int]) -> int:
    """Breadth-first numbers: by depth, then by index."""
    return min(leaves, key=lambda node: (tree.depth[node], node))


def one_token_with_reused_uniform(model: Model) -> np.ndarray:
    """float64[V]: law of the first token if the coin of a chain of one is the uniform that drew the child."""
    p, q = model.p[()], model.q[()]
    before = np.concatenate([[0.0], np.cumsum(q)[:-1]])
    accept = np.minimum(1.0, np.divide(p, q, out=np.zeros_like(p), where=q > 0))
    taken = np.clip(accept - before, 0.0, q)  # the part of [F(x−), F(x)) below a(x)
    rest = np.maximum(p - q, 0.0)
    return taken + (1.0 - taken.sum()) * (rest / rest.sum() if rest.any() else p)
