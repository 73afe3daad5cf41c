"""Trees of a draft head on a CPU, grown by compiled code, a frame a level. The interface is that of `grower.Grower`.

Trees grow in batches: each that waits joins the next batch, whose first forward reads the texts. A commit for a tree of the batch ends its
growth there; it waits for the end of the batch, at most the levels of one tree. Trees of many levels, and openings that compiled code
does not serve (`HeadTrees.takes`), are left to a `Grower` with the same head.

A tree begins anew with every commit, as all trees of heads (docs/decisions/0030).
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from drafter_service.metrics import Key
from rootward.core.arrays import Ints
from rootward.core.frames import Commit, Grow, Launch, NeedSync, Open, OpenFeatures, Reject, prefix_hash
from rootward.core.living_tree import ROOT, LivingTree
from rootward.engine.grower import Grower, fair_shares, placed_features
from rootward.engine.head_growth import HeadTrees, TreeBatch
from rootward.ports import TreeToGrow

MOST_LEVELS = 16  # of a tree in a batch, for which trees of other verifiers wait
MOST_UNREAD = 2048  # tokens; of a text that was not read for longer, the head reads the last half of them


@dataclass(slots=True, eq=False)
class HeadTree:
    """The tree of one session.

    tree         the text's length and hash; the nodes are in the batch
    text         all tokens; the head has read `num_read` of them, or they came before the first features
    features     float32[n, E]: of the first tokens that it has not read
    nodes        most of the next round; 0: it verifies no tree
    first_node   id of the first node of this tree
    rest_sent    its last frame before the next commit was sent
    """

    open: Open
    tree: LivingTree
    text: list[int]
    num_read: int
    features: NDArray[np.float32]
    owner: tuple[Hashable, int]  # verifier, tenant
    nodes: int
    first_node: int = 1
    num_sent: int = 0
    rows_sent: set[int] = field(default_factory=set)  # nodes whose draft distribution was sent
    rest_sent: bool = False
    compute_s: float = 0.0  # of draft forwards for the next round

    @property
    def num_readable(self) -> int:
        """Tokens that can be read now: later ones wait for their features."""
        return len(self.features)

    def id_of(self, node: int) -> int:
        """The id, in frames, of a node of the batch's tree."""
        return ROOT if node == 0 else self.first_node - 1 + node

    @property
    def wants_growth(self) -> bool:
        """There is text to read, behind which a tree is to grow."""
        return not self.rest_sent and self.num_readable > 0

    def add_features(self, first: int, rows: NDArray[np.float32]) -> None:
        """Add features of the tokens first, first + 1, … of the text. Earlier tokens whose features have not arrived get zeros."""
        most = len(self.text) - self.num_read
        self.features = placed_features(self.features, rows, at=first - self.num_read, most=most)

    def take_features(self, num_tokens: int) -> NDArray[np.float32]:
        """The features of the next tokens, which the head reads."""
        features, self.features = self.features[:num_tokens], self.features[num_tokens:]
        self.num_read += num_tokens
        return features


