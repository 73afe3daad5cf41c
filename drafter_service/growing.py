"""All living trees of one drafter: one draft forward per level for the frontiers of every tree.

A level: choose rows (catch-up tokens first, else the frontier) → ONE forward → processed laws cut to K atoms and rounded to integers
→ children drawn from exactly those integers → Grow frames. Everything here runs on one thread and knows nothing of streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from drafter_service.expansion import Asked, launch, ranking
from drafter_service.fairness import dealt
from drafter_service.growing_tree import GrowingTree, Guesses
from drafter_service.trees import Heard, heard, largest_token, shape_fault
from rootward.core.ahead import Ahead, Bets
from rootward.core.arrays import Ints
from rootward.core.calibration import MatchScale
from rootward.core.distribution import DraftDistribution
from rootward.core.drafting.lookup import Prediction
from rootward.core.frames import Commit, Grow, NeedSync, Open, Reject, prefix_hash
from rootward.core.growth import Growth, Policy
from rootward.core.living_tree import ROOT, LivingTree
from rootward.core.requests import DraftMode
from rootward.core.rng import BonusKey, DrawWords, Key
from rootward.demand import DrafterDemand
from rootward.engine.processors import History
from rootward.ports import LanguageModel, Rows

K = TypeVar("K")  # what names a slot of a stream

CHAIN_IDS = 1 << 40  # node ids of catch-up tokens in the KV tree; drawn nodes count up from 1 and never get there
MAX_NODES = (
    240  # of a tree, growth ahead included, whatever a verifier asks for: a KV slot has 256 cells beyond the context
)


class Grower(Generic[K]):
    """Trees by key (whatever names a slot of a stream). `incarnation` keeps draws of a restarted process apart.

    group: the verifier of a key; verifiers share the rows of a level alike, and within them tenants."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        incarnation: int,
        max_rows: int = 256,
        prefill_chunk: int = 256,
        policy: Policy | None = None,
        group: Callable[[K], Hashable] = lambda _: 0,
        bets: Bets | None = None,
    ) -> None:
        self.model, self.incarnation, self._group = model, incarnation, group
        self.max_rows, self.prefill_chunk = max_rows, prefill_chunk
        self.policy, self.bets = policy or Policy(DraftMode.SAMPLED), bets or Bets()
        self.demand = DrafterDemand(max_rows)
        self.trees: dict[K, GrowingTree] = {}
        self._match: dict[int, MatchScale] = {}  # by tenths of the temperature, which sets how far the pair is apart
        self._draw_number = 0  # of the last level: counts over the life of the process, so that none is used twice

    # -- what a verifier says -----------------------------------------------------------------------------------------

    def open(self, key: K, message: Open) -> Reject | None:
        """Start a tree; the answer is a Reject when it cannot be taken."""
        if key in self.trees:
            return Reject(message.slot, "slot is open already; use a new number")
        if fault := shape_fault(message, MAX_NODES):
            return Reject(message.slot, fault)
        if len(message.prefix) >= self.model.info.max_positions:
            limit = self.model.info.max_positions
            return Reject(
                message.slot, f"prefix of {len(message.prefix)} tokens does not fit the draft context of {limit}"
            )
        if (largest := largest_token(message)) >= self.model.info.vocab_size:
            return Reject(
                message.slot, f"token {largest} is outside the draft vocabulary of {self.model.info.vocab_size}"
            )
        if self.model.num_free_slots == 0:
            return Reject(message.slot, "no free slot", retry_after_ms=1000)
        self.trees[key] = self._planted(message)
        self.trees[key].owner = (self._group(key), message.tenant)
        self.trees[key].foresee(message.prefix)
        return None

    def commit(self, key: K, message: Commit) -> list[Grow | NeedSync]:
        """The truth advanced. The answer: what was drawn under the old base and not sent yet; or a plea for the prefix."""
        growing = self.trees.get(key)
        if growing is None:  # closed, refused or never opened: its verifier should not wait for it
            return [NeedSync(message.slot, 0, 0)]
        tree = growing.tree
        news = heard(tree, message)
        if news is Heard.KNOWN:
            return []
        if news is Heard.LOST or max(message.tokens, default=0) >= self.model.info.vocab_size:
            return [NeedSync(message.slot, tree.length, tree.hash)]
        self.demand.round(growing.compute_s)
        growing.compute_s = 0.0
        unsent: list[Grow | NeedSync] = [self._frame(growing, 0)] if growing.sent < tree.next_id else []
        for run in message.rounds:
            self._reroot(growing, run)
        if message.node_budget is not None:
            growing.allow(message.node_budget)
        if growing.history is not None:
            growing.history.extend(message.tokens)
        growing.foresee(message.tokens)
        return unsent

    def close(self, key: K) -> None:
        if (growing := self.trees.pop(key, None)) is not None:
            self.model.close(growing.kv_slot)

    # -- growth -------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not any(self._wants_level(g) for g in self.trees.values())

    @property
    def unread(self) -> int:
        return sum(len(growing.pending) for growing in self.trees.values())

    def level(self) -> list[tuple[K, Grow]]:
        """One draft forward for all trees that can use one; the frames it makes."""
        start_s = time.monotonic()
        active = [(key, g) for key, g in self.trees.items() if self._wants_level(g)]
        if not all(g.betting for _, g in active):  # what the next rounds may verify goes before bets on their outcome
            active = [(key, g) for key, g in active if not g.betting]
        work = [(g, rows, nodes) for (g, rows, nodes) in self._rows([g for _, g in active]) if len(rows.node)]
        if work:
            self._forward(work)
            self._account([(g, len(rows.node)) for g, rows, _ in work], time.monotonic() - start_s)
        frames: list[tuple[K, Grow]] = []
        for key, growing in active:
            if not growing.pending and growing.allowed:
                growing.growth.draw(self._words(growing))
            rest = growing.at_rest
            if growing.sent < growing.tree.next_id or (rest and not growing.told_rest):
                frames.append((key, self._frame(growing, int((time.monotonic() - start_s) * 1e6))))
        return frames

    def _account(self, work: list[tuple[GrowingTree, int]], seconds: float) -> None:
        """Rows after the tree has come to rest are growth ahead."""
        ahead = sum(rows for growing, rows in work if growing.betting)
        self.demand.level(sum(rows for _, rows in work) - ahead, ahead, seconds)
        for growing, _ in work:
            growing.compute_s += 0.0 if growing.betting else seconds

    def _planted(self, message: Open) -> GrowingTree:
        info = self.model.info
        eos = message.eos_ids
        node_cap, ahead_cap = message.caps
        tree = LivingTree(
            len(message.prefix),
            prefix_hash(message.prefix),
            vocab_size=info.vocab_size,
            node_cap=node_cap,
            eos_ids=eos,
            ahead_cap=ahead_cap,
        )
        policy = replace(
            self.policy,
            law=message.law,
            node_cap=node_cap,
            max_depth=message.max_depth,
            topk=message.topk,
            beyond=node_cap - message.node_cap,
            match_scale=self._match_scale(message).value,
        )
        own = Growth(tree, policy, max_positions=info.max_positions)
        likely: dict[int, Guesses] = {}

        def guesses(node: int, row: DraftDistribution) -> Ints:
            if message.bonus_key is None or node not in likely:
                return row.ids
            return likely[node].best(BonusKey(message.bonus_key), message.epoch, tree.at(node).depth)

        growth = Ahead(own, replace(self.bets, nodes=ahead_cap), guesses)
        key = Key(message.seed, message.choice)
        source = None
        if message.prediction and max(message.prediction) < info.vocab_size:
            source = Prediction(message.prediction[: info.max_positions], prefix=message.num_prompt)
        history = None
        if message.sampling.penalised:
            history = History(message.prefix[: message.num_prompt], message.prefix[message.num_prompt :])
        planted = GrowingTree(message, tree, growth, self.model.open(), list(message.prefix), key)
        planted.source, planted.guesses, planted.history = source, likely, history
        planted.ranking = ranking(message.sampling)
        if message.node_budget is not None:
            planted.allow(message.node_budget)
        return planted

    def _reroot(self, growing: GrowingTree, tokens: Sequence[int]) -> None:
        """Commit the part of the path whose KV is there; the rest becomes catch-up work."""
        self._learn(growing, tokens)
        expanded = growing.growth.expanded
        walked = growing.growth.commit(tokens)
        held = 0
        if not growing.pending:
            for node in walked:
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
        for node in growing.guesses.keys() - alive:  # the table is the one that `Ahead` reads
            del growing.guesses[node]
        growing.rows_sent = {
            n for n in growing.rows_sent if n in growing.tree.nodes or n == growing.tree.root_id != ROOT
        }
        growing.told_rest = False
        growing.exhausted = growing.tree.length >= self.model.info.max_positions

    def _match_scale(self, message: Open) -> MatchScale:
        return self._match.setdefault(round(10 * message.sampling.temperature), MatchScale())

    def _learn(self, growing: GrowingTree, tokens: Sequence[int]) -> None:
        """How far the models are apart shows in where shared noise makes them differ."""
        if growing.open.law is DraftMode.COUPLED:
            scale, own = self._match_scale(growing.open), growing.growth.own
            for perturbed, chosen in own.lessons(tokens):
                scale.learn(perturbed, chosen)
            own.policy = replace(own.policy, match_scale=scale.value)

    def _wants_level(self, growing: GrowingTree) -> bool:
        if growing.exhausted or not growing.allowed:
            return not growing.told_rest
        return bool(growing.pending) or growing.growth.busy or not growing.told_rest

    def _rows(self, active: list[GrowingTree]) -> list[tuple[GrowingTree, Rows, list[int]]]:
        """Catch-up chunks, then frontiers under a fair share of the row budget. nodes: the tree nodes whose rows come back."""
        shares = dealt([self._wanted_rows(g) for g in active], [g.owner for g in active], self.max_rows)
        work: list[tuple[GrowingTree, Rows, list[int]]] = []
        for growing, share in zip(active, shares, strict=True):
            if growing.exhausted or not growing.allowed:
                continue
            if growing.pending:
                chunk = growing.pending[:share]
                whole = len(chunk) == len(growing.pending)
                work.append(
                    (growing, Rows.chain(growing.kv_slot, CHAIN_IDS, chunk), [growing.tree.root_id] if whole else [])
                )
            else:
                nodes = growing.growth.frontier(share)
                work.append((growing, self._frontier_rows(growing, nodes), nodes))
        return work

    def _wanted_rows(self, growing: GrowingTree) -> int:
        if growing.exhausted or not growing.allowed:
            return 0
        if growing.pending:
            return min(len(growing.pending), self.prefill_chunk)
        return growing.growth.wanted_rows(self.max_rows)

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
