"""What a drafter without a model looks things up in."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

State = Hashable  # where a source stands after a text; equal states have equal futures


class Candidate(NamedTuple):
    """A likely next token and a guess of its probability, in (0, 1)."""

    token: int
    score: float


class Source(Protocol):
    """Follows one text and names likely continuations.

    States are of the source's own kind and valid until the next `extend`. Since equal states have equal candidates, branches of a tree that
    meet in one state share what is looked up: the tree is an unfolded graph (2407.16207).
    """

    def extend(self, tokens: Sequence[int]) -> None:
        """The text has grown by these tokens."""

    def start(self) -> Any:
        """The state after the whole text."""

    def step(self, state: Any, token: int) -> Any:
        """The state after one more token, whatever it is."""

    def candidates(self, state: Any) -> Sequence[Candidate]:
        """Likely next tokens, each once, best score first."""


class Merged:
    """Several sources as one: the union of their candidates, each token with its best score. Ties: the earlier source first."""

    def __init__(self, sources: Sequence[Source]) -> None:
        if not sources:
            raise ValueError("sources: none; give at least one")
        self.sources = tuple(sources)

    def extend(self, tokens: Sequence[int]) -> None:
        for source in self.sources:
            source.extend(tokens)

    def start(self) -> tuple[State, ...]:
        return tuple(source.start() for source in self.sources)

    def step(self, state: tuple[State, ...], token: int) -> tuple[State, ...]:
        return tuple(source.step(own, token) for source, own in zip(self.sources, state, strict=True))

    def candidates(self, state: tuple[State, ...]) -> list[Candidate]:
        best: dict[int, float] = {}
        for source, own in zip(self.sources, state, strict=True):
            for token, score in source.candidates(own):
                best[token] = max(score, best.get(token, 0.0))
        return by_score(best)


def by_score(scores: dict[int, float]) -> list[Candidate]:
    """Candidates in order of decreasing score; ties keep the order of the dictionary."""
    return sorted((Candidate(token, score) for token, score in scores.items()), key=lambda c: -c.score)
