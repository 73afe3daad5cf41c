"""One tree that a model grows, and what the drafter knows of its session."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rootward.core.ahead import Ahead, shared_order
from rootward.core.arrays import Ints
from rootward.core.drafting.lookup import Source, best_path
from rootward.core.frames import Open
from rootward.core.living_tree import LivingTree
from rootward.core.requests import Sampling
from rootward.core.rng import BonusKey, Key
from rootward.engine.atoms import likely_tokens
from rootward.engine.processors import History


class Guesses:
    """What may come after a node where a round stops, by the noise of the bonus token. Few nodes are asked, so the order is made only
    then: until then tokens and their mass are kept (16 KiB a node), afterwards the best tokens alone."""

    __slots__ = ("_best", "_likely")

    def __init__(self, likely: Ints) -> None:
        self._likely = likely.copy()  # not a view, which would hold the rows of the whole level
        self._best: Ints | None = None

    def best(self, key: BonusKey, epoch: int, length: int) -> Ints:
        """The first ones, the best first, at this length of the text."""
        if self._best is None:
            ids, mass = likely_tokens(self._likely)
            some = mass > 0.0
            self._best = shared_order(key, epoch, length, ids[some], mass[some])
            self._likely = np.empty(0, np.int64)
        return self._best


@dataclass(slots=True)
class GrowingTree:
    """One slot of one stream. `pending`: committed tokens that are not in the KV cache yet; the last of them is the root."""

    open: Open
    tree: LivingTree
    growth: Ahead
    kv_slot: int
    pending: list[int]
    key: Key
    sent: int = 1  # first node id that no frame has carried
    rows_sent: set[int] = field(default_factory=set)
    told_rest: bool = False
    exhausted: bool = False  # the draft model's context is full
    compute_s: float = 0.0  # in draft forwards of this round
    owner: tuple[Hashable, int] = (0, 0)  # verifier, tenant
    source: Source | None = None  # of what the client expects
    history: History | None = None  # of the text, where penalties need it
    ranking: Sampling = field(default_factory=Sampling)  # what its rows are processed by
    guesses: dict[int, Guesses] = field(default_factory=dict)  # of every row, where `shares_bonus`
    allowed: bool = True  # its rounds may have trees

    @property
    def ratio(self) -> bool:
        return self.open.law.ratio

    @property
    def at_rest(self) -> bool:
        """Nothing that a round could verify comes before the next commit."""
        return self.exhausted or not self.allowed or self.growth.at_rest

    def path(self, node: int) -> list[int]:
        """Tokens from the root to a node."""
        record = self.tree.at(node)
        return [] if record is self.tree.root else [*self.path(record.parent), record.token]

    def foresee(self, tokens: Sequence[int]) -> None:
        """The text has grown by these tokens: lay the path that is expected now."""
        if self.source is not None:
            self.source.extend(tokens)
            self.growth.own.follow(best_path(self.source, self.open.max_depth))

    @property
    def shares_bonus(self) -> bool:
        """It guesses bonus tokens by the noise they are drawn with."""
        return self.open.bonus_key is not None and self.growth.bets.num_guesses > 0

    @property
    def betting(self) -> bool:
        """What is left to do is for rounds after the next."""
        return (self.told_rest or self.growth.own.looks_beyond) and not self.pending

    def allow(self, nodes: int) -> None:
        """Rounds verify no more nodes than these from now on."""
        own, most = self.growth.own, self.open.caps[0]
        self.allowed = nodes > 0
        if self.allowed:
            beyond = 0 if self.ratio else self.open.ahead_cap
            own.policy = replace(own.policy, node_cap=min(nodes + beyond, most), beyond=beyond)
