"""Growth of one component of a living tree under a draft strategy.

A *level* is one draft forward over the frontier, followed by draws. The owner asks for the `frontier`, gives each of its nodes a draft
distribution (`expand`), and lets the strategy `draw`. The tree is changed by `draw` and `follow` only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

import numpy as np

from rootward.core.arrays import Floats
from rootward.core.distribution import DraftDistribution, greedy_family
from rootward.core.growth.strategies import Marginals, NewWords, Place, Strategy, coupled_order
from rootward.core.living_tree import ROOT, LivingTree, Node
from rootward.core.requests import DraftMode

NOTHING = DraftDistribution(np.empty(0, np.int64), np.empty(0, np.int64))
DRAWS_BEYOND = 24  # most nodes drawn after a forward once the next round has its nodes: there is a whole round for them


class Growth:
    """Decides, for one component of a living tree, what to expand and what to draw.

    node_cap  most live nodes
    beyond    trees verified by matching: of them, nodes for the rounds after the next
    head      the predicted bonus token of the component; ROOT: the root's component (`ahead.py` manages several)
    block     the forward of the root also gives the rows of all depths below it: the whole tree is drawn without another forward
    """

    def __init__(
        self,
        tree: LivingTree,
        strategy: Strategy,
        *,
        node_cap: int = 16,
        max_positions: int = 1 << 31,
        head: int = ROOT,
        block: bool = False,
    ) -> None:
        self.tree, self.strategy, self.head, self.block = tree, strategy, head, block
        self.node_cap, self.max_positions = node_cap, max_positions
        self.beyond = 0
        self._restart()

    def _restart(self) -> None:
        self.rows: dict[int, DraftDistribution] = {}  # of every expanded node (whose KV is held)
        self._score: dict[int, float] = {self.head: 0.0}
        self._places: dict[int, Place] = {}
        self._unscored: list[int] = []  # nodes whose next child has no score yet
        self._heap: list[tuple[float, int, int]] = []  # (-score of the next child, node id, rank)
        self._by_depth: list[tuple[DraftDistribution, Floats | None]] = []  # block: rows and noise of depths 1, 2, …
        self._unopened: list[int] = []  # block: nodes that have no place yet

    @property
    def root_id(self) -> int:
        """The root of the component."""
        return self.tree.root_id if self.head == ROOT else self.head

    @property
    def root_expanded(self) -> bool:
        return self.root_id in self.rows

    @property
    def room(self) -> int:
        return self.node_cap - (len(self.tree) if self.head == ROOT else len(self._score) - 1)

    @property
    def round_is_full(self) -> bool:
        """The next round has all its nodes; further growth is for later rounds."""
        return self.beyond > 0 and self.room <= self.beyond

    def frontier(self, max_rows: int) -> list[int]:
        """Live nodes without a row that may get children, best first. The row of the tree's root comes with the forward of the text."""
        if self.room <= 0 or self.block:
            return []
        nodes = (n for n in self._score if n not in self.rows and n not in (ROOT, self.tree.root_id))
        open_nodes = [n for n in nodes if self._can_have_children(self.tree.nodes[n])]
        open_nodes.sort(key=lambda n: -self._score[n])
        return open_nodes[:max_rows]

    def expand(self, node: int, row: DraftDistribution, noise: Floats | None = None) -> None:
        """Set the row of a node. noise: Gumbel noise at row.ids (COUPLED)."""
        self.rows[node] = row
        if len(row):
            self._open_place(node, row, noise)

    def expand_below(self, row: DraftDistribution, noise: Floats | None = None) -> None:
        """Block: set the row of all nodes of the next depth, independent of their paths."""
        self._by_depth.append((row, noise))

    def _open_place(self, node: int, row: DraftDistribution, noise: Floats | None = None) -> None:
        record, mode = self.tree.at(node), self.strategy.mode
        place = Place(node, self._depth(record), self._score[node], row)
        if mode.ratio:
            record.row = row.ids, row.weight  # a GREEDY family declares another one when it is drawn
        if self.strategy.whole_levels:
            place.reach, place.total = self._reach(node), row.total
        if mode is DraftMode.TOP_K:  # atoms are sorted
            place.order, place.chance = row.ids.tolist(), row.law.tolist()
        elif mode is DraftMode.COUPLED:
            assert noise is not None
            coupled_order(place, noise)
        for child in record.children:  # named before the row was known
            if child in self._score:
                place.insert(self.tree.nodes[child].token, math.exp(self._score[child] - self._score[node]))
        self._places[node] = place
        self._unscored.append(node)

    def follow(self, path: Iterable[tuple[int, float]]) -> None:
        """Attach a given path below the root: (token, probability that it is right) of each step. It depends only on the committed text, so
        its nodes are chosen; later siblings are drawn from the row without its tokens."""
        node = self.root_id
        for token, trust in path:
            record = self.tree.at(node)
            own = [c for c in record.children if c in self._score]
            child = next((c for c in own if self.tree.nodes[c].token == token), None)
            if child is None:
                full = len(own) >= self.strategy.children(self._depth(record))
                if self.room <= 0 or not self._can_have_children(record) or full:
                    return
                child = self._attach(node, token, sampled=False, score=self._score[node] + math.log(trust))
                if (place := self._places.get(node)) is not None:
                    place.insert(token, trust)
                    self._unscored.append(node)
            node = child

    def draw(self, new_words: NewWords) -> list[int]:
        """Draw the children of a level, at the best places. Returns the new ids in draw order."""
        drawn = self._draw_level(new_words)
        while self.block and (more := self._draw_level(new_words)):
            drawn += more
        return drawn

    def _draw_level(self, new_words: NewWords) -> list[int]:
        strategy = self.strategy
        if strategy.whole_levels and self.frontier(1):
            return []
        for node in self._unopened:
            row, noise = self._row_below(self._depth(self.tree.at(node)))
            if len(row):
                self._open_place(node, row, noise)
        self._unopened = []
        for node in dict.fromkeys(self._unscored):
            if (place := self._places.get(node)) is not None:
                self._push(place, new_words)
        self._unscored = []
        drawn: list[int] = []
        most = DRAWS_BEYOND if self.round_is_full else strategy.draws(self.node_cap - self.beyond)
        if self.block and not strategy.whole_levels:
            most = 1  # the new child is a place for the next draw
        while len(drawn) < most and self.room > 0 and self._has_scored():
            minus, node, _ = heapq.heappop(self._heap)
            drawn += self._children(self._places[node], -minus, new_words)
        if strategy.whole_levels:
            self._heap, self._places = [], {}
        return drawn

    def stops(self) -> dict[int, float]:
        """Estimated probability that a round stops at each node, from ranks and depths only. Without nodes that end the text."""
        mass = {n: math.exp(s) for n, s in self._score.items()}
        for node in mass:
            mass[node] -= sum(mass[c] for c in self.tree.at(node).children if c in mass)
        return {n: max(m, 0.0) for n, m in mass.items() if self.can_continue(self.tree.at(n))}

    @property
    def at_rest(self) -> bool:
        """No further node can be drawn before the next commit."""
        if not self.root_expanded:
            return not self._can_have_children(self.tree.at(self.root_id))
        return self.room <= 0 or not (self._has_unscored() or self._has_scored() or self.frontier(1))

    def rerooted(self) -> None:
        """Drop the state of nodes that left the tree. Scores are relative, so the order of the others does not change."""
        alive = {*self.tree.nodes, self.tree.root_id}
        if self.tree.root_id == ROOT:  # the committed tokens were not in the tree, which is empty
            self._restart()
            return
        self._score = {n: s for n, s in self._score.items() if n in alive}
        self._places = {n: p for n, p in self._places.items() if n in alive}
        self.rows = {n: r for n, r in self.rows.items() if n in alive}
        self._heap, self._unscored = [], list(self._places)
        for place in self._places.values():
            place.depth = self._depth(self.tree.at(place.node))

    def _row_below(self, depth: int) -> tuple[DraftDistribution, Floats | None]:
        """Row of the nodes at a depth; empty below the block."""
        return self._by_depth[depth - 1] if depth <= len(self._by_depth) else (NOTHING, None)

    # -- children -----------------------------------------------------------------------------------------------------

    def _children(self, place: Place, score: float, new_words: NewWords) -> list[int]:
        node, mode = place.node, self.strategy.mode
        if not place.rank and (scores := self.strategy.family(place, self.node_cap - self.beyond)):
            return self._family(place, scores[: self.room], new_words)
        token = place.draw(mode, new_words(2)) if mode.ratio else place.order[place.rank]
        place.rank += 1
        child = self._attach(node, token, sampled=mode.ratio, score=score)
        self._push(place, new_words)
        return [child]

    def _family(self, place: Place, scores: list[float], new_words: NewWords) -> list[int]:
        """Draw a whole GREEDY family: the sampled child first, then the chosen ones (algorithms.md 5.7)."""
        made = greedy_family(place.row, len(scores), new_words(2))
        del self._places[place.node]
        self.tree.at(place.node).row = (made.row.ids, made.row.weight) if len(made.row) else None
        children = zip(made.token.tolist(), made.sampled.tolist(), scores, strict=False)
        return [self._attach(place.node, token, sampled=flag, score=score) for token, flag, score in children]

    def _attach(self, node: int, token: int, *, sampled: bool, score: float) -> int:
        child = self.tree.draw(node, token, sampled=sampled)
        self._score[child] = score
        if self.block:
            self._unopened.append(child)
        return child

    # -- scores -------------------------------------------------------------------------------------------------------

    def _push(self, place: Place, new_words: NewWords) -> None:
        if self._open_for_more(place):
            heapq.heappush(self._heap, (-self.strategy.score(place, new_words), place.node, place.rank))

    def _open_for_more(self, place: Place) -> bool:
        record = self.tree.at(place.node)
        if place.exhausted(self.strategy.mode) or place.rank >= self.strategy.children(place.depth):
            return False
        return self._can_have_children(record)  # a node that is too deep now is not after a commit

    def _reach(self, node: int) -> float:
        """Probability of a node's path under the draft."""
        if node == self.tree.root_id or node == ROOT:
            return 1.0
        record = self.tree.nodes[node]
        above = self.tree.root_id if record.parent == ROOT else record.parent
        row = self.rows[above] if above in self.rows else self._row_below(self._depth(self.tree.at(above)))[0]
        return self._reach(above) * float(row.law[row.ids == record.token].sum())

    def _can_have_children(self, record: Node) -> bool:
        return self._depth(record) < self.strategy.max_depth and self.can_continue(record)

    def can_continue(self, record: Node) -> bool:
        """Whether the text can continue after the node, within the draft model's context."""
        return record.depth + 1 < self.max_positions and record.token not in self.tree.eos_ids

    def _depth(self, record: Node) -> int:
        return record.depth - self.tree.at(self.root_id).depth

    def _has_unscored(self) -> bool:
        return any(self._open_for_more(self._places[n]) for n in self._unscored if n in self._places)

    def _has_scored(self) -> bool:
        """Whether the heap has a place. Removes those that got a child since they were scored from its top."""
        while self._heap:
            _, node, rank = self._heap[0]
            if node in self._places and self._places[node].rank == rank:
                return True
            heapq.heappop(self._heap)
        return False


