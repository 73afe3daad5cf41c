"""All living trees of one drafter with a model: one draft forward per level for the frontiers of every tree.

A level: choose rows (text to read first, else the frontier) → ONE forward → processed laws cut to K atoms and rounded to integers
→ children drawn from exactly those integers → Grow frames. Everything here runs on one thread and knows nothing of streams.

Rows of a level are shared max-min: verifiers alike, then the tenants of each, then their sessions.

Growth ahead has one rule. The drafter measures how long it has nothing to grow between the end of a round's growth and the next commit. If
that is longer than two of its levels, on average, it grows for the rounds after the next meanwhile, in levels of their own: no session
that waits for growth shares a level with one that does not. Nothing but clocks decides, so algorithms.md 6.1 and 6.6 hold.

Legend: T nodes, V vocabulary, A atoms that the noise chooses among, K atoms kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from rootward.clock import Clock, SystemClock
from rootward.core.arrays import Floats, Ints
from rootward.core.distribution import DraftDistribution, integer_weights, rows_of
from rootward.core.frames import Commit, Features, Grow, NeedSync, Open, Reject, prefix_hash
from rootward.core.growth import Ahead, AheadBudget, BestFirst, growth_of, shared_order, strategy_of
from rootward.core.living_tree import ROOT, Fit, LivingTree
from rootward.core.lookup import Prediction, Source, best_path
from rootward.core.requests import DraftMode, Sampling
from rootward.core.rng import BonusKey, DrawWords, Key, target_gumbel_batch
from rootward.demand import DrafterDemand
from rootward.engine.atoms import Atoms, Found, atoms_of, fetched, likely_tokens, reduced
from rootward.engine.processors import History, penalised, shifted
from rootward.ports import LanguageModel, ModelInfo, Reduction, Rows

K = TypeVar("K")  # what names a slot of a stream

CHAIN_IDS = 1 << 40  # node ids of text in the KV tree; drawn nodes count up from 1 and never get there
MAX_NODES = 240  # of a tree with growth ahead, whatever a verifier asks for: a KV slot has 256 cells beyond the context
MATCH_ATOMS = 1024  # of a row, among which the noise of the target chooses
GUESS_ATOMS = 2048  # of a row, among which the bonus token is predicted
GREEDY_TEMPERATURE = 0.5  # by which chosen trees rank when the target decodes greedily: better than 1 (measured)
AHEAD_LEVELS = 2  # the drafter grows ahead if it is idle for longer than so many of its levels
MEMORY = 0.2  # weight of the newest measurement


class LikelyBonus:
    """Tokens that may come after a node where a round stops, by the noise of the bonus token. Few nodes are asked, so the order is made
    only then: until then tokens and their mass are kept (16 KiB a node), afterwards the best tokens alone."""

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
    """One slot of one stream. `pending`: text that is not in the KV cache yet; the last token of it is the root."""

    open: Open
    tree: LivingTree
    growth: Ahead
    kv_slot: int
    pending: list[int]
    key: Key
    owner: tuple[Hashable, int]  # verifier, tenant
    sent: int = 1  # first node id that no frame has carried
    rows_sent: set[int] = field(default_factory=set)
    told_rest: bool = False
    exhausted: bool = False  # the draft model's context is full
    compute_s: float = 0.0  # in draft forwards of this round
    source: Source | None = None  # of what the client expects
    history: History | None = None  # of the text, where penalties need it
    ranking: Sampling = field(default_factory=Sampling)  # what its rows are processed by
    likely: dict[int, LikelyBonus] = field(default_factory=dict)  # by node, where `shares_bonus`
    nodes: int = 0  # that the next round may verify
    features: Features = None  # of `pending`, for a draft head
    allowed: bool = True  # its rounds may have trees

    @property
    def ratio(self) -> bool:
        return self.open.law.ratio

    @property
    def at_rest(self) -> bool:
        """Nothing that a round could verify comes before the next commit."""
        return self.exhausted or not self.allowed or self.growth.at_rest

    @property
    def shares_bonus(self) -> bool:
        """It predicts bonus tokens by the noise they are drawn with."""
        return self.open.bonus_key is not None and self.growth.budget.num_predictions > 0

    @property
    def ahead(self) -> bool:
        """What is left to do is for rounds after the next."""
        return (self.told_rest or self.growth.own.round_is_full) and not self.pending

    @property
    def wants_level(self) -> bool:
        if self.exhausted or not self.allowed:
            return not self.told_rest
        return bool(self.pending) or self.growth.busy or not self.told_rest

    def wanted_rows(self, most: int, chunk: int) -> int:
        if self.exhausted or not self.allowed:
            return 0
        return min(len(self.pending), chunk) if self.pending else self.growth.wanted_rows(most)

    def path(self, node: int) -> list[int]:
        """Tokens from the root to a node."""
        record = self.tree.at(node)
        return [] if record is self.tree.root else [*self.path(record.parent), record.token]

    def follow_prediction(self, tokens: Sequence[int]) -> None:
        """The text has grown by these tokens: lay the path that the client expects now."""
        if self.source is not None:
            self.source.extend(tokens)
            self.growth.own.follow(best_path(self.source, self.open.max_depth))

    def limit(self, nodes: int | None, *, ahead: bool) -> None:
        """For the next round: most nodes that it verifies (None: as before), and whether growth goes on after them."""
        own, (most, ahead_cap) = self.growth.own, self.open.caps
        if nodes is not None:
            self.allowed, self.nodes = nodes > 0, nodes
        own.beyond = self.open.ahead_cap if ahead and not self.ratio and not self.tree.restarts else 0
        if self.allowed:
            own.node_cap = min(self.nodes + own.beyond, most)
        self.growth.budget = replace(self.growth.budget, nodes=ahead_cap if ahead and not self.tree.restarts else 0)


class IdleTime:
    """How long the drafter has nothing to grow between the end of a round's growth and the next commit, and how long a level takes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self.idle_s = self.level_s = 0.0

    @property
    def allows_ahead(self) -> bool:
        return self.idle_s > AHEAD_LEVELS * self.level_s

    def level_took(self, seconds: float) -> None:
        self.level_s += (MEMORY if self.level_s else 1.0) * (seconds - self.level_s)

    def begins(self) -> None:
        """Every tree has what its next round may verify. Growth ahead does not end this."""
        self._since = self._clock.now() if self._since is None else self._since

    def ends(self) -> None:
        """Something waits for growth."""
        if self._since is not None:
            seconds = self._clock.now() - self._since
            self.idle_s += (MEMORY if self.idle_s else 1.0) * (seconds - self.idle_s)
            self._since = None


