"""The token tree: what a drafter proposes and a verifier decides about.

Node 0 is the root, the last committed token. `parent[i] < i`, so index order is a draw order and parents come first;
siblings are tried in index order. Row i of any table over a tree is the law of what FOLLOWS node i.

Legend: N nodes (root included).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import ArrayLike

from rootward.core.arrays import Bools, Ints, integers, read_only


@dataclass(frozen=True, init=False, eq=False)
class TokenTree:
    """An immutable token tree.

    token    int64[N]  token of each node; token[0] is ignored
    parent   int64[N]  parent[0] = -1, 0 <= parent[i] < i
    sampled  bool[N]   True: drawn from its parent's row; False: chosen; sampled[0] is ignored

    Two trees are equal if they propose the same nodes in the same order (root token and root flag aside).
    """

    token: Ints
    parent: Ints
    sampled: Bools

    def __init__(self, token: ArrayLike, parent: ArrayLike, sampled: ArrayLike) -> None:
        tokens, parents, flags = integers("token", token), integers("parent", parent), np.array(sampled)
        if flags.ndim != 1 or (flags.size and flags.dtype.kind != "b" and not np.isin(flags, (0, 1)).all()):
            raise ValueError(f"sampled: {flags.dtype} of shape {flags.shape}; give one boolean per node")
        flags = flags.astype(np.bool_)
        _check(tokens, parents, flags)
        for name, array in (("token", tokens), ("parent", parents), ("sampled", flags)):
            object.__setattr__(self, name, read_only(array))

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.token)

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, TokenTree) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)

    @cached_property
    def _identity(self) -> tuple[bytes, bytes, bytes]:
        return self.token[1:].tobytes(), self.parent.tobytes(), self.sampled[1:].tobytes()

    @cached_property
    def depth(self) -> Ints:
        """int64[N]: number of draft tokens on the path to each node; 0 at the root."""
        depths = [0] * len(self)
        for node, parent in enumerate(self.parent.tolist()[1:], start=1):
            depths[node] = depths[parent] + 1
        return read_only(np.array(depths, dtype=np.int64))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node in draw order."""
        families: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parent.tolist()[1:], start=1):
            families[parent].append(node)
        return tuple(map(tuple, families))

    @cached_property
    def post_order(self) -> Ints:
        """int64[N]: children in draw order, each with its whole subtree, then the parent; the root is last."""
        order: list[int] = []
        stack = [0]
        while stack:  # root first, later siblings first: the reverse of post-order
            node = stack.pop()
            order.append(node)
            stack.extend(self.children[node])
        return read_only(np.array(order[::-1], dtype=np.int64))

    @cached_property
    def ancestors(self) -> Bools:
        """bool[N, N]: [i, j] is True if j lies on the path from the root to i, both ends included (attention mask)."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parent.tolist()[1:], start=1):
            mask[node] |= mask[parent]
        return read_only(mask)

    def path(self, node: int) -> tuple[int, ...]:
        """The draft tokens from the root (excluded) to the node (included)."""
        tokens: list[int] = []
        while node != 0:
            tokens.append(int(self.token[node]))
            node = int(self.parent[node])
        return tuple(reversed(tokens))

    def first(self, num_nodes: int) -> TokenTree:
        """The tree of the first nodes in draw order (the root counts): a cut that keeps what was drawn before it."""
        if not 1 <= num_nodes <= len(self):
            raise ValueError(f"num_nodes: {num_nodes} of {len(self)}; keep at least the root and at most the tree")
        return TokenTree(self.token[:num_nodes], self.parent[:num_nodes], self.sampled[:num_nodes])


@cache
def root_only() -> TokenTree:
    """The tree without draft nodes, for a round that decodes one token. Cached, since rounds of plain decoding ask for it several times."""
    return TokenTree([0], [-1], [False])


def _check(token: Ints, parent: Ints, sampled: Bools) -> None:
    if not len(token) == len(parent) == len(sampled):
        lengths = f"{len(token)}, {len(parent)}, {len(sampled)}"
        raise ValueError(f"token, parent, sampled: lengths {lengths}; give one each per node")
    if len(parent) == 0 or parent[0] != -1:
        raise ValueError(f"parent: starts with {parent[:1].tolist()}; node 0 is the root and its parent is -1")
    misplaced = np.flatnonzero((parent[1:] < 0) | (parent[1:] >= np.arange(1, len(parent))))
    if misplaced.size:
        node = int(misplaced[0]) + 1
        raise ValueError(f"parent: node {node} has parent {parent[node]}; parents come first, 0 <= parent[i] < i")
    if (token[1:] < 0).any():
        node = int(np.argmax(token[1:] < 0)) + 1
        raise ValueError(f"token: node {node} has token {token[node]}; token ids are not negative")
