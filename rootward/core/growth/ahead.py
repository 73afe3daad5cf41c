"""Growing ahead: guesses for the bonus token, and trees below them (algorithms.md 6.6).

While a tree is being verified its drafter bets on the outcome: (node where the round stops, bonus token). A *guess* is such a bonus
token, chosen and never verified; if it is right it is the next root, and what hangs below it is the next tree. `Choose` names the
guesses at a node: the likeliest tokens, or, which is right far more often, what the noise of the bonus token makes of the draft's row.

Exactness hangs on what may depend on that noise. The bonus at text length t is an exact sample as long as nothing that is verified has
looked at the noise of length t or more. Hence the order of things, which no guess can change:

    1  the root's component grows until it is at rest; what a round waits for is sent before guesses are made
    2  how many guesses each of its nodes gets is settled by ranks and depths (a forecast of where the round stops)
    3  every guess gets the same share of nodes, rows and draws; what one cannot use (end of text, support exhausted) is wasted
    4  a commit keeps the component it walked into and drops all others; 1 begins again

A component grows like any tree, below a head whose noise is already past. So the laws of its draws hold given the head, and rules
L1-L5 of algorithms.md 6.1 hold for every round. `tests/statistical/test_shared_bonus.py` has the enumeration and the wrong twins.
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
from rootward.core.rng import BonusKey, bonus_gumbel

MOST_GUESSES = 32  # tokens named at a node; those that are children already are no guesses

Choose = Callable[
    [int, DraftDistribution], Ints
]  # (node, draft row) -> tokens after it, the likeliest bonus token first


@dataclass(frozen=True, slots=True)
class Bets:
    """How much is grown ahead. All of it is settled without looking at a guess.

    nodes            most nodes alive in guesses and below them; 0: no guesses
    share            of them for each guess, itself included
    draws_per_level  nodes drawn below each guess after a draft forward
    hits             probability that the bonus token is the first, second, … guess at the node where the round stops
    """

    nodes: int = 0
    share: int = 8
    draws_per_level: int = 2
    hits: tuple[float, ...] = (0.35, 0.12, 0.08, 0.06)

    def __post_init__(self) -> None:
        if self.nodes < 0 or self.share < 2 or self.draws_per_level < 1:
            raise ValueError(
                f"nodes, share, draws_per_level: {self.nodes}, {self.share}, {self.draws_per_level}; "
                "give at least 0, 2 (a guess with nothing below it gains nothing) and 1"
            )

    @property
    def num_guesses(self) -> int:
        return self.nodes // self.share


def likeliest(node: int, row: DraftDistribution) -> Ints:
    """Guesses without knowing the noise."""
    return row.ids


def shared_order(key: BonusKey, epoch: int, length: int, ids: Ints, law: Floats, most: int = MOST_GUESSES) -> Ints:
    """Guesses that follow the noise of the bonus token at this text length: the largest log q + b, decreasing (the bonus token is
    the largest log r + b). ids, law: atoms of the draft's row with mass, as many as can be had: where all that is likely has been
    tried and rejected, the bonus token is an unlikely one."""
    minus = -(np.log(law) + bonus_gumbel(key, epoch, length, ids))
    best = np.argpartition(minus, most - 1)[:most] if most < len(ids) else np.arange(len(ids))
    return ids[best[np.argsort(minus[best], kind="stable")]]


class Ahead:
    """Looks after all components of one living tree. `own` is the growth of the root's component."""

    def __init__(self, own: Growth, bets: Bets, choose: Choose = likeliest) -> None:
        self.own, self.bets, self._choose = own, bets, choose
        self.tree = own.tree
        self._wanted: dict[int, int] | None = None  # guesses still to be made, by node; None: not settled yet
        self._guesses: list[Growth] = []
        self._turn = 0

    @property
    def at_rest(self) -> bool:
        """Nothing that this base's rounds could verify will be added."""
        return self.own.at_rest

    @property
    def busy(self) -> bool:
        """A draft forward can still do something."""
        if not self.own.at_rest:
            return True
        if not self.bets.num_guesses or not self.own.root_expanded:
            return False
        return self._wanted is None or bool(self._wanted) or any(not g.at_rest for g in self._guesses)

    @property
    def expanded(self) -> set[int]:
        """Nodes whose rows are known."""
        return {n for growth in (self.own, *self._guesses) for n in growth.rows}

    def wanted_rows(self, max_rows: int) -> int:
        """What to ask for in the next level, for rows are shared with other trees: the same whatever the guesses are."""
        if not self.own.at_rest:
            return len(self.own.frontier(max_rows))
        return len(self._leaves()) + self.bets.num_guesses * self.bets.draws_per_level

    def frontier(self, max_rows: int) -> list[int]:
        """Nodes whose rows are asked for next."""
        if not self.own.at_rest:
            return self.own.frontier(max_rows)
        nodes = self._leaves()[:max_rows]
        return nodes + self._below_guesses(max_rows - len(nodes))

    def _leaves(self) -> list[int]:
        """Nodes that get guesses and have no row yet."""
        return [n for n in self._wanted or () if not self.own.is_expanded(n)]

    def expand(self, node: int, row: DraftDistribution, noise: np.ndarray | None = None) -> None:
        """The row of a node is known."""
        self._growth_of(node).expand(node, row, noise)

    def draw(self, new_words: NewWords) -> list[int]:
        """A level's worth of draws; the new ids in draw order."""
        if not self.own.at_rest:
            return self.own.draw(new_words)  # alone: a round waits for them, and making guesses takes time
        drawn = [node for guess in self._guesses for node in guess.draw(new_words)]
        self._turn += 1
        if self.bets.num_guesses and self.own.root_expanded:
            drawn += self._guess()
        return drawn

    def commit(self, tokens: Sequence[int]) -> list[int | None]:
        """A round committed these tokens: re-root. Returns the id that spelled each of them, or None."""
        walked = self.tree.commit(tokens)
        hit = next((guess for guess in self._guesses if guess.head in walked), None)
        if hit is not None:
            hit.strategy, hit.node_cap, hit.head = self.own.strategy, self.own.node_cap, ROOT
            self.own = hit
        self.own.rerooted()
        self._wanted, self._guesses, self._turn = None, [], 0
        return walked

    # -- guesses ------------------------------------------------------------------------------------------------------

    def _growth_of(self, node: int) -> Growth:
        head = self.tree.at(node).head
        return self.own if head == ROOT else next(g for g in self._guesses if g.head == head)

    def _guess(self) -> list[int]:
        """Make the guesses at the nodes whose rows are known."""
        if self._wanted is None:
            self._wanted = self._plan()
        made: list[int] = []
        for node in [n for n in self._wanted if self.own.is_expanded(n)]:
            made += self._guesses_at(node, self._wanted.pop(node))
        return made

    def _plan(self) -> dict[int, int]:
        """Guesses for each node: always the likeliest pair of (stop node, which guess is right) next."""
        heap = [(-stop * self.bets.hits[0], node, 0) for node, stop in self.own.stops().items()]
        heapq.heapify(heap)
        wanted: dict[int, int] = {}
        for _ in range(self.bets.num_guesses):
            if not heap:
                break
            score, node, rank = heap[0]
            wanted[node] = rank + 1
            if rank + 1 < len(self.bets.hits):
                next_score = score / self.bets.hits[rank] * self.bets.hits[rank + 1]
                heapq.heapreplace(heap, (next_score, node, rank + 1))
            else:
                heapq.heappop(heap)
        return wanted

    def _guesses_at(self, node: int, num_guesses: int) -> list[int]:
        """Tokens that are children already are no outcome: a tried child is never the bonus token."""
        record = self.tree.at(node)
        children = {self.tree.nodes[c].token for c in record.children}
        order = self._choose(node, self.own.rows[node]) if len(self.own.rows[node]) else ()
        tokens = [t for t in map(int, order) if t not in children and t not in self.tree.eos_ids]
        return [self._head(node, token) for token in tokens[:num_guesses]]

    def _head(self, node: int, token: int) -> int:
        guess = self.tree.draw(node, token, sampled=False, guess=True)
        own, bets = self.own, self.bets
        cap = min(bets.share - 1, self.tree.node_cap)  # as the root's it must keep within the tree's own
        assert isinstance(own.strategy, BestFirst)  # of the others no tree outlives its round
        strategy = replace(own.strategy, draws_per_level=bets.draws_per_level, least_levels=1)
        self._guesses.append(Growth(self.tree, strategy, node_cap=cap, max_positions=own.max_positions, head=guess))
        return guess

    def _below_guesses(self, max_rows: int) -> list[int]:
        """The same number of rows for each guess; whom they do not suffice for has its turn in the next level."""
        count = self.bets.num_guesses
        quota = max(1, max_rows // count) if count else 0
        nodes: list[int] = []
        for i in range(min(count, max_rows // quota if quota else 0)):
            place = (self._turn * (max_rows // quota) + i) % count
            if place < len(self._guesses):
                nodes += self._guesses[place].frontier(quota)
        return nodes
