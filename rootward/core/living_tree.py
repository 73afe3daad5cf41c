"""The living tree: one tree per session, rooted at the last committed token, with two verbs: `grow` and `commit`.

Drafter and verifier each hold a replica. The drafter calls `draw`; `receive` applies its frames at the verifier; `commit` re-roots
either side at the node that spells the committed tokens and keeps the WHOLE subtree below it (algorithms.md 6, rules L1-L5).

Late frames. A frame can be older than the verifier's committed text: it names the prefix (base_len, base_hash) that the drafter knew.
Every node id is therefore one of
  live    below the current root
  spine   the node of a committed token, at the end of a prefix of known length; the current root is the last one
  dead    neither: other tokens were committed, or its parent is dead. Its nodes are dropped and counted as stale

Guesses (algorithms.md 6.6). A *guess* is a predicted bonus token and so a possible next root; no round verifies it. A guess and its
descendants are a component, named by its `head`; all other nodes are the root's component, which rounds verify. A commit keeps the
component that contains the new root and drops all other guesses with their descendants. So a guess of an older base is kept only if the
first round after that base committed it. There are no guesses below guesses, and no sibling of a guess has its token, because the root's
component does not grow while there are guesses.

Errors are not repaired: a gap in the ids, an unknown hash or a malformed frame breaks the tree (`broken`). It accepts no further nodes, and
its owner opens a new tree after the round. Nodes that arrived before stay usable, because dropping them would depend on their values: in a
tree that had come to rest in time they would have been verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from rootward.core.frames import Commit, Grow, extend_hash
from rootward.core.tree import TokenTree

ROOT = 0  # as a parent in a frame: the root of the frame's base

Row = tuple[NDArray[np.int64], NDArray[np.int64]]  # ids[k], integer weights[k]: the law weight / sum(weight)


class MalformedFrame(ValueError):
    """A frame that no correct drafter sends. Only the slot is affected: it is quarantined."""


@dataclass(slots=True, eq=False)
class Node:
    """One drawn or chosen token. `children` are ids in draw order; `row` is the law they were drawn from.

    head: the guess of its component (itself for a guess); ROOT: the root's component."""

    parent: int
    token: int
    sampled: bool
    depth: int = 0  # absolute: length of the committed prefix plus draft tokens, so that a commit does not change it
    row: Row | None = None
    children: list[int] = field(default_factory=list)
    guess: bool = False
    head: int = ROOT


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tree that a round verifies, immutable: the first nodes in draw order. ids[0] is the root; rows[i] may be None."""

    tree: TokenTree
    ids: tuple[int, ...]
    rows: tuple[Row | None, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """Result of a frame: numbers of nodes that were added and dropped."""

    kept: int = 0
    stale: int = 0
    reason: str = ""  # why the whole frame was dropped: "", "duplicate", "gap", "stale_base", "broken"


class Fit(Enum):
    """How a commit message relates to the text of a replica."""

    NEWS = "news"  # it advances the text
    KNOWN = "known"  # a repetition
    LOST = "lost"  # it follows another text: the prefix must be sent again


class LivingTree:
    """A tree below the last committed token.

    length, hash_: of the committed prefix, in tokens and as by `frames.prefix_hash`. vocab_size, max_atoms, node_cap, ahead_cap: limits for
    frames. node_cap: most nodes of the root's component; ahead_cap: most nodes of all others.
    restarts: every commit starts a new tree, whatever has grown, so there are no guesses. copies: siblings may repeat a token; all are
    drawn (with replacement). chain: no node has siblings.
    """

    def __init__(
        self,
        length: int,
        hash_: int,
        *,
        vocab_size: int,
        node_cap: int = 1024,
        max_atoms: int = 65536,
        eos_ids: Iterable[int] = (),
        ahead_cap: int = 0,
        restarts: bool = False,
        copies: bool = False,
        chain: bool = False,
    ) -> None:
        self.length = length
        self.restarts, self.copies, self.chain = restarts, copies, chain
        self.vocab_size, self.max_atoms = vocab_size, max_atoms
        self.node_cap, self.ahead_cap = node_cap, 0 if restarts else ahead_cap
        self.eos_ids = frozenset(eos_ids)
        self.root = Node(-1, -1, False, depth=length)
        self.root_id = ROOT
        self.nodes: dict[int, Node] = {}  # live nodes by id; insertion order = draw order
        self.num_ahead = 0  # live guesses and their descendants
        self.next_id = 1
        self.broken = ""  # why nothing more is accepted
        self._hashes = [hash_]  # of the prefixes of length _first, _first + 1, …, length
        self._first = length
        self._tokens: list[int] = []  # committed since the tree was opened
        self._spine: dict[int, int] = {}  # node id -> length of the prefix it ends
        self._last_base = length
        self._num_new = 0  # nodes of this base that have arrived
        self._ends: list[int] = []  # lengths of the text after each round committed since the base of the last frame

    @property
    def hash(self) -> int:
        return self._hashes[-1]

    def __len__(self) -> int:
        """Live nodes of the root's component, root excluded."""
        return len(self.nodes) - self.num_ahead

    def at(self, node: int) -> Node:
        """The node with this id; ROOT and the root's own id give the root."""
        return self.root if node in (ROOT, self.root_id) else self.nodes[node]

    # -- the two verbs ------------------------------------------------------------------------------------------------

    def draw(self, parent: int, token: int, *, sampled: bool, guess: bool = False) -> int:
        """Append a node (drafter side) and return its id."""
        node, self.next_id = self.next_id, self.next_id + 1
        self._attach(node, ROOT if parent == self.root_id else parent, token, sampled, guess)
        return node

    def commit(self, tokens: Sequence[int]) -> list[int | None]:
        """Commit the tokens of a round: walk along them, re-root, keep the subtree below. Returns the node id of each token, or None."""
        walked: list[int | None] = []
        for token in tokens:
            walked.append(self._step(int(token)))
        self._ends.append(self.length)
        if self.restarts:
            self.root, self.root_id = Node(-1, self.root.token, False, depth=self.length), ROOT
            self.nodes, self._spine = {}, {}
            return walked
        live = self._below_root(self.root.head)
        if len(live) != len(self.nodes):
            self.nodes = live
        self.num_ahead, self.root.head = 0, ROOT
        for record in live.values():
            record.head = ROOT
        return walked

    def fit(self, message: Commit) -> Fit:
        """How a commit message relates to the text of this replica."""
        if message.base_len + len(message.tokens) <= self.length:
            return Fit.KNOWN
        hash_after = self.hash
        for token in message.tokens:
            hash_after = extend_hash(hash_after, token)
        fits = message.base_len == self.length and message.hash_after == hash_after
        return Fit.NEWS if fits else Fit.LOST

    def receive(self, frame: Grow) -> Received:
        """Apply a frame of the drafter. MalformedFrame, which breaks the tree, if no correct drafter sends it."""
        size = len(frame.token)
        if self.broken:
            return Received(stale=size, reason="broken")
        if frame.fault:
            self.broken = "malformed"
            raise MalformedFrame(frame.fault)
        if frame.first_node + size <= self.next_id and not (size == 0 and frame.rows):
            return Received(reason="duplicate" if size else "")
        if reason := self._unusable(frame):
            self.broken = reason
            return Received(stale=size, reason=reason)
        try:
            self._check_size(frame)
            return self._apply(frame)
        except MalformedFrame:
            self.broken = "malformed"
            raise

    def snapshot(self, cap: int) -> Snapshot:
        """The first `cap` nodes of the root's component in draw order, the root not counted. The cap must not depend on the tree."""
        own = (node for node, record in self.nodes.items() if record.head == ROOT)
        ids = [self.root_id, *islice(own, max(cap, 0))]
        index = {node: i for i, node in enumerate(ids)}
        index[ROOT] = 0
        records = [self.root, *(self.nodes[n] for n in ids[1:])]
        tree = TokenTree(
            [max(r.token, 0) for r in records],
            [-1, *(index[r.parent] for r in records[1:])],
            [r.sampled for r in records],
        )
        return Snapshot(tree, tuple(ids), tuple(r.row for r in records))

    # -- walking ------------------------------------------------------------------------------------------------------

    def _step(self, token: int) -> int | None:
        child = next((c for c in self.root.children if self.nodes[c].token == token), None)
        self.length += 1
        self._tokens.append(token)
        self._hashes.append(extend_hash(self._hashes[-1], token))
        if child is None:
            self.root, self.root_id = Node(-1, token, False, depth=self.length), ROOT
            self.nodes = {}
            return None
        # Only the new root is removed here; nodes off the path are removed once, at the end of `commit`.
        self.root, self.root_id = self.nodes.pop(child), child
        self._spine[child] = self.length
        for grandchild in self.root.children:
            self.nodes[grandchild].parent = ROOT
        return child

    def _below_root(self, head: int) -> dict[int, Node]:
        """The live nodes below the root in its component, in draw order (parents come first)."""
        below: dict[int, Node] = {}
        of_root = set(self.root.children)
        for node, record in self.nodes.items():
            if node in of_root or record.parent in below:
                if record.head == head:
                    below[node] = record
                elif record.guess:
                    self.at(record.parent).children.remove(node)
        return below

    # -- frames -------------------------------------------------------------------------------------------------------

    def _unusable(self, frame: Grow) -> str:
        """The reason why a frame cannot be applied, as in `Received.reason`; "" if it can."""
        if frame.first_node > self.next_id:
            return "gap"  # distributions of later children depend on every earlier sibling
        known = self._first <= frame.base_len <= self.length and frame.base_len >= self._last_base
        if not known or self._hashes[frame.base_len - self._first] != frame.base_hash:
            return "stale_base"
        return ""

    def _check_size(self, frame: Grow) -> None:
        """MalformedFrame if a frame has more nodes than can be live under one base, alone or with those of that base before it."""
        most = self.node_cap + self.ahead_cap
        before = self._num_new if frame.base_len == self._last_base else 0
        self._num_new = before + max(0, frame.first_node + len(frame.token) - self.next_id)
        if max(len(frame.token), len(frame.rows) - 1, self._num_new) > most:
            size = f"{len(frame.token)} nodes and {len(frame.rows)} rows, after {before} nodes,"
            raise MalformedFrame(f"frame: {size} of one base exceed the cap of {most} live nodes")

    def _apply(self, frame: Grow) -> Received:
        self._last_base = frame.base_len
        # Frames of this base or a later one name only nodes deeper than the base, so shorter spine entries are not needed any more.
        self._spine = {node: length for node, length in self._spine.items() if length > frame.base_len}
        kept = stale = 0
        self._ends = [length for length in self._ends if length > frame.base_len]
        rows = dict(frame.rows)
        known = self.next_id - frame.first_node  # a merged frame may repeat nodes that have arrived
        flags = frame.sampled.tolist(), frame.guesses.tolist()
        columns = zip(frame.parent.tolist(), frame.token.tolist(), *flags, strict=True)
        for offset, (parent, token, sampled, guess) in enumerate(columns):
            node = frame.first_node + offset
            if not 0 <= parent < node:
                raise MalformedFrame(f"parent: node {node} has parent {parent}; parents come first")
            if not 0 <= token < self.vocab_size:
                raise MalformedFrame(f"token: node {node} has token {token}; the vocabulary has {self.vocab_size}")
            if offset < known:
                continue
            if parent in rows:  # a row travels with its first child
                self._set_row(parent, frame.base_len, *rows.pop(parent))
            self.next_id = node + 1
            above, length = self._live_node(parent, frame.base_len), self._spine_length(parent, frame.base_len)
            # The drafter drops a guess when it receives a commit of other tokens.
            if above is not None and not (guess and self._ends):
                self._attach(node, ROOT if above is self.root else parent, token, sampled, guess)
                kept += 1
                continue
            stale += 1
            if above is None and length is not None and not self.restarts and self._walked(length, token, guess):
                self._spell(node, length + 1)
        for parent, row in rows.items():
            self._set_row(parent, frame.base_len, *row)
        return Received(kept, stale)

    def _spell(self, node: int, length: int) -> None:
        """Record a node whose token was committed before the node arrived."""
        if length in self._spine.values():
            raise MalformedFrame(f"token: node {node} repeats the token of a sibling that was walked over")
        self._spine[node] = length

    def _walked(self, length: int, token: int, guess: bool) -> bool:
        """Whether the token committed after the prefix of this length is that of the node."""
        return self._tokens[length - self._first] == token and not (guess and length >= self._ends[0])

    def _spine_length(self, parent: int, base_len: int) -> int | None:
        """Length of the committed prefix that ends with this node; None if it is not on the spine."""
        if parent == ROOT:
            return base_len
        return self.length if parent == self.root_id else self._spine.get(parent)

    def _live_node(self, parent: int, base_len: int) -> Node | None:
        """The node, if it is the root or below it."""
        length = self._spine_length(parent, base_len)
        if length is None:
            return self.nodes.get(parent)
        return self.root if length == self.length else None

    def _set_row(self, parent: int, base_len: int, ids: NDArray[np.int64], weight: NDArray[np.int64]) -> None:
        record = self._live_node(parent, base_len)
        if record is None:
            return
        self._check_row(parent, ids, weight)
        if record.row is not None and not (
            np.array_equal(record.row[0], ids) and np.array_equal(record.row[1], weight)
        ):
            raise MalformedFrame(
                f"rows: node {parent} declares a second row; children keep the row they were drawn from"
            )
        record.row = (ids, weight)

    def _check_row(self, parent: int, ids: NDArray[np.int64], weight: NDArray[np.int64]) -> None:
        if not 0 < len(ids) == len(weight) <= self.max_atoms:
            raise MalformedFrame(f"rows: node {parent} has {len(ids)} atoms; send 1 to {self.max_atoms}")
        if ids.min() < 0 or ids.max() >= self.vocab_size or len(set(ids.tolist())) != len(ids):
            raise MalformedFrame(f"rows: node {parent} has atoms outside the vocabulary or twice")
        if weight.min() < 1 or weight.max() > 65535:
            raise MalformedFrame(f"rows: node {parent} has a weight outside 1…65535")

    def _attach(self, node: int, parent: int, token: int, sampled: bool, guess: bool) -> None:
        above = self.at(parent)
        if guess and (sampled or above.head != ROOT):
            raise MalformedFrame(
                f"guess: node {node} is drawn, or a guess below a guess; choose it below the root's component"
            )
        if self.chain and above.children:
            raise MalformedFrame(f"parent: node {node} has a sibling; a chain was asked for")
        if self.copies and not sampled:
            raise MalformedFrame(f"sampled: node {node} is chosen; copies were asked for, which are drawn")
        if not self.copies and any(self.nodes[c].token == token for c in above.children):
            raise MalformedFrame(f"token: node {node} repeats token {token} of a sibling")
        if sampled and (above.row is None or token not in above.row[0]):
            raise MalformedFrame(f"token: node {node} was drawn as {token}, to which its declared row gives no mass")
        head = node if guess else above.head
        if (self.num_ahead >= self.ahead_cap) if head != ROOT else (len(self) >= self.node_cap):
            cap = f"{self.node_cap} live nodes, {self.ahead_cap} in and below guesses"
            raise MalformedFrame(f"node {node} exceeds the cap of {cap}")
        if above is not self.root and above.token in self.eos_ids:
            raise MalformedFrame(f"node {node} hangs below an end-of-sequence token")
        above.children.append(node)
        self.num_ahead += head != ROOT
        self.nodes[node] = Node(parent, token, sampled, depth=above.depth + 1, guess=guess, head=head)