class HeadGrower:
    """Trees by key.

    compiled: grows most of them. others: a grower with the same head for the rest; its settings and checks hold for all."""

    def __init__(self, compiled: HeadTrees, others: Grower[Key]) -> None:
        self._compiled, self._others = compiled, others
        self.info, self.incarnation, self.modes = others.info, others.incarnation, others.modes
        self.demand, self._num_slots = others.demand, compiled.num_slots
        self._trees: dict[Key, HeadTree] = {}
        self._batch: TreeBatch | None = None
        self._growing: dict[int, tuple[Key, HeadTree]] = {}  # trees of the batch by their number there, unless given up
        self._closed: list[Key] = []  # trees of the batch that were closed

    @property
    def trees(self) -> dict[Key, object]:
        """All open trees."""
        return {**self._trees, **self._others.trees}

    # -- messages of the verifier -------------------------------------------------------------------------------------

    def open(self, key: Key, message: Open) -> Reject | None:
        """Start a tree. Returns a Reject if the request is invalid or no slot is free."""
        if fault := self.fault(key, message):
            return Reject(message.slot, fault)
        if len(self.trees) >= self._num_slots:
            return Reject(message.slot, "no free slot", retry_after_ms=1000)
        draws = min(self._others.best_first.draws(message.node_cap), message.topk)
        if message.node_cap > MOST_LEVELS * draws or not self._compiled.takes(key, message):
            return self._others.open(key, message)
        prefix = message.prefix
        growing = HeadTree(
            message,
            LivingTree(len(prefix), prefix_hash(prefix), vocab_size=self.info.vocab_size, restarts=True),
            list(prefix),
            num_read=len(prefix) - max(1, message.num_features),
            features=np.zeros((0, self._others.feature_size), np.float32),
            owner=(key[0], message.tenant),
            nodes=message.node_cap,
        )
        self._limit(growing, message.node_budget)
        if not message.num_features:  # the last token is read with zeros
            growing.add_features(len(prefix), growing.features)
        self._trees[key] = growing
        return None

    def fault(self, key: Key, message: Open) -> str:
        """Why the request is refused, whatever room there is; "" if it is valid."""
        if key in self._trees or key in self._closed:
            return "slot is open already; use a new number"
        return self._others.fault(key, message)

    def add_features(self, key: Key, message: OpenFeatures) -> Reject | None:
        """A part of the features that an Open has announced. Returns a Reject if they are not those of this head."""
        if (growing := self._trees.get(key)) is None:
            return self._others.add_features(key, message)
        if fault := self._others.feature_fault(message.features):
            return Reject(message.slot, fault)
        growing.add_features(message.first, message.features.rows)
        return None

    def commit(self, key: Key, message: Commit) -> Sequence[Grow | NeedSync | Reject]:
        """Start a new tree behind the committed tokens. Returns a resync request, or a Reject if the features are not this head's."""
        if (growing := self._trees.get(key)) is None:
            return self._others.commit(key, message)
        tree = growing.tree
        if (answer := self._others.refusal(tree, message)) is not None:
            return answer
        self.demand.round(growing.compute_s)
        self._give_up(growing)
        tree.commit(message.tokens)
        growing.text += message.tokens
        # Features of earlier tokens that are missing now do not arrive any more.
        features = growing.features[:0] if message.features is None else message.features.rows
        growing.add_features(tree.length - len(features), features)
        growing.first_node += growing.num_sent
        growing.num_sent, growing.compute_s, growing.rest_sent = 0, 0.0, False
        growing.rows_sent.clear()
        self._limit(growing, message.node_budget)
        self._skip_unread(key, growing)
        return []

    def _skip_unread(self, key: Key, growing: HeadTree) -> None:
        """Begin the head's text anew if much of it was not read, for rounds that verified no tree: each commit copies the features, and the
        next tree would wait until all is read."""
        if len(growing.text) - growing.num_read > MOST_UNREAD and not self._in_batch(key):
            self._compiled.forget(key)
            growing.features = growing.features[-MOST_UNREAD // 2 :]
            growing.num_read = len(growing.text) - len(growing.features)

    def launch(self, key: Key, message: Launch) -> None:
        """No bonus token is predicted for a head."""

    def close(self, key: Key) -> None:
        growing = self._trees.pop(key, None)
        if growing is None:
            self._others.close(key)
            return
        self._give_up(growing)
        if self._in_batch(key):
            self._closed.append(key)
        else:
            self._compiled.forget(key)

    @staticmethod
    def _limit(growing: HeadTree, nodes: int | None) -> None:
        """Set the most nodes that the next round verifies; None: unchanged."""
        if nodes is not None:
            growing.nodes = min(nodes, growing.open.node_cap)

    def _in_batch(self, key: Key) -> bool:
        """The batch may write to the cells of this session."""
        return self._batch is not None and any(one.session == key for one in self._batch.wanted)

    def _give_up(self, growing: HeadTree) -> None:
        """If it grows in the batch, grow it no further."""
        for b in [b for b, (_, tree) in self._growing.items() if tree is growing]:
            assert self._batch is not None
            self._batch.give_up(b)
            del self._growing[b]
            self._end_if_grown(self._batch)

    # -- growth -------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        waits = any(growing.wants_growth or self._rest_unsent(growing) for growing in self._trees.values())
        return self._batch is None and not waits and self._others.idle

    def level(self) -> list[tuple[Key, Grow]]:
        """One forward for the trees of the batch, and one for the others that have rows. Returns the frames to send."""
        frames = [] if self._others.idle else self._others.level()
        for key, growing in self._trees.items():
            if self._rest_unsent(growing):
                frames.append((key, _rest_frame(growing)))
        if self._batch is None:
            self._begin()
        return frames if self._batch is None else frames + self._run_level(self._batch)

    def _cannot_grow(self, growing: HeadTree) -> bool:
        """Its next round verifies no tree, or no token behind its text can be drafted within the context."""
        return growing.nodes == 0 or len(growing.text) + 1 >= self.info.max_positions

    def _rest_unsent(self, growing: HeadTree) -> bool:
        """All that is left is the frame that says that nothing will grow."""
        return not growing.rest_sent and self._cannot_grow(growing)

    def _begin(self) -> None:
        """Start a batch of all trees that wait. Of a long text it reads a part, and grows no tree there."""
        ready = {key: tree for key, tree in self._trees.items() if tree.wants_growth and not self._cannot_grow(tree)}
        sizes, owners = [tree.num_readable for tree in ready.values()], [tree.owner for tree in ready.values()]
        wanted: list[tuple[TreeToGrow, NDArray[np.float32]]] = []
        for (key, tree), share in zip(ready.items(), fair_shares(sizes, owners, self._others.max_rows), strict=True):
            end = tree.num_read + share
            is_whole = end == len(tree.text)
            nodes, text = (tree.nodes, tree.text) if is_whole else (0, tree.text[:end])
            wanted.append((TreeToGrow(key, text, tree.open, nodes), tree.take_features(share)))
        self._batch = self._compiled.start(wanted)
        self._growing = dict(enumerate(ready.items()))

    def _run_level(self, batch: TreeBatch) -> list[tuple[Key, Grow]]:
        """A level of the batch, and its frames. After an error the caller must close all trees."""
        start_s, num_rows = time.monotonic(), batch.num_rows
        active = {b: entry for b, entry in self._growing.items() if not batch.trees.at_rest[b]}
        try:
            batch.level()
        except Exception:
            self._end()
            raise
        seconds = time.monotonic() - start_s
        self.demand.level(num_rows, 0, seconds)
        frames: list[tuple[Key, Grow]] = []
        for b, (key, growing) in active.items():
            growing.compute_s += seconds
            is_new = batch.trees.at_rest[b] or batch.trees.size[b] - 1 > growing.num_sent
            if batch.wanted[b].nodes and is_new:
                frames.append((key, self._frame(growing, batch, b, draft_us=int(1e6 * seconds))))
        self._end_if_grown(batch)
        return frames

    def _end_if_grown(self, batch: TreeBatch) -> None:
        """End the batch if no tree that is not given up will get another node. After one level at least."""
        if all(batch.trees.at_rest[b] for b in self._growing):
            self._compiled.finish(batch)
            self._end()

    def _end(self) -> None:
        """The batch has ended."""
        self._batch, self._growing = None, {}
        for key in self._closed:
            self._compiled.forget(key)
        self._closed = []

    @staticmethod
    def _frame(growing: HeadTree, batch: TreeBatch, b: int, *, draft_us: int) -> Grow:
        """The nodes since the last frame, with the draft distributions that were not sent yet. b: number of the tree in the batch."""
        trees, first = batch.trees, growing.first_node + growing.num_sent
        new = slice(1 + growing.num_sent, int(trees.size[b]))
        parent: Ints = trees.parent[b, new]
        rows: dict[int, tuple[Ints, Ints]] = {}
        if growing.open.law.ratio:
            for node in sorted(set(parent.tolist()) - growing.rows_sent):
                growing.rows_sent.add(node)
                if (row := batch.declared(b, node)) is not None:
                    rows[growing.id_of(node)] = row
        growing.num_sent, growing.rest_sent = new.stop - 1, bool(trees.at_rest[b])
        return Grow(
            growing.open.slot,
            growing.tree.length,
            growing.tree.hash,
            first,
            np.array([growing.id_of(node) for node in parent.tolist()], dtype=np.int64),
            trees.token[b, new].copy(),  # a later level writes to the table
            trees.sampled[b, new].copy(),
            rows,
            growing.rest_sent,
            draft_us,
        )


def _rest_frame(growing: HeadTree) -> Grow:
    """The frame that says that there will be no nodes."""
    growing.rest_sent = True
    none = np.empty(0, np.int64)
    tree = growing.tree
    first = growing.first_node
    return Grow(growing.open.slot, tree.length, tree.hash, first, none, none, none.astype(np.bool_), at_rest=True)
