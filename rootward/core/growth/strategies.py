"""Draft strategies: which node of a tree gets the next child, and from which declared distribution it comes.

Every strategy is an answer to the same question. A *place* is an expanded node together with the rank of its next child; the place with
the best score gets the next child. A strategy defines

    mode          how a child is made: drawn without replacement, drawn with replacement, chosen, or by shared noise
    max_depth     longest path below the root
    children(d)   most children of a node at depth d (the root has depth 0)
    family(p, n)  scores of the children of a place that are made together, as one event (GREEDY); []: one at a time
    score(place)  of the place's next child, before it is drawn
    draws(n)      most children made after each draft forward, in a tree of n nodes

Non-anticipation (algorithms.md, rule L1). In the modes that ratio tests verify, a score depends on ranks, depths, past rounds and fresh
randomness alone, never on the token that is about to be drawn or on a later one. Trees that are verified by target matching may be
scored by anything: by the probability of the path, or by that of a match under the shared noise.

A shape that is defined relative to the root of one round `restarts`: both sides start a new tree with every commit. Dropping the whole
subtree because of the commit alone is allowed (L5).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from rootward.core.arrays import Floats, Words
from rootward.core.distribution import DraftDistribution
from rootward.core.requests import DraftMode, DraftStrategy

NewWords = Callable[[int], Words]  # n new uniform words; none is used twice within a request

UNLIMITED = 1 << 30
MATCH_SCALE = 0.4  # of log p − log q, by which the children of coupled trees are scored (docs/algorithms/coupled.md)


@dataclass(slots=True)
class Place:
    """An expanded node that can still get children.

    row        drawn without replacement: the row without earlier children except `last_drawn`; otherwise the whole row
    score      of the node itself
    order      chosen and coupled trees: the atoms to take, in this order
    chance     of each of them, the probability that the target takes it
    reach, total  stochastic beam: probability of the path of the node under the draft; mass of the whole row
    last_time  stochastic beam: arrival time of the last child
    """

    node: int
    depth: int
    score: float
    row: DraftDistribution
    rank: int = 0
    last_drawn: int | None = None
    order: list[int] = field(default_factory=list)
    chance: list[float] = field(default_factory=list)
    reach: float = 1.0
    total: float = 1.0
    last_time: float | None = None

    def exhausted(self, mode: DraftMode) -> bool:
        """No further child can be made here."""
        if mode is DraftMode.IID:
            return len(self.row) == 0
        return len(self.row) == (self.last_drawn is not None) if mode.ratio else self.rank >= len(self.order)

    def draw(self, mode: DraftMode, words: Words) -> int:
        """Draw the next child. The last token is removed from the row only when another child is drawn, which is rare."""
        if mode is DraftMode.IID:
            return self.row.draw(words)
        if self.last_drawn is not None:
            self.row = self.row.without([self.last_drawn])
        self.last_drawn = self.row.draw(words)
        return self.last_drawn

    def insert(self, token: int, chance: float) -> None:
        """The next child is this token, whether or not it is an atom."""
        self.row = self.row.without([token])
        if token in self.order[self.rank :]:
            at = self.order.index(token, self.rank)
            del self.order[at], self.chance[at]
        if self.order:
            self.order.insert(self.rank, token)
            self.chance.insert(self.rank, chance)
        self.rank += 1


class Strategy:
    """See the module's description.

    restarts      a new tree with every commit
    whole_levels  children of a level are drawn when all its nodes are expanded, and never later
    """

    mode: DraftMode
    max_depth: int
    restarts = True
    whole_levels = False

    def children(self, depth: int) -> int:
        raise NotImplementedError

    def family(self, place: Place, num_nodes: int) -> list[float]:
        return []

    def draws(self, num_nodes: int) -> int:
        return UNLIMITED

    def score(self, place: Place, new_words: NewWords) -> float:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class BestFirst(Strategy):
    """Best-first growth. Under ratio tests the child of rank r is reached with a(r)·Π_{j<r} (1 − a(j)) times the probability of its
    parent, where a is one constant for first children and one for all later ones. Chosen trees are scored by path probability, as in
    "EAGLE-2" (2406.16858); coupled trees by the probability of a match under the shared noise.

    mode             GREEDY: the root has a GREEDY family (algorithms.md 5.7), where branching pays most; below it children are drawn
    draws_per_level  most nodes drawn after each draft forward
    acceptance       of a first child, in (0, 1)
    later            of a later child, once all before it have failed, in (0, 1)
    root_family      GREEDY: probability that the round stops below each child of the root's family; as many children as numbers, in trees
                     whose levels have as many
    least_levels     levels that the nodes of a round should have: a small tree grows deep, not wide. The root counts as a node, so trees of
                     7 and of 8 nodes grow alike
    """

    mode: DraftMode = DraftMode.SAMPLED
    max_depth: int = 8
    topk: int = 4
    draws_per_level: int = 4
    acceptance: float = 0.7
    later: float = 0.2
    root_family: tuple[float, ...] = (0.33, 0.27, 0.11)
    least_levels: int = 1

    restarts = False

    def __post_init__(self) -> None:
        for name, value in (("acceptance", self.acceptance), ("later", self.later)):
            if not 0 < value < 1:
                raise ValueError(f"{name}: {value} is outside (0, 1)")
        if not self.root_family or min(self.root_family) <= 0 or sum(self.root_family) > 1:
            raise ValueError(f"root_family: {self.root_family}; give probabilities above 0 that sum to at most 1")
        for name in ("max_depth", "topk", "draws_per_level", "least_levels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if self.mode is DraftMode.IID:
            raise ValueError("mode: best-first growth keeps no copies; use the strategy iid:B1,B2,...")

    def children(self, depth: int) -> int:
        return self.topk

    def family(self, place: Place, num_nodes: int) -> list[float]:
        """All of the root's family or none: children beyond the draws of a level would not be extended in the same level, and a part of the
        family is accepted less often than as many drawn children (docs/log.md, lesson 23)."""
        whole = len(self.root_family) <= min(self.draws(num_nodes), self.topk)
        if self.mode is not DraftMode.GREEDY or place.depth or not whole:
            return []
        return [place.score + math.log(mass) for mass in self.root_family]

    def draws(self, num_nodes: int) -> int:
        """The same in all levels as far as that goes: 5 nodes make levels of 3 and 2, not of 4 and 1."""
        most = min(self.draws_per_level, max(1, (num_nodes + 1) // self.least_levels))
        num_levels = max(1, -(-num_nodes // most))
        return max(1, -(-num_nodes // num_levels))

    def score(self, place: Place, new_words: NewWords) -> float:
        """Log-probability that the next child is reached."""
        rank = place.rank
        if place.chance:
            return place.score + math.log(max(place.chance[rank], sys.float_info.min))
        if rank == 0:
            return place.score + math.log(self.acceptance)
        failed = math.log1p(-self.acceptance) + (rank - 1) * math.log1p(-self.later)
        return place.score + failed + math.log(self.later)


@dataclass(frozen=True, slots=True)
class FixedShape(Strategy):
    """branching[d] children of every node at depth d, level by level. Covers chains, RSD-C ("Recursive Speculative Decoding",
    2402.14160), copies as in "SpecInfer" (2305.09781), GREEDY families at every node (2502.18779) and fixed top-k trees."""

    mode: DraftMode
    branching: tuple[int, ...]

    def __post_init__(self) -> None:
        positive("branching", self.branching)

    @property
    def max_depth(self) -> int:  # type: ignore[override]  # read-only here
        return len(self.branching)

    def children(self, depth: int) -> int:
        return self.branching[depth] if depth < len(self.branching) else 0

    def family(self, place: Place, num_nodes: int) -> list[float]:
        whole = self.mode is DraftMode.GREEDY
        return [-float(place.depth + 1)] * self.children(place.depth) if whole else []

    def score(self, place: Place, new_words: NewWords) -> float:
        """Shallow places first; of one depth the node that was drawn first."""
        return -float(place.depth + 1)


@dataclass(frozen=True, slots=True)
class StochasticBeam(Strategy):
    """RSD-S ("Recursive Speculative Decoding", 2402.14160): a stochastic beam of `width` nodes per level ("Stochastic Beams and Where to
    Find Them", 1903.06059), run as the race that it is: strings arrive at the rate of their probability, and a level keeps the first
    `width` prefixes that appear. A node's first child appears when the node itself does; the next new child of a node with path
    probability φ follows after an exponential time with rate φ · (mass of the tokens not drawn yet). Times are fresh randomness and
    independent of the tokens, so the next place is known before its child is drawn."""

    width: int
    max_depth: int

    mode = DraftMode.SAMPLED
    whole_levels = True

    def __post_init__(self) -> None:
        positive("width, depth", (self.width, self.max_depth))

    def children(self, depth: int) -> int:
        return self.width

    def draws(self, num_nodes: int) -> int:
        return self.width

    def score(self, place: Place, new_words: NewWords) -> float:
        """Minus the arrival time of the next child."""
        if place.last_time is None:
            place.last_time = -place.score
        else:
            left = place.row if place.last_drawn is None else place.row.without([place.last_drawn])
            uniform = (float(int(new_words(1)[0]) >> 11) + 0.5) * 2.0**-53
            share = place.reach * left.total / place.total
            place.last_time += -math.log(uniform) / share if share > 0.0 else math.inf
        return -place.last_time


@dataclass(frozen=True, slots=True)
class Marginals(Strategy):
    """The most probable paths under independent positions, chosen ("Accelerating Speculative Decoding with Block Diffusion Draft Trees",
    DDTree, 2604.12989). A block drafter gives one distribution per position; an autoregressive one gives those along its most likely
    path, so a tree of any size takes `max_depth` rows."""

    max_depth: int

    mode = DraftMode.TOP_K

    def __post_init__(self) -> None:
        positive("depth", (self.max_depth,))

    def children(self, depth: int) -> int:
        return UNLIMITED

    def draws(self, num_nodes: int) -> int:
        return 1

    def score(self, place: Place, new_words: NewWords) -> float:
        """Log-probability of the path, positions taken as independent."""
        return place.score + math.log(max(place.chance[place.rank], sys.float_info.min))


def strategy_of(asked: DraftStrategy, mode: DraftMode, best_first: BestFirst) -> Strategy:
    """The strategy that a drafter follows for a tree of this mode. best_first: settings of best-first growth.

    ValueError if the strategy does not make trees of that mode. Under target matching a fixed shape is chosen or coupled, and any other
    strategy of drawn trees becomes best-first growth.
    """
    asked.check_mode(mode)
    own, numbers = mode is asked.mode, asked.numbers
    if asked.name == "chain":
        return FixedShape(mode, (1,) * numbers[0])
    if asked.name == "marginals" and own:
        return Marginals(numbers[0] if numbers else best_first.max_depth)
    if asked.name == "rsd_s" and own:
        return StochasticBeam(numbers[0], numbers[1])
    if numbers and asked.name not in ("marginals", "rsd_s"):
        return FixedShape(mode, numbers)
    return replace(best_first, mode=mode)


def positive(name: str, numbers: tuple[int, ...]) -> None:
    """ValueError unless there is a number and each is at least 1."""
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{name}: {list(numbers)}; give at least one number, each at least 1")


def coupled_order(place: Place, noise: Floats) -> None:
    """Order the atoms of a coupled place: the largest log q + noise first, ties to the smaller id."""
    perturbed = np.log(place.row.law) + noise
    order = np.lexsort((place.row.ids, -perturbed))
    place.order = place.row.ids[order].tolist()
    place.chance = match_probabilities(perturbed, MATCH_SCALE)[order].tolist()


def match_probabilities(perturbed: Floats, temperature: float) -> Floats:
    """float64[k]: for coupled trees, the probability that each child is the target's own token.

    perturbed float[k]: log q + g of the atoms under the shared noise g. The target takes the largest of log p + g; if
    log p − log q is noise of scale T, its choice has the law softmax((log q + g) / T).
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature: {temperature}; give the scale of log p − log q, above 0")
    scaled = np.asarray(perturbed, dtype=np.float64) / temperature
    weight = np.exp(scaled - scaled.max())
    law: Floats = weight / weight.sum()
    return law
