"""Token Recycling: the last successors of every token ("Turning Trash into Treasure", 2408.08696).

The paper keeps, for each token, the k likeliest next tokens of the last time the target saw it, and unfolds this matrix along a fixed
tree of ranks. A drafter sees no logits, only what was committed; so a row here holds the k last *different* tokens that followed, the
newest first. Score by rank: a(1 − a)^rank, under which best-first growth unfolds one fixed tree of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from rootward.core.drafting.lookup.source import Candidate

WIDTH = 8  # k of the paper
NOTHING = -1  # before the first token


class Successors:
    """The matrix: token → its last successors, newest first. May be shared by many texts of one vocabulary."""

    def __init__(self, width: int = WIDTH) -> None:
        if width < 1:
            raise ValueError(f"width: {width}; remember one successor at least")
        self.width = width
        self._rows: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Tokens that have a row."""
        return len(self._rows)

    def row(self, token: int) -> Sequence[int]:
        return self._rows.get(token, ())

    def see(self, token: int, successor: int) -> None:
        row = self._rows.setdefault(token, [])
        if successor in row:
            row.remove(successor)
        row.insert(0, successor)
        del row[self.width :]

    def replace(self, token: int, successors: Sequence[int]) -> None:
        """The target's own most likely successors, best first: the update of "Turning Trash into Treasure" (2408.08696)."""
        self._rows[token] = list(successors[: self.width])


class Recycling:
    """Reads one memory and writes to any number of them.

    acceptance  a: the guess that the newest successor is right
    also        memories that learn from this text without being read for it
    """

    def __init__(self, memory: Successors, acceptance: float = 0.5, also: Sequence[Successors] = ()) -> None:
        if not 0 < acceptance < 1:
            raise ValueError(f"acceptance: {acceptance} is outside (0, 1)")
        self.memory, self.acceptance = memory, acceptance
        self._learning = (memory, *also)
        self._last = NOTHING

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._last != NOTHING:
                for memory in self._learning:
                    memory.see(self._last, token)
            self._last = token

    def replace(self, token: int, successors: Sequence[int]) -> None:
        """The target's own most likely successors of a token, best first."""
        for memory in self._learning:
            memory.replace(token, successors)

    def start(self) -> int:
        return self._last

    def step(self, state: int, token: int) -> int:
        return token

    def candidates(self, state: int) -> list[Candidate]:
        a = self.acceptance
        return [Candidate(token, a * (1.0 - a) ** rank) for rank, token in enumerate(self.memory.row(state))]
