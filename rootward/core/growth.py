"""Growth: who gets the next child (algorithms.md, section 10).

Every policy is "the place with the best score gets the next draw". A *place* is (expanded node, next rank); a *level* is one draft
forward over the frontier followed by a fixed number of draws.

Non-anticipation (rule L1). Under ratio tests (SAMPLED, GREEDY) a score is a function of ranks, depths and past rounds alone: the child
of rank r is reached with a(r)·Π_{j<r} (1 − a(j)) times the probability of its parent, where a is one constant for first children and one
for all later ones, or a `Calibration` by rank and depth, learned from past rounds. Chosen and coupled trees are verified by target
matching, so their scores may look at anything: the probability of the path, or of a match under the shared noise.

GREEDY is SAMPLED with a GREEDY family (algorithms.md 5.7) at the root, where every round begins: below it branching pays less.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rootward.core.arrays import Floats, Words
from rootward.core.calibration import Calibration, match_probabilities
from rootward.core.distribution import DraftDistribution, draw_children, greedy_family
from rootward.core.living_tree import ROOT, LivingTree, Node
from rootward.core.requests import DraftMode

NewWords = Callable[[int], Words]  # n fresh uniform words; never the same twice within a request


@dataclass(frozen=True, slots=True)
class Policy:
    """The shape of growth.

    law               how children are made
    node_cap          most live nodes
    max_depth         longest path below the root
    topk              most children per node
    draws_per_level   most nodes drawn after each draft forward
    acceptance        of a first child, in (0, 1)
    later             of a later child, once all before it have failed, in (0, 1)
    family            GREEDY: the probability that the round stops below each child of the root's family, in order of trial; as many
                      children as numbers
    match_scale       COUPLED: scale of log p − log q, by which children are scored; 0: by the constant acceptance
    least_levels      levels that the nodes of a round should have: a small tree grows deep, not wide
    beyond            chosen and coupled trees: of node_cap, nodes for the rounds after the next
    draws_beyond      most of them drawn after each draft forward: they are late for nobody, and there is a whole round for them
    """

    law: DraftMode
    node_cap: int = 16
    max_depth: int = 8
    topk: int = 4
    draws_per_level: int = 4
    acceptance: float = 0.7
    later: float = 0.2
    family: tuple[float, ...] = (0.33, 0.27, 0.11)
    match_scale: float = 0.0
    least_levels: int = 1
    beyond: int = 0
    draws_beyond: int = 24

    def __post_init__(self) -> None:
        for name, value in (("acceptance", self.acceptance), ("later", self.later)):
            if not 0 < value < 1:
                raise ValueError(f"{name}: {value} is outside (0, 1)")
        if not self.family or min(self.family) <= 0 or sum(self.family) > 1:
            raise ValueError(f"family: {self.family}; give probabilities above 0 that sum to at most 1")
        for name in ("node_cap", "max_depth", "topk", "draws_per_level", "least_levels", "draws_beyond"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if not 0 <= self.match_scale < math.inf:
            raise ValueError(f"match_scale: {self.match_scale}; give the scale of log p − log q, 0 for none")

    @property
    def draws(self) -> int:
        """Nodes drawn after each draft forward, of those that the next round may verify."""
        return min(self.draws_per_level, max(1, (self.node_cap - self.beyond) // self.least_levels))


@dataclass(slots=True)
class _Place:
    """An expanded node that can still get children."""

    row: DraftDistribution  # what is left to draw from, but for `drawn` (SAMPLED), or everything (chosen laws)
    rank: int = 0
    drawn: int | None = None  # the last token drawn: it leaves the row when another one is asked for, which is seldom
    order: list[int] = field(default_factory=list)  # chosen laws: the atoms to take, in order
    chance: list[float] = field(default_factory=list)  # chosen laws: of each of them, that the target takes it
    perturbed: Floats | None = None  # coupled: log q + noise of the row's atoms

    @property
    def is_empty(self) -> bool:
        """SAMPLED: nothing is left to draw from."""
        return len(self.row) == (self.drawn is not None)

    def draw(self, words: Words) -> int:
        """SAMPLED: the next child."""
        if self.drawn is not None:
            self.row = self.row.without([self.drawn])
        self.drawn = int(draw_children(self.row, 1, words)[0])
        return self.drawn

    def take(self, token: int, chance: float) -> None:
        """The next child is this one, whether or not it is an atom."""
        self.row = self.row.without([token])
        self.perturbed = None  # of a row that has changed nothing is learned
        if token in self.order[self.rank :]:
            at = self.order.index(token, self.rank)
            del self.order[at], self.chance[at : at + 1]
        if self.order:
            self.order.insert(self.rank, token)
            self.chance.insert(self.rank, chance)
        self.rank += 1


class Growth:
    """Decides, for one component of a living tree, what to expand and what to draw. The tree is changed by `draw` only.

    head: the guess whose component it is; ROOT: that of the root (`ahead.py` looks after several).
    calibration: acceptance by rank and depth instead of the policy's constant. Whoever owns it lets it learn between rounds,
    before `rerooted`; several trees may share one.
    """

    def __init__(
        self,
        tree: LivingTree,
        policy: Policy,
        *,
        max_positions: int = 1 << 31,
        calibration: Calibration | None = None,
        head: int = ROOT,
    ) -> None:
        self.tree, self.policy, self.max_positions = tree, policy, max_positions
        self.calibration, self.head = calibration, head
        self._ratio = policy.law.ratio
        self._num_drawn = 0
        self.rows: dict[int, DraftDistribution] = {}  # of every expanded node
        self._score: dict[int, float] = {head: 0.0}  # log-probability of being reached, by node id
        self._rank: dict[int, int] = {}  # place among the siblings in order of trial, by node id
        self._places: dict[int, _Place] = {}
        self._heap: list[tuple[float, int, int]] = []  # (-score of the next child, node id, rank)

    @property
    def root_id(self) -> int:
        """The node that everything here hangs below."""
        return self.tree.root_id if self.head == ROOT else self.head

    @property
    def root_expanded(self) -> bool:
        return self.root_id in self.rows

    def is_expanded(self, node: int) -> bool:
        """Its row is known (and its KV is held)."""
        return node in self.rows

    @property
    def room(self) -> int:
        return self.policy.node_cap - (len(self.tree) if self.head == ROOT else self._num_drawn)

    @property
    def looks_beyond(self) -> bool:
        """The next round has its nodes; what is grown now is for later ones."""
        return self.policy.beyond > 0 and self.room <= self.policy.beyond

    def frontier(self, max_rows: int) -> list[int]:
        """Live nodes without a row that are worth one, best first; the root of the tree gets its own from whoever feeds the text."""
        if self.room <= 0:
            return []
        nodes = (n for n in self._score if n not in self.rows and n not in (ROOT, self.tree.root_id))
        open_nodes = [n for n in nodes if self._can_have_children(self.tree.nodes[n])]
        open_nodes.sort(key=lambda n: -self._score[n])
        return open_nodes[:max_rows]

    def expand(self, node: int, row: DraftDistribution, noise: Floats | None = None) -> None:
        """The row of a node is known. noise: Gumbel noise at row.ids (COUPLED)."""
        self.rows[node] = row
        if len(row) == 0:
            return
        record, place = self.tree.at(node), _Place(row)
        if self._ratio:
            record.row = row.ids, row.weight  # a GREEDY family declares another one, when it is made
        if self.policy.law is DraftMode.TOP_K:  # atoms are sorted
            place.order, place.chance = row.ids.tolist(), row.law.tolist()
        elif self.policy.law is DraftMode.COUPLED:
            assert noise is not None
            self._order_coupled(place, np.log(row.law) + noise)
        for child in record.children:  # named before the row was known
            if child in self._score:
                place.take(self.tree.nodes[child].token, math.exp(self._score[child] - self._score[node]))
        self._places[node] = place
        self._push(node, place)

    def follow(self, path: Iterable[tuple[int, float]]) -> None:
        """Lay a path below the root, whatever the model would draw: (token, probability that it is right) of each step. A function of
        the text so far, so its nodes are chosen; siblings drawn later are drawn from what the row has besides."""
        node = self.root_id
        for token, trust in path:
            record = self.tree.at(node)
            own = [c for c in record.children if c in self._score]
            child = next((c for c in own if self.tree.nodes[c].token == token), None)
            if child is None:
                if self.room <= 0 or not self._can_have_children(record) or len(own) >= self.policy.topk:
                    return
                child = self._attach(node, token, len(own), sampled=False, gain=math.log(trust))
                if (place := self._places.get(node)) is not None:
                    place.take(token, trust)
                    self._push(node, place)
            node = child

    def draw(self, new_words: NewWords) -> list[int]:
        """Give the best places their next child, a level's worth; returns the new ids in draw order."""
        drawn: list[int] = []
        most = self.policy.draws_beyond if self.looks_beyond else self.policy.draws
        while len(drawn) < most and self.room > 0 and self._heap:
            _, node, rank = heapq.heappop(self._heap)
            place = self._places.get(node)
            if place is None or place.rank != rank or not self._alive(node):
                continue
            drawn += self._children(node, place, new_words)
        return drawn

    def stops(self) -> dict[int, float]:
        """Forecast, by ranks and depths alone, of the probability that a round stops at each node that the text can go on after."""
        mass = {n: math.exp(s) for n, s in self._score.items()}
        for node in mass:
            mass[node] -= sum(mass[c] for c in self.tree.at(node).children if c in mass)
        return {n: max(m, 0.0) for n, m in mass.items() if self.can_continue(self.tree.at(n))}

    def lessons(self, tokens: Iterable[int]) -> Iterator[tuple[Floats, int]]:
        """What a commit teaches of a coupled tree: at each node that the text went through, log q + noise of the atoms and which of
        them the target took."""
        node: int | None = self.root_id
        for token in tokens:
            place = self._places.get(node) if node is not None else None
            if node is None or place is None or place.perturbed is None:
                return
            if len(at := np.flatnonzero(place.row.ids == token)):
                yield place.perturbed, int(at[0])
            node = next((c for c in self.tree.at(node).children if self.tree.nodes[c].token == token), None)

    @property
    def at_rest(self) -> bool:
        """Nothing more can be drawn until the truth advances."""
        if not self.root_expanded:
            return not self._can_have_children(self.tree.at(self.root_id))
        return self.room <= 0 or (not self._live_places() and not self.frontier(1))

    def rerooted(self) -> None:
        """Forget what left the tree. Scores by a constant are relative, so what stays keeps its order; a calibration has learned and
        knows depths below the root, so its scores are made anew."""
        alive = {*self.tree.nodes, self.tree.root_id}
        if self.tree.root_id == ROOT:  # no node spelled the truth: an empty tree
            self._score, self._rank = {ROOT: 0.0}, {}
            self._places, self._heap, self.rows = {}, [], {}
            return
        self._score = {n: s for n, s in self._score.items() if n in alive}
        self._rank = {n: r for n, r in self._rank.items() if n in alive}
        self._places = {n: p for n, p in self._places.items() if n in alive}
        self.rows = {n: r for n, r in self.rows.items() if n in alive}
        if self._calibrated:
            self._score_again()
        self._heap = []
        for node, place in self._places.items():
            self._push(node, place)

    # -- children -----------------------------------------------------------------------------------------------------

    def _children(self, node: int, place: _Place, new_words: NewWords) -> list[int]:
        if self.policy.law is DraftMode.GREEDY and node == self.root_id and not place.rank:
            return self._family(node, place, new_words)
        token = place.draw(new_words(2)) if self._ratio else place.order[place.rank]
        child = self._attach(node, token, place.rank, sampled=self._ratio, gain=self._gain(node, place.rank))
        place.rank += 1
        self._push(node, place)
        return [child]

    def _family(self, node: int, place: _Place, new_words: NewWords) -> list[int]:
        """A GREEDY family, whole: the sampled child first, then the chosen ones (algorithms.md 5.7)."""
        masses, policy = self.policy.family, self.policy
        # More children than a level extends would only take turns: as many chains as draws.
        size = min(len(masses), policy.draws, policy.topk, self.room)
        made = greedy_family(place.row, size, new_words(2))
        del self._places[node]
        self.tree.at(node).row = (made.row.ids, made.row.weight) if len(made.row) else None
        children = zip(made.token.tolist(), made.sampled.tolist(), masses, strict=False)
        return [
            self._attach(
                node, t, i, sampled=s, gain=self._calibrated_gain(node, i) if self._calibrated else math.log(m)
            )
            for i, (t, s, m) in enumerate(children)
        ]

    def _attach(self, node: int, token: int, rank: int, *, sampled: bool, gain: float) -> int:
        child = self.tree.draw(node, token, sampled=sampled)
        self._num_drawn += 1
        self._score[child] = self._score[node] + gain
        self._rank[child] = rank
        return child

    def _order_coupled(self, place: _Place, perturbed: Floats) -> None:
        order = np.argsort(-perturbed, kind="stable")
        place.order, place.perturbed = place.row.ids[order].tolist(), perturbed
        if self.policy.match_scale:
            place.chance = match_probabilities(perturbed, self.policy.match_scale)[order].tolist()

    # -- scores -------------------------------------------------------------------------------------------------------

    def _push(self, node: int, place: _Place) -> None:
        exhausted = place.is_empty if self._ratio else place.rank >= len(place.order)
        deep = not self._can_have_children(self.tree.at(node))  # for now: a commit brings it closer to the root
        if not exhausted and not deep and place.rank < self.policy.topk:
            heapq.heappush(self._heap, (-(self._score[node] + self._gain(node, place.rank)), node, place.rank))

    @property
    def _by_chance(self) -> bool:
        """Scores look at the draft's own probabilities: for match only."""
        return self.policy.law is DraftMode.TOP_K or (
            self.policy.law is DraftMode.COUPLED and self.policy.match_scale > 0
        )

    @property
    def _calibrated(self) -> bool:
        return self.calibration is not None and not self._by_chance

    def _gain(self, node: int, rank: int) -> float:
        """log of the probability that the child of this rank is reached, given that its parent is."""
        if self._by_chance:
            return math.log(max(self._places[node].chance[rank], sys.float_info.min))
        if self._calibrated:
            return self._calibrated_gain(node, rank)
        a, later = self.policy.acceptance, self.policy.later
        return math.log(a) if rank == 0 else math.log1p(-a) + (rank - 1) * math.log1p(-later) + math.log(later)

    def _calibrated_gain(self, node: int, rank: int) -> float:
        """log of a(r, d)·Π_{j<r} (1 − a(j, d)), depths below the root."""
        assert self.calibration is not None
        a, depth = self.calibration.acceptance, self._depth(self.tree.at(node)) + 1
        return math.log(a(rank, depth)) + sum(math.log1p(-a(j, depth)) for j in range(rank))

    def _score_again(self) -> None:
        self._score = {self.tree.root_id: 0.0}
        for node, record in self.tree.nodes.items():  # parents first; nothing but the root's component is left
            above = self.tree.root_id if record.parent == ROOT else record.parent
            self._score[node] = self._score[above] + self._calibrated_gain(above, self._rank[node])

    def _can_have_children(self, record: Node) -> bool:
        return self._depth(record) < self.policy.max_depth and self.can_continue(record)

    def can_continue(self, record: Node) -> bool:
        """The text may go on after it, and the draft model could follow."""
        return record.depth + 1 < self.max_positions and record.token not in self.tree.eos_ids

    def _depth(self, record: Node) -> int:
        return record.depth - self.tree.at(self.root_id).depth

    def _alive(self, node: int) -> bool:
        return node == self.tree.root_id or node in self.tree.nodes

    def _live_places(self) -> bool:
        while self._heap:
            _, node, rank = self._heap[0]
            place = self._places.get(node)
            if place is not None and place.rank == rank and self._alive(node):
                return True
            heapq.heappop(self._heap)
        return False
