"""How long the engine stands idle for a tree, by its nodes: a line through the rounds that waited, with a fading memory.

A drafter grows in levels and draws more at a time where more may be verified, so twice the nodes seldom take twice the time: with our
drafters 16 come hardly later than 8. How much longer they take is seen only if rounds differ (`PROBE_EVERY` in `gain.py` sees to that).
What is not seen yet is taken to lie between: half of what it would be if every node took as long.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVEL = 2  # nodes whose time passes before the first of them, if every node takes as long
MEMORY = 0.04  # weight of the newest round
YOUNG, OUTLIER = 5, 3.0  # after so many rounds one that took longer than so many times the expected counts as that long
KEPT = 0.04  # and of whether it waited at all
STIFF = 2.0  # nodes², what the slope that is not known yet weighs against the spread of rounds


@dataclass(slots=True)
class GrowthCost:
    """waits: share of rounds with trees that waited for growth; the others were launched with what a right guess had kept."""

    waits: float = 1.0
    _count: int = 0
    _nodes: float = 0.0
    _idle_s: float = 0.0
    _spread: float = 0.0
    _together: float = 0.0

    def add(self, nodes: int, idle_s: float) -> None:
        """A round waited for so many nodes; the engine stood idle for so long."""
        self.waits += KEPT * (1.0 - self.waits)
        if self._count >= YOUNG:
            idle_s = min(idle_s, OUTLIER * self.seconds(nodes))
        self._count += 1
        weight = max(MEMORY, 1.0 / self._count)
        more, longer = nodes - self._nodes, idle_s - self._idle_s
        self._nodes += weight * more
        self._idle_s += weight * longer
        self._spread = (1.0 - weight) * (self._spread + weight * more * more)
        self._together = (1.0 - weight) * (self._together + weight * more * longer)

    def kept(self) -> None:
        """A round was launched with what had been kept."""
        self.waits -= KEPT * self.waits

    def seconds(self, nodes: int) -> float:
        """Expected for a round that waits for so many nodes; 0 while nothing is known."""
        usual = self._idle_s / (self._nodes + LEVEL) / 2
        slope = max(0.0, (self._together + STIFF * usual) / (self._spread + STIFF))
        least = self._idle_s * (min(nodes, self._nodes) + LEVEL) / (self._nodes + LEVEL) / 2
        return max(least, self._idle_s + slope * (nodes - self._nodes))