class MarginalGrowth(Growth):
    """Growth under `Marginals` with a draft that gives one row at a time: first a row per depth, along the most likely path; then the
    whole tree from these rows, as with `block`."""

    def _restart(self) -> None:
        super()._restart()
        self.block = False
        self._path_rows: list[DraftDistribution] = []  # of the nodes of the most likely path, the root's first

    def frontier(self, max_rows: int) -> list[int]:
        tip = self._tip
        wanted = not self.block and max_rows > 0 and self.room > 0 and tip not in self.rows and tip != self.root_id
        return [tip] if wanted else []

    def expand(self, node: int, row: DraftDistribution, noise: Floats | None = None) -> None:
        self.rows[node] = row
        if len(row):
            self._path_rows.append(row)

    def draw(self, new_words: NewWords) -> list[int]:
        if self.block or not self._path_rows:
            return []
        drawn: list[int] = []
        tip, row = self._tip, self.rows.get(self._tip)
        if row and len(self._path_rows) < self.strategy.max_depth and self.room > 0:
            score = self._score[tip] + math.log(row.law[0])
            drawn = [self._attach(tip, int(row.ids[0]), sampled=False, score=score)]
            if self._can_have_children(self.tree.nodes[drawn[0]]):
                return drawn
        root_row, *rows_below = self._path_rows
        self.block, self._by_depth = True, [(row, None) for row in rows_below]
        self._unopened = [node for node in self._score if node != self.head]
        self._open_place(self.root_id, root_row)
        return drawn + super().draw(new_words)

    @property
    def at_rest(self) -> bool:
        if not self.root_expanded:
            return super().at_rest
        return self.room <= 0 or self.block or not self._path_rows

    @property
    def _tip(self) -> int:
        """The last node of the most likely path, the first child of each."""
        node = self.root_id
        while children := self.tree.at(node).children:
            node = children[0]
        return node


def growth_of(
    tree: LivingTree, strategy: Strategy, *, node_cap: int = 16, max_positions: int = 1 << 31, block: bool = False
) -> Growth:
    """The growth of a tree's root component under a strategy. block: the draft gives rows by depth."""
    kind = MarginalGrowth if isinstance(strategy, Marginals) and not block else Growth
    return kind(tree, strategy, node_cap=node_cap, max_positions=max_positions, block=block)
