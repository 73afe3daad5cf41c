"""Growth of the draft trees of one drafter with a model: one draft forward per level, shared by all trees.

A level: choose rows (unread text first, otherwise frontier nodes) → one forward → processed distributions cut to K atoms and rounded to
integer weights → children drawn from exactly these weights → Grow frames. All of it runs on one thread, without streams.

The rows of a level are shared max-min fairly among verifiers, then among the tenants of each, then among their sessions.

Growth ahead (for rounds after the next) has one rule. The drafter measures how long it is idle between the end of a round's growth and the
next commit. If this is longer than the time of two levels, both averaged, it grows ahead in that time. Levels ahead contain no tree that
still has growth for its next round. Trees share the nodes ahead: a level that has begun delays the nodes of all rounds that end meanwhile,
and the more sessions there are, the more often one ends. Under ratio tests, of more than MOST_AHEAD trees none grows ahead. The decision
depends on clocks and the number of trees only, so algorithms.md 6.1 and 6.6 hold.

Legend: T nodes, V vocabulary, A candidate tokens of the noise, K atoms kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rootward.clock import Clock, SystemClock
from rootward.core.arrays import Floats, Ints
from rootward.core.distribution import DraftDistribution, integer_weights, rows_of
from rootward.core.frames import (
    MAX_FEATURES,
    Commit,
    Features,
    Grow,
    Launch,
    NeedSync,
    Open,
    OpenFeatures,
    Reject,
    prefix_hash,
)
from rootward.core.growth import Ahead, AheadBudget, BestFirst, growth_of, shared_order, strategy_of
from rootward.core.living_tree import ROOT, Fit, LivingTree
from rootward.core.lookup import Prediction, Source, best_path
from rootward.core.requests import DraftMode, Sampling
from rootward.core.rng import DrawWords, Key, Role
from rootward.demand import DrafterDemand
from rootward.engine.atoms import Atoms, Found, atoms_of, fetched, likely_tokens, reduced
from rootward.engine.noise import gumbel_of_tokens
from rootward.engine.processors import History, penalised, shifted
from rootward.ports import DraftModel, ModelInfo, Reduction, Rows

K = TypeVar("K")  # identifies a slot of a stream

CHAIN_IDS = 1 << 40  # first node id of text in the KV tree; ids of drawn nodes count up from 1 and stay below it
MAX_NODES = 240  # of a tree, growth ahead included: a KV slot has 256 cells beyond the context
COUPLED_CANDIDATES = 1024  # tokens of a row among which the noise of the target chooses
BONUS_CANDIDATES = 2048  # tokens of a row among which the bonus token is predicted
GREEDY_TEMPERATURE = 0.5  # of the draft distribution when the target decodes greedily; accepts more than 1 (measured)
AHEAD_LEVELS = 2  # growth ahead starts when the idle time exceeds the time of this many levels
MOST_AHEAD = 4  # trees under ratio tests that grow ahead; of more, most keep no node at a commit and delay their step
NEWEST_WEIGHT = 0.2  # of the newest measurement in an exponentially weighted mean


@dataclass(slots=True)
class GrowingTree:
    """The tree in one slot of one stream. `pending`: text that is not in the KV cache yet; its last token is the root."""

    open: Open
    tree: LivingTree
    growth: Ahead
    kv_slot: int
    pending: list[int]
    key: Key
    owner: tuple[Hashable, int]  # verifier, tenant
    unsent: int = 1  # id of the first node that no frame has carried
    rows_sent: set[int] = field(default_factory=set)
    rest_sent: bool = False  # the last frame said `at_rest`
    exhausted: bool = False  # the draft model's context is full
    compute_s: float = 0.0  # of draft forwards for the next round
    source: Source | None = None  # looks up continuations in the client's prediction
    history: History | None = None  # token counts of the text, for penalties
    sampling: Sampling = field(default_factory=Sampling)  # applied to the draft logits
    likely: dict[int, Ints] = field(default_factory=dict)  # rows of `Found.likely` by node, if `shares_bonus`
    bonus_key: int | None = None  # of the running round; None: no round runs at the present root, as far as is known
    nodes: int = 0  # most nodes that the next round verifies
    # For a draft head: features of the target before each of the first tokens of `pending`. Later tokens wait for theirs.
    features: NDArray[np.float32] | None = None
    wants_tree: bool = True  # the next round verifies a tree

    @property
    def ratio(self) -> bool:
        """Its nodes are verified by ratios p/q, so their draft distributions are sent."""
        return self.open.law.ratio

    @property
    def at_rest(self) -> bool:
        """No node that the next round could verify will be drawn before the next commit."""
        return self.exhausted or not self.wants_tree or self.growth.at_rest

    @property
    def shares_bonus(self) -> bool:
        """Bonus tokens are predicted with the noise that the verifier draws them with."""
        return self.ratio and self.growth.budget.num_predictions > 0

    @property
    def ahead(self) -> bool:
        """Only growth for rounds after the next is left."""
        return (self.rest_sent or self.growth.own.round_is_full) and not self.pending

    @property
    def num_readable(self) -> int:
        """Tokens of `pending` that can be read now."""
        return len(self.pending) if self.features is None else min(len(self.pending), len(self.features))

    @property
    def wants_level(self) -> bool:
        """The next level has rows of this tree, or its frame with `at_rest` is still to be sent."""
        if self.exhausted or not self.wants_tree:
            return not self.rest_sent
        return self.num_readable > 0 if self.pending else self.growth.busy or not self.rest_sent

    def wanted_rows(self, most: int) -> int:
        """Rows in the next level, at most `most`: of unread text or frontier nodes."""
        if self.exhausted or not self.wants_tree:
            return 0
        return min(self.num_readable, most) if self.pending else self.growth.wanted_rows(most)

    def path(self, node: int) -> list[int]:
        """Tokens from the root to a node."""
        record = self.tree.at(node)
        return [] if record is self.tree.root else [*self.path(record.parent), record.token]

    def add_features(self, first: int, rows: NDArray[np.float32]) -> None:
        """Add features of the tokens first, first + 1, … of the text. Earlier tokens whose features have not arrived get zeros."""
        if self.features is None:
            return
        at = first - (self.tree.length - len(self.pending))
        self.features = placed_features(self.features, rows, at=at, most=len(self.pending))

    def follow_prediction(self, tokens: Sequence[int]) -> None:
        """Extend the text by `tokens`; the tree then grows along the path that the client predicts after it."""
        if self.source is not None:
            self.source.extend(tokens)
            self.growth.own.follow(best_path(self.source, self.open.max_depth))

    def limit(self, nodes: int | None, *, ahead_share: float) -> None:
        """Set the most nodes that the next round verifies (None: unchanged), and the share of the nodes ahead that the tree may have."""
        own, (most, _) = self.growth.own, self.open.caps
        if nodes is not None:
            self.wants_tree, self.nodes = nodes > 0, nodes
        ahead = 0 if self.tree.restarts else int(ahead_share * self.open.ahead_cap)
        own.beyond = 0 if self.ratio else ahead
        own.node_cap = min(self.nodes + own.beyond if self.wants_tree else own.node_cap, most)
        self.growth.budget = replace(self.growth.budget, nodes=ahead if self.ratio else 0)


def placed_features(held: NDArray[np.float32], rows: NDArray[np.float32], *, at: int, most: int) -> NDArray[np.float32]:
    """Features of the first tokens of a text, `rows` being those of the tokens from `at` on: at most `most`, with zeros in a gap."""
    end = min(at, most)  # a peer may name any position
    gap = np.zeros((max(0, end - len(held)), held.shape[1]), np.float32)
    return np.concatenate([held, gap, rows[max(0, len(held) - at) :]])[:most]


class IdleTime:
    """Averages, in seconds, of the idle time between the end of a round's growth and the next commit, and of the time of a level."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self.idle_s = self.level_s = 0.0

    @property
    def allows_ahead(self) -> bool:
        return self.idle_s > AHEAD_LEVELS * self.level_s

    def record_level(self, seconds: float) -> None:
        self.level_s += (NEWEST_WEIGHT if self.level_s else 1.0) * (seconds - self.level_s)

    def begin(self) -> None:
        """Start of idle time: each tree has all nodes for its next round. Growth ahead counts as idle."""
        self._since = self._clock.now() if self._since is None else self._since

    def end(self) -> None:
        """End of idle time: a tree needs nodes for its next round."""
        if self._since is not None:
            seconds = self._clock.now() - self._since
            self.idle_s += (NEWEST_WEIGHT if self.idle_s else 1.0) * (seconds - self.idle_s)
            self._since = None


