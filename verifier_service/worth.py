"""What the nodes of a tree are worth: how often the one drawn as number 1, 2, … lay on the accepted path."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

LEAST_WEIGHT = 0.01  # of the newest round: late nodes are accepted rarely
# Worth of the first node before anything was seen, and of each further one against the one before: never less than DECAY of it, nor more
# than SLOWEST, whatever the order of a tree suggests.
FIRST, DECAY, SLOWEST = 0.5, 0.72, 0.95
PRIOR_ROUNDS = 12  # that such an expectation counts for
PRIOR_DECAY = 3.0  # accepted nodes that DECAY counts for


class Worth:
    """Learned from verdicts. A cut to n nodes would have kept the accepted ones among the first n: so one round tells about every smaller
    cap as well. Nodes of which little was seen are expected to fall off as the others do, or by DECAY if that is less: what is hoped for
    is tried, and what is tried is known."""

    def __init__(self) -> None:
        self._accepted: list[float] = []  # share of the rounds that had the node
        self._rounds: list[int] = []

    def add(self, cap: int, path: Iterable[int]) -> None:
        """A round of at most `cap` nodes accepted those numbered `path`."""
        self._extend(cap)
        accepted = set(path)
        for i in range(cap):
            self._rounds[i] += 1
            weight = max(LEAST_WEIGHT, 1.0 / self._rounds[i])
            self._accepted[i] += weight * ((i + 1 in accepted) - self._accepted[i])

    def tokens(self, most: int) -> list[float]:
        """Expected tokens of a round with the first 0, 1, …, `most` nodes of such trees, the bonus token included."""
        return list(accumulate(self._nodes(most), initial=1.0))

    def tokens_of_trees(self, most: int) -> list[float]:
        """The same of rounds with trees of 0, 1, …, `most` nodes: a drafter that may draw fewer draws the better ones, deep instead of
        wide, so the best of the nodes count, whatever number they had in a larger tree."""
        best_first = sorted(self._nodes(max(most, len(self._rounds))), reverse=True)
        return list(accumulate(best_first[:most], initial=1.0))

    def _nodes(self, most: int) -> list[float]:
        """What each node is worth, by its number."""
        self._extend(most)
        found: list[float] = []
        expected, decay = FIRST, max(DECAY, self._decay())
        for accepted, rounds in zip(self._accepted[:most], self._rounds, strict=False):
            seen = rounds / (rounds + PRIOR_ROUNDS)
            found.append(expected + seen * (accepted - expected))
            expected = decay * found[-1]
        return found

    def _decay(self) -> float:
        """Worth of a node against that of the one before."""
        weight = [min(rounds, 1.0 / LEAST_WEIGHT) for rounds in self._rounds[1:]]
        after = sum(w * a for w, a in zip(weight, self._accepted[1:], strict=True))
        before = sum(w * a for w, a in zip(weight, self._accepted, strict=False))
        return min(SLOWEST, (PRIOR_DECAY * DECAY + after) / (PRIOR_DECAY + before))

    def _extend(self, size: int) -> None:
        more = size - len(self._rounds)
        self._accepted += [0.0] * more
        self._rounds += [0] * more
