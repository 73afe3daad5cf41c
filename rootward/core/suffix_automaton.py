"""A suffix automaton that grows with its text (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985).

A state is a class of substrings that end at the same positions of the text; state 0 is the empty string. The longest string of a class
represents it, the others are suffixes of it, and the *link* of a state is its longest suffix that ends at more positions, the next shorter
context. Links form a tree in which every position of the text is one state that is not a copy, so the end positions of a string are those
below its state. There are at most two states per token; appending costs O(1) amortised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

COPY = -1  # end position of a state that was split off another one


class SuffixAutomaton:
    """All substrings of a token sequence that can be appended to."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest string of the state
        self._end = [COPY]  # position of the last token of the prefix that made the state
        self._below: list[list[int]] = [[]]  # states that link here
        self._place = [0]  # index in the list of the state it links to
        self._whole = 0  # the state of the whole text
        self._size = 0
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        """Tokens of the text."""
        return self._size

    @property
    def repeated_suffix(self) -> int:
        """State of the longest suffix of the text that also occurs earlier; 0 if there is none."""
        return max(self._link[self._whole], 0)

    def length(self, state: int) -> int:
        """Tokens of the longest string of a state."""
        return self._length[state]

    def link(self, state: int) -> int:
        """The longest suffix that ends at more places; of 0: -1."""
        return self._link[state]

    def followers(self, state: int, limit: int) -> list[tuple[int, int]]:
        """(token, state after it) of at most `limit` continuations: those whose first occurrence is latest."""
        return list(islice(reversed(self._next[state].items()), limit))

    def append(self, token: int) -> None:
        """Append one token to the text."""
        whole = self._state(self._length[self._whole] + 1, {}, end=self._size)
        self._size += 1
        state, self._whole = self._whole, whole
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = whole
            state = self._link[state]
        self._hang(whole, self._longest_before(state, token) if state >= 0 else 0)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of (a string + token) that occurs in the text: its state and length.

        state, length: of the string, where length may be shorter than the longest string of the state.
        """
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        found = self._next[state].get(token)
        return (0, 0) if found is None else (found, length + 1)

    def ends(self, state: int, limit: int) -> list[int]:
        """At most `limit` positions at which the strings of a state end, all of them if there are no more; O(limit)."""
        found: list[int] = []
        stack: list[Iterator[int]] = [iter((state,))]
        while stack and len(found) < limit:
            here = next(stack[-1], None)
            if here is None:
                stack.pop()
                continue
            if self._end[here] != COPY:
                found.append(self._end[here])
            stack.append(reversed(self._below[here]))  # the newest first; a copy has two at least, so this is short
        return found

    # -- construction -------------------------------------------------------------------------------------------------

    def _longest_before(self, state: int, token: int) -> int:
        """The state for exactly (longest string of `state`) + token, split off the state that holds it if need be."""
        held = self._next[state][token]
        if self._length[held] == self._length[state] + 1:
            return held
        copy = self._state(self._length[state] + 1, dict(self._next[held]), end=COPY)
        above = self._link[held]
        self._link[copy], self._place[copy] = above, self._place[held]
        self._below[above][self._place[held]] = copy  # takes the place of what now hangs below it
        self._hang(held, copy)
        while state >= 0 and self._next[state].get(token) == held:
            self._next[state][token] = copy
            state = self._link[state]
        return copy

    def _state(self, length: int, following: dict[int, int], *, end: int) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        self._below.append([])
        self._place.append(0)
        return len(self._link) - 1

    def _hang(self, state: int, above: int) -> None:
        self._link[state], self._place[state] = above, len(self._below[above])
        self._below[above].append(state)
