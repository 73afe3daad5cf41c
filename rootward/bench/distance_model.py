"""What distance costs, in closed form (protocol.md 1.3): tokens per second against round-trip time.

    t_v  seconds of a verify step        t_1  seconds of a plain step         D   seconds to grow a tree once its root is known
    E    tokens per round                r    round-trip time                 h   share of rounds whose root had been guessed

    plain                 1 / t_1
    wait for each tree    E / (t_v + r + D)                    the truth travels there, the tree back, every round
    living tree           E / (h·max(t_v, D) + (1 − h)·(t_v + min(r + D, w)))

A guessed root has been growing while the target verified, so distance costs nothing there. Any other root costs what waiting for each tree
costs, but never more than the patience w that pays, after which the round is plain.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """Measured where the distance is zero; everything else is predicted."""

    plain_s: float
    verify_s: float
    tree_s: float
    tokens: float
    hit: float

    def plain(self) -> float:
        return 1.0 / self.plain_s

    def waiting(self, rtt_s: float) -> float:
        return self.tokens / (self.verify_s + rtt_s + self.tree_s)

    def living(self, rtt_s: float) -> float:
        hit_s = max(self.verify_s, self.tree_s)
        return self.tokens / (self.hit * hit_s + (1.0 - self.hit) * (self.verify_s + rtt_s + self.tree_s))


def fitted(
    *, plain_rate: float, verify_s: float, waiting_rate: float, waiting_tokens: float, living_rate: float, tokens: float
) -> Fit:
    """From tokens per second and tokens per round at zero distance; verify_s is what the target was told to take."""
    tree_s = max(0.0, waiting_tokens / waiting_rate - verify_s)
    round_s, missed_s, hit_s = tokens / living_rate, verify_s + tree_s, max(verify_s, tree_s)
    hit = (missed_s - round_s) / (missed_s - hit_s) if missed_s > hit_s else 1.0
    return Fit(1.0 / plain_rate, verify_s, tree_s, tokens, min(max(hit, 0.0), 1.0))
