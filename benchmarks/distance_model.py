"""What distance costs, in closed form (protocol.md 1.3): tokens per second against round-trip time.

    t_v  seconds of a verify step     t_1  seconds of a plain step      D    seconds to grow a tree once its root is known
    E    tokens of a whole tree       r    round-trip time              h    share of rounds whose root had been guessed
    E_k  tokens of the tree that a right guess kept

    plain                 1 / t_1
    wait for each tree    E / (t_v + r + D)                 the truth travels there, the tree back, every round
    living tree           (h·E_g + (1 − h)·E) / (h·T_g + (1 − h)·(t_v + r + D))

A guessed root has been growing while the target verified: its tree is launched as it is, E_g = E_k and T_g = t_v, where that promises
more tokens a second than waiting for the rest of it, E and t_v + r + D (the launch rule, which is `E/t` at its largest). So at a large
distance the living tree loses what its kept trees lack, and h of the way; it is never slower than waiting for each tree.
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
    kept_tokens: float

    def plain(self) -> float:
        return 1.0 / self.plain_s

    def waiting(self, rtt_s: float) -> float:
        return self.tokens / self._whole_s(rtt_s)

    def living(self, rtt_s: float) -> float:
        tokens, seconds = self.tokens, self._whole_s(rtt_s)
        guessed = self.kept_tokens, self.verify_s
        if guessed[0] / guessed[1] < tokens / seconds:
            guessed = tokens, seconds
        hit = self.hit
        return (hit * guessed[0] + (1.0 - hit) * tokens) / (hit * guessed[1] + (1.0 - hit) * seconds)

    def _whole_s(self, rtt_s: float) -> float:
        """A round that waits for a whole tree below its root."""
        return self.verify_s + rtt_s + self.tree_s


def fitted(
    *, plain_rate: float, verify_s: float, waiting_rate: float, waiting_tokens: float, living_tokens: float, hit: float
) -> Fit:
    """From tokens per second and per round at zero distance, and the share of roots that had been guessed there. verify_s is what the
    target was told to take."""
    tree_s = max(0.0, waiting_tokens / waiting_rate - verify_s)
    kept = (living_tokens - (1.0 - hit) * waiting_tokens) / hit if hit else waiting_tokens
    return Fit(1.0 / plain_rate, verify_s, tree_s, waiting_tokens, hit, min(max(kept, 1.0), waiting_tokens))