class Grower(Generic[K]):
    """The trees of a draft model, by key (of a slot of a stream). `incarnation` makes the draws of a restarted process independent.

    max_rows: most rows of a level. best_first: settings of best-first growth. group: the verifier that a key belongs to. ahead_budget:
    limits of growth ahead.
    """

    modes = tuple(DraftMode)

    def __init__(
        self,
        model: DraftModel,
        *,
        incarnation: int,
        max_rows: int = 256,
        best_first: BestFirst | None = None,
        group: Callable[[K], Hashable] = lambda _: 0,
        ahead_budget: AheadBudget | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.model, self.incarnation, self._group = model, incarnation, group
        self.max_rows = max_rows
        self.best_first, self.ahead_budget = best_first or BestFirst(), ahead_budget or AheadBudget()
        self.feature_size: int = getattr(model, "feature_size", 0)  # of a draft head (`engine.head_model`)
        self._no_features = np.zeros((0, self.feature_size), np.float32)
        # Of a block head: rows of the depths below the root, which come with each wanted row of text; 0: of nodes, one by one.
        self.num_marginals: int = getattr(model, "num_marginals", 0)
        self.demand = DrafterDemand(max_rows)
        self.trees: dict[K, GrowingTree] = {}
        self.idle_time = IdleTime(clock or SystemClock())
        self._draw_number = 0  # of the last level; never reset, so that no random words are reused

    @property
    def info(self) -> ModelInfo:
        return self.model.info

    # -- messages of the verifier -------------------------------------------------------------------------------------

    def open(self, key: K, message: Open) -> Reject | None:
        """Start a tree. Returns a Reject if the request is invalid or no slot is free."""
        if fault := self.fault(key, message):
            return Reject(message.slot, fault)
        if self.model.num_free_slots == 0:
            return Reject(message.slot, "no free slot", retry_after_ms=1000)
        self.idle_time.end()
        self.trees[key] = self._tree_of(key, message)
        self.trees[key].follow_prediction(message.prefix)
        return None

    def fault(self, key: K, message: Open) -> str:
        """Why the request is refused, whatever room there is; "" if it is valid."""
        info = self.model.info
        if key in self.trees:
            return "slot is open already; use a new number"
        if message.num_features > min(MAX_FEATURES, len(message.prefix)):
            return (
                f"num_features: {message.num_features}; send those of at most {MAX_FEATURES} tokens of the "
                f"{len(message.prefix)} in prefix"
            )
        if fault := message.fault(MAX_NODES):
            return fault
        if len(message.prefix) >= info.max_positions:
            return f"prefix of {len(message.prefix)} tokens does not fit the draft context of {info.max_positions}"
        if (largest := message.largest_token) >= info.vocab_size:
            return f"token {largest} is outside the draft vocabulary of {info.vocab_size}"
        return ""

    def add_features(self, key: K, message: OpenFeatures) -> Reject | None:
        """A part of the features that an Open has announced. Returns a Reject if they are not those of this model."""
        if (growing := self.trees.get(key)) is None:
            return None
        if fault := self.feature_fault(message.features):
            return Reject(message.slot, fault)
        self.idle_time.end()
        growing.add_features(message.first, message.features.rows)
        return None

    def feature_fault(self, features: Features) -> str:
        """Why features are not those of this model; "" if they are."""
        if features.size == self.feature_size:
            return ""
        return f"features: rows of {features.size} numbers; this drafter takes {self.feature_size or 'none'}, as its HelloAck says"

    def commit(self, key: K, message: Commit) -> list[Grow | NeedSync | Reject]:
        """Re-root a tree at the committed tokens. Returns the frame of nodes that were not sent yet, a resync request, or a Reject if the
        features are not those of this model."""
        growing = self.trees.get(key)
        if growing is None:  # closed, rejected or never opened; without an answer the verifier would wait
            return [NeedSync(message.slot, 0, 0)]
        tree = growing.tree
        if (answer := self.refusal(tree, message)) is not None:
            return answer
        self.idle_time.end()
        self.demand.round(growing.compute_s)
        growing.compute_s = 0.0
        unsent: list[Grow | NeedSync | Reject] = [self._frame(growing, 0)] if growing.unsent < tree.next_id else []
        for run in message.rounds:
            self._reroot(growing, run)
        # Features of earlier tokens that are missing now do not arrive any more.
        features = self._no_features if message.features is None else message.features.rows
        growing.add_features(tree.length - len(features), features)
        growing.limit(message.node_budget, ahead_share=self.ahead_share(len(self.trees), ratio=growing.ratio))
        if growing.history is not None:
            growing.history.extend(message.tokens)
        growing.follow_prediction(message.tokens)
        return unsent

    def refusal(self, tree: LivingTree, message: Commit) -> list[Grow | NeedSync | Reject] | None:
        """The answer to a commit that does not extend the text of this tree: nothing to a repetition. None: it does."""
        fit = tree.fit(message)
        if fit is Fit.KNOWN:
            return []
        if fit is Fit.LOST or max(message.tokens, default=0) >= self.info.vocab_size:
            return [NeedSync(message.slot, tree.length, tree.hash)]
        if message.features is not None and (fault := self.feature_fault(message.features)):
            return [Reject(message.slot, fault)]
        return None

    def launch(self, key: K, message: Launch) -> None:
        """The round at the present root runs: predictions of its bonus token can be made. Nothing if the tree has moved on or is closed."""
        growing = self.trees.get(key)
        if growing is not None and growing.tree.length == message.base_len:
            growing.bonus_key, growing.growth.launched = message.bonus_key, True

    def close(self, key: K) -> None:
        if (growing := self.trees.pop(key, None)) is not None:
            self.model.close(growing.kv_slot)

    def ahead_share(self, num_trees: int, *, ratio: bool) -> float:
        """Share of the requested nodes ahead that one of `num_trees` trees may have. ratio: the tree is verified by ratio tests."""
        if not self.idle_time.allows_ahead or (ratio and num_trees > MOST_AHEAD):
            return 0.0
        return 1.0 / num_trees

    # -- growth -------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not any(growing.wants_level for growing in self.trees.values())

    def level(self) -> list[tuple[K, Grow]]:
        """One draft forward for all trees that have rows. Returns the frames to send.

        One of each level, not one of a whole tree, whose time would depend on what the tree holds (docs/decisions/0030)."""
        start_s = time.monotonic()
        active = [(key, g) for key, g in self.trees.items() if g.wants_level]
        if not all(g.ahead for _, g in active):  # growth for the next rounds goes first
            active = [(key, g) for key, g in active if not g.ahead]
        self._run_level([g for _, g in active])
        frames: list[tuple[K, Grow]] = []
        for key, growing in active:
            if growing.unsent < growing.tree.next_id or (growing.at_rest and not growing.rest_sent):
                frames.append((key, self._frame(growing, int((time.monotonic() - start_s) * 1e6))))
        if self.trees and all(g.ahead or not g.wants_level for g in self.trees.values()):
            self.idle_time.begin()
        return frames

    def grow(self, keys: Sequence[K]) -> None:
        """Run levels for these trees only, until all are at rest. For callers that read the trees instead of frames."""
        trees = [self.trees[key] for key in keys]
        while active := [g for g in trees if not g.at_rest or (g.pending and g.wants_tree and not g.exhausted)]:
            self._run_level(active)
        for growing in trees:
            growing.unsent = growing.tree.next_id  # nothing is left for a frame

    def _run_level(self, active: list[GrowingTree]) -> None:
        """One forward and the draws from its rows."""
        start_s = time.monotonic()
        work = [entry for entry in self._rows(active) if len(entry[1].node)]
        if work:
            self._forward(work)
            self._account([(g, len(rows.node)) for g, rows, _ in work], time.monotonic() - start_s)
        for growing in active:
            if not growing.pending and growing.wants_tree:
                growing.growth.draw(self._words(growing))

    def _account(self, work: list[tuple[GrowingTree, int]], seconds: float) -> None:
        """Count rows and time of a level; rows of trees at rest are growth ahead. work: trees and their numbers of rows."""
        ahead = sum(rows for growing, rows in work if growing.ahead)
        self.demand.level(sum(rows for _, rows in work) - ahead, ahead, seconds)
        self.idle_time.record_level(seconds)
        for growing, _ in work:
            growing.compute_s += 0.0 if growing.ahead else seconds

    def _tree_of(self, key: K, message: Open) -> GrowingTree:
        info = self.model.info
        node_cap, ahead_cap = message.caps
        settings = replace(self.best_first, max_depth=message.max_depth, topk=message.topk)
        strategy = strategy_of(message.strategy, message.law, settings)
        tree = LivingTree(
            len(message.prefix),
            prefix_hash(message.prefix),
            vocab_size=info.vocab_size,
            node_cap=node_cap,
            eos_ids=message.eos_ids,
            ahead_cap=ahead_cap,
            restarts=strategy.restarts
            or self.feature_size > 0,  # a head reads its text again, with the target's features
            copies=message.law is DraftMode.IID,
        )
        likely: dict[int, Ints] = {}

        def predicted(node: int, row: DraftDistribution) -> Ints:
            if growing.bonus_key is None or node not in likely:
                return row.ids
            ids, mass = likely_tokens(likely[node])
            held = mass > 0.0
            return shared_order(growing.bonus_key, message.epoch, tree.at(node).depth, ids[held], mass[held])

        growth = Ahead(
            growth_of(tree, strategy, max_positions=info.max_positions, block=self.num_marginals > 0),
            self.ahead_budget,
            predicted,
        )
        kv_slot = self.model.open(message.prefix, salt=f"{message.tenant:x}/{message.cache_salt:x}")
        start = -max(1, message.num_features) if self.feature_size else self.model.length(kv_slot)
        text = list(message.prefix[start:])
        owner = self._group(key), message.tenant
        growing = GrowingTree(message, tree, growth, kv_slot, text, Key(message.seed, message.choice), owner)
        growing.likely, growing.sampling, growing.nodes = likely, draft_sampling(message.sampling), message.node_cap
        if message.prediction and max(message.prediction) < info.vocab_size and isinstance(strategy, BestFirst):
            growing.source = Prediction(message.prediction[: info.max_positions], prefix=message.num_prompt)
        if message.sampling.penalised:
            growing.history = History(message.prefix[: message.num_prompt], message.prefix[message.num_prompt :])
        share = self.ahead_share(len(self.trees) + 1, ratio=growing.ratio)
        growing.limit(message.node_budget, ahead_share=share)
        if self.feature_size:
            growing.features = self._no_features
            if not message.num_features:
                growing.add_features(tree.length, self._no_features)
        return growing

    def _reroot(self, growing: GrowingTree, tokens: Sequence[int]) -> None:
        """Commit the part of the path whose KV is cached; the rest becomes pending text."""
        growing.bonus_key = None
        expanded = growing.growth.expanded
        walked = growing.growth.commit(tokens)
        held = 0
        if not growing.pending and not self.feature_size:
            # A tree that restarts needs the draft distribution of its root, so the last token is read again.
            for node in walked[: len(walked) - growing.tree.restarts]:
                if node not in expanded:
                    break
                held += 1
            if held:
                last = walked[held - 1]
                assert last is not None
                self.model.commit(growing.kv_slot, last, keep_below=True)
        growing.pending += [int(t) for t in tokens[held:]]
        alive = growing.growth.expanded
        self.model.release(growing.kv_slot, () if growing.pending else alive)
        for node in growing.likely.keys() - alive:  # in place: `Ahead` reads the same dict
            del growing.likely[node]
        growing.rows_sent = {
            n for n in growing.rows_sent if n in growing.tree.nodes or n == growing.tree.root_id != ROOT
        }
        growing.rest_sent = False
        growing.exhausted = growing.tree.length >= self.model.info.max_positions

    # -- one forward --------------------------------------------------------------------------------------------------

    def _rows(self, active: list[GrowingTree]) -> list[tuple[GrowingTree, Rows, list[int]]]:
        """(tree, rows of the forward, nodes to expand from its logits) of each tree; pending text before frontier nodes."""
        wanted = [growing.wanted_rows(self.max_rows) for growing in active]
        shares = fair_shares(wanted, [growing.owner for growing in active], self.max_rows)
        work: list[tuple[GrowingTree, Rows, list[int]]] = []
        for growing, share in zip(active, shares, strict=True):
            if growing.exhausted or not growing.wants_tree:
                continue
            if growing.pending:
                chunk = growing.pending[: min(share, growing.num_readable)]
                whole = len(chunk) == len(growing.pending)
                features = None if growing.features is None else growing.features[: len(chunk)]
                rows = Rows.chain(growing.kv_slot, CHAIN_IDS, chunk, features)
                work.append((growing, rows, [growing.tree.root_id] if whole else []))
            else:
                nodes = growing.growth.frontier(share)
                if self.feature_size:  # the forward of a node gives the features of its children
                    known = {ROOT, *growing.growth.own.rows}
                    nodes = [n for n in nodes if growing.tree.nodes[n].parent in known]
                work.append((growing, self._frontier_rows(growing, nodes), nodes))
        return work

    def _frontier_rows(self, growing: GrowingTree, nodes: list[int]) -> Rows:
        records = [growing.tree.nodes[n] for n in nodes]
        parent = [-1 if r.parent in (ROOT, growing.tree.root_id) else r.parent for r in records]
        columns = np.array([nodes, parent, [r.token for r in records]], dtype=np.int64)
        return Rows(growing.kv_slot, *columns)

    def _forward(self, work: list[tuple[GrowingTree, Rows, list[int]]]) -> None:
        """One forward, after which the nodes are expanded. The host does its KV bookkeeping while the device computes, then waits once."""
        chains = [bool(g.pending) for g, _, _ in work]
        num_logits = [1 if chain else len(rows.node) for chain, (_, rows, _) in zip(chains, work, strict=True)]
        pending: list[PendingRow] = []
        at, width = 0, max(1, self.num_marginals)
        for (growing, _, nodes), num in zip(work, num_logits, strict=True):
            for i, node in enumerate(nodes):
                first = (at + i) * width
                pending += [PendingRow(first + below, growing, node, below) for below in range(width)]
            at += num
        expand = launch_forward(self.model, [rows for _, rows, _ in work], num_logits, pending)
        for (growing, rows, _), chain in zip(work, chains, strict=True):
            if chain:
                self.model.commit(growing.kv_slot, int(rows.node[-1]), keep_below=False)
                del growing.pending[: len(rows.node)]
                if growing.features is not None:
                    growing.features = growing.features[len(rows.node) :]
        expand()

    def _words(self, growing: GrowingTree) -> DrawWords:
        """Random words for the draws of the next level."""
        self._draw_number += 1
        return DrawWords(growing.key, self.incarnation, self._draw_number)

    def _frame(self, growing: GrowingTree, draft_us: int) -> Grow:
        """All nodes drawn since the last frame, in draw order, with the draft distributions that were not sent yet."""
        tree = growing.tree
        ids = [n for n in range(growing.unsent, tree.next_id) if n in tree.nodes]
        records = [tree.nodes[n] for n in ids]
        rows = {}
        for record in records:
            parent = tree.at(record.parent)
            parent_id = tree.root_id if record.parent == ROOT else record.parent
            if growing.ratio and not record.guess and parent.row is not None and parent_id not in growing.rows_sent:
                growing.rows_sent.add(parent_id)
                rows[record.parent] = parent.row
        first, growing.unsent = growing.unsent, tree.next_id
        growing.rest_sent = growing.at_rest
        return Grow(
            growing.open.slot,
            tree.length,
            tree.hash,
            first,
            np.array([r.parent for r in records], dtype=np.int64),
            np.array([r.token for r in records], dtype=np.int64),
            np.array([r.sampled for r in records], dtype=np.bool_),
            rows,
            growing.rest_sent,
            draft_us,
            guess=np.array([r.guess for r in records], dtype=np.bool_) if growing.open.ahead_cap else None,
        )


# -- from a forward to draft distributions, all nodes of one kind at once -----------------------------------------------
#
# A draft distribution that ratio tests read is sent: its K atoms must be the same on both sides, so they are ranked exactly. Under coupled
# noise nodes are only matched: their distributions are not sent and need no order, but the noise chooses among many more candidates,
# because the target's token is often an unlikely one. The same holds for predicted bonus tokens, and a round may stop at any node.
# A level whose nodes are all of one kind is reduced to atoms within the forward; in both cases the host waits once.


class PendingRow(NamedTuple):
    """A node that is to be expanded with the draft distribution in a row of the forward.

    below  for a block head: the row is the distribution after every node so many levels below `node`
    """

    row: int
    growing: GrowingTree
    node: int
    below: int = 0

    def expand(self, row: DraftDistribution, noise: Floats | None = None) -> None:
        """Give the tree the distribution of the row. Those of one node come in order of depth."""
        if self.below:
            self.growing.growth.expand_below(row, noise)
        else:
            self.growing.growth.expand(self.node, row, noise)

    @property
    def coupled(self) -> bool:
        return self.growing.open.law is DraftMode.COUPLED

    @property
    def num_candidates(self) -> int:
        """Tokens among which the noise chooses; 0 without shared noise."""
        return COUPLED_CANDIDATES if self.coupled else BONUS_CANDIDATES if self.growing.shares_bonus else 0


@torch.inference_mode()
def launch_forward(
    model: DraftModel, batch: Sequence[Rows], num_logits: Sequence[int], pending: Sequence[PendingRow]
) -> Callable[[], None]:
    """Start a forward. The returned function waits for it and expands the nodes."""
    kinds: dict[tuple[bool, int], list[PendingRow]] = {}
    for pending_row in pending:
        kinds.setdefault((pending_row.coupled, pending_row.num_candidates), []).append(pending_row)
    groups = list(kinds.values())
    reductions = [_reduction_of(group, model.info.vocab_size) for group in groups]
    if (
        len(groups) == 1
        and len(pending) == sum(num_logits) * max(1, getattr(model, "num_marginals", 0))
        and not any(_has_logit_edits(pending_row.growing) for pending_row in pending)
    ):
        parts = [model.forward(batch, num_logits=num_logits, reduction=reductions[0][1])]
    else:
        logits_TV = model.forward(batch, num_logits=num_logits)
        parts = [
            reduced(_edited_logits(group, logits_TV), reduction)
            for group, (_, reduction) in zip(groups, reductions, strict=True)
        ]

    def expand() -> None:
        tables = fetched(parts)
        for group, (kind, _), table in zip(groups, reductions, tables, strict=True):
            _expand(group, kind.read(table))

    return expand


def _reduction_of(group: Sequence[PendingRow], vocab: int) -> tuple[Atoms, Reduction]:
    """The reduction of logits to atoms for rows of one kind."""
    num_atoms = 0 if group[0].coupled else max(pending_row.growing.open.num_atoms for pending_row in group)
    return atoms_of([pending_row.growing.sampling for pending_row in group], vocab, num_atoms, group[0].num_candidates)


def _expand(group: Sequence[PendingRow], found: Found) -> None:
    if group[0].coupled:
        _expand_coupled(group, found)
        return
    rows = rows_of(found.ids, found.weight, [pending_row.growing.open.num_atoms for pending_row in group])
    for pending_row, row in zip(group, rows, strict=True):
        pending_row.expand(row)
    if group[0].num_candidates:
        for pending_row, likely in zip(group, found.likely, strict=True):
            if not pending_row.below:
                # A copy: a view would hold the rows of the whole level.
                pending_row.growing.likely[pending_row.node] = likely.copy()


def coupled_rows(
    ids_TA: Ints, mass_TA: Floats, at: Sequence[tuple[Key, int]], num_atoms: Sequence[int]
) -> list[tuple[DraftDistribution, Floats]]:
    """For each node the K atoms that the noise at its (key, position) favours, with their noise float64[K].

    ids_TA, mass_TA: candidate tokens and their unnormalised mass; num_atoms: K of each node."""
    noise_TA = gumbel_of_tokens(Role.TARGET, [(key, 0, position) for key, position in at], ids_TA)
    with np.errstate(divide="ignore"):
        perturbed_TA = np.log(mass_TA) + noise_TA
    rows: list[tuple[DraftDistribution, Floats]] = []
    for ids, mass, noise, perturbed, most in zip(ids_TA, mass_TA, noise_TA, perturbed_TA, num_atoms, strict=True):
        best = np.argpartition(-perturbed, most - 1)[:most] if most < len(ids) else np.arange(len(ids))
        best = best[mass[best] > 0.0]
        weight = integer_weights(mass[None, best])[0]
        order = np.lexsort((ids[best], -weight))
        (row,) = rows_of(ids[None, best[order]], weight[None, order], [most])
        rows.append((row, noise[best[order]]))
    return rows


def _expand_coupled(group: Sequence[PendingRow], found: Found) -> None:
    trees = [pending_row.growing for pending_row in group]
    at = [(g.key, g.tree.at(row.node).depth + row.below) for g, row in zip(trees, group, strict=True)]
    rows = coupled_rows(*likely_tokens(found.likely), at, [g.open.num_atoms for g in trees])
    for pending_row, (row, noise) in zip(group, rows, strict=True):
        pending_row.expand(row, noise)


def draft_sampling(target_sampling: Sampling) -> Sampling:
    """The sampling parameters of the draft logits for a target with these ones."""
    if not target_sampling.greedy:
        return target_sampling
    return replace(target_sampling, temperature=GREEDY_TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0)


def _has_logit_edits(growing: GrowingTree) -> bool:
    return growing.history is not None or growing.sampling.shifted


def _edited_logits(group: Sequence[PendingRow], logits_TV: torch.Tensor) -> torch.Tensor:
    """Logits of the group with the edits of the request (allowed tokens, bias, penalties), each row for the text of its node."""
    if len(group) < len(logits_TV):
        logits_TV = logits_TV.index_select(0, _row_index([pending_row.row for pending_row in group], logits_TV))
    logits_TV = shifted(logits_TV, [pending_row.growing.sampling for pending_row in group])
    rows_of_tree: dict[int, list[int]] = {}
    for i, pending_row in enumerate(group):
        if pending_row.growing.history is not None:
            rows_of_tree.setdefault(pending_row.growing.kv_slot, []).append(i)
    if rows_of_tree:
        logits_TV = logits_TV.clone()
    for own_rows in rows_of_tree.values():
        growing = group[own_rows[0]].growing
        assert growing.history is not None
        paths = [growing.path(group[i].node) for i in own_rows]
        rows = _row_index(own_rows, logits_TV)
        edited = penalised(logits_TV.index_select(0, rows), growing.open.sampling, growing.history, paths)
        logits_TV.index_copy_(0, rows, edited.to(logits_TV.dtype))
    return logits_TV


def _row_index(rows: list[int], logits_TV: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(rows)).to(logits_TV.device, non_blocking=True)


# -- shares of a level ------------------------------------------------------------------------------------------------


def max_min(wants: Sequence[int], total: int) -> list[int]:
    """Max-min fair integer shares of `total`: none exceeds its want, and only a share equal to its want is smaller than another."""
    shares, left = [0] * len(wants), total
    for served, i in enumerate(sorted(range(len(wants)), key=lambda i: wants[i])):
        shares[i] = min(wants[i], left // (len(wants) - served))
        left -= shares[i]
    return shares


def fair_shares(wants: Sequence[int], owners: Sequence[tuple[Hashable, ...]], rows: int) -> list[int]:
    """Rows of a level for each tree, max-min fair at each level of ownership. owners: (verifier, tenant) of each tree.

    A tree that wants rows gets at least one, so the sum may exceed `rows`.
    """
    return [max(share, min(want, 1)) for share, want in zip(_nested_shares(wants, owners, rows), wants, strict=True)]


def _nested_shares(wants: Sequence[int], owners: Sequence[tuple[Hashable, ...]], rows: int) -> list[int]:
    """Max-min fair among the first owners, then among what each of them owns."""
    if not owners or not owners[0]:
        return max_min(wants, rows)
    groups: dict[Hashable, list[int]] = {}
    for i, owner in enumerate(owners):
        groups.setdefault(owner[0], []).append(i)
    totals = max_min([sum(wants[i] for i in group) for group in groups.values()], rows)
    shares = [0] * len(wants)
    for group, total in zip(groups.values(), totals, strict=True):
        own = _nested_shares([wants[i] for i in group], [owners[i][1:] for i in group], total)
        for i, share in zip(group, own, strict=True):
            shares[i] = share
    return shares
