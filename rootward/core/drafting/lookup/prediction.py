"""A text that the output is expected to follow, such as the file that an edit changes in a few places.

As long as the output agrees, the cursor moves through the prediction. After a difference it looks for the end of the output in the
prediction (suffix automaton) and goes on there; until enough of it is found, it guesses that one token was replaced, or inserted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rootward.core.drafting.lookup.automaton import SuffixAutomaton
from rootward.core.drafting.lookup.source import Candidate

MOST_PLACES = 64  # occurrences among which the next place is chosen


class Cursor(NamedTuple):
    """at: positions of the prediction that may come next, the likeliest first. agreed: tokens in a row that did.
    reached: the position after the last one that did. state, length: the longest end of the output that occurs in the prediction."""

    at: tuple[int, ...]
    agreed: int
    reached: int
    state: int
    length: int


class Prediction:
    """prediction: the expected output. prefix: how many tokens of the text come before; if their end occurs in the prediction, the output
    may be under way already. least_match: tokens that must agree before a new place is believed.
    """

    def __init__(self, prediction: Sequence[int], *, prefix: int = 0, least_match: int = 2) -> None:
        if least_match < 1:
            raise ValueError(f"least_match: {least_match}; ask for one token at least")
        self.text, self.least_match = tuple(prediction), least_match
        self._automaton = SuffixAutomaton(self.text)
        self._prefix_left = prefix
        self._cursor = Cursor((0,), 0, 0, 0, 0)

    def extend(self, tokens: Sequence[int]) -> None:
        before, self._prefix_left = tokens[: self._prefix_left], max(0, self._prefix_left - len(tokens))
        if before:
            self._cursor = self._begin(before, self._cursor)
        for token in tokens[len(before) :]:
            self._cursor = self.step(self._cursor, token)

    def _begin(self, before: Sequence[int], state: Cursor) -> Cursor:
        """The beginning, or where the end of the prefix occurs."""
        found, length = state.state, state.length
        for token in before:
            found, length = self._automaton.step(found, length, token)
        under_way = self._places(found, 0)[:1] if length >= self.least_match else []
        return Cursor(tuple(dict.fromkeys([*under_way, 0])), length if under_way else 0, 0, found, length)

    def start(self) -> Cursor:
        return self._cursor

    def step(self, state: Cursor, token: int) -> Cursor:
        found, length = self._automaton.step(state.state, state.length, token)
        agreeing = tuple(at + 1 for at in state.at if at < len(self.text) and self.text[at] == token)
        if agreeing:
            return Cursor(agreeing, state.agreed + 1, agreeing[0], found, length)
        if length >= self.least_match:
            at = self._places(found, state.reached)[0]
            return Cursor((at,), length, at, found, length)
        replaced, inserted = min(state.at[0] + 1, len(self.text)), state.at[0]
        return Cursor((replaced, inserted), 0, state.reached, found, length)

    def candidates(self, state: Cursor) -> list[Candidate]:
        """The guess that a place is right grows with what has agreed: (n + 1)/(n + 2); further places share the rest."""
        found: dict[int, float] = {}
        share, trust = 1.0, (state.agreed + 1) / (state.agreed + 2)
        for at in state.at:
            if at < len(self.text):
                found.setdefault(self.text[at], share * trust)
                share *= 1.0 - trust
        return [Candidate(token, score) for token, score in found.items()]

    def _places(self, state: int, here: int) -> list[int]:
        """Positions after the occurrences of a state: the nearest ahead of `here` first, then those behind."""
        places = [end + 1 for end in self._automaton.ends(state, MOST_PLACES)]
        return sorted(places, key=lambda at: (at < here, abs(at - here)))
