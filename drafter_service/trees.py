"""What the streams need of whatever grows the trees: `growing.Grower` with a model, `lookup.Lookup` without one.

Everything is called on one thread. `level` does a bounded piece of work, so that commits are never applied late.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol, TypeVar

from rootward.core.frames import Commit, Grow, NeedSync, Open, Reject, extend_hash
from rootward.core.living_tree import LivingTree
from rootward.demand import DrafterDemand
from rootward.ports import ModelInfo

K = TypeVar("K")  # what names a slot of a stream


class Described(Protocol):
    """Has a name, a vocabulary and a context."""

    @property
    def info(self) -> ModelInfo: ...


class Trees(Protocol[K]):
    """All living trees of one drafter, by key."""

    incarnation: int
    demand: DrafterDemand  # what was grown, for the autoscaler

    @property
    def trees(self) -> Mapping[K, object]:
        """The open ones."""

    @property
    def idle(self) -> bool:
        """`level` has nothing to do until something is opened or committed."""

    @property
    def unread(self) -> int:
        """Committed tokens that the next levels have to read before trees can grow."""

    def open(self, key: K, message: Open) -> Reject | None:
        """Start a tree; the answer is a Reject when it cannot be taken."""

    def commit(self, key: K, message: Commit) -> list[Grow | NeedSync]:
        """The truth advanced; the answer: what was drawn under the old base and not sent yet, or a plea for the prefix."""

    def close(self, key: K) -> None:
        """Forget a tree; a key that is not open is ignored."""

    def level(self) -> list[tuple[K, Grow]]:
        """Grow; the frames it makes."""


class Heard(Enum):
    """What a commit means for a replica."""

    NEWS = "news"  # it advances the truth
    KNOWN = "known"  # a repetition
    LOST = "lost"  # it does not fit: the prefix must be sent again


def heard(tree: LivingTree, message: Commit) -> Heard:
    """How a commit fits what the tree believes to be committed."""
    if message.base_len < tree.length and message.base_len + len(message.tokens) <= tree.length:
        return Heard.KNOWN
    hash_after = tree.hash
    for token in message.tokens:
        hash_after = extend_hash(hash_after, token)
    fits = message.base_len == tree.length and message.hash_after == hash_after
    return Heard.NEWS if fits else Heard.LOST


def shape_fault(message: Open, most_nodes: int) -> str:
    """What is wrong with the size of the tree an Open asks for; "" if nothing is."""
    shape = {name: getattr(message, name) for name in ("node_cap", "max_depth", "topk", "num_atoms")}
    if message.prefix and min(shape.values()) >= 1 and sum(message.caps) <= most_nodes:
        return ""
    return f"prefix of {len(message.prefix)} tokens, {shape}, ahead_cap {message.ahead_cap}: out of range"


def largest_token(message: Open) -> int:
    """Of all that a draft model is told about: its text, and the tokens that its rows favour or allow."""
    sampling = message.sampling
    return max((*message.prefix, *sampling.allowed_token_ids, *(token for token, _ in sampling.logit_bias)))
