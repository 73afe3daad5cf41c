"""Every tree a builder can draw, with its probability; and the exact law of what a round commits.

A *process* is a non-anticipating rule: given the tree so far it names the next event, or None. An event is a node and
how its next child is made. This is written from the definitions and shares no code with `rootward.core.drafting`.

Legend: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from support.models import Model, paths_of

from rootward.core import Law, TokenTree, verification

Weighted = list[tuple[float, TokenTree, np.ndarray]]  # (probability, tree, draft float64[N, V])
Verifier = Callable[[TokenTree, np.ndarray, np.ndarray], Law]


@dataclass(frozen=True)
class State:
    """A tree while it is drawn."""

    token: tuple[int, ...] = (0,)
    parent: tuple[int, ...] = (-1,)
    sampled: tuple[bool, ...] = (False,)
    path: tuple[tuple[int, ...], ...] = ((),)
    law: dict[int, np.ndarray] = field(default_factory=dict)  # declared rows

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parent) if parent == node]

    def taken(self, node: int) -> list[int]:
        return [self.token[child] for child in self.children(node)]

    def depth(self, node: int) -> int:
        return len(self.path[node])

    def grow(self, node: int, token: int, sampled: bool, declared: np.ndarray) -> State:
        return State(
            (*self.token, token),
            (*self.parent, node),
            (*self.sampled, sampled),
            (*self.path, (*self.path[node], token)),
            {**self.law, node: self.law.get(node, declared)},
        )

    def finish(self, vocab: int) -> tuple[TokenTree, np.ndarray]:
        draft = np.zeros((len(self.token), vocab))
        for node, row in self.law.items():
            draft[node] = row
        return tree_of(self.token, self.parent, self.sampled), draft


@cache
def tree_of(token: tuple[int, ...], parent: tuple[int, ...], sampled: tuple[bool, ...]) -> TokenTree:
    """One object for equal trees: models share most of theirs."""
    return TokenTree(token, parent, sampled)


Process = Callable[[State], int | None]  # the node that gets the next child


def without(row: np.ndarray, tokens: list[int]) -> np.ndarray:
    rest = row.copy()
    rest[tokens] = 0.0
    return rest / rest.sum() if rest.any() else rest


def merged(outcomes: Iterator[tuple[float, TokenTree, np.ndarray]]) -> Weighted:
    """Equal trees added up."""
    mass: dict[TokenTree, float] = defaultdict(float)
    rows = {}
    for probability, tree, draft in outcomes:
        mass[tree] += probability
        rows[tree] = draft
    return [(probability, tree, rows[tree]) for tree, probability in mass.items()]


def drawn(model: Model, process: Process, *, replacement: bool = False, declare=None) -> Weighted:
    """Trees whose children are drawn one by one. declare(row) -> the row that is sent (an honest drafter sends the
    row itself)."""

    def expand(state: State, probability: float):
        node = process(state)
        if node is None:
            yield probability, *state.finish(model.vocab)
            return
        row = model.q[state.path[node]]
        law = row if replacement else without(row, state.taken(node))
        for token in np.flatnonzero(law).tolist():
            grown = state.grow(node, token, True, row if declare is None else declare(row))
            yield from expand(grown, probability * float(law[token]))

    return merged(expand(State(), 1.0))


def shape(model: Model, branching: list[int], *, replacement: bool = False) -> Process:
    """Level by level, families in the order of their parents: the fixed shape of RSD-C (or of i.i.d. copies)."""

    def process(state: State) -> int | None:
        for node in sorted(range(len(state.token)), key=state.depth):
            depth = state.depth(node)
            if depth < len(branching):
                support = np.count_nonzero(model.q[state.path[node]])
                wanted = branching[depth] if replacement else min(branching[depth], int(support))
                if len(state.children(node)) < wanted:
                    return node
        return None

    return process


def chain_until(model: Model, depth: int, enough: Callable[[float], bool]) -> Process:
    """A chain that stops drawing once the value drawn last had a probability for which `enough` holds."""

    def process(state: State) -> int | None:
        node = len(state.token) - 1
        if state.depth(node) == depth:
            return None
        if node and enough(float(model.q[state.path[state.parent[node]]][state.token[node]])):
            return None
        return node

    return process


def best_first(model: Model, num_nodes: int, *, rate: float = 0.6, by_value: bool = True) -> Process:
    """The place with the largest reach gets the next child; reach uses the values drawn so far, never the next one."""

    def process(state: State) -> int | None:
        if len(state.token) > num_nodes:
            return None
        reach, score = {0: 1.0}, {}
        for node in range(len(state.token)):
            here = reach[node]
            row = model.q[state.path[node]] if state.depth(node) < model.depth else None
            for child in state.children(node):
                a = (0.3 + 0.7 * float(row[state.token[child]])) if by_value else rate
                reach[child], here = here * a, here * (1.0 - a)
            if row is not None and len(state.children(node)) < np.count_nonzero(row):
                score[node] = here
        return max(score, key=lambda node: (score[node], -node)) if score else None

    return process


def greedy(model: Model, branching: list[int], *, chosen_first: bool = False) -> Weighted:
    """GREEDY families: one drawn from q without the k−1 most likely tokens, first (or last); declares q′."""

    def expand(state: State, todo: list[int], probability: float):
        if not todo or state.depth(todo[0]) == len(branching):
            yield probability, *state.finish(model.vocab)
            return
        node, row = todo[0], model.q[state.path[todo[0]]]
        ranked = [x for x in sorted(range(model.vocab), key=lambda x: (-row[x], x)) if row[x] > 0]
        chosen = ranked[: branching[state.depth(node)] - 1]
        rest = without(row, chosen)
        for token in np.flatnonzero(rest).tolist() or [None]:
            family = [(token, True)] if token is not None else []
            picks = [(x, False) for x in chosen]
            grown, first = state, len(state.token)
            for x, flag in picks + family if chosen_first else family + picks:
                grown = grown.grow(node, x, flag, rest)
            born = list(range(first, len(grown.token)))
            yield from expand(grown, todo[1:] + born, probability * (1.0 if token is None else float(rest[token])))

    return merged(expand(State(), [0], 1.0))


def top_k(model: Model, branching: list[int]) -> Weighted:
    """The most likely tokens, chosen: one tree."""
    state, todo = State(), [0]
    while todo and state.depth(todo[0]) < len(branching):
        node = todo.pop(0)
        row = model.q[state.path[node]]
        ranked = [x for x in sorted(range(model.vocab), key=lambda x: (-row[x], x)) if row[x] > 0]
        for token in ranked[: branching[state.depth(node)]]:
            todo.append(len(state.token))
            state = state.grow(node, token, False, row)
    return [(1.0, *state.finish(model.vocab))]


def with_chosen_last(model: Model, trees: Weighted) -> Weighted:
    """To every family of drawn children the likeliest token not drawn is appended, chosen (a function of the past)."""
    outcomes = []
    for probability, tree, draft in trees:
        token, parent, sampled = tree.token.tolist(), tree.parent.tolist(), tree.sampled.tolist()
        for node in range(len(tree)):
            if tree.children[node]:
                free = [x for x in range(model.vocab) if x not in {token[c] for c in tree.children[node]}]
                if free:
                    token.append(max(free, key=lambda x: (draft[node, x], -x)))
                    parent.append(node)
                    sampled.append(False)
        rows = np.concatenate([draft, np.zeros((len(token) - len(tree), model.vocab))])
        outcomes.append((probability, TokenTree(token, parent, sampled), rows))
    return merged(iter(outcomes))


def merged_paths(model: Model, num_paths: int, depth: int) -> Weighted:
    """i.i.d. strings merged, siblings in order of first appearance."""
    strings = [((), 1.0)]
    for _ in range(depth):
        strings = [((*s, x), m * float(model.q[s][x])) for s, m in strings for x in np.flatnonzero(model.q[s]).tolist()]

    def expand(seen: tuple[tuple[int, ...], ...], probability: float):
        if len(seen) == num_paths:
            order = dict.fromkeys(s[:level] for level in range(1, depth + 1) for s in seen)
            yield probability, *from_paths(model, list(order))
            return
        for string, mass in strings:
            yield from expand((*seen, string), probability * mass)

    return merged(expand((), 1.0))


def from_paths(model: Model, order: list[tuple[int, ...]]) -> tuple[TokenTree, np.ndarray]:
    """The drawn tree whose nodes appeared in this order: level by level, families in the order of their parents."""
    index, state = {(): 0}, State()
    for level in range(1, max(map(len, order), default=0) + 1):
        for path in sorted((p for p in order if len(p) == level), key=lambda p: index[p[:-1]]):
            index[path] = len(state.token)
            state = state.grow(index[path[:-1]], path[-1], True, model.q[path[:-1]])
    return state.finish(model.vocab)


def stochastic_beam(model: Model, width: int, depth: int) -> Weighted:
    """RSD-S as a race: leaves arrive at rate q(leaf); every level keeps the first `width` prefixes that appear."""
    leaves = {(): 1.0}
    for _ in range(depth):
        leaves = {(*s, x): m * float(model.q[s][x]) for s, m in leaves.items() for x in np.flatnonzero(model.q[s])}

    def expand(kept: tuple[tuple[int, ...], ...], probability: float):
        size = [sum(len(p) == level for p in kept) for level in range(depth + 1)]
        new = {  # leaf → the prefixes it would add
            leaf: [leaf[:k] for k in range(1, depth + 1) if size[k] < width and leaf[:k] not in kept] for leaf in leaves
        }
        relevant = {leaf: mass for leaf, mass in leaves.items() if new[leaf]}
        if not relevant:
            yield probability, *from_paths(model, list(kept))
            return
        whole = sum(relevant.values())
        events: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
        for leaf, mass in relevant.items():
            events[tuple(new[leaf])] += mass / whole
        for prefixes, chance in events.items():
            yield from expand((*kept, *prefixes), probability * chance)

    return merged(expand((), 1.0))


def committed_law(model: Model, trees: Weighted, verifier: Verifier) -> np.ndarray:
    """float64[V, …, V] (depth + 1 axes): the law of the text that a round commits, continued by the target."""
    mass: dict[tuple[int, ...], np.ndarray] = defaultdict(lambda: np.zeros(model.vocab))
    for probability, tree, draft in trees:
        law = verifier(tree, model.target(tree), draft)
        bonus, path = (probability * law.stop)[:, None] * law.residual, paths_of(tree)
        for node in np.flatnonzero(law.stop).tolist():
            mass[path[node]] += bonus[node]
    return continued(model, mass)


def continued(model: Model, mass: dict[tuple[int, ...], np.ndarray]) -> np.ndarray:
    """Texts path + token of any length, continued by the target to length depth + 1."""
    out = np.zeros((model.vocab,) * (model.depth + 1))
    for path, row in mass.items():
        for token in np.flatnonzero(row).tolist():
            text = (*path, token)
            out[text] += row[token] * continuation(model, text)
    return out


def continuation(model: Model, text: tuple[int, ...]) -> np.ndarray:
    """float64[V, …]: law of what follows `text` up to length depth + 1 (a scalar 1 when nothing does)."""
    law = np.ones(())
    if len(text) <= model.depth:
        law = np.stack([model.p[text][x] * continuation(model, (*text, x)) for x in range(model.vocab)])
    return law


def error(model: Model, trees: Weighted, verifier: Verifier) -> float:
    """Largest difference between the law of the committed text and the target's."""
    assert abs(sum(probability for probability, _, _ in trees) - 1.0) < 1e-12
    return float(np.abs(committed_law(model, trees, verifier) - continuation(model, ())).max())


def accepted(model: Model, trees: Weighted, verifier: Verifier) -> float:
    """E[τ]: expected draft tokens of a round."""
    return sum(
        probability * (verifier(tree, model.target(tree), draft).block_efficiency - 1.0)
        for probability, tree, draft in trees
    )


def by(algorithm: str, *, replacement: bool = False) -> Verifier:
    """A verifier of the library under its name."""
    return lambda tree, target, draft: verification.law(algorithm, tree, target, draft, replacement=replacement)


def matching(tree: TokenTree, target: np.ndarray, draft: np.ndarray) -> Law:
    """Target matching as a law, written from its definition: the target's token after a node is the bonus unless it
    is a child."""
    stop, residual = np.zeros(len(tree)), target.copy()
    reach = np.zeros(len(tree))
    reach[0] = 1.0
    for node, family in enumerate(tree.children):
        for child in family:
            token = tree.token[child]
            reach[child] += reach[node] * residual[node, token]  # a later copy of a token gets nothing
            residual[node, token] = 0.0
        rest = residual[node].sum()
        stop[node] = reach[node] * rest
        if rest > 0:
            residual[node] /= rest
    return Law("match", tree, stop, residual, reach, np.ones(len(tree)))
