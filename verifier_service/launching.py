"""When a round stops waiting for more of its tree (protocol.md 1.3): a pure function, and the forecast it is given.

A round with n nodes gives E(n) tokens. Launched t after the last commit it is over t_v later, so it gives E(n)/(t + t_v) a second. Waiting
for more pays while some later moment promises a larger quotient; in the limit, while dE/dt > E/(t + t_v).

E is learned from past rounds, arrival times from past rounds and clocks. How many nodes have arrived is looked at as well, which is a
stopping time of the draws: whatever has arrived when the wait ends, up to a cap that was fixed before, is verified, all of it. That is
what makes it lossless under ratio tests (algorithms.md 6.1, L2). To decode plainly instead, or to verify less, would not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 0.2  # weight of the newest growth


@dataclass(slots=True)
class Pace:
    """How fast a drafter answers. first_s: from a commit to the first growth below its root; node_s: from one node to the next."""

    first_s: float = 0.0
    node_s: float = 0.0

    def began(self, seconds: float) -> None:
        """The first growth since a commit has come."""
        self.first_s += (MEMORY if self.first_s else 1.0) * (seconds - self.first_s)

    def went_on(self, seconds: float, nodes: int) -> None:
        """So many nodes more, so long after those before."""
        self.node_s += (MEMORY if self.node_s else 1.0) * (seconds / nodes - self.node_s)


def launch_s(
    arrived: int, since_s: float, *, tokens: Sequence[float], verify_s: float, next_s: float, node_s: float
) -> float:
    """When to launch a round with `arrived` nodes, the last of which came since_s after the commit, if no more arrive.

    tokens: expected with 0, 1, …, cap nodes. next_s, node_s: when the next node is due, and each one after it. Times in seconds after
    the commit. What is returned is since_s where nothing that is due is worth its wait; else the moment after which even the best of
    it would not have been. With nothing there the forecast is not asked: a drafter that was slow once must not be despaired of.
    """
    cap = len(tokens) - 1
    if arrived >= cap:
        return since_s
    best, rate = (cap, 0.0) if not arrived else (arrived, tokens[arrived] / (since_s + verify_s))
    due_s = max(since_s, next_s)
    for nodes in range(arrived + 1, cap + 1) if arrived else ():
        if (promised := tokens[nodes] / (due_s + verify_s)) > rate:
            best, rate = nodes, promised
        due_s += node_s
    if best == arrived:
        return since_s
    return (since_s + verify_s) * tokens[best] / tokens[arrived] - verify_s
