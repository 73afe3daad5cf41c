"""Continuations of earlier occurrences of what was just said (prompt lookup).

The context is the longest suffix of the text that has ended somewhere earlier, then the shorter ones along the suffix links. Scores are
those of prediction by partial matching (Cleary and Witten 1984; its method C) with longer contexts trusted more:

    context of length ℓ, seen N times with d different successors:   score(x) = share·(1 − e)·n_x / N,   e = d / (d + ℓ·N)
    what is left for the next shorter context:                       share ← share·e
"""

from __future__ import annotations

from collections.abc import Sequence

from rootward.core.drafting.lookup.automaton import SuffixAutomaton
from rootward.core.drafting.lookup.source import Candidate, by_score

Match = tuple[int, int]  # state of the automaton, length of the string

MOST_COUNTED = 32  # occurrences of a continuation that are told apart
MOST_FOLLOWERS = 64  # of one context that are counted: those that first followed last


class Ngram:
    """contexts: how many contexts, longest first, name candidates."""

    def __init__(self, contexts: int = 3) -> None:
        if contexts < 1:
            raise ValueError(f"contexts: {contexts}; look at one context at least")
        self.contexts = contexts
        self.automaton = SuffixAutomaton()

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.automaton.append(token)

    def start(self) -> Match:
        state = self.automaton.repeated_suffix
        return state, self.automaton.length(state)

    def step(self, state: Match, token: int) -> Match:
        return self.automaton.step(*state, token)

    def candidates(self, state: Match) -> list[Candidate]:
        found: dict[int, float] = {}
        (here, length), share, left = state, 1.0, self.contexts
        while here > 0 and left:
            if counts := self._counts(here):  # none: it has ended the text only
                total = sum(count for count, _ in counts.values())
                escape = len(counts) / (len(counts) + length * total)
                for token, (count, _) in sorted(counts.items(), key=lambda item: item[1], reverse=True):
                    found.setdefault(token, share * (1.0 - escape) * count / total)
                share *= escape
                left -= 1
            here = self.automaton.link(here)
            length = self.automaton.length(here)
        return by_score(found)

    def _counts(self, state: int) -> dict[int, tuple[int, int]]:
        """Token → (how often it followed, where it did so last)."""
        followers = self.automaton.followers(state, MOST_FOLLOWERS)
        ends = {token: self.automaton.ends(after, MOST_COUNTED) for token, after in followers}
        return {token: (len(places), max(places)) for token, places in ends.items()}
