"""How long a round waits for the nodes of a drafter that are still to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PACE_MEMORY = 0.2  # weight of the newest growth in the pace of a drafter


@dataclass(slots=True)
class DraftPace:
    """How fast a drafter answers. first_s: from a commit to the first growth below its root.

    Small trees grow deep: a level, which takes one draft forward, has one node of a tree of 5 and four of a tree of 15. So the time from
    one node to the next is learned by the size of the tree."""

    first_s: float = 0.0
    _node_s: dict[int, float] = field(default_factory=dict)

    def node_s(self, size: int) -> float:
        """Seconds from one node to the next in a tree of `size` nodes, or of the nearest size that was grown; 0: nothing is known."""
        if not self._node_s:
            return 0.0
        return self._node_s[min(self._node_s, key=lambda grown: abs(grown - size))]

    def on_first_growth(self, seconds: float) -> None:
        """The first growth since a commit came after so long."""
        self.first_s += (PACE_MEMORY if self.first_s else 1.0) * (seconds - self.first_s)

    def on_more_growth(self, seconds: float, nodes: int, size: int) -> None:
        """So many nodes more, so long after those before, of a tree that is to have `size`."""
        known = self._node_s.get(size, seconds / nodes)
        self._node_s[size] = known + PACE_MEMORY * (seconds / nodes - known)


def launch_time(
    arrived: int, since_s: float, *, tokens: Sequence[float], verify_s: float, next_s: float, node_s: float
) -> float:
    """When to launch a round with `arrived` nodes, the last of which came since_s after the commit, if no more arrive.

    A round with n nodes that is launched t after the commit gives E(n) / (t + verify_s) tokens a second; waiting pays while a later moment
    promises more. The number of arrived nodes may end the wait, a stopping time of the draws, since all of them are verified then, up to
    a limit that was fixed before; to verify fewer, or to decode plainly instead, would be biased (algorithms.md 6.1, L2).

    tokens: expected with 0, 1, ..., target_nodes nodes. next_s, node_s: when the next node is due, and each one after it. All times in
    seconds after the commit. Returns since_s where nothing that is due is worth its wait; else the moment after which even the best of it
    would not have been. With no nodes the pace is not asked: a drafter that was slow once must not be given up.
    """
    target_nodes = len(tokens) - 1
    if arrived >= target_nodes:
        return since_s
    if not arrived:
        return (since_s + verify_s) * tokens[target_nodes] / tokens[0] - verify_s
    best, rate = arrived, tokens[arrived] / (since_s + verify_s)
    due_s = max(since_s, next_s)
    for nodes in range(arrived + 1, target_nodes + 1):
        if (promised := tokens[nodes] / (due_s + verify_s)) > rate:
            best, rate = nodes, promised
        due_s += node_s
    if best == arrived:
        return since_s
    return (since_s + verify_s) * tokens[best] / tokens[arrived] - verify_s
