"""What the nodes of a tree are worth: how often the one drawn as number 1, 2, … lay on the accepted path."""

from __future__ import annotations

from collections.abc import Iterable

LEAST_WEIGHT = 0.01  # of the newest round: late nodes are accepted rarely
# Worth of the first node before anything was seen, and of each further one against the one before; a little hopeful.
PRIOR = (0.5, 0.72)
PRIOR_ROUNDS = 3  # rounds that the prior counts for


class Worth:
    """Learned from verdicts. A cut to n nodes would have kept the accepted ones among the first n: so one round tells about every smaller
    cap as well."""

    def __init__(self) -> None:
        self._hits: list[float] = []
        self._rounds: list[int] = []

    def add(self, cap: int, path: Iterable[int]) -> None:
        """A round of at most `cap` nodes accepted those numbered `path`."""
        self._extend(cap)
        accepted = set(path)
        for i in range(cap):
            weight = max(LEAST_WEIGHT, 1.0 / (self._rounds[i] + 1))
            self._hits[i] += weight * ((i + 1 in accepted) - self._hits[i])
            self._rounds[i] += 1

    def tokens(self, most: int) -> list[float]:
        """Expected tokens of a round of at most 0, 1, …, `most` nodes, the bonus token included."""
        self._extend(most)
        found = [1.0]
        for hits in self._hits[:most]:
            found.append(found[-1] + hits)
        return found

    def _extend(self, size: int) -> None:
        first, share = PRIOR
        for i in range(len(self._hits), size):
            self._hits.append(first * share**i)
            self._rounds.append(PRIOR_ROUNDS)
