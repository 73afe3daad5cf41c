"""Growth ahead: predicted bonus tokens and trees below them, grown while a round is being verified (algorithms.md 6.6).

A round ends with a bonus token below the node where it stops. The drafter predicts such outcomes: a *prediction* is a node with a predicted
bonus token. It is chosen and never verified; if it is right it is the next root, and its *component* (what hangs below it) is the next
tree. `Predict` names the tokens at a node by what the noise of the bonus token makes of the draft's row, which is right far more often than
the most likely token.

    1  the root's component grows until it is at rest
    2  the number of predictions at each node is computed from ranks and depths (an estimate of where the round stops)
    3  once the round runs, its noise is told and predictions are made; each has the same share of nodes, rows and draws
    4  a commit keeps the component that contains the new root and drops all others; then 1 again

The bonus token of a round is an exact sample because no node that the round verifies depends on its noise: nobody but the verifier knows
it before the round runs, and another round has noise of its own. What a round verifies may depend on the noise of earlier rounds in any
way: given their outcome, rules L1-L5 of algorithms.md 6.1 hold. `tests/statistical/test_shared_bonus.py` has the enumeration and the wrong
twins.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rootward.core.arrays import Floats, Ints
from rootward.core.distribution import DraftDistribution
from rootward.core.growth.growth import Growth
from rootward.core.growth.strategies import BestFirst, NewWords
from rootward.core.living_tree import ROOT
from rootward.core.rng import bonus_gumbel

MOST_PREDICTIONS = 32  # at a node, before its children are left out

# (node, its draft row) -> bonus tokens of the running round, the most likely first
Predict = Callable[[int, DraftDistribution], Ints]


@dataclass(frozen=True, slots=True)
class AheadBudget:
    """Limits of growth ahead. None depends on a prediction.

    nodes            most nodes alive in predictions and below them; 0: no predictions
    share            of them for each prediction, itself included
    draws_per_level  nodes drawn below each prediction after a draft forward
    hits             probability that the bonus token is the first, second, … prediction at the node where the round stops
    """

    nodes: int = 0
    share: int = 8
    draws_per_level: int = 2
    hits: tuple[float, ...] = (0.35, 0.12, 0.08, 0.06)

    def __post_init__(self) -> None:
        if self.nodes < 0 or self.share < 2 or self.draws_per_level < 1:
            raise ValueError(
                f"nodes, share, draws_per_level: {self.nodes}, {self.share}, {self.draws_per_level}; "
                "give at least 0, 2 (a prediction with nothing below it gains nothing) and 1"
            )

    @property
    def num_predictions(self) -> int:
        return self.nodes // self.share


def shared_order(bonus_key: int, epoch: int, length: int, ids: Ints, law: Floats) -> Ints:
    """Predictions by the noise b of the bonus token at this text length: tokens by decreasing log q + b (the bonus token has the largest
    log r + b). ids, law: as many atoms of the draft's row as possible: after rejections of likely tokens the bonus token is often an
    unlikely one."""
    minus = -(np.log(law) + bonus_gumbel(bonus_key, epoch, length, ids))
    best = np.arange(len(ids))
    if len(ids) > MOST_PREDICTIONS:
        best = np.argpartition(minus, MOST_PREDICTIONS - 1)[:MOST_PREDICTIONS]
    return ids[best[np.argsort(minus[best], kind="stable")]]


class Ahead:
    """All components of one living tree. `own` is the growth of the root's component."""

    def __init__(self, own: Growth, budget: AheadBudget, predict: Predict) -> None:
        self.own, self.budget, self._predict = own, budget, predict
        self.tree = own.tree
        self._wanted: dict[int, int] | None = None  # predictions still to be made, by node; None: not settled yet
        self._components: list[Growth] = []  # below predictions
        self._turn = 0
        self.launched = False  # the round runs: `predict` knows its noise

    @property
    def at_rest(self) -> bool:
        """No node that the current round could verify will be added."""
        return self.own.at_rest

    @property
    def busy(self) -> bool:
        """Whether a draft forward can still add nodes."""
        if not self.own.at_rest:
            return True
        if not self.budget.num_predictions or not self.own.root_expanded:
            return False
        if self._wanted is None or self._unread():
            return True
        return self.launched and (bool(self._wanted) or any(not c.at_rest for c in self._components))

    @property
    def expanded(self) -> set[int]:
        """Nodes whose rows are known."""
        return {n for component in (self.own, *self._components) for n in component.rows}

    def wanted_rows(self, max_rows: int) -> int:
        """Rows to request for the next level, which is shared with other trees. Independent of the predictions."""
        if not self.own.at_rest:
            return len(self.own.frontier(max_rows))
        below = self.budget.num_predictions * self.budget.draws_per_level if self.launched else 0
        return len(self._unread()) + below

    def frontier(self, max_rows: int) -> list[int]:
        """Nodes of the next forward."""
        if not self.own.at_rest:
            return self.own.frontier(max_rows)
        nodes = self._unread()[:max_rows]
        return nodes + self._below_predictions(max_rows - len(nodes))

    def _unread(self) -> list[int]:
        """Nodes that get predictions and have no row yet, each behind those above it without one: nodes of a given path
        (`Growth.follow`)."""
        found: dict[int, None] = {}
        for node in self._wanted or ():
            path = []
            while node not in self.own.rows:
                path.append(node)
                node = self.tree.nodes[node].parent or self.own.root_id
            found |= dict.fromkeys(reversed(path))
        return list(found)

    def expand(self, node: int, row: DraftDistribution, noise: np.ndarray | None = None) -> None:
        """Set the row of a node."""
        head = self.tree.at(node).head
        component = self.own if head == ROOT else next(c for c in self._components if c.head == head)
        component.expand(node, row, noise)

    def expand_below(self, row: DraftDistribution, noise: np.ndarray | None = None) -> None:
        """A block head's row of the next depth below the root (`Growth.expand_below`)."""
        self.own.expand_below(row, noise)

    def draw(self, new_words: NewWords) -> list[int]:
        """A level's worth of draws; the new ids in draw order."""
        if not self.own.at_rest:
            return self.own.draw(new_words)  # without predictions, since a round waits for these nodes
        drawn = [node for component in self._components for node in component.draw(new_words)]
        self._turn += 1
        if self.budget.num_predictions and self.own.root_expanded:
            drawn += self._predictions()
        return drawn

    def commit(self, tokens: Sequence[int]) -> list[int | None]:
        """Commit the tokens of a round and re-root. Returns the node id of each token, or None."""
        walked = self.tree.commit(tokens)
        right = next((component for component in self._components if component.head in walked), None)
        if right is not None:
            right.strategy, right.node_cap, right.head = self.own.strategy, self.own.node_cap, ROOT
            self.own = right
        self.own.rerooted()
        self._wanted, self._components, self._turn, self.launched = None, [], 0, False
        return walked

    # -- predictions --------------------------------------------------------------------------------------------------

    def _predictions(self) -> list[int]:
        """Make the predictions at the nodes whose rows are known, if the round runs."""
        if self._wanted is None:
            self._wanted = self._plan()
        if not self.launched:
            return []
        made: list[int] = []
        for node in [n for n in self._wanted if n in self.own.rows]:
            made += self._predictions_at(node, self._wanted.pop(node))
        return made

    def _plan(self) -> dict[int, int]:
        """Number of predictions for each node: always the most likely pair of (stop node, which prediction is right) next."""
        hits = self.budget.hits
        heap = [(-stop * hits[0], node, 0) for node, stop in self.own.stops().items()]
        heapq.heapify(heap)
        wanted: dict[int, int] = {}
        for _ in range(self.budget.num_predictions):
            if not heap:
                break
            score, node, rank = heap[0]
            wanted[node] = rank + 1
            if rank + 1 < len(hits):
                heapq.heapreplace(heap, (score / hits[rank] * hits[rank + 1], node, rank + 1))
            else:
                heapq.heappop(heap)
        return wanted

    def _predictions_at(self, node: int, number: int) -> list[int]:
        """Make predictions at a node, without its children: a tried child is never the bonus token."""
        children = {self.tree.nodes[c].token for c in self.tree.at(node).children}
        order = self._predict(node, self.own.rows[node]) if len(self.own.rows[node]) else ()
        tokens = [t for t in map(int, order) if t not in children and t not in self.tree.eos_ids]
        return [self._add(node, token) for token in tokens[:number]]

    def _add(self, node: int, token: int) -> int:
        """A predicted bonus token, the head of a component of its own."""
        head = self.tree.draw(node, token, sampled=False, guess=True)
        own, budget = self.own, self.budget
        cap = min(budget.share - 1, self.tree.node_cap)  # it may become the root's component
        assert isinstance(own.strategy, BestFirst)  # trees of other strategies restart with every commit
        strategy = replace(own.strategy, draws_per_level=budget.draws_per_level, least_levels=1)
        self._components.append(Growth(self.tree, strategy, node_cap=cap, max_positions=own.max_positions, head=head))
        return head

    def _below_predictions(self, max_rows: int) -> list[int]:
        """Frontier nodes of the components: the same number of rows for each, in turns if they do not suffice for all."""
        count = self.budget.num_predictions
        if not count or not max_rows:
            return []
        quota = max(1, max_rows // count)
        served = min(count, max_rows // quota)
        nodes: list[int] = []
        for i in range(served):
            place = (self._turn * (max_rows // quota) + i) % count
            if place < len(self._components):
                nodes += self._components[place].frontier(quota)
        return nodes
