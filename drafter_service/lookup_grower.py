"""Trees of a drafter without a model, looked up in text that was seen before. The interface is that of `grower.Grower`.

A level gives each waiting text to its source, at most CHUNK tokens at a time. Once the source has the whole text, the tree gets its best
paths up to its cap, and is at rest until the next commit. Nodes are deterministic functions of the text, so any rule may verify them:
matching as it is, ratio tests under one-hot draft distributions. Draws of i.i.d. copies are not served.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from drafter_service.metrics import Key
from rootward.core.frames import Commit, Grow, Launch, NeedSync, Open, OpenFeatures, Reject, prefix_hash
from rootward.core.growth import BestFirst, strategy_of
from rootward.core.living_tree import Fit, LivingTree
from rootward.core.lookup import Memories, Source, Successors, extend_tree
from rootward.core.requests import DraftMode
from rootward.demand import DrafterDemand
from rootward.ports import ModelInfo

MAX_NODES = 1024  # of a tree, whatever a verifier asks for
CHUNK = 4096  # tokens of a text that its source reads in a level
TREES_PER_LEVEL = 8  # bounds the time that commits wait: a tree takes well below a millisecond

Sources = Callable[[Open, Successors], Source]  # (message, memory that it shares) → source of a new text


@dataclass(slots=True, eq=False)
class LookupTree:
    """The tree of one session. pending: committed tokens that its source has not read yet. at_rest: the last frame was sent."""

    slot: int
    tree: LivingTree
    source: Source
    max_depth: int
    topk: int
    pending: list[int]
    arrived_s: float
    at_rest: bool = False


class LookupGrower:
    """Trees by key. info.max_positions: longest text that is accepted; a text takes about 0.6 kB of memory per token.

    Texts of one stream, tenant and cache salt share a memory: all texts of a stream have one vocabulary.
    """

    modes: tuple[DraftMode, ...] = tuple(mode for mode in DraftMode if mode is not DraftMode.IID)

    def __init__(
        self,
        info: ModelInfo,
        sources: Sources,
        *,
        incarnation: int,
    ) -> None:
        self.info, self.incarnation = info, incarnation
        self.demand = DrafterDemand(rows=0)  # looking up asks for no rows of a draft forward
        self.trees: dict[Key, LookupTree] = {}
        self._sources, self._memories = sources, Memories()

    # -- messages of a verifier ---------------------------------------------------------------------------------------

    def open(self, key: Key, message: Open) -> Reject | None:
        """Start a tree. Returns a Reject if it is refused."""
        if fault := self.fault(key, message):
            return Reject(message.slot, fault)
        tree = LivingTree(
            len(message.prefix),
            prefix_hash(message.prefix),
            vocab_size=1 << 32,
            node_cap=message.caps[0],
            eos_ids=message.eos_ids,
            restarts=strategy_of(message.strategy, message.law, BestFirst()).restarts,
        )
        tree.root.token = message.prefix[-1]
        chain = message.strategy.name == "chain"
        depth, topk = (message.strategy.numbers[0], 1) if chain else (message.max_depth, message.topk)
        shared = key[0], message.tenant, message.cache_salt
        source = self._sources(message, self._memories.of(shared))
        self.trees[key] = LookupTree(message.slot, tree, source, depth, topk, list(message.prefix), time.monotonic())
        return None

    def fault(self, key: Key, message: Open) -> str:
        """Why the message is refused, whatever room there is; "" if it is valid."""
        if key in self.trees:
            return "slot is open already; use a new number"
        if fault := message.fault(MAX_NODES):
            return fault
        if len(message.prefix) > self.info.max_positions:
            return (
                f"prefix of {len(message.prefix)} tokens; texts of at most {self.info.max_positions} are accepted, "
                "see --max-model-len"
            )
        return ""

    def add_features(self, key: Key, message: OpenFeatures) -> Reject:
        """Features are for draft heads."""
        return Reject(message.slot, "features: this drafter takes none; send them where the HelloAck names a head")

    def commit(self, key: Key, message: Commit) -> list[Grow | NeedSync]:
        """Append committed tokens. Returns a NeedSync if they do not continue the text that is held."""
        growing = self.trees.get(key)
        if growing is None:
            return [NeedSync(message.slot, 0, 0)]
        fit = growing.tree.fit(message)
        if fit is Fit.LOST:
            return [NeedSync(message.slot, growing.tree.length, growing.tree.hash)]
        if fit is Fit.NEWS:
            growing.tree.commit(message.tokens)
            growing.pending += message.tokens
            growing.at_rest, growing.arrived_s = False, time.monotonic()
        return []

    def launch(self, key: Key, message: Launch) -> None:
        """Nothing: no bonus token is predicted."""

    def close(self, key: Key) -> None:
        self.trees.pop(key, None)

    # -- growth -------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return all(growing.at_rest for growing in self.trees.values())

    def level(self) -> list[tuple[Key, Grow]]:
        """Grow the trees that have waited longest. Returns their frames."""
        waiting = [(key, growing) for key, growing in self.trees.items() if not growing.at_rest]
        waiting.sort(key=lambda item: item[1].arrived_s)
        grown = [(key, self._grow(growing)) for key, growing in waiting[:TREES_PER_LEVEL]]
        return [(key, frame) for key, frame in grown if frame is not None]

    def _grow(self, growing: LookupTree) -> Grow | None:
        """The last frame of a tree before the next commit; None: its source has not read the whole text yet."""
        start_s = time.monotonic()
        growing.source.extend(growing.pending[:CHUNK])
        del growing.pending[:CHUNK]
        if growing.pending:
            growing.arrived_s = start_s  # other texts come before the rest of a long one
            return None
        tree = growing.tree
        first = tree.next_id
        extend_tree(tree, growing.source, max_depth=growing.max_depth, topk=growing.topk)
        growing.at_rest = True
        records = [tree.nodes[node] for node in range(first, tree.next_id)]
        return Grow(
            growing.slot,
            tree.length,
            tree.hash,
            first,
            np.array([r.parent for r in records], dtype=np.int64),
            np.array([r.token for r in records], dtype=np.int64),
            np.zeros(len(records), dtype=np.bool_),
            at_rest=True,
            draft_us=int((time.monotonic() - start_s) * 1e6),
        )