class Grower(Generic[K]):
    """Trees by key (whatever names a slot of a stream). `incarnation` keeps draws of a restarted process apart.

    best_first: settings of best-first growth; group: the verifier of a key.
    """

    modes = tuple(DraftMode)

    def __init__(
        self,
        model: LanguageModel,
        *,
        incarnation: int,
        max_rows: int = 256,
        prefill_chunk: int = 256,
        best_first: BestFirst | None = None,
        group: Callable[[K], Hashable] = lambda _: 0,
        ahead_budget: AheadBudget | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.model, self.incarnation, self._group = model, incarnation, group
        self.max_rows, self.prefill_chunk = max_rows, prefill_chunk
        self.best_first, self.ahead_budget = best_first or BestFirst(), ahead_budget or AheadBudget()
        self.feature_size: int = getattr(model, "feature_size", 0)  # of a draft head (`engine.head_model`)
        self.demand = DrafterDemand(max_rows)
        self.trees: dict[K, GrowingTree] = {}
        self.idle_time = IdleTime(clock or SystemClock())
        self._draw_number = 0  # of the last level: counts over the life of the process, so that none is used twice

    @property
    def info(self) -> ModelInfo:
        return self.model.info

    # -- messages of the verifier -------------------------------------------------------------------------------------

    def open(self, key: K, message: Open) -> Reject | None:
        """Start a tree; the answer is a Reject when it cannot be taken."""
        if fault := self._fault(key, message):
            return Reject(message.slot, fault)
        if self.model.num_free_slots == 0:
            return Reject(message.slot, "no free slot", retry_after_ms=1000)
        self.idle_time.ends()
        self.trees[key] = self._tree_of(key, message)
        self.trees[key].follow_prediction(message.prefix)
        return None

    def _fault(self, key: K, message: Open) -> str:
        info = self.model.info
        if key in self.trees:
            return "slot is open already; use a new number"
        if fault := message.fault(MAX_NODES):
            return fault
        if len(message.prefix) >= info.max_positions:
            return f"prefix of {len(message.prefix)} tokens does not fit the draft context of {info.max_positions}"
        if (largest := message.largest_token) >= info.vocab_size:
            return f"token {largest} is outside the draft vocabulary of {info.vocab_size}"
        try:
            message.strategy.check_mode(message.law)
        except ValueError as wrong:
            return str(wrong)
        return ""

    def commit(self, key: K, message: Commit) -> list[Grow | NeedSync]:
        """The text advanced. The answer: what was drawn under the old base and not sent yet; or a resync request."""
        growing = self.trees.get(key)
        if growing is None:  # closed, refused or never opened: its verifier should not wait for it
            return [NeedSync(message.slot, 0, 0)]
        tree = growing.tree
        fit = tree.fit(message)
        if fit is Fit.KNOWN:
            return []
        if fit is Fit.LOST or max(message.tokens, default=0) >= self.model.info.vocab_size:
            return [NeedSync(message.slot, tree.length, tree.hash)]
        self.idle_time.ends()
        self.demand.round(growing.compute_s)
        growing.compute_s = 0.0
        unsent: list[Grow | NeedSync] = [self._frame(growing, 0)] if growing.sent < tree.next_id else []
        for run in message.rounds:
            self._reroot(growing, run)
        self._add_features(growing, message.features)
        growing.limit(message.node_budget, ahead=self.idle_time.allows_ahead)
        if growing.history is not None:
            growing.history.extend(message.tokens)
        growing.follow_prediction(message.tokens)
        return unsent

    def close(self, key: K) -> None:
        if (growing := self.trees.pop(key, None)) is not None:
            self.model.close(growing.kv_slot)

    # -- growth -------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not any(growing.wants_level for growing in self.trees.values())

    def level(self) -> list[tuple[K, Grow]]:
        """One draft forward for all trees that can use one; the frames it makes."""
        start_s = time.monotonic()
        active = [(key, g) for key, g in self.trees.items() if g.wants_level]
        if not all(g.ahead for _, g in active):  # what the next rounds may verify goes first
            active = [(key, g) for key, g in active if not g.ahead]
        self._run_level([g for _, g in active])
        frames: list[tuple[K, Grow]] = []
        for key, growing in active:
            if growing.sent < growing.tree.next_id or (growing.at_rest and not growing.told_rest):
                frames.append((key, self._frame(growing, int((time.monotonic() - start_s) * 1e6))))
        if self.trees and all(g.ahead or not g.wants_level for g in self.trees.values()):
            self.idle_time.begins()
        return frames

    def grow(self, keys: Sequence[K]) -> None:
        """Levels for these trees alone, until all are at rest. For an owner who reads the trees themselves, not their frames."""
        trees = [self.trees[key] for key in keys]
        while active := [g for g in trees if not g.at_rest or (g.pending and g.allowed and not g.exhausted)]:
            self._run_level(active)

    def _run_level(self, active: list[GrowingTree]) -> None:
        """One forward, and what is drawn after it."""
        start_s = time.monotonic()
        work = [entry for entry in self._rows(active) if len(entry[1].node)]
        if work:
            self._forward(work)
            self._account([(g, len(rows.node)) for g, rows, _ in work], time.monotonic() - start_s)
        for growing in active:
            if not growing.pending and growing.allowed:
                growing.growth.draw(self._words(growing))

    def _account(self, work: list[tuple[GrowingTree, int]], seconds: float) -> None:
        """Rows after the tree has come to rest are growth ahead."""
        ahead = sum(rows for growing, rows in work if growing.ahead)
        self.demand.level(sum(rows for _, rows in work) - ahead, ahead, seconds)
        self.idle_time.level_took(seconds)
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
        likely: dict[int, LikelyBonus] = {}

        def predicted(node: int, row: DraftDistribution) -> Ints:
            if message.bonus_key is None or node not in likely:
                return row.ids
            return likely[node].best(BonusKey(message.bonus_key), message.epoch, tree.at(node).depth)

        growth = Ahead(growth_of(tree, strategy, max_positions=info.max_positions), self.ahead_budget, predicted)
        kv_slot = self.model.open(message.prefix, salt=f"{message.tenant:x}/{message.cache_salt:x}")
        known = 0 if message.features is None else len(message.features)
        text = list(message.prefix[-max(1, known) if self.feature_size else self.model.length(kv_slot) :])
        owner = self._group(key), message.tenant
        growing = GrowingTree(message, tree, growth, kv_slot, text, Key(message.seed, message.choice), owner)
        growing.likely, growing.ranking, growing.nodes = likely, ranking(message.sampling), message.node_cap
        if message.prediction and max(message.prediction) < info.vocab_size and isinstance(strategy, BestFirst):
            growing.source = Prediction(message.prediction[: info.max_positions], prefix=message.num_prompt)
        if message.sampling.penalised:
            growing.history = History(message.prefix[: message.num_prompt], message.prefix[message.num_prompt :])
        growing.limit(message.node_budget, ahead=self.idle_time.allows_ahead)
        self._add_features(growing, message.features)
        return growing

    def _add_features(self, growing: GrowingTree, features: Features) -> None:
        """Those of the last pending tokens. Features that are missing are zero: that costs acceptance only."""
        if not (size := self.feature_size):
            return
        parts = [part for part in (growing.features, features) if part is not None]
        missing = len(growing.pending) - sum(map(len, parts))
        if missing > 0:
            parts.insert(len(parts) - (features is not None), np.zeros((missing, size), np.float32))
        growing.features = np.concatenate(parts)[-len(growing.pending) :]

    def _reroot(self, growing: GrowingTree, tokens: Sequence[int]) -> None:
        """Commit the part of the path whose KV is there; the rest becomes text to read."""
        expanded = growing.growth.expanded
        walked = growing.growth.commit(tokens)
        held = 0
        if not growing.pending and not self.feature_size:
            # A tree that starts anew needs the row of its root, so the last token is read again.
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
        for node in growing.likely.keys() - alive:  # the table is the one that `Ahead` reads
            del growing.likely[node]
        growing.rows_sent = {
            n for n in growing.rows_sent if n in growing.tree.nodes or n == growing.tree.root_id != ROOT
        }
        growing.told_rest = False
        growing.exhausted = growing.tree.length >= self.model.info.max_positions

    # -- one forward --------------------------------------------------------------------------------------------------

    def _rows(self, active: list[GrowingTree]) -> list[tuple[GrowingTree, Rows, list[int]]]:
        """Text, then frontiers under a fair share of the row budget. nodes: the tree nodes whose rows come back."""
        wanted = [growing.wanted_rows(self.max_rows, self.prefill_chunk) for growing in active]
        shares = dealt(wanted, [growing.owner for growing in active], self.max_rows)
        work: list[tuple[GrowingTree, Rows, list[int]]] = []
        for growing, share in zip(active, shares, strict=True):
            if growing.exhausted or not growing.allowed:
                continue
            if growing.pending:
                chunk = growing.pending[:share]
                whole = len(chunk) == len(growing.pending)
                features = None if growing.features is None else growing.features[:share]
                rows = Rows.chain(growing.kv_slot, CHAIN_IDS, chunk, features)
                work.append((growing, rows, [growing.tree.root_id] if whole else []))
            else:
                nodes = growing.growth.frontier(share)
                work.append((growing, self._frontier_rows(growing, nodes), nodes))
        return work

    def _frontier_rows(self, growing: GrowingTree, nodes: list[int]) -> Rows:
        records = [growing.tree.nodes[n] for n in nodes]
        parent = [-1 if r.parent in (ROOT, growing.tree.root_id) else r.parent for r in records]
        columns = np.array([nodes, parent, [r.token for r in records]], dtype=np.int64)
        return Rows(growing.kv_slot, *columns)

    def _forward(self, work: list[tuple[GrowingTree, Rows, list[int]]]) -> None:
        """One forward, and the rows that it makes known. The host waits for it once, when there is nothing else to do."""
        chains = [bool(g.pending) for g, _, _ in work]
        num_logits = [1 if chain else len(rows.node) for chain, (_, rows, _) in zip(chains, work, strict=True)]
        asked: list[Asked] = []
        at = 0
        for (growing, _, nodes), num in zip(work, num_logits, strict=True):
            asked += [Asked(at + i, growing, node) for i, node in enumerate(nodes)]
            at += num
        expand = launch(self.model, [rows for _, rows, _ in work], num_logits, asked)
        for (growing, rows, _), chain in zip(work, chains, strict=True):
            if chain:
                self.model.commit(growing.kv_slot, int(rows.node[-1]), keep_below=False)
                del growing.pending[: len(rows.node)]
                if growing.features is not None:
                    growing.features = growing.features[len(rows.node) :]
        expand()

    def _words(self, growing: GrowingTree) -> DrawWords:
        """For all draws of a level."""
        self._draw_number += 1
        return DrawWords(growing.key, self.incarnation, self._draw_number)

    def _frame(self, growing: GrowingTree, draft_us: int) -> Grow:
        """Everything drawn since the last frame, in draw order, with rows that have not travelled yet."""
        tree = growing.tree
        ids = [n for n in range(growing.sent, tree.next_id) if n in tree.nodes]
        records = [tree.nodes[n] for n in ids]
        rows = {}
        for record in records:
            parent = tree.at(record.parent)
            name = tree.root_id if record.parent == ROOT else record.parent
            if growing.ratio and not record.guess and parent.row is not None and name not in growing.rows_sent:
                growing.rows_sent.add(name)
                rows[record.parent] = parent.row
        first, growing.sent = growing.sent, tree.next_id
        growing.told_rest = growing.at_rest
        return Grow(
            growing.open.slot,
            tree.length,
            tree.hash,
            first,
            np.array([r.parent for r in records], dtype=np.int64),
            np.array([r.token for r in records], dtype=np.int64),
            np.array([r.sampled for r in records], dtype=np.bool_),
            rows,
            growing.told_rest,
            draft_us,
            guess=np.array([r.guess for r in records], dtype=np.bool_) if growing.open.ahead_cap else None,
        )


# -- from a forward to the distributions that trees grow from, all nodes of one kind at once --------------------------
#
# A row that ratio tests look at is declared: its K atoms are those on which both sides agree, so they are ranked with care. What grows
# under shared noise is only matched. Its row does not travel and needs no order, but many more atoms before the noise speaks, for the
# target's own token is often an unlikely one. The same goes for predicted bonus tokens, and any node may be one where a round stops.
# A level whose nodes are all of one kind is reduced to atoms in the forward itself; whichever way, the host waits once.


class Asked(NamedTuple):
    """A node that waits for a row of a forward."""

    row: int
    growing: GrowingTree
    node: int

    @property
    def matched(self) -> bool:
        return self.growing.open.law is DraftMode.COUPLED

    @property
    def num_likely(self) -> int:
        """Atoms for the noise to choose among."""
        return MATCH_ATOMS if self.matched else GUESS_ATOMS if self.growing.shares_bonus else 0


@torch.inference_mode()
def launch(
    model: LanguageModel, batch: Sequence[Rows], num_logits: Sequence[int], asked: Sequence[Asked]
) -> Callable[[], None]:
    """Run a forward. What comes back waits for it and expands the nodes."""
    kinds: dict[tuple[bool, int], list[Asked]] = {}
    for one in asked:
        kinds.setdefault((one.matched, one.num_likely), []).append(one)
    groups = list(kinds.values())
    wanted = [_wanted(group, model.info.vocab_size) for group in groups]
    if len(groups) == 1 and len(asked) == sum(num_logits) and not any(_is_edited(one.growing) for one in asked):
        parts = [model.forward(batch, num_logits=num_logits, reduction=wanted[0][1])]
    else:
        logits_TV = model.forward(batch, num_logits=num_logits)
        parts = [
            reduced(_edited(group, logits_TV), reduction) for group, (_, reduction) in zip(groups, wanted, strict=True)
        ]

    def expand() -> None:
        tables = fetched(parts)
        for group, (kind, _), table in zip(groups, wanted, tables, strict=True):
            _expand(group, kind.read(table))

    return expand


def _wanted(group: Sequence[Asked], vocab: int) -> tuple[Atoms, Reduction]:
    """What is to be known of rows of one kind."""
    num_atoms = 0 if group[0].matched else max(one.growing.open.num_atoms for one in group)
    return atoms_of([one.growing.ranking for one in group], vocab, num_atoms, group[0].num_likely)


def _expand(group: Sequence[Asked], found: Found) -> None:
    if group[0].matched:
        _expand_matched(group, found)
        return
    rows = rows_of(found.ids, found.weight, [one.growing.open.num_atoms for one in group])
    for one, row in zip(group, rows, strict=True):
        one.growing.growth.expand(one.node, row)
    if group[0].num_likely:
        for one, likely in zip(group, found.likely, strict=True):
            one.growing.likely[one.node] = LikelyBonus(likely)


def matched_rows(
    ids_TA: Ints, mass_TA: Floats, at: Sequence[tuple[Key, int]], num_atoms: Sequence[int]
) -> list[tuple[DraftDistribution, Floats]]:
    """The atoms that the noise at (key, position) of a node favours, and that noise. mass: in any unit."""
    noise_TA = target_gumbel_batch(at, ids_TA)
    with np.errstate(divide="ignore"):
        perturbed_TA = np.log(mass_TA) + noise_TA
    found: list[tuple[DraftDistribution, Floats]] = []
    for ids, mass, noise, perturbed, most in zip(ids_TA, mass_TA, noise_TA, perturbed_TA, num_atoms, strict=True):
        best = np.argpartition(-perturbed, most - 1)[:most] if most < len(ids) else np.arange(len(ids))
        best = best[mass[best] > 0.0]
        weight = integer_weights(mass[None, best])[0]
        order = np.lexsort((ids[best], -weight))
        (row,) = rows_of(ids[None, best[order]], weight[None, order], [most])
        found.append((row, noise[best[order]]))
    return found


def _expand_matched(group: Sequence[Asked], found: Found) -> None:
    at = [(one.growing.key, one.growing.tree.at(one.node).depth) for one in group]
    rows = matched_rows(*likely_tokens(found.likely), at, [one.growing.open.num_atoms for one in group])
    for one, (row, noise) in zip(group, rows, strict=True):
        one.growing.growth.expand(one.node, row, noise)


def ranking(wanted: Sampling) -> Sampling:
    """By what the rows of a tree are processed."""
    if not wanted.greedy:
        return wanted
    return replace(wanted, temperature=GREEDY_TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0)


def _is_edited(growing: GrowingTree) -> bool:
    return growing.history is not None or growing.ranking.shifted


def _edited(group: Sequence[Asked], logits_TV: torch.Tensor) -> torch.Tensor:
    """Their rows, after what the target adds to logits: allowed tokens, bias, penalties, each row under its own node's text."""
    if len(group) < len(logits_TV):
        logits_TV = logits_TV.index_select(0, _there([one.row for one in group], logits_TV))
    logits_TV = shifted(logits_TV, [one.growing.ranking for one in group])
    of_tree: dict[int, list[int]] = {}
    for i, one in enumerate(group):
        if one.growing.history is not None:
            of_tree.setdefault(one.growing.kv_slot, []).append(i)
    if of_tree:
        logits_TV = logits_TV.clone()
    for mine in of_tree.values():
        growing = group[mine[0]].growing
        assert growing.history is not None
        paths = [growing.path(group[i].node) for i in mine]
        rows = _there(mine, logits_TV)
        some = penalised(logits_TV.index_select(0, rows), growing.open.sampling, growing.history, paths)
        logits_TV.index_copy_(0, rows, some.to(logits_TV.dtype))
    return logits_TV


def _there(rows: list[int], logits_TV: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(rows)).to(logits_TV.device, non_blocking=True)


# -- shares of a level ------------------------------------------------------------------------------------------------


def max_min(wants: Sequence[int], total: int) -> list[int]:
    """Whole shares of `total`: nobody gets more than it wants, and nobody less than another unless it wants less."""
    shares, left = [0] * len(wants), total
    for served, i in enumerate(sorted(range(len(wants)), key=lambda i: wants[i])):
        shares[i] = min(wants[i], left // (len(wants) - served))
        left -= shares[i]
    return shares


def dealt(wants: Sequence[int], owners: Sequence[tuple[Hashable, ...]], rows: int) -> list[int]:
    """Rows for each tree that wants some. owners: (verifier, tenant) of each; those alike at one level share alike.

    Whoever wants rows gets one: a level may exceed `rows` by that.
    """
    shares = _dealt(list(range(len(wants))), wants, owners, rows)
    return [max(share, min(want, 1)) for share, want in zip(shares, wants, strict=True)]


def _dealt(
    members: list[int], wants: Sequence[int], owners: Sequence[tuple[Hashable, ...]], rows: int, depth: int = 0
) -> list[int]:
    shares = [0] * len(wants)
    if not members:
        return shares
    if depth == len(owners[members[0]]):
        for i, share in zip(members, max_min([wants[i] for i in members], rows), strict=True):
            shares[i] = share
        return shares
    groups: dict[Hashable, list[int]] = {}
    for i in members:
        groups.setdefault(owners[i][depth], []).append(i)
    totals = max_min([sum(wants[i] for i in group) for group in groups.values()], rows)
    for group, total in zip(groups.values(), totals, strict=True):
        for i, share in enumerate(_dealt(group, wants, owners, total, depth + 1)):
            shares[i] += share
    return shares
