"""A living tree from a source: the likeliest paths first.

A path's score is the product of its candidates' scores. The heap holds one entry per *place* (node, next candidate); the best one becomes
a node, until the tree is full or the best is not worth a row of the target. What the tree kept from earlier rounds is walked, not drawn
again. Branches that meet in one state of the source look their candidates up once: the source is the graph, the tree its unfolding.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rootward.core.drafting.lookup.source import Candidate, Source
from rootward.core.living_tree import LivingTree


@dataclass(frozen=True, slots=True)
class Shape:
    """node_cap: most live nodes. max_depth: longest path below the root. topk: most children of a node.
    least_score: a path less likely than this is not drafted."""

    node_cap: int
    max_depth: int
    topk: int
    least_score: float = 0.02


@dataclass(slots=True, eq=False)
class _Place:
    """A node that can have children, and the score of its path."""

    node: int
    state: Any
    score: float
    depth: int  # below the root
    candidates: Sequence[Candidate]


class _Growth:
    def __init__(self, tree: LivingTree, source: Source, shape: Shape) -> None:
        self.tree, self.source, self.shape = tree, source, shape
        self._known: dict[Any, Sequence[Candidate]] = {}
        self._heap: list[tuple[float, int, _Place, int]] = []  # (-score, order of arrival, place, rank)
        self._arrived = 0

    def run(self) -> int:
        """Draw the best paths; returns the number of new nodes."""
        before = self.tree.next_id
        if self.tree.root.token not in self.tree.eos_ids:
            self._open(self.tree.root_id, self.source.start(), 1.0, 0)
        while self._heap and len(self.tree) < self.shape.node_cap:
            minus, _, place, rank = heapq.heappop(self._heap)
            self._push(place, rank + 1)
            token = place.candidates[rank].token
            child = self._child(place.node, token)
            if child is not None and token not in self.tree.eos_ids:
                self._open(child, self.source.step(place.state, token), -minus, place.depth + 1)
        return self.tree.next_id - before

    def _open(self, node: int, state: Any, score: float, depth: int) -> None:
        if depth >= self.shape.max_depth:
            return
        if state not in self._known:
            self._known[state] = self.source.candidates(state)[: self.shape.topk]
        self._push(_Place(node, state, score, depth, self._known[state]), 0)

    def _push(self, place: _Place, rank: int) -> None:
        if rank < len(place.candidates):
            score = place.score * place.candidates[rank].score
            if score >= self.shape.least_score:
                self._arrived += 1
                heapq.heappush(self._heap, (-score, self._arrived, place, rank))

    def _child(self, node: int, token: int) -> int | None:
        """The node's child with this token, new if it can be; None if the family is full."""
        family = self.tree.at(node).children
        kept = next((child for child in family if self.tree.nodes[child].token == token), None)
        if kept is not None or len(family) >= self.shape.topk:
            return kept
        return self.tree.draw(node, token, sampled=False)


def best_path(source: Source, most: int, least_score: float = 0.3) -> list[tuple[int, float]]:
    """The source's best path from the end of its text: (token, score) of each step, while their product is worth it."""
    state, path, score = source.start(), [], 1.0
    for _ in range(most):
        best = next(iter(source.candidates(state)), None)
        if best is None or score * best.score < least_score:
            break
        path.append((best.token, best.score))
        state, score = source.step(state, best.token), score * best.score
    return path


def extend_tree(tree: LivingTree, source: Source, shape: Shape) -> int:
    """Append the source's best paths to a tree as chosen nodes, up to `shape`; returns how many nodes are new."""
    return _Growth(tree, source, shape).run()
